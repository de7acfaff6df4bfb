"""`grad_accum` 一章的示意图：几个 micro-batch 的梯度加成一次更新；变长时每个 token 的权重。"""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures.style import INK, arrow, box, brace, canvas, note

COLUMN = 3.3  # 一个 micro-batch 占的宽度（格）


def accumulation() -> Figure:
    """一批拆成 4 份，从左到右依次前向、反向，梯度累加进同一个 .grad，最后更新一次。"""
    fig, ax = canvas(18.4, 8.9, inches_per_unit=0.46)
    box(ax, 0.3, 7.6, 4 * COLUMN - 0.3, 0.9, "一批 32 个序列", role="data")
    for i in range(4):
        _micro_batch(ax, 0.3 + i * COLUMN, i)
    grad = (0.3, 1.3, 4 * COLUMN - 0.3, 0.9)
    box(ax, *grad, ".grad（与参数一样大，只有一份）", role="gradient")
    box(ax, 14.7, 1.3, 3.4, 0.9, "optimizer.step()", role="weight")
    arrow(ax, (0.3 + 4 * COLUMN - 0.3, 1.75), (14.7, 1.75), role="gradient")
    note(ax, 16.4, 2.65, "一次更新", role="weight", align="center")
    arrow(ax, (0.3, 0.55), (18.1, 0.55))
    note(ax, 9.2, 0.2, "时间", align="center")
    return fig


def _micro_batch(ax: Axes, x: float, i: int) -> None:
    """第 i 列：数据、前向留下激活、反向用掉激活、梯度加进 .grad。"""
    width = COLUMN - 0.6
    middle = x + width / 2
    box(ax, x, 6.3, width, 0.8, f"第 {i + 1} 份：8 个", role="data", size=9.5)
    arrow(ax, (middle, 7.6), (middle, 7.1), role="data")
    box(ax, x, 5.0, width / 2 - 0.1, 0.8, "前向", role="compute", size=9.5)
    box(ax, x + width / 2 + 0.1, 5.0, width / 2 - 0.1, 0.8, "反向", role="compute", size=9.5)
    arrow(ax, (x + width / 4, 6.3), (x + width / 4, 5.8))
    box(ax, x, 3.5, width, 0.8, "激活：用完即还", role="plain", size=9.5, dashed=True)
    arrow(ax, (x + width / 4, 5.0), (x + width / 4, 4.3))
    arrow(ax, (x + 3 * width / 4, 4.3), (x + 3 * width / 4, 5.0))
    bend = (x + width + 0.12, 5.4), (x + width + 0.12, 2.2)
    arrow(ax, *bend, role="gradient")
    ax.plot([x + width, x + width + 0.12], [5.4, 5.4], color=INK["gradient"].line, lw=1.4)
    ax.text(x + width - 0.12, 2.75, "写入" if i == 0 else "相加", ha="right", va="center",
            size=9.5, color=INK["gradient"].line)  # fmt: skip


def token_weights() -> Figure:
    """两份各 5 个与 1 个有效 token：先各自平均再除以 2，孤单的那个 token 重了 5 倍。"""
    fig, ax = canvas(17.2, 6.0, inches_per_unit=0.47)
    _weights_row(ax, 3.6, "除以 k", ["1/10"] * 5, "1/2", "compute")
    _weights_row(ax, 0.9, "按 token", ["1/6"] * 5, "1/6", "weight")
    note(ax, 5.85, 5.6, "第 1 份：5 个有效 token", role="data", align="center")
    note(ax, 13.3, 5.6, "第 2 份：1 个有效 token，4 个填充", role="data", align="center")
    brace(ax, 2.3, 9.4, 0.62, "Σ loss ÷ 6", role="weight")
    brace(ax, 9.8, 16.8, 0.62, "Σ loss ÷ 6", role="weight")
    brace(ax, 2.3, 9.4, 3.32, "平均 ÷ 2", role="compute")
    brace(ax, 9.8, 16.8, 3.32, "平均 ÷ 2", role="compute")
    return fig


def _weights_row(ax: Axes, y: float, name: str, first: list[str], lone: str, role: str) -> None:
    """一行：名字，两份里每个 token 的权重，填充画成虚框。"""
    note(ax, 0.1, y + 0.55, name, role=role, size=10.5)
    for i, weight in enumerate(first):
        box(ax, 2.3 + i * 1.42, y, 1.26, 1.1, weight, role=role)
    box(ax, 9.8, y, 1.26, 1.1, lone, role="gradient" if role == "compute" else role)
    for i in range(1, 5):
        box(ax, 9.8 + i * 1.42, y, 1.26, 1.1, "–", role="plain", dashed=True)
