"""`speedrun` 一章的图：训练时间是一块面积（步数 × 每步的时间），以及各种子的 loss。"""

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from figures.style import CYCLE

LABELS = ((-4, 12), (-4, -3), (-4, -18), (-4, -18), (-4, -3), (-4, -3))  # 右图的标签错开，点
COLORS = ("#4b5563", *CYCLE)  # 一级一种颜色：七级，七种


def areas(table: pd.DataFrame) -> Figure:
    """每个配方一个长方形：宽是步数，高是每步的毫秒数，面积就是训练时间。

    `table` 要有 recipe、steps、ms_per_step、seconds 四列，第一行是起跑线。
    """
    fig, (whole, zoom) = plt.subplots(1, 2, figsize=(8.6, 3.7), width_ratios=(1.0, 1.25))
    _rectangles(whole, table)
    whole.set(ylabel="每步（毫秒）", xlabel="步数")
    rest = table.iloc[1:]
    _rectangles(zoom, rest, label=True)
    zoom.set(xlabel="步数（放大：起跑线之外的各级）")
    fig.tight_layout()
    return fig


def _rectangles(ax: Axes, table: pd.DataFrame, *, label: bool = False) -> None:
    """从原点画起的一组长方形，大的在下面。"""
    for row in table.itertuples():
        color = COLORS[row.Index % len(COLORS)]
        ax.add_patch(
            Rectangle((0, 0), row.steps, row.ms_per_step, facecolor=to_rgba(color, 0.12),
                      edgecolor=color, linewidth=1.4)
        )  # fmt: skip
        ends = (table.index[0], table.index[-1])
        if label or row.Index in ends:
            where = LABELS[(row.Index - 1) % len(LABELS)] if label else (-5, -3)
            ax.annotate(
                f"{row.recipe} {row.seconds:.1f} s", (row.steps, row.ms_per_step), where,
                textcoords="offset points", ha="right", va="top", size=9, color=color,
            )  # fmt: skip
    ax.set(xlim=(0, table["steps"].max() * 1.05), ylim=(0, table["ms_per_step"].max() * 1.08))


def losses(rows: pd.DataFrame, target: float) -> Figure:
    """每个种子一个点，横线是目标；`rows` 要有 recipe、val_loss 两列。"""
    fig, ax = plt.subplots(figsize=(7.2, 2.9))
    names = list(dict.fromkeys(rows["recipe"]))
    for i, name in enumerate(names):
        values = rows.loc[rows["recipe"] == name, "val_loss"]
        color = COLORS[i % len(COLORS)]
        ax.plot(values, [i] * len(values), "o", color=color, ms=6, alpha=0.75)
        ax.plot([values.mean()], [i], "|", color=color, ms=22, mew=2)
    ax.axvline(target, color="#4b5563", ls="--", lw=1.2)
    ax.set(xlabel="验证 loss（nat/token）；竖线是平均，虚线是目标", ylim=(len(names) - 0.5, -0.5))
    ax.set_yticks(range(len(names)), names)
    return fig


def worse_by(differences: pd.DataFrame) -> Figure:
    """每次少一件事，loss 高了多少：一列一件事，一行一个种子；点是种子，竖线是平均。"""
    fig, ax = plt.subplots(figsize=(7.2, 0.36 * differences.shape[1] + 0.9))
    for i, name in enumerate(differences):
        ax.plot(differences[name], [i] * len(differences), "o", color=CYCLE[0], ms=5, alpha=0.7)
        ax.plot([differences[name].mean()], [i], "|", color=CYCLE[1], ms=18, mew=2)
    ax.axvline(0, color="#4b5563", ls="--", lw=1.2)
    ax.set(xlabel="验证 loss 比纪录高多少（nat/token），同一个种子相减",
           ylim=(differences.shape[1] - 0.5, -0.5))  # fmt: skip
    ax.set_yticks(range(differences.shape[1]), differences.columns)
    return fig


def peers(table: pd.DataFrame) -> Figure:
    """各家每秒 token 数，按形状分组；`table` 要有 shape、peer、tokens_per_s 三列。"""
    wide = table.pivot(index="shape", columns="peer", values="tokens_per_s")
    wide = wide.loc[list(dict.fromkeys(table["shape"])), list(dict.fromkeys(table["peer"]))]
    relative = wide.div(wide.max(axis=1), axis=0)
    fig, ax = plt.subplots(figsize=(8.4, 3.8))
    relative.plot.bar(ax=ax, width=0.82, rot=0, color=[*CYCLE, "#4b5563"][: wide.shape[1]])
    ax.set(xlabel="d_model × 层数，batch × 序列长度", ylabel="每秒 token 数，相对最快的一家")
    ax.legend(ncols=3, fontsize=8.5, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return fig
