"""一步训练：前向、反向、裁剪、更新，以及让它更快的几个开关。

`speed` 一章逐个量这些开关，`scaling`、`speedrun` 用量出来最快的那一组；`train_gpu` 自己写循环，
只取其中三个函数：`compiled`、`one_exp_cross_entropy`、`keep_freed_memory`。
每个开关只改变怎么算，不改变算什么：`tests/test_step.py` 逐个与朴素的一步比较。

    options, reasons = best_options()
    step = make_step(model, optimizer, options)
    loss = step(x, y)                      # 走一步，返回这一步的 loss（标量张量）
"""

import ctypes
import math
import platform
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import MethodType
from typing import Literal

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.lab.hardware import bf16_support, compile_support
from experiments.training.cross_entropy import one_exp_cross_entropy
from model import EXPLICIT_MAX_LEN, GPT, Attention, SwiGLU, rotate


@dataclass(frozen=True)
class StepOptions:
    """一步怎么算。默认是朴素的一步：fp32、eager、完整的 logits。"""

    bf16: bool = False
    """矩阵乘法用 bf16（autocast）；权重、梯度、优化器状态仍是 fp32"""
    compile: bool = False
    """用 torch.compile 把逐元素的运算合并"""
    attention: Literal["model", "auto", "sdpa", "explicit"] = "model"
    """注意力怎么算；model 表示听模型自己的设置"""
    stored_mask: bool = False
    """显式注意力用存下来的掩码，缩放并进 Q（见 stored_mask_attention）；T 长时不起作用"""
    merged_mlp: bool = False
    """SwiGLU 的 gate 与 up 合成一次矩阵乘法"""
    fused_loss: bool = False
    """输出头与交叉熵合成一步（F.linear_cross_entropy）"""
    one_exp: bool = False
    """合成的交叉熵换成只算一遍 exp 的写法（见 one_exp_cross_entropy）；要先打开 fused_loss"""
    keep_memory: bool = False
    """释放的内存留在进程里，不还给系统（见 keep_freed_memory）；对整个进程生效"""
    compile_mode: str = "default"
    """torch.compile 的 mode，例如 max-autotune-no-cudagraphs"""
    compile_update: bool = False
    """裁剪与优化器的更新也编译；要求学习率不变，否则每变一次就重新编译"""


def best_options(device: str = "cpu") -> tuple[StepOptions, list[str]]:
    """这台机器上最快的一组开关，以及关掉某个开关的理由（说给读者听）。"""
    bf16, why_bf16 = bf16_support(device)
    compiles, why_compile = compile_support(device)
    keeps, why_keep = allocator_support()
    on_cpu = torch.device(device).type == "cpu"
    reasons = [] if bf16 else [f"不用 bf16：{why_bf16}"]
    if not compiles:
        reasons.append(f"不编译：{why_compile}")
    if on_cpu and not keeps:
        reasons.append(f"不调分配器：{why_keep}")
    options = StepOptions(
        bf16=bf16, compile=compiles, attention="auto", stored_mask=on_cpu, fused_loss=True,
        one_exp=on_cpu, keep_memory=on_cpu and keeps,
    )  # fmt: skip
    return options, reasons


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
    """造一个 `step(x, y)`：走一步并返回这一步的 loss（标量张量，不强迫同步）。

    x、y 是 (B, T) 的 int64，y 里的 −100 不计入 loss。`clip` 是梯度范数的上限。
    """
    device_type = next(model.parameters()).device.type
    parameters = list(model.parameters())
    if options.keep_memory:
        keep_freed_memory()
    if options.attention != "model":
        set_attention(model, options.attention)
    if options.stored_mask:
        store_masks(model)
    if options.merged_mlp:
        merge_mlps(model)
    fused_loss = one_exp_cross_entropy if options.one_exp else options.fused_loss
    forward, update = model, update_weights
    if options.compile:
        forward = compiled(model, options.compile_mode)
    if options.compile_update:
        update = torch.compile(update_weights)

    def step(x: Tensor, y: Tensor) -> Tensor:
        with autocast(options, device_type):
            _, loss = forward(x, y, fused_loss=fused_loss)
        loss.backward()
        update(parameters, optimizer, clip)
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def compiled(model: nn.Module, mode: str = "default") -> Callable:
    """`torch.compile`，并允许含有自定义反向（`_OneExp`）的图进磁盘缓存。

    默认不允许：那样每个进程都要把前向与反向重新追踪一遍，即使内核早已编译好。缓存的键是
    追踪到的整张图，自定义的前向与反向都在图里，改了它们就不会用到旧的。
    """
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    return torch.compile(model, mode=mode)


def update_weights(
    parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, clip: float
) -> None:
    """裁剪梯度，再更新一次。"""
    nn.utils.clip_grad_norm_(parameters, clip)
    optimizer.step()


def set_attention(model: nn.Module, attention: str) -> None:
    """把模型里每一层注意力的算法换成 `attention`；只改怎么算，不动权重。"""
    for module in model.modules():
        if isinstance(module, GPT):
            for block in module.blocks:
                block.attn.config = replace(block.attn.config, attention=attention)


# --- 存下掩码的注意力 ---


def store_masks(model: nn.Module) -> None:
    """让每一层短序列的注意力改用 `stored_mask_attention`；掩码只有一份，不进检查点。"""
    for module in model.modules():
        if isinstance(module, GPT):
            length = min(module.config.seq_len, EXPLICIT_MAX_LEN)
            mask = torch.full((length, length), -math.inf, device=module.rope.device).triu(1)
            for block in module.blocks:
                block.attn.register_buffer("mask", mask, persistent=False)
                block.attn.forward = MethodType(stored_mask_attention, block.attn)


def stored_mask_attention(self: Attention, x: Tensor, rope: Tensor) -> Tensor:
    """与 `Attention.forward` 相同的结果；T 太长或不用显式写法时就是它。

    掩码若写在算式里，编译出的内核会为 (B, H, T, T) 的每个元素重新比较一次行号与列号；
    存成 (T, T) 的张量，就只剩一次相加。1/√head_dim 乘在 Q 上：Q 比分数小，而且能与 RoPE 合并。
    """
    B, T, C = x.shape
    if T > self.mask.size(0) or self.config.attention == "sdpa" or not x.is_cpu:
        return Attention.forward(self, x, rope)
    q, k, v = self.qkv(x).view(B, T, 3, self.config.n_head, -1).permute(2, 0, 3, 1, 4)
    q, k = rotate(q, rope) * q.size(-1) ** -0.5, rotate(k, rope)
    scores = q @ k.transpose(-2, -1) + self.mask[:T, :T]  # (B, H, T, T)，fp32
    y = scores.softmax(dim=-1).to(v.dtype) @ v
    return self.out(y.transpose(1, 2).reshape(B, T, C))


# --- gate 与 up 合成一次乘法 ---


def merge_mlps(model: nn.Module) -> None:
    """让每一层的 SwiGLU 改用 `merged_mlp`；参数不变，仍是两个矩阵。"""
    for module in model.modules():
        if isinstance(module, SwiGLU):
            module.forward = MethodType(merged_mlp, module)


def merged_mlp(self: SwiGLU, x: Tensor) -> Tensor:
    """与 `SwiGLU.forward` 相同的结果：两个矩阵上下接起来，乘一次，再分开。"""
    gate, up = F.linear(x, torch.cat((self.gate.weight, self.up.weight))).chunk(2, dim=-1)
    return self.down(F.silu(gate) * up)


# --- 分配器 ---

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # <malloc.h>


def allocator_support() -> tuple[bool, str]:
    """能不能让分配器留住内存，以及理由；用的是 glibc 的 mallopt。"""
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return False, f"只有 glibc 有 mallopt，这里是 {sys.platform}"
    return True, "glibc 的 mallopt"


def keep_freed_memory() -> bool:
    """让 glibc 把释放的内存留在进程里；返回是否成功。对整个进程生效，可以重复调用。

    默认设置下，超过 32 MiB 的块每次都向系统要（mmap）、用完就还。新要来的每一页（4 KiB）
    第一次写入都会缺页，由内核清零：一份 2048×8192 的 bf16 logits 就是 8192 次缺页。
    训练的每一步要的内存都一样大，留着下一步再用就不再缺页；代价是进程不会变小。
    """
    if not allocator_support()[0]:
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: 2**31 - 1, _M_TOP_PAD: 64 << 20}
    return all([mallopt(name, value) == 1 for name, value in settings.items()])
