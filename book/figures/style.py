"""全书图形的统一样式：字体、配色、方框和箭头。

示意图用 `canvas` 开一张没有坐标轴的画布，再用 `box`、`arrow`、`brace`、`note` 往上摆东西；
坐标单位就是画布的格子，`box` 的 (x, y) 是左下角。中文字体取自 PyPI 包 zhplot，不依赖系统字体。
"""

import logging
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import matplotlib as mpl
from matplotlib import font_manager
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

FONT = "Noto Sans SC"


@dataclass(frozen=True)
class Ink:
    """一种角色的两种颜色：方框的底色和边线（文字、曲线也用边线色）。"""

    fill: str
    line: str


# 按角色取色，不按颜色取色；边线色取自 Okabe–Ito 色盲安全配色，略微加深以便在白底上读字
INK = {
    "data": Ink("#e6f1fa", "#0063a3"),  # 数据、token、batch
    "compute": Ink("#fdf0dc", "#a85f00"),  # 计算：前向、反向、矩阵乘
    "gradient": Ink("#fbe6da", "#b74a00"),  # 梯度
    "weight": Ink("#ddf3eb", "#00734f"),  # 参数、优化器状态
    "comm": Ink("#f7e6f0", "#9c4479"),  # 通信
    "plain": Ink("#f3f4f6", "#4b5563"),  # 其余
}
CYCLE = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9"]
TEXT = "#1f2937"


def font_path() -> Path:
    """随 zhplot 安装的 Noto Sans SC 字体文件；没有安装 zhplot 时抛出 ModuleNotFoundError。"""
    spec = find_spec("zhplot")  # 只找位置，不导入：它一导入就会改 matplotlib 的全局设置
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("没有 zhplot：请先运行 pip install -r requirements.txt")
    return Path(spec.origin).parent / "fonts" / "NotoSansSC-Regular.ttf"


def use_style() -> None:
    """把全书的字体、配色和线宽设为 matplotlib 的默认值；重复调用没有副作用。"""
    # 该字体只有常规一种粗细，请求粗体时的逐条提示没有用处
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    if FONT not in font_manager.fontManager.get_font_names():
        font_manager.fontManager.addfont(font_path())
    mpl.rcParams.update(
        {
            "font.family": [FONT, "DejaVu Sans"],  # 后者补上前者没有的数学符号
            "axes.unicode_minus": False,
            "mathtext.fontset": "stix",
            "figure.figsize": (7.2, 3.8),
            "figure.dpi": 110,
            "figure.facecolor": "white",
            "savefig.bbox": "tight",
            "savefig.facecolor": "white",
            "svg.fonttype": "path",  # 字形画成轮廓：读者没有中文字体也看得见
            "svg.hashsalt": "book",  # 同样的图得到同样的文件
            "axes.prop_cycle": mpl.cycler(color=CYCLE),
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "axes.edgecolor": "#6b7280",
            "axes.labelcolor": TEXT,
            "text.color": TEXT,
            "grid.color": "#e5e7eb",
            "lines.linewidth": 1.8,
            "legend.frameon": False,
            "font.size": 10.5,
        }
    )


def canvas(width: float, height: float, *, inches_per_unit: float = 0.6) -> tuple[Figure, Axes]:
    """没有坐标轴的画布，横 `width` 格、纵 `height` 格，每格 `inches_per_unit` 英寸。"""
    use_style()
    fig, ax = plt.subplots(figsize=(width * inches_per_unit, height * inches_per_unit))
    ax.set(xlim=(0, width), ylim=(0, height), aspect="equal")
    ax.axis("off")
    fig.subplots_adjust(left=0.01, right=0.99, bottom=0.01, top=0.99)
    return fig, ax


def box(
    ax: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    text: str = "",
    *,
    role: str = "plain",
    size: float = 10.5,
    dashed: bool = False,
) -> tuple[float, float]:
    """圆角方框，左下角在 (x, y)，文字居中；返回方框中心，供箭头使用。`role` 是 `INK` 的键。"""
    ink = INK[role]
    ax.add_patch(
        FancyBboxPatch(
            (x, y),
            width,
            height,
            boxstyle="round,pad=0,rounding_size=0.12",
            facecolor=ink.fill,
            edgecolor=ink.line,
            linewidth=1.3,
            linestyle="--" if dashed else "-",
        )
    )
    center = (x + width / 2, y + height / 2)
    if text:
        ax.text(*center, text, ha="center", va="center", size=size, color=ink.line)
    return center


def arrow(
    ax: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    text: str = "",
    *,
    role: str = "plain",
    bend: float = 0.0,
    both: bool = False,
    dashed: bool = False,
    offset: tuple[float, float] = (0.0, 0.22),
) -> None:
    """从 `start` 指到 `end` 的箭头；`bend` 是弯曲程度，`text` 写在中点加 `offset` 处。"""
    color = INK[role].line
    ax.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="<|-|>" if both else "-|>",
            mutation_scale=12,
            linewidth=1.4,
            color=color,
            linestyle="--" if dashed else "-",
            connectionstyle=f"arc3,rad={bend}",
            shrinkA=2,
            shrinkB=2,
        )
    )
    if text:
        x, y = ((a + b) / 2 + d for a, b, d in zip(start, end, offset, strict=True))
        ax.text(x, y, text, ha="center", va="center", size=9.5, color=color)


def brace(ax: Axes, x0: float, x1: float, y: float, text: str, *, role: str = "plain") -> None:
    """横向标尺：从 x0 到 x1 的双向细线，文字写在下方。"""
    color = INK[role].line
    style = {"arrowstyle": "|-|,widthA=0.25,widthB=0.25", "color": color, "linewidth": 1.1}
    ax.annotate("", (x0, y), (x1, y), arrowprops=style)
    ax.text((x0 + x1) / 2, y - 0.14, text, ha="center", va="top", size=9.5, color=color)


def note(
    ax: Axes,
    x: float,
    y: float,
    text: str,
    *,
    role: str = "plain",
    size: float = 9.5,
    align: str = "left",
) -> None:
    """一段不带框的说明文字；`align` 为 left、center 或 right。"""
    ax.text(x, y, text, ha=align, va="center", size=size, color=INK[role].line)
