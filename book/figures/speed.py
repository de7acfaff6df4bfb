"""`speed` 一章的图：一步由什么组成、合并前后搬多少内存，以及由测量画出的几张图。"""

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures.style import CYCLE, INK, TEXT, arrow, box, brace, canvas, note

KINDS = ["矩阵乘法", "注意力", "交叉熵", "其他逐元素", "裁剪与更新", "框架开销"]
COLORS = dict(zip(KINDS, [*CYCLE[:5], "#9ca3af"], strict=True))


def one_step() -> Figure:
    """一步的六件事，以及每件事的 FLOPs。"""
    fig, ax = canvas(18, 3.6, inches_per_unit=0.47)
    parts = [
        ("取 batch", 2.0, "data", "0"), ("前向", 3.2, "compute", "2N + 4LTd"),
        ("交叉熵", 2.0, "compute", "约 0"), ("反向", 5.2, "gradient", "4N + 8LTd"),
        ("裁剪", 1.6, "gradient", "约 0"), ("更新", 1.8, "weight", "约 0"),
    ]  # fmt: skip
    x = 0.3
    for name, width, role, flops in parts:
        box(ax, x, 1.0, width, 1.3, name, role=role, size=11.5)
        note(ax, x + width / 2, 2.75, flops, role=role, align="center")
        x += width + 0.32
    note(ax, 9, 3.3, "每个 token 的 FLOPs", align="center", size=10)
    brace(ax, 2.62, 13.66, 0.6, "只有这里的矩阵乘法记在账上；其余的工作不记账，却照样花时间")
    return fig


def fusion() -> Figure:
    """一串逐元素运算：逐个执行要读写内存三个来回，合并后一个来回。"""
    fig, ax = canvas(18, 6.2, inches_per_unit=0.47)
    note(ax, 0.3, 5.75, "逐个执行：每个运算读一遍、写一遍", size=10.5)
    note(ax, 0.3, 2.75, "合并成一个内核：中间结果留在寄存器里", size=10.5)
    box(ax, 0.3, 3.3, 17.4, 0.6, "内存", role="data", size=9.5)
    for i, name in enumerate(("silu(gate)", "× up", "转成 bf16")):
        x = 1.6 + 5.6 * i
        box(ax, x, 4.6, 3.2, 0.8, name, role="compute", size=10)
        arrow(ax, (x + 0.7, 3.9), (x + 0.7, 4.6), role="data")
        arrow(ax, (x + 2.5, 4.6), (x + 2.5, 3.9), role="data")
    box(ax, 0.3, 0.3, 17.4, 0.6, "内存", role="data", size=9.5)
    box(ax, 5.4, 1.5, 7.2, 0.8, "silu(gate) × up → bf16", role="compute", size=10)
    arrow(ax, (6.4, 0.9), (6.4, 1.5), role="data")
    arrow(ax, (11.6, 1.5), (11.6, 0.9), role="data")
    return fig


def ladder(table: pd.DataFrame) -> Figure:
    """每一级平均的 ms/步（横条，点是中位数）与相对第一级的速度。"""
    rows = table.iloc[::-1]
    fig, ax = plt.subplots(figsize=(7.2, 0.42 * len(rows) + 0.9))
    colors = np.where(rows["keep"].astype(bool), CYCLE[0], "#9ca3af")
    ax.barh(rows["variant"], rows["mean_ms"], color=colors, height=0.66)
    ax.plot(rows["ms"], range(len(rows)), "o", color=TEXT, ms=4)
    for i, row in enumerate(rows.itertuples()):
        text = f"{row.mean_ms:.0f} ms · {row.speedup:.2f}×"
        end = (max(row.mean_ms, row.ms), i)
        ax.annotate(text, end, (7, 0), textcoords="offset points", va="center", fontsize=9)
    longest = rows[["mean_ms", "ms"]].max().max()
    ax.set(xlabel="ms/步（横条是平均，点是中位数）", xlim=(0, longest * 1.32))
    ax.grid(axis="y", visible=False)
    return fig


def breakdown(spent: pd.Series) -> Figure:
    """每个变体一步的时间去向，堆叠的横条；`spent` 的索引是（变体, 类别），值是毫秒。"""
    order = list(dict.fromkeys(spent.index.get_level_values(0)))[::-1]
    sums = spent.unstack(1).reindex(index=order, columns=KINDS).fillna(0)
    fig, ax = plt.subplots(figsize=(7.2, 2.5))
    left = np.zeros(len(sums))
    for kind in KINDS:
        ax.barh(sums.index, sums[kind], left=left, label=kind, color=COLORS[kind], height=0.6)
        for y, (start, width) in enumerate(zip(left, sums[kind], strict=True)):
            if width > sums.to_numpy().sum(axis=1).max() * 0.06:
                ax.text(start + width / 2, y, f"{width:.0f}", ha="center", va="center",
                        color="white", fontsize=9)  # fmt: skip
        left += sums[kind].to_numpy()
    ax.set(xlabel="ms/步（剖析的占比 × 平均的一步）")
    ax.grid(axis="y", visible=False)
    ax.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=9)
    return fig


def roofline(table: pd.DataFrame) -> Figure:
    """算术强度对速度，双对数；斜线是带宽，横线是 fp32 与 bf16 的矩阵乘法峰值。"""
    first = table.iloc[0]
    fig, ax = plt.subplots(figsize=(7.2, 4.8))
    x = np.logspace(-1.5, 3.2, 200)
    for name, color in (("fp32", CYCLE[0]), ("bf16", CYCLE[1])):
        peak = first[f"{name}_peak_gflops"]
        if np.isfinite(peak):
            ax.plot(x, np.minimum(x * first["bandwidth_gb"], peak), color=color, lw=1.6)
            ax.text(1800, peak, f"{name} 峰值 {peak:.0f}", color=color, va="center", size=9)
    ax.text(1.2, 1.2 * first["bandwidth_gb"] * 1.9, f"带宽 {first['bandwidth_gb']:.0f} GB/s",
            rotation=40, size=9, color=INK["plain"].line)  # fmt: skip
    style = {"float32": (CYCLE[0], "o", -90, "top"), "bfloat16": (CYCLE[1], "s", 90, "bottom")}
    for dtype, (color, marker, tilt, side) in style.items():
        rows = table[table["dtype"] == dtype]
        ax.scatter(rows["intensity"], rows["gflops"], color=color, marker=marker, zorder=3, s=34)
        for _, row in rows.iterrows():
            ax.annotate(row["operation"], (row["intensity"], row["gflops"]), (0, tilt / 12),
                        textcoords="offset points", fontsize=8.5, rotation=90, ha="center",
                        va=side)  # fmt: skip
    ax.set(xscale="log", yscale="log", xlabel="算术强度（FLOP/字节）", ylabel="速度（GFLOP/s）")
    return fig


def growth(table: pd.DataFrame) -> Figure:
    """三个方向上的实测时间与预言。"""
    axes_of = {"batch": ("tokens", "每步 token 数"), "参数": ("params", "参数量 N"),
               "长度": ("seq_len", "序列长度 T（token 总数不变）")}  # fmt: skip
    fig, axes = plt.subplots(1, 3, figsize=(9.2, 3.1))
    for ax, (series, (column, label)) in zip(axes, axes_of.items(), strict=True):
        rows = table[table["series"] == series]
        ax.set(xlabel=label, xscale="log", yscale="log")
        _measured_and_predicted(ax, rows, column)
    axes[0].set_ylabel("ms/步")
    axes[0].legend(fontsize=9)
    fig.tight_layout()
    return fig


def _measured_and_predicted(ax: Axes, rows: pd.DataFrame, column: str) -> None:
    ax.plot(rows[column], rows["ms"], "o-", label="实测")
    ax.plot(rows[column], rows["predicted_ms"], "--", color="#6b7280", label="6N + 12LTd")
    ax.minorticks_off()
    ax.set_yticks(milliseconds := _nice_ticks(rows["ms"]), [f"{t:g}" for t in milliseconds])
    ticks = list(rows[column])[:: max(1, len(rows) // 3)]
    ax.set_xticks(ticks, [f"{t / 1e6:.1f}M" if t >= 1e5 else f"{t:g}" for t in ticks])


def _nice_ticks(values: pd.Series) -> list[float]:
    """对数轴上 1、2、5 系列的刻度，覆盖这些值。"""
    series = [m * 10.0**e for e in range(-1, 5) for m in (1, 2, 5)]
    return [t for t in series if values.min() / 2 < t < values.max() * 2]
