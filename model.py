"""全书共用的模型：一个小的 GPT（RMSNorm、RoPE、SwiGLU、因果注意力，输出头与词嵌入共享权重）。

结构与 Llama 相同，所以同样的权重放进 Hugging Face 的 Llama，logits 与每个梯度都相等
（`tests/test_model.py`）。这里没有：偏置、dropout、KV 缓存和生成——训练用不到它们。
用法：`logits, loss = GPT(GPTConfig())(x, y)`，x、y 是 (B, T) 的 int64。
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORE_INDEX = -100  # 等于它的目标不计入 loss（填充、提示词）
EXPLICIT_MAX_LEN = 256  # CPU 上，不超过这个长度时直接写出 softmax(QKᵀ)V 更快（见 speed 一章）


@dataclass(frozen=True)
class GPTConfig:
    """模型的结构。`attention` 只决定怎么算，不决定算出什么。"""

    vocab_size: int = 8192
    d_model: int = 128
    n_head: int = 4
    n_layer: int = 4
    seq_len: int = 128
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    attention: str = "auto"  # auto | sdpa | explicit

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "n_head", "n_layer", "seq_len"):
            if type(value := getattr(self, name)) is not int or value < 1:
                raise ValueError(f"{name}={value!r}：要一个不小于 1 的整数")
        if self.d_model % (2 * self.n_head):  # RoPE 把一个头的维数两两配对
            given = f"d_model={self.d_model}、n_head={self.n_head}"
            raise ValueError(f"{given}：d_model 必须是 2·n_head 的倍数，请改其中一个")
        if self.ffn_dim < 1:
            raise ValueError(f"d_model={self.d_model} 太小：SwiGLU 的宽度会是 0，至少要 12")
        if self.attention not in ("auto", "sdpa", "explicit"):
            raise ValueError(f"attention={self.attention!r}：只能是 auto、sdpa 或 explicit")

    @property
    def ffn_dim(self) -> int:
        """SwiGLU 的宽度：8d/3，取 32 的倍数，使三个矩阵的参数量约等于宽 4d 的两个矩阵。"""
        return int(8 * self.d_model / 3) // 32 * 32


def rope_table(config: GPTConfig) -> Tensor:
    """RoPE 的 cos 与 sin，形状 (2, T, head_dim/2)：位置 t、第 i 对的转角是 t·θ^(−2i/head_dim)。"""
    head_dim = config.d_model // config.n_head
    pairs = torch.arange(0, head_dim, 2).float() / head_dim
    angles = torch.outer(torch.arange(config.seq_len).float(), config.rope_theta**-pairs)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """把 (B, H, T, head_dim) 按位置旋转；第 i 维与第 i + head_dim/2 维成一对（Llama 的布局）。"""
    cos, sin = rope.to(x.dtype)  # 各 (T, head_dim/2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def explicit_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """因果注意力的定义：softmax(QKᵀ/√head_dim + 掩码)·V，形状都是 (B, H, T, head_dim)。"""
    mask = q.new_full((q.size(-2), q.size(-2)), -math.inf).triu(1)  # 上三角（未来）是 −∞
    scores = q @ k.transpose(-2, -1) * q.size(-1) ** -0.5 + mask  # (B, H, T, T)
    return scores.softmax(dim=-1) @ v


class Attention(nn.Module):
    """因果自注意力，Q、K、V 由一次矩阵乘法得到。"""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model, bias=False)
        self.out = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        B, T, _ = x.shape
        qkv = self.qkv(x).view(B, T, 3, -1, self.config.d_model // self.config.n_head)  # −1：头数
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # 各 (B, H, T, head_dim)
        q, k = rotate(q, rope), rotate(k, rope)
        mode = self.config.attention
        if mode == "explicit" or (mode == "auto" and x.is_cpu and T <= EXPLICIT_MAX_LEN):
            y = explicit_attention(q, k, v)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """门控的前馈层：down(silu(gate(x)) · up(x))（Shazeer 2020，arXiv 2002.05202）。"""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.d_model, config.ffn_dim, bias=False)
        self.up = nn.Linear(config.d_model, config.ffn_dim, bias=False)
        self.down = nn.Linear(config.ffn_dim, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """一层：先归一化再计算，结果加回残差流。"""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.attn = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x), rope)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """`GPT(config)(idx, targets)` → (logits, loss)；没有 targets 时 loss 为 None。"""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.head.weight = self.embed.weight  # 共享：同一个矩阵既查表，又打分
        self.register_buffer("rope", rope_table(config), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """权重 ~ N(0, 0.02²)；写回残差流的 2L 个矩阵再除以 √(2L)，残差流的方差便不随层数增长。"""
        for name, p in self.named_parameters():
            if p.dim() >= 2:
                residual = name.endswith(("attn.out.weight", "mlp.down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * self.config.n_layer * residual or 1))

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, *,
        reduction: str = "mean", fused_loss: bool | Callable = False,
    ) -> tuple[Tensor | None, Tensor | None]:
        """idx、targets：(B, T) 的 int64，过长抛 ValueError。返回 logits (B, T, V)、loss（nat）。

        `reduction="sum"` 给出总和，供按 token 加权的累积使用；目标为 −100 的位置不计入。
        `fused_loss` 把输出头与交叉熵合成一步，不返回 logits：True 用 F.linear_cross_entropy，
        也可以给签名相同的函数，如 experiments/training/step.py 里更快、不留 logits 的那个。
        """
        if idx.size(1) > self.config.seq_len:
            limit = f"{idx.size(1)} 个 token 超过了模型的 seq_len={self.config.seq_len}"
            raise ValueError(f"{limit}：请截短输入，或用更大的 seq_len 建模型")
        x, rope = self.embed(idx), self.rope[:, : idx.size(1)]  # x：(B, T, d)
        for block in self.blocks:
            x = block(x, rope)
        x = self.norm(x)
        if targets is None:
            return self.head(x), None
        target, how = targets.flatten(), {"ignore_index": IGNORE_INDEX, "reduction": reduction}
        if fused := F.linear_cross_entropy if fused_loss is True else fused_loss:
            return None, fused(x.flatten(0, 1), self.head.weight, target, **how)
        logits = self.head(x)  # (B, T, V)
        return logits, F.cross_entropy(logits.flatten(0, 1).float(), target, **how)

    def num_params(self) -> int:
        """参数个数；共享的权重只数一次。"""
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, seq_len: int | None = None) -> int:
        """训练一个 token 的 FLOPs：6N + 12·L·T·d（PaLM 附录 B，arXiv 2204.02311）。

        前向每个参数一次乘加，2N；反向是前向的两倍，4N。注意力的 QKᵀ 与 PV 不含参数，
        每层每 token 各 2·T·d，前向加反向共 12·T·d；按惯例不因因果掩码减半。
        """
        c = self.config
        return 6 * self.num_params() + 12 * c.n_layer * (seq_len or c.seq_len) * c.d_model
