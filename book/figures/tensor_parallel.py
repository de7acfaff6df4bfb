"""`tensor_parallel` 一章的示意图：切列再切行，qkv 按头切，序列并行的两条边，切开词表的 loss。"""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures.style import arrow, box, canvas, note

RANKS = ("data", "gradient")  # rank 0 与 rank 1 的底色


def column_then_row() -> Figure:
    """MLP 与注意力：各切成两半，中间没有通信，出来时加一次。"""
    fig, ax = canvas(16, 11.2, inches_per_unit=0.5)
    _two_matrices(ax, 6.3, "MLP", "gate、up 的\n前一半列", "gate、up 的\n后一半列",
                  "silu(·)·(·)", "down 的\n前一半行", "down 的\n后一半行")  # fmt: skip
    _two_matrices(ax, 0.5, "注意力", "头 0、1 的\nq、k、v", "头 2、3 的\nq、k、v",
                  "softmax(QKᵀ)V", "out 里头 0、1\n的行", "out 里头 2、3\n的行")  # fmt: skip
    return fig


def _two_matrices(ax: Axes, y: float, title: str, *words: str) -> None:
    """一个区域：两个 rank 各一行，左边进，右边出。"""
    first0, first1, middle, second0, second1 = words
    note(ax, 0.1, y + 4.6, title, size=11)
    box(ax, 0.2, y + 1.6, 1.3, 1.2, "X\n完整", role="plain")
    for rank, (top, first, second) in enumerate(((y + 2.5, first0, second0),
                                                 (y, first1, second1))):  # fmt: skip
        role = RANKS[rank]
        note(ax, 3.1, top + 1.85, f"rank {rank}", size=9.5, role=role)
        arrow(ax, (1.5, y + 2.2), (3.0, top + 0.8), role="comm")
        box(ax, 3.0, top, 2.7, 1.6, first, role=role, size=9.5)
        arrow(ax, (5.7, top + 0.8), (6.4, top + 0.8), role=role)
        box(ax, 6.4, top, 2.7, 1.6, middle, role="compute", size=9.5)
        arrow(ax, (9.1, top + 0.8), (9.8, top + 0.8), role=role)
        box(ax, 9.8, top, 2.6, 1.6, second, role=role, size=9.5)
        arrow(ax, (12.4, top + 0.8), (14.1, y + 2.2), role="comm")
    note(ax, 2.1, y + 3.3, "f", role="comm", size=12, align="center")
    note(ax, 13.5, y + 3.3, "g", role="comm", size=12, align="center")
    box(ax, 14.1, y + 1.6, 1.7, 1.2, "两份之和", role="plain", size=9.5)


def qkv_rows() -> Figure:
    """融合的 qkv 有三段；按头切从每段里各拿一块，连着切拿到的不是一套。"""
    fig, ax = canvas(15, 6.6, inches_per_unit=0.5)
    names = ("q₀", "q₁", "k₀", "k₁", "v₀", "v₁")
    for y, title, owners, right in (
        (3.9, "按头切", (0, 1, 0, 1, 0, 1), True),
        (0.7, "连着切", (0, 0, 0, 1, 1, 1), False),
    ):
        note(ax, 0.1, y + 0.7, title, size=11)
        for i, (name, owner) in enumerate(zip(names, owners, strict=True)):
            box(ax, 2.2 + i * 1.15, y + 0.2, 1.05, 1.0, name, role=RANKS[owner])
        mine = [n for n, owner in zip(names, owners, strict=True) if owner == 0]
        note(ax, 9.5, y + 1.1, "rank 0 当作它的 q、k、v：", size=9.5)
        for i, name in enumerate(mine):
            box(ax, 9.5 + i * 1.15, y - 0.3, 1.05, 1.0, name, role=RANKS[0])
        note(ax, 13.2, y + 0.2, "对" if right else "另一个模型",
             role="weight" if right else "gradient", size=10)  # fmt: skip
    note(ax, 2.2, 6.1, "qkv 权重的行，自上而下排成一横排：", size=9.5)
    return fig


def two_borders() -> Figure:
    """同一层的两种边：张量并行在区域外留完整的激活，序列并行只留 T/W。"""
    fig, ax = canvas(17.3, 6.6, inches_per_unit=0.48)
    _lane(ax, 3.4, "张量并行", "进：f\n不通信", "出：g\nall-reduce", "全部 T", 2.2)
    _lane(ax, 0.0, "序列并行", "进：\nall-gather", "出：reduce-\nscatter", "T/W", 1.1)
    return fig


def _lane(ax: Axes, y: float, title: str, enter: str, leave: str, part: str, tall: float) -> None:
    """一行五格：外、进、内、出、外；两头方框的高度 `tall` 是这个 rank 手里的那部分。"""
    note(ax, 0.1, y + 2.7, title, size=11)
    cells = ((f"范数\n{part}", 3.2, "weight", tall), (enter, 2.2, "comm", 1.5),
             ("注意力\nH/W 个头", 3.2, "compute", 1.5), (leave, 2.4, "comm", 1.5),
             (f"残差、范数\n{part}", 3.4, "weight", tall))  # fmt: skip
    x, last = 0.2, None
    for word, width, role, height in cells:
        if last is not None:
            arrow(ax, (last, y + 1.2), (x, y + 1.2))
        box(ax, x, y + 1.2 - height / 2, width, height, word, role=role, size=9.5)
        last = x + width
        x = last + 0.6


def vocabulary_loss() -> Figure:
    """每个 rank 有一段词表的 logits，跨 rank 只传每行的三个数。"""
    fig, ax = canvas(15, 5.5, inches_per_unit=0.5)
    for rank in (0, 1):
        x = 0.3 + rank * 7.6
        box(ax, x, 3.2, 6.6, 2.1, f"rank {rank}：logits 的\n{'前' if rank == 0 else '后'}一半词表"
            "\n（N 行 × V/2 列）", role=RANKS[rank])  # fmt: skip
        arrow(ax, (x + 3.3, 3.2), (x + 3.3, 2.3), role="comm")
    what = "all-reduce：每行的最大值（N 个数），\n再是指数的和与目标那一格（2N 个数）"
    box(ax, 2.6, 0.9, 9.8, 1.4, what, role="comm", size=10)
    note(ax, 7.5, 0.35, "loss = ln(指数的和) − 目标那一格；每个 rank 都算得出", align="center")
    return fig
