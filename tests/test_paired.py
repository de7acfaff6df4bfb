"""快慢的规矩（`lab/paired.py`）：成对的比值、区间的覆盖率、含 1 就不下结论。"""

import numpy as np
import pytest

from experiments.lab.paired import Ratio, paired_ratio


def test_ratio_is_within_pairs():
    """每一对都是 2 倍速度，机器再怎么忽快忽慢，比值与区间都恰是 2。"""
    slow = np.array([1.0, 9.0, 2.0, 30.0, 4.0])
    ratio = paired_ratio(slow, slow / 2)
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((2, 2, 2)), ratio
    assert ratio.verdict == "快" and paired_ratio(slow / 2, slow).verdict == "慢"


def test_both_directions_agree():
    """A 比 B 快 r 倍，B 比 A 就是 1/r：几何平均不偏向谁。"""
    rng = np.random.default_rng(0)
    a, b = np.exp(rng.normal(size=(2, 12)))
    there, back = paired_ratio(a, b), paired_ratio(b, a)
    assert there.value * back.value == pytest.approx(1)
    assert there.low * back.high == pytest.approx(1, rel=0.05), f"{there}，{back}"


@pytest.mark.parametrize("pairs", [5, 15, 30])
def test_interval_covers_the_truth(pairs):
    """两者其实一样快、各抖 10 % 时，区间含 1 的次数约是 95 %；五对也不低于 90 %。"""
    rng, hits = np.random.default_rng(1), 0
    for _ in range(200):
        a, b = np.exp(rng.normal(scale=0.1, size=(2, pairs)))
        ratio = paired_ratio(a, b)
        hits += ratio.low <= 1 <= ratio.high
    assert 180 <= hits <= 199, f"{pairs} 对：200 次里含 1 的有 {hits} 次"


def test_needs_pairs():
    """只有一对、或者两列不一样长，凑不出区间：拒绝。"""
    for a, b in (([1.0], [2.0]), ([1.0, 2.0], [1.0])):
        with pytest.raises(ValueError, match="至少两对"):
            paired_ratio(a, b)


def test_ratio_as_written():
    """写出来的样子：两位小数；十倍以上不写小数。"""
    assert str(Ratio(1.316, 1.27, 1.384)) == "1.32（1.27–1.38）"
    assert str(Ratio(18.4, 16.2, 21.3)) == "18（16–21）"
