"""`generate` 一章的示意图：写下一个 token 时，哪些格子要算，哪些已经在缓存里。"""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures.style import box, canvas, note

WORDS = ["曹", "操", "引", "兵", "而"]


def what_is_computed() -> Figure:
    """两张注意力的格子：没有缓存时整个下三角都重算，有缓存时只算最后一行。"""
    fig, ax = canvas(17, 8.2, inches_per_unit=0.48)
    _grid(ax, 1.6, "重算：25 格全算一遍", cached=False)
    _grid(ax, 10.4, "KV 缓存：只算最后一行", cached=True)
    note(ax, 8.5, 0.3, "行：谁在看　列：看谁（它的 K 与 V）", align="center")
    return fig


def _grid(ax: Axes, x: float, title: str, *, cached: bool) -> None:
    """一张格子；行是 Q 的位置，列是 K、V 的位置。"""
    note(ax, x + 2.5, 7.8, title, align="center", size=10.5)
    for column, word in enumerate(WORDS):
        last = column == len(WORDS) - 1
        box(ax, x + column + 0.05, 6.1, 0.9, 0.8, word,
            role="weight" if cached and not last else "compute", size=10)  # fmt: skip
    for row, word in enumerate(WORDS):
        last = row == len(WORDS) - 1
        y = 4.9 - row
        note(ax, x - 0.25, y + 0.45, word, align="right", size=10)
        for column in range(len(WORDS)):
            if not cached or last:
                seen = column <= row
                box(ax, x + column + 0.05, y, 0.9, 0.9, "" if seen else "−∞",
                    role="compute" if seen else "plain", size=8)  # fmt: skip
    if cached:
        note(ax, x + 2.0, 7.2, "在缓存里", role="weight", align="center", size=9)
        box(ax, x + 0.05, 1.9, 4.9, 3.9, "早已算过，\n结果不会变", dashed=True, size=10)
