"""`literature` 一章的断言：印出来的数、舍入的范围、照错的代价、训完还要用时的最优。"""

import math
from dataclasses import replace

import numpy as np
import pytest

from experiments.literature import (
    CHINCHILLA,
    DISAGREEMENT,
    GRID,
    PRINTED,
    SMALL,
    TABLE_3,
    UNROUNDED,
    Options,
    best_for_service,
    check_row,
    disagreement_steps,
    grid_optimum,
    half_unit,
    lifetime_flops,
    optimum_range,
    regrets,
    rounding_box,
    rounding_share,
    service_row,
    tokens_for,
)
from experiments.training.law import PUBLISHED
from tokens.errors import UserError

REFIT = PUBLISHED["Besiroglu 2024"]


@pytest.mark.parametrize(
    ("printed", "half"),
    [("1.92e19", 0.005e19), ("8.0e9", 0.05e9), ("205.1e9", 0.05e9), ("400e6", 0.5e6), ("12", 0.5)],
)
def test_half_unit_reads_the_printed_digits(printed, half):
    """末位的一半由写法决定：8.0e9 与 8e9 的精度不同。"""
    assert half_unit(printed) == pytest.approx(half)
    assert half_unit("8e9") == pytest.approx(0.5e9)


def test_table_3_row_by_row():
    """八行里七行的 6ND 与 C 差不到 1 %，舍入说得通；67B 多 4.7 %，舍入说不通。"""
    rows = {row["params"]: row for row in (check_row(*row) for row in TABLE_3)}
    odd = rows.pop(67e9)
    assert odd["excess"] == pytest.approx(4.69, abs=0.01) and odd["by_rounding"] == "否"
    assert 6 * 66.5e9 * 1.45e12 > 5.765e23, "连 N 也舍入，仍然对不上"
    assert len(rows) == 7
    assert all(abs(row["excess"]) < 1 and row["by_rounding"] == "是" for row in rows.values())


@pytest.mark.parametrize(
    ("name", "params", "tokens", "ratio"),
    [(PRINTED, "326", "11.29", "92.6"), (UNROUNDED, "389", "9.48", "59.1"),
     ("Besiroglu 2024", "394", "9.36", "18.4")],
)  # fmt: skip
def test_three_optima_to_the_printed_digits(name, params, tokens, ratio):
    """2.21e19 的最优 N（百万）、D（十亿）与 5.76e23 的 token / 参数，印出来的每一位都对。"""
    N, D = PUBLISHED[name].optimum(SMALL)
    assert (f"{N / 1e6:.0f}", f"{D / 1e9:.2f}") == (params, tokens)
    N, D = PUBLISHED[name].optimum(CHINCHILLA)
    assert f"{D / N:.1f}" == ratio


def test_rounding_explains_the_disagreement():
    """α、β 在印刷值左右半个末位里游走：最优 N、D 的范围盖住「矛盾」的双方，也盖住未舍入的。"""
    (low_n, high_n), (low_d, high_d) = optimum_range(PUBLISHED[PRINTED], SMALL)
    for N, D in (*DISAGREEMENT.values(), PUBLISHED[UNROUNDED].optimum(SMALL)):
        assert low_n < N < high_n and low_d < D < high_d, f"{N:.3g}、{D:.3g}"
    assert high_n / low_n == pytest.approx(1.794, abs=0.01)


def test_the_316_million_are_a_point_of_a_grid():
    """印刷值的最低点是 326M；复算印出的 316.23M、11.65B 是它的格点里最近的一个，加密就不是了。"""
    N, D = grid_optimum(PUBLISHED[PRINTED], SMALL)
    assert (f"{N / 1e6:.2f}", f"{D / 1e9:.2f}") == ("316.23", "11.65")
    assert round(100 * (10**GRID - 1)) == 15, "页上说相邻两点差 15 %"
    fine, _ = grid_optimum(PUBLISHED[PRINTED], SMALL, step=2**-10)
    assert fine == pytest.approx(PUBLISHED[PRINTED].optimum(SMALL)[0], rel=2e-3)


def test_rounding_is_most_of_the_small_disagreement():
    """从 316M 到 400M：格点占 13 %，舍入占 75 %，剩下 12 % 没有解释；三份合起来是全部。"""
    shares = [row["share"] for row in disagreement_steps()]
    assert [round(share) for share in shares] == [0, 13, 75, 12]
    assert sum(shares) == pytest.approx(100)


def test_rounding_is_not_most_of_the_ratio():
    """5.76e23 上 92.6 与 18.4 之间，舍入只占 28 %：方框的四个角没有一个低于 40。"""
    assert rounding_share(CHINCHILLA) == pytest.approx(27.8, abs=0.05)
    optima = [law.optimum(CHINCHILLA) for law in rounding_box(PUBLISHED[PRINTED])]
    assert min(D / N for N, D in optima) == pytest.approx(43.8, abs=0.05)


def test_the_corners_are_the_extremes():
    """方框里走遍 21 × 21 个点，最优 N 没有一个在四个角之外。"""
    law = PUBLISHED[PRINTED]
    alphas, betas = (np.linspace(x - 0.005, x + 0.005, 21) for x in (law.alpha, law.beta))
    found = [replace(law, alpha=a, beta=b).optimum(SMALL)[0] for a in alphas for b in betas]
    (low, high), _ = optimum_range(law, SMALL)
    assert (min(found), max(found)) == pytest.approx((low, high))
    assert {(one.alpha, one.beta) for one in rounding_box(law)} == {
        (a, b) for a in (law.alpha - 0.005, law.alpha + 0.005)
        for b in (law.beta - 0.005, law.beta + 0.005)
    }  # fmt: skip


def test_wrong_constants_cost_little():
    """1e24 上三组的比值差五倍以上，照错一组的 loss 却最多高 0.0074 nat；照对的不多付。"""
    ratios = [D / N for N, D in (law.optimum(1e24) for law in PUBLISHED.values())]
    assert max(ratios) / min(ratios) > 5
    rows = {row["照着"]: row for row in regrets(1e24)}
    costs = [rows[a][b] for a in PUBLISHED for b in PUBLISHED if a != b]
    assert min(costs) > 0 and max(costs) == pytest.approx(0.0074, abs=5e-5)
    assert all(rows[name][name] == 0 for name in PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_serving_nothing_is_compute_optimal(name):
    """训完不用：最省的就是 `Law.optimum`；同样的 loss，同样的算力。"""
    law = PUBLISHED[name]
    N, D = law.optimum(1e23)
    found = best_for_service(law, law.loss(N, D), 0.0)
    assert found == pytest.approx((N, D), rel=1e-3)
    assert lifetime_flops(*found, 0.0) == pytest.approx(1e23, rel=1e-6)


def test_serving_more_means_smaller():
    """要服务的 token 越多，N 越小、D 越大，省得越多；loss 不变；左右各挪一成都更贵。"""
    rows = [service_row(REFIT, 8e9, served) for served in (0, 1e11, 1e12, 1e13, 1e14)]
    sizes, tokens, saved = ([row[key] for row in rows] for key in ("params", "tokens", "saved"))
    assert sizes == sorted(sizes, reverse=True) and tokens == sorted(tokens)
    assert saved == sorted(saved) and saved[-2] == pytest.approx(59.8, abs=0.1)
    for row in rows:
        assert REFIT.loss(row["params"], row["tokens"]) == pytest.approx(row["loss"], abs=1e-9)
        best = lifetime_flops(row["params"], row["tokens"], row["served"])
        for factor in (0.9, 1.1):
            N = row["params"] * factor
            assert lifetime_flops(N, tokens_for(REFIT, N, row["loss"]), row["served"]) > best


def test_out_of_reach_is_said():
    """小到读多少都不够的模型要无穷多 token；不高于 E 的 loss 谁也到不了。"""
    assert tokens_for(REFIT, 1e6, 2.0) == math.inf
    with pytest.raises(ValueError, match="不高于下限"):
        best_for_service(REFIT, REFIT.E, 1e12)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"budget": 0.0}, "--budget 0"), ({"budget": math.nan}, "--budget nan"),
     ({"params": -1.0}, "--params -1"), ({"served": (-1.0,)}, "--served -1")],
)  # fmt: skip
def test_meaningless_questions_are_refused(wrong, said):
    """负的、零的、不是数的：一句话，说出选项与给的值。"""
    with pytest.raises(UserError, match=said):
        Options(**wrong)


def test_as_a_reader(run_script):
    """脚本印出全部七张表，67B 那一行写着「否」。"""
    done = run_script("experiments/literature.py", "--budget", "1e24")
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[-1] for row in rows if row and row[0] == "6.7e+10"] == ["否"], done.stdout
    assert done.stdout.count("三组常数在") == 3 and "照着" in done.stdout
    assert "从一个答案走到另一个" in done.stdout
