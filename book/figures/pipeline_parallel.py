"""`pipeline_parallel` 一章的图：层分在哪，时间线（理想的与录下的），气泡随 micro-batch 数变。"""

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from figures.style import CYCLE, INK, arrow, box, canvas, note, use_style

FORWARD, BACKWARD = ("#f3c88b", "#c9dff0"), ("#a85f00", "#0063a3")  # 第 0 段、第 1 段各一对


def stages() -> Figure:
    """8 层分给 4 个 rank：激活往前传，梯度往回传，首尾两份共享的矩阵把梯度相加。"""
    fig, ax = canvas(17, 6.2, inches_per_unit=0.46)
    for rank in range(4):
        x = 0.5 + 4.2 * rank
        note(ax, x + 1.6, 5.7, f"rank {rank}", align="center", size=10.5)
        box(ax, x, 3.1, 3.2, 1.0, f"第 {2 * rank}、{2 * rank + 1} 层", role="compute")
        if rank < 3:
            arrow(ax, (x + 3.2, 3.85), (x + 4.2, 3.85), role="data")
            arrow(ax, (x + 4.2, 3.35), (x + 3.2, 3.35), role="gradient")
    box(ax, 0.5, 4.4, 3.2, 0.9, "词嵌入（一份）", role="weight")
    box(ax, 13.1, 4.4, 3.2, 0.9, "输出头（另一份）", role="weight")
    arrow(ax, (2.1, 3.0), (14.7, 3.0), role="comm", both=True, bend=0.16)
    note(ax, 8.4, 1.35, "同一个矩阵的两份：梯度相加（all-reduce）", role="comm", align="center")
    note(ax, 8.4, 0.5, "蓝：激活 (B, T, d) 往后传        橙：它的梯度往回传", align="center")
    return fig


def timeline(rows: pd.DataFrame, titles: dict[str, str], end: float | None = None) -> Figure:
    """几条时间线上下排列；`titles` 是 {source: 标题}，rows 的列见 `timelines` 的返回值。

    格子里的数字是 micro-batch 的编号；浅的是前向，深的是反向；第二段换成蓝色。
    """
    use_style()
    fig, axes = plt.subplots(len(titles), 1, figsize=(9.2, 1.75 * len(titles) + 0.5), sharex=True)
    for ax, (source, title) in zip(np.atleast_1d(axes), titles.items(), strict=True):
        _bars(ax, rows[rows.source == source])
        ax.set_title(title, loc="left", fontsize=10.5)
        ax.set_xlim(0, end or rows.end.max() * 1.01)
    np.atleast_1d(axes)[-1].set_xlabel("毫秒")
    handles = [Patch(color=FORWARD[0], label="前向"), Patch(color=BACKWARD[0], label="反向")]
    if rows.chunk.max():
        handles += [Patch(color=FORWARD[1], label="前向，第二段"),
                    Patch(color=BACKWARD[1], label="反向，第二段")]  # fmt: skip
    fig.legend(handles=handles, loc="lower center", ncols=4, bbox_to_anchor=(0.5, -0.06))
    fig.tight_layout()
    return fig


def _bars(ax: Axes, rows: pd.DataFrame) -> None:
    """一条时间线：每个 rank 一行，每格一个方块。"""
    for e in rows.itertuples():
        color = (FORWARD if e.kind == "F" else BACKWARD)[e.chunk]
        ax.add_patch(Rectangle((e.start, e.rank - 0.4), e.end - e.start, 0.8, facecolor=color,
                               edgecolor="white", linewidth=0.7))  # fmt: skip
        ax.text((e.start + e.end) / 2, e.rank, str(e.micro), ha="center", va="center", fontsize=7.5,
                color="white" if e.kind == "B" else "#1f2937")  # fmt: skip
    ranks = sorted(rows["rank"].unique())
    ax.set(ylim=(len(ranks) - 0.45, -0.55), yticks=ranks,
           yticklabels=[f"rank {r}" for r in ranks])  # fmt: skip
    ax.grid(False)


def bubble_curves(formula, recorded: pd.DataFrame) -> Figure:
    """气泡随 micro-batch 数的变化：线是公式，点是这次录下的（4 个 rank）。"""
    use_style()
    fig, ax = plt.subplots(figsize=(7.2, 3.9))
    m = np.arange(1, 65)
    curves = ((4, 1, "4 段"), (16, 1, "16 段"), (16, 4, "16 个 rank，每个交错 4 段"))
    for color, (p, v, label) in zip(CYCLE, curves, strict=False):
        ax.plot(m, [100 * formula(p, int(k), v) for k in m], color=color, label=label)
    ax.plot(recorded.micro_batches, 100 * recorded.recorded, "o", color=CYCLE[0], ms=6,
            label="4 段，录下的")  # fmt: skip
    ax.set(xlabel="micro-batch 数 m", ylabel="空闲，%", ylim=(0, 100), xlim=(0, 65))
    ax.legend()
    return fig


def in_flight(rows: pd.DataFrame) -> Figure:
    """每个 rank 同时留着几份激活：GPipe 与 1F1B。"""
    use_style()
    fig, ax = plt.subplots(figsize=(6.4, 3.0))
    for i, (name, ink) in enumerate((("GPipe", "plain"), ("1F1B", "data"))):
        mine = rows[rows.schedule == name]
        bars = ax.bar(mine["rank"] + (i - 0.5) * 0.38, mine.in_flight, width=0.36,
                      facecolor=INK[ink].fill, edgecolor=INK[ink].line, label=name)  # fmt: skip
        ax.bar_label(bars, fontsize=9.5)
    ranks = sorted(rows["rank"].unique())
    ax.set(xticks=ranks, xticklabels=[f"rank {r}" for r in ranks], ylabel="在途的激活，份",
           ylim=(0, 1.18 * rows[rows.schedule == "GPipe"].in_flight.max()))  # fmt: skip
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)
    ax.grid(axis="x", visible=False)
    return fig
