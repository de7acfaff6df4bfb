"""`scaling` 一章的示意图：同样的算力怎样分给参数与数据，以及我们的数据有多少。"""

from collections.abc import Sequence
from math import log10

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from figures.style import INK, arrow, box, canvas, note


def compute_split() -> Figure:
    """三个面积相同的矩形：C = 6ND 不变，N 与 D 的三种分法。"""
    fig, ax = canvas(15.8, 6.4, inches_per_unit=0.52)
    area = 9.0
    plans = [
        (0.9, 1.5, "小模型\n读很多数据", "学不动了：\n模型装不下", "plain"),
        (5.6, 3.0, "一起增长", "Chinchilla：\n每参数约 20 个 token", "weight"),
        (10.9, 4.5, "大模型\n读很少数据", "没读够：\n参数多过数据能教的", "plain"),
    ]
    for x, width, text, verdict, role in plans:
        height = area / width * 0.78
        box(ax, x, 0.9, width, height, text, role=role, size=9.5)
        note(ax, x + width / 2, 0.9 + height + 0.55, verdict, align="center", role=role, size=9)
        note(ax, x + width / 2, 0.55, "N", align="center", size=10)
        note(ax, x - 0.15, 0.9 + height / 2, "D", align="right", size=10)
    for x in (3.9, 9.4):
        note(ax, x, 2.6, "面积\n相同", align="center", size=9)
    return fig


def data_shortage(have: float, tuned: dict[str, float]) -> Figure:
    """对数刻度的横条：我们有多少 token，按每参数 20 个又要多少（`tuned`：名字 → token 数）。"""
    fig, ax = canvas(15.5, 1.3 + 0.95 * (len(tuned) + 1), inches_per_unit=0.5)
    left, per_decade = 4.6, 1.35  # 刻度从 10⁵ 开始，每个数量级 1.35 格
    rows = {"《三国演义》（训练部分）": have, **tuned}
    for i, (name, tokens) in enumerate(rows.items()):
        y = 0.95 * (len(rows) - i) - 0.2
        width = per_decade * (log10(tokens) - 5)
        box(ax, left, y, width, 0.6, role="data" if i == 0 else "weight")
        note(ax, left - 0.2, y + 0.3, name, align="right", size=9.5)
        note(ax, left + width + 0.15, y + 0.3, _readable(tokens), size=9.5)
    for power in range(5, 13):
        x = left + per_decade * (power - 5)
        ax.plot([x, x], [0.55, 0.95 * len(rows) + 0.55], color="#d1d5db", lw=0.8, zorder=0)
        ax.text(
            x, 0.3, f"$10^{{{power}}}$", ha="center", va="center", size=9, color=INK["plain"].line
        )
    arrow(ax, (left, 0.55), (left + per_decade * 7.6, 0.55))
    return fig


def seeds_apart(means: pd.DataFrame, pairs: pd.DataFrame) -> Figure:
    """左：每种大小几个种子的平均与区间；右：相邻两级逐种子之差与区间，区间碰到 0 的分不清。"""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.4))
    millions = means["params"] / 1e6
    left.errorbar(millions, means["mean"], means["half"], fmt="o-", capsize=4)
    left.set(xscale="log", xlabel="参数量 N（百万，对数刻度）", ylabel="验证 loss（nat/token）")
    left.set_xticks(millions, [f"{p:.2f}" for p in millions])
    left.minorticks_off()
    names = [f"{a / 1e6:.2f} →\n{b / 1e6:.2f} M" for a, b in zip(pairs["small"], pairs["large"],
                                                               strict=True)]  # fmt: skip
    color = ["#0072b2" if apart else "#9ca3af" for apart in pairs["told_apart"]]
    half = pairs["high"] - pairs["gain"]
    right.bar(names, pairs["gain"], yerr=half, capsize=4, color=color)
    right.axhline(0, color=INK["plain"].line, lw=0.8)
    right.set(ylabel="大的低多少（nat）")
    figure.tight_layout()
    return figure


def gap_parts(parts: pd.DataFrame, sizes: Sequence[str]) -> Figure:
    """差距的两份：记忆（留出的十回 − 训练）与题材（后 12 回 − 留出的十回），各带区间。"""
    figure, axis = plt.subplots(figsize=(7.0, 3.2))
    x = range(len(parts))
    axis.errorbar(x, parts["memory"], parts["memory_half"], fmt="o-", capsize=4,
                  label="记忆：没训练过的同样章回 − 训练")  # fmt: skip
    axis.errorbar(x, parts["subject"], parts["subject_half"], fmt="s--", capsize=4,
                  label="题材：后 12 回 − 没训练过的同样章回")  # fmt: skip
    axis.axhline(0, color=INK["plain"].line, lw=0.8)
    axis.set_xticks(list(x), list(sizes))
    axis.set(ylabel="差（nat/token）")
    axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=2, fontsize=8.5)
    figure.tight_layout()
    return figure


def _readable(tokens: float) -> str:
    """token 数写成中文的万、亿。"""
    if tokens >= 1e12:
        return f"{tokens / 1e12:.2g} 万亿"
    if tokens >= 1e8:
        return f"{tokens / 1e8:,.0f} 亿"
    return f"{tokens / 1e4:,.0f} 万"
