"""`isoflop` 一章的图：每档算力的抛物线，与谷底的 N、D 随算力的变化。"""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.training.law import Valleys, parabola


def parabolas(table: pd.DataFrame, column: str, ends: pd.DataFrame) -> Figure:
    """一档一条：各种子的点、穿过它们的抛物线、谷底；说不出谷底的一档只有点。"""
    figure, axis = plt.subplots(figsize=(7.4, 4.2))
    colors = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    for (budget, part), color in zip(table.groupby("budget"), colors, strict=False):
        axis.plot(part[column], part["val_loss"], "o", ms=4, color=color, alpha=0.7,
                  label=f"C = {budget:.2g}")  # fmt: skip
        end = ends[ends["budget"] == budget].iloc[0]
        if end["reason"]:
            continue
        sizes = np.geomspace(part[column].min(), part[column].max(), 100)
        axis.plot(sizes, np.polyval(parabola(part[column], part["val_loss"]), np.log(sizes)),
                  color=color, lw=1.2)  # fmt: skip
        axis.plot(end["N"], end["loss"], "*", ms=13, color=color, mec="black", mew=0.6)
    axis.set(xscale="log", xlabel="参数量 N（对数刻度）", ylabel="验证 loss（nat/token）")
    axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=4, fontsize=8.5)
    figure.tight_layout()
    return figure


def growth(whole: Valleys, inner: Valleys) -> Figure:
    """左：N_opt 对算力，两种数法；右：D_opt。误差棒是种子的 95 % 区间，虚线是公开的两个斜率。"""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.8))
    for found, name, marker in ((whole, "全部参数", "o"), (inner, "不含词嵌入", "s")):
        _bars(left, found.C, found.N, found.interval(0), marker, name)
    middle = np.exp(np.log(whole.C).mean()), np.exp(np.log(whole.N).mean())
    for slope, name in ((0.50, "斜率 0.50"), (0.73, "斜率 0.73")):
        left.plot(whole.C, middle[1] * (whole.C / middle[0]) ** slope, "--", lw=1, label=name)
    _bars(right, whole.C, whole.D, whole.interval(1), "o", "token")
    for axis, label in ((left, "谷底的 N"), (right, "谷底的 D（token）")):
        axis.set(xscale="log", yscale="log", xlabel="算力 C（FLOPs）", ylabel=label)
    left.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=2, fontsize=8.5)
    figure.tight_layout()
    return figure


def _bars(axis, C: np.ndarray, value: np.ndarray, interval: np.ndarray, marker: str, name: str):
    low, high = interval
    error = np.stack((np.maximum(value - low, 0), np.maximum(high - value, 0)))
    axis.errorbar(C, value, error, fmt=f"{marker}-", capsize=4, label=name)
