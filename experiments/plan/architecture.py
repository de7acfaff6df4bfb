"""模型的算术：参数量、每 token 的 FLOPs、KV 缓存，精确到个位。只用标准库。

一个 `Architecture` 描述 Transformer 解码器的形状：本书的 GPT、GPT-2、Llama 一族（GQA、SwiGLU、
共享或不共享输出头）。来源可以是若干数字、一个预设名，或 Hugging Face 的 config.json。
这里**没有**：混合专家（MoE）、MLA、编码器—解码器结构；遇到时明确拒绝，不给近似数。
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path


class BudgetError(ValueError):
    """给的数没有意义，或计划无法实现；消息是一句给使用者看的话。"""


@dataclass(frozen=True)
class Architecture:
    """解码器的形状。单位都是个数；`None` 表示由别的字段推出。

    Raises:
        BudgetError: 尺寸不是正整数，或注意力头分不均。
    """

    d_model: int
    n_layer: int
    n_head: int
    vocab_size: int
    seq_len: int
    mlp_width: int | None = None  # None：本书的 SwiGLU 宽度 int(8d/3)//32*32
    n_kv_head: int | None = None  # GQA 的 K、V 头数；None：与 n_head 相同
    head_dim: int | None = None  # None：d_model / n_head
    gated: bool = True  # SwiGLU：三个矩阵；否则（GELU）两个
    tied: bool = True  # 输出头与词嵌入共享
    learned_positions: bool = False  # 可学的位置表（GPT-2）；RoPE 没有参数
    bias: bool = False  # 所有线性层与归一化都带偏置（GPT-2）
    qkv_bias: bool = False  # 只有 Q、K、V 带偏置（Qwen 1.5/2）
    qk_norm: bool = False  # 每个头的 Q、K 再归一化（Qwen 3）
    norms_per_layer: int = 2

    def __post_init__(self) -> None:
        sizes = ("d_model", "n_layer", "n_head", "vocab_size", "seq_len")
        for name in (*sizes, "mlp_width", "n_kv_head", "head_dim"):
            value = getattr(self, name)
            if value is None and name not in sizes:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise BudgetError(f"{name} = {value!r}：要一个正整数。")
        if self.head_dim is None and self.d_model % self.n_head:
            raise BudgetError(
                f"d_model = {self.d_model} 不能被 n_head = {self.n_head} 整除；"
                "换一个头数，或用 head_dim 写明每个头的维数。"
            )
        if self.n_head % self.kv_heads:
            raise BudgetError(f"n_head = {self.n_head} 要是 n_kv_head = {self.kv_heads} 的倍数。")

    @property
    def kv_heads(self) -> int:
        return self.n_kv_head or self.n_head

    @property
    def q_width(self) -> int:
        """所有 Q 头拼起来的宽度 H·Q；多数模型里等于 d_model。"""
        return self.n_head * (self.head_dim or self.d_model // self.n_head)

    @property
    def kv_width(self) -> int:
        return self.q_width // self.n_head * self.kv_heads

    @property
    def mlp(self) -> int:
        return self.mlp_width or max(1, int(8 * self.d_model / 3) // 32 * 32)

    def layer_matrices(self) -> dict[str, int]:
        """一层里每组矩阵的参数量（不含偏置）。"""
        d = self.d_model
        return {
            "qkv": d * (self.q_width + 2 * self.kv_width),
            "attn_out": self.q_width * d,
            "mlp_in": (2 if self.gated else 1) * d * self.mlp,
            "mlp_out": self.mlp * d,
        }

    def layer_params(self) -> int:
        """一层的全部参数：矩阵、归一化、偏置。"""
        d, q, kv, m = self.d_model, self.q_width, self.kv_width, self.mlp
        norms = self.norms_per_layer * d * (2 if self.bias else 1)
        if self.qk_norm:
            norms += 2 * (q // self.n_head)
        biases = q + 2 * kv if self.bias or self.qkv_bias else 0
        if self.bias:
            biases += d + (2 if self.gated else 1) * m + d
        return sum(self.layer_matrices().values()) + norms + biases

    def params(self) -> int:
        """参数总数；共享的输出头只数一次。"""
        d = self.d_model
        total = self.vocab_size * d + self.n_layer * self.layer_params()
        total += d * (2 if self.bias else 1)  # 最后的归一化
        if self.learned_positions:
            total += self.seq_len * d
        return total if self.tied else total + self.vocab_size * d

    def matmul_params(self) -> int:
        """真正参与矩阵乘法的参数：各层的矩阵与输出头。

        查表（词嵌入、位置表）不是乘法；输出头总是乘法，与是否共享权重无关。
        """
        return self.n_layer * sum(self.layer_matrices().values()) + self.vocab_size * self.d_model

    def counted_params(self, convention: str = "all") -> int:
        """MFU 里的「N」按哪种约定数：all、no_positions、no_embedding。"""
        if convention == "all":
            return self.params()
        if convention == "no_positions":  # nanoGPT 与 llm.c：位置表只是查表
            return self.params() - self.seq_len * self.d_model * self.learned_positions
        if convention == "no_embedding":  # torchtitan：词嵌入只是查表（输出头另有一份时）
            return self.params() - self.vocab_size * self.d_model
        raise BudgetError(f"约定 {convention!r}：只有 all、no_positions、no_embedding。")


def check_positions(arch: Architecture, seq_len: int) -> None:
    """可学的位置表有多长，序列就最多有多长；RoPE 没有这个限制。超出时抛 BudgetError。"""
    if arch.learned_positions and seq_len > arch.seq_len:
        raise BudgetError(
            f"seq_len = {seq_len}：这个模型的位置表只有 {arch.seq_len} 行，"
            f"序列最多 {arch.seq_len} 个 token。"
        )


def flops_per_token(
    arch: Architecture, seq_len: int | None = None, *,
    convention: str = "all", attention: bool = True,
) -> int:
    """训练一个 token 的 FLOPs：6N + 12·L·(H·Q)·T（PaLM 附录 B，arXiv 2204.02311）。

    `convention` 决定 N 数什么，`attention=False` 只留 6N。因果掩码的一半照惯例也算。
    """
    length = arch.seq_len if seq_len is None else seq_len
    scores = 12 * arch.n_layer * arch.q_width * length if attention else 0
    return 6 * arch.counted_params(convention) + scores


def executed_flops_per_token(
    arch: Architecture, seq_len: int | None = None, *,
    recompute: str = "none", stops_early: bool = True,
) -> int:
    """逐个矩阵乘法数出来的 FLOPs，含重算；HFU 用它，MFU 不用。

    recompute: none；selective（只重算注意力的 QKᵀ 与 PV，arXiv 2205.05198）；full（整层重算）。
    PyTorch 的 checkpoint 在需要的张量都齐了就停，最后的 down 投影不必重算（`stops_early`）。
    """
    length = arch.seq_len if seq_len is None else seq_len
    matrices = arch.layer_matrices()
    scores = 4 * arch.q_width * length  # 一层前向的 QKᵀ 与 PV
    total = 6 * arch.matmul_params() + 3 * arch.n_layer * scores
    if recompute == "none":
        return total
    if recompute == "selective":
        return total + arch.n_layer * scores
    if recompute == "full":
        skipped = matrices["mlp_out"] if stops_early else 0
        return total + arch.n_layer * (2 * (sum(matrices.values()) - skipped) + scores)
    raise BudgetError(f"recompute = {recompute!r}：只有 none、selective、full。")


def kv_cache_bytes(
    arch: Architecture, seq_len: int | None = None, batch: int = 1, *, bytes_per_value: int = 2
) -> int:
    """推理时的 KV 缓存，字节：每层、每个位置一份 K 与一份 V（GQA 只存 KV 头）。"""
    length = arch.seq_len if seq_len is None else seq_len
    return 2 * arch.n_layer * arch.kv_width * length * batch * bytes_per_value


def gpt(d_model: int, n_layer: int, n_head: int, seq_len: int, vocab: int = 50304) -> Architecture:
    """本书的 GPT（RMSNorm、RoPE、SwiGLU、无偏置、共享输出头）。"""
    return Architecture(d_model, n_layer, n_head, vocab, seq_len)


def gpt2(
    d_model: int, n_layer: int, n_head: int, seq_len: int = 1024,
    vocab: int = 50257, *, bias: bool = True,
) -> Architecture:
    """GPT-2 一族：LayerNorm、可学位置、宽 4d 的 GELU、共享输出头。"""
    return Architecture(
        d_model, n_layer, n_head, vocab, seq_len, mlp_width=4 * d_model,
        gated=False, learned_positions=True, bias=bias,
    )


def llama(
    d_model: int, n_layer: int, n_head: int, n_kv_head: int, mlp_width: int,
    vocab: int, seq_len: int, *, tied: bool = False,
) -> Architecture:
    """Llama 一族：RMSNorm、RoPE、SwiGLU、GQA。"""
    return Architecture(
        d_model, n_layer, n_head, vocab, seq_len,
        mlp_width=mlp_width, n_kv_head=n_kv_head, tied=tied,
    )


def _mpt(d_model: int, n_layer: int) -> Architecture:
    """llm-foundry 的 MPT：GPT-2 的结构，词表 50368，序列 2048。"""
    return gpt2(d_model, n_layer, d_model // 128 if d_model >= 2048 else d_model // 64, 2048, 50368)


PRESETS: dict[str, Architecture] = {
    "124m": gpt(768, 12, 12, 1024),
    "1.3b": gpt(2048, 24, 16, 2048),
    "7b": gpt(4096, 32, 32, 4096),
    "gpt2-124m": gpt2(768, 12, 12),
    "gpt2-1558m": gpt2(1600, 48, 25),
    "llama3-8b": llama(4096, 32, 32, 8, 14336, 128256, 8192),
    "llama3-70b": llama(8192, 80, 64, 8, 28672, 128256, 8192),
    "llama3-405b": llama(16384, 126, 128, 8, 53248, 128256, 8192),
    "tinyllama-1.1b": llama(2048, 22, 32, 4, 5632, 32000, 2048),
    "mpt-125m": _mpt(768, 12),
    "mpt-350m": _mpt(1024, 24),
    "mpt-760m": _mpt(1536, 24),
    "mpt-1b": _mpt(2048, 24),
    "mpt-3b": _mpt(2560, 32),
    "mpt-7b": _mpt(4096, 32),
    "mpt-13b": _mpt(5120, 40),
    "mpt-30b": _mpt(7168, 48),
    # PaLM 540B：多查询注意力（1 个 KV 头）、SwiGLU、注意力与 MLP 并行（每层一个归一化）
    "palm-540b": Architecture(
        18432, 118, 48, 256_000, 2048, mlp_width=73728, n_kv_head=1, head_dim=256,
        norms_per_layer=1,
    ),
}


def preset(name: str) -> Architecture:
    """按名字取预设；没有这个名字时列出全部。"""
    if name.lower() not in PRESETS:
        raise BudgetError(f"没有叫 {name} 的预设；可选：{'、'.join(PRESETS)}。")
    return PRESETS[name.lower()]


def from_config_json(path: str | Path) -> Architecture:
    """读 Hugging Face 的 config.json（gpt2、llama、mistral、qwen2、qwen3）。

    Raises:
        BudgetError: 文件不可读、缺键，或是这里不会数的结构（例如混合专家）。
    """
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        reason = f"读不了 {path}（{error}）"
        raise BudgetError(f"{reason}；要一个 Hugging Face 的 config.json。") from error
    if not isinstance(config, dict):
        raise BudgetError(f"{path} 里不是一个 JSON 对象；要 Hugging Face 的 config.json。")
    kind = config.get("model_type")
    try:
        if kind == "gpt2":
            return _from_gpt2(config)
        if kind in ("llama", "mistral", "qwen2", "qwen3"):
            return _from_llama(config, kind)
    except KeyError as error:
        raise BudgetError(f"{path} 里缺 {error.args[0]}，数不出参数。") from error
    raise BudgetError(
        f"{path} 的 model_type 是 {kind}；这里只会数 gpt2、llama、mistral、qwen2、qwen3。"
    )


def _from_gpt2(config: dict) -> Architecture:
    arch = gpt2(
        config["n_embd"], config["n_layer"], config["n_head"],
        config["n_positions"], config["vocab_size"],
    )
    arch = replace(arch, tied=config.get("tie_word_embeddings", True))
    return replace(arch, mlp_width=config["n_inner"]) if config.get("n_inner") else arch


# 键可以不写时 transformers 用的默认值；照 d/头数 去猜会数错（Qwen3-0.6B 少了八千多万，marin #2098）
HF_DEFAULTS = {
    "llama": {}, "mistral": {"num_key_value_heads": 8}, "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
}


def _from_llama(config: dict, kind: str) -> Architecture:
    config = HF_DEFAULTS[kind] | config
    if config.get("mlp_bias") or (kind in ("llama", "qwen3") and config.get("attention_bias")):
        raise BudgetError("这个配置开了 attention_bias 或 mlp_bias，这里不会数。")
    if kind == "qwen3" and config["head_dim"] is None:
        raise BudgetError("这个 qwen3 配置的 head_dim 是 null；请写明每个头的维数，或删掉这一键。")
    arch = llama(
        config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"],
        config.get("num_key_value_heads") or config["num_attention_heads"],
        config["intermediate_size"], config["vocab_size"],
        config.get("max_position_embeddings", 2048),
        tied=config.get("tie_word_embeddings", False),
    )
    return replace(
        arch, head_dim=config.get("head_dim"),
        qkv_bias=kind == "qwen2", qk_norm=kind == "qwen3",
    )
