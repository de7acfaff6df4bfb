"""一步训练：前向、反向、裁剪、更新，以及让它更快的几个开关。

`speed` 一章逐个量这些开关，`scaling`、`speedrun`、`train_gpu` 用量出来最快的那一组。
每个开关只改变怎么算，不改变算什么：`tests/test_step.py` 逐个与朴素的一步比较。
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from experiments.hardware import bf16_support, compile_support


@dataclass(frozen=True)
class StepOptions:
    """一步怎么算。默认是朴素的一步：fp32、eager、完整的 logits。"""

    bf16: bool = False
    compile: bool = False
    fused_loss: bool = False


def best_options(device: str = "cpu") -> tuple[StepOptions, list[str]]:
    """这台机器上最快的一组开关，以及关掉某个开关的理由（说给读者听）。"""
    reasons = []
    bf16, why_bf16 = bf16_support(device)
    compiles, why_compile = compile_support()
    if not bf16:
        reasons.append(f"不用 bf16：{why_bf16}")
    if not compiles:
        reasons.append(f"不编译：{why_compile}")
    return StepOptions(bf16=bf16, compile=compiles, fused_loss=True), reasons


def autocast(options: StepOptions, device_type: str = "cpu"):
    """bf16 的 autocast，或什么也不做。"""
    if options.bf16:
        return torch.autocast(device_type, dtype=torch.bfloat16)
    return nullcontext()


def make_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    options: StepOptions,
    *,
    clip: float = 1.0,
) -> Callable[[Tensor, Tensor], Tensor]:
    """造一个 `step(x, y)`：走一步并返回这一步的 loss（标量张量，不强迫同步）。"""
    device_type = next(model.parameters()).device.type
    forward = torch.compile(model) if options.compile else model

    def step(x: Tensor, y: Tensor) -> Tensor:
        with autocast(options, device_type):
            _, loss = forward(x, y, fused_loss=options.fused_loss)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step
