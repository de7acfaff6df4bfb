"""文献里的规模定律，重新算一遍：表里的数对不对，三组常数差在哪里，20 何时不是该用的比值。

    python experiments/literature.py                       # 全部的表，几秒
    python experiments/literature.py --budget 1e24         # 三组常数在这笔算力上分开多远
    python experiments/literature.py --params 8e9 --served 1e13   # 与 8B 的一样好，要服务十万亿

只有算术，不训练。数字出自 Chinchilla（Hoffmann 等 2022，arXiv 2203.15556，表 3 与附录 D）和
重新拟合它的论文（Besiroglu 等 2024，arXiv 2404.10102）；N 是参数，D 是训练 token，C = 6ND。
这里**没有** L(N, D) 的拟合本身（见 training/law.py），也没有我们自己的测量（见 scaling）。
"""

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import minimize_scalar

from experiments.lab.results import publish, run_main
from experiments.training.law import PUBLISHED, Law
from tokens.errors import UserError

# 表 3（方法一）印出来的样子：N、C、D；位数就是它保留的精度
TABLE_3 = (
    ("400e6", "1.92e19", "8.0e9"), ("1e9", "1.21e20", "20.2e9"), ("10e9", "1.23e22", "205.1e9"),
    ("67e9", "5.76e23", "1.5e12"), ("175e9", "3.85e24", "3.7e12"), ("280e9", "9.90e24", "5.9e12"),
    ("520e9", "3.43e25", "11.0e12"), ("1e12", "1.27e26", "21.2e12"),
)  # fmt: skip
SMALL, CHINCHILLA = 2.21e19, 5.76e23  # 公开复算用的算力；Chinchilla 自己用掉的算力，FLOPs
# 同一笔算力（2.21e19）上互相矛盾的两个公开答案：(N, D)；前一个由印出来的常数在格点上找到
# （nanoGPT 的 scaling_laws.ipynb，3adf61e），后一个是论文的表 A3
DISAGREEMENT = {"nanoGPT 的复算": (316e6, 11.65e9), "论文": (400e6, 9.2e9)}
GRID = 2**-4  # 那份复算的格点：log10 N 相隔 1/16
PRINTED, UNROUNDED = "Hoffmann（印刷值）", "Hoffmann（未舍入）"


@dataclass(frozen=True)
class Options:
    """重算哪一笔算力，为谁服务。"""

    budget: float = 1e24
    """三组常数在这笔训练算力（FLOPs）上各说什么"""
    params: float = 8e9
    """服务的那张表：与多大的计算最优模型一样好（参数）"""
    served: tuple[float, ...] = (0.0, 1e11, 1e12, 1e13, 1e14)
    """训完之后一共读写多少 token，可以给几个"""

    def __post_init__(self) -> None:
        """都要是有限的正数；生成的 token 可以是 0。"""
        for name in ("budget", "params"):
            if not (math.isfinite(value := getattr(self, name)) and value > 0):
                raise UserError(f"--{name} {value:g}：要一个有限的正数，例如 1e24。")
        for value in self.served:
            if not (math.isfinite(value) and value >= 0):
                raise UserError(f"--served {value:g}：要不小于 0 的有限数，例如 1e13。")


# ---------------------------------------------------------------- 表里的数


def half_unit(printed: str) -> float:
    """印出来的数最后一位的一半："1.92e19" → 0.005e19；真值在它左右这么远之内。"""
    digits, _, exponent = printed.partition("e")
    decimals = len(digits.partition(".")[2])
    return 0.5 * 10.0 ** (int(exponent or 0) - decimals)


def check_row(params: str, flops: str, tokens: str) -> dict:
    """表 3 的一行：6ND 比印出来的 C 多百分之几；考虑 D 与 C 各自的舍入，两者能否相等。

    N 是模型的名字（“67B”），当作准确的；D 与 C 各在半个末位之内。
    """
    N, C, D = float(params), float(flops), float(tokens)
    low, high = (6 * N * (D + sign * half_unit(tokens)) for sign in (-1, 1))
    slack = half_unit(flops)
    return {
        "params": N, "flops": C, "tokens": D, "six_nd": 6 * N * D,
        "excess": 100 * (6 * N * D / C - 1), "ratio": D / N,
        "by_rounding": "是" if low <= C + slack and high >= C - slack else "否",
    }  # fmt: skip


# ---------------------------------------------------------------- 常数的小数


def rounding_box(law: Law, decimals: int = 2) -> list[Law]:
    """α、β 都只印了 `decimals` 位小数：真值所在的方框的四个角。"""
    half = 0.5 * 10.0**-decimals
    return [replace(law, alpha=law.alpha + a, beta=law.beta + b)
            for a, b in itertools.product((-half, half), repeat=2)]  # fmt: skip


def optimum_range(law: Law, flops: float) -> tuple[tuple[float, float], tuple[float, float]]:
    """常数在舍入的方框里游走时，最优 N 与最优 D 各自的（最小，最大）。

    最优 N 对 α、β 各自单调（在这些常数附近），所以只看四个角。
    """
    corners = [one.optimum(flops) for one in rounding_box(law)]
    return tuple((min(values), max(values)) for values in zip(*corners, strict=True))


def grid_optimum(law: Law, flops: float, step: float = GRID) -> tuple[float, float]:
    """只在 N = 10^7 到 10^11、log10 相隔 `step` 的格点上找最优的 (N, D)；那份复算的找法。"""
    params = 10 ** np.arange(7, 11, step)
    best = params[np.argmin(law.loss(params, flops / 6 / params))]
    return float(best), flops / 6 / float(best)


def disagreement_steps() -> list[dict]:
    """从复算的答案走到论文的答案，每一步的最优 N，与这一步占 ln N 之差的百分之几。"""
    steps = {
        "印刷值，格点": grid_optimum(PUBLISHED[PRINTED], SMALL)[0],
        "印刷值，真的最低点": PUBLISHED[PRINTED].optimum(SMALL)[0],
        "未舍入": PUBLISHED[UNROUNDED].optimum(SMALL)[0],
        "论文的表 A3": DISAGREEMENT["论文"][0],
    }
    sizes = list(steps.values())
    whole = math.log(sizes[-1] / sizes[0])
    shares = [0.0, *(100 * math.log(b / a) / whole for a, b in itertools.pairwise(sizes))]
    return [{"怎么算": name, "params": N, "tokens": SMALL / 6 / N, "share": share}
            for (name, N), share in zip(steps.items(), shares, strict=True)]  # fmt: skip


def rounding_share(flops: float) -> float:
    """印刷值与重新拟合的 token / 参数之比（取对数），百分之几来自舍入，其余来自拟合。"""
    printed, unrounded, refit = (math.log(D / N) for N, D in
                                 (law.optimum(flops) for law in PUBLISHED.values()))  # fmt: skip
    return 100 * (printed - unrounded) / (printed - refit)


def regret(follow: Law, truth: Law, flops: float) -> float:
    """照着 `follow` 分配算力，而世界按 `truth` 运行：loss 比能做到的高多少，nat/token。"""
    return truth.loss(*follow.optimum(flops)) - truth.loss(*truth.optimum(flops))


# ---------------------------------------------------------------- 训完还要用


def tokens_for(law: Law, params: float, loss: float) -> float:
    """N = `params` 的模型要读多少 token 才到 `loss`；它永远到不了时是无穷。"""
    left = loss - law.E - law.A / params**law.alpha
    return (law.B / left) ** (1 / law.beta) if left > 0 else math.inf


def lifetime_flops(params: float, tokens: float, served: float) -> float:
    """一生的运算：训练每个 token 6N，之后每读写一个 token 只有前向的 2N。"""
    return 6 * params * tokens + 2 * params * served


def best_for_service(law: Law, loss: float, served: float) -> tuple[float, float]:
    """要到 `loss`、训完还要读写 `served` 个 token：一生的运算最少的 (N, D)。

    同样好的模型里挑最省的（Sardana 等 2023，arXiv 2401.00448 的问法）。`served` 为 0 时就是
    `Law.optimum`。`loss` 不高于 E 时谁也到不了，抛 ValueError。
    """
    if loss <= law.E:
        raise ValueError(f"loss {loss:.3f} 不高于下限 E = {law.E:.3f}：多大的模型也到不了")
    smallest = math.log((law.A / (loss - law.E)) ** (1 / law.alpha))  # 再小，读多少也到不了

    def cost(log_params: float) -> float:
        params = math.exp(log_params)
        return math.log(lifetime_flops(params, tokens_for(law, params, loss), served))

    found = minimize_scalar(cost, bounds=(smallest + 1e-6, smallest + 12), method="bounded",
                            options={"xatol": 1e-10})  # fmt: skip
    params = math.exp(found.x)
    return params, tokens_for(law, params, loss)


def service_row(law: Law, params: float, served: float) -> dict:
    """与 `params` 个参数的计算最优模型一样好，却要服务 `served` 个 token：该训多大，省多少。

    “计算最优”按 Chinchilla 的经验取 D = 20N：那是大家会拿来比的那个模型。
    """
    base = 20 * params
    loss = law.loss(params, base)
    N, D = best_for_service(law, loss, served)
    saved = 1 - lifetime_flops(N, D, served) / lifetime_flops(params, base, served)
    return {"served": served, "loss": loss, "params": N, "tokens": D, "ratio": D / N,
            "train_more": 6 * N * D / (6 * params * base), "saved": 100 * saved}  # fmt: skip


# ---------------------------------------------------------------- 入口


def optima(flops: float) -> list[dict]:
    """三组公开常数在同一笔算力上各自的最优。"""
    rows = []
    for name, law in PUBLISHED.items():
        N, D = law.optimum(flops)
        rows.append({"law": name, "params": N, "tokens": D, "ratio": D / N,
                     "loss": law.loss(N, D)})  # fmt: skip
    return rows


def regrets(flops: float) -> list[dict]:
    """照着行、世界按列：loss 多付多少 nat。"""
    return [{"照着": name} | {truth: regret(law, PUBLISHED[truth], flops) for truth in PUBLISHED}
            for name, law in PUBLISHED.items()]  # fmt: skip


def main(options: Options) -> None:
    """印出全部的表，写 results/literature_*.csv。"""
    formats = {"params": "{:.3g}", "tokens": "{:.4g}", "flops": "{:.3g}", "six_nd": "{:.4g}",
               "excess": "{:+.2f}", "ratio": "{:.1f}", "loss": "{:.4f}", "served": "{:.0e}",
               "train_more": "{:.2f}", "saved": "{:.1f}"}  # fmt: skip
    publish("literature_table", "Chinchilla 表 3，逐行核对 C = 6ND",
            [check_row(*row) for row in TABLE_3], options, formats=formats)  # fmt: skip
    for name, flops in (("small", SMALL), ("chinchilla", CHINCHILLA), ("budget", options.budget)):
        publish(f"literature_{name}", f"三组常数在 {flops:.3g} FLOPs 的最优", optima(flops),
                options, formats=formats)  # fmt: skip
    publish("literature_steps", f"从一个答案走到另一个，{SMALL:.3g} FLOPs", disagreement_steps(),
            options, formats=formats | {"share": "{:.0f}"})  # fmt: skip
    title = f"照着一组、世界按另一组，{options.budget:.3g} FLOPs 时多付的 loss（nat）"
    publish("literature_regret", title, regrets(options.budget), options,
            formats=dict.fromkeys(PUBLISHED, "{:.4f}"))  # fmt: skip
    law = PUBLISHED["Besiroglu 2024"]
    title = f"与 {options.params:.3g} 参数、20 倍 token 的模型一样好（Besiroglu 的常数）"
    publish("literature_service", title,
            [service_row(law, options.params, served) for served in options.served],
            options, formats=formats)  # fmt: skip


if __name__ == "__main__":
    run_main(main, Options)
