"""`budget` 一章的图：预算怎样算出来，以及给只想看图的人的几条曲线。"""

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from experiments.plan.architecture import PRESETS
from experiments.plan.memory import USABLE, estimate
from experiments.plan.planning import training_flops, training_hours
from experiments.plan.published import MFU_RUNS, MFU_USUAL, WHOLE_RUNS
from experiments.plan.report import COMPARED, strategy_name
from figures.style import CYCLE, arrow, box, canvas, note

# 显存四部分的颜色，与计算器相同
PARTS = {
    "states": ("状态", "#00734f"),
    "working": ("权重副本", "#56b4e9"),
    "activations": ("激活", "#d98200"),
    "peak": ("logits 等", "#9c4479"),
}


def flow() -> Figure:
    """从参数量出发的两条线：一条算时间与钱，一条算放不放得下。"""
    fig, ax = canvas(16.2, 6.0, inches_per_unit=0.5)
    n = box(ax, 0.2, 2.4, 2.3, 1.2, "参数量 N", role="weight")
    d = box(ax, 3.6, 4.2, 2.6, 1.2, "D = 20·N\ntoken", role="data")
    c = box(ax, 7.3, 4.2, 2.6, 1.2, "C = 6·N·D\nFLOPs", role="compute")
    h = box(ax, 11.0, 4.2, 2.3, 1.2, "小时", role="plain")
    m = box(ax, 14.3, 4.2, 1.7, 1.2, "钱", role="plain")
    s = box(ax, 3.6, 0.6, 2.6, 1.2, "状态\n16·N 字节", role="weight")
    a = box(ax, 7.3, 0.6, 2.6, 1.2, "激活与\nlogits", role="gradient")
    f = box(ax, 11.0, 0.6, 2.3, 1.2, "放得下吗", role="plain")
    arrow(ax, (n[0] + 1.15, n[1] + 0.3), (d[0] - 1.3, d[1]))
    arrow(ax, (n[0] + 1.15, n[1] - 0.3), (s[0] - 1.3, s[1]))
    for start, end, half in ((d, c, 1.3), (c, h, 1.15), (h, m, 0.85), (s, a, 1.3), (a, f, 1.15)):
        arrow(ax, (start[0] + (1.3 if start is not h else 1.15), start[1]), (end[0] - half, end[1]))
    note(ax, 10.45, 5.75, "÷（卡数 × 峰值 × MFU）", align="center")
    note(ax, 13.8, 5.75, "× 卡数 × 单价", align="center")
    note(ax, 6.75, 0.25, "＋ micro-batch × 序列 × 每 token 字节数", align="center")
    box(ax, 14.0, 0.6, 2.0, 1.2, "并行策略\n重算、累积", role="comm", size=9.5)
    arrow(ax, (f[0] + 1.15, f[1]), (14.0, f[1]))
    return fig


def hours_by_size() -> Figure:
    """H100 上训练到每参数 20 个 token 的小时数；带子是 MFU 50 % 到 30 %。"""
    fig, ax = plt.subplots(figsize=(7.4, 4.0))
    sizes = np.geomspace(5e7, 1e11, 100)
    flops = training_flops(sizes, 20 * sizes)
    for gpus, color in zip((1, 8, 64, 512), CYCLE, strict=False):
        low, middle, high = (training_hours(flops, gpus, 989e12, mfu) for mfu in (0.5, 0.4, 0.3))
        ax.fill_between(sizes, low, high, color=color, alpha=0.18, lw=0)
        ax.plot(sizes, middle, color=color, label=f"{gpus} 张")
    for hours, name in ((1, "一小时"), (24, "一天"), (24 * 30, "一个月")):
        ax.axhline(hours, color="#9ca3af", lw=0.8, zorder=0)
        ax.text(5.3e7, hours * 1.1, name, size=9, color="#4b5563")
    ax.set(xscale="log", yscale="log", xlabel="参数量 N", ylabel="小时", ylim=(0.1, 2e4))
    ax.legend(title="H100", loc="lower right")
    return fig


def memory_by_strategy() -> Figure:
    """三个规模、六种放法的每卡显存；竖线是 80 GB 与留出一成之后。"""
    fig, axes = plt.subplots(1, 3, figsize=(9.6, 3.5), sharey=True)
    cases = (("124M", "124m", 16, 8), ("1.3B", "1.3b", 8, 8), ("7B", "7b", 2, 64))
    names = [strategy_name(*how).replace("（ZeRO-3）", "") for how in COMPARED][::-1]
    for ax, (title, preset, micro, gpus) in zip(axes, cases, strict=True):
        left = np.zeros(len(COMPARED))
        memories = [
            estimate(PRESETS[preset], micro_batch=micro, strategy=s, gpus=gpus, checkpoint=c)
            for s, c in COMPARED[::-1]
        ]
        for part, (label, color) in PARTS.items():
            width = np.array([getattr(memory, part) for memory in memories])
            ax.barh(names, width, left=left, color=color, label=label)
            left += width
        ax.axvline(80, color="#b91c1c", lw=1.6)
        ax.axvline(80 * USABLE, color="#b91c1c", lw=1, ls="--")
        ax.set(xlabel=f"{title}，每卡 {micro} 条，{gpus} 张（GB）")
        ax.grid(axis="y", visible=False)
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="upper center", ncols=4)
    fig.tight_layout(rect=(0, 0, 1, 0.92))
    return fig


def published_runs() -> Figure:
    """左：发布的 MFU 与重算的 MFU；右：由整次训练的时间反推的 MFU。"""
    fig, (left, right) = plt.subplots(1, 2, figsize=(9.6, 4.0), width_ratios=(1, 1.15))
    left.plot([30, 62], [30, 62], color="#9ca3af", lw=1, zorder=0)
    left.plot([run.published for run in MFU_RUNS], [run.ours for run in MFU_RUNS], "o", ms=6)
    left.set(xlabel="发布的 MFU（%）", ylabel="重算的 MFU（%）", aspect="equal")
    low, high = MFU_USUAL
    right.axvspan(100 * low, 100 * high, color="#e6f1fa", label="常见的 30 %–50 %")
    names = [run.name for run in WHOLE_RUNS[::-1]]
    right.plot([100 * run.implied_mfu for run in WHOLE_RUNS[::-1]], names, "D", color="#d55e00")
    right.set(xlabel="由总时间反推的 MFU（%）", xlim=(20, 70))
    right.legend(loc="upper left", fontsize=9)
    fig.tight_layout()
    return fig


def tracked_and_predicted(table: pd.DataFrame) -> Figure:
    """跟踪的峰值（点）与估计（条）；`table` 是 budget_memory.csv。"""
    names = {"eager": "eager", "compiled": "编译", "checkpoint": "重算"}
    rows = table.iloc[::-1].reset_index(drop=True)
    labels = [
        f"{row.model}  {'FSDP×' + str(row.gpus) if row.strategy == 'zero3' else 'DDP'}  "
        f"{names[row.variant]}"
        for row in rows.itertuples()
    ]
    fig, ax = plt.subplots(figsize=(7.6, 4.9))
    left = np.zeros(len(rows))
    for part, label, color in (
        ("states_gb", "状态", "#00734f"),
        ("activations_gb", "前向结束时的激活", "#d98200"),
        ("temp_gb", "峰值时另有的", "#9c4479"),
    ):
        ax.barh(labels, rows[part], left=left, color=color, label=f"跟踪：{label}")
        left += rows[part]
    ax.plot(rows["predicted_gb"], labels, "k|", ms=13, mew=2, label="估计的合计")
    for y, row in enumerate(rows.itertuples()):
        ax.text(
            max(row.peak_gb, row.predicted_gb) + 3,
            y,
            f"{row.error_percent:+.1f} %",
            va="center",
            size=9,
        )
    ax.set(xlabel="每卡显存峰值（GB）", xlim=(0, 1.12 * rows["peak_gb"].max()))
    ax.grid(axis="y", visible=False)
    ax.legend(loc="lower right", fontsize=9)
    return fig
