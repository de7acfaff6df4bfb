"""train_gpu 的断言：选项、batch、一步、日志、续训、被打断、坏输入。"""

import dataclasses
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from tiny_training import (
    TINY,
    difference,
    free_port,
    start,
    state,
    tensors,
    tiny,
    trace,
    train,
    train_ranks,
)  # fmt: skip

from experiments import train_gpu
from experiments.lab import hardware
from experiments.loop import batches as batches_module
from experiments.loop import checkpoint
from experiments.loop import run as run_module
from experiments.loop.batches import generator_for, masked_windows, step_batches
from experiments.loop.command_line import parse
from experiments.loop.log import Meter, RunLog
from experiments.loop.options import STRUCTURE, Options, accumulation, check
from experiments.loop.start import Start
from experiments.ranks.world import LOOPBACK, Interruption, World, pick_device, use_loopback
from experiments.training.recipe import learning_rate
from model import GPT, IGNORE_INDEX, GPTConfig
from tokens.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
PRESETS = ROOT / "experiments" / "presets"
SCRIPT = ROOT / "experiments" / "train_gpu.py"


@pytest.fixture(autouse=True)
def clean_process():
    """训练会改全局的开关与随机数；每个测试之后恢复。"""
    kept = torch.get_rng_state(), random.getstate()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_rng_state(kept[0])
    random.setstate(kept[1])


def parsed(*argv: str) -> Options:
    return parse(Options, list(argv), presets=PRESETS, description="")[0]


# ---------------------------------------------------------------- 选项


@pytest.mark.parametrize(
    ("preset", "count"),
    [("tiny_cpu", 618_816), ("gpt_29m", 29_106_688), ("gpt_124m", 123_587_328),
     ("gpt_1b", 1_307_936_768)],
)  # fmt: skip
def test_presets_have_the_stated_parameter_counts(preset, count):
    """四个预设的参数个数一个不差，而且 1、2、4、8 个进程都除得尽（tiny_cpu 到 2 个）。"""
    options = parsed("--preset", preset)
    with torch.device("meta"):
        model = GPT(GPTConfig(**{name: getattr(options, name) for name in STRUCTURE}))
    assert model.num_params() == count
    sizes = (1, 2) if preset == "tiny_cpu" else (1, 2, 4, 8)
    for size in sizes:
        check(options, size)
    assert all(accumulation(options, size) >= 1 for size in sizes)


def test_default_preset_is_the_defaults():
    """gpt_29m.toml 就是 dataclass 的默认值；八张卡时每卡累积 4 次，一步 524,288 个 token。"""
    assert parsed() == parsed("--preset", "gpt_29m") == Options()
    assert (Options().global_batch_tokens, accumulation(Options(), 8)) == (524_288, 4)


def test_command_line_over_config_over_preset(tmp_path):
    """优先级：命令行 > --config > --preset > 默认值；整数可以当小数，值里可以有等号。"""
    config = tmp_path / "mine.toml"
    config.write_text("lr = 1\nsteps = 7\nweight_decay = 0\n")
    options = parsed(
        "--preset", "tiny_cpu", "--config", str(config), "--steps=9", "--grad-clip", "2",
        "--out-dir=a=b", "--no-compile", "--beta1=0",
    )  # fmt: skip
    assert (options.d_model, options.lr, options.steps) == (64, 1.0, 9)
    assert isinstance(options.lr, float) and isinstance(options.weight_decay, float)
    assert (options.grad_clip, options.out_dir, options.compile) == (2.0, "a=b", False)
    assert (options.beta1, options.beta2) == (0.0, 0.95)


def test_presets_hold_only_known_keys_of_the_right_type():
    """每个预设的每个键都认识、类型都对（parse 会检查），键都是 dataclass 的字段。"""
    names = {field.name for field in dataclasses.fields(Options)}
    assert parsed("--preset", "tiny_cpu").device == "cpu"
    for path in PRESETS.glob("*.toml"):
        assert set(tomllib.loads(path.read_text())) <= names, path
        parsed("--preset", path.stem)


@pytest.mark.parametrize(
    ("argv", "needed"),
    [
        (["--learning-rat", "1"], "--min-lr-ratio|--lr"),
        (["--step", "3"], "--steps"),
        (["--seqlen=3"], "--seq-len"),
        (["--lr", "abc"], "--lr = abc"),
        (["--lr"], "--lr 后面缺一个值"),
        (["--steps", "1.5"], "整数"),
        (["--dtype", "bf16"], "bfloat16"),
        (["--preset", "huge"], "gpt_124m"),
        (["--config", "/nowhere.toml"], "/nowhere.toml"),
        (["train"], "train"),
        (["--lr", "-1"], "--lr -1"),
        (["--lr", "nan"], "--lr nan"),
        (["--lr", "inf"], "--lr inf"),
        (["--lr", "0"], "--lr"),
        (["--steps", "0"], "--steps 0"),
        (["--decay-steps", "0"], "--decay-steps 0"),
        (["--warmup-steps", "-1"], "--warmup-steps -1"),
        (["--beta2", "1"], "--beta2"),
        (["--seed", str(2**64)], "--seed 18446744073709551616"),
        (["--d-model", "65"], "d_model"),
        (["--micro-batch", "48"], "整除"),
        (["--global-batch-tokens", "1000"], "micro-batch"),
        (["--optimizer", "muon", "--dtype", "float16", "--data", "synthetic"], "muon"),
        (["--device", "tpu"], "tpu"),
        (["--init-from", "/nowhere"], "/nowhere"),
        (["--data", "/nowhere/tokens.pt"], "/nowhere/tokens.pt"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(argv, needed, tmp_path, capsys):
    """坏输入：一句话（给了什么、接受什么），退出码 2，没有 traceback，什么也没有写。"""
    import re

    out = ["--out-dir", str(tmp_path / "run"), "--device", "cpu"]
    if "--device" in argv:
        out = out[:2]
    assert train_gpu.command_line([*out, *argv]) == 2
    message = capsys.readouterr().err.strip()
    assert message.startswith("错误：") and "\n" not in message and "Traceback" not in message
    assert re.search(needed, message), message
    assert not list(tmp_path.rglob("*.pt"))


def test_bad_config_file_names_the_nearest_key(tmp_path, capsys):
    """配置文件里写错的键、写错的类型、坏的 TOML：各是一句话，指出文件与键。"""
    for text, needed in (
        ("leaning_rate = 1", "没有 leaning_rate"),
        ("step = 3", "steps"),
        ("lr = 'big'", "lr = big"),
        ("compile = 1", "true 或 false"),
        ("steps = 2.0", "整数"),
        ("lr = ", "TOML"),
    ):
        path = tmp_path / "c.toml"
        path.write_text(text)
        assert train_gpu.command_line(["--config", str(path)]) == 2
        message = capsys.readouterr().err
        assert needed in message and "c.toml" in message and message.count("\n") == 1, message


def test_help_lists_every_option_with_an_explanation(capsys):
    """--help 里每个选项都有中文说明。"""
    with pytest.raises(SystemExit) as left:
        train_gpu.command_line(["--help"])
    text = capsys.readouterr().out
    assert left.value.code == 0
    for field in dataclasses.fields(Options):
        assert f"--{field.name.replace('_', '-')}" in text, field.name
    assert "（步）" in text and "（FLOP/s）" in text and "（分钟）" in text


# ---------------------------------------------------------------- 数据：batch 是步数的纯函数


def global_batch(tokens, step: int, options: Options, size: int) -> torch.Tensor:
    """把各进程、各 micro-batch 的序列按全局次序放回去，(序列数, T)。"""
    ranks = [step_batches(tokens, step, options, rank, size) for rank in range(size)]
    return torch.cat([x for group in zip(*ranks, strict=True) for x, _ in group])


def test_same_global_batch_for_any_ranks_and_accumulation(tmp_path):
    """1、2、4 个进程，micro-batch 2、4、8：第 s 步的全局 batch 都是同样的序列、同样的次序。"""
    tokens = torch.randint(256, (5000,), generator=generator_for(0, "test"))
    for step in (0, 7):
        wanted = global_batch(tokens, step, tiny(tmp_path), 1)
        assert wanted.shape == (16, 32)
        for size in (1, 2, 4):
            for micro in (1, 2, 4):
                got = global_batch(tokens, step, tiny(tmp_path, micro_batch=micro), size)
                assert torch.equal(got, wanted), (step, size, micro)


def test_ranks_steps_and_seeds_read_different_data(tmp_path):
    """两个进程没有一个相同的序列；步数或种子一变，batch 就变（不会每个 epoch 重放同一个次序）。"""
    tokens = torch.arange(60_000)
    options = tiny(tmp_path)
    ranks = [step_batches(tokens, 3, options, rank, 2) for rank in (0, 1)]
    mine, other = (torch.cat([x for x, _ in batches]) for batches in ranks)
    assert not set(mine[:, 0].tolist()) & set(other[:, 0].tolist())
    base = global_batch(tokens, 3, options, 1)
    assert not torch.equal(base, global_batch(tokens, 4, options, 1))
    assert not torch.equal(base, global_batch(tokens, 3, tiny(tmp_path, seed=1), 1))


def test_windows_shift_by_one_and_mask(tmp_path):
    """y 比 x 晚一位；等于 ignore_token 的目标换成 −100，输入不动。"""
    tokens = torch.arange(100).to(torch.uint16)
    x, y = masked_windows(tokens, torch.tensor([3, 10]), tiny(tmp_path, ignore_token=12))
    assert torch.equal(x[0], torch.arange(3, 35)) and x.dtype == torch.int64
    assert y[0, 0] == 4 and y[0, 8] == IGNORE_INDEX and x[0, 9] == 12
    assert (y == IGNORE_INDEX).sum() == 2


# ---------------------------------------------------------------- 一步：加权、日志、裁剪


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """不间断的 40 步，别的运行都与它比较。"""
    folder = tmp_path_factory.mktemp("straight")
    assert train(folder) == 0
    return folder


@pytest.mark.slow
def test_same_trace_for_any_accumulation(straight, tmp_path):
    """累积 1、4、16 次：步数、学习率都一样（数的是更新，不是 micro-batch），loss 差 < 1e-5。"""
    for micro in (16, 1):
        assert train(tmp_path / str(micro), micro_batch=micro) == 0
        ours, theirs = trace(tmp_path / str(micro)), trace(straight)
        assert ours["lr"].equals(theirs["lr"]) and ours["step"].equals(theirs["step"])
        worst = (ours["loss"] - theirs["loss"]).abs().max()
        assert worst < 1e-5, f"micro {micro}：loss 最大相差 {worst:.1e}"


def test_logged_loss_is_the_token_weighted_mean_of_the_whole_step(tmp_path):
    """日志里第一步的 loss = 初始模型在整个全局 batch 上每个有效 token 的平均，而不是最后一份的。"""
    options = tiny(tmp_path, ignore_token=7, steps=1, decay_steps=1)
    assert train_gpu.main(options) == 0
    torch.manual_seed(options.seed)
    model = GPT(GPTConfig(**{name: getattr(options, name) for name in STRUCTURE}))
    tokens = torch.randint(256, (10**6,), generator=generator_for(0, "synthetic"))
    parts = step_batches(tokens, 0, options, 0, 1)
    x, y = (torch.cat(some) for some in zip(*parts, strict=True))
    wanted = model(x, y)[1].item()
    last = model(*parts[-1])[1].item()
    got = trace(tmp_path)["loss"][0]
    assert (y == IGNORE_INDEX).any() and abs(got - wanted) < 1e-6
    assert abs(last - wanted) > 1e-4, "最后一份的 loss 碰巧相同，这个测试就没有意义"


def test_fused_loss_keeps_no_logits_for_the_backward(tmp_path, monkeypatch):
    """--fused-loss 真的省内存：留给反向的张量没有一个有 logits 那么大；不用时有。"""
    biggest = {}
    original = train_gpu.train_step

    def train_step(run, *args):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: sizes.append(t.numel()) or t, lambda t: t
        ):
            result = original(run, *args)
        biggest[run.options.fused_loss] = max(sizes)
        return result

    monkeypatch.setattr(train_gpu, "train_step", train_step)
    for fused in (True, False):
        changes = {"vocab_size": 4096, "micro_batch": 8, "eval_iters": 1, "fused_loss": fused}
        assert train(tmp_path / str(fused), steps=1, **changes) == 0
    logits = 8 * 32 * 4096
    assert biggest[True] < logits <= biggest[False], biggest
    ours, theirs = (trace(tmp_path / str(fused)) for fused in (True, False))
    assert abs(ours["loss"][0] - theirs["loss"][0]) < 1e-5
    assert abs(ours["grad_norm"][0] - theirs["grad_norm"][0]) < 1e-4


def uneven(rank: int) -> None:
    """手脚：0 号进程的每个 micro-batch 只留一个有效目标，1 号进程的全留。"""
    original = batches_module.step_batches

    def patched(tokens, step, options, rank, size):
        batches = original(tokens, step, options, rank, size)
        sparse = range(len(batches)) if size == 2 and rank == 0 else range(0, len(batches), 2)
        if size == 2 and rank == 1:
            sparse = range(0)
        for k in sparse:
            batches[k][1].flatten()[1:] = IGNORE_INDEX
        return batches

    batches_module.step_batches = patched


@pytest.mark.slow
def test_unequal_ranks_are_weighted_by_tokens(tmp_path):
    """有效 token 数悬殊的两个进程（2 与 256 个），三步之后与单进程相同：loss 差 < 1e-6。"""
    changes = {"steps": 3, "decay_steps": 3, "optimizer": "adamw"}
    assert train_ranks(1, tmp_path / "one", uneven, **changes) == [0]
    assert train_ranks(2, tmp_path / "two", uneven, **changes) == [0, 0]
    worst = difference(state(tmp_path / "one"), state(tmp_path / "two"))
    gap = (trace(tmp_path / "one")["loss"] - trace(tmp_path / "two")["loss"]).abs().max()
    assert worst < 1e-5 and gap < 1e-6, f"最大相差 {worst:.1e}，loss 相差 {gap:.1e}"


@pytest.mark.slow
def test_schedule_follows_the_recipe_in_every_corner(tmp_path):
    """日志的学习率就是 recipe 的曲线：不预热、预热比训练长、衰减比训练短；从不为 0 或负。"""
    for number, (warmup, decay) in enumerate([(0, 6), (20, 6), (6, 6), (2, 3)]):
        folder = tmp_path / str(number)
        assert train(folder, steps=6, warmup_steps=warmup, decay_steps=decay) == 0
        wanted = [learning_rate(s, peak=3e-3, warmup=warmup, total=decay) for s in range(6)]
        got = trace(folder)["lr"].tolist()
        assert got == pytest.approx(wanted, rel=1e-8) and min(got) > 0, (warmup, decay, got)


@pytest.mark.slow
def test_clip_comes_after_unscale(tmp_path, straight):
    """fp16 的梯度先还原再裁剪：日志的梯度范数与 fp32 的相差 < 2 %（没有还原会大 65,536 倍）。"""
    assert train(tmp_path, dtype="float16", steps=8) == 0
    ratio = trace(tmp_path)["grad_norm"] / trace(straight)["grad_norm"][:8]
    assert (ratio - 1).abs().max() < 0.02, ratio.tolist()
    assert state(tmp_path)["scaler"]["scale"] == 65536.0


def overflow(rank: int) -> None:
    """手脚：第 3 步时 1 号进程的 loss 大到 fp16 的梯度溢出；最后每个进程记下自己的权重。"""
    original, finish = GPT.forward, train_gpu.finish
    calls = [0]

    def forward(self, *args, **kwargs):
        logits, loss = original(self, *args, **kwargs)
        if self.training:
            calls[0] += 1
            if rank == 1 and calls[0] == 6:
                self.embed.weight.register_hook(lambda grad: grad * float("inf"))
        return logits, loss

    def record(run, stop):
        report = {"scale": run.scaler.get_scale(), "weights": run.raw.state_dict()}
        torch.save(report, Path(run.options.out_dir) / f"rank{run.world.rank}.pt")
        return finish(run, stop)

    GPT.forward, train_gpu.finish = forward, record


@pytest.mark.slow
def test_all_ranks_skip_an_overflow_together(tmp_path):
    """fp16：一个进程的梯度溢出，两个进程一起跳过这一步、一起把比例减半，权重仍逐位相同。"""
    changes = {"dtype": "float16", "steps": 3, "save_interval": 2}
    assert train_ranks(2, tmp_path, overflow, **changes) == [0, 0]
    ranks = [torch.load(tmp_path / f"rank{r}.pt", weights_only=True) for r in (0, 1)]
    assert [rank["scale"] for rank in ranks] == [32768.0, 32768.0]
    for name, value in ranks[0]["weights"].items():
        assert torch.equal(value, ranks[1]["weights"][name]), name
    before, after = state(tmp_path, checkpoint.PREVIOUS), state(tmp_path)
    assert (before["step"], after["step"]) == (2, 3)
    assert all(map(torch.equal, before["model"].values(), after["model"].values()))


@pytest.mark.slow
def test_evaluation_is_the_same_for_any_number_of_ranks(tmp_path):
    """3 个验证 batch 由 1 或 2 个进程分摊、有效 token 数不等：同样的权重，loss 差 < 1e-6。"""
    losses = {}
    for size in (1, 2):
        folder, changes = tmp_path / str(size), {"eval_iters": 3, "ignore_token": 7, "steps": 1}
        assert train_ranks(size, folder, still_training, **changes) == [0] * size
        losses[size] = pd.read_csv(folder / "log.csv")["val_loss"].iloc[0]
    assert abs(losses[1] - losses[2]) < 1e-6 and abs(losses[1] - math.log(256)) < 0.1, losses


def still_training(rank: int) -> None:
    """手脚：每一步都核对，评估之后模型回到了训练状态。"""
    original = train_gpu.train_step

    def train_step(run, *args):
        assert run.raw.training and run.model.training
        return original(run, *args)

    train_gpu.train_step = train_step


def test_evaluations_and_best_agree(straight):
    """每 10 步评估一次，连同第 0 步与最后一步；best 就是验证 loss 最低的那一步。"""
    log = pd.read_csv(straight / "log.csv").dropna(subset="val_loss")
    assert log["step"].tolist() == [0, 10, 20, 30, 40]
    assert abs(log["val_loss"].iloc[0] - math.log(256)) < 0.1
    assert state(straight)["best_loss"] == pytest.approx(log["val_loss"].min(), abs=1e-8)
    assert state(straight, checkpoint.BEST)["step"] == log["step"].iloc[log["val_loss"].argmin()]


@pytest.mark.parametrize(
    ("asked", "hardware_has_bf16", "device", "wanted"),
    [("bfloat16", True, "cpu", torch.bfloat16), ("float16", True, "cpu", torch.float16),
     ("auto", True, "cpu", torch.bfloat16), ("auto", False, "cpu", torch.float32),
     ("auto", True, "cuda", torch.bfloat16), ("auto", False, "cuda", torch.float16)],
)  # fmt: skip
def test_precision_is_what_was_asked(monkeypatch, asked, hardware_has_bf16, device, wanted):
    """要 bf16 就是 bf16；auto：有 bf16 就用，否则 CUDA 用 fp16、CPU 用 fp32。"""
    monkeypatch.setattr(hardware, "bf16_support", lambda _: (hardware_has_bf16, ""))
    assert run_module.pick_dtype(Options(dtype=asked), torch.device(device)) is wanted


def test_muon_refuses_the_fp16_that_auto_chose(tmp_path, monkeypatch):
    """--dtype auto 在旧 GPU 上选 fp16：与 muon 同用时也拒绝，不只看命令行写了什么。"""
    monkeypatch.setattr(run_module, "pick_dtype", lambda *_: torch.float16)
    with pytest.raises(UserError, match="muon 不能与 float16"):
        train(tmp_path, steps=1, optimizer="muon", dtype="auto")


def test_one_card_for_many_processes_is_refused(monkeypatch):
    """torchrun 两个进程都写 --device cuda:0：拒绝，而不是挤在一张卡上。"""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("cuda:1", 0) == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert pick_device("cuda", 1) == torch.device("cuda", 1)
    with pytest.raises(UserError, match="2 个进程挤在一张卡"):
        pick_device("cuda:0", 1)


@pytest.mark.parametrize(("here", "wanted"), [("2", LOOPBACK), ("1", None), (None, None)])
def test_loopback_only_on_a_single_machine(monkeypatch, here, wanted):
    """一台机器上 gloo 走回环网卡；两台机器、不知道几台时都不动。"""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # 测试之后恢复
    for name, value in (("GLOO_SOCKET_IFNAME", None), ("WORLD_SIZE", "2"),
                        ("LOCAL_WORLD_SIZE", here)):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
        if value:
            monkeypatch.setenv(name, value)
    use_loopback()
    assert os.environ.get("GLOO_SOCKET_IFNAME") == wanted


@pytest.mark.slow
def test_only_fp16_is_scaled(tmp_path, monkeypatch, capsys):
    """bf16 不用 scaler；CPU 没有 bf16 指令时照做，但说它只会更慢。"""
    monkeypatch.setattr(hardware, "bf16_support", lambda _: (False, "CPU 没有 bf16 指令"))
    assert train(tmp_path, dtype="bfloat16", steps=1) == 0
    assert state(tmp_path)["scaler"] == {} and "bf16 只会更慢" in capsys.readouterr().out


# ---------------------------------------------------------------- MFU


def metered(tokens_per_s: float, **changes) -> tuple[dict, Meter]:
    settings = {"flops_per_token": 10**9, "tokens_per_step": 1000, "cards": 1, "peak_flops": 1e12}
    meter = Meter(device=torch.device("cpu"), **settings | changes)
    meter.steps, meter.seconds = 10, 10 * 1000 / tokens_per_s
    return meter.read(), meter


def test_mfu_formula():
    """MFU = FLOPs/token × token/s ÷（峰值 × 卡数）：nanoGPT 的 100 个序列 0.755 秒是 37.14 %。"""
    row, _ = metered(
        100 * 1024 / 0.755, flops_per_token=875_062_886_400 / 1024, peak_flops=312e12
    )
    assert row["mfu"] == pytest.approx(0.3714, abs=1e-4)
    assert metered(400.0, cards=2)[0]["mfu"] == pytest.approx(0.2)


def test_mfu_is_a_running_average():
    """显示 0.9·旧 + 0.1·新。"""
    _, meter = metered(500.0)
    meter.steps, meter.seconds = 1, 1.0  # 1000 token/s → 100 %
    assert meter.read()["mfu"] == pytest.approx(0.9 * 0.5 + 0.1 * 1.0)


def test_first_step_is_not_the_start_of_the_average():
    """含编译的第一步整个丢掉：之后显示的 MFU 与没有它时相同，而不是从它慢慢爬上来。"""
    settings = {"flops_per_token": 10**9, "tokens_per_step": 1000, "cards": 1}
    meter = Meter(device=torch.device("cpu"), **settings, peak_flops=1e12)
    log = Spoken()
    run = SimpleNamespace(world=log, step=1, options=SimpleNamespace(log_interval=50))
    meter.steps, meter.seconds = 1, 100.0
    train_gpu.log_line(run, None, meter, 5.0, 1.0, 1e-3, first=True)
    assert meter.mfu is None and "第一步 100.0 秒" in log.said[0]
    meter.steps, meter.seconds = 10, 20.0
    assert meter.read()["mfu"] == pytest.approx(0.5), meter.mfu


class Spoken:
    """只记下说了什么的 World。"""

    def __init__(self) -> None:
        self.said, self.device, self.master = [], torch.device("cpu"), True

    def say(self, message: str, *, error: bool = False) -> None:
        self.said.append(message)


def test_mfu_is_refused_rather_than_wrong():
    """不认识的设备没有 MFU；算出 104 % 时拒绝显示并说峰值错了，以后也不再显示。"""
    row, meter = metered(500.0, peak_flops=0.0)
    assert "mfu" not in row and "--peak-flops" in meter.refusal
    row, meter = metered(1040.0)
    assert "mfu" not in row and "104%" in meter.refusal
    meter.steps, meter.seconds = 1, 10.0
    assert "mfu" not in meter.read()


# ---------------------------------------------------------------- 续训：逐位相等


@pytest.mark.parametrize("legs", [(20,), (7, 19, 33)])
def test_resume_is_bitwise(straight, tmp_path, legs):
    """run(40) = run(20) + resume(20) = 任意次打断：权重、优化器状态、每步的 loss 都逐位相等。"""
    for number, steps in enumerate([*legs, 40]):
        assert train(tmp_path, steps=steps, init_from="resume" if number else "scratch") == 0
    assert difference(state(straight), state(tmp_path)) == 0.0
    pd.testing.assert_frame_equal(trace(straight), trace(tmp_path), check_exact=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{"dtype": "bfloat16"}, {"dtype": "float16"}, {"optimizer": "muon"}]
)
def test_resume_is_bitwise_in_16_bits_and_with_muon(tmp_path, changes):
    """bf16、fp16（连同 scaler）和 Muon 的续训也逐位相等；存下的权重都是 fp32。"""
    assert train(tmp_path / "a", steps=12, **changes) == 0
    assert train(tmp_path / "b", steps=6, **changes) == 0
    assert train(tmp_path / "b", steps=12, init_from="resume", **changes) == 0
    a, b = state(tmp_path / "a"), state(tmp_path / "b")
    assert difference(a, b) == 0.0 and a["scaler"] == b["scaler"]
    assert {t.dtype for t in tensors(a)} == {torch.float32}
    assert all(not name.startswith(checkpoint.WRAPPERS) for name in a["model"])


def interrupt_at(step: int, number: int, monkeypatch) -> None:
    """走完第 `step` 步时给自己发一个信号，像抢占的机器或 Ctrl-C 那样。"""
    original = train_gpu.log_line

    def report(run, *args, **kwargs):
        original(run, *args, **kwargs)
        if run.step == step:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(train_gpu, "log_line", report)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_exits_with_75(straight, tmp_path, monkeypatch, capsys, number):
    """SIGTERM、SIGINT：走完这一步，存盘，退出码 75；接着训练与没有被打断逐位相等，best 也一样。"""
    before = signal.getsignal(number)  # 后台启动的 pytest 里 SIGINT 本来就被忽略
    with monkeypatch.context() as patched:
        interrupt_at(20, number, patched)  # 20 正是该评估的步：来不及评估，留给续训
        assert train(tmp_path) == 75
    assert state(tmp_path)["step"] == 20 and state(tmp_path)["evaluated"] == 10
    assert "SIG" in capsys.readouterr().out
    assert signal.getsignal(number) == before
    assert train(tmp_path, init_from="resume") == 0
    assert difference(state(straight), state(tmp_path)) == 0.0
    assert difference(state(straight, checkpoint.BEST), state(tmp_path, checkpoint.BEST)) == 0.0
    ours, theirs = (pd.read_csv(f / "log.csv")["val_loss"].dropna() for f in (tmp_path, straight))
    assert ours.tolist() == theirs.tolist()


def test_a_signal_during_the_agreement_waits_for_the_next_step(monkeypatch):
    """信号在求和途中到来：这一步谁也不停，下一步一起停；否则一个进程走了，别的永远等它。"""
    world = World(0, 1, torch.device("cpu"))
    interruption = Interruption(world)
    with monkeypatch.context() as patched:

        def late(self, tensor):
            interruption.reason = "SIGTERM"
            return tensor

        patched.setattr(World, "sum", late)
        assert interruption.agreed() == ""
    assert interruption.agreed() == "SIGTERM"


@pytest.mark.slow
def test_a_signal_at_the_very_last_step_leaves_the_evaluation_to_the_resume(tmp_path, monkeypatch):
    """信号正好在最后一步到来：来不及评估，所以不算走完（75）；续训只补上评估，以 0 退出。"""
    with monkeypatch.context() as patched:
        interrupt_at(7, signal.SIGTERM, patched)
        assert train(tmp_path, steps=7) == 75
    assert train(tmp_path, steps=7, init_from="resume") == 0
    log = pd.read_csv(tmp_path / "log.csv").dropna(subset="val_loss")
    assert log["step"].tolist() == [0, 7] and len(trace(tmp_path)) == 7


@pytest.mark.slow
def test_time_limit_stops_like_a_signal(tmp_path):
    """--time-limit 到了也是存好、退出码 75。"""
    assert train(tmp_path, steps=10**6, decay_steps=10**6, time_limit=0.01) == 75
    assert state(tmp_path)["step"] > 0


@pytest.mark.slow
def test_resume_takes_options_from_the_checkpoint(tmp_path, capsys):
    """续训不必重写选项：没有明说的沿用检查点的；结构永远来自检查点，并说出来；峰值学习率不变。"""
    assert train(tmp_path, steps=5, lr=2e-3) == 0
    argv = ["--out-dir", str(tmp_path), "--init-from", "resume", "--steps", "9", "--d-model",
            "999", "--device", "cpu", "--preset", "tiny_cpu"]  # fmt: skip
    assert train_gpu.command_line(argv) == 0
    said = capsys.readouterr().out
    assert "d_model 仍是 32" in said and "tiny_cpu 不起作用" in said and "steps：5 → 9" in said
    saved = state(tmp_path)
    assert saved["step"] == 9 and saved["config"]["lr"] == 2e-3
    wanted = [learning_rate(s, peak=2e-3, warmup=5, total=40) for s in range(9)]
    assert trace(tmp_path)["lr"].tolist() == pytest.approx(wanted, rel=1e-8)


@pytest.mark.slow
def test_explicit_hyperparameters_win_on_resume(tmp_path):
    """明说的超参数在续训时生效：优化器的动量来自检查点，权重衰减来自命令行。"""
    assert train(tmp_path, steps=4) == 0
    argv = ["--out-dir", str(tmp_path), "--init-from", "resume", "--steps", "6",
            "--weight-decay", "0.3", "--device", "cpu"]  # fmt: skip
    assert train_gpu.command_line(argv) == 0
    groups = state(tmp_path)["optimizer"][0]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
    assert state(tmp_path)["optimizer"][0]["state"][0]["step"] == 6


def test_a_checkpoint_of_another_revision_names_the_keys(tmp_path):
    """检查点里有这一版没有的选项：说出是哪些，而不是 TypeError。"""
    assert train(tmp_path, steps=1) == 0
    for part in ("config", "model_config"):
        saved = state(tmp_path)
        saved[part]["dropout"] = 0.1
        checkpoint.save(tmp_path / part, saved)
        with pytest.raises(UserError, match="不认识的选项 dropout"):
            train(tmp_path / part, init_from="resume")


def test_loaded_state_is_dropped(straight, tmp_path, monkeypatch):
    """检查点装好之后就放手：训练途中不再占一份内存。"""
    starts, loop = [], train_gpu.loop
    choose = train_gpu.choose_start
    monkeypatch.setattr(
        train_gpu, "choose_start", lambda *a: starts.append(choose(*a)) or starts[0]
    )

    def looked(run, *args):
        assert run.step == 40 and starts[0].state is None and starts[0].weights is None
        return loop(run, *args)

    monkeypatch.setattr(train_gpu, "loop", looked)
    shutil.copytree(straight, tmp_path, dirs_exist_ok=True)
    assert train(tmp_path, init_from="resume") == 0


@pytest.mark.slow
def test_resume_without_a_checkpoint_starts_and_says_so(tmp_path, capsys):
    """抢占式机器的启动命令可以永远写 --init-from resume：第一次没有检查点，就说明并从头开始。"""
    assert train(tmp_path, steps=2, init_from="resume") == 0
    assert "没有检查点：从头开始" in capsys.readouterr().out


@pytest.mark.slow
def test_scratch_in_a_used_folder_keeps_the_old_run(tmp_path, capsys):
    """从头训练时文件夹里已有的一轮移到 old-1 并说出来，不覆盖。"""
    for _ in range(2):
        assert train(tmp_path, steps=2) == 0
    assert "old-1" in capsys.readouterr().out
    assert difference(state(tmp_path / "old-1"), state(tmp_path)) == 0.0
    assert (tmp_path / "old-1" / "log.csv").exists()


@pytest.mark.slow
def test_a_restart_by_torchrun_resumes_by_itself(straight, tmp_path, monkeypatch, capsys):
    """同一个 torchrun 重启的进程，命令行写着 scratch 也接着走；另一次启动的 scratch 才从头。"""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-1")
    assert train(tmp_path, steps=15) == 0
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert train(tmp_path) == 0
    assert difference(state(straight), state(tmp_path)) == 0.0
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-2")
    assert train(tmp_path, steps=1) == 0
    assert state(tmp_path)["step"] == 1 and "old-1" in capsys.readouterr().out
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert train(tmp_path, steps=2) == 0
    assert not (tmp_path / "old-2").exists()


def test_a_launch_that_died_before_setting_aside_does_not_adopt_the_old_run(tmp_path, monkeypatch):
    """没有 run id 时：移开旧的一轮之前就死了，重启的进程从头开始；移开之后的重启才接着走。"""
    assert train(tmp_path, steps=3) == 0  # 上一轮
    checkpoint.prepare(tmp_path)  # 新的启动，还没有移开就死了
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert train(tmp_path, steps=1) == 0
    assert state(tmp_path)["step"] == 1 and state(tmp_path / "old-1")["step"] == 3
    assert train(tmp_path, steps=2) == 0
    assert trace(tmp_path)["step"].tolist() == [1, 2] and not (tmp_path / "old-2").exists()


@pytest.mark.slow
def test_broken_last_falls_back_and_recovers(straight, tmp_path, capsys):
    """last 坏了：说出来，从 previous 重走那一段，最后仍与没坏过逐位相等。"""
    assert train(tmp_path, steps=25) == 0
    data = (tmp_path / "last.pt").read_bytes()
    (tmp_path / "last.pt").unlink()
    (tmp_path / "last.pt").write_bytes(data[:-1000])
    assert train(tmp_path, init_from="resume") == 0
    said = capsys.readouterr().out
    assert "损坏" in said and "的第 20 步继续" in said
    assert difference(state(straight), state(tmp_path)) == 0.0
    assert (tmp_path / "broken-last.pt").exists()


@pytest.mark.slow
def test_start_from_our_own_weights(straight, tmp_path):
    """--init-from 检查点.pt 只取权重：步数从 0 开始，结构来自检查点，不合理的预设结构不碍事。"""
    path = str(straight / "best.pt")
    assert train(tmp_path, steps=1, init_from=path, d_model=63, seq_len=1024) == 0
    log = pd.read_csv(tmp_path / "log.csv")
    assert log["step"].tolist()[0] == 0 and state(tmp_path)["config"]["d_model"] == 32
    best = state(straight, checkpoint.BEST)["best_loss"]
    assert log["val_loss"].dropna().tolist()[0] == pytest.approx(best, abs=1e-6)


# ---------------------------------------------------------------- 出事


def poison(step: int, monkeypatch, what: str) -> None:
    """第 `step` 步之前把一个权重变成 NaN，或者让梯度变成 NaN 而 loss 不变。"""
    original = train_gpu.train_step

    def train_step(run, *args):
        weight = run.raw.blocks[0].mlp.up.weight
        if run.step == step and what == "weight":
            weight.data[0, 0] = float("nan")
        if run.step == step and what == "gradient":
            weight.register_hook(lambda grad: grad * float("nan"))
        return original(run, *args)

    monkeypatch.setattr(train_gpu, "train_step", train_step)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["weight", "gradient"])
@pytest.mark.parametrize("interval", [1, 50])
def test_divergence_stops_and_saves_nothing_ruined(tmp_path, monkeypatch, capsys, what, interval):
    """loss 或梯度变成 NaN：退出码 3，说出步数、数据位置、最后的好检查点；毁掉的权重没有存下。"""
    poison(19, monkeypatch, what)
    assert train(tmp_path, log_interval=interval) == 3
    message = capsys.readouterr().err
    for needed in ("第 19 步", "nan", "第 304–319 个序列", "last.pt（第 10 步）"):
        assert needed in message, message
    saved = state(tmp_path)
    assert saved["step"] == 10 and all(t.isfinite().all() for t in tensors(saved))


def test_endless_fp16_overflow_stops(tmp_path, monkeypatch, capsys):
    """fp16 的梯度步步溢出：比例减到 1e-3 以下就停，退出码 3，而不是白走到底。"""
    original = train_gpu.train_step

    def train_step(run, *args):
        hook = run.raw.norm.weight.register_hook(lambda grad: grad * float("inf"))
        result = original(run, *args)
        hook.remove()
        return result

    monkeypatch.setattr(train_gpu, "train_step", train_step)
    assert train(tmp_path, dtype="float16", log_interval=10) == 3
    message = capsys.readouterr().err
    assert "到第 30 步" in message and "每步溢出" in message, message


@pytest.mark.slow
def test_full_disk_during_a_run(straight, tmp_path, monkeypatch, capsys):
    """训练途中存不下：大声说，旧的仍好，训练继续，下次再存；最后一次也存不下才以 2 退出。"""
    original = checkpoint.torch.save
    full = {20}

    def save(content, file):
        if content["step"] in full:
            raise OSError(28, "No space left on device")
        original(content, file)

    monkeypatch.setattr(checkpoint.torch, "save", save)
    assert train(tmp_path / "once") == 0
    assert "第 20 步没有存成" in capsys.readouterr().err
    assert difference(state(straight), state(tmp_path / "once")) == 0.0
    full |= {30, 40}
    assert train(tmp_path / "always") == 2
    assert "最后存下的是第 10 步" in capsys.readouterr().err
    assert state(tmp_path / "always")["step"] == 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "needed"),
    [("vocabulary", "词表只有 100"), ("truncated", "损坏"), ("short", "不够一个窗口"),
     ("other data", "数据与检查点训练时的不同"), ("other optimizer", "不能换成 muon"),
     ("foreign checkpoint", "不是 train_gpu"), ("unwritable", "不能在")],
)  # fmt: skip
def test_bad_files_lose_nothing(tmp_path, capsys, damage, needed):
    """词表不符、数据截断、换了数据、别家的检查点、不能写的文件夹：一句话，退出码 2，旧的还在。"""
    data, run = tmp_path / "data", tmp_path / "run"
    data.mkdir()
    tokens = torch.randint(200, (3000,), generator=generator_for(0, "x"), dtype=torch.int32)
    meta = {"vocab_size": 256, "ids_sha256": "abc"}
    torch.save({"train": tokens, "val": tokens[:500], "meta": meta}, data / "tokens.pt")
    assert train(run, steps=3, data=str(data / "tokens.pt")) == 0
    changes: dict = {"data": str(data / "tokens.pt"), "init_from": "resume", "steps": 5}
    if damage == "vocabulary":
        changes |= {"vocab_size": 100, "init_from": "scratch"}
    elif damage == "truncated":
        content = (data / "tokens.pt").read_bytes()
        (data / "tokens.pt").write_bytes(content[: len(content) // 2])
    elif damage == "short":
        changes |= {"seq_len": 512, "micro_batch": 1, "init_from": "scratch"}
    elif damage == "other data":
        changes |= {"data": "synthetic"}
    elif damage == "other optimizer":
        changes |= {"optimizer": "muon"}
    elif damage == "foreign checkpoint":
        torch.save({"weights": 1}, tmp_path / "x.pt")
        changes |= {"init_from": str(tmp_path / "x.pt"), "out_dir": str(tmp_path / "new")}
    elif damage == "unwritable":
        changes |= {"out_dir": "/proc/nowhere/run"}
    words = [f"--{k.replace('_', '-')}={v}" for k, v in {**TINY, "out_dir": run, **changes}.items()
             if k not in ("compile", "fused_loss")]  # fmt: skip
    assert train_gpu.command_line([*words, "--no-compile", "--fused-loss"]) == 2
    message = capsys.readouterr().err.strip()
    assert needed in message and "\n" not in message, message
    assert state(run)["step"] == 3 and not list(run.glob("old-*"))


def test_port_in_use_is_one_sentence(tmp_path, monkeypatch, capsys):
    """端口被占：一句话，说出地址，退出码 2。"""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"),
                            ("MASTER_PORT", str(taken.getsockname()[1]))):  # fmt: skip
            monkeypatch.setenv(name, value)
        argv = ["--preset", "tiny_cpu", "--out-dir", str(tmp_path), "--device", "cpu"]
        assert train_gpu.command_line(argv) == 2
    message = capsys.readouterr().err.strip()
    assert "端口" in message and message.splitlines()[-1].startswith("错误："), message


@pytest.mark.slow
def test_no_compiler_falls_back_to_eager_and_says_why(tmp_path, monkeypatch, capsys):
    """没有编译器：用 eager，并说原因。"""
    monkeypatch.setattr(hardware, "compile_support", lambda *_: (False, "找不到 C++ 编译器"))
    assert train(tmp_path, steps=1, compile=True) == 0
    said = capsys.readouterr().out
    assert "不编译，用 eager：找不到 C++ 编译器" in said and "eager，1 个进程" in said


def test_everything_is_printed_at_the_start(tmp_path, capsys):
    """开头打印每个选项，和推出的全局 batch：序列数、token 数、累积次数。"""
    assert train(tmp_path, steps=1) == 0
    said = capsys.readouterr().out
    for field in dataclasses.fields(Options):
        assert f"\n{field.name} = " in "\n" + said, field.name
    assert "16 个序列 × 32 = 512 个 token = micro 4 × 1 个进程 × 累积 4 次" in said


# ---------------------------------------------------------------- 多进程、编译、预训练（慢）


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> Path:
    """两个进程、不间断的 40 步。"""
    folder = tmp_path_factory.mktemp("two")
    assert train_ranks(2, folder) == [0, 0]
    return folder


@pytest.mark.slow
def test_ddp_resume_is_bitwise(two_ranks, tmp_path):
    """两个进程：run(40) = run(20) + resume(20)，逐位；每个进程恢复自己的随机数，不是 0 号的。"""
    assert train_ranks(2, tmp_path, steps=20) == [0, 0]
    assert train_ranks(2, tmp_path, init_from="resume") == [0, 0]
    ours, theirs = state(tmp_path), state(two_ranks)
    assert difference(ours, theirs) == 0.0
    assert not torch.equal(ours["rng"][0]["cpu"], ours["rng"][1]["cpu"])
    for mine, wanted in zip(ours["rng"], theirs["rng"], strict=True):
        assert torch.equal(mine["cpu"], wanted["cpu"])


@pytest.mark.slow
def test_ddp_and_single_checkpoints_are_interchangeable(straight, two_ranks, tmp_path):
    """2 个进程与 1 个进程走同样的全局 batch；中途换进程数，两个方向，权重都差 < 1e-5。"""
    close = difference_of_weights(straight, two_ranks)
    assert train_ranks(2, tmp_path / "a", steps=20) == [0, 0]
    assert train(tmp_path / "a", init_from="resume") == 0
    assert train(tmp_path / "b", steps=20) == 0
    assert train_ranks(2, tmp_path / "b", init_from="resume") == [0, 0]
    down, up = (difference_of_weights(straight, tmp_path / name) for name in "ab")
    assert max(close, down, up) < 1e-5, f"2 对 1：{close:.1e}，2→1：{down:.1e}，1→2：{up:.1e}"


def difference_of_weights(a: Path, b: Path) -> float:
    left, right = state(a)["model"], state(b)["model"]
    return max((left[name] - right[name]).abs().max().item() for name in left)


def wait_for_rows(folder: Path, count: int, alive) -> None:
    """等到日志有 `count` 行：训练已经在走。"""
    while not (folder / "log.csv").exists() or len(trace(folder)) < count:
        time.sleep(0.05)
        assert alive(), "还没走几步就结束了"


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_after_the_same_step(tmp_path):
    """SIGTERM 只到了 1 号进程：两个进程停在同一步，都以 75 退出，检查点是好的。"""
    processes = start(2, tmp_path, steps=10**6, decay_steps=10**6, eval_interval=10**6)
    wait_for_rows(tmp_path, 3, lambda: all(p.exitcode is None for p in processes))
    os.kill(processes[1].pid, signal.SIGTERM)
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [75, 75]
    assert state(tmp_path)["step"] == trace(tmp_path)["step"].max()


@pytest.mark.slow
def test_compiled_resume_is_bitwise_and_interchangeable(straight, tmp_path):
    """编译后（确定性算法打开）续训逐位相等；编译与 eager 的检查点互通，权重差 < 1e-4。"""
    if not hardware.compile_support()[0]:
        pytest.skip(hardware.compile_support()[1])
    torch._dynamo.reset()
    assert train(tmp_path / "a", compile=True) == 0
    assert train(tmp_path / "b", compile=True, steps=20) == 0
    assert train(tmp_path / "b", compile=True, init_from="resume") == 0
    assert difference(state(tmp_path / "a"), state(tmp_path / "b")) == 0.0
    assert list(state(tmp_path / "a")["model"]) == list(state(straight)["model"])
    assert train(tmp_path / "c", steps=20) == 0
    assert train(tmp_path / "c", compile=True, init_from="resume") == 0
    assert train(tmp_path / "d", compile=True, steps=20) == 0
    assert train(tmp_path / "d", compile=False, init_from="resume") == 0
    gaps = {name: difference_of_weights(straight, tmp_path / name) for name in "acd"}
    assert max(gaps.values()) < 1e-4, gaps


@pytest.mark.slow
def test_starts_from_a_llama_folder(tmp_path, capsys):
    """transformers 存下的 Llama 文件夹：装进来的模型 logits 相等（1e-5），训练从那里开始。"""
    transformers = pytest.importorskip("transformers")
    from experiments.loop.llama import load_llama

    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=160, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=64, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(config)
    theirs.save_pretrained(tmp_path / "llama")
    ours_config, weights = load_llama(tmp_path / "llama", 32)
    ours = GPT(ours_config)
    ours.load_state_dict(weights)
    x = torch.randint(256, (2, 32))
    with torch.no_grad():
        gap = (ours(x)[0] - theirs(x).logits).abs().max().item()
    assert gap < 1e-5 and ours_config.rope_theta == 5000.0, gap
    assert train(tmp_path / "run", steps=2, init_from=str(tmp_path / "llama")) == 0
    assert "分词器" not in capsys.readouterr().err  # synthetic 没有词表，无从比较
    tokens, other = torch.randint(200, (3000,), dtype=torch.int32), tmp_path / "tokens.pt"
    torch.save({"train": tokens, "val": tokens[:500], "meta": {"vocab_size": 200}}, other)
    changes = {"init_from": str(tmp_path / "llama"), "data": str(other)}
    assert train(tmp_path / "other", steps=1, **changes) == 0
    assert "256 个词条，数据的分词器只有 200 个" in capsys.readouterr().err
    saved = state(tmp_path / "run")
    assert saved["config"]["d_model"] == 64 and saved["model_config"]["norm_eps"] == 1e-6
    assert train(tmp_path / "run", steps=3, init_from="resume") == 0


@pytest.mark.slow
def test_folders_that_do_not_fit_say_why(tmp_path):
    """GPT-2、分组注意力、宽度不同、没有权重、坏的 config.json：各说出原因。"""
    import json

    from experiments.loop.llama import load_llama

    llama = {
        "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 160,
        "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    }  # fmt: skip
    cases = [
        ({"model_type": "gpt2"}, "LayerNorm"), ({"model_type": "qwen2"}, "qwen2"),
        (llama | {"num_key_value_heads": 1}, "num_key_value_heads"),
        (llama | {"intermediate_size": 200}, "intermediate_size 是 200、要 160"),
        (llama | {"tie_word_embeddings": False}, "tie_word_embeddings"),
        (llama | {"rope_scaling": {"rope_type": "llama3"}}, "llama3"),
        ({"model_type": "llama"}, "缺少"), (llama, "没有.*safetensors"),
    ]  # fmt: skip
    for number, (config, needed) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match=needed):
            load_llama(folder, 32)
    with pytest.raises(UserError, match="config.json"):
        load_llama(tmp_path / "nowhere", 32)


def test_log_keeps_every_digit_of_the_token_count(tmp_path):
    """10 亿以上的 token 数一位不差；小数仍是 9 位有效数字。"""
    log = RunLog(tmp_path)
    log.write(step=1, tokens=123_456_789_012, loss=1 / 3)
    log.close()
    line = (tmp_path / "log.csv").read_text().splitlines()[1]
    assert line.startswith("1,123456789012,0.333333333,"), line


def test_ddp_does_not_broadcast_the_constant_table(two_ranks_options):
    """DDP 不在每次前向时广播缓冲区：唯一的缓冲区是常数。"""
    assert two_ranks_options["forward_sync_buffers"] is False, two_ranks_options


@pytest.fixture
def two_ranks_options(tmp_path, monkeypatch) -> dict:
    """build 交给 DDP 的选项。"""
    seen: dict = {}

    def wrap(module, **options):
        seen.update(options)
        return module

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(run_module, "DistributedDataParallel", wrap)
    options = tiny(tmp_path)
    config = GPTConfig(**{name: getattr(options, name) for name in STRUCTURE})
    data = {"train": torch.zeros(100), "meta": {}}
    run_module.build(Start(options, config), World(0, 1, torch.device("cpu")), data)
    return seen


def test_matmul_peak_measures_at_least_once():
    """给它 0 秒也量一次：峰值 0 会让后面的除法出错。"""
    assert hardware.matmul_peak(size=64, seconds=0.0) > 0


def test_compile_support_looks_at_the_device(monkeypatch):
    """GPU 上要的是 Triton 和 Volta 以后的卡；CPU 上 CXX 不能带参数（PyTorch 不认），说明白。"""
    for capability, wanted in (((6, 1), False), ((8, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda c=capability: c)
        monkeypatch.setattr(hardware, "find_spec", lambda _: True)
        assert hardware.compile_support("cuda")[0] is wanted
    monkeypatch.setattr(hardware, "find_spec", lambda _: None)
    assert "Triton" in hardware.compile_support("cuda")[1]
    monkeypatch.setenv("CXX", "ccache g++")
    works, reason = hardware.compile_support()
    assert not works and "CXX=ccache g++" in reason, reason


def test_a_compiler_that_cannot_find_python_h_is_no_compiler(monkeypatch):
    """有编译器却没有 Python.h（没装 python3-dev）：不编译，并说出编译器的那句错误。"""
    if not hardware.compile_support()[0]:
        pytest.skip(hardware.compile_support()[1])
    hardware.compiler_problem.cache_clear()
    monkeypatch.setattr(hardware.sysconfig, "get_path", lambda name: "/nowhere")
    works, reason = hardware.compile_support()
    hardware.compiler_problem.cache_clear()
    assert not works and "Python.h" in reason, reason


@pytest.mark.slow
def test_tensorboard_is_optional_and_written(tmp_path):
    """--tensorboard 另写一份同样的数。"""
    pytest.importorskip("tensorboard")
    assert train(tmp_path, steps=2, tensorboard=True) == 0
    assert list((tmp_path / "tensorboard").glob("events*"))


@pytest.mark.slow
def test_runs_as_a_reader_would_start_it(tmp_path):
    """`python experiments/train_gpu.py --preset tiny_cpu`：真实的 token，退出码 0，loss 下降。"""
    command = [sys.executable, str(SCRIPT), "--preset", "tiny_cpu", "--steps", "60",
               "--out-dir", str(tmp_path)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.stderr
    loss = trace(tmp_path)["loss"]
    assert loss.iloc[-1] < loss.iloc[0] - 0.5, loss.tolist()
    assert {"last.pt", "best.pt", "log.csv"} <= {p.name for p in tmp_path.iterdir()}


def torchrun(*words: str, restarts: int = 0) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
            "--master-port", str(free_port()), "--max-restarts", str(restarts), str(SCRIPT),
            *words]  # fmt: skip


def tiny_words(folder: Path, **changes) -> list[str]:
    options = {**TINY, "out_dir": folder, **changes}
    flags = [f"--{'' if options.pop(name) else 'no-'}{name.replace('_', '-')}"
             for name in ("compile", "fused_loss")]  # fmt: skip
    return flags + [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]


@pytest.mark.slow
def test_torchrun_recovers_by_itself_when_a_rank_is_killed(two_ranks, tmp_path):
    """torchrun --max-restarts：一个进程被 SIGKILL，它自己重启并续训，最后与没有被杀逐位相等。"""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": LOOPBACK, "OMP_NUM_THREADS": "1"}
    marker = tmp_path / "killed"
    suicide = (
        "import os, runpy, signal, sys\n"
        "from pathlib import Path\n"
        "from experiments import train_gpu\n"
        "report = train_gpu.log_line\n"
        "def patched(run, *args, **kwargs):\n"
        "    report(run, *args, **kwargs)\n"
        f"    marker = Path({str(marker)!r})\n"
        "    if run.world.rank == 1 and run.step == 27 and not marker.exists():\n"
        "        marker.touch()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "train_gpu.log_line = patched\n"
        "sys.exit(train_gpu.command_line())\n"
    )
    (tmp_path / "script.py").write_text(suicide)
    command = torchrun(*tiny_words(tmp_path / "run"), restarts=3)
    command[command.index(str(SCRIPT))] = str(tmp_path / "script.py")
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert marker.exists() and "的第 20 步继续" in done.stdout
    assert done.stdout.count("个进程。") == 2, "重启了不止一次：旧的地址还留在 store 里"
    assert difference(state(two_ranks), state(tmp_path / "run")) == 0.0


@pytest.mark.slow
def test_sigterm_to_torchrun_saves_on_every_rank(tmp_path):
    """停机时 SIGTERM 发给 torchrun：它转给每个进程，大家停在同一步、存好；torchrun 自己返回 1。"""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": LOOPBACK, "OMP_NUM_THREADS": "1"}
    words = tiny_words(tmp_path, steps=10**6, decay_steps=10**6, eval_interval=10**6)
    agent = subprocess.Popen(
        torchrun(*words), env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    wait_for_rows(tmp_path, 3, lambda: agent.poll() is None)
    agent.send_signal(signal.SIGTERM)
    output = agent.communicate(timeout=60)[0]
    assert "SIGTERM：停在第" in output and agent.returncode != 0, output[-2000:]
    assert state(tmp_path)["step"] == trace(tmp_path)["step"].max()


# ---------------------------------------------------------------- GPU 检查


def test_gpu_check_says_when_there_is_no_gpu(monkeypatch, capsys):
    """没有 GPU：一句话，退出码 2，什么也没有量。"""
    from benchmarks import gpu_check
    from experiments.lab import results as measure

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    with pytest.raises(SystemExit) as left:
        measure.run_main(gpu_check.main, gpu_check.Options)
    message = capsys.readouterr().err.strip()
    assert left.value.code == 2 and "没有可用的 CUDA GPU" in message and "\n" not in message


def test_gpu_check_summary(monkeypatch):
    """日志 → 中位数的速度与 MFU；与 50 % 比较的那句话；超过 100 % 的不给。"""
    from benchmarks import gpu_check

    log = pd.DataFrame({
        "step": [1, 2, 3, 4], "tokens_per_s": [None, 4e5, 5e5, 6e5], "peak_gb": [30, 31, 31, 31],
    })  # fmt: skip
    options = gpu_check.Options(peak_flops=989e12)
    row = gpu_check.summarize(log, options)
    with torch.device("meta"):
        flops = GPT(GPTConfig(**gpu_check.SHAPE)).flops_per_token()
    assert row == {"steps": 4, "tokens_per_s": 5e5, "mfu": round(5e5 * flops / 989e12, 4),
                   "peak_gb": 31.0}  # fmt: skip
    assert "没有达到 50%" in gpu_check.verdict([row, {"error": "x"}])
    assert "达到 50%" in gpu_check.verdict([{"mfu": 0.51}])
    assert gpu_check.summarize(log, gpu_check.Options(peak_flops=1e12))["mfu"] is None
    assert "--peak-flops" in gpu_check.verdict([{"mfu": None}])


@pytest.mark.parametrize(
    ("then", "note"),
    [
        pytest.param("time.sleep(60)", None, marks=pytest.mark.slow),
        ("sys.exit('磁盘满了')", "退出码 1：磁盘满了"),
    ],
)
def test_gpu_check_keeps_what_was_measured(monkeypatch, then, note):
    """到时限被停下、最后出错的训练，已经量到的速度照样算数；一步也没量到才是 error。"""
    from benchmarks import gpu_check

    options = gpu_check.Options(tiny=True)
    for rows, measured in (("1,,1\n2,500,1\n", True), ("1,,1\n", False)):
        text = "step,tokens_per_s,peak_gb\n" + rows
        monkeypatch.setattr(gpu_check, "train_command", lambda *a, text=text: [
            sys.executable, "-c", "import pathlib, sys, time\nprint('第一步 3.5 秒', flush=True)\n"
            f"pathlib.Path({a[-1]!r}, 'log.csv').write_text({text!r})\n{then}",
        ])  # fmt: skip
        row = gpu_check.measure(options, "", False, 3.0)
        assert row["first_step_s"] == 3.5 and row.get("tokens_per_s") == (500 if measured else None)
        if measured:
            assert row.get("note") == note and "error" not in row, row
        else:
            assert (note or "3 秒内没有走完第二步") in row["error"], row


@pytest.mark.slow
def test_gpu_check_runs_its_whole_course_on_a_cpu(tmp_path, capsys, monkeypatch):
    """--tiny：四种配置依次跑，JSON 里有速度与峰值内存；没有编译器时那两行说明原因，不冒充。"""
    import json

    from benchmarks import gpu_check

    monkeypatch.setenv("CXX", "/nowhere/c++")
    out = tmp_path / "r.json"
    gpu_check.main(gpu_check.Options(
        tiny=True, seconds=280, micro_batch=2, accumulation=1, out=str(out)
    ))  # fmt: skip
    result = json.loads(out.read_text())
    assert [(run["data"], run["compiled"]) for run in result["runs"]] == [
        ("novel", True), ("synthetic", True), ("novel", False), ("synthetic", False)
    ]  # fmt: skip
    for run in result["runs"]:
        if run["compiled"]:
            assert "找不到 C++ 编译器" in run["error"], run
        else:
            assert run["tokens_per_s"] > 0 and run["peak_gb"] > 0, run
    assert json.loads(capsys.readouterr().out) == result
