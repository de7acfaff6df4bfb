"""专家并行一章的示意图。"""

from matplotlib.figure import Figure

from figures.style import arrow, box, canvas, note


def tokens_to_experts() -> Figure:
    """两个 rank、四个专家：token 按路由送到专家所在的 rank，算完原路送回。"""
    fig, ax = canvas(15, 7.4, inches_per_unit=0.52)
    routes = [[0, 2, 3], [1, 1, 2]]  # 每个 rank 的三个 token 各去哪个专家
    for rank, left in enumerate((0.3, 7.7)):
        note(ax, left, 7.0, f"rank {rank}", size=10.5)
        for i in range(3):
            box(ax, left + 2.3 * i, 5.6, 2.0, 0.9, f"token {3 * rank + i}", role="data", size=9)
            box(ax, left + 2.3 * i, 0.4, 2.0, 0.9, "× 门，相加", role="data", size=8.5)
        for e in (2 * rank, 2 * rank + 1):
            x = left + 3.4 * (e % 2)
            box(ax, x, 3.0, 3.0, 0.9, f"专家 {e}", role="weight", size=9.5)
    for rank, left in enumerate((0.3, 7.7)):
        for i, e in enumerate(routes[rank]):
            expert = (0.3, 7.7)[e // 2] + 3.4 * (e % 2) + 1.5
            x = left + 2.3 * i + 1.0
            away = "comm" if e // 2 != rank else "plain"
            arrow(ax, (x, 5.6), (expert, 3.9), role=away)
            arrow(ax, (expert, 3.0), (x, 1.3), role=away)
    return fig
