"""μP：让最优的学习率与宽度无关的初始化与学习率（Yang 等 2022，arXiv 2203.03466，表 8）。

    run = WidthRun(d_model=256, parametrization="mup", lr=1e-2)
    model, optimizer = build(run, vocab_size=8192)

以宽度 `base_width` 的模型为准；一个矩阵的倍数 m = 它的输入宽度 ÷ 基准模型里同一个矩阵的：

    参数                     初始标准差      Adam 的学习率   权重衰减（AdamW）
    各层的矩阵               × 1/√m          × 1/m           × m
    词嵌入（也是输出头）     不变            不变            不变
    RMSNorm 的增益           1               不变            0

另外 logits 乘 1/m。m = 1 时（宽度等于基准）与标准的做法逐比特相同。`model.py` 一行不改。
这里**不**改注意力的 1/√head_dim：全书的头都是 32 维，变宽只是头变多，点积的长度没有变。
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from experiments.training.recipe import adamw, seeded_gpt
from experiments.training.small_run import SmallRun
from experiments.training.step import StepOptions, make_step
from model import GPT, GPTConfig
from tokens import sample_batch


@dataclass(frozen=True)
class WidthRun(SmallRun):
    """一次短训练，再加上参数化：宽度怎样进入初始化与学习率。"""

    parametrization: Literal["standard", "mup"] = "standard"
    base_width: int = 64  # μP 的基准宽度；标准的做法不用它


class DividedNorm(nn.RMSNorm):
    """最后的 RMSNorm，结果再除以 `divisor`。

    输出头是线性的，所以 logits 也除以它；写在这里，合成的交叉熵（不经过 logits）也照样除。
    """

    def __init__(self, width: int, eps: float, divisor: float) -> None:
        super().__init__(width, eps=eps)
        self.divisor = divisor

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.divisor


def multiples(model: GPT, base: GPTConfig) -> dict[str, float]:
    """{各层的矩阵的名字: 输入宽度 ÷ 基准模型里的}；词嵌入和增益不在其中。"""
    with torch.device("meta"):  # 只要形状，不分配内存
        shapes = {name: p.shape for name, p in GPT(base).blocks.named_parameters()}
    return {f"blocks.{name}": p.shape[1] / shapes[name][1]
            for name, p in model.blocks.named_parameters() if p.dim() == 2}  # fmt: skip


@torch.no_grad()
def apply_mup(model: GPT, base: GPTConfig) -> GPT:
    """把标准初始化的模型改成 μP 的（原地）：矩阵除以 √m，logits 除以 m。返回同一个模型。"""
    for name, m in multiples(model, base).items():
        model.get_parameter(name).div_(m**0.5)
    divisor = model.config.d_model / base.d_model
    model.norm = DividedNorm(model.config.d_model, model.config.norm_eps, divisor)
    return model


def mup_groups(model: GPT, base: GPTConfig, lr: float, weight_decay: float) -> list[dict]:
    """μP 的参数组：同一个倍数的矩阵一组，学习率 lr/m；词嵌入与增益的学习率不变。

    PyTorch 的 AdamW 每步把权重乘 (1 − 学习率 × 衰减)。学习率除以 m，衰减就要乘 m，
    这个因子才与宽度无关。
    """
    ratio = multiples(model, base)
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for n, p in named.items() if ratio.get(n) == m],
         "lr": lr / m, "weight_decay": weight_decay * m}
        for m in sorted(set(ratio.values()))
    ]  # fmt: skip
    rest = [p for n, p in named.items() if n not in ratio]
    return [
        *groups,
        {"params": [p for p in rest if p.dim() >= 2], "lr": lr, "weight_decay": weight_decay},
        {"params": [p for p in rest if p.dim() < 2], "lr": lr, "weight_decay": 0.0},
    ]


def build(run: WidthRun, vocab_size: int) -> tuple[GPT, torch.optim.AdamW]:
    """由 `run` 造一个模型和它的优化器；两种参数化从同一个种子的同一组随机数出发。"""
    model = seeded_gpt(run.config(vocab_size), run.seed)
    optimizer = adamw(model, run.lr, weight_decay=run.weight_decay)
    if run.parametrization == "standard":
        return model, optimizer
    base = WidthRun(d_model=run.base_width, n_layer=run.n_layer).config(vocab_size)
    apply_mup(model, base)
    optimizer = torch.optim.AdamW(mup_groups(model, base, run.lr, run.weight_decay),
                                  lr=run.lr, betas=(0.9, 0.95), fused=True)  # fmt: skip
    return model, optimizer


# ---------------------------------------------------------------- 坐标检查


def activations(model: GPT, idx: Tensor) -> dict[str, Tensor]:
    """一次前向里各处的输出：每层的注意力、前馈（加回残差流之前的），与 logits；不求梯度。"""
    found, hooks = {}, []
    for number, block in enumerate(model.blocks, start=1):
        for name, module in ((f"注意力 {number}", block.attn), (f"前馈 {number}", block.mlp)):
            hooks.append(module.register_forward_hook(
                lambda _m, _in, out, name=name: found.__setitem__(name, out.clone())))  # fmt: skip
    with torch.no_grad():
        logits = model(idx)[0]
    for hook in hooks:
        hook.remove()
    return found | {"logits": logits}


def changes_after(run: WidthRun, data: Mapping, steps: int) -> dict[str, float]:
    """坐标检查：在同一个 batch 上走 `steps` 步，各处的输出变了多少（逐元素差的均方根）。

    学习率不预热、不衰减，fp32、eager；batch 由种子决定，与宽度、参数化无关。
    """
    model, optimizer = build(run, data["meta"]["vocab_size"])
    generator = torch.Generator().manual_seed(run.seed)
    x, y = sample_batch(data["train"], run.batch_size, run.seq_len, generator)
    step = make_step(model, optimizer, StepOptions(), clip=run.clip)
    before = activations(model, x)
    for _ in range(steps):
        step(x, y)
    after = activations(model, x)
    return {name: (after[name] - before[name]).pow(2).mean().sqrt().item() for name in before}
