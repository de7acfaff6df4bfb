"""`mesh` 一章的图：网格与它的链路，每个轴要的带宽，步时模型与公开记录，布局，检查点间隔。"""

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from experiments.plan.architecture import PRESETS
from experiments.plan.failures import RATE, lost_share, upkeep
from experiments.plan.layouts import MODELS, Cell
from experiments.plan.step_time import CONFIGURATIONS, AxisCost
from figures.style import CYCLE, INK, arrow, box, canvas, note, use_style


def grid_picture() -> Figure:
    """两台机器、八个 rank：TP 在机器里成对，PP 在机器里前后，DP 跨机。"""
    fig, ax = canvas(15.2, 7.6, inches_per_unit=0.55)
    for node in range(2):
        x0 = 0.3 + 7.7 * node
        box(ax, x0, 0.9, 6.9, 5.6, role="plain", dashed=True)
        note(ax, x0 + 3.45, 6.05, f"机器 {node}（dp = {node}）", align="center")
        for pp in range(2):
            for tp in range(2):
                rank = 4 * node + 2 * pp + tp
                x, y = x0 + 0.5 + 3.5 * pp, 3.9 - 2.4 * tp
                box(ax, x, y, 2.4, 1.3, f"rank {rank}\npp {pp}，tp {tp}", role="weight", size=10)
            arrow(ax, (x0 + 1.7 + 3.5 * pp, 3.9), (x0 + 1.7 + 3.5 * pp, 2.8), role="comm",
                  both=True)  # fmt: skip
        for tp in range(2):
            arrow(ax, (x0 + 2.9, 4.55 - 2.4 * tp), (x0 + 4.0, 4.55 - 2.4 * tp), role="compute")
    for x in (2.0, 5.5):  # 两台机器里位置相同的一对
        for y, bend in ((5.2, -0.14), (1.5, 0.14)):
            arrow(ax, (x, y), (x + 7.7, y), role="data", both=True, dashed=True, bend=bend)
    for x, (role, text) in zip((1.1, 5.9, 10.4), (
        ("comm", "TP：机内，每层四次"), ("compute", "PP：前后相邻的两段"),
        ("data", "DP：跨机，每步一次"),
    ), strict=True):  # fmt: skip
        note(ax, x, 7.25, text, role=role, size=10.5)
    return fig


def axis_bandwidth(rows: list[AxisCost]) -> Figure:
    """每个轴一步的通信时间：整条走 NVLink，与整条走网卡。"""
    use_style()
    fig, ax = plt.subplots(figsize=(7.2, 3.0))
    y = np.arange(len(rows))[::-1]
    ax.barh(y + 0.2, [row.inside for row in rows], 0.36, color=CYCLE[2], label="走 NVLink")
    ax.barh(y - 0.2, [row.across for row in rows], 0.36, color=CYCLE[1], label="走网卡")
    for at, row in zip(y, rows, strict=True):
        ax.text(row.inside * 1.08, at + 0.2, f"{row.inside:.2g} s", va="center", size=9)
        ax.text(row.across * 1.08, at - 0.2, f"{row.across:.2g} s", va="center", size=9)
    ax.set_yticks(y, [f"{row.axis}\n{row.volume / 1e9:,.0f} GB" for row in rows])
    ax.set(xscale="log", xlabel="每步的通信（秒，不算重叠）",
           xlim=(min(r.inside for r in rows) / 2, 6 * max(r.across for r in rows)))  # fmt: skip
    ax.grid(axis="y", visible=False)
    fig.legend(loc="upper center", ncols=2)
    fig.tight_layout(rect=(0, 0, 1, 0.9))
    return fig


GROUPS = {
    "矩阵乘法": ("matmul",), "注意力": ("attention",), "逐点运算": ("elementwise",),
    "通信": ("tensor", "context", "pipeline", "data"), "气泡": ("bubble",),
    "输出头、优化器": ("head", "optimizer"),
}


def predicted_and_published() -> Figure:
    """上：十三个配置预测与发布的利用率；下：预测的一步花在哪里。"""
    use_style()
    fig, (left, right) = plt.subplots(2, 1, figsize=(7.2, 9.0))
    rows = CONFIGURATIONS[::-1]
    y = np.arange(len(rows))
    for at, row in zip(y, rows, strict=True):
        left.plot([row.published, row.predicted], [at, at], color="#9ca3af", lw=1.4, zorder=1)
    left.plot([r.published for r in rows], y, "o", color=CYCLE[0], label="发布的")
    left.plot([r.predicted for r in rows], y, "D", color=CYCLE[1], label="预测的")
    left.set_yticks(y, [row.name for row in rows])
    left.set(xlabel="利用率（%）", xlim=(30, 65))
    left.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, fontsize=9.5)
    start = np.zeros(len(rows))
    for color, (label, names) in zip(CYCLE, GROUPS.items(), strict=True):
        share = np.array([
            100 * sum(getattr(row.step, name) for name in names) / row.step.total for row in rows
        ])
        right.barh(y, share, left=start, color=color, label=label)
        start += share
    right.set_yticks(y, [row.name for row in rows])
    right.set(xlabel="占预测的一步（%）", xlim=(0, 100))
    right.grid(axis="y", visible=False)
    right.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3, fontsize=9.5)
    fig.tight_layout()
    return fig


def mfu_by_cards(cells: list[Cell]) -> Figure:
    """同样的 batch，卡越多每张卡的 MFU 越低；放不下的没有点。"""
    use_style()
    fig, ax = plt.subplots(figsize=(7.2, 3.8))
    for color, model, mark in zip(CYCLE, MODELS, "os^Dv", strict=False):
        row = [cell for cell in cells if cell.model == model and cell.choice]
        ax.plot([c.gpus for c in row], [c.choice.mfu() for c in row], color=color, marker=mark,
                label=f"{model}（{MODELS[model][1] / 2**20:.0f} M token/步）")  # fmt: skip
    ax.set(xscale="log", xlabel="H100 的张数", ylabel="预测的 MFU（%）", ylim=(0, 75))
    fig.legend(loc="upper center", ncols=3, fontsize=9)
    fig.tight_layout(rect=(0, 0, 1, 0.86))
    return fig


def checkpoint_interval() -> Figure:
    """存得太勤浪费在存盘，存得太疏浪费在重做：几种规模的总浪费与最低点。"""
    use_style()
    fig, ax = plt.subplots(figsize=(7.2, 3.8))
    params = PRESETS["llama3-405b"].params()
    minutes = np.geomspace(0.3, 300, 200)
    for color, gpus in zip(CYCLE, (1024, 16_384, 100_000), strict=False):
        one = upkeep(params, gpus)
        lost = [100 * lost_share(60 * m, one.save, one.mtbf) for m in minutes]
        ax.plot(minutes, lost, color=color, label=f"{gpus:,} 张，每天坏 {RATE * gpus:.1f} 次")
        ax.plot(one.interval / 60, 100 * one.lost, "o", color=color)
    ax.axhline(10, color=INK["plain"].line, lw=0.9, ls="--")
    ax.text(300, 8.9, "Llama 3：白费不到 10 %", size=9, va="top", ha="right")
    ax.set(xscale="log", yscale="log", xlabel="每隔几分钟存一次检查点",
           ylabel="白费的时间（%）", ylim=(0.3, 110))  # fmt: skip
    ax.set_yticks([1, 10, 100], ["1", "10", "100"])
    fig.legend(loc="upper center", ncols=3, fontsize=9)
    fig.tight_layout(rect=(0, 0, 1, 0.91))
    return fig
