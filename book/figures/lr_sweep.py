"""`lr_sweep` 一章的图：U 形线，最优的学习率与宽度，坐标检查，宽度怎样进入一步更新。"""

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from figures.style import CYCLE, INK, arrow, box, canvas, note, use_style

NAMES = {"standard": "标准", "mup": "μP"}


def one_update() -> Figure:
    """一步 Adam 之后，输出变多少：d 项相加，每一项是输入乘更新，更新的大小约为学习率 η。"""
    fig, ax = canvas(15.5, 5.4, inches_per_unit=0.52)
    for left, width, name in ((0.6, 3, "窄：d = 3"), (7.4, 6, "宽：d = 6")):
        note(ax, left, 4.9, name, size=10.5)
        for i in range(width):
            box(ax, left + 1.2 * i, 3.2, 1.0, 0.9, "x", role="data", size=9.5)
            box(ax, left + 1.2 * i, 1.9, 1.0, 0.9, "±η", role="gradient", size=9.5)
        right = left + 1.2 * width - 0.2
        arrow(ax, (left + (right - left) / 2, 1.8), (left + (right - left) / 2, 1.2))
        said = f"上下相乘再相加：输出变 ≈ {width} · η · |x|"
        note(ax, max(left + (right - left) / 2, 2.8), 0.8, said, align="center", size=10)
    return fig


def u_curves(table: pd.DataFrame, best: pd.DataFrame) -> Figure:
    """两栏：每种参数化的 U 形线，一种颜色一个宽度；误差棒是种子的标准差，星是抛物线的最低处。"""
    use_style()
    fig, axes = plt.subplots(1, 2, figsize=(8.6, 3.9), sharey=True)
    widths = sorted(table["d_model"].unique())
    for ax, (how, name) in zip(axes, NAMES.items(), strict=True):
        for width, color in zip(widths, CYCLE, strict=False):
            one = table[(table["parametrization"] == how) & (table["d_model"] == width)]
            loss = one.groupby("lr")["val_loss"].agg(["mean", "std"])
            ax.errorbar(loss.index, loss["mean"], loss["std"].fillna(0), fmt="o-", ms=4, lw=1.2,
                        capsize=2, color=color, label=f"宽 {width}")  # fmt: skip
            here = best[(best["parametrization"] == how) & (best["d_model"] == width)]
            if len(here) and np.isfinite(here["best"].iloc[0]):
                x = here["best"].iloc[0]
                y = np.interp(np.log(x), np.log(loss.index), loss["mean"])
                ax.plot(x, y, "*", ms=13, color=color, mec="white", mew=0.8, zorder=5)
        ax.set(xscale="log", xlabel="学习率的峰值（对数刻度）")
        ax.set_title(name, fontsize=10.5)
    axes[0].set_ylabel("最后的验证 loss（nat/token）")
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="upper center", ncols=len(widths))
    fig.tight_layout(rect=(0, 0, 1, 0.91))
    return fig


def best_by_width(best: pd.DataFrame) -> Figure:
    """最优的学习率与宽度，两种参数化，各带 95 % 区间；虚线是与宽度成反比。"""
    use_style()
    fig, ax = plt.subplots(figsize=(6.6, 3.6))
    for (how, name), color, mark in zip(NAMES.items(), CYCLE, "os", strict=False):
        one = best[(best["parametrization"] == how) & best["best"].notna()]
        down, up = one["best"] - one["low"], one["high"] - one["best"]
        ax.errorbar(one["d_model"], one["best"], [down.fillna(0), up.fillna(0)], fmt=f"{mark}-",
                    color=color, capsize=4, label=name)  # fmt: skip
        if how == "standard" and len(one):
            first = one.iloc[0]
            ax.plot(one["d_model"], first["best"] * first["d_model"] / one["d_model"], "--",
                    color=INK["plain"].line, lw=1, label="与宽度成反比")  # fmt: skip
    widths = sorted(best["d_model"].unique())
    ax.set(xscale="log", yscale="log", xlabel="宽度 d_model", ylabel="最优的学习率（10⁻³）")
    ax.set_xticks(widths, [str(width) for width in widths])
    low, high = ax.get_ylim()
    ticks = [rate for rate in 1e-3 * 2.0 ** np.arange(-2, 8) if low <= rate <= high]
    ax.set_yticks(ticks, [f"{rate * 1e3:g}" for rate in ticks])
    ax.minorticks_off()
    fig.legend(loc="upper center", ncols=3)
    fig.tight_layout(rect=(0, 0, 1, 0.9))
    return fig


def coordinate_check(changes: pd.DataFrame) -> Figure:
    """走几步之后各处的激活变了多少，对宽度；左标准，右 μP，一种颜色一个位置。"""
    use_style()
    fig, axes = plt.subplots(1, 2, figsize=(8.6, 3.6), sharey=True)
    for ax, (how, name) in zip(axes, NAMES.items(), strict=True):
        mine = changes[changes["parametrization"] == how]
        for (where, one), color in zip(mine.groupby("where", sort=False), CYCLE, strict=False):
            mean = one.groupby("d_model")["change"].mean()
            ax.plot(mean.index, mean, "o-", ms=4, lw=1.2, color=color, label=where)
        widths = sorted(mine["d_model"].unique())
        ax.set(xscale="log", yscale="log", xlabel="宽度 d_model")
        ax.set_xticks(widths, [str(width) for width in widths])
        ax.minorticks_off()
        ax.set_title(name, fontsize=10.5)
    axes[0].set_ylabel("变化（均方根）")
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="upper center", ncols=len(labels))
    fig.tight_layout(rect=(0, 0, 1, 0.9))
    return fig
