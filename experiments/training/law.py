"""损失随参数量与数据量的幂律 L(N, D) = E + A/N^α + B/D^β：预测、最优分配、拟合，以及何时不能拟合。

形式出自 Chinchilla（Hoffmann 等 2022，arXiv 2203.15556，式 2）；N 是参数个数，D 是训练 token 数，
L 的单位是 nat/token。E 是数据本身不可预测的部分，后两项是「模型不够大」与「数据不够多」的代价。
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares
from scipy.special import logsumexp, softmax

HUBER_DELTA = 1e-3  # 对数残差超过它就按一次方计，个别坏点不左右结果（同原文）
LEVELS = 3  # N、D 各至少几个取值；指数至少几档算力
RUNS = 6  # 五个常数，至少多一组
SIZES = 4  # 抛物线三个系数，至少多一种大小
ON_A_LINE = 0.05  # (log N, log D) 离最近的一条直线的均方根距离小于它：当作在一条线上


@dataclass(frozen=True)
class Law:
    """五个常数。"""

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def loss(self, params: float, tokens: float) -> float:
        """N = params、D = tokens 时预测的 loss，nat/token；两者可以是等长的数组。"""
        return self.E + self.A / params**self.alpha + self.B / tokens**self.beta

    def optimum(self, flops: float) -> tuple[float, float]:
        """算力 C = 6ND 给定时，loss 最低的 (N, D)（原文式 4：在约束下对 N 求导为零）。"""
        product = flops / 6
        ratio = (self.alpha * self.A / (self.beta * self.B)) ** (1 / (self.alpha + self.beta))
        params = ratio * product ** (self.beta / (self.alpha + self.beta))
        return params, product / params


# 同一批数据的三种常数；前两行的差别只是 α、β 保留了几位小数（2404.10102 重新拟合得到第三行）
PUBLISHED = {
    "Hoffmann（印刷值）": Law(1.69, 406.4, 410.7, 0.34, 0.28),
    "Hoffmann（未舍入）": Law(1.6934, 406.4, 410.7, 0.3392, 0.2849),
    "Besiroglu 2024": Law(1.8172, 482.01, 2085.43, 0.3478, 0.3658),
}


# ---------------------------------------------------------------- 五个常数


def refusal(params: np.ndarray, tokens: np.ndarray) -> str:
    """这些 (N, D) 为什么定不出五个常数；定得出时是空串。只看设计，不看 loss。"""
    for name, values in (("N", params), ("D", tokens)):
        if (distinct := len(np.unique(values))) < LEVELS:
            return (f"{name} 只有 {distinct} 个不同的取值，α 与 β 分不开："
                    f"N 和 D 都至少要 {LEVELS} 个")  # fmt: skip
    if (runs := len({*zip(params.tolist(), tokens.tolist(), strict=True)})) < RUNS:
        return f"只有 {runs} 组不同的 (N, D)，要定五个常数：至少要 {RUNS} 组"
    logs = np.log(np.stack((params, tokens)))
    thickness = np.linalg.svd(logs - logs.mean(axis=1, keepdims=True), compute_uv=False)[1]
    if thickness / np.sqrt(len(params)) < ON_A_LINE:
        return ("N 与 D 在对数坐标里落在一条线上（例如都取 D = 20N）：沿着它，不同的常数给出同样的"
                " loss，α、β 分不开；请让 N 与 D 各自变化")  # fmt: skip
    return ""


def fit_law(
    params: Sequence[float], tokens: Sequence[float], losses: Sequence[float],
    *, start: Law | None = None,
) -> Law:
    """由若干次训练的 (N, D, L) 拟合五个常数：对数残差的 Huber 损失之和，多个起点，取最好的一个。

    给出 `start` 时只从那里出发（自助法重抽时省时间）。
    数据说不出答案时抛出 ValueError，说明原因（`refusal`）：点太少；N 或 D 的取值太少，例如所有
    模型都读同样多的数据，B/D^β 就只是一个常数；N 与 D 在一条线上。这时给出数字就是编造。
    """
    N, D, L = checked(params, tokens, losses)
    if reason := refusal(N, D):
        raise ValueError(reason)
    return _fit(N, D, L, start)


def checked(*columns: Sequence[float]) -> list[np.ndarray]:
    """等长的正数列；不等长、有不是正数的，抛出 ValueError。"""
    arrays = [np.asarray(values, dtype=float) for values in columns]
    if len({array.shape for array in arrays}) > 1:
        raise ValueError(f"各列要一样长，给的是 {'、'.join(str(len(a)) for a in arrays)} 个")
    if not all(np.isfinite(array).all() and (array > 0).all() for array in arrays):
        raise ValueError("参数量、token 数与 loss 都要是有限的正数（训坏了的那次请先去掉）")
    return arrays


def _fit(N: np.ndarray, D: np.ndarray, L: np.ndarray, start: Law | None) -> Law:
    log_n, log_d, log_l, ones = np.log(N), np.log(D), np.log(L), np.ones_like(N)

    def terms(theta: np.ndarray) -> np.ndarray:
        return np.stack((theta[0] * ones, theta[1] - theta[3] * log_n, theta[2] - theta[4] * log_d))

    def residuals(theta: np.ndarray) -> np.ndarray:
        return logsumexp(terms(theta), axis=0) - log_l

    def jacobian(theta: np.ndarray) -> np.ndarray:
        e, a, b = softmax(terms(theta), axis=0)  # 三项各占预测的几成
        return np.stack((e, a, b, -a * log_n, -b * log_d), axis=1)

    starts = [(0.5, a, b, e, e) for a in (4.0, 8.0) for b in (4.0, 8.0) for e in (0.2, 0.5)]
    precision = 1e-12
    if start is not None:
        starts = [(*np.log((start.E, start.A, start.B)), start.alpha, start.beta)]
        precision = 1e-7
    # least_squares 极小化的是 Huber 之和；若取平均，目标小到低于停止阈值，会停在半路
    how = {"ftol": precision, "xtol": precision, "gtol": 1e-12, "max_nfev": 500, "x_scale": "jac"}
    fits = (least_squares(residuals, start, jacobian, loss="huber", f_scale=HUBER_DELTA, **how)
            for start in starts)  # fmt: skip
    log_e, log_a, log_b, alpha, beta = min(fits, key=lambda fit: fit.cost).x
    return Law(*map(float, (*np.exp((log_e, log_a, log_b)), alpha, beta)))


def bootstrap(
    params: Sequence[float], tokens: Sequence[float], losses: Sequence[float],
    *, repeats: int = 1000, seed: int = 0,
) -> dict[str, tuple[float, float]]:
    """五个常数各自的 95 % 区间：把观测有放回地重抽 `repeats` 次，每次从最好的一组出发重新拟合。

    重抽出来的点定不出常数（`refusal`）时换一次。数据本身定不出时抛出 ValueError。
    """
    best = fit_law(params, tokens, losses)
    data = np.stack(checked(params, tokens, losses))
    generator, fits = np.random.default_rng(seed), []
    while len(fits) < repeats:
        sample = data[:, generator.integers(data.shape[1], size=data.shape[1])]
        if not refusal(*sample[:2]):
            fits.append(astuple(_fit(*sample, best)))
    low, high = np.percentile(fits, [2.5, 97.5], axis=0).tolist()
    names = [field.name for field in fields(Law)]
    return {name: (low[i], high[i]) for i, name in enumerate(names)}


# ---------------------------------------------------------------- 等算力的谷底


class Valley(NamedTuple):
    """一档算力的谷底：那里的参数量、token 数与 loss（nat/token）。"""

    N: float
    D: float
    loss: float


def parabola(params: Sequence[float], losses: Sequence[float]) -> np.ndarray:
    """loss 对 log N 的抛物线，系数 (c₂, c₁, c₀)；同样的 N 可以有几个种子。"""
    return np.polyfit(np.log(np.asarray(params, dtype=float)), np.asarray(losses, float), 2)


def valley(
    params: Sequence[float], losses: Sequence[float], tokens: Sequence[float]
) -> Valley:
    """一档算力里各种大小的 loss → 谷底（抛物线的顶点）；D 由同样的几点在对数坐标里插值。

    说不出谷底在哪里时抛出 ValueError：不到 4 种大小；抛物线不是开口向上；顶点或最低的一种大小
    在边上——那只说明谷底在更大（或更小）的地方，要补上那边的大小再训。
    """
    N, L, D = checked(params, losses, tokens)
    sizes = np.unique(N)
    if len(sizes) < SIZES:
        raise ValueError(f"只有 {len(sizes)} 种大小：抛物线有三个系数，至少要 {SIZES} 种")
    means = np.array([L[N == size].mean() for size in sizes])
    if (lowest := int(means.argmin())) in (0, len(sizes) - 1):
        side = "小" if lowest == 0 else "大"
        raise ValueError(f"最低的就是最{side}的一种：谷底可能更{side}，请补上更{side}的")
    found = _bottom(N, L, D)
    if found is None:
        raise ValueError("抛物线的谷底不在量过的大小之间：请把大小的范围放宽")
    return found


@dataclass(frozen=True)
class Valleys:
    """几档算力的谷底，与换了种子之后的许多份。"""

    C: np.ndarray  # (档,)，FLOPs
    N: np.ndarray  # (档,)
    D: np.ndarray  # (档,)
    draws: np.ndarray  # (份, 档, 2)，最后一维是 N 与 D

    def interval(self, which: int) -> np.ndarray:
        """每档的 95 % 区间，(2, 档)；`which` 0 是 N，1 是 D。"""
        return np.percentile(self.draws[:, :, which], [2.5, 97.5], axis=0)

    def exponents(self, *, own_compute: bool = False) -> "Exponents":
        """N_opt ∝ C^a、D_opt ∝ C^b；`own_compute` 时 C 取谷底自己的 6·N·D。

        N 不含词嵌入时，`own_compute` 的 C 也就不含（Kaplan 的算法）。
        """
        best = _slopes(self.C, np.stack((self.N, self.D), axis=1), own_compute)
        many = [_slopes(self.C, draw, own_compute) for draw in self.draws]
        (a_low, b_low), (a_high, b_high) = np.percentile(many, [2.5, 97.5], axis=0).tolist()
        return Exponents(best[0], a_low, a_high, best[1], b_low, b_high)


@dataclass(frozen=True)
class Exponents:
    """N_opt ∝ C^a、D_opt ∝ C^b，与各自的 95 % 区间。"""

    a: float
    a_low: float
    a_high: float
    b: float
    b_low: float
    b_high: float


def find_valleys(
    budgets: Sequence[float], params: Sequence[float], losses: Sequence[float],
    tokens: Sequence[float], *, repeats: int = 1000, seed: int = 0,
) -> Valleys:  # fmt: skip
    """各档的谷底，与自助法的 `repeats` 份；起伏只来自种子，不含「本来不是抛物线」的误差。

    自助法：每次训练与它那一格（同样的大小与算力）几个种子的平均之差，合在一起有放回地抽，加回
    平均上（乘 √(n/(n−1))，补上求平均时少掉的起伏），重新找谷底。
    少于 3 档、有一档说不出谷底、只有一个种子，或一成以上的重抽里谷底跑到边外：ValueError。
    """
    C, N, L, D = checked(budgets, params, losses, tokens)
    levels = np.unique(C)
    if len(levels) < LEVELS:
        raise ValueError(f"只有 {len(levels)} 档算力：拟合指数至少要 {LEVELS} 档")
    best = []
    for level in levels:
        try:
            best.append(valley(N[C == level], L[C == level], D[C == level]))
        except ValueError as error:
            raise ValueError(f"C = {level:.2g} 的一档：{error}") from None
    mean, spread = _cells(C, N, L)
    if not len(spread):
        raise ValueError("每一格只有一个种子：不知道起伏有多大，指数的区间给不出来")
    generator, draws, outside = np.random.default_rng(seed), [], 0
    while len(draws) < repeats:
        again = mean + generator.choice(spread, size=len(L))
        found = [_bottom(N[C == c], again[C == c], D[C == c]) for c in levels]
        if None not in found:
            draws.append([(one.N, one.D) for one in found])
        elif (outside := outside + 1) > 0.1 * repeats:
            raise ValueError("换一批种子，常有一档的谷底跑到量过的大小之外：请补大小或加种子")
    sizes = np.array([(one.N, one.D) for one in best])
    return Valleys(levels, sizes[:, 0], sizes[:, 1], np.array(draws))


def _cells(C: np.ndarray, N: np.ndarray, L: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """每次训练所在格子（同样的 C 与 N）的平均，与全部格子的残差（已补上平均时少掉的起伏）。"""
    mean, spread = np.zeros_like(L), []
    for c, n in {*zip(C.tolist(), N.tolist(), strict=True)}:
        cell = (C == c) & (N == n)
        mean[cell] = L[cell].mean()
        if (count := cell.sum()) > 1:
            spread.append((L[cell] - mean[cell]) * np.sqrt(count / (count - 1)))
    return mean, np.concatenate([[], *spread])


def _bottom(N: np.ndarray, L: np.ndarray, D: np.ndarray) -> Valley | None:
    """抛物线的顶点；开口不向上，或顶点在边外，是 None。比 `valley` 少一条：最低的可以在边上。"""
    curve = parabola(N, L)
    with np.errstate(over="ignore", divide="ignore"):
        log_n = -curve[1] / (2 * curve[0])
    if curve[0] <= 0 or not np.log(N.min()) < log_n < np.log(N.max()):
        return None
    order = np.argsort(N)
    log_d = np.interp(log_n, np.log(N[order]), np.log(D[order]))
    return Valley(float(np.exp(log_n)), float(np.exp(log_d)), float(np.polyval(curve, log_n)))


def _slopes(C: np.ndarray, found: np.ndarray, own_compute: bool) -> tuple[float, float]:
    """log N_opt、log D_opt 对 log C 的斜率；`found` 是 (档, 2)。"""
    log_n, log_d = np.log(found).T
    log_c = log_n + log_d if own_compute else np.log(C)
    return tuple(float(np.polyfit(log_c, y, 1)[0]) for y in (log_n, log_d))


def slope(params: Sequence[float], losses: Sequence[float], floor: float = 0.0) -> tuple:
    """先认定下限 `floor`，再用直线拟合 log(L − floor) 对 log N，返回 (α, A, 残差的均方根)。

    残差换算回 loss 的单位（nat）。下限不低于某个观测值时抛出 ValueError。
    """
    N, L = np.asarray(params, dtype=float), np.asarray(losses, dtype=float)
    if floor >= L.min():
        raise ValueError(f"下限 {floor} 不能不低于最小的 loss {L.min():.3f}")
    gradient, intercept = np.polyfit(np.log(N), np.log(L - floor), 1)
    fitted = floor + np.exp(intercept) * N**gradient
    return -gradient, float(np.exp(intercept)), float(np.sqrt(np.mean((fitted - L) ** 2)))
