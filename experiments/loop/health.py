"""训练还好吗：loss、梯度与权重都要是有限的数，fp16 的缩放比例不能减到底；不好就停，不存坏的。"""

import math
from pathlib import Path

import torch
from torch import Tensor

from experiments.loop import checkpoint
from experiments.loop.parallel import local
from experiments.loop.run import Run

MIN_SCALE = 1e-3  # fp16 的损失缩放比例低于它就停


class Diverged(Exception):
    """loss 或梯度不是有限数；消息给出步数、数据位置和最后一个好的检查点。"""


def require_finite(run: Run, step: int, pair: Tensor, copied: torch.cuda.Event | None) -> None:
    """第 `step` 步的 (loss, 梯度范数) 有一个不是有限数就停；fp16 的溢出由 scaler 跳过，不算。"""
    if copied:
        copied.synchronize()
    values = pair.tolist()
    if all(map(math.isfinite, values[: 1 if run.scaler.is_enabled() else 2])):
        return
    first = step * run.options.global_batch_tokens // run.options.seq_len
    last = first + run.options.global_batch_tokens // run.options.seq_len - 1
    good = f"{Path(run.options.out_dir) / checkpoint.LAST}（第 {run.saved} 步）"
    raise Diverged(
        f"第 {step} 步的 loss 是 {values[0]}，梯度范数是 {values[1]}：停下，不存这一步。"
        f"数据位置：种子 {run.options.seed} 的第 {first}–{last} 个序列；最后一个好的检查点："
        f"{good if run.saved >= 0 else '还没有'}。可以从它续训，并调低 --lr 或检查这段数据。"
    )


def require_scale(run: Run) -> None:
    """fp16 的比例从 65536 一路减半到这么小：二十几步连着溢出，权重早已不再更新。"""
    if (scale := run.scaler.get_scale()) < MIN_SCALE:
        raise Diverged(f"到第 {run.step} 步，fp16 的梯度仍然每步溢出（比例已减到 {scale:.1e}），"
                       "权重没有更新；请调低 --lr，或用 --dtype bfloat16、float32。")  # fmt: skip


def require_finite_weights(run: Run) -> None:
    """有一个权重不是有限数就停：存下它，旧的好检查点就会被顶掉。每个进程都要调用。"""
    bad = not all(local(p).isfinite().all() for p in run.raw.parameters())
    if run.world.sum(torch.tensor(int(bad))).item():  # 切开时各进程只看得见自己的那一份
        raise Diverged(f"第 {run.step} 步之后的权重不是有限数：不存。最后存的是第 {run.saved} 步。")
