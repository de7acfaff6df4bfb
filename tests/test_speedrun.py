"""`speedrun` 一章的断言：规则对所有配方一样，提交的成绩能从 CSV 重新算出来，短跑也能看出差别。"""

import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pandas as pd
import pytest
import torch

from experiments import speedrun
from experiments.lab.results import ROOT, as_recipe
from experiments.speedrun import (
    ABLATIONS,
    BASE,
    LADDER,
    RECIPES,
    RECORD,
    SEQ_LEN,
    TARGET,
    Options,
    batches,
    build,
    check_params,
    held_out,
    make_optimizer,
    rate_factor,
    ruling,
    speed_ratio,
    summarize,
    train,
)
from model import GPT, GPTConfig
from tokens.errors import UserError

RULES = ("d_model", "n_layer", "steps", "batch_size", "lr", "warmup", "betas")


@pytest.fixture(scope="module")
def committed() -> pd.DataFrame:
    """随仓库提交的正式成绩：朴素的配方与纪录各 5 个种子以上。"""
    return pd.read_csv(ROOT / "book" / "measured" / "speedrun.csv")


# ---- 规则 ----


def test_base_is_the_plain_recipe():
    """起跑线就是 `scaling` 一章的配方：fp32、eager、AdamW 3e-3，B 16、T 128、400 步。"""
    given = {name: getattr(BASE, name) for name in RULES}
    expected = {"d_model": 128, "n_layer": 4, "steps": 400, "batch_size": 16, "lr": 3e-3,
                "warmup": 50, "betas": (0.9, 0.95)}  # fmt: skip
    assert given == expected, f"起跑线是 {given}"
    assert not BASE.fast and BASE.optimizer == "adamw" and BASE.order == "random"
    rates = [3e-3 * rate_factor(s, BASE) for s in (0, 49, 400)]
    assert rates == pytest.approx([6e-5, 3e-3, 3e-4]), f"学习率是 {rates}"


@pytest.mark.parametrize("name", list(RECIPES))
def test_parameters_stay_within_one_percent(name):
    """每个配方的参数量与起跑线的 1,803,392 相差不超过 1 %。"""
    params = build(RECIPES[name], seed=0).num_params()
    ratio = params / 1_803_392
    assert abs(ratio - 1) <= 0.01, f"{name}：{params:,} 个参数，是起跑线的 {ratio:.4f} 倍"


def test_a_bigger_model_is_refused():
    """多出 1 % 以上的参数不能参赛。"""
    with pytest.raises(ValueError, match="1 %"):
        check_params(GPT(GPTConfig(n_layer=5)))


def test_evaluation_is_the_same_for_every_recipe(tokens):
    """评估用 8 个固定的 batch，每个 32 个序列：与种子、配方、此前用掉的随机数都无关。"""
    first = held_out(tokens["val"])
    torch.manual_seed(7)
    torch.rand(3)
    second = held_out(tokens["val"])
    shapes = {tuple(x.shape) for x, _ in first}
    assert len(first) == 8 and shapes == {(32, SEQ_LEN)}, f"{len(first)} 个 batch，{shapes}"
    for (x, y), (u, v) in zip(first, second, strict=True):
        assert torch.equal(x, u) and torch.equal(y, v), "两次取到的验证 batch 不同"


def test_ladder_starts_at_base_and_ends_at_the_record():
    """纪录表从起跑线开始，到纪录为止；起跑线与 `fast` 只差算法，学到的东西由同样的选择决定。"""
    recipes = list(LADDER.values())
    assert recipes[0] is BASE and recipes[-1] is RECORD, list(LADDER)
    given, same = ({k: v for k, v in vars(r).items() if k not in ("name", "change", "fast")}
                   for r in (recipes[1], BASE))  # fmt: skip
    assert given == same, "fast 改了配方"


# ---- 零件 ----


def test_epoch_order_reads_every_token_once():
    """不重复地读：一遍之内没有一个 token 两次成为目标；有放回地抽则会重复。"""
    data = torch.arange(40 * SEQ_LEN)
    seen = {}
    for order in ("epoch", "random"):
        source = batches(data, replace(BASE, order=order, batch_size=3), seed=0)
        targets = torch.cat([next(source)[1].flatten() for _ in range(13)])  # 39 个窗口：一遍
        seen[order] = len(targets) - len(targets.unique())
    assert seen["epoch"] == 0 < seen["random"], f"重复的目标：{seen}"


def test_epoch_order_crosses_into_the_next_pass():
    """一遍读完接着读下一遍，batch 总是满的，次序重新打乱。"""
    data = torch.arange(10 * SEQ_LEN + 1)
    source = batches(data, replace(BASE, order="epoch", batch_size=4), seed=0)
    drawn = [next(source) for _ in range(6)]
    assert {tuple(x.shape) for x, _ in drawn} == {(4, SEQ_LEN)}
    assert all(torch.equal(x + 1, y) for x, y in drawn), "y 应比 x 晚一位"


def test_record_starts_from_identity_layers():
    """纪录的初始化：每一层开始时什么也不加，单独的输出头给出均匀分布（loss = ln 8192）。"""
    model = build(RECORD, seed=0)
    x = torch.randint(8192, (2, 16), generator=torch.Generator().manual_seed(0))
    hidden = model.embed(x)
    for block in model.blocks:
        assert torch.equal(block(hidden, model.rope[:, :16]), hidden), "这一层改变了残差流"
    if not RECORD.tied:
        loss = model(x, x)[1].item()
        assert loss == pytest.approx(math.log(8192), abs=1e-4), f"初始 loss 是 {loss:.4f}"


def test_muon_gets_matrices_and_adam_the_rest():
    """Muon 只拿各层的矩阵；词嵌入、输出头、增益给 Adam；没有一个参数漏掉或重复。"""
    recipe = LADDER["untied"]
    model = build(recipe, seed=0)
    muon, adam = make_optimizer(model, recipe).optimizers
    matrices = {id(p) for group in muon.param_groups for p in group["params"]}
    others = [id(p) for group in adam.param_groups for p in group["params"]]
    assert matrices == {id(p) for p in model.blocks.parameters() if p.dim() == 2}
    assert len(others) == len(set(others)) and not matrices & set(others), "有参数出现了两次"
    assert matrices | set(others) == {id(p) for p in model.parameters()}, "有参数没有优化器"


def test_the_record_gives_every_role_its_own_rate():
    """纪录里每个参数恰在一组：词嵌入、增益、输出头、矩阵各有自己的学习率，都不衰减。"""
    model = build(RECORD, seed=0)
    groups = make_optimizer(model, RECORD).param_groups
    owned = [id(p) for group in groups for p in group["params"]]
    assert sorted(owned) == sorted(id(p) for p in model.parameters()), "有参数漏掉或重复"
    rates = {group["lr"]: {p.dim() for p in group["params"]} for group in groups}
    wanted = {RECORD.embed_lr: {2}, RECORD.gain_lr: {1}, RECORD.head_lr: {2}, RECORD.matrix_lr: {2}}
    assert rates == wanted, f"各组的学习率与维数：{rates}"
    assert all(group["weight_decay"] == 0 for group in groups)


def test_rate_factor_stays_in_range():
    """每个配方的学习率系数全程在 (0, 1] 之内，第一步就不是零。"""
    for recipe in RECIPES.values():
        factors = [rate_factor(step, recipe) for step in range(recipe.steps)]
        low, high = min(factors), max(factors)
        assert 0 < low and high <= 1, f"{recipe.name}：系数在 [{low:.4f}, {high:.4f}]"


def test_ablations_read_as_many_tokens_as_the_record():
    """每次少一件事的对照与纪录读同样多的 token：loss 的差别不是多读少读造成的。"""
    sizes = {r.name: r.steps * r.batch_size // 16 for r in (RECORD, *ABLATIONS.values())}
    assert len(set(sizes.values())) == 1, f"序列数：{sizes}"


def test_unknown_recipe_names_the_known_ones():
    """写错配方的名字：退出码 2，一句话列出有哪些，没有 traceback。"""
    with pytest.raises(UserError, match="record"):
        Options(recipes=("fastest",))


# ---- 成绩 ----


def test_the_ruling_is_an_exact_count(committed):
    """裁定的 p 值能数出来：两组 loss 的全部排法里，名次至少这么偏的占几分之几。"""
    base = committed.query("recipe == 'base'")["val_loss"].to_numpy()
    ours = committed.query("recipe == @RECORD.name")["val_loss"].to_numpy()
    both, n = np.concatenate([ours, base]), len(ours)
    ranks = both.argsort().argsort()
    sums = [ranks[list(chosen)].sum() for chosen in combinations(range(len(both)), n)]
    p = np.mean([total <= ranks[:n].sum() for total in sums])
    made = ruling(committed, RECORD.name, official=False)
    assert made.p == pytest.approx(p) and made.seeds == n, f"{made}，数出来 {p}"
    assert made.mean == pytest.approx(ours.mean()) and made.mean <= TARGET, made


def fake_rows(seeds, ours: float, plain: float = 7.13) -> pd.DataFrame:
    """两个配方、几个种子的假成绩，loss 随种子略有起伏。"""
    rows = [{"recipe": name, "seed": seed, "val_loss": loss + 1e-3 * i}
            for i, seed in enumerate(seeds)
            for name, loss in (("base", plain), (RECORD.name, ours))]  # fmt: skip
    return pd.DataFrame(rows)


def test_tuned_seeds_do_not_count():
    """调配方用过的种子不算成绩：五个里有三个看过，就不是正式成绩，p 也只用剩下的算。"""
    fresh, tuned = fake_rows(range(10, 15), 7.0), fake_rows(range(5), 7.0)
    assert ruling(fresh, RECORD.name).record, ruling(fresh, RECORD.name)
    made = ruling(tuned, RECORD.name)
    assert made.seeds == 2 and not made.valid and not made.record, made
    assert "不是正式成绩" in str(made)


def test_the_target_is_a_constant():
    """目标不随起跑线的成绩变：起跑线跑差了，没有到 TARGET 的也不算纪录。"""
    made = ruling(fake_rows(range(10, 15), TARGET + 0.05, plain=8.0), RECORD.name)
    assert made.p < 0.01 and not made.record, made


def test_committed_speed_has_an_interval(committed):
    """提交的成绩：纪录是起跑线的 18 倍左右速度；区间按种子成对，与脚本打印的一样。"""
    ratio = speed_ratio(committed, RECORD.name)
    row = summarize(committed).set_index("recipe").loc[RECORD.name]
    assert (row["speedup"], row["speedup_low"], row["speedup_high"]) == pytest.approx(
        (ratio.value, ratio.low, ratio.high))
    by_hand = committed.pivot(index="seed", columns="recipe", values="seconds")
    logs = np.log(by_hand["base"] / by_hand[RECORD.name])
    assert ratio.value == pytest.approx(math.exp(logs.mean())), ratio
    assert ratio.low > 6 and math.exp(logs.min()) <= ratio.low < ratio.high <= math.exp(logs.max())


def test_committed_result_is_of_this_record(committed):
    """提交的成绩就是脚本现在的纪录跑出来的：步数、token 数、参数量都对得上。"""
    row = committed.query("recipe == @RECORD.name").iloc[0]
    given = (row["steps"], row["tokens"], row["params"])
    tokens = RECORD.steps * RECORD.batch_size * SEQ_LEN
    expected = (RECORD.steps, tokens, build(RECORD, 0).num_params())
    assert given == expected, f"CSV 里是 {given}，脚本现在是 {expected}"


def test_arithmetic_does_not_change_what_is_learned(committed):
    """起跑线与 `fast` 是同一份配方：各种子的 loss 有高有低，平均相差不到种子之间的标准差。

    同一个种子也会分岔：高学习率下，舍入的差别被一步步放大，与换一个种子相仿。
    """
    loss = committed.pivot(index="seed", columns="recipe", values="val_loss")[["base", "fast"]]
    gap, spread = (loss["fast"] - loss["base"]).mean(), loss["base"].std()
    assert len(loss) >= 5 and abs(gap) < spread, f"平均差 {gap:+.4f}，标准差 {spread:.4f}\n{loss}"


def test_split_muon_moves_the_real_weights():
    """q、k、v 分开正交化：更新落在模型自己的权重上，每一段各自正交；梯度用完就清。"""
    recipe = replace(RECORD, optimizer="muon", split_qkv=True, matrix_lr=0.01, zero_init=False)
    model = build(recipe, seed=0)
    optimizer = make_optimizer(model, recipe)
    whole = model.blocks[0].attn.qkv.weight
    before, d = whole.detach().clone(), whole.size(1)
    x = torch.randint(8192, (8, 128), generator=torch.Generator().manual_seed(0))
    model(x, x)[1].backward()
    optimizer.step()
    for rows in whole.detach().sub(before).split(d):
        values = torch.linalg.svdvals(rows) / recipe.matrix_lr
        assert 0.5 < values.median() <= values.max() < 1.4, values
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters()), "有梯度没有清"


def test_an_interrupted_race_goes_on(monkeypatch, tmp_path):
    """`--resume`：已经在 CSV 里的（配方的每一项、种子都相同）不再跑；配方改了就重跑。"""
    monkeypatch.setenv("BOOK_RESULTS", str(tmp_path))
    ran = []

    def fake(runs, *, bind):
        for recipe, seed in runs:
            ran.append((recipe.name, seed))
            yield {"recipe": recipe.name, "seed": seed, "steps": 1, "tokens": 1, "params": 1,
                   "val_loss": 7.0, "seconds": 1.0, "ms_per_step": 1.0, "warm_up_s": 0.0,
                   "config": as_recipe(recipe)}  # fmt: skip

    monkeypatch.setattr(speedrun, "race", fake)
    for seeds in ((10,), (10, 11)):
        speedrun.main(Options(recipes=("base", "record"), seeds=seeds, resume=True))
    assert ran == [("base", 10), (RECORD.name, 10), ("base", 11), (RECORD.name, 11)], ran
    assert len(pd.read_csv(tmp_path / "speedrun.csv")) == 4
    changed = replace(RECORD, steps=RECORD.steps + 1)
    assert not speedrun.already_there("speedrun", [(changed, 10)])


@pytest.mark.slow
def test_record_learns_more_per_token_in_a_short_run():
    """不比速度、只比学得快：读同样多的 token，纪录配方的验证 loss 低于朴素配方。"""
    steps = 40  # 朴素配方的 40 步
    same = steps * BASE.batch_size // RECORD.batch_size  # 同样多的 token
    plain = train(replace(BASE, steps=steps, warmup=5), seed=0)
    ours = train(replace(RECORD, steps=same, fast=False), seed=0)
    assert plain["tokens"] == ours["tokens"], f"{plain['tokens']} 与 {ours['tokens']}"
    shown = f"纪录 {ours['val_loss']:.3f}，朴素 {plain['val_loss']:.3f}"
    assert ours["val_loss"] < plain["val_loss"] - 0.05, shown


@pytest.mark.slow
def test_script_runs_the_record_as_a_reader_would(run_script, tmp_path):
    """`--recipes record` 跑的就是纪录配方：写出一行，列齐全，每一步都计了时。"""
    done = run_script("experiments/speedrun.py", "--recipes", "record", timeout=280,
                      env={"BOOK_RESULTS": str(tmp_path)})  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    row = pd.read_csv(tmp_path / "speedrun.csv").iloc[0]
    assert row["recipe"] == RECORD.name and row["steps"] == RECORD.steps, row.to_dict()
    assert np.isfinite(row["val_loss"]) and row["val_loss"] < TARGET, row["val_loss"]
