"""CUDA 的路径：nccl 的 DDP 与 FSDP 等于一个进程，溢出一起跳，锁页内存，显存与估算相符。

要 GPU 的都带着 `gpu` 标记，没有 GPU 时说明原因并跳过；`python benchmarks/gpu_check.py` 一起跑它们。
同样的检查在 CPU 上用 gloo 也跑一遍：没有 GPU 的机器上，检查本身仍然被检查着。
"""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks import gpu_check
from experiments.loop.batches import to_device, to_host
from experiments.plan.architecture import gpt
from experiments.plan.memory import estimate
from experiments.ranks.compare import flat_gradients, relative_to_largest
from experiments.ranks.launch import run_ranks
from experiments.ranks.world import World
from experiments.training.recipe import seeded_gpt
from model import GPTConfig

CONFIG = GPTConfig(vocab_size=256, d_model=64, n_head=2, n_layer=2, seq_len=32)
ROWS = 8  # 一步的序列数，由各 rank 平分
DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", marks=pytest.mark.gpu, id="cuda")]


@pytest.fixture(autouse=True)
def needs_a_gpu(request):
    """带 gpu 标记而没有 GPU：跳过，说明原因。"""
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("没有可用的 CUDA GPU（torch.cuda.is_available() 是 False）")


def ranks_on(device: str) -> int:
    """CPU 上两个进程；GPU 上每张卡一个，至多两个：nccl 不许两个进程共用一张卡。"""
    return 2 if device == "cpu" else min(2, torch.cuda.device_count())


def batch(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """固定的一步，(8, 32)。"""
    ids = torch.randint(256, (ROWS, 33), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1].to(device), ids[:, 1:].to(device)


def mine(world: World) -> tuple[torch.Tensor, torch.Tensor]:
    """这个 rank 的那几行。"""
    x, y = batch(world.device)
    return x[world.rank :: world.size], y[world.rank :: world.size]


def alone(device: str) -> torch.Tensor:
    """一个进程、全部的行：梯度接成一个向量。"""
    model = seeded_gpt(CONFIG, 0, device)
    model(*batch(torch.device(device)))[1].backward()
    return flat_gradients(model).cpu()


def ddp_gradients(world: World) -> np.ndarray:
    """DDP 平均之后的梯度；张量要经共享内存传，进程一退出就取不到，所以交出数组。"""
    model = seeded_gpt(CONFIG, 0, world.device)
    cards = [world.device.index] if world.device.type == "cuda" else None
    wrapped = DistributedDataParallel(model, device_ids=cards)  # 反向之前要有人拿着它
    wrapped(*mine(world))[1].backward()
    return flat_gradients(model).cpu().numpy()


def fsdp_gradients(world: World) -> np.ndarray:
    """FSDP2 切开、规约之后再收齐的梯度。"""
    model = seeded_gpt(CONFIG, 0, world.device)
    mesh = dist.device_mesh.init_device_mesh(world.device.type, (world.size,))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    model(*mine(world))[1].backward()
    whole = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
             for p in model.parameters()]  # fmt: skip
    return torch.cat([grad.flatten() for grad in whole]).cpu().numpy()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", [ddp_gradients, fsdp_gradients], ids=["ddp", "fsdp"])
def test_gradients_equal_one_process(how, device):
    """DDP 与 FSDP（GPU 上走 nccl）一步的梯度与一个进程相同：差不到最大梯度的 1e-5。"""
    answers = run_ranks(how, ranks_on(device), device=device)
    right = alone(device)
    for rank, got in enumerate(answers):
        error = relative_to_largest(torch.from_numpy(got), right)
        assert error < 1e-5, f"{device} 的 rank {rank}：{error:.1e}"


def overflow(world: World) -> tuple[list[float], bool, bool]:
    """三步，第二步最后一个 rank 的 loss 溢出：（各步之后的比例，第二、第三步动了没有）。"""
    model = seeded_gpt(CONFIG, 0, world.device)
    cards = [world.device.index] if world.device.type == "cuda" else None
    wrapped = DistributedDataParallel(model, device_ids=cards)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler(world.device.type, init_scale=1024.0)
    scales, moved = [], []
    for step in range(3):
        before = model.embed.weight.detach().clone()
        loss = wrapped(*mine(world))[1]
        if step == 1 and world.rank == world.size - 1:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        scales.append(scaler.get_scale())
        moved.append(not torch.equal(before, model.embed.weight))
    return scales, moved[1], moved[2]


@pytest.mark.parametrize("device", DEVICES)
def test_an_overflow_is_skipped_by_every_rank(device):
    """只有一个 rank 溢出：各 rank 一起跳过那一步、比例一起减半，下一步一起走。"""
    answers = run_ranks(overflow, ranks_on(device), device=device)
    for scales, second, third in answers:
        assert scales == [1024.0, 512.0, 512.0], f"比例 {scales}"
        assert not second and third, f"第二步动了：{second}，第三步动了：{third}"


@pytest.mark.parametrize("device", DEVICES)
def test_copies_arrive_whole(device):
    """到设备、回主机的两个拷贝，值都不变；CPU 上不必拷贝。"""
    x = torch.arange(1 << 20)
    there = to_device(x, torch.device(device))
    assert there.device.type == device and torch.equal(there.cpu(), x)
    assert (there is x) == (device == "cpu")
    loss, norm = torch.tensor(1.5, device=device), torch.tensor(2.5, device=device)
    values, copied = to_host(loss, norm)
    if copied:
        copied.synchronize()
    assert values.tolist() == [1.5, 2.5]


@pytest.mark.gpu
def test_copies_are_pinned_and_asynchronous():
    """送去设备的来自锁页内存；GPU 还在忙时 CPU 不等它。"""
    pinned = []
    original = torch.Tensor.pin_memory

    def pin(tensor, *args):
        pinned.append(original(tensor, *args))
        return pinned[-1]

    torch.Tensor.pin_memory = pin
    try:
        busy = torch.randn(8192, 8192, device="cuda")
        for _ in range(20):
            busy = busy @ busy * 1e-4
        done = torch.cuda.Event()
        to_device(torch.arange(1 << 20), torch.device("cuda"))
        done.record()
        waiting = not done.query()  # 拷贝排在矩阵乘法后面，CPU 已经走到这里
    finally:
        torch.Tensor.pin_memory = original
    assert len(pinned) == 1 and pinned[0].is_pinned()
    assert waiting, "拷贝返回时 GPU 已经做完：CPU 等了它"


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_gpt_124m_fits_the_estimate(run_script, tmp_path):
    """gpt_124m 走三步（eager）：峰值显存与 budget 的估算差不到一成。"""
    done = run_script(
        "experiments/train_gpu.py", "--preset", "gpt_124m", "--data", "synthetic", "--no-compile",
        "--steps", 3, "--global-batch-tokens", 2 * 16 * 1024, "--log-interval", 1, "--out-dir",
        tmp_path, "--dtype", "bfloat16", timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    peak = pd.read_csv(tmp_path / "log.csv")["peak_gb"].max()
    guess = estimate(gpt(768, 12, 12, 1024), micro_batch=16, execution="eager").total
    assert abs(peak / guess - 1) < gpu_check.TOLERANCE, f"峰值 {peak:.2f} GB，估算 {guess:.2f} GB"


# ---------------------------------------------------------------- gpu_check 的新东西，都在 CPU 上查


def test_the_estimate_of_gpt_124m_is_the_one_budget_gives():
    """gpu_check 比的就是 budget 对同一形状的估算；差一成之外说得出来。"""
    row = gpu_check.fit({"peak_gb": 30.0}, gpu_check.Options(), compiled=False)
    guess = estimate(gpt(768, 12, 12, 1024), micro_batch=16, execution="eager").total
    assert row == {"estimate_gb": round(guess, 2), "over": round(30 / guess - 1, 3)}
    assert gpu_check.fit({"peak_gb": 1.0}, gpu_check.Options(tiny=True), compiled=False) == {}
    near, far = ({"mfu": 0.6, "over": over} for over in (-0.05, 0.2))
    assert "最多差 -5.0%，在一成以内" in gpu_check.verdict([near])
    assert "最多差 +20.0%，超出一成" in gpu_check.verdict([near, far])


@pytest.mark.slow
def test_without_a_gpu_the_check_reports_why_each_test_was_skipped(monkeypatch):
    """没有 GPU 时 `pytest -m gpu` 收得到全部测试，每个都带着原因跳过，一个也没有失败。"""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = gpu_check.run_tests(120)
    assert found["passed"] == 0 and found["failed"] == 0 and found["skipped"] >= 6, found
    assert all("没有可用的 CUDA GPU" in reason for reason in found["reasons"].values()), found
    json.dumps(found)


def test_a_failing_test_reaches_the_result(tmp_path: Path):
    """JUnit 报告里的失败、出错、跳过都数得到，原因是消息的第一行。"""
    report = tmp_path / "r.xml"
    cases = {"a": "", "b": '<failure message="差 3&#10;细节"/>', "c": '<skipped message="没有"/>',
             "d": '<error message="坏了"/>'}  # fmt: skip
    inside = "".join(f'<testcase name="{name}">{x}</testcase>' for name, x in cases.items())
    report.write_text(f"<testsuites><testsuite>{inside}</testsuite></testsuites>", "utf-8")
    found = gpu_check.counts(gpu_check.ElementTree.parse(report))
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 2, 1), found
    assert found["reasons"] == {"b": "差 3", "c": "没有", "d": "坏了"}
