"""speed 一章的结论：跳过的说明理由、算力算得对、快慢只有一条规矩、句子由测量决定。"""

import os
import subprocess
import sys
import time

import pandas as pd
import pytest
import torch

from experiments import speed
from experiments.lab import devices, hardware, workers
from experiments.lab import results as measure
from experiments.lab.roofline import SQUARE, category, operations
from experiments.lab.workers import BIND, own_process
from experiments.speed import (
    LADDER,
    Options,
    Peaks,
    Timing,
    accumulated_variants,
    as_rows,
    conclusions,
    in_words,
    rated_against,
    rungs_below,
    spent_ms,
    with_square_at,
)
from experiments.training import step
from experiments.training.variant import Setting, Variant, build_model, settle, sliced_batch
from model import GPT, GPTConfig
from tokens import sample_batch
from tokens.errors import UserError

SMALL = {"batch_size": 2, "seq_len": 16, "warmup": 1, "steps": 4, "threads": 1}
PEAKS = Peaks(fp32=100e9, bf16=200e9, bandwidth=10e9)


def table_of(**timings: Timing) -> pd.DataFrame:
    """几个假的变体（名字以 bf16 开头的算 bf16）写成的表，第一个是起点，别的都与它比。"""
    variants = {n: Variant(step.StepOptions(bf16=n.startswith("bf16"))) for n in timings}
    below = dict.fromkeys(list(timings)[1:], next(iter(timings)))
    rows = rated_against(as_rows(variants, timings, below, Options(**SMALL)), PEAKS)
    return rows.assign(keep=True)


def timing(*ms: float, first: float = 0.0, loss: float = 9.0) -> Timing:
    """每轮一步的假用时，毫秒。"""
    return Timing(first, [[x / 1e3] for x in ms], loss, None)


@pytest.fixture
def everything_works(monkeypatch):
    """假装这台机器什么都有。"""
    for module, name in ((hardware, "bf16_support"), (hardware, "compile_support"),
                         (step, "allocator_support"), (step, "bf16_support"),
                         (step, "compile_support")):  # fmt: skip
        monkeypatch.setattr(module, name, lambda *_: (True, "有"))


def test_every_rung_does_what_it_names(everything_works):
    """梯子的每一级都比它所比的那一级改了一处，而且只有一处；旁边试的都从最高一级出发。"""
    variants, skipped = accumulated_variants(LADDER, threads=2)
    assert not skipped and len(variants) == len(LADDER)
    below = rungs_below(LADDER, list(variants))
    top = [rung.name for rung in LADDER if rung.keep][-1]
    for rung in LADDER[1:]:
        ours, theirs = ({**vars(v), **vars(v.step)} for v in
                        (variants[rung.name], variants[below[rung.name]]))  # fmt: skip
        changed = [key for key in ours if key != "step" and ours[key] != theirs[key]]
        named = [*rung.step, *rung.variant]
        assert changed == named and len(named) == 1, f"{rung.name} 改了 {changed}"
        assert rung.keep or below[rung.name] == top, f"{rung.name} 比的是 {below[rung.name]}"


def test_the_committed_ladder_follows_the_rule():
    """随书提交的梯子：区间与结论能从提交的每一步用时重新算出来，每一级的 loss 都在容差之内。"""
    folder = measure.ROOT / "book" / "measured"
    table = pd.read_csv(folder / "speed_ladder.csv")
    steps = pd.read_csv(folder / "speed_ladder_steps.csv")
    means = steps.pivot_table(index="round", columns="variant", values="ms", aggfunc="mean")
    for row in table.iloc[1:].itertuples():
        again = speed.paired_ratio(means[row.compared_with], means[row.variant])
        assert (row.ratio, row.ratio_low, row.ratio_high) == pytest.approx(
            (again.value, again.low, again.high), rel=1e-6), f"{row.variant}：重新算出 {again}"
        assert row.verdict == again.verdict, f"{row.variant}：{row.verdict}，应是 {again.verdict}"
    assert speed.loss_is_kept(table).all(), table[["variant", "loss", "loss_change"]]


def test_best_options_are_the_top_of_the_ladder(everything_works):
    """别的实验默认用的那一组开关，就是梯子的最高一级。"""
    variants, _ = accumulated_variants([rung for rung in LADDER if rung.keep], threads=2)
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
    variants, skipped = accumulated_variants(LADDER, threads=2)
    missing = [rung.name for rung in LADDER if rung.needs == need]
    assert skipped == dict.fromkeys(missing, "这台机器没有")
    assert "只算一遍 exp" in variants
    switch = "keep_memory" if need == "allocator" else need
    assert not any(getattr(v.step, switch) for v in variants.values())


def test_one_core_skips_the_thread_rung(everything_works):
    """单核机器上，绑核与「只用 1 个线程」两级跳过。"""
    _, skipped = accumulated_variants(LADDER, threads=1)
    assert list(skipped) == ["+ 线程绑核", "+ 只用 1 个线程"], skipped


def test_achieved_flops_and_mfu():
    """MFU = token 数 × (6N + 12·L·T·d) ÷ 平均的一步 ÷ 实测峰值；bf16 的变体与 bf16 的峰值比。"""
    model = build_model(Options(**SMALL).setting())
    flops = 2 * 16 * (6 * model.num_params() + 12 * 4 * 16 * 128)
    table = table_of(fp32=timing(500, 300), bf16=timing(500, 300)).set_index("variant")
    for name, peak in (("fp32", 100e9), ("bf16", 200e9)):
        expected = flops / 0.4 / peak
        got = table.loc[name, "mfu"]
        assert got == pytest.approx(expected), f"{name}：{got} 应为 {expected}"


def test_no_mfu_above_one():
    """算出的 MFU 超过 100 % 时宁可不报：那是峰值量低了，不是程序快过了硬件。"""
    table = table_of(fp32=timing(100, 100))
    low = Peaks(fp32=1e6, bf16=None, bandwidth=1e9)
    assert rated_against(table, low)["mfu"].isna().all()
    assert low.larger(PEAKS) == Peaks(fp32=100e9, bf16=None, bandwidth=10e9)


def test_one_peak_and_what_exceeds_it_is_seen():
    """方阵只有一个速度；别的乘法比它快就是比它快，不把峰值抬上去遮住。"""
    seen = pd.DataFrame({
        "operation": [SQUARE, "QKV", SQUARE], "dtype": ["float32", "float32", "bfloat16"],
        "intensity": [341.0, 46.0, 683.0], "gflops": [90.0, 120.0, 210.0],
        "gb_per_s": [1.0, 2.0, 3.0],
    })  # fmt: skip
    peaks = PEAKS.seen_in(seen)
    assert peaks == Peaks(fp32=100e9, bf16=210e9, bandwidth=10e9), peaks
    table = with_square_at(seen, peaks)
    assert table["gflops"].tolist() == [100.0, 120.0, 210.0], table
    assert speed.above_the_square(table)["operation"].tolist() == ["QKV"]


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
    """bf16 更快、更慢还是分不出，由同一条规矩说了算：区间含 1 就不下结论。"""
    for ms, word in (
        ((99, 101, 100, 100), "是“fp32”的 2.00（1.98–2.02）倍速度，更快"),
        ((398, 402, 400, 400), "是“fp32”的 0.50（0.50–0.50）倍速度，更慢"),
        ((100, 400, 100, 400), "，分不出快慢"),
    ):
        table = table_of(fp32=timing(200, 200, 200, 200), bf16=timing(*ms))
        said = in_words(table.iloc[1], "只开 bf16 ")
        assert said.startswith("只开 bf16 是“fp32”的") and word in said, said
        assert any(word in sentence for sentence in conclusions(table))


def test_a_slow_spell_does_not_decide():
    """机器慢了一阵，同一轮里的两者一起慢：比值照旧；各算各的中位数却会说反。"""
    slow_then_fast, fast_half = (400, 400, 100, 100, 100), (200, 200, 50, 50, 50)
    table = table_of(fp32=timing(*slow_then_fast), bf16=timing(*fast_half))
    row = table.iloc[1]
    assert (row["ratio"], row["ratio_low"], row["ratio_high"]) == pytest.approx((2, 2, 2))


def test_shares_add_up_to_the_step():
    """剖析只给占比：乘以没有剖析时平均的一步，各类加起来就是那一步，与剖析花了多久无关。"""
    table = table_of(fp32=timing(90, 110))
    shares = pd.DataFrame({"variant": "fp32", "kind": ["矩阵乘法", "注意力", "矩阵乘法"],
                           "share": [0.5, 0.2, 0.3], "profiled_ms": 161.5})  # fmt: skip
    spent = spent_ms(shares, table)["fp32"]
    assert spent["矩阵乘法"] == pytest.approx(80) and spent.sum() == pytest.approx(100), spent
    assert "一步 162 ms，平时 100 ms" in speed.profiling_cost(shares, table)


def test_a_changed_loss_is_said():
    """哪个变体的 loss 变了（超出容差），结论里点它的名。"""
    table = table_of(fp32=timing(200, 200), bf16=timing(100, 100, loss=9.01),
                     坏=timing(50, 50, loss=9.5))  # fmt: skip
    assert any("坏 超出了容差" in s for s in conclusions(table)), conclusions(table)


def test_compile_time_is_apart_and_paid_back():
    """编译的时间不进每步的时间，另列；每步省 0.1 s、编译多花 10 s，就要 100 步才赚回来。"""
    table = table_of(fp32=timing(200, 200, first=0.2), compile=timing(100, 100, first=10.1),
                     慢=timing(300, 300, first=9))  # fmt: skip
    assert table["pays_after"].iloc[1] == pytest.approx(100)
    assert table["mean_ms"].iloc[1] == pytest.approx(100), "第一步混进了平均"
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
    assert table.loc[SQUARE, "intensity"] == pytest.approx(2048 / 6)
    assert table.loc["相加", "intensity"] == pytest.approx(1 / 12)


@pytest.mark.parametrize(
    "wrong", [{"steps": 0}, {"d_model": 100}, {"threads": 0}, {"peak_seconds": -1.0}]
)
def test_bad_options_are_refused(wrong):
    """没有意义的选项用一句话拒绝。"""
    with pytest.raises(UserError, match="--"):
        Options(**wrong)


# ---- 一个变体一个进程 ----


@pytest.mark.slow
def test_a_failing_worker_is_not_silent():
    """工作进程里出错，主进程拿到它的错误和那边的 traceback，而不是一直等下去；进程还能接着用。"""
    variant = Variant(step.StepOptions(attention="没有这种"))
    with own_process(threads=1, preload=speed.PRELOAD) as pool:
        with pytest.raises(ValueError, match="只能是 auto、sdpa 或 explicit") as caught:
            pool.submit(settle, variant, Setting(batch_size=1, seq_len=8), 1).result()
        assert "in training_step" in str(caught.value.__cause__), caught.value.__cause__
        assert pool.submit(torch.get_num_threads).result() == 1


@pytest.mark.slow
def test_the_environment_is_set_before_the_process_starts():
    """绑核的变量在进程启动之前就在它的环境里，主进程与别的工作进程都没有。"""
    with own_process(threads=2, env=BIND) as bound, own_process(threads=1) as free:
        seen = [pool.submit(os.getenv, "OMP_PROC_BIND").result() for pool in (bound, free)]
        threads = [pool.submit(torch.get_num_threads).result() for pool in (bound, free)]
    assert seen == ["close", None] and "OMP_PROC_BIND" not in os.environ, seen
    assert threads == [2, 1], f"线程数 {threads}"


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="只有 Linux 查得到绑核")
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="只有一个核，谈不上挤")
def test_a_bound_parent_squeezes_its_children():
    """绑核的变量写在整条命令前面，子进程就只剩一个核；在子进程启动时才给，它看得见全部的核。"""
    parent = "import subprocess, sys, torch; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    alone = "import os; print(len(os.sched_getaffinity(0)))"
    env = os.environ | BIND | {"OMP_NUM_THREADS": "2"}
    seen = subprocess.run([sys.executable, "-c", parent, alone], env=env, capture_output=True,
                          text=True, check=True).stdout  # fmt: skip
    assert int(seen) == 1, f"绑了核的主进程，子进程看得见 {seen} 个核"
    with own_process(threads=2, env=BIND) as pool:
        places = pool.submit(os.sched_getaffinity, os.getpid()).result()
    assert len(places) > 1, f"主进程自己被绑住了：{places}"


def start_and_die(folder: str) -> None:
    """开一个工作进程，记下它的编号，然后像被 SIGKILL 一样不收尾地死掉。"""
    with own_process(threads=1) as pool:
        with open(os.path.join(folder, "pid"), "w") as file:
            file.write(str(pool.submit(os.getpid).result()))
        os._exit(9)


@pytest.mark.slow
def test_a_worker_does_not_outlive_its_parent(tmp_path):
    """主进程突然死了，工作进程跟着结束，不留下孤儿。"""
    context = workers.multiprocessing.get_context("spawn")
    parent = context.Process(target=start_and_die, args=(str(tmp_path),))
    parent.start()
    parent.join()
    pid, deadline = int((tmp_path / "pid").read_text()), time.monotonic() + 20
    while _running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _running(pid), f"主进程死后 20 秒，{pid} 还在"


def _running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


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
