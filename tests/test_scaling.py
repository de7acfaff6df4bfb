"""`scaling` 一章的断言：越大越好、差距随大小变大、最优分配的公开数值，以及什么时候不该拟合。"""

import math
import re

import numpy as np
import pandas as pd
import pytest
import torch

from experiments.lab.results import results_folder
from experiments.scaling import (
    Options,
    build,
    conclusions,
    fixed_batches,
    larger_is_better,
    parse_size,
    summarize,
    train,
)
from experiments.training.law import PUBLISHED, Law, bootstrap, fit_law, slope
from experiments.training.step import StepOptions
from tokens.errors import UserError

NOISE = 0.03  # nat；同一个配方换一种舍入，验证 loss 多半相差这么多以内
SIZES = {"64x2": 618_816, "96x3": 1_118_880, "128x4": 1_803_392, "192x4": 3_344_064}


@pytest.fixture(scope="session")
def real_run(run_script) -> pd.DataFrame:
    """像读者那样跑一遍脚本，原样的配方，只省去最大的一种（它占一半时间）；整个会话只跑一次。"""
    sizes = list(SIZES)[:3]
    done = run_script(
        "experiments/scaling.py", "--sizes", *sizes, "--eval-batches", 4, "--name", "test_scaling",
        timeout=880, env={"OMP_NUM_THREADS": "2"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    table = pd.read_csv(results_folder() / "test_scaling.csv")
    table.attrs["stdout"] = done.stdout
    table.attrs["curve"] = pd.read_csv(results_folder() / "test_scaling_curve.csv")
    return table


# ---- 真正训练一遍 ----


@pytest.mark.slow
@pytest.mark.timeout(900)  # 没有编译器、没有 bf16 的机器要好几分钟
def test_larger_is_better_at_every_checkpoint(real_run):
    """同样的数据与 400 步，参数更多的模型在每个检查点上验证 loss 都更低。

    相邻两级允许 NOISE 的起伏（换一台机器，舍入就不同，相当于换了种子）；首尾之差必须超过它。
    """
    names = [n for n in real_run.columns if n.startswith("val_")]
    assert names == ["val_100", "val_200", "val_300", "val_400"], f"检查点是 {names}"
    ordered = real_run.sort_values("params")[names]
    assert (ordered.diff().iloc[1:] < NOISE).all(axis=None), f"\n{ordered}"
    assert (ordered.iloc[-1] < ordered.iloc[0] - NOISE).all(), f"\n{ordered}"
    said = "每个检查点上都是越大越好" in real_run.attrs["stdout"]
    assert said == all(larger_is_better(real_run).values()), real_run.attrs["stdout"]


@pytest.mark.slow
def test_gap_grows_with_size(real_run):
    """验证 loss 减训练 loss 的差距随参数量逐级变大：大模型记住得更多。"""
    gaps = real_run.sort_values("params")[["params", "gap"]]
    shown = f"差距（nat）：\n{gaps.to_string(index=False)}"
    assert (gaps["gap"].diff().iloc[1:] > -NOISE).all(), shown
    assert gaps["gap"].iloc[-1] > gaps["gap"].iloc[0] + NOISE, shown


@pytest.mark.slow
def test_every_model_reads_the_same_data(real_run):
    """几个模型从同一个 loss（约 ln 8192）出发，走同样的学习率；曲线一步一行，都是有限数。"""
    curve = real_run.attrs["curve"]
    assert len(curve) == 3 * 400 and np.isfinite(curve["train_loss"]).all()
    first = curve.groupby("size")["train_loss"].first()
    assert first.sub(math.log(8192)).abs().max() < 0.15, f"第一步的 loss：{first.to_dict()}"
    assert (curve.groupby("step")["lr"].nunique() == 1).all()
    assert curve["lr"].max() == pytest.approx(3e-3)


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
    model = build(size, 8192, 128, seed=0)
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
    first, second, other = (fixed_batches(data, 8, 16, seed) for seed in (1, 1, 2))
    assert len(first) == 8 and first[0][0].shape == (32, 16)
    assert all(torch.equal(a, b) for a, b in zip(first[0], second[0], strict=True))
    assert not torch.equal(first[0][0], other[0][0])


def test_training_is_repeatable(tiny_tokens):
    """同一个种子训练两次，每一步的 loss 逐比特相同（fp32、eager）；验证不影响训练。"""
    data = torch.load(tiny_tokens, weights_only=True)
    options = Options(steps=8, batch_size=4, seq_len=16, warmup=2)
    held_out = fixed_batches(data["val"], 1, 16, seed=1)
    runs = [
        train(build("32x1", 256, 16, 0), data["train"], batches, options, StepOptions())
        for batches in (held_out, held_out, held_out * 2)
    ]
    losses = [run["train_loss"].tolist() for run in runs]
    assert losses[0] == losses[1] == losses[2], f"{losses}"
    validated = runs[0]["val_loss"].notna().tolist()
    assert validated == [False, True] * 4, f"应在 1/4、2/4、3/4、4/4 处验证：{validated}"


def test_summary_is_arithmetic():
    """一行结果由曲线算出：训练 loss 取最后 50 步的平均，差距是最后的验证 loss 减去它。"""
    curve = pd.DataFrame({"step": range(1, 101), "train_loss": np.linspace(9, 4.05, 100)})
    curve["seconds"] = [3.0] + [0.1] * 99
    curve["val_loss"] = curve["step"].map({25: 8.0, 50: 7.5, 75: 7.0, 100: 6.5})
    row = summarize("64x2", 618_816, curve, seconds=12.9)
    assert row["train_mean"] == pytest.approx(np.linspace(9, 4.05, 100)[50:].mean())
    assert row["train_last"] == pytest.approx(4.05)
    assert row["gap"] == pytest.approx(6.5 - row["train_mean"])
    assert (row["val_25"], row["val_100"], row["first_step_s"]) == (8.0, 6.5, 3.0)
    assert row["ms_per_step"] == pytest.approx(100)


def test_conclusions_follow_the_numbers():
    """打印的结论由数字生成：有一个检查点不成立，就说出是哪一个，而不是照旧说「越大越好」。"""
    table = pd.DataFrame(
        {"params": [1e6, 2e6], "val_50": [7.0, 6.9], "val_100": [6.0, 6.1], "gap": [0.2, 0.5]}
    )
    assert larger_is_better(table) == {"val_50": True, "val_100": False}
    assert conclusions(table)[0] == "第 100 步上并不是越大越好"
    table["val_100"] = [6.0, 5.8]
    assert conclusions(table)[0] == "每个检查点上都是越大越好"


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
