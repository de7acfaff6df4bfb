"""`expert_parallel` 一章的图：token 的去与回，舍入怎样换了专家，均衡，丢弃，稠密还是专家。"""

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from figures.style import CYCLE, INK, arrow, box, canvas, note, use_style

KINDS = {"dense": "稠密", "moe": "专家，无均衡项", "moe_balanced": "专家，有均衡项",
         "dense_wide": "宽的稠密"}  # fmt: skip


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


def cliff(steps: pd.DataFrame) -> Figure:
    """参数与单进程差多少，一步一步地：fp64、fp32、fp32 照抄路由；圆点是第一次有 token 换专家。"""
    use_style()
    fig, ax = plt.subplots(figsize=(7.2, 3.6))
    lines = (("fp32", "手写", CYCLE[1], "-"), ("fp32", "手写，照抄路由", CYCLE[0], "--"),
             ("fp64", "手写", CYCLE[2], "-"))  # fmt: skip
    for precision, way, color, style in lines:
        mine = steps[(steps.precision == precision) & (steps.way == way)]
        label = precision + ("，照抄路由" if "照抄" in way else "")
        ax.plot(mine.step, mine.param_diff.clip(lower=1e-17), style, color=color, label=label)
        flipped = mine[mine.flips > 0]
        if len(flipped):
            first = flipped.iloc[0]
            ax.plot(first.step, first.param_diff, "o", color=color)
            ax.annotate("第一次换专家", (first.step, first.param_diff), textcoords="offset points",
                        xytext=(-8, 8), ha="right", color=color, size=9.5)  # fmt: skip
    ax.set(yscale="log", xlabel="更新次数", ylabel="参数与单进程最多差")
    fig.legend(loc="upper center", ncols=3)
    fig.tight_layout(rect=(0, 0, 1, 0.92))
    return fig


def shares_over_training(balance: pd.DataFrame) -> Figure:
    """第一层每个专家分到的比例；最后一步最忙的那个是彩色的，虚线是平均。"""
    use_style()
    fig, axes = plt.subplots(1, 2, figsize=(7.6, 3.3), sharey=True)
    for ax, (alpha, part) in zip(axes, balance.groupby("alpha"), strict=True):
        shares = 100 * part.pivot(index="step", columns="expert", values="share")
        busiest = shares.iloc[-1].idxmax()
        for expert in shares:
            color, width = (CYCLE[1], 2.4) if expert == busiest else ("#9ca3af", 1.1)
            ax.plot(shares.index, shares[expert], color=color, lw=width)
        ax.axhline(100 / shares.shape[1], color=INK["data"].line, ls="--", lw=1.2)
        ax.set(xlabel="更新次数", ylim=(0, None))
        ax.set_title(f"α = {alpha:g}" + ("，没有均衡项" if not alpha else ""), fontsize=10.5)
    axes[0].set_ylabel("分到的比例（%）")
    fig.tight_layout()
    return fig


def drop_curves(drops: pd.DataFrame) -> Figure:
    """容量系数与丢掉的比例，有、没有均衡项各一条。"""
    use_style()
    fig, ax = plt.subplots(figsize=(6.6, 3.2))
    for color, (alpha, part) in zip(CYCLE[1::-1], drops.groupby("alpha"), strict=True):
        label = f"α = {alpha:g}" + ("，没有均衡项" if not alpha else "")
        ax.plot(part.factor, 100 * part.dropped, "o-", color=color, label=label)
    ax.set(xlabel="容量系数", ylabel="丢掉的（%）", ylim=(-1, None))
    ax.set_xticks(sorted(drops.factor.unique()), minor=False)
    ax.legend()
    fig.tight_layout()
    return fig


def dense_or_experts(runs: pd.DataFrame) -> Figure:
    """每个种子一条灰线，连起同一种子的几种模型的验证 loss；横线是平均。"""
    use_style()
    fig, ax = plt.subplots(figsize=(6.8, 3.4))
    table = runs.pivot(index="seed", columns="kind", values="val_loss")[list(KINDS)]
    for _, row in table.iterrows():
        ax.plot(range(len(KINDS)), row, "o-", color="#9ca3af", lw=1, ms=5)
    for x, kind in enumerate(KINDS):
        ax.hlines(table[kind].mean(), x - 0.2, x + 0.2, color=CYCLE[x], lw=3, zorder=3)
    ax.set_xticks(range(len(KINDS)), KINDS.values())
    ax.set_ylabel("验证 loss（nat）")
    ax.grid(axis="x", visible=False)
    fig.tight_layout()
    return fig
