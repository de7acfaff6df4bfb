"""`scaling` 一章的断言：越大越好、差距随大小变大、最优分配的公开数值，以及什么时候不该拟合。"""

import math
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from experiments.lab.results import ROOT
from experiments.scaling import (
    SEED_SD,
    Options,
    by_size,
    conclusions,
    control_data,
    ladder,
    neighbours,
    parse_size,
    predict,
    summarize,
)
from experiments.training.law import PUBLISHED, Law, bootstrap, fit_law, slope
from experiments.training.recipe import seeded_gpt
from experiments.training.small_run import SmallRun, moments, run_key, sweep, train
from tokens import held_out_batches
from tokens.errors import UserError

SIZES = {"64x2": 618_816, "96x3": 1_118_880, "128x4": 1_803_392, "192x4": 3_344_064}


def curve_of(run: SmallRun, tokens: dict) -> pd.DataFrame:
    checks = {"val": held_out_batches(tokens["val"], 2, run.seq_len, seed=1)}
    return train(run, tokens, checks)


# ---- 真正训练一小段 ----


@pytest.fixture(scope="module")
def short_runs(tokens) -> dict[str, pd.DataFrame]:
    """两头的两种大小，各 20 步（朴素的一步，batch 4，T 64）：机制在，只是短。"""
    short = SmallRun(steps=20, batch_size=4, seq_len=64, warmup=5, plain=True)
    sizes = {"64x2": (64, 2), "128x4": (128, 4)}
    return {name: curve_of(replace(short, d_model=d, n_layer=n), tokens)
            for name, (d, n) in sizes.items()}  # fmt: skip


@pytest.mark.slow
def test_every_model_reads_the_same_data(short_runs):
    """几个模型从同一个 loss（约 ln 8192）出发，走同样的学习率；曲线一步一行，都是有限数。"""
    first = {name: curve["train_loss"].iloc[0] for name, curve in short_runs.items()}
    assert max(abs(loss - math.log(8192)) for loss in first.values()) < 0.15, f"{first}"
    small, large = short_runs.values()
    assert len(small) == 20 and np.isfinite(small["train_loss"]).all()
    assert small["lr"].equals(large["lr"]) and small["lr"].max() == pytest.approx(3e-3)


@pytest.mark.slow
def test_table_has_one_row_per_size(run_script):
    """打印的表一行一种大小，每行以 d_model 开头，参数量与手算的一致；朴素的一步也能跑。"""
    done = run_script(
        "experiments/scaling.py", "--plain", "--steps", 4, "--batch-size", 2, "--seq-len", 16,
        "--eval-batches", 1, "--name", "test_scaling_rows",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.split() for line in done.stdout.splitlines()]
    rows = {row[0]: row for row in rows if row and row[0].isdecimal()}
    assert list(rows) == ["64", "96", "128", "192"], done.stdout
    printed = [int(row[2].replace(",", "")) for row in rows.values()]
    assert printed == list(SIZES.values()), f"{printed}"


# ---- 组成它的函数 ----


@pytest.mark.parametrize(("size", "expected"), SIZES.items())
def test_sizes_are_the_published_four(size, expected):
    """四种大小的参数量一个不差；注意力头都是 32 维。"""
    d_model, n_layer = parse_size(size)
    model = seeded_gpt(SmallRun(d_model=d_model, n_layer=n_layer).config(8192), 0)
    assert model.num_params() == expected, f"{size}：{model.num_params():,}"
    assert model.config.d_model // model.config.n_head == 32


BAD_SIZES = ["128", "128*4", "x4", "100x4", "0x2", "128x0", "128x4x2", "-64x2"]


@pytest.mark.parametrize("size", BAD_SIZES)
def test_bad_sizes_are_refused(size):
    """大小写错了，得到一句说明：给了什么，该怎么写。"""
    with pytest.raises(UserError, match=re.escape(f"--sizes {size}：")):
        parse_size(size)


@pytest.mark.parametrize(
    "wrong", [{"lr": -1.0}, {"lr": math.nan}, {"warmup": -1}, {"weight_decay": -1.0}]
)
def test_meaningless_hyperparameters_are_refused(wrong):
    """负的或不是数的学习率、预热、权重衰减：训练之前一句话拒绝，说出选项与给的值。"""
    name, value = next(iter(wrong.items()))
    with pytest.raises(UserError, match=f"--{name.replace('_', '-')} {value}"):
        Options(**wrong)


def test_too_few_steps_are_refused(run_script):
    """步数不够四个检查点时，脚本只说一句话，退出码 2，没有 traceback。"""
    done = run_script("experiments/scaling.py", "--steps", 3)
    assert done.returncode == 2 and done.stderr.startswith("错误：--steps 3 太少"), done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""


def test_validation_batches_are_fixed(tiny_tokens):
    """验证 batch 由种子决定：8 个，每个 32 个序列，两次抽样逐个相同，换一个种子就不同。"""
    data = torch.load(tiny_tokens, weights_only=True)["val"]
    first, second, other = (held_out_batches(data, 8, 16, seed) for seed in (1, 1, 2))
    assert len(first) == 8 and first[0][0].shape == (32, 16)
    assert all(torch.equal(a, b) for a, b in zip(first[0], second[0], strict=True))
    assert not torch.equal(first[0][0], other[0][0])


TINY = SmallRun(d_model=32, n_layer=1, steps=8, batch_size=4, seq_len=16, warmup=2, plain=True)


def tiny_curve(data: dict, run: SmallRun = TINY, batches: int = 1) -> pd.DataFrame:
    return train(run, data, {"val": held_out_batches(data["val"], batches, 16, seed=1)})


def test_training_is_repeatable(tiny_tokens):
    """同一个种子训练两次，每一步的 loss 逐比特相同（fp32、eager）；验证不影响训练。"""
    data = torch.load(tiny_tokens, weights_only=True)
    runs = [tiny_curve(data), tiny_curve(data), tiny_curve(data, batches=2)]
    losses = [run["train_loss"].tolist() for run in runs]
    assert losses[0] == losses[1] == losses[2], f"{losses}"
    validated = runs[0]["val_loss"].notna().tolist()
    assert validated == [False, True] * 4, f"应在 1/4、2/4、3/4、4/4 处验证：{validated}"


def test_summary_is_arithmetic():
    """一行结果由曲线算出：训练 loss 取最后 50 步的平均，差距是最后的验证 loss 减去它。"""
    curve = pd.DataFrame({"step": range(1, 101), "train_loss": np.linspace(9, 4.05, 100)})
    curve["seconds"] = [3.0] + [0.1] * 99
    curve["val_loss"] = curve["step"].map({25: 8.0, 50: 7.5, 75: 7.0, 100: 6.5})
    row = summarize(SmallRun(d_model=64, n_layer=2), 618_816, curve)
    assert row["train_mean"] == pytest.approx(np.linspace(9, 4.05, 100)[50:].mean())
    assert row["train_last"] == pytest.approx(4.05)
    assert row["gap"] == pytest.approx(6.5 - row["train_mean"])
    assert (row["val_25"], row["val_100"], row["first_step_s"]) == (8.0, 6.5, 3.0)
    assert row["ms_per_step"] == pytest.approx(100)


def test_conclusions_claim_no_order_within_the_seed_noise():
    """一个种子的差不到种子起伏的两倍，就说「分不清」，不说谁更好；变差了也照实说。"""
    table = pd.DataFrame({"params": [1e6, 2e6, 4e6, 8e6], "gap": [0.2, 0.3, 0.4, 0.5],
                          "val_400": [7.0, 6.8, 6.8 - SEED_SD, 7.2]})  # fmt: skip
    said = conclusions(table)[1]
    assert "1.00 M → 2.00 M 验证 loss 低" in said, said
    assert "2.00 M → 4.00 M 验证 loss 分不清" in said, said
    assert "4.00 M → 8.00 M 验证 loss 高" in said, said


# ---- 许多次：接着做、几个种子、对照 ----


def test_a_sweep_goes_on_where_it_stopped(tiny_tokens, tmp_path):
    """中断的一遍再运行：做完的不重做，结果与一口气做完的逐位相同；换一个字段就是另一次训练。"""
    data, done = torch.load(tiny_tokens, weights_only=True), []

    def train_one(run: SmallRun) -> pd.DataFrame:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(run)
        return moments(run, tiny_curve(data, run), params=1)

    runs = [replace(TINY, seed=seed) for seed in range(3)]
    with pytest.raises(KeyboardInterrupt):
        sweep(runs, tmp_path / "a.csv", train_one, say=lambda text: None)
    assert [run.seed for run in done] == [0, 1]
    done.clear()
    resumed = sweep(runs, tmp_path / "a.csv", train_one, say=lambda text: None)
    assert [run.seed for run in done] == [2], "做完的两次又做了一遍"
    done.clear()
    whole = pd.concat([sweep(runs[i : i + 1], tmp_path / "b.csv", train_one, say=lambda text: None)
                       for i in (0, 1)])  # fmt: skip
    assert resumed["val_loss"].tolist()[: len(whole)] == whole["val_loss"].tolist()
    assert run_key(replace(TINY, lr=1e-3)) not in set(resumed["run"])
    assert {"commit", "clean", "cpu", "date"} <= set(resumed.columns)


def planted_seeds(sd: float, gains: tuple[float, ...]) -> pd.DataFrame:
    """造一张几个种子的表：每级好 `gains`，同一个种子的各大小一起上下（所以逐对的差很稳）。"""
    rng, rows = np.random.default_rng(0), []
    for seed in range(5):
        shared, loss = rng.normal(0, sd), 7.0
        for params, gain in zip((1e6, 2e6, 4e6), (0.0, *gains), strict=True):
            loss -= gain
            rows.append({"seed": seed, "params": params, "step": 4, "steps": 4,
                         "val_loss": loss + shared + rng.normal(0, sd / 20)})  # fmt: skip
    return pd.DataFrame(rows)


def test_paired_seeds_tell_apart_what_means_cannot():
    """同一个种子读同样的 batch：平均值的区间互相盖住时，逐对的差仍能分清 0.03 与 0。"""
    table = planted_seeds(0.08, (0.03, 0.0))
    means = by_size(table)
    assert means["half"].min() > 0.03, f"{means}"  # 各自的区间分不清
    rows = neighbours(table)
    assert rows["told_apart"].tolist() == [True, False], f"{rows}"
    assert rows["gain"].iloc[0] == pytest.approx(0.03, abs=0.01)


@pytest.fixture(scope="module")
def committed() -> dict[str, pd.DataFrame]:
    """随书提交的几个种子、短版的几个种子，与留出十回的对照。"""
    return {name: pd.read_csv(ROOT / "book" / "measured" / f"scaling_{name}.csv")
            for name in ("seeds", "quick", "control")}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options"), [("seeds", Options()), ("quick", Options(quick=True))]
)
def test_seed_noise_is_the_measured_one(committed, name, options):
    """页面与脚本用的标准差是提交的几个种子合起来的，相差不到两成；那些训练就是脚本会做的。"""
    sizes = by_size(committed[name])
    pooled = math.sqrt((sizes["std"] ** 2).mean())
    assert (sizes["count"] >= 5).all(), f"{sizes}"
    assert options.seed_sd == pytest.approx(pooled, rel=0.2), f"量到的是 {pooled:.4f}"
    assert {run_key(run) for run in options.runs()} <= set(committed[name]["run"])


def test_quick_does_not_compile():
    """短版只是步数少、不编译；数据、大小、学习率都不变。"""
    quick, full = Options(quick=True), Options()
    assert not quick.step_options().compile and quick.runs()[0].steps == 100
    assert quick.step_options() == replace(full.step_options(), compile=False)
    same = {"steps": 400, "warmup": 50}
    assert [replace(run, **same) for run in quick.runs()] == full.runs()


def test_the_ladder_is_the_mean_of_its_seeds(committed):
    """页面的表：一行一种大小，四个时刻都是各种子的平均；差距 = 最后的验证 − 最后 50 步的训练。"""
    table, seeds = ladder(committed["seeds"]), committed["seeds"]
    assert table["params"].tolist() == list(SIZES.values())
    assert table["val_400"].tolist() == pytest.approx(by_size(seeds)["mean"].tolist())
    small = seeds[(seeds["d_model"] == 64) & (seeds["step"] == 400)]
    gap = (small["val_loss"] - small["train_mean"]).mean()
    assert table["gap"].iloc[0] == pytest.approx(gap)


def test_bigger_is_better_by_more_than_the_noise(committed):
    """最大的比最小的低：四个时刻逐种子之差的区间都不含 0，最后一个的下端还大过两倍种子起伏。"""
    table = committed["seeds"]
    ends = table[table["params"].isin([table["params"].min(), table["params"].max()])]
    low = {step: neighbours(moment.assign(steps=step))["low"].iloc[0]
           for step, moment in ends.groupby("step")}  # fmt: skip
    assert len(low) == 4 and min(low.values()) > 0, f"{low}"
    assert low[max(low)] > 2 * SEED_SD, f"{low}"


def test_prediction_recovers_a_line_and_widens_with_distance():
    """loss 对 log N 是直线时外推准确；离得越远，区间越宽；点太少就拒绝。"""
    N = [1e6, 2e6, 4e6]
    L = [9 - 0.2 * math.log(n) for n in N]
    near, far = predict(N, L, 5e6, sd=0.05), predict(N, L, 1e9, sd=0.05)
    assert near[0] == pytest.approx(9 - 0.2 * math.log(5e6))
    assert far[1] > 2 * near[1] > 0.2, f"{near} 与 {far}"
    with pytest.raises(ValueError, match="至少要 3 种"):
        predict(N[:2], L[:2], 5e6)


def test_prediction_interval_covers_as_often_as_it_says():
    """种子的起伏是正态时，95 % 的区间在 1,000 次重复里盖住结果 93–97 % 次。"""
    rng, N = np.random.default_rng(1), np.array([6e5, 1.1e6, 1.8e6, 3.3e6])
    hits = 0
    for _ in range(1000):
        L = 9 - 0.2 * np.log(N) + rng.normal(0, 0.05, 4)
        guess, half = predict(N[:3], L[:3], N[3], sd=0.05)
        hits += abs(L[3] - guess) < half
    assert 930 <= hits <= 970, f"1,000 次里盖住 {hits} 次"


@pytest.mark.slow
def test_control_chapters_are_between_the_training_ones():
    """对照的十回取自前 108 回之间，训练的其余一字不少；验证的后 12 回不变。"""
    data = control_data()
    total = len(data["train"]) + len(data["inside"])
    assert 0.07 < len(data["inside"]) / total < 0.11, f"{len(data['inside'])} / {total}"
    assert abs(total - 357_000) < 2_000, f"{total}"


# ---- 幂律 ----


@pytest.mark.parametrize(
    ("name", "params", "tokens", "ratio"),
    [
        ("Hoffmann（印刷值）", 326e6, 11.29e9, 92.6),
        ("Hoffmann（未舍入）", 389e6, 9.48e9, 59.1),
        ("Besiroglu 2024", 394e6, 9.36e9, 18.4),
    ],
)
def test_published_optima(name, params, tokens, ratio):
    """三组公开常数在 2.21e19 FLOPs 的最优 N、D，与 5.76e23 的 token/参数之比，和公布的数一致。"""
    law = PUBLISHED[name]
    N, D = law.optimum(2.21e19)
    assert (N, D) == pytest.approx((params, tokens), rel=3e-3), f"N {N:.4g}，D {D:.4g}"
    N, D = law.optimum(5.76e23)
    assert D / N == pytest.approx(ratio, rel=3e-3), f"token/参数 {D / N:.1f}"


@pytest.mark.parametrize("name", PUBLISHED)
def test_optimum_is_the_minimum(name):
    """最优分配处的 loss，比同样算力下参数多两成或少两成都低。"""
    law = PUBLISHED[name]
    N, D = law.optimum(1e21)
    assert 6 * N * D == pytest.approx(1e21)
    best, *others = (law.loss(N * k, D / k) for k in (1, 0.8, 1.2))
    assert best < min(others), f"{best} 与 {others}"


@pytest.mark.parametrize("name", PUBLISHED)
def test_optimum_is_flat(name):
    """算力约 2.7e20 时最优处很平：N 取最优的两倍或一半，loss 高出的都在 0.5 % 与 1 % 之间。"""
    law = PUBLISHED[name]
    N, D = law.optimum(2.73e20)
    best = law.loss(N, D)
    excess = [law.loss(N * k, D / k) / best - 1 for k in (0.5, 2)]
    assert 0.005 < min(excess) and max(excess) < 0.01, f"高出 {excess}"


def test_chinchilla_table():
    """Chinchilla 表 3（方法一）的每一行都近似满足 C = 6ND 与每参数约 20 个 token。"""
    rows = [(400e6, 1.92e19, 8.0e9), (1e9, 1.21e20, 20.2e9), (10e9, 1.23e22, 205.1e9),
            (67e9, 5.76e23, 1.5e12), (175e9, 3.85e24, 3.7e12), (280e9, 9.90e24, 5.9e12),
            (520e9, 3.43e25, 11.0e12), (1e12, 1.27e26, 21.2e12)]  # fmt: skip
    for N, C, D in rows:
        assert 6 * N * D == pytest.approx(C, rel=0.06), f"{N:.3g}：6ND = {6 * N * D:.3g}，表中 {C}"
        assert 19.5 < D / N < 23, f"{N:.3g}：每参数 {D / N:.1f} 个 token"


@pytest.fixture(scope="module")
def planted() -> tuple[Law, np.ndarray, np.ndarray]:
    """一组埋好的常数，和 5 × 5 个 (N, D)。"""
    N, D = np.meshgrid(np.geomspace(5e7, 1e10, 5), np.geomspace(1e9, 5e11, 5))
    return PUBLISHED["Besiroglu 2024"], N.ravel(), D.ravel()


def test_fit_recovers_planted_constants(planted):
    """由无噪声的数据拟合，五个常数都找回来，相对误差小于 1e-4：没有停在半路。"""
    law, N, D = planted
    found = fit_law(N, D, law.loss(N, D))
    worst = max(abs(getattr(found, name) / getattr(law, name) - 1) for name in vars(law))
    assert worst < 1e-4, f"最大相对误差 {worst:.2e}：{found}"


@pytest.mark.slow
def test_bootstrap_interval_covers_the_truth(planted):
    """有 0.2 % 噪声、还有一个坏点时，α、β 的 95 % 自助法区间含有真值，且宽度不为零。"""
    law, N, D = planted
    noise = np.random.default_rng(0).normal(0, 2e-3, N.shape)
    noise[7] = 0.1  # 一次训坏了的实验
    intervals = bootstrap(N, D, law.loss(N, D) * np.exp(noise), repeats=40)
    for name in ("alpha", "beta"):
        low, high = intervals[name]
        truth = getattr(law, name)
        assert low < truth < high, f"{name} = {truth} 不在 [{low:.4f}, {high:.4f}] 里"
        assert 1e-3 < high - low < 0.2, f"{name} 的区间宽 {high - low:.4f}"


def test_same_data_for_all_sizes_is_not_fitted():
    """所有模型读同样多的数据时，α 与 β 分不开：拒绝拟合并说明原因，而不是印出数字。"""
    N, D = list(SIZES.values()), [400 * 16 * 128] * 4
    with pytest.raises(ValueError, match="D 只有 1 个不同的取值，α 与 β 分不开"):
        fit_law(N, D, [6.9, 6.8, 6.7, 6.6])
    with pytest.raises(ValueError, match="N 只有 2 个不同的取值"):
        fit_law([1e6, 2e6] * 3, [1e6, 1e6, 2e6, 2e6, 3e6, 3e6], [5.0] * 6)


def test_floor_and_exponent_trade_off():
    """只看四种大小时，下限 E 取 0 或取 5.5，α 相差几倍，残差却都不到 0.02 nat：定不出指数。"""
    N = np.array(list(SIZES.values()), dtype=float)
    L = 6.2 + 60 * N**-0.35  # 埋下的真值：下限 6.2，α 0.35
    low, high = slope(N, L, 0.0), slope(N, L, 5.5)
    assert high[0] > 3 * low[0], f"α 从 {low[0]:.3f} 到 {high[0]:.3f}"
    assert max(low[2], high[2]) < 0.02, f"残差 {low[2]:.4f} 与 {high[2]:.4f} nat"
    with pytest.raises(ValueError, match="不能不低于"):
        slope(N, L, 7.0)
