"""train_gpu 一章的示意图：循环的次序、一步里的重叠、保存的次序。"""

from matplotlib.figure import Figure

from figures.style import INK, arrow, box, brace, canvas, note


def execution_order() -> Figure:
    """脚本从头到尾的次序：准备只做一次，循环里每一步重复。"""
    fig, ax = canvas(17, 7.2)
    setup = (
        ("选项", "plain"), ("进程组", "comm"), ("TF32 与\nautocast", "compute"),
        ("batch", "data"), ("模型", "weight"), ("优化器\nscaler", "weight"),
        ("编译\n然后 DDP", "comm"),
    )  # fmt: skip
    for i, (text, role) in enumerate(setup):
        box(ax, 0.2 + 2.4 * i, 5.3, 2.0, 1.3, text, role=role, size=10)
        if i:
            arrow(ax, (2.4 * i - 0.2, 5.95), (0.2 + 2.4 * i, 5.95))
    note(ax, 8.4, 6.95, "只做一次", align="center")
    steps = (
        ("设学习率", "plain"), ("评估\n存盘", "data"), ("k 个\nmicro-batch", "compute"),
        ("还原\n裁剪", "gradient"), ("更新", "weight"), ("清空\n梯度", "gradient"),
    )  # fmt: skip
    for i, (text, role) in enumerate(steps):
        box(ax, 1.0 + 2.6 * i, 1.9, 2.1, 1.3, text, role=role, size=10)
        if i:
            arrow(ax, (2.6 * i + 0.5, 2.55), (1.0 + 2.6 * i, 2.55))
    arrow(ax, (15.05, 1.85), (2.05, 1.85), bend=-0.1, role="plain")
    note(ax, 8.5, 0.75, "每一步", align="center")
    color = INK["plain"].line  # 从最后一格下来，折到循环的第一格
    ax.plot([15.6, 15.6, 2.05], [5.3, 4.2, 4.2], color=color, lw=1.4)
    arrow(ax, (2.05, 4.25), (2.05, 3.2))
    return fig


def overlap() -> Figure:
    """一步的时间线：读数据藏在反向后面，通信只发生在最后一个 micro-batch。"""
    fig, ax = canvas(16, 5.2)
    for y, name in ((3.7, "计算"), (2.2, "读数据"), (0.7, "通信")):
        note(ax, 0.1, y + 0.4, name)
    x = 1.8
    for k, last in enumerate((False, False, True), start=1):
        box(ax, x, 3.7, 1.4, 0.8, f"前向 {k}", role="compute", size=9.5)
        box(ax, x + 1.5, 3.7, 2.5, 0.8, f"反向 {k}", role="gradient", size=9.5)
        box(ax, x + 1.5, 2.2, 1.7, 0.8, f"取第 {k + 1} 份", role="data", size=9.5)
        if last:
            for j in range(3):
                box(ax, x + 2.1 + 0.8 * j, 0.7, 0.7, 0.8, f"桶 {j + 1}", role="comm", size=8.5)
        x += 4.2
    box(ax, x + 0.25, 3.7, 1.2, 0.8, "更新", role="weight", size=9.5)
    brace(ax, 1.8, 9.9, 0.95, "no_sync：不通信，只累加")
    return fig


def save_order() -> Figure:
    """一次保存的五步；在任何一处被杀，last.pt 都是完整的。"""
    fig, ax = canvas(16, 4.2)
    steps = (
        ("写临时文件", "data", "被杀：临时文件残缺\nlast 仍是旧的"),
        ("fsync 落盘", "data", "断电：内容\n已经在盘上"),
        ("读回来\n核对摘要", "compute", "不对：报错\n旧的不动"),
        ("best、previous\n各加一个名字", "weight", "硬链接\n不占空间"),
        ("改名为 last", "weight", "原子：要么旧\n要么新"),
    )
    for i, (text, role, below) in enumerate(steps):
        box(ax, 0.2 + 3.2 * i, 2.2, 2.6, 1.4, text, role=role, size=10)
        note(ax, 1.5 + 3.2 * i, 1.2, below, align="center", size=9)
        if i:
            arrow(ax, (3.2 * i - 0.4, 2.9), (0.2 + 3.2 * i, 2.9))
    return fig
