"""`training/law.py` 的证据：数据说不出答案时拒绝，说得出时找回埋下的常数，谷底与指数都带区间。"""

import math

import numpy as np
import pytest

from experiments.training.law import (
    PUBLISHED,
    Law,
    bootstrap,
    find_valleys,
    fit_law,
    refusal,
    valley,
)

SMALL = Law(E=1.0, A=30.0, B=200.0, alpha=0.30, beta=0.35)  # 小模型那一段的形状
BUDGETS = (1e10, 4e10, 1.6e11, 6.4e11)
SEED_SD = 0.07  # 与 scaling 一章量到的种子起伏同样大，nat


def grid(law: Law, sd: float = 0.0, seeds: int = 3, shift: float = 1.0) -> dict[str, np.ndarray]:
    """四档算力 × 六种大小 × 几个种子；`shift` 把全部大小移到真正的谷底的几倍处。"""
    generator, rows = np.random.default_rng(0), []
    for C in BUDGETS:
        bottom = law.optimum(C)[0]
        for N in bottom * shift * np.geomspace(1 / 8, 8, 6):
            D = C / (6 * N)
            rows += [(C, N, law.loss(N, D) + generator.normal(0, sd), D) for _ in range(seeds)]
    return dict(zip(("budgets", "params", "losses", "tokens"), np.array(rows).T, strict=True))


# ---- 五个常数 ----


def test_two_laws_agree_along_twenty_tokens_per_parameter():
    """都取 D = 20N 时，两组常数的 loss 逐点相同，最优的 N 却差几倍；拟合拒绝并说出原因。"""
    N = np.geomspace(1e6, 1e9, 9)
    D, one = 20 * N, PUBLISHED["Hoffmann（印刷值）"]
    other = Law(one.E, one.B * 20**-one.beta, one.A * 20**one.alpha, one.beta, one.alpha)
    gap = np.abs(one.loss(N, D) - other.loss(N, D)).max()
    assert gap < 1e-9, f"差 {gap}"
    apart = one.optimum(5.76e23)[0] / other.optimum(5.76e23)[0]
    assert not 0.5 < apart < 2, f"最优的 N 之比 {apart}"
    with pytest.raises(ValueError, match="落在一条线上（例如都取 D = 20N）"):
        fit_law(N, D, one.loss(N, D))


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, -1.0])
def test_any_line_in_log_space_is_refused(power):
    """不只 D = 20N：D ∝ N 的任何一次幂都定不出五个常数；步数取整的零头（2 %）救不了它。"""
    N = np.geomspace(1e6, 1e9, 12)
    D = 1e7 * (N / 1e6) ** power * (1 + 0.02 * np.sin(np.arange(12)))
    assert "一条线上" in refusal(N, D) or "只有 1 个不同的取值" in refusal(N, D)
    assert refusal(np.repeat(N[::4], 3), np.tile(1e7 * np.array([1.0, 4.0, 16.0]), 3)) == ""


@pytest.mark.parametrize(
    ("N", "D", "said"),
    [
        ([1e6, 2e6, 4e6] * 3, [1e7] * 9, "D 只有 1 个不同的取值"),
        ([1e6] * 9, [1e7, 2e7, 4e7] * 3, "N 只有 1 个不同的取值"),
        ([1e6, 2e6, 4e6, 1e6, 2e6], [1e7, 1e7, 1e7, 2e7, 4e7], "只有 5 组不同的"),
        ([1e6, 2e6, 4e6, 1e6, 2e6] * 3, [1e7, 1e7, 1e7, 2e7, 4e7] * 3, "只有 5 组不同的"),
    ],
)
def test_too_little_data_is_refused_by_both(N, D, said):
    """取值太少、点太少（种子再多也不添新的点）：拟合与自助法都拒绝，都说出缺什么。"""
    for function in (fit_law, bootstrap):
        with pytest.raises(ValueError, match=said):
            function(N, D, np.linspace(5.0, 4.0, len(N)))


def test_meaningless_numbers_are_refused():
    """loss 里有 NaN、参数量为零、各列不一样长：一句话拒绝，而不是拟合出 NaN。"""
    N, D = np.repeat([1e6, 2e6, 4e6], 3), np.tile([1e7, 2e7, 4e7], 3)
    for wrong in ([math.nan] + [5.0] * 8, [0.0] + [5.0] * 8):
        with pytest.raises(ValueError, match="有限的正数"):
            fit_law(N, D, wrong)
    with pytest.raises(ValueError, match="一样长"):
        fit_law(N, D, [5.0])


def test_huber_is_summed():
    """九成的点都在真值上，一成差 30 %：常数仍然找得回来；参数量与 token 数没有对调。"""
    law = PUBLISHED["Besiroglu 2024"]
    N, D = (x.ravel() for x in np.meshgrid(np.geomspace(5e7, 1e10, 5), np.geomspace(1e9, 5e11, 5)))
    losses = law.loss(N, D)
    losses[[3, 17]] *= 1.3
    found = fit_law(N, D, losses)
    assert found.alpha == pytest.approx(law.alpha, rel=0.02), f"{found}"
    assert found.beta == pytest.approx(law.beta, rel=0.02), f"{found}"


@pytest.mark.slow
def test_planted_constants_are_inside_a_thousand_draws():
    """默认的 1,000 次重抽，0.5 % 的噪声：五个常数都在自己的 95 % 区间里，α、β 的区间宽不到 0.3。"""
    law, data = SMALL, grid(SMALL, seeds=2)
    noise = np.random.default_rng(3).normal(0, 0.005, len(data["losses"]))
    intervals = bootstrap(data["params"], data["tokens"], data["losses"] * np.exp(noise))
    for name, (low, high) in intervals.items():
        assert low < getattr(law, name) < high, f"{name}：{getattr(law, name)} 与 {low}–{high}"
    for name in ("alpha", "beta"):
        assert 0.005 < intervals[name][1] - intervals[name][0] < 0.3, f"{intervals}"


# ---- 谷底与指数 ----


def test_valley_is_the_optimum():
    """一档算力里六种大小的抛物线，谷底离闭式解的 N 不到 15 %，D 也是；D = C/(6N)。"""
    data = grid(SMALL, seeds=1)
    for C in BUDGETS:
        at = data["budgets"] == C
        found = valley(data["params"][at], data["losses"][at], data["tokens"][at])
        N, D = SMALL.optimum(C)
        assert found.N == pytest.approx(N, rel=0.15) and found.D == pytest.approx(D, rel=0.15)
        assert 6 * found.N * found.D == pytest.approx(C, rel=1e-6)


@pytest.mark.parametrize(("shift", "side"), [(20, "小"), (0.05, "大")])
def test_a_valley_at_the_edge_is_refused(shift, side):
    """量过的大小全在谷底的一边：拒绝，并说出该补哪一边的大小；指数随之拒绝，说出哪一档。"""
    data = grid(SMALL, seeds=2, shift=shift)
    at = data["budgets"] == BUDGETS[0]
    with pytest.raises(ValueError, match=f"请补上更{side}的"):
        valley(data["params"][at], data["losses"][at], data["tokens"][at])
    with pytest.raises(ValueError, match=r"C = 1e\+10 的一档"):
        find_valleys(**data)


def test_valley_needs_four_sizes_and_a_bowl():
    """三种大小总能穿过一条抛物线，不算证据；中间高两头低，也没有谷底。"""
    with pytest.raises(ValueError, match="只有 3 种大小"):
        valley([1e4, 2e4, 4e4], [5.0, 4.9, 5.1], [1e6, 5e5, 2.5e5])
    with pytest.raises(ValueError, match="谷底"):
        valley([1e4, 2e4, 4e4, 8e4], [5.0, 5.3, 5.3, 4.9], [8e6, 4e6, 2e6, 1e6])


@pytest.mark.parametrize("sd", [0.01, SEED_SD])
def test_planted_exponents_are_inside_their_intervals(sd):
    """种子的起伏与量到的同样大时，a = β/(α+β) 与 b = α/(α+β) 都在区间里；起伏大，区间宽。"""
    found = find_valleys(**grid(SMALL, sd)).exponents()
    a = SMALL.beta / (SMALL.alpha + SMALL.beta)
    slack = 0.005  # 谷底不是严格的抛物线
    assert found.a_low - slack < a < found.a_high + slack, f"{a:.3f}：{found}"
    assert found.b_low - slack < 1 - a < found.b_high + slack, f"{1 - a:.3f}：{found}"
    assert found.a + found.b == pytest.approx(1), f"{found}"


def test_interval_covers_as_often_as_it_says():
    """换 40 次噪声，区间盖住真值的次数与 95 % 相容（至少 33 次），而不是随便多窄。"""
    hits, a = 0, SMALL.beta / (SMALL.alpha + SMALL.beta)
    clean = grid(SMALL)
    for number in range(40):
        noise = np.random.default_rng(number).normal(0, 0.02, len(clean["losses"]))
        found = find_valleys(**clean | {"losses": clean["losses"] + noise}, repeats=40)
        one = found.exponents()
        hits += one.a_low < a < one.a_high
    assert 33 <= hits, f"40 次里盖住 {hits} 次"


def test_too_few_budgets_or_seeds_are_refused():
    """两档算力总能连成一条线；一个种子不知道起伏：都拒绝给出指数。"""
    data = grid(SMALL, 0.01)
    two = {name: column[data["budgets"] < 1e11] for name, column in data.items()}
    with pytest.raises(ValueError, match="只有 2 档算力"):
        find_valleys(**two)
    with pytest.raises(ValueError, match="只有一个种子"):
        find_valleys(**grid(SMALL, 0.01, seeds=1))


def test_leaving_the_embedding_out_raises_the_exponent():
    """每个模型都另有正比于 √N 的词嵌入时，不含它的 N 的指数更高，且两种 C 都这样。"""
    data = grid(SMALL, 0.01)
    whole = find_valleys(**data).exponents()
    inner = data["params"] - 0.6 * np.sqrt(data["params"].min() * data["params"])
    part = find_valleys(**data | {"params": inner})
    for own in (False, True):
        assert part.exponents(own_compute=own).a > whole.a + 0.03, f"{part.exponents()} 与 {whole}"
