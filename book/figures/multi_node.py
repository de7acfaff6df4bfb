"""`multi_node` 一章的图：谁和谁说话、谁重启谁；几件坏事里步数随时间怎样走。"""

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures.style import CYCLE, arrow, box, canvas, note, use_style

TITLES = {
    "calm": "不受打扰", "node": "杀掉 B，再开机", "master": "杀掉 A（会合处），再开机",
    "slow": "B 冻住一会儿",
}  # fmt: skip


def who_talks_to_whom() -> Figure:
    """两台机器：会合的 store 在 A，各有一个 torchrun、一份循环；梯度在工作进程之间走；磁盘共用。"""
    fig, ax = canvas(17, 10.6, inches_per_unit=0.48)
    for x, name in ((0.4, "A（HOST）"), (9.4, "B")):
        box(ax, x, 2.6, 7.2, 7.6, role="plain", dashed=True)
        note(ax, x + 0.3, 9.75, f"机器 {name}", size=11)
        box(ax, x + 0.5, 7.9, 6.2, 1.2, "torchrun.sh 的循环\ntorchrun 死了就再来", size=9.5)
        arrow(ax, (x + 2.0, 7.9), (x + 2.0, 7.1))
        box(ax, x + 0.5, 5.9, 3.6, 1.2, "torchrun\n工作进程死了就重启", role="comm", size=9)
        arrow(ax, (x + 2.0, 5.9), (x + 2.0, 5.1))
        box(ax, x + 0.5, 3.5, 6.2, 1.6, "工作进程：train_gpu.py\n前向、反向、存盘", role="compute")
    box(ax, 5.0, 5.9, 2.2, 1.2, "store", role="comm")
    arrow(ax, (4.5, 6.5), (5.0, 6.5), role="comm")
    arrow(ax, (9.9, 6.5), (7.2, 6.5), "会合", role="comm", both=True)
    arrow(ax, (7.1, 4.3), (9.9, 4.3), "梯度", role="gradient", both=True)
    box(ax, 4.4, 0.3, 8.2, 1.2, "共享盘：检查点、log.csv、status.json", role="weight")
    arrow(ax, (3.6, 3.5), (5.6, 1.5), "只有 0 号写", role="weight", offset=(-1.9, -0.5))
    arrow(ax, (11.4, 1.5), (13.0, 3.5), "都要读", role="weight", offset=(1.4, -0.5))
    return fig


def progress(table: pd.DataFrame) -> Figure:
    """每件事一格：横轴是启动以来的秒数，纵轴是日志里的步数，竖线是动手的时刻。"""
    use_style()
    events = [event for event in TITLES if event in set(table["event"])]
    fig, axes = plt.subplots(2, 2, figsize=(7.6, 5.4), sharex=True, sharey=True)
    for ax, event in zip(axes.flat, events, strict=False):
        _one(ax, table[table["event"] == event], TITLES[event])
    for ax in axes.flat[len(events) :]:
        ax.axis("off")
    for ax in axes[-1]:
        ax.set_xlabel("启动之后的秒数")
    for ax in axes[:, 0]:
        ax.set_ylabel("步数")
    fig.tight_layout()
    return fig


def _one(ax: Axes, rows: pd.DataFrame, title: str) -> None:
    ax.step(rows["seconds"], rows["step"], where="post", color=CYCLE[0])
    if pd.notna(struck := rows["struck"].iloc[0]):
        ax.axvline(struck, color=CYCLE[1], linestyle="--", linewidth=1.4)
        ax.annotate("动手", (struck, 0.9), xycoords=("data", "axes fraction"), ha="right",
                    xytext=(-4, 0), textcoords="offset points", color=CYCLE[1])  # fmt: skip
    ax.set_title(title, fontsize=10.5)
