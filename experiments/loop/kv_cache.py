"""KV 缓存：每一层的 K、V 算过一次就留着，下一个 token 只算它自己的那一列。

写在 `model.py` 旁边而不是里面：训练用不到它。用的是同一份权重、同样的公式，所以 logits 与
`model(全部 token)` 只差浮点误差（矩阵的形状不同，加法的次序就不同）。
这里**不**管上下文满了怎么办：那由 `sampling.py` 决定；也没有分组注意力、分页、量化的缓存。
"""

import math

import torch
from torch import Tensor

from model import GPT, Attention, GPTConfig, rotate


def cache_bytes(config: GPTConfig, length: int, batch: int = 1, bytes_per_number: int = 4) -> int:
    """`length` 个 token 的 K、V 占多少字节：2（K 与 V）· L · d · length · batch · 每个数的字节数。

    我们的 K、V 与 Q 的头数相等，每层每个 token 各 d 个数；分组注意力时是 n_kv_head·head_dim 个。
    """
    return 2 * config.n_layer * config.d_model * length * batch * bytes_per_number


def decode_flops(model: GPT, context: int, cached: bool) -> int:
    """上下文有 `context` 个 token 时，得到下一个 token 的 logits 要多少 FLOPs（矩阵乘法，前向）。

    矩阵参数每个 2 次（一次乘加），注意力的 QKᵀ 与 PV 每层每对位置各 2d 次。有缓存只算最后一个
    位置：2M + 4·L·d·n；没有缓存重算全部 n 个：2M·n + 4·L·d·n²（因果的上三角照算，不减半）。
    """
    config = model.config
    matrices = sum(p.numel() for p in model.parameters() if p.dim() >= 2)  # 输出头就是词嵌入
    one = 2 * matrices + 4 * config.n_layer * config.d_model * context
    return one if cached else one * context


class KVCache:
    """一批序列、至多 `seq_len` 个 token 的 K 与 V；`length` 是已经存了几个。

    一次分配到底，之后只往里写：长度一变就重新分配的话，显存会碎。
    """

    def __init__(self, model: GPT, batch: int = 1) -> None:
        c, weight = model.config, model.embed.weight
        shape = (2, c.n_layer, batch, c.n_head, c.seq_len, c.d_model // c.n_head)
        self.store = torch.empty(shape, dtype=weight.dtype, device=weight.device)
        self.length = 0

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """把这一层新的 K、V（B, H, t, head_dim）接在后面，返回到目前为止全部的 K、V。"""
        end = self.length + k.size(2)
        self.store[0, layer, :, :, self.length : end] = k
        self.store[1, layer, :, :, self.length : end] = v
        return self.store[0, layer, :, :, :end], self.store[1, layer, :, :, :end]


def cached_attention(
    attn: Attention, x: Tensor, rope: Tensor, cache: KVCache, layer: int
) -> Tensor:
    """新的 t 个位置看缓存里的 n 个加上自己：softmax(qKᵀ/√head_dim + 掩码)·V，x 是 (B, t, d)。"""
    B, t, C = x.shape
    q, k, v = attn.qkv(x).view(B, t, 3, attn.config.n_head, -1).permute(2, 0, 3, 1, 4)
    q, k = rotate(q, rope), rotate(k, rope)  # 存旋转过的 K：它的位置不会再变
    keys, values = cache.append(layer, k, v)  # 各 (B, H, n + t, head_dim)
    future = q.new_full((t, keys.size(2)), -math.inf).triu(cache.length + 1)
    scores = q @ keys.transpose(-2, -1) * q.size(-1) ** -0.5 + future  # (B, H, t, n + t)
    y = scores.softmax(dim=-1) @ values
    return attn.out(y.transpose(1, 2).reshape(B, t, C))


@torch.no_grad()
def cached_logits(model: GPT, idx: Tensor, cache: KVCache) -> Tensor:
    """接着缓存读 `idx`（B, t），返回最后一个位置的 logits（B, V）；缓存变长 t。

    第一次给整个提示（prefill），之后每次一个 token（decode）。装不下时抛 ValueError。
    """
    start, end = cache.length, cache.length + idx.size(1)
    if end > model.config.seq_len:
        raise ValueError(f"缓存已有 {start} 个 token，再读 {idx.size(1)} 个就超过了 seq_len="
                         f"{model.config.seq_len}：请从较短的上下文重新开始")  # fmt: skip
    x, rope = model.embed(idx), model.rope[:, start:end]  # 转角按真正的位置，而不是从 0 数起
    for layer, block in enumerate(model.blocks):
        x = x + cached_attention(block.attn, block.attn_norm(x), rope, cache, layer)
        x = x + block.mlp(block.mlp_norm(x))
    cache.length = end
    return model.head(model.norm(x[:, -1]))  # 只有最后一个位置要打分
