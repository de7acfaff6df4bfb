"""`ddp_train` 一章的示意图：谁读什么，环形 all-reduce，与反向重叠的桶，no_sync 的时间线。"""

from math import cos, pi, sin

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures.style import arrow, box, brace, canvas, note


def who_reads_what() -> Figure:
    """全局 batch 按行分给两个 rank；各有完整的模型；梯度平均后各做同样的更新。"""
    fig, ax = canvas(16, 10.4, inches_per_unit=0.5)
    box(ax, 2.0, 9.2, 12.0, 0.9, "全局 batch：16 个序列，由 (seed, step) 决定", role="data")
    for rank, x in ((0, 0.6), (1, 9.0)):
        _rank(ax, rank, x)
    box(ax, 6.9, 4.05, 2.2, 1.2, "all-reduce\n求平均", role="comm")
    arrow(ax, (6.15, 4.65), (6.95, 4.65), role="comm", both=True)
    arrow(ax, (9.85, 4.65), (9.05, 4.65), role="comm", both=True)
    box(ax, 0.6, 0.2, 6.4, 0.8, "打印、评估、存档（经 .module）", role="plain", size=9.5)
    arrow(ax, (3.8, 1.7), (3.8, 1.0))
    box(ax, 9.0, 0.2, 6.4, 0.8, "在屏障处等", role="plain", size=9.5, dashed=True)
    return fig


def _rank(ax: Axes, rank: int, x: float) -> None:
    """一个 rank 的一步，自上而下。"""
    middle = x + 3.2
    rows = "第 0–7 行" if rank == 0 else "第 8–15 行"
    arrow(ax, (middle, 9.2), (middle, 8.4), role="data")
    box(ax, x, 7.5, 6.4, 0.9, f"rank {rank} 读{rows}", role="data")
    box(ax, x, 5.9, 6.4, 0.9, "完整的模型：前向、反向", role="compute")
    arrow(ax, (middle, 7.5), (middle, 6.8))
    gradient = x if rank == 0 else x + 0.8
    box(ax, gradient, 4.2, 5.6, 0.9, "自己这 8 行的梯度", role="gradient")
    arrow(ax, (middle, 5.9), (middle, 5.1), role="gradient")
    box(ax, x, 1.7, 6.4, 1.4, "AdamW：同样的参数、同样的梯度\n→ 同样的新参数", role="weight")
    arrow(ax, (middle, 4.2), (middle, 3.1), "平均梯度", role="gradient", offset=(1.1, 0.0))


def overlapped_backward() -> Figure:
    """反向从最后一层往前算：一个桶的梯度齐了就发，通信藏在后面几层的计算底下。"""
    fig, ax = canvas(17, 6.6, inches_per_unit=0.48)
    _timeline(ax, 4.1, "先算完再通信", [12.0, 13.4, 14.8], 1.3)
    _timeline(ax, 1.2, "边算边通信", [5.1, 8.1, 11.1 + 0.9], 1.3)
    arrow(ax, (2.6, 0.35), (16.8, 0.35))
    note(ax, 9.7, 0.05, "时间", align="center")
    return fig


def _timeline(ax: Axes, y: float, name: str, sends: list[float], width: float) -> None:
    """一行计算、一行通信；`sends` 是各桶发出的时刻。"""
    note(ax, 0.1, y + 1.0, name, size=10)
    note(ax, 2.5, y + 1.6, "计算", role="compute", align="right", size=9)
    note(ax, 2.5, y + 0.45, "通信", role="comm", align="right", size=9)
    for i, layer in enumerate(("第 6、5 层", "第 4、3 层", "第 2、1 层")):
        box(ax, 2.7 + i * 3.1, y + 1.2, 2.9, 0.8, f"反向 {layer}", role="compute", size=9)
    for i, start in enumerate(sends):
        box(ax, start, y, width, 0.8, f"桶 {i + 1}", role="comm", size=9)


def ring_all_reduce() -> Figure:
    """4 个 rank 排成环，每人手里的梯度切成 4 块：转一圈求和，再转一圈分发。"""
    fig, ax = canvas(16, 7.2, inches_per_unit=0.5)
    titles = ("第一圈：求和（reduce-scatter）", "第二圈：分发（all-gather）")
    for x, title, full in ((4.0, titles[0], False), (12.0, titles[1], True)):
        note(ax, x, 6.9, title, align="center", size=10.5)
        _ring(ax, x, 3.3, full)
    return fig


def _ring(ax: Axes, x: float, y: float, full: bool) -> None:
    """一个环：四个 rank，各画四块；粗色的块是这一圈结束时已经求好和的。"""
    places = [(x + 2.4 * cos(a), y + 2.4 * sin(a)) for a in (pi / 2, 0, -pi / 2, pi)]
    for i, (px, py) in enumerate(places):
        for block in range(4):
            summed = full or block == i
            box(ax, px - 1.0 + block * 0.5, py - 0.28, 0.46, 0.56, "Σ" if summed else "",
                role="gradient" if summed else "plain", size=9)  # fmt: skip
        note(ax, px, py + 0.55, f"rank {i}", align="center", size=9)
    pairs = [
        ((x + 1.1, y + 2.3), (x + 2.5, y + 0.95)),
        ((x + 2.5, y - 0.4), (x + 1.1, y - 2.2)),
        ((x - 1.1, y - 2.2), (x - 2.5, y - 0.4)),
        ((x - 2.5, y + 0.95), (x - 1.1, y + 2.3)),
    ]
    for start, end in pairs:
        arrow(ax, start, end, role="comm", bend=-0.2)


def quiet_micro_batches() -> Figure:
    """累积 4 份：每份都同步要通信 4 次，no_sync 之后只有最后一份通信。"""
    fig, ax = canvas(17, 4.1, inches_per_unit=0.48)
    for y, name, quiet in ((2.9, "每份都同步", False), (0.7, "no_sync", True)):
        note(ax, 0.1, y + 0.4, name, size=10)
        x = 3.0
        for i in range(4):
            box(ax, x, y, 2.0, 0.8, f"第 {i + 1} 份", role="compute", size=9.5)
            x += 2.1
            if not quiet or i == 3:
                box(ax, x, y, 1.2, 0.8, "通信", role="comm", size=9.5)
                x += 1.3
    brace(ax, 3.0, 9.2, 0.5, "with ddp.no_sync()：前向和反向都在里面", role="compute")
    return fig
