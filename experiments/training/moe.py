"""混合专家：把 GPT 每层的 SwiGLU 换成 E 个小专家和一个路由器，每个 token 只走其中 k 个。

    model = moe_gpt(GPTConfig(d_model=64, n_head=2, n_layer=2), Mixture(), seed=0)

路由：p = softmax(W·x)，取最大的 k 个；门 = p ÷ 这 k 个之和（Mixtral，arXiv 2401.04088）；
k = 1 时门就是 p（Switch，arXiv 2101.03961）：归一之后它恒为 1，路由器学不到东西。
容量上限与丢弃在 `experiments/expert_parallel.py`。
这里**没有**：共享专家、不用 loss 的均衡、把许多专家合成一次矩阵乘的内核。
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.training.recipe import seeded_gpt
from model import GPT, GPTConfig
from tokens.errors import UserError


@dataclass(frozen=True)
class Mixture:
    """一层里有几个专家、每个 token 走几个、每个专家多宽、均衡项的系数。"""

    experts: int = 8
    top_k: int = 2
    width: int = 80
    balance: float = 0.01

    def __post_init__(self) -> None:
        if self.experts < 1 or not 1 <= self.top_k <= self.experts or self.width < 1:
            raise UserError(
                f"{self.experts} 个专家、每个 token 走 {self.top_k} 个、宽 {self.width}："
                "要 1 ≤ top_k ≤ experts，宽至少 1；请改其中一个"
            )


def local_mix(moe: "MoE", x: Tensor, gates: Tensor, chosen: Tensor) -> Tensor:
    """定义：y = Σ_j 门_j · 专家_j(x)，全部专家都在这个进程里；x (n, d) → (n, d)。"""
    y = torch.zeros_like(x)
    for e in range(moe.mixture.experts):
        token, slot = torch.where(chosen == e)
        weighted = moe.expert(e, x[token]) * gates[token, slot, None]
        y = y.index_add(0, token, weighted)
    return y


class MoE(nn.Module):
    """E 个 SwiGLU 专家中的一段 `held` 和完整的路由器；`mix` 决定专家怎样被算到。"""

    def __init__(self, config: GPTConfig, mixture: Mixture, mix: Callable = local_mix) -> None:
        super().__init__()
        E, w, d = mixture.experts, mixture.width, config.d_model
        self.mixture, self.mix = mixture, mix
        self.replay: Tensor | None = None
        self.router = nn.Linear(d, E, bias=False)
        self.gate = nn.Parameter(torch.empty(E, w, d))
        self.up = nn.Parameter(torch.empty(E, w, d))
        self.down = nn.Parameter(torch.empty(E, d, w))
        for p in (self.router.weight, self.gate, self.up):
            nn.init.normal_(p, std=0.02)
        nn.init.normal_(self.down, std=0.02 / (2 * config.n_layer) ** 0.5)

    def keep(self, held: slice) -> None:
        """只留下 `held` 这一段专家：其余的参数、梯度、优化器状态这个进程都没有。"""
        for name in ("gate", "up", "down"):
            setattr(self, name, nn.Parameter(getattr(self, name).detach()[held].clone()))

    def expert(self, e: int, x: Tensor) -> Tensor:
        """手里的第 `e` 个专家：(n, d) → (n, d)；n 可以是 0，那时它的梯度是 0。"""
        hidden = F.silu(F.linear(x, self.gate[e])) * F.linear(x, self.up[e])
        return F.linear(hidden, self.down[e])

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (n, d) → 门 (n, k)、选中的专家 (n, k)、全部概率 (n, E)。

        给了 `replay` (n, k) 就照抄那一份选择，门仍由这里的概率算出。
        """
        probabilities = self.router(x).softmax(-1)
        if self.replay is None:
            gates, chosen = probabilities.topk(self.mixture.top_k, dim=-1)
        else:
            chosen = self.replay
            gates = probabilities.gather(-1, chosen)
        if self.mixture.top_k > 1:
            gates = gates / gates.sum(-1, keepdim=True)
        return gates, chosen, probabilities

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)  # (B·T, d)
        gates, chosen, probabilities = self.route(flat)
        self.chosen, self.probabilities = chosen, probabilities.detach()
        self.counts = torch.bincount(chosen.flatten(), minlength=self.mixture.experts)
        self.mass = probabilities.sum(0)  # (E,)，均衡项要它的梯度
        return self.mix(self, flat, gates, chosen).view_as(x)


def moe_gpt(config: GPTConfig, mixture: Mixture, seed: int, mix: Callable = local_mix) -> GPT:
    """由种子决定初始权重；与有几个进程、专家放在哪里无关。"""
    model = seeded_gpt(config, seed)
    for block in model.blocks:
        block.mlp = MoE(config, mixture, mix)
    return model


def moe_layers(model: nn.Module) -> Iterator[MoE]:
    """模型里的混合专家层，按先后。"""
    return (m for m in model.modules() if isinstance(m, MoE))


def balance_loss(model: nn.Module, positions: int, total: Callable = lambda t: t) -> Tensor:
    """均衡项 α·E·Σ_e f_e·P_e，各层相加（Switch，arXiv 2101.03961，式 4–6）。

    f_e 是派给专家 e 的比例（没有梯度），P_e 是它的平均概率，都对**全局** `positions` 个位置。
    `total` 把各进程的计数相加；P_e 对概率是线性的，所以各进程只放自己那一份，相加恰是全局的。
    """
    terms = []
    for moe in moe_layers(model):
        share = total(moe.counts) / (positions * moe.mixture.top_k)
        scale = moe.mixture.balance * moe.mixture.experts
        terms.append(scale * (share * moe.mass / positions).sum())
    return torch.stack(terms).sum()


def active_parameters(model: GPT) -> int:
    """一个 token 实际用到的参数：不是专家的全部，加上每层 k/E 的专家。"""
    idle = 0
    for moe in moe_layers(model):
        experts = sum(p.numel() for p in (moe.gate, moe.up, moe.down))
        idle += experts * (moe.mixture.experts - moe.mixture.top_k) // moe.mixture.experts
    return model.num_params() - idle
