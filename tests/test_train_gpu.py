"""train_gpu 的断言：一步怎么走（加权、裁剪、溢出、精度），验证，像读者那样启动。"""

import dataclasses
import math
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from tiny_training import difference, state, tiny, trace, train, train_ranks

from experiments import train_gpu
from experiments.lab import hardware
from experiments.loop import batches as batches_module
from experiments.loop import checkpoint
from experiments.loop import run as run_module
from experiments.loop.batches import generator_for, step_batches
from experiments.loop.options import STRUCTURE, Options
from experiments.loop.start import Start
from experiments.ranks.world import LOOPBACK, World, pick_device, use_loopback
from experiments.training.recipe import learning_rate
from model import GPT, IGNORE_INDEX, GPTConfig
from tokens.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "experiments" / "train_gpu.py"


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
        changes = {"vocab_size": 4096, "micro_batch": 8, "eval_tokens": 256, "fused_loss": fused}
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
    """13 个验证序列由 1 或 2 个进程分摊、有效 token 数不等：同样的权重，loss 差 < 1e-6。"""
    losses = {}
    for size in (1, 2):
        folder, changes = tmp_path / str(size), {"eval_tokens": 416, "ignore_token": 7, "steps": 1}
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


def test_everything_is_printed_at_the_start(tmp_path, capsys):
    """开头打印每个选项，和推出的全局 batch：序列数、token 数、累积次数。"""
    assert train(tmp_path, steps=1) == 0
    said = capsys.readouterr().out
    for field in dataclasses.fields(Options):
        assert f"\n{field.name} = " in "\n" + said, field.name
    assert "16 个序列 × 32 = 512 个 token = micro 4 × 1 个进程 × 累积 4 次" in said


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
