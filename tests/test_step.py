"""一步训练的每个开关：只改变怎么算，不改变算什么。"""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from experiments.lab.hardware import bf16_support, compile_support
from experiments.training import cross_entropy
from experiments.training import step as step_module
from experiments.training.recipe import adamw
from experiments.training.step import (
    StepOptions,
    allocator_support,
    best_options,
    make_step,
    one_exp_cross_entropy,
)
from model import GPT, GPTConfig

FP32_TOLERANCE = 1e-4  # 相对误差；只有加法次序不同
BF16_TOLERANCE = 3e-2  # 相对误差；bf16 有 8 位有效数字，一次舍入 2⁻⁹ ≈ 0.2 %

SWITCHES = {
    "显式注意力": {"attention": "explicit"},
    "SDPA": {"attention": "sdpa"},
    "存下掩码": {"attention": "explicit", "stored_mask": True},
    "合并 gate 与 up": {"merged_mlp": True},
    "合成交叉熵": {"fused_loss": True},
    "只算一遍 exp": {"fused_loss": True, "one_exp": True},
}
FASTEST = {"attention": "auto", "stored_mask": True, "fused_loss": True, "one_exp": True}


def tiny(seq_len: int = 24, **overrides) -> GPT:
    torch.manual_seed(0)
    shape = {"vocab_size": 96, "d_model": 32, "n_head": 2, "n_layer": 2, "seq_len": seq_len}
    return GPT(GPTConfig(attention="sdpa", **(shape | overrides)))


def batch(model: GPT, size: int, length: int, masked: float = 0.0) -> tuple:
    generator = torch.Generator().manual_seed(1)
    shape = (2, size, length)
    x, y = torch.randint(model.config.vocab_size, shape, generator=generator)
    y[torch.rand(y.shape, generator=generator) < masked] = -100
    return x, y


def one_step(model: GPT, x, y, **switches) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, 全部梯度接成一个向量)：用学习率 1 的 SGD 走一步，走掉的正好是梯度。"""
    model = copy.deepcopy(model)
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loss = make_step(model, optimizer, StepOptions(**switches), clip=float("inf"))(x, y)
    return loss, before - torch.cat([p.detach().flatten() for p in model.parameters()])


def difference(got: tuple, expected: tuple) -> tuple[float, float]:
    """(loss 的相对误差，梯度的相对误差)。"""
    loss = abs(got[0].item() - expected[0].item()) / abs(expected[0].item())
    return loss, ((got[1] - expected[1]).norm() / expected[1].norm()).item()


def assert_close(got: tuple, expected: tuple, tolerance: float, what: str) -> None:
    loss, grad = difference(got, expected)
    assert loss < tolerance and grad < tolerance, f"{what}：loss 差 {loss:.1e}，梯度差 {grad:.1e}"


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize(("size", "length"), [(4, 24), (1, 13), (3, 1)])
def test_every_switch_gives_the_plain_loss_and_gradients(name, size, length):
    """fp32 下每个开关的 loss 与全部梯度都等于朴素的一步（1e-4），包括 batch 1、T 不是 8 的倍数。"""
    model = tiny()
    x, y = batch(model, size, length)
    got = one_step(model, x, y, **SWITCHES[name])
    assert_close(got, one_step(model, x, y), FP32_TOLERANCE, f"{name} B={size} T={length}")


@pytest.mark.parametrize("head_dim", [8, 64, 128])
def test_head_sizes(head_dim):
    """每个头 8 到 128 维，最快的一组开关（fp32）都给出朴素的一步。"""
    model = tiny(d_model=2 * head_dim)
    x, y = batch(model, 2, 17)
    fast = one_step(model, x, y, **FASTEST)
    assert_close(fast, one_step(model, x, y), FP32_TOLERANCE, f"head_dim={head_dim}")


def test_long_sequences_fall_back():
    """超过显式注意力的长度（T = 300）时，存下掩码的写法退回原来的注意力，结果逐位相同。"""
    model = tiny(seq_len=300)
    x, y = batch(model, 1, 300)
    got = one_step(model, x, y, attention="auto", stored_mask=True)
    plain = one_step(model, x, y, attention="auto")
    assert torch.equal(got[1], plain[1]), difference(got, plain)


def test_masked_targets():
    """七成目标是 −100 时，最快的一组开关给出朴素的 loss 与梯度。"""
    model = tiny()
    x, y = batch(model, 4, 24, masked=0.7)
    fast = one_step(model, x, y, **FASTEST)
    assert_close(fast, one_step(model, x, y), FP32_TOLERANCE, "有填充的目标")


def test_huge_logits():
    """logits 放大一千倍（softmax 几乎是 one-hot）时仍与朴素的一步相等，不溢出。"""
    model = tiny()
    with torch.no_grad():
        model.norm.weight.mul_(1000)
    x, y = batch(model, 2, 24)
    plain = one_step(model, x, y)
    fast = one_step(model, x, y, fused_loss=True, one_exp=True)
    assert torch.isfinite(fast[1]).all(), "梯度溢出"
    assert_close(fast, plain, FP32_TOLERANCE, f"loss={plain[0]:.0f}")


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("rows", [1, 5, 1000])
def test_one_exp_is_cross_entropy_for_any_chunk(monkeypatch, reduction, rows):
    """不论一段多长（1、5、超过总数），只算一遍 exp 的交叉熵与它的两个梯度都等于定义。"""
    monkeypatch.setattr(cross_entropy, "CHUNK_LOGITS", rows * 50)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(13, 8, generator=generator, requires_grad=True)
    w = torch.randn(50, 8, generator=generator, requires_grad=True)
    y = torch.randint(50, (13,), generator=generator)
    y[3] = -100
    ours = one_exp_cross_entropy(x, w, y, reduction=reduction)
    theirs = F.cross_entropy(x @ w.t(), y, reduction=reduction)
    torch.testing.assert_close(ours, theirs)
    got, expected = (torch.autograd.grad(3 * loss, (x, w)) for loss in (ours, theirs))
    torch.testing.assert_close(got, expected)


def test_one_exp_with_nothing_to_predict():
    """一个有效目标也没有时，平均 loss 是 nan，与 PyTorch 一致：让它暴露，而不是装作 0。"""
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(9, 8, requires_grad=True)
    loss = one_exp_cross_entropy(x, w, torch.full((4,), -100))
    assert loss.isnan(), f"loss={loss.item()}"


def test_bf16_one_exp_is_closer_than_autocast():
    """bf16 下，只算一遍 exp 的梯度离 fp32 的真值不比 autocast 的交叉熵远。"""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 32, generator=generator, requires_grad=True)
    w = (torch.randn(512, 32, generator=generator) * 0.3).requires_grad_()
    y = torch.randint(512, (256,), generator=generator)
    exact = torch.autograd.grad(F.cross_entropy(x @ w.t(), y), (x, w))
    errors = {}
    for name, function in (("一遍", one_exp_cross_entropy), ("autocast", F.linear_cross_entropy)):
        with torch.autocast("cpu", torch.bfloat16):
            loss = function(x, w, y)
        grads = torch.autograd.grad(loss, (x, w))
        errors[name] = max(
            ((a - b).norm() / b.norm()).item() for a, b in zip(grads, exact, strict=True)
        )
    assert errors["一遍"] <= errors["autocast"] * 1.05 < BF16_TOLERANCE, errors


def test_bf16_step_stays_near_fp32():
    """bf16 的一步，loss 与梯度离朴素 fp32 的一步不超过 3 %。"""
    model = tiny(d_model=64)
    x, y = batch(model, 4, 24, masked=0.2)
    fast = one_step(model, x, y, bf16=True, **FASTEST)
    assert_close(fast, one_step(model, x, y), BF16_TOLERANCE, "bf16")


KEPT = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from test_step import batch, one_step, tiny
model = tiny()
x, y = batch(model, 2, 24)
plain = one_step(model, x, y)  # 先走朴素的：分配器一旦调了，整个进程都变，退不回去
kept = one_step(model, x, y, keep_memory=True)
print(all(torch.equal(a, b) for a, b in zip(plain, kept, strict=True)))
"""


@pytest.mark.slow
def test_memory_kept_changes_nothing():
    """调分配器不改变一位结果；在新的进程里比，朴素的一步在调之前走。"""
    command = [sys.executable, "-c", KEPT, str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True", done.stdout


PAGE_FAULTS = """
import resource, sys, torch
from experiments.training.step import keep_freed_memory
if sys.argv[1] == "keep": assert keep_freed_memory()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(30): torch.ones(10_000_000)  # 对齐的块要试几次才找到稳定的位置
before = faults()
for _ in range(4): torch.ones(10_000_000)
print(faults() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not allocator_support()[0], reason=allocator_support()[1])
def test_kept_memory_stops_page_faults():
    """反复要一块 40 MB 的内存：默认每次都重新缺页，留住内存后不再缺页（少五十倍以上）。"""
    faults = {}
    for mode in ("default", "keep"):
        command = [sys.executable, "-c", PAGE_FAULTS, mode]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        faults[mode] = int(done.stdout)
    assert faults["default"] > 50 * max(faults["keep"], 1), faults


def test_fused_adamw_updates_like_the_plain_one():
    """融合的 AdamW 走三步，权重与逐个参数更新的相差不到 1e-6。"""
    weights = []
    for fused in (True, None):
        model = tiny()
        step = make_step(model, adamw(model, 1e-2, fused=fused), StepOptions())
        for _ in range(3):
            step(*batch(model, 2, 24))
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    gap = (weights[0] - weights[1]).abs().max().item()
    assert gap < 1e-6, f"相差 {gap:.1e}"


def test_clip_is_applied():
    """裁剪在快的一步里仍然生效：梯度范数被限制在 clip。"""
    model = tiny()
    x, y = batch(model, 2, 24)
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    options = StepOptions(fused_loss=True, one_exp=True)
    make_step(model, torch.optim.SGD(model.parameters(), lr=1.0), options, clip=0.01)(x, y)
    moved = (before - torch.cat([p.detach().flatten() for p in model.parameters()])).norm().item()
    assert moved == pytest.approx(0.01, rel=1e-3), f"走了 {moved}"


@pytest.mark.parametrize(
    ("missing", "switch"),
    [
        ("bf16_support", "bf16"),
        ("compile_support", "compile"),
        ("allocator_support", "keep_memory"),
    ],
)
def test_what_the_machine_lacks_is_left_out_and_said(monkeypatch, missing, switch):
    """没有 bf16 指令、编译器或 glibc 的机器：对应的开关关掉，理由交给读者。"""
    monkeypatch.setattr(step_module, missing, lambda *_: (False, "这台机器没有"))
    options, reasons = best_options()
    assert getattr(options, switch) is False
    assert any("这台机器没有" in reason for reason in reasons), reasons


@pytest.mark.slow
@pytest.mark.skipif(not compile_support()[0], reason=compile_support()[1])
@pytest.mark.parametrize("bf16", [False, pytest.param(True, marks=pytest.mark.skipif(
    not bf16_support()[0], reason=bf16_support()[1]))])  # fmt: skip
def test_compiled_step_gives_the_plain_step(bf16):
    """编译后的最快一步给出朴素的 loss 与梯度，包括奇数长度、batch 1 和有填充的目标。

    第二种形状连更新也编译，并用 max-autotune：梯子上试过的两级也要算得对。
    """
    torch._dynamo.reset()
    model = tiny()
    tried = {"compile_update": True, "compile_mode": "max-autotune-no-cudagraphs"}
    for size, length, more in ((1, 13, {}), (3, 24, tried)):
        x, y = batch(model, size, length, masked=0.3)
        fast = one_step(model, x, y, bf16=bf16, compile=True, **FASTEST, **more)
        tolerance = BF16_TOLERANCE if bf16 else FP32_TOLERANCE
        assert_close(fast, one_step(model, x, y), tolerance, f"bf16={bf16} B={size} T={length}")
