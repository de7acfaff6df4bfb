"""损失随参数量与数据量的幂律 L(N, D) = E + A/N^α + B/D^β：预测、最优分配、拟合，以及何时不能拟合。

形式出自 Chinchilla（Hoffmann 等 2022，arXiv 2203.15556，式 2）；N 是参数个数，D 是训练 token 数，
L 的单位是 nat/token。E 是数据本身不可预测的部分，后两项是「模型不够大」与「数据不够多」的代价。
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import numpy as np
from scipy.optimize import least_squares
from scipy.special import logsumexp

HUBER_DELTA = 1e-3  # 对数残差超过它就按一次方计，个别坏点不左右结果（同原文）


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


def fit_law(
    params: Sequence[float], tokens: Sequence[float], losses: Sequence[float],
    *, start: Law | None = None,
) -> Law:
    """由若干次训练的 (N, D, L) 拟合五个常数：对数残差的 Huber 损失，多个起点，取最好的一个。

    给出 `start` 时只从那里出发（自助法重抽时省时间）。
    N 或 D 的不同取值少于 3 个时抛出 ValueError：例如所有模型都读同样多的数据，
    B/D^β 就只是一个常数，与 E 加在一起分不开，α 也随之不定——这时给出数字就是编造。
    """
    N, D, L = (np.asarray(values, dtype=float) for values in (params, tokens, losses))
    for name, values in (("N", N), ("D", D)):
        if len(distinct := np.unique(values)) < 3:
            raise ValueError(
                f"{name} 只有 {len(distinct)} 个不同的取值，α 与 β 分不开：N 和 D 都至少要 3 个"
            )

    def residuals(theta: np.ndarray) -> np.ndarray:
        log_e, log_a, log_b, alpha, beta = theta
        terms = (log_e + 0 * N, log_a - alpha * np.log(N), log_b - beta * np.log(D))
        return logsumexp(terms, axis=0) - np.log(L)

    starts = [(0.5, a, b, e, e) for a in (4.0, 8.0) for b in (4.0, 8.0) for e in (0.2, 0.5)]
    if start is not None:
        starts = [(*np.log((start.E, start.A, start.B)), start.alpha, start.beta)]
    # least_squares 极小化的是 Huber 之和；若取平均，目标小到低于停止阈值，会停在半路
    tight = {"ftol": 1e-12, "xtol": 1e-12, "gtol": 1e-12, "max_nfev": 500}
    fits = (
        least_squares(residuals, start, loss="huber", f_scale=HUBER_DELTA, x_scale="jac", **tight)
        for start in starts
    )
    log_e, log_a, log_b, alpha, beta = min(fits, key=lambda fit: fit.cost).x
    return Law(*map(float, (*np.exp((log_e, log_a, log_b)), alpha, beta)))


def bootstrap(
    params: Sequence[float], tokens: Sequence[float], losses: Sequence[float],
    *, repeats: int = 100, seed: int = 0,
) -> dict[str, tuple[float, float]]:
    """五个常数各自的 95 % 区间：把观测有放回地重抽 `repeats` 次，每次重新拟合。"""
    data = np.asarray([params, tokens, losses], dtype=float)
    generator, fits, best = np.random.default_rng(seed), [], fit_law(*data)
    while len(fits) < repeats:
        sample = data[:, generator.integers(data.shape[1], size=data.shape[1])]
        if all(len(np.unique(row)) >= 3 for row in sample[:2]):
            fits.append(astuple(fit_law(*sample, start=best)))
    low, high = np.percentile(fits, [2.5, 97.5], axis=0).tolist()
    names = [field.name for field in fields(Law)]
    return {name: (low[i], high[i]) for i, name in enumerate(names)}


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
