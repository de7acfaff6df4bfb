"""speed 一章的结论：每级只改一处、跳过的说明理由、算力算得对、句子由测量决定。"""

from dataclasses import asdict

import pandas as pd
import pytest
import torch

from experiments import speed
from experiments.lab import devices, hardware
from experiments.lab import results as measure
from experiments.lab.roofline import category, operations
from experiments.speed import LADDER, Options, Peaks, climb, compare, conclusions, summarize
from experiments.training import step
from experiments.training.variant import Setting, Variant, Worker, build_model, sliced_batch
from model import GPT, GPTConfig
from tokens import sample_batch
from tokens.errors import UserError

SMALL = {"batch_size": 2, "seq_len": 16, "warmup": 1, "steps": 2, "threads": 1}
PEAKS = Peaks(fp32=100e9, bf16=200e9, bandwidth=10e9)


def row(name: str, ms: float, bf16: bool = False, loss: float = 9.0, first: float = 0.0) -> dict:
    """一行假的测量。"""
    known = {"variant": name, "ms": ms, "bf16": bf16, "loss": loss}
    return known | {"first_step_s": first, "mfu": 0.5, "keep": True}


@pytest.fixture
def everything_works(monkeypatch):
    """假装这台机器什么都有。"""
    for module, name in ((hardware, "bf16_support"), (hardware, "compile_support"),
                         (step, "allocator_support"), (step, "bf16_support"),
                         (step, "compile_support")):  # fmt: skip
        monkeypatch.setattr(module, name, lambda *_: (True, "有"))


def test_each_rung_changes_one_thing(everything_works):
    """梯子的每一级只比它下面的一级改一处，试过不留的几项都从最高一级出发。"""
    variants, skipped = climb(LADDER, threads=2)
    assert not skipped and len(variants) == len(LADDER)
    below = variants[LADDER[0].name]
    for rung in LADDER[1:]:
        flat = [asdict(v) | asdict(v.step) for v in (below, variants[rung.name])]
        changed = [key for key in flat[0] if key != "step" and flat[0][key] != flat[1][key]]
        assert len(changed) == 1, f"{rung.name} 改了 {changed}"
        below = variants[rung.name] if rung.keep else below


def test_the_committed_ladder_is_this_ladder():
    """随书提交的梯子与脚本的一致：同样的级、同样的次序，每一级的 loss 都在容差之内。"""
    table = pd.read_csv(measure.ROOT / "book" / "measured" / "speed_ladder.csv")
    assert list(table["variant"]) == [rung.name for rung in LADDER]
    assert list(table["keep"]) == [rung.keep for rung in LADDER]
    assert speed.loss_is_kept(table).all(), table[["variant", "loss_change"]]


def test_best_options_are_the_top_of_the_ladder(everything_works):
    """别的实验默认用的那一组开关，就是梯子的最高一级。"""
    variants, _ = climb([rung for rung in LADDER if rung.keep], threads=2)
    top = list(variants.values())[-1].step
    assert step.best_options()[0] == top


@pytest.mark.parametrize(
    ("support", "need"),
    [("bf16_support", "bf16"), ("compile_support", "compile"), ("allocator_support", "allocator")],
)
def test_a_rung_the_machine_cannot_climb_is_skipped_with_the_reason(
    monkeypatch, everything_works, support, need
):
    """没有 bf16 指令、编译器或 glibc 时，那一级跳过并给出理由，上面的级照样爬，也不带着它。"""
    module = step if need == "allocator" else hardware
    monkeypatch.setattr(module, support, lambda *_: (False, "这台机器没有"))
    variants, skipped = climb(LADDER, threads=2)
    missing = [rung.name for rung in LADDER if rung.needs == need]
    assert skipped == dict.fromkeys(missing, "这台机器没有")
    assert "只算一遍 exp" in variants
    switch = "keep_memory" if need == "allocator" else need
    assert not any(getattr(v.step, switch) for v in variants.values())


def test_one_core_skips_the_thread_rung(everything_works):
    """单核机器上，绑核与「只用 1 个线程」两级跳过。"""
    _, skipped = climb(LADDER, threads=1)
    assert list(skipped) == ["+ 线程绑核", "+ 只用 1 个线程"], skipped


def test_achieved_flops_and_mfu():
    """MFU = token 数 × (6N + 12·L·T·d) ÷ 时间 ÷ 实测峰值；bf16 的变体与 bf16 的峰值比。"""
    options = Options(**SMALL)
    model = build_model(options.setting())
    flops = 2 * 16 * (6 * model.num_params() + 12 * 4 * 16 * 128)
    report = {"loss": 9.0, "peak_memory": None}
    for bf16, peak in ((False, 100e9), (True, 200e9)):
        variant = Variant(step.StepOptions(bf16=bf16))
        got = summarize("x", variant, [0.5, 0.1, 0.2], 1.0, report, options, PEAKS)
        expected = flops / 0.2 / peak
        assert got["mfu"] == pytest.approx(expected), f"{got['mfu']} 应为 {expected}"


def test_no_mfu_above_one():
    """算出的 MFU 超过 100 % 时宁可不报：那是峰值量低了，不是程序快过了硬件。"""
    options = Options(**SMALL)
    low = Peaks(fp32=1e6, bf16=None, bandwidth=1e9)
    report = {"loss": 9.0, "peak_memory": None}
    got = summarize("x", Variant(), [0.1], 1.0, report, options, low)
    assert got["mfu"] != got["mfu"], got["mfu"]
    assert low.larger(PEAKS) == Peaks(fp32=100e9, bf16=None, bandwidth=10e9)


def test_no_operation_is_above_the_roof():
    """roofline 的屋顶不低于任何一个运算实测到的速度；量峰值时机器正忙，屋顶就抬上去。"""
    seen = pd.DataFrame({"dtype": ["float32", "bfloat16"], "gflops": [90.0, 2000.0]})
    assert PEAKS.at_least(seen) == Peaks(fp32=100e9, bf16=2000e9, bandwidth=10e9)
    only = Peaks(fp32=50e9, bf16=None, bandwidth=10e9)
    assert only.at_least(seen.head(1)) == Peaks(fp32=90e9, bf16=None, bandwidth=10e9)


def test_attention_is_seven_percent_at_default_length():
    """T = 128 时注意力那一项约占每 token FLOPs 的 7 %，T = 1024 时超过三分之一。"""
    model = GPT(GPTConfig())
    shares = [1 - 6 * model.num_params() / model.flops_per_token(t) for t in (128, 1024)]
    assert 0.06 < shares[0] < 0.08 and shares[1] > 1 / 3, shares


def test_the_worked_mfu_of_gpt2():
    """练习里的算例：A100 上 GPT-2 124M 每秒 136,000 个 token，MFU 37.2 %；漏掉注意力是 32.3 %。"""
    params, attention = 6 * 123_551_232, 12 * 12 * 1024 * 768
    peak = devices.DEVICES["a100"].peak_bf16
    shares = [136_000 * flops / peak for flops in (params + attention, params)]
    assert [f"{share:.1%}" for share in shares] == ["37.2%", "32.3%"], shares


def test_sentences_follow_the_measurement():
    """bf16 更快还是更慢，由测量说了算：同一句话在两种机器上说法相反。"""
    for ms, word in ((619.0, "反而慢 2.76 倍"), (112.0, "快 2.00 倍")):
        rows = [row("fp32", 224), row("bf16", ms, True), row("最快", 100)]
        said = conclusions(compare(pd.DataFrame(rows)))
        assert f"只开 bf16：比 fp32 {word}" in said, said


def test_a_changed_loss_is_said():
    """哪个变体的 loss 变了（超出容差），结论里点它的名。"""
    table = compare(pd.DataFrame([row("fp32", 200), row("bf16", 100, True, loss=9.01),
                                  row("坏", 50, loss=9.5)]))  # fmt: skip
    assert any("坏 超出了容差" in s for s in conclusions(table)), conclusions(table)


def test_compile_time_is_apart_and_paid_back():
    """编译的时间不进中位数，另列；每步省 0.1 s、编译多花 10 s，就要 100 步才赚回来。"""
    table = compare(pd.DataFrame([row("fp32", 200, first=0.2), row("compile", 100, first=10.1),
                                  row("慢", 300, first=9)]))  # fmt: skip
    assert table["pays_after"].iloc[1] == pytest.approx(100)
    assert pd.isna(table["pays_after"].iloc[2]), "更慢的变体永远赚不回来"


def test_sliced_batch_draws_the_same_windows():
    """两种取 batch 的写法抽到同样的窗口，差别只在时间。"""
    data = torch.arange(1000).to(torch.uint16)
    seeds = (torch.Generator().manual_seed(3) for _ in range(2))
    for ours, theirs in zip(sliced_batch(data, 4, 7, next(seeds)),
                            sample_batch(data, 4, 7, next(seeds)), strict=True):  # fmt: skip
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("aten::mm", "矩阵乘法"),
        ("aten::_fused_adamw_", "裁剪与更新"),
        ("graph_0_cpp_fused__log_softmax_nll_loss_forward_3", "交叉熵"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "注意力"),
        ("graph_0_cpp_fused__softmax_add_mul_1", "注意力"),
        ("aten::silu", "其他逐元素"),
        ("aten::sqrt", "裁剪与更新"),
        ("aten::rsqrt", "其他逐元素"),
        ("graph_0_cpp_fused__to_copy_add_mean_mul_pow_rsqrt_8", "其他逐元素"),
        ("Torch-Compiled Region: 0/0", "框架开销"),
    ],
)
def test_every_kernel_has_a_kind(kernel, kind):
    """剖析里的名字归到该归的类。"""
    assert category(kernel) == kind, category(kernel)


def test_roofline_intensity():
    """算术强度按每个输入、输出各搬一遍算：2048³ 的 fp32 方阵是 2·2048³ / (3·2048²·4) ≈ 341。"""
    table = operations(16, 128, 8192, bf16=False).set_index("operation")
    assert table.loc["2048³ 方阵", "intensity"] == pytest.approx(2048 / 6)
    assert table.loc["残差相加", "intensity"] == pytest.approx(1 / 12)


@pytest.mark.parametrize(
    "wrong", [{"steps": 0}, {"d_model": 100}, {"threads": 0}, {"peak_seconds": -1.0}]
)
def test_bad_options_are_refused(wrong):
    """没有意义的选项用一句话拒绝。"""
    with pytest.raises(UserError, match="--"):
        Options(**wrong)


@pytest.mark.slow
def test_a_failing_worker_is_not_silent():
    """工作进程里出错，主进程拿到它的错误，而不是一直等下去。"""
    variant = Variant(step.StepOptions(attention="没有这种"))
    worker = Worker("坏的", variant, Setting(batch_size=1, seq_len=8, threads=1))
    try:
        with pytest.raises(RuntimeError, match="只能是 auto、sdpa 或 explicit"):
            worker.ask("prepare", 1)
    finally:
        worker.close()


@pytest.mark.slow
def test_all_eager_rungs_keep_the_loss(monkeypatch, capsys, tmp_path):
    """没有编译器的机器也爬完梯子、退出正常，跳过的级写明理由，每一级的 loss 都在容差之内。"""
    monkeypatch.setattr(hardware, "compile_support", lambda: (False, "找不到 C++ 编译器"))
    monkeypatch.setattr(speed, "measure_peaks", lambda options: PEAKS)
    monkeypatch.setenv("BOOK_RESULTS", str(tmp_path))
    speed.main(Options(ladder=True, **SMALL))
    printed = capsys.readouterr().out
    table = pd.read_csv(tmp_path / "speed_ladder.csv")
    assert "跳过 compile：找不到 C++ 编译器" in printed, printed
    assert speed.loss_is_kept(table).all(), table[["variant", "loss", "loss_change"]]
    assert {"cpu", "torch", "isa", "threads"} <= set(table.columns), "结果要写明机器与版本"


@pytest.mark.slow
def test_runs_as_a_reader_would_start_it(run_script):
    """`python experiments/speed.py` 自成一个进程也能跑完，打印每个变体一行和实测的峰值。"""
    flags = [f"--{k.replace('_', '-')}={v}" for k, v in SMALL.items()]
    done = run_script("experiments/speed.py", *flags, "--peak-seconds=0.05", timeout=280)
    assert done.returncode == 0, done.stderr
    for word in ("实测峰值", "ms/步", "fp32", "最快"):
        assert word in done.stdout, done.stdout


@pytest.mark.slow
def test_a_bad_flag_is_one_sentence(run_script):
    """写错的选项：退出码 2，一句话，没有 traceback。"""
    done = run_script("experiments/speed.py", "--d-model", "100")
    assert done.returncode == 2 and "32 的倍数" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
