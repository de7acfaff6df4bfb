"""`literature` 一章的图：比值随算力分开、舍入的方框、服务的 token 越多模型越小。"""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.literature import DISAGREEMENT, PRINTED, SMALL, TABLE_3, optimum_range
from experiments.training.law import PUBLISHED
from figures.style import INK


def ratios() -> Figure:
    """三组常数的 token / 参数随算力怎样走，与表 3（方法一）的各行。"""
    figure, axis = plt.subplots(figsize=(7.2, 3.8))
    flops = np.geomspace(1e18, 1e26, 80)
    for (name, law), style in zip(PUBLISHED.items(), ("-", "--", "-."), strict=True):
        N, D = law.optimum(flops)
        axis.plot(flops, D / N, style, label=name)
    rows = [tuple(map(float, row)) for row in TABLE_3]
    axis.plot([C for _, C, _ in rows], [D / N for N, _, D in rows], "o", ms=5,
              color=INK["plain"].line, label="表 3（方法一）")  # fmt: skip
    axis.axhline(20, color=INK["plain"].line, lw=0.8, ls=":")
    axis.set(xscale="log", yscale="log", xlabel="训练算力 C（FLOPs）", ylabel="最优的 token / 参数")
    axis.set_yticks([10, 20, 50, 100, 200], ["10", "20", "50", "100", "200"])
    axis.legend(loc="upper left", fontsize=8.5)
    return figure


def rounding() -> Figure:
    """2.21e19 上的最优 N：印出来的常数的舍入范围，盖住了互相矛盾的两个答案。"""
    figure, axis = plt.subplots(figsize=(7.2, 2.6))
    (low, high), _ = optimum_range(PUBLISHED[PRINTED], SMALL)
    axis.axvspan(low / 1e6, high / 1e6, alpha=0.15, lw=0)
    points = {name: law.optimum(SMALL)[0] for name, law in PUBLISHED.items()}
    points |= {name: N for name, (N, _) in DISAGREEMENT.items()}
    names = list(points)
    for y, name in enumerate(names):
        color = "#d55e00" if name in DISAGREEMENT else "#0072b2"
        axis.plot(points[name] / 1e6, y, "o", color=color)
        axis.axhline(y, color="#e5e7eb", lw=0.8, zorder=0)
    axis.set_yticks(range(len(names)), names)
    axis.set(xlabel="最优 N（百万参数）", xlim=(220, 460), ylim=(len(names) - 0.5, -0.5))
    figure.tight_layout()
    return figure


def service(rows: pd.DataFrame) -> Figure:
    """同样好的模型：要服务的 token 越多，该训得越小、读得越多，一生省得越多。"""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.2))
    left.plot(rows["served"], rows["params"] / 1e9, "o-", ms=4)
    left.set(xscale="log", ylabel="最省的 N（十亿参数）", xlabel="训完之后读写的 token",
             ylim=(0, None))  # fmt: skip
    right.plot(rows["served"], rows["saved"], "o-", ms=4, color="#009e73")
    right.set(xscale="log", ylabel="一生省下的运算（%）", xlabel="训完之后读写的 token",
              ylim=(0, 100))  # fmt: skip
    figure.tight_layout()
    return figure
