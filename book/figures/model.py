"""`model` 一章的示意图：模型的全貌、因果掩码、RoPE 的旋转。"""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures.style import INK, arrow, box, canvas, note


def architecture() -> Figure:
    """从 token 编号到 logits：左边是整体，右边是一层的内部；旁边写着形状。"""
    fig, ax = canvas(16, 10.2, inches_per_unit=0.5)
    _trunk(ax)
    _block(ax)
    ax.plot([5.0, 8.0], [5.3, 9.7], ls=":", color=INK["plain"].line, lw=1)
    ax.plot([5.0, 8.0], [4.1, 0.5], ls=":", color=INK["plain"].line, lw=1)
    return fig


def _trunk(ax: Axes) -> None:
    """左边的主干，自下而上。"""
    parts = [
        (0.4, "token 编号 idx", "data", "(B, T)"),
        (2.2, "词嵌入（查表）", "weight", "(B, T, d)"),
        (4.2, "一层 Block  × L", "compute", "(B, T, d)"),
        (6.2, "RMSNorm", "compute", "(B, T, d)"),
        (7.9, "输出头（打分）", "weight", "(B, T, V)"),
    ]
    for y, text, role, shape in parts:
        box(ax, 1.4, y, 3.6, 1.0, text, role=role)
        if y > 0.4:
            arrow(ax, (3.2, y - 0.75), (3.2, y))
        note(ax, 3.4, y + 1.28, shape, size=9)
    arrow(ax, (3.2, 8.9), (3.2, 9.7))
    note(ax, 3.2, 10.0, "logits", align="center")
    arrow(ax, (1.4, 2.7), (1.4, 8.4), role="weight", bend=-0.22, both=True, dashed=True)
    note(ax, 0.78, 9.3, "同一个矩阵", role="weight", align="center")


def _block(ax: Axes) -> None:
    """右边：一层里的两个残差分支。"""
    box(ax, 8.0, 0.5, 7.8, 9.2, role="plain", dashed=True)
    x = 9.2  # 残差流
    arrow(ax, (x, 0.1), (x, 10.1))
    note(ax, x, 10.35, "残差流", align="center")
    branches = [
        (0.9, ["RMSNorm", "Q、K、V → RoPE", "因果注意力", "输出投影"]),
        (5.7, ["RMSNorm", "silu(gate) · up", "down"]),
    ]
    for bottom, names in branches:
        for i, name in enumerate(names):
            y = bottom + 0.1 + i * 1.08
            box(ax, 10.6, y, 3.5, 0.62, name, role="compute", size=9.5)
            if i:
                arrow(ax, (12.35, y - 0.5), (12.35, y + 0.04))
        top = bottom + 0.1 + (len(names) - 1) * 1.08 + 0.31
        arrow(ax, (x, bottom + 0.41), (10.6, bottom + 0.41))
        arrow(ax, (10.6, top), (x + 0.22, top))
        ax.text(x, top, "+", ha="center", va="center", size=11, bbox={
            "boxstyle": "circle,pad=0.12", "facecolor": "white", "edgecolor": INK["plain"].line})
    note(ax, 14.25, 2.9, "在 token\n之间\n搬信息", role="compute")
    note(ax, 14.25, 7.1, "在每个\ntoken 内\n加工", role="compute")


def causal_mask(words: str = "话说天下大势") -> Figure:
    """因果掩码：第 t 行只能看前 t 列。"""
    n = len(words)
    fig, ax = canvas(n + 5.6, n + 1.6, inches_per_unit=0.5)
    for row in range(n):
        y = n - 1 - row
        for col in range(n):
            role = "data" if col <= row else "plain"
            text = "" if col <= row else "−∞"
            box(ax, 1.2 + col + 0.06, y + 0.06, 0.88, 0.88, text, role=role, size=9)
        note(ax, 0.95, y + 0.5, words[row], align="right", size=11)
        note(ax, 1.2 + row + 0.5, n + 0.35, words[row], align="center", size=11)
        note(ax, n + 1.5, y + 0.5, f"读完“{words[: row + 1]}”，猜下一个", size=9)
    note(ax, 1.2 + n / 2, n + 1.05, "被看的位置（K、V）", align="center")
    return fig


def rope_rotation() -> Figure:
    """同一对 q、k 放在位置 (3, 1) 与 (6, 4)：各自转得不同，夹角却一样。"""
    fig, ax = canvas(14, 6.2, inches_per_unit=0.55)
    theta, start_q, start_k = np.deg2rad(28), np.deg2rad(50), np.deg2rad(10)
    for center, (m, n) in (((3.4, 2.9), (3, 1)), ((10.4, 2.9), (6, 4))):
        angle = np.linspace(0, 2 * np.pi, 200)
        ax.plot(center[0] + 2.3 * np.cos(angle), center[1] + 2.3 * np.sin(angle),
                color="#d1d5db", lw=1)
        tips = []
        pair = (("q", m, start_q, "data"), ("k", n, start_k, "gradient"))
        for name, position, begin, role in pair:
            turned = begin + position * theta
            _ray(ax, center, begin, 2.3, role, faint=True)
            tips.append(turned)
            _ray(ax, center, turned, 2.3, role)
            x, y = center[0] + 2.72 * np.cos(turned), center[1] + 2.72 * np.sin(turned)
            note(ax, x, y, f"{name}，位置 {position}", role=role, align="center")
        wedge = np.linspace(tips[0], tips[1], 40)
        ax.plot(center[0] + 0.9 * np.cos(wedge), center[1] + 0.9 * np.sin(wedge),
                color=INK["compute"].line, lw=2.2)
        middle = wedge.mean()
        note(ax, center[0] + 1.3 * np.cos(middle), center[1] + 1.3 * np.sin(middle), "φ",
             role="compute", align="center", size=12)
    note(ax, 6.9, 2.9, "距离都是 2\n夹角 φ 相同\n内积相同", role="compute", align="center")
    return fig


def _ray(
    ax: Axes, center: tuple[float, float], angle: float, length: float, role: str,
    faint: bool = False,
) -> None:
    """从圆心指向某个角度的箭头；`faint` 画旋转之前的方向。"""
    tip = (center[0] + length * np.cos(angle), center[1] + length * np.sin(angle))
    style = {"arrowstyle": "-|>", "color": INK[role].line, "lw": 1.0 if faint else 1.9,
             "linestyle": ":" if faint else "-", "alpha": 0.55 if faint else 1.0}
    ax.annotate("", tip, center, arrowprops=style)
