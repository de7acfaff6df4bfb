"""`context_parallel` 一章的图：环一圈一圈地转，两种切法的工作量，Ulysses 的换头。"""

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from figures.style import CYCLE, INK, arrow, box, canvas, note, use_style


def ring_steps() -> Figure:
    """4 个 rank 的环：q 不动，k、v 每一圈往右走一格；灰的是整块都在未来，跳过。"""
    fig, ax = canvas(17, 6.6, inches_per_unit=0.46)
    for rank in range(4):
        note(ax, 3.9 + 3.5 * rank, 6.2, f"rank {rank}：q{rank}", align="center", size=10.5)
    for step in range(4):
        y = 4.7 - 1.45 * step
        note(ax, 0.1, y + 0.4, f"第 {step} 圈", size=10)
        for rank in range(4):
            source, x = (rank - step) % 4, 2.6 + 3.5 * rank
            role = "plain" if source > rank else "compute"
            box(ax, x, y, 2.6, 0.8, f"k{source}, v{source}", role=role, dashed=source > rank)
            if rank < 3 and step < 3:
                arrow(ax, (x + 2.3, y), (x + 3.8, y - 0.62), role="comm")
    return fig


def who_computes_what(positions_of) -> Figure:
    """两种切法的因果矩阵：颜色是拥有那一行 q 的 rank，空白是未来。"""
    use_style()
    fig, axes = plt.subplots(1, 2, figsize=(7.6, 3.9))
    for ax, layout, title in zip(axes, ("contiguous", "zigzag"), ("连续切", "zigzag"), strict=True):
        for rank in range(4):
            for q in positions_of(layout, rank, 4, 8).tolist():
                for k in range(q + 1):
                    ax.add_patch(Rectangle((k, q), 1, 1, facecolor=CYCLE[rank], alpha=0.75,
                                           edgecolor="white"))  # fmt: skip
                ax.text(8.35, q + 0.5, f"rank {rank}", va="center", fontsize=9, color=CYCLE[rank])
        ax.set(xlim=(0, 8), ylim=(8, 0), xticks=[], yticks=[], aspect="equal",
               xlabel="k 的块", ylabel="q 的块")  # fmt: skip
        ax.set_title(title, fontsize=10.5)
        ax.grid(False)
    fig.tight_layout()
    return fig


def slowest(rows: pd.DataFrame) -> Figure:
    """每一圈各 rank 算多少个（q, k）对：连续切时总有人算整块、有人闲着，zigzag 人人一样。"""
    use_style()
    fig, axes = plt.subplots(1, 2, figsize=(7.6, 3.2), sharey=True)
    for ax, layout, title in zip(axes, ("contiguous", "zigzag"), ("连续切", "zigzag"), strict=True):
        _work_bars(ax, rows[rows.layout == layout])
        ax.set_title(title, fontsize=10.5)
        ax.set_xlabel("第几圈")
    axes[0].set_ylabel("算的（q, k）对")
    fig.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncols=4,
               bbox_to_anchor=(0.5, -0.08))  # fmt: skip
    fig.tight_layout()
    return fig


def _work_bars(ax: Axes, rows: pd.DataFrame) -> None:
    size = rows["rank"].max() + 1
    for rank in range(size):
        mine = rows[rows["rank"] == rank]
        ax.bar(mine.step + (rank - (size - 1) / 2) * 0.2, mine.computed, width=0.18,
               color=CYCLE[rank], label=f"rank {rank}")  # fmt: skip
    ax.set_xticks(range(size))
    ax.grid(axis="x", visible=False)


def swap_heads() -> Figure:
    """Ulysses：行是头，列是序列的段；换之前每个 rank 一列，换之后每个 rank 一行。"""
    fig, ax = canvas(16, 6.0, inches_per_unit=0.48)
    for x0, title, by_head in ((1.8, "投影之后：全部头，一段序列", False),
                               (10.2, "注意力之内：一个头，整条序列", True)):  # fmt: skip
        note(ax, x0 + 2.2, 5.6, title, align="center", size=10.5)
        for head in range(4):
            note(ax, x0 - 0.2, 4.45 - 1.1 * head, f"头 {head}", align="right", size=9)
            for part in range(4):
                rank = head if by_head else part
                ax.add_patch(Rectangle((x0 + 1.1 * part, 3.95 - 1.1 * head), 1.0, 1.0, alpha=0.75,
                                       facecolor=CYCLE[rank], edgecolor="white"))  # fmt: skip
                ax.text(x0 + 1.1 * part + 0.5, 4.45 - 1.1 * head, f"rank\n{rank}", ha="center",
                        va="center", fontsize=8, color="white")  # fmt: skip
        note(ax, x0 + 2.2, 0.2, "序列的段 →", align="center", size=9)
    arrow(ax, (6.5, 2.8), (9.2, 2.8), role="comm", both=True)
    ax.text(7.75, 3.25, "all-to-all", ha="center", fontsize=10, color=INK["comm"].line)
    return fig
