"""谁快谁慢，全书一条规矩：成对的比值，自助法的区间，区间不含 1 才下结论。

交错计时给出一对一对的用时：同一轮里 A 走了多久、B 走了多久。机器忽快忽慢时两者一起快慢，
所以先在每一对之内取比值，再看这些比值的平均有多确定。

    paired_ratio([2.0, 4.1, 2.1], [1.0, 2.0, 1.1])   # B 是 A 的约 2 倍速度
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

DRAWS = 10_000  # 自助法重抽的次数：要看清万分之几的尾巴


@dataclass(frozen=True)
class Ratio:
    """速度之比：`value` 倍速度，真值以 95 % 的把握在 [low, high] 之内。"""

    value: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """快、慢或分不出：区间整个在 1 的一边才下结论。"""
        if self.low > 1:
            return "快"
        return "慢" if self.high < 1 else "分不出"

    def __str__(self) -> str:
        """例如 `1.32（1.27–1.38）`；十倍以上不写小数。"""
        digits = 0 if self.value >= 10 else 2
        return f"{self.value:.{digits}f}（{self.low:.{digits}f}–{self.high:.{digits}f}）"


def paired_ratio(reference: Sequence[float], other: Sequence[float]) -> Ratio:
    """`other` 的速度是 `reference` 的几倍。两列用时一对一对地对应，单位相同，至少两对。

    比值取几何平均：快一倍与慢一倍互相抵消，A 比 B 与 B 比 A 的结论也一致。
    区间由自助法得来：从这些比值里有放回地重抽同样多个，抽很多次，看平均值落在哪里。
    对数少时普通的百分位区间偏窄，所以按 Hesterberg 2015（arXiv 1411.5279，3.3 节）放宽：
    用 t 分布算出该取多靠外的百分位。
    """
    from scipy.stats import norm, t

    if len(reference) != len(other) or len(other) < 2:
        raise ValueError(f"要成对的用时，至少两对；这里是 {len(reference)} 与 {len(other)} 个")
    logs = np.log(np.asarray(reference, float) / np.asarray(other, float))
    n = len(logs)
    tail = norm.cdf(math.sqrt(n / (n - 1)) * t.ppf(0.025, n - 1))
    rng = np.random.default_rng(0)  # 固定：同样的数据给出同样的区间
    means = logs[rng.integers(n, size=(DRAWS, n))].mean(axis=1)
    low, high = np.quantile(means, [tail, 1 - tail])
    return Ratio(*(float(math.exp(x)) for x in (logs.mean(), low, high)))
