"""算力与带宽：一个运算受哪一个限制，时间属于哪一类。

roofline 模型（Williams 等 2009）：每秒能做的 FLOP 不超过 min(算力峰值, 带宽 × 算术强度)，
算术强度是每搬一个字节做多少 FLOP。
"""

from collections.abc import Callable

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.lab.timing import best_seconds

# 名字里有这些片段的算子或内核属于哪一类；从上到下第一个匹配的算数
KINDS = (
    ("矩阵乘法", ("::mm", "::bmm", "addmm", "mkldnn_linear", "mkl_linear")),
    ("裁剪与更新", ("adamw", "AdamW", "norm_clip", "vector_norm", "foreach", "lerp_", "addc",
                    "aten::sqrt", "aten::mul_", "aten::add_", "aten::div_")),
    ("交叉熵", ("log", "nll", "cross_entropy", "amax_exp")),
    ("注意力", ("attention", "softmax", "aten::triu", "masked_fill")),
    ("其他逐元素", ("aten::", "cpp_fused")),
)  # fmt: skip


SQUARE = "2048³ 方阵"  # 量峰值用的那个乘法
BIG = 1 << 25  # 逐元素的例子有多少个数：三个 128 MiB 的 fp32 数组，缓存放不下


def category(kernel: str) -> str:
    """剖析里的一个名字属于哪一类；剩下的是 Python、自动求导和调度的开销。"""
    for kind, parts in KINDS:
        if any(part in kernel for part in parts):
            return kind
    return "框架开销"


def copy_bandwidth(seconds: float = 1.0, megabytes: int = 256) -> float:
    """实测的内存带宽，字节/s：c = a + b，三个 `megabytes` MiB 的 fp32 数组，比缓存大得多。"""
    a, b, c = torch.ones(3, megabytes << 18)
    return 3 * a.nbytes / best_seconds(lambda: torch.add(a, b, out=c), seconds)


def operations(tokens: int, d: int, vocab: int, bf16: bool) -> pd.DataFrame:
    """训练一步里几个有代表性的运算：算术强度（FLOP/字节）与实测速度。

    `tokens` 是一步的 token 数，`d` 是模型宽度，`vocab` 是词表大小。

    字节数按「每个输入读一遍、每个输出写一遍」算，这是任何实现都省不掉的。
    名字里写着「缓存内」的，数组就是这一步里的大小，小到不必去内存取，所以会落在带宽线之上；
    「相加」的三个数组加起来 384 MiB，才真的要搬内存。
    """
    rows = []
    for name, dtype, flops, tensors, run in _cases(tokens, d, vocab, bf16):
        moved = sum(t.nbytes for t in tensors)
        seconds = best_seconds(run)
        rows.append({
            "operation": name, "dtype": str(dtype).removeprefix("torch."),
            "intensity": flops / moved, "gflops": flops / seconds / 1e9,
            "gb_per_s": moved / seconds / 1e9,
        })  # fmt: skip
    return pd.DataFrame(rows)


Case = tuple[str, torch.dtype, float, tuple[Tensor, ...], Callable[[], object]]


def _cases(tokens: int, d: int, vocab: int, bf16: bool) -> list[Case]:
    cases: list[Case] = []
    for dtype in (torch.float32, torch.bfloat16) if bf16 else (torch.float32,):
        shapes = {SQUARE: (2048, 2048, 2048), "输出头": (tokens, d, vocab)}
        shapes |= {"QKV": (tokens, d, 3 * d), "注意力输出": (tokens, d, d)}
        for name, (m, k, n) in shapes.items():
            a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
            out = torch.empty(m, n, dtype=dtype)
            cases.append((name, dtype, 2 * m * k * n, (a, b, out), _matmul(a, b, out)))
    x, logits = torch.randn(tokens, d), torch.randn(tokens, vocab)
    gain, sums, scores = torch.ones(d), torch.empty(tokens, d), torch.empty(tokens, vocab)
    p, q, r = torch.ones(3, BIG)
    # 每个元素的 FLOPs：RMSNorm 约 4，残差相加 1，softmax 约 5（减、exp、加、除、比大小）
    cases += [
        ("RMSNorm（缓存内）", torch.float32, 4.0 * x.numel(), (x, x),
         lambda: F.rms_norm(x, (d,), gain)),
        ("相加（缓存内）", torch.float32, 1.0 * x.numel(), (x, x, sums),
         lambda: torch.add(x, x, out=sums)),
        ("相加", torch.float32, 1.0 * BIG, (p, q, r), lambda: torch.add(p, q, out=r)),
        ("softmax", torch.float32, 5.0 * logits.numel(), (logits, scores),
         lambda: torch.softmax(logits, -1, out=scores)),
    ]  # fmt: skip
    return cases


def _matmul(a: Tensor, b: Tensor, out: Tensor) -> Callable[[], object]:
    return lambda: torch.mm(a, b, out=out)
