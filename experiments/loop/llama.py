"""HF 格式的 Llama 文件夹（config.json 加 safetensors）与 `model.GPT` 的权重，两个方向都在这里。

两边的名字只写一张表（`names`），读的时候接起来，写的时候切开，所以不会一边改了另一边没改。
只接受结构相同的模型：RoPE 不缩放、RMSNorm、SwiGLU、无偏置、K/V 与 Q 的头数相等、输出头共享词嵌入。
两边的 RoPE 都是半分布局，所以 q、k、v 直接接成 qkv，不必重排。
怎样写成一个完整的文件夹（分词器、模型卡、原子地改名），见 export.py。
"""

import json
from pathlib import Path

import torch
from torch import Tensor

from model import GPTConfig
from tokens.errors import UserError

# 一层里，我们的名字 → HF 的名字；几个名字就是把几个矩阵按行接起来。
LAYER_NAMES = {
    "attn_norm": ("input_layernorm",),
    "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.out": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "mlp.gate": ("mlp.gate_proj",),
    "mlp.up": ("mlp.up_proj",),
    "mlp.down": ("mlp.down_proj",),
}


def names(n_layer: int) -> dict[str, tuple[str, ...]]:
    """我们的每个权重 → HF 的一个或几个；输出头共享词嵌入，不在表里。"""
    table = {"embed.weight": ("model.embed_tokens.weight",), "norm.weight": ("model.norm.weight",)}
    for i in range(n_layer):
        for ours, theirs in LAYER_NAMES.items():
            table[f"blocks.{i}.{ours}.weight"] = tuple(
                f"model.layers.{i}.{name}.weight" for name in theirs
            )
    return table


# ---------------------------------------------------------------- 写


def llama_config(config: GPTConfig) -> dict:
    """GPTConfig → config.json 的内容。"""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "vocab_size": config.vocab_size, "hidden_size": config.d_model,
        "intermediate_size": config.ffn_dim, "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head, "num_key_value_heads": config.n_head,
        "head_dim": config.d_model // config.n_head, "max_position_embeddings": config.seq_len,
        "rms_norm_eps": config.norm_eps, "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rope_theta": config.rope_theta,  # 旧版的 transformers 和别的程序只认这个写法
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
        "dtype": "float32", "torch_dtype": "float32",
    }  # fmt: skip


def llama_weights(weights: dict[str, Tensor], n_layer: int) -> dict[str, Tensor]:
    """我们的权重 → HF 的名字，fp32，每个张量有自己的内存（safetensors 不存共享的内存）。"""
    found: dict[str, Tensor] = {}
    for ours, theirs in names(n_layer).items():
        for name, part in zip(theirs, weights[ours].float().chunk(len(theirs)), strict=True):
            found[name] = part.clone()
    return found


# ---------------------------------------------------------------- 读


def read_config(folder: Path) -> dict:
    """读 config.json；不是 Llama 就说明为什么放不进来。"""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"读不了 {path}（{error}）；--init-from 要一个 Llama 文件夹"
            "（config.json 与 *.safetensors）、一个 .pt 检查点、scratch 或 resume。"
        ) from error
    if not isinstance(config, dict):
        raise UserError(f"{path} 不是一个 JSON 对象；请用完整的 Llama 文件夹。")
    kind = config.get("model_type")
    if kind == "gpt2":
        raise UserError(
            f"{folder} 是 GPT-2：它用可学习的位置向量、LayerNorm、GELU 和偏置，"
            "这里的模型用 RoPE、RMSNorm、SwiGLU、没有偏置，权重无处可放；请换一个 Llama 文件夹。"
        )
    if kind != "llama":
        raise UserError(f"{folder} 的 model_type 是 {kind}；只能从 llama 开始。")
    return config


def rope_of(config: dict) -> tuple[float, str]:
    """(θ, 种类)；新旧两种写法：`rope_parameters`，或 `rope_theta` 加 `rope_scaling`。"""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    return float(theta), rope.get("rope_type", rope.get("type", "default"))


def gpt_config(config: dict, seq_len: int, folder: Path) -> GPTConfig:
    """HF 的 config.json → GPTConfig；结构不同的地方逐条说出来。"""
    heads, width = config["num_attention_heads"], config["hidden_size"]
    theta, rope_kind = rope_of(config)
    structure = {"vocab_size": config["vocab_size"], "d_model": width, "n_head": heads}
    ours = GPTConfig(
        **structure, n_layer=config["num_hidden_layers"], rope_theta=theta,
        seq_len=min(seq_len, config["max_position_embeddings"]),
        norm_eps=float(config["rms_norm_eps"]),
    )  # fmt: skip
    wanted = {
        "num_key_value_heads": (config.get("num_key_value_heads", heads), heads),
        "head_dim": (config.get("head_dim") or width // heads, width // heads),
        "intermediate_size": (config["intermediate_size"], ours.ffn_dim),
        "tie_word_embeddings": (config.get("tie_word_embeddings", False), True),
        "attention_bias": (config.get("attention_bias", False), False),
        "mlp_bias": (config.get("mlp_bias", False), False),
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "rope_type": (rope_kind, "default"),
    }
    different = [f"{k} 是 {got}、要 {want}" for k, (got, want) in wanted.items() if got != want]
    if different:
        grouped = wanted["num_key_value_heads"][0] != heads
        why = "（几个头共用一份 K、V 的分组注意力 GQA，这里的模型没有）" if grouped else ""
        raise UserError(f"{folder} 的结构与这里的模型不同{why}：{'；'.join(different)}。")
    return ours


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """文件夹里全部 safetensors 的张量，换成 fp32（主权重）。"""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            tensors |= load_file(path)
        except (OSError, SafetensorError) as error:
            raise UserError(f"读不了 {path}（{error}）；请重新下载这个文件。") from error
    if not tensors:
        raise UserError(f"{folder} 里没有 *.safetensors；旧的 .bin 文件请先转换成 safetensors。")
    # 只存了主干（LlamaModel）的文件夹，名字前面没有 model.
    return {f"model.{name.removeprefix('model.')}": t.float() for name, t in tensors.items()}


def load_llama(folder: Path, seq_len: int) -> tuple[GPTConfig, dict[str, Tensor]]:
    """返回 (GPTConfig, 权重字典)，字典可以直接交给 `GPT.load_state_dict`。

    `seq_len` 是训练用的长度（token），不超过原模型的 max_position_embeddings。
    结构不同、文件缺失或损坏时抛 `UserError`。
    """
    config = read_config(folder)
    try:
        ours = gpt_config(config, seq_len, folder)
    except KeyError as error:
        raise UserError(f"{folder}/config.json 缺少 {error}；请用完整的 Llama 文件夹。") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise UserError(f"{folder}/config.json 的结构不能用（{error}）。") from error
    theirs, weights = read_tensors(folder), {}
    for name, parts in names(ours.n_layer).items():
        if missing := [part for part in parts if part not in theirs]:
            raise UserError(f"{folder} 缺少权重 {missing[0]}；请检查是否少了一个分片。")
        weights[name] = torch.cat([theirs[part] for part in parts])
    return ours, weights | {"head.weight": weights["embed.weight"]}
