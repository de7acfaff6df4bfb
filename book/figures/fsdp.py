"""`fsdp` 一章的示意图：四种切法的内存砖块，ZeRO-3 的一步，通信从 2Ψ 到 3Ψ，藏不藏得住。"""

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures.style import CYCLE, INK, arrow, box, canvas, note, use_style

KINDS = (("参数", "weight", 4, 3), ("梯度", "gradient", 4, 2), ("AdamW", "data", 8, 1))
STAGES = ("不切（DDP）", "ZeRO-1", "ZeRO-2", "ZeRO-3 / FSDP")


def bricks(ranks: int = 4) -> Figure:
    """每种切法，4 个 rank 各有哪些砖；一块砖的宽度正比于字节，虚线是别人管的。"""
    fig, ax = canvas(17, 11.9, inches_per_unit=0.48)
    unit = 0.62  # 每参数一个字节画多宽
    for level, name in enumerate(STAGES):
        top = 11.2 - 3.0 * level
        total = sum(size / (ranks if level >= cut else 1) for _, _, size, cut in KINDS)
        note(ax, 0.1, top, name, size=11)
        note(ax, 0.1, top - 0.75, f"每参数 {total:g} 字节", size=9.5)
        for rank in range(ranks):
            _rank_row(ax, 4.6, top - 0.15 - 0.62 * rank, rank, ranks, level, unit)
    return fig


def _rank_row(ax: Axes, x: float, y: float, rank: int, ranks: int, level: int, unit: float) -> None:
    """一个 rank 的三种砖。"""
    note(ax, x - 0.25, y + 0.25, f"rank {rank}", size=8.5, align="right")
    for name, role, size, cut in KINDS:
        width = size * unit
        if level < cut:
            box(ax, x, y, width, 0.5, name, role=role, size=8.5)
        else:
            piece = width / ranks
            box(ax, x, y, width, 0.5, role="plain", dashed=True)
            box(ax, x + rank * piece, y, piece, 0.5, role=role)
        x += width + 0.4


def one_step() -> Figure:
    """ZeRO-3 的一步：每层前向收集、计算、释放，反向再来一遍并归约。"""
    fig, ax = canvas(17, 6.4, inches_per_unit=0.48)
    forward = ("前向", 3.6, ("第 1 层", "第 2 层"), ("收集", "前向", "释放"),
               ("comm", "compute", "plain"))  # fmt: skip
    backward = ("反向", 0.5, ("第 2 层", "第 1 层"), ("收集", "反向", "归约"),
                ("comm", "compute", "comm"))  # fmt: skip
    for title, y, layers, words, roles in (forward, backward):
        note(ax, 0.1, y + 0.6, title, size=11)
        x, last = 1.7, None
        for layer in layers:
            note(ax, x + 3.5, y + 1.6, layer, align="center", size=10)
            for word, role in zip(words, roles, strict=True):
                if last is not None:
                    arrow(ax, (last, y + 0.6), (x, y + 0.6))
                box(ax, x, y, 2.1, 1.2, word, role=role)
                last = x + 2.1
                x = last + 0.4
        arrow(ax, (last, y + 0.6), (last + 0.5, y + 0.6))
    note(ax, 1.7, 3.0, "收集 = all-gather 这一层的参数；归约 = reduce-scatter 这一层的梯度")
    return fig


def hidden(thresholds: dict[str, float], flops: float, psi: float = 7e9) -> Figure:
    """一步的计算时间随每个 rank 的 token 数增长，通信时间不变：交点就是门槛。"""
    use_style()
    fig, ax = plt.subplots(figsize=(7.2, 4.2))
    tokens = np.logspace(2, 5.5, 50)
    ax.plot(tokens, 6 * psi * tokens / flops, color=INK["compute"].line, lw=2.4, label="计算")
    for color, (name, point) in zip(CYCLE, thresholds.items(), strict=False):
        seconds = 6 * psi * point / flops
        ax.axhline(seconds, color=color, lw=1.4, ls="--")
        ax.plot([point], [seconds], "o", color=color)
        low = point < 3000  # 左边放不下，写到交点的右下方
        ax.text(point * 1.6 if low else 110, seconds * (0.7 if low else 1.12),
                f"通信，{name}：{point:,.0f} 个 token", color=color, size=9.5)  # fmt: skip
    ax.set(xscale="log", yscale="log", xlabel="每个 rank 每步的 token 数", ylabel="秒（7B 的模型）",
           xlim=(100, 10**5.5))  # fmt: skip
    ax.legend(loc="lower right")
    return fig
