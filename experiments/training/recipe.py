"""几个实验共用的训练配方：学习率、参数分组、优化器、有效 token 的计数。

这里没有训练循环：怎样走一步在同一间的 `step.py`，完整的循环在 `experiments/train_gpu.py`。
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from model import GPT, IGNORE_INDEX, GPTConfig


def seeded_gpt(config: GPTConfig, seed: int, device: torch.device | str = "cpu") -> GPT:
    """由种子决定初始权重的模型：在 CPU 上初始化再搬走，所以与设备无关。"""
    torch.manual_seed(seed)
    return GPT(config).to(device)


def learning_rate(
    step: int, *, peak: float, warmup: int, total: int, floor_ratio: float = 0.1
) -> float:
    """第 `step` 步（从 0 数）的学习率：线性预热，余弦衰减，从 `total` 起保持 `floor_ratio·peak`。

    预热是 (step+1)/warmup，所以第一步就在学习（从 0 起步的那一步是白走）；
    之后的衰减进度是 (step − warmup)/(total − warmup)，截断在 [0, 1]：进度越界时余弦会折回，
    甚至给出负的学习率。`warmup=0` 表示不预热，`warmup ≥ total` 表示预热完直接到底。
    参数没有意义时抛出 ValueError。
    """
    if not (peak >= 0 and math.isfinite(peak)):
        raise ValueError(f"peak={peak}：学习率的峰值要是不小于 0 的有限数")
    if warmup < 0 or total < 0 or step < 0:
        raise ValueError(f"step={step}、warmup={warmup}、total={total}：都不能是负数")
    if not 0 <= floor_ratio <= 1:
        raise ValueError(f"floor_ratio={floor_ratio}：要在 0 与 1 之间")
    if step < warmup:
        return peak * (step + 1) / warmup
    decay_steps = total - warmup
    progress = min(1.0, (step - warmup) / decay_steps) if decay_steps > 0 else 1.0
    cosine = 0.5 * (1 + math.cos(math.pi * progress))  # 1 → 0
    return peak * (floor_ratio + (1 - floor_ratio) * cosine)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """两组参数：二维及以上的（矩阵、词嵌入）衰减，一维的（RMSNorm 的增益）不衰减。

    按 `p.dim()` 分而不按名字分：改名、加 `_orig_mod.` 前缀、换模型都不会分错。
    只收需要梯度的参数；共享的权重只出现一次。
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]


def adamw(
    model: nn.Module,
    lr: float,
    *,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.1,
    fused: bool | None = True,
) -> torch.optim.AdamW:
    """全书的 AdamW；`fused=True` 把所有参数的更新合进一次内核调用。"""
    return torch.optim.AdamW(
        parameter_groups(model, weight_decay), lr=lr, betas=betas, fused=fused
    )


def muon_and_adamw(
    model: nn.Module, lr: float, *, betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.1,
) -> list[torch.optim.Optimizer]:  # fmt: skip
    """`model.blocks` 里的矩阵归 Muon，词嵌入与增益仍归 AdamW；返回 [Muon, AdamW]。

    `match_rms_adamw` 把 Muon 的更新缩放到 AdamW 的大小，两者才能共用一条学习率曲线。
    """
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2 and p.requires_grad]
    taken = {id(p) for p in matrices}
    groups = parameter_groups(model, weight_decay)
    for group in groups:
        group["params"] = [p for p in group["params"] if id(p) not in taken]
    settings = {"weight_decay": weight_decay, "adjust_lr_fn": "match_rms_adamw"}
    muon = torch.optim.Muon(matrices, lr, **settings)
    return [muon, torch.optim.AdamW(groups, lr, betas=betas, fused=True)]


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """把学习率写进每一个参数组。"""
    for group in optimizer.param_groups:
        group["lr"] = lr


def valid_tokens(targets: Tensor | Iterable[Tensor]) -> int:
    """计入 loss 的 token 数（目标不是 −100）；累积时按它加权，而不是按微批个数。"""
    if isinstance(targets, Tensor):
        return int((targets != IGNORE_INDEX).sum())
    return sum(valid_tokens(t) for t in targets)


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """几个固定 batch 上的平均 loss（nat/token，按有效 token 加权）；前后切换 eval/train。"""
    was_training = model.training
    model.eval()
    total, count = 0.0, 0
    for x, y in batches:
        total += model(x, y, reduction="sum")[1].item()
        count += valid_tokens(y)
    model.train(was_training)
    if count == 0:
        raise ValueError("评估的 batch 里没有一个有效 token（目标全是 −100）")
    return total / count
