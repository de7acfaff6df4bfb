"""`lr_sweep` 一章的断言：最低点怎样求、什么时候不求，μP 改了什么，坐标检查，提交的一遍。"""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from experiments.lab.results import ROOT
from experiments.lr_sweep import (
    Options,
    both_ways,
    by_width,
    conclusions,
    coordinates,
    growth,
    interval,
    optima,
    optimum,
    penalty,
    shift,
    slopes,
)
from experiments.training import mup
from experiments.training.mup import WidthRun, apply_mup, build, multiples
from experiments.training.recipe import parameter_groups, seeded_gpt
from experiments.training.small_run import SmallRun, run_key
from experiments.training.step import StepOptions, make_step
from tokens.errors import UserError

TINY = 64  # 词表


@pytest.fixture(scope="module")
def random_tokens() -> dict:
    """均匀的随机 token：坐标检查只看激活怎样变，不看学会了什么。"""
    ids = torch.randint(0, TINY, (4000,), generator=torch.Generator().manual_seed(0))
    return {"train": ids, "meta": {"vocab_size": TINY}}


def width_run(width: int, how: str = "mup", **other) -> WidthRun:
    """基准宽度 32 的一次小训练。"""
    given = {"n_layer": 2, "seq_len": 16, "batch_size": 4, "base_width": 32}
    return WidthRun(d_model=width, parametrization=how, **(given | other))


# ---- 最低点 ----


def test_parabola_finds_the_vertex():
    """loss 是 log 学习率的抛物线时，最低点求得一位不差，哪怕它不在扫过的点上；次序不要紧。"""
    rates = 1e-3 * 2.0 ** np.arange(6)
    losses = 5 + 0.1 * (np.log(rates) - math.log(5.5e-3)) ** 2
    mixed = [3, 0, 5, 1, 4, 2]
    assert optimum(rates[mixed], losses[mixed]) == pytest.approx(5.5e-3, rel=1e-6)


@pytest.mark.parametrize("losses", [[5.0, 5.1, 5.2, 5.3], [5.3, 5.2, 5.1, 5.0]])
def test_a_minimum_at_the_edge_is_refused(losses):
    """最低点在最左或最右：不知道外面是不是更低，拒绝回答，说出往哪里加。"""
    with pytest.raises(ValueError, match="最低点在最边上.*再加几个学习率"):
        optimum([1e-3, 2e-3, 4e-3, 8e-3], losses)


def test_a_diverged_neighbour_is_refused():
    """邻居发散（NaN、inf）时抛物线没有意义，拒绝；远处的发散不要紧。"""
    rates = [1e-3, 2e-3, 4e-3, 8e-3]
    with pytest.raises(ValueError, match="发散"):
        optimum(rates, [5.2, 5.0, math.inf, math.nan])
    assert 1e-3 < optimum(rates, [5.2, 5.0, 5.1, math.inf]) < 4e-3


def test_noise_larger_than_the_bend_is_refused():
    """五个点的抛物线开口朝下，或顶点跑到这几个点之外：不是 U 形，拒绝。"""
    rates = [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2]
    with pytest.raises(ValueError, match="不是 U 形"):
        optimum(rates, [5.0, 5.3, 4.99, 5.3, 5.0])


def planted(power: float, seeds: int = 3, noise: float = 0.002, floor: int = 32) -> pd.DataFrame:
    """造一张扫过的表：标准参数化的最优学习率按宽度的 `power` 次方变，μP 的不变。"""
    rng, rows = np.random.default_rng(0), []
    for run in replace(Options(), seeds=tuple(range(seeds))).runs():
        moved = power if run.parametrization == "standard" else 0.0
        best = 1.3e-2 * (run.d_model / floor) ** moved
        loss = 5 + 0.1 * math.log(run.lr / best) ** 2 + rng.normal(0, noise)
        rows.append({"parametrization": run.parametrization, "d_model": run.d_model,
                     "seed": run.seed, "lr": run.lr, "base_width": 32,
                     "val_loss": loss})  # fmt: skip
    return pd.DataFrame(rows)


def test_shift_recovers_the_planted_power():
    """埋下 −0.8 次方：标准参数化的斜率区间含有它、不含 0；μP 埋的是不动，区间含 0。"""
    table = planted(-0.8)
    found = optima(table)
    slope, half = shift(found, "standard")
    assert abs(slope + 0.8) < half < 0.2, f"{slope:.3f} ± {half:.3f}"
    still, wide = shift(found, "mup")
    assert abs(still) < wide < 0.2, f"{still:.3f} ± {wide:.3f}"
    said = "\n".join(conclusions(table))
    assert "标准：最优学习率按宽度的 -0.8" in said and "看不出移动" in said, said


def test_one_refused_seed_silences_its_width():
    """一个种子的最低点在边上：这个宽度没有平均值，斜率不用它，结论里说出是哪一个。"""
    table = planted(-0.8)
    bad = ((table["d_model"] == 256) & (table["seed"] == 1)
           & (table["parametrization"] == "standard"))  # fmt: skip
    table.loc[bad, "val_loss"] = 5 + table.loc[bad, "lr"]
    found = optima(table)
    rows = by_width(found).set_index(["parametrization", "d_model"])
    assert math.isnan(rows.loc[("standard", 256), "best"])
    assert rows.loc[("standard", 256), "refused"] == 1
    assert rows.loc[("standard", 128), "best"] == pytest.approx(1.3e-2 / 4**0.8, rel=0.05)
    assert abs(shift(found, "standard")[0] + 0.8) < 0.1
    assert any(
        line.startswith("标准，宽 256，种子 1：最低点在最边上") for line in conclusions(table)
    )


def test_one_seed_has_no_interval():
    """只有一个种子时没有区间，结论也这样说，不说移动与否。"""
    assert math.isnan(interval([1.0])[1])
    said = "\n".join(conclusions(planted(-0.8, seeds=1)))
    assert said.count("一个种子，没有区间") == 2 and "看不出" not in said, said


def test_penalty_is_what_the_carried_rate_costs():
    """埋下 −1 次方：最窄的最好学习率搬到最宽的上，标准参数化多付许多，μP 不多付。"""
    table = planted(-1.0)
    cost = {how: penalty(table, how).set_index("d_model")["cost"] for how in ("standard", "mup")}
    assert cost["standard"][256] > 0.3 > 0.02 > abs(cost["mup"][256]), f"{cost}"
    assert cost["standard"][32] == 0 == cost["mup"][32]


# ---- μP 改了什么 ----


def test_mup_at_the_base_width_is_the_standard_model(random_tokens):
    """宽度等于基准时，μP 与标准逐比特相同：初始权重、走三步之后的权重与 logits。"""
    x = random_tokens["train"][:32].view(2, 16)
    after = []
    for how in ("standard", "mup"):
        model, optimizer = build(width_run(32, how), TINY)
        step = make_step(model, optimizer, StepOptions())
        for _ in range(3):
            step(x, x)
        after.append([*model.parameters(), model(x)[0]])
    assert all(torch.equal(a, b) for a, b in zip(*after, strict=True))


def test_every_parameter_has_its_rate_and_decay():
    """宽 128、基准 32：矩阵的学习率除以它自己的 m、衰减乘 m，词嵌入不变，增益不衰减；不重不漏。"""
    model, optimizer = build(width_run(128, lr=1e-2), TINY)
    named = {id(p): name for name, p in model.named_parameters()}
    given = {named[id(p)]: (group["lr"], group["weight_decay"])
             for group in optimizer.param_groups for p in group["params"]}  # fmt: skip
    assert len(given) == len(named) == sum(len(g["params"]) for g in optimizer.param_groups)
    assert given["embed.weight"] == (1e-2, 0.1)
    assert given["blocks.0.attn.qkv.weight"] == pytest.approx((1e-2 / 4, 0.1 * 4))
    down = model.blocks[0].mlp.down.weight.shape[1] / 64  # SwiGLU 的宽度取整，m 不恰好是 4
    assert given["blocks.0.mlp.down.weight"] == pytest.approx((1e-2 / down, 0.1 * down))
    gains = {rates for name, rates in given.items() if "norm" in name}
    assert gains == {(1e-2, 0.0)}, f"{gains}"
    products = {round(rate * decay, 9) for name, (rate, decay) in given.items()
                if "norm" not in name}  # fmt: skip
    assert products == {1e-3}, f"学习率 × 衰减应与宽度无关：{products}"


def test_initial_matrices_shrink_with_width_and_the_embedding_does_not():
    """初始标准差：矩阵是标准的 1/√m，词嵌入与标准的逐比特相同；两者用同一组随机数。"""
    plain, scaled = (build(width_run(128, how), TINY)[0] for how in ("standard", "mup"))
    assert torch.equal(plain.embed.weight, scaled.embed.weight)
    for name, m in multiples(scaled, width_run(32).config(TINY)).items():
        wide, narrow = plain.get_parameter(name), scaled.get_parameter(name)
        torch.testing.assert_close(narrow * m**0.5, wide)


def test_logits_are_divided_whichever_way_the_loss_is_computed():
    """只换最后的归一化：logits 恰是标准的 1/m，合成的交叉熵也看到同一个除数；权重仍共享。"""
    config, base = width_run(128).config(TINY), width_run(32).config(TINY)
    model = seeded_gpt(config, 0)
    x = torch.arange(32).view(2, 16)
    before = model(x)[0]
    scaled = apply_mup(seeded_gpt(config, 0), base)
    for name, m in multiples(scaled, base).items():  # 把矩阵放回标准的大小
        scaled.get_parameter(name).data.mul_(m**0.5)
    torch.testing.assert_close(scaled(x)[0], before / 4, rtol=1e-4, atol=1e-6)
    assert scaled.head.weight is scaled.embed.weight
    whole, fused = scaled(x, x)[1], scaled(x, x, fused_loss=True)[1]
    torch.testing.assert_close(whole, fused)


def test_a_sweep_row_knows_its_parametrization():
    """名片里有参数化与基准宽度；普通的 `SmallRun` 的名片没有变，早先提交的测量仍认得。"""
    assert run_key(width_run(64, "mup")) != run_key(width_run(64, "standard"))
    assert "parametrization" not in run_key(SmallRun())
    committed = pd.read_csv(ROOT / "book" / "measured" / "scaling_seeds.csv")["run"]
    assert run_key(SmallRun(d_model=64, n_layer=2)) in set(committed)


# ---- 坐标检查 ----

NARROW, WIDE = 0.3, 0.6  # μP 的斜率都小于前者，标准的都大于后者；量到的最近的是 0.1 与 0.75
CHECK = Options(widths=(32, 64, 128), batch_size=2, seq_len=16, seeds=(0, 1))


def test_changes_do_not_grow_with_width_under_mup_and_do_otherwise(random_tokens):
    """走四步，两个种子：标准参数化的每一处变化随宽度长，μP 的每一处都不长。"""
    slopes = growth(coordinates(CHECK, random_tokens))
    ends = slopes.groupby("parametrization")["slope"].agg(["min", "max"])
    assert len(slopes) == 2 * 5 * 2, "两种参数化 × 五处 × 两个种子"
    assert ends.loc["mup", "max"] < NARROW, f"{slopes}"
    assert ends.loc["standard", "min"] > WIDE, f"{slopes}"


def no_rate_scaling(model, base, lr, weight_decay):
    """漏掉 1/m：每个矩阵都用同一个学习率。"""
    return [group | {"lr": lr} for group in parameter_groups(model, weight_decay)]


def no_division(model, base):
    """漏掉 logits 的 1/m。"""
    norm = model.norm
    apply_mup(model, base)
    model.norm = norm
    return model


@pytest.mark.parametrize(
    ("name", "broken", "grows"),
    [("mup_groups", no_rate_scaling, "前馈 2"), ("apply_mup", no_division, "logits")],
)
def test_the_check_sees_a_missing_piece(random_tokens, monkeypatch, name, broken, grows):
    """漏掉学习率的 1/m，层里的变化随宽度长；漏掉 logits 的 1/m，logits 的变化随宽度长。"""
    monkeypatch.setattr(mup, name, broken)
    slopes = growth(coordinates(replace(CHECK, seeds=(0,)), random_tokens))
    found = slopes[slopes["parametrization"] == "mup"].set_index("where")["slope"]
    assert found[grows] > WIDE, f"{found}"


# ---- 选项 ----


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"widths": (32, 100)}, "宽度 100"), ({"rates": (1e-3, -1.0)}, "学习率 -1.0"),
        ({"rates": (math.nan,)}, "学习率 nan"), ({"seeds": (0, 0)}, "--seeds 0 0"),
        ({"mup_rates": ()}, "--mup-rates （空）"), ({"steps": 0}, "--steps 0"),
        ({"seeds": (-1,)}, "--seeds -1"),
    ],
)  # fmt: skip
def test_meaningless_options_are_refused(wrong, said):
    """没有意义的选项，训练之前一句话拒绝，说出给了什么。"""
    with pytest.raises(UserError, match=said):
        Options(**wrong)


def test_the_base_width_is_trained_once():
    """基准宽度的 μP 与标准是同一个模型：只训练一次，读表时两边都有；学习率取两边的并集。"""
    runs = Options().runs()
    base = [run for run in runs if run.d_model == 32 and run.seed == 0]
    assert {run.parametrization for run in base} == {"standard"}
    assert {run.lr for run in base} == {*Options().rates, *Options().mup_rates}
    assert len({run_key(run) for run in runs}) == len(runs)
    table = both_ways(planted(-1.0))
    shared = table[table["d_model"] == 32].pivot_table(
        index=["seed", "lr"], columns="parametrization", values="val_loss"
    )
    assert (shared["mup"] == shared["standard"]).all() and len(shared) == 3 * len(base)


# ---- 脚本 ----


@pytest.mark.slow
def test_script_trains_writes_and_resumes(run_script, tmp_path):
    """很短的一遍：一行一次训练；第二遍不重训，结论照印；选项写错时一句话，退出码 2。"""
    words = ["experiments/lr_sweep.py", "--widths", 32, 64, "--rates", 4e-3, 1.6e-2,
             "--mup-rates", 1.6e-2, "--seeds", 0, "--steps", 2,
             "--name", "test_lr_rows"]  # fmt: skip
    done = run_script(*words)
    assert done.returncode == 0, done.stderr[-2000:]
    for needle in ("标准：最后的验证 loss", "坐标检查", "最低点在最边上"):
        assert needle in done.stdout, done.stdout
    again = run_script(*words)
    assert "已有 5 次训练，跳过；还要做 0 次" in again.stderr, again.stderr[-2000:]
    assert again.stdout.split("\n坐标检查")[0] == done.stdout.split("\n坐标检查")[0]
    wrong = run_script("experiments/lr_sweep.py", "--widths", 48)
    assert wrong.returncode == 2 and wrong.stderr.startswith("错误：宽度 48"), wrong.stderr


# ---- 随书提交的一遍 ----


@pytest.fixture(scope="module")
def committed() -> pd.DataFrame:
    """随书提交的一遍扫描，一行一次训练。"""
    return pd.read_csv(ROOT / "book" / "measured" / "lr_sweep.csv")


def test_the_committed_sweep_is_complete(committed):
    """提交的是默认选项的一遍：它有的宽度与种子，每个学习率都在，一次不多、一次不少。"""
    widths, seeds = (tuple(sorted(committed[name].unique())) for name in ("d_model", "seed"))
    runs = Options(widths=tuple(map(int, widths)), seeds=tuple(map(int, seeds))).runs()
    assert sorted(committed["run"]) == sorted(map(run_key, runs))
    assert len(seeds) >= 3 and np.isfinite(committed["val_loss"]).all()


def test_every_width_has_both_sides_of_the_u(committed):
    """提交的一遍里，每种参数化、每个宽度、每个种子的最低点两边都有邻居，没有一个拒绝。"""
    found = optima(committed)
    refused = found[found["refused"] != ""]
    assert refused.empty, f"{refused}"


def test_the_optimum_moves_under_the_standard_parametrization(committed):
    """标准参数化：最优学习率随宽度下降，95 % 区间的上端还在 −0.1 以下。"""
    slope, half = shift(optima(committed), "standard")
    assert slope + half < -0.1, f"{slope:.2f} ± {half:.2f}"


def test_the_optimum_moves_less_under_mup(committed):
    """μP：最优学习率的次方比标准的离 0 近；逐种子之差的 95 % 区间不含 0。"""
    found = optima(committed)
    powers = {how: slopes(found, how) for how in ("standard", "mup")}
    less, half = interval(powers["mup"] - powers["standard"])
    assert less > half, f"{powers}：{less:.2f} ± {half:.2f}"


def test_the_carried_rate_costs_more_without_mup(committed):
    """最窄的最好学习率搬到最宽的上：标准参数化多付的大过它的误差。"""
    worst = penalty(committed, "standard").iloc[-1]
    assert worst["cost"] > worst["half"] > 0, f"{worst}"
