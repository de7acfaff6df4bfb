"""专家并行：一层的专家分放在各个进程，token 用 all-to-all 送过去算，再送回来。

    torchrun --standalone --nproc-per-node 4 experiments/expert_parallel.py   # 2 核约一分钟

依次证明：手写的分派与合并、换成 PyTorch 自己的可微 all-to-all，都与全部专家在一个进程里相同
（fp32 一步的梯度，fp64 训练 30 步的参数）；fp32 里几时有 token 因舍入换了专家，照抄单进程的路由
之后差又回到舍入误差；通信的次数与字节、各 rank 的参数、梯度与优化器状态，等于公式；定死容量时
丢掉几成；几种错误写法各错多少；有没有均衡项，各专家分到的 token 差多少。
结果写进 results/expert_parallel_*.csv。CPU 上用 gloo，2 个以上的进程，专家数要是进程数的倍数。
这里**没有**计算与通信的重叠，也没有速度：两个核上的时间不说明扩展性。
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

from experiments.lab.results import print_table, publish, run_main, save_csv
from experiments.ranks.compare import largest_difference, relative_error, relative_to_largest
from experiments.ranks.launch import shown
from experiments.ranks.traffic import Traffic
from experiments.ranks.world import World, torchrun_world
from experiments.training.moe import (
    Mixture,
    MoE,
    active_parameters,
    balance_loss,
    local_mix,
    moe_gpt,
    moe_layers,
)
from experiments.training.recipe import adamw, valid_tokens
from model import GPT, IGNORE_INDEX, GPTConfig
from tokens import Batch, global_batch, load_tokens
from tokens.errors import UserError

COMMAND = shown("experiments/expert_parallel.py", nproc=4)
EXPERTS = ("gate", "up", "down")
PRECISIONS = {"fp64": torch.float64, "fp32": torch.float32}
FACTORS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0)  # 量丢弃时试的容量系数


@dataclass(frozen=True)
class Options:
    """专家并行与单进程的等价、通信量、容量、均衡与错误用法。要由 torchrun 启动。"""

    steps: int = 30
    """与单进程比较时训练几步（次更新）"""
    rows: int = 8
    """全局 batch 有几个序列（个）"""
    seq_len: int = 64
    """序列长度（token）"""
    experts: int = 8
    """每层几个专家（个）"""
    top_k: int = 2
    """每个 token 走几个专家（个）"""
    width: int = 80
    """每个专家的宽度（维）"""
    balance_steps: int = 40
    """均衡一节训练几步（次更新）"""
    balance_rows: int = 16
    """均衡一节的全局 batch 有几个序列（个）：太少看不出偏向"""
    lr: float = 2e-3
    """学习率"""
    seed: int = 0
    """随机种子"""


# ---------------------------------------------------------------- 分派与合并


class AllToAll(torch.autograd.Function):
    """前向：把前 send[0] 行给 rank 0，接着 send[1] 行给 rank 1……；反向：原路送回。"""

    @staticmethod
    def forward(ctx, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        ctx.send, ctx.receive = send, receive
        arrived = rows.new_empty(sum(receive), rows.size(1))
        dist.all_to_all_single(arrived, rows.contiguous(), receive, send)
        return arrived

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        back = grad.new_empty(sum(ctx.send), grad.size(1))
        dist.all_to_all_single(back, grad.contiguous(), ctx.send, ctx.receive)
        return back, None, None


def there_and_back(
    moe: MoE, x: Tensor, chosen: Tensor, exchange: Callable = AllToAll.apply
) -> tuple[Tensor, Tensor]:
    """x (n, d)、chosen (n, k) → 专家算好的 n·k 行、次序：第 i 行属于第 order[i] // k 个 token。"""
    k, world = chosen.size(1), dist.get_world_size()
    # 一、按专家排好队：第 i 行是 token order[i] // k 的一份拷贝
    order = chosen.flatten().argsort(stable=True)
    counts = torch.bincount(chosen.flatten(), minlength=moe.mixture.experts)
    # 二、先说好各有几行：incoming[r, e] 是 rank r 给我的第 e 个专家的行数
    incoming = torch.empty_like(counts)
    dist.all_to_all_single(incoming, counts)
    incoming = incoming.view(world, -1)
    send, receive = counts.view(world, -1).sum(1).tolist(), incoming.sum(1).tolist()
    # 三、送过去；到手的先按来源、再按专家排，改成只按专家排
    rows = exchange(x[order // k], send, receive)
    local = torch.arange(incoming.size(1)).repeat(world).repeat_interleave(incoming.flatten())
    regroup = local.argsort(stable=True)
    queues = rows[regroup].split(incoming.sum(0).tolist())
    done = torch.cat([moe.expert(e, queue) for e, queue in enumerate(queues)])
    # 四、恢复到手时的次序，原路送回
    return exchange(done[regroup.argsort()], receive, send), order


def combine(returned: Tensor, order: Tensor, gates: Tensor) -> Tensor:
    """各行乘上自己的门，加到自己的 token 上：(n·k, d) → (n, d)。"""
    n, k = gates.shape
    weighted = returned * gates.flatten()[order, None]
    return returned.new_zeros(n, returned.size(1)).index_add(0, order // k, weighted)


def dispatch_and_combine(moe: MoE, x: Tensor, gates: Tensor, chosen: Tensor) -> Tensor:
    """专家分放在各 rank 时的 Σ_j 门_j · 专家_j(x)；x (n, d)，gates、chosen (n, k) → (n, d)。"""
    return combine(*there_and_back(moe, x, chosen), gates)


def library_exchange(rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
    """PyTorch 自己的可微 all-to-all，参数的次序是先收后发。"""
    return all_to_all_single_autograd(rows.contiguous(), receive, send, dist.group.WORLD)


def with_library(moe: MoE, x: Tensor, gates: Tensor, chosen: Tensor) -> Tensor:
    """同一个函数，只换掉 all-to-all。"""
    return combine(*there_and_back(moe, x, chosen, library_exchange), gates)


# ---------------------------------------------------------------- 定死容量


def place_in_queue(chosen: Tensor, experts: int) -> Tensor:
    """每一份排在它那个专家的第几个（从 0 数），先到先排；(n, k) → (n, k)。"""
    ones = F.one_hot(chosen.flatten(), experts)
    before = ones.cumsum(0).gather(1, chosen.flatten()[:, None]) - 1
    return before.view_as(chosen)


def slots_per_expert(factor: float, positions: int, mixture: Mixture, ranks: int) -> int:
    """每个 rank 给每个专家的位置数 C = ⌈系数 · 平均每个专家分到的份数⌉（GShard，2006.16668）。"""
    return math.ceil(factor * positions * mixture.top_k / (mixture.experts * ranks))


def with_capacity(moe: MoE, x: Tensor, gates: Tensor, chosen: Tensor, *, slots: int) -> Tensor:
    """每个 rank 给每个专家恰好 `slots` 个位置，不用先报行数；排不下的丢掉，贡献是 0。"""
    (n, k), E, d, world = chosen.shape, moe.mixture.experts, x.size(1), dist.get_world_size()
    place = place_in_queue(chosen, E).flatten()
    kept = (place < slots).nonzero().flatten()
    seat = chosen.flatten()[kept] * slots + place[kept]
    buffer = x.new_zeros(E * slots, d).index_copy(0, seat, x[kept // k])  # 空位是 0
    even = [E * slots // world] * world
    arrived = AllToAll.apply(buffer, even, even).view(world, E // world, slots, d)
    done = [moe.expert(e, arrived[:, e]) for e in range(E // world)]  # 各 (world, slots, d)
    returned = AllToAll.apply(torch.stack(done, 1).flatten(0, 2), even, even)[seat]
    weighted = returned * gates.flatten()[kept, None]
    return x.new_zeros(n, d).index_add(0, kept // k, weighted)


def local_with_capacity(
    moe: MoE, x: Tensor, gates: Tensor, chosen: Tensor, *, slots: int, ranks: int
) -> Tensor:
    """同样的丢弃，全部专家在一个进程里：x 分成 `ranks` 份，各排各的队。"""
    parts = chosen.tensor_split(ranks)
    kept = torch.cat([place_in_queue(part, moe.mixture.experts) < slots for part in parts])
    return local_mix(moe, x, gates * kept, chosen)


# ---------------------------------------------------------------- 一步


def held(experts: int, rank: int, world: int) -> slice:
    """rank 手里的一段专家；除不尽时抛 UserError。"""
    if experts % world:
        raise UserError(
            f"{experts} 个专家不能平分给 {world} 个进程：请让 --experts 是 {world} 的倍数"
        )
    return slice(rank * experts // world, (rank + 1) * experts // world)


def parallel_model(
    config: GPTConfig, mixture: Mixture, seed: int, me: World,
    mix: Callable = dispatch_and_combine,
) -> GPT:  # fmt: skip
    """每层只留自己那一段专家；其余的参数各进程都有一份。"""
    model, mine = moe_gpt(config, mixture, seed, mix), held(mixture.experts, me.rank, me.size)
    for moe in moe_layers(model):
        moe.keep(mine)
    return model


def is_expert(name: str) -> bool:
    """参数是不是专家的（`blocks.0.mlp.up`），而不是各进程都有一份的。"""
    return ".mlp." in name and name.rsplit(".", 1)[-1] in EXPERTS


def share_of(batch: Batch, me: World) -> Batch:
    """全局 batch 里自己的几行；除不尽时各进程的行数差一。"""
    return tuple(t.tensor_split(me.size)[me.rank] for t in batch)


def own_precision(hidden: Tensor, weight: Tensor, target: Tensor, **how) -> Tensor:
    """输出头与交叉熵，精度跟着模型走（`GPT.forward` 里的交叉熵总是 fp32）。"""
    return F.cross_entropy(F.linear(hidden, weight), target, **how)


def backward(model: GPT, batch: Batch, valid: int, positions: int, total: Callable) -> float:
    """本进程那几行对**全局** loss 的一份：除以全局的有效 token 数；返回这一份。"""
    x, y = batch
    loss = model(x, y, reduction="sum", fused_loss=own_precision)[1] / valid
    loss = loss + balance_loss(model, positions, total)
    loss.backward()
    return loss.item()


def alone_backward(model: GPT, batch: Batch) -> float:
    """全部专家、整个 batch 都在这个进程里；返回 loss。"""
    return backward(model, batch, valid_tokens(batch[1]), batch[0].numel(), lambda t: t)


def share_gradients(model: GPT) -> None:
    """只有共享的参数要 all-reduce；专家的梯度已由 all-to-all 的反向从各 rank 收齐。"""
    shared = [p.grad for name, p in model.named_parameters() if not is_expert(name)]
    flat = torch.cat([g.flatten() for g in shared])
    dist.all_reduce(flat)
    for g, total in zip(shared, flat.split([g.numel() for g in shared]), strict=True):
        g.copy_(total.view_as(g))


def parallel_backward(model: GPT, batch: Batch, me: World) -> float:
    """全局 batch 里自己的几行：反向，再把共享参数的梯度相加；返回自己那一份 loss。"""
    mine = share_of(batch, me)
    loss = backward(model, mine, valid_tokens(batch[1]), batch[0].numel(), me.sum)
    share_gradients(model)
    return loss


def whole(model: GPT, me: World | None, pick: Callable) -> Tensor:
    """各参数的 `pick(p)` 接成一个向量；专家的先从各 rank 收齐（`me` 为 None：都在这里）。"""
    parts = []
    for name, p in model.named_parameters():
        value = pick(p).detach().contiguous()
        if me is not None and is_expert(name):
            pieces = [torch.empty_like(value) for _ in range(me.size)]
            dist.all_gather(pieces, value)
            value = torch.cat(pieces)
        parts.append(value.flatten())
    return torch.cat(parts)


def gradients(p: Tensor) -> Tensor:
    return p.grad


def parameters(p: Tensor) -> Tensor:
    return p


# ---------------------------------------------------------------- 与单进程并排训练


@dataclass
class Learner:
    """一个模型和它的优化器；`replay` 表示照抄单进程的路由。"""

    model: GPT
    optimizer: torch.optim.Optimizer
    replay: bool = False

    def zero(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)


WAYS = {  # 名字 -> (怎样算, 照抄单进程的路由吗)
    "手写": (dispatch_and_combine, False), "PyTorch 的": (with_library, False),
    "手写，照抄路由": (dispatch_and_combine, True),
}  # fmt: skip


def follow(
    config: GPTConfig, mixture: Mixture, batches: list[Batch], lr: float, seed: int, me: World,
    precision: str, ways: tuple[str, ...],
) -> list[dict]:  # fmt: skip
    """单进程（在 rank 0）与各种写法并排训练，每步、每种写法一行；其余进程得到空表。"""
    dtype, splits = PRECISIONS[precision], {}
    model = moe_gpt(config, mixture, seed).to(dtype)
    alone, start, rows = Learner(model, adamw(model, lr)), whole(model, None, parameters), []
    for way in ways:
        mix, replay = WAYS[way]
        model = parallel_model(config, mixture, seed, me, mix).to(dtype)
        splits[way] = Learner(model, adamw(model, lr), replay)
    for step, batch in enumerate(batches, 1):
        right = alone_step(alone, batch) if me.master else {}
        for way, split in splits.items():
            got = split_step(split, batch, me, right.get("chosen"))
            if me.master:
                rows.append({"precision": precision, "way": way, "step": step}
                            | compared(got, right, start))  # fmt: skip
    return rows


def alone_step(learner: Learner, batch: Batch) -> dict:
    """走一步；返回 loss、梯度、更新后的参数、路由 (L, n, k)、第 k 与第 k+1 名的差 (L, n)。"""
    learner.zero()
    loss, layers = alone_backward(learner.model, batch), list(moe_layers(learner.model))
    seen = {"loss": loss, "gradients": whole(learner.model, None, gradients)}
    learner.optimizer.step()
    return seen | {
        "parameters": whole(learner.model, None, parameters),
        "chosen": torch.stack([m.chosen for m in layers]),
        "gap": torch.stack([runner_up_gap(m.probabilities, m.mixture.top_k) for m in layers]),
    }


def runner_up_gap(probabilities: Tensor, k: int) -> Tensor:
    """第 k 名比第 k+1 名多多少；(n, E) → (n,)。它小到舍入误差，这个位置就可能换专家。"""
    if k == probabilities.size(1):
        return probabilities.new_full(probabilities.shape[:1], math.inf)
    top = probabilities.topk(k + 1, dim=-1).values
    return top[:, k - 1] - top[:, k]


def split_step(learner: Learner, batch: Batch, me: World, chosen: Tensor | None) -> dict:
    """专家并行走一步；返回的与 `alone_step` 同样，已从各 rank 收齐。`chosen` 只有 rank 0 有。"""
    layers = list(moe_layers(learner.model))
    if learner.replay:
        rows, length = batch[0].shape
        if chosen is None:
            k = layers[0].mixture.top_k
            chosen = torch.empty(len(layers), rows * length, k, dtype=torch.long)
        dist.broadcast(chosen, src=0)
        by_row = chosen.unflatten(1, (rows, length))
        mine = by_row.tensor_split(me.size, dim=1)[me.rank].flatten(1, 2)
        for moe, replay in zip(layers, mine, strict=True):
            moe.replay = replay
    learner.zero()
    loss = parallel_backward(learner.model, batch, me)
    seen = {"loss": sum(me.gather(loss)), "gradients": whole(learner.model, me, gradients)}
    learner.optimizer.step()
    routed = me.gather(torch.stack([m.chosen for m in layers]))
    return seen | {"parameters": whole(learner.model, me, parameters),
                   "chosen": torch.cat(routed, 1)}  # fmt: skip


def compared(got: dict, right: dict, start: Tensor) -> dict:
    """一步的差：梯度、参数、loss，换了专家的位置有几个，其中概率相差最大的那个差多少。"""
    same = got["chosen"].sort(-1).values == right["chosen"].sort(-1).values
    flipped = ~same.all(-1)  # (L, n)
    counts = [torch.bincount(layer.flatten()) for layer in right["chosen"]]
    return {
        "grad_diff": relative_to_largest(got["gradients"], right["gradients"]),
        "param_diff": largest_difference(got["parameters"], right["parameters"]),
        "param_moved": largest_difference(right["parameters"], start),
        "loss_diff": abs(got["loss"] - right["loss"]),
        "flips": int(flipped.sum()), "positions": flipped.numel(),
        "gap": first_gap(flipped, right["gap"]),
        "busiest": int(max(c.max() for c in counts)),
    }  # fmt: skip


def first_gap(flipped: Tensor, gap: Tensor) -> float:
    """换了专家的位置里，概率之差最大的；(L, n)。

    只看有位置换了专家的最浅一层：换过之后，更深的层的输入已经不只差舍入误差。没有时是 nan。
    """
    for layer, gaps in zip(flipped, gap, strict=True):
        if layer.any():
            return gaps[layer].max().item()
    return math.nan


def summary(rows: list[dict]) -> list[dict]:
    """`follow` 的各行 → 每种写法一行：第一步的梯度，最后的参数，第一次换专家在第几步。"""
    found = []
    for key in dict.fromkeys((row["precision"], row["way"]) for row in rows):
        mine = [row for row in rows if (row["precision"], row["way"]) == key]
        first = next((row for row in mine if row["flips"]), None)
        calm = [r["param_diff"] for r in mine if first is None or r["step"] < first["step"]]
        found.append({
            "precision": key[0], "way": key[1], "steps": len(mine),
            "grad_diff": mine[0]["grad_diff"], "param_diff": mine[-1]["param_diff"],
            "param_moved": mine[-1]["param_moved"], "loss_diff": mine[-1]["loss_diff"],
            "flips": sum(row["flips"] for row in mine),
            "first_flip": first["step"] if first else 0,
            "flips_then": first["flips"] if first else 0,
            "gap": first["gap"] if first else math.nan, "before": calm[-1] if calm else 0.0,
        })  # fmt: skip
    return found


# ---------------------------------------------------------------- 数：字节与次数


def memory(config: GPTConfig, mixture: Mixture, batch: Batch, o: Options, me: World) -> list[dict]:
    """这个 rank 的参数、梯度、AdamW 状态各几个字节，旁边是公式与单进程的。"""
    model = parallel_model(config, mixture, o.seed, me)
    optimizer = adamw(model, o.lr)
    parallel_backward(model, batch, me)
    optimizer.step()
    everything = sum(p.numel() for p in moe_gpt(config, mixture, o.seed).parameters())
    experts = config.n_layer * mixture.experts * 3 * config.d_model * mixture.width
    mine = everything - experts + experts // me.size
    states = [t for s in optimizer.state.values() for t in s.values() if t.dim()]  # 步数是标量
    held_here = list(model.parameters())
    counted = {"参数": held_here, "梯度": [p.grad for p in held_here], "AdamW 的两个矩": states}
    return [{"what": what, "bytes": sum(t.nbytes for t in tensors), "formula": size * mine,
             "alone": size * everything}
            for (what, tensors), size in zip(counted.items(), (4, 4, 8), strict=True)]  # fmt: skip


def communication(
    config: GPTConfig, mixture: Mixture, batch: Batch, seed: int, me: World, mix: Callable
) -> list[dict]:
    """一步（前向加反向）里数到的通信，旁边是公式；每个 rank 各有一份，`rank` 列标明。

    每层 5 次 all-to-all：行数一次，前向去、回，反向去、回。这个 rank 有 n 个位置、收到 r 行，
    则放进去的字节是 8·E + 2·4·d·(n·k + r)；共享参数 all-reduce 4 字节一个，均衡项每层 E 个计数。
    """
    model = parallel_model(config, mixture, seed, me, mix)
    with Traffic() as traffic:
        parallel_backward(model, batch, me)
    E, d, layers = mixture.experts, config.d_model, config.n_layer
    assigned = share_of(batch, me)[0].numel() * mixture.top_k
    mine, received = held(E, me.rank, me.size), 0
    for moe in moe_layers(model):
        received += int(me.sum(moe.counts)[mine].sum())
    shared = sum(p.numel() for n, p in model.named_parameters() if not is_expert(n))
    formula = {
        "all_to_all": (5 * layers, 8 * E * layers + 8 * d * (assigned * layers + received)),
        "all_reduce": (1 + layers, 4 * shared + 8 * E * layers),
    }
    rows = [{"rank": me.rank, "received": received, "kind": kind, "calls": traffic.calls(kind),
             "calls_formula": calls, "bytes": traffic.payload(kind), "bytes_formula": size}
            for kind, (calls, size) in formula.items()]  # fmt: skip
    return sum(me.gather(rows), [])


def capacity(
    config: GPTConfig, mixture: Mixture, batch: Batch, seed: int, me: World,
    factors: tuple[float, ...] = (1.0, 2.0),
) -> list[dict]:  # fmt: skip
    """几个容量系数各一行：丢掉几成、通信与公式，与单进程里同样的丢弃、与不丢各差多少。"""
    rows, free = [], moe_gpt(config, mixture, seed)
    alone_backward(free, batch)
    for factor in factors:
        slots = slots_per_expert(factor, batch[0].numel(), mixture, me.size)
        same = partial(local_with_capacity, slots=slots, ranks=me.size)
        alone = moe_gpt(config, mixture, seed, same)
        alone_backward(alone, batch)
        split = parallel_model(config, mixture, seed, me, partial(with_capacity, slots=slots))
        with Traffic() as traffic:
            parallel_backward(split, batch, me)
        got, right = whole(split, me, gradients), whole(alone, None, gradients)
        rows.append({
            "factor": factor, "slots": slots, "dropped": dropped(split, slots, me),
            "calls": traffic.calls("all_to_all"), "calls_formula": 4 * config.n_layer,
            "bytes": traffic.payload("all_to_all"),
            "bytes_formula": 16 * config.n_layer * config.d_model * mixture.experts * slots,
            "grad_diff": relative_to_largest(got, right),
            "against_none": relative_error(right, whole(free, None, gradients)),
        })  # fmt: skip
    return rows


def dropped(model: GPT, slots: int, me: World) -> float:
    """刚走过的一步里，每个 rank 给每个专家 `slots` 个位置时丢掉的份数占几成（各层合计）。"""
    over, total = 0, 0
    for moe in moe_layers(model):
        over += int((place_in_queue(moe.chosen, moe.mixture.experts) >= slots).sum())
        total += moe.chosen.numel()
    return (me.sum(torch.tensor(over)) / me.sum(torch.tensor(total))).item()


# ---------------------------------------------------------------- 错误的写法与均衡


def detached_gates(moe: MoE, x: Tensor, gates: Tensor, chosen: Tensor) -> Tensor:
    """错：门不带梯度，路由器从 loss 里什么也学不到。"""
    return dispatch_and_combine(moe, x, gates.detach(), chosen)


def wrong_order(moe: MoE, x: Tensor, gates: Tensor, chosen: Tensor) -> Tensor:
    """错：送回来的行按专家排着，却当成还是 token 的次序来合并。"""
    returned, order = there_and_back(moe, x, chosen)
    return combine(returned, torch.arange(len(order)), gates)


PLANS = {
    "正确": dispatch_and_combine, "共享参数的梯度没有 all-reduce": dispatch_and_combine,
    "专家的梯度又除以 rank 数": dispatch_and_combine, "合并的次序错了": wrong_order,
    "门不带梯度": detached_gates,
}  # fmt: skip


def wrong_ways(
    config: GPTConfig, mixture: Mixture, batch: Batch, seed: int, me: World
) -> list[dict]:
    """几种写法的一步梯度，对单进程的相对误差；`router` 是路由器的梯度还剩多大（倍）。"""
    mixture = replace(mixture, balance=0.0)  # 均衡项也给路由器梯度，会掩盖断掉的门
    alone, rows = moe_gpt(config, mixture, seed), []
    alone_backward(alone, batch)
    right = whole(alone, None, gradients)
    expected = next(moe_layers(alone)).router.weight.grad.norm()
    for plan, mix in PLANS.items():
        model = parallel_model(config, mixture, seed, me, mix)
        backward(model, share_of(batch, me), valid_tokens(batch[1]), batch[0].numel(), me.sum)
        if not plan.startswith("共享参数"):
            share_gradients(model)
        if plan.startswith("专家的梯度"):
            for name, p in model.named_parameters():
                if is_expert(name):
                    p.grad /= me.size
        router = next(moe_layers(model)).router.weight.grad.norm()
        rows.append({"plan": plan, "error": relative_error(whole(model, me, gradients), right),
                     "router": (router / expected).item()})  # fmt: skip
    return rows


def balancing(
    config: GPTConfig, mixture: Mixture, data: Tensor, o: Options, me: World
) -> tuple[list[dict], list[dict]]:
    """有、没有均衡项各训练一遍：第一层每个专家每步分到几成；训练完之后各容量系数丢掉几成。"""
    shares, drops = [], []
    for alpha in (0.0, mixture.balance):
        model = parallel_model(config, replace(mixture, balance=alpha), o.seed, me)
        optimizer = adamw(model, o.lr)
        for step in range(1, o.balance_steps + 1):
            batch = global_batch(data, step, o.balance_rows, o.seq_len, o.seed)
            optimizer.zero_grad(set_to_none=True)
            parallel_backward(model, batch, me)
            optimizer.step()
            counts = me.sum(next(moe_layers(model)).counts)
            shares += [{"alpha": alpha, "step": step, "expert": e, "share": s}
                       for e, s in enumerate((counts / counts.sum()).tolist())]  # fmt: skip
        for factor in FACTORS:
            slots = slots_per_expert(factor, batch[0].numel(), mixture, me.size)
            drops.append({"alpha": alpha, "factor": factor, "dropped": dropped(model, slots, me)})
    return shares, drops


def milestones(shares: list[dict], every: int) -> list[dict]:
    """印给人看的几行：每隔几步，最忙与最闲的专家各占几成。"""
    rows = []
    for alpha, step in dict.fromkeys((r["alpha"], r["step"]) for r in shares):
        now = [r["share"] for r in shares if (r["alpha"], r["step"]) == (alpha, step)]
        if step == 1 or step % every == 0:
            rows.append({"alpha": alpha, "step": step, "busiest": max(now), "idlest": min(now)})
    return rows


# ---------------------------------------------------------------- 入口


def unequal(batch: Batch) -> Batch:
    """前一半的行只留 8 个目标：各 rank 的有效 token 数不同。"""
    targets = batch[1].clone()
    targets[: len(targets) // 2, 8:] = IGNORE_INDEX
    return batch[0], targets


def checked(o: Options, size: int) -> tuple[GPTConfig, Mixture]:
    """选项不对就抛 UserError，一句话说清给了什么、接受什么；对就返回模型的结构。"""
    for name in ("steps", "balance_steps", "seq_len"):
        if (value := getattr(o, name)) < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}：至少是 1")
    for name in ("rows", "balance_rows"):
        if (value := getattr(o, name)) < size or value % size:
            given = f"--{name.replace('_', '-')} {value}"
            raise UserError(f"{given}：要平分给 {size} 个进程，请用 {size} 的倍数")
    if not (math.isfinite(o.lr) and o.lr > 0):
        raise UserError(f"--lr {o.lr}：要一个大于 0 的有限数")
    mixture = Mixture(o.experts, o.top_k, o.width)
    held(o.experts, 0, size)
    return GPTConfig(d_model=64, n_head=2, n_layer=2, seq_len=o.seq_len), mixture


def main(o: Options) -> None:
    """加入进程组，依次运行每个小节；rank 0 打印表格并写 results/expert_parallel_*.csv。"""
    with torchrun_world(COMMAND) as me:
        config, mixture = me.together(lambda: checked(o, me.size))
        data = load_tokens(vocab_size=config.vocab_size)["train"]
        batches = [global_batch(data, s, o.rows, o.seq_len, o.seed) for s in range(o.steps)]
        batches[0] = unequal(batches[0])

        def say(name: str, title: str, rows: list[dict], hide: tuple[str, ...] = ()) -> None:
            if me.master:
                publish(f"expert_parallel_{name}", title, rows, o, formats=FORMATS, hide=hide)

        me.say(f"\n与单进程并排训练 {o.steps} 步，fp64 与 fp32 各一遍……")
        steps = follow(config, mixture, batches, o.lr, o.seed, me, "fp64", ("手写", "PyTorch 的"))
        steps += follow(config, mixture, batches, o.lr, o.seed, me, "fp32",
                        ("手写", "手写，照抄路由"))  # fmt: skip
        if me.master:
            save_csv(steps, "expert_parallel_steps", o)
        say("equivalence", "与全部专家在一个进程里比", summary(steps),
            hide=("steps", "param_moved", "flips_then", "before"))  # fmt: skip
        say("parameters", "参数，个", [{
            "total": (full := moe_gpt(config, mixture, o.seed)).num_params(),
            "active": active_parameters(full),
            "per_rank": parallel_model(config, mixture, o.seed, me).num_params()}])  # fmt: skip
        first = batches[0]
        say("memory", "每个 rank 的状态，字节", memory(config, mixture, first, o, me))
        say("communication", "一步里的通信，数到的与公式", communication(
            config, mixture, first, o.seed, me, dispatch_and_combine))  # fmt: skip
        say("capacity", "定死容量", capacity(config, mixture, first, o.seed, me))
        say("wrong", "错误的写法，一步的梯度", wrong_ways(config, mixture, first, o.seed, me))
        me.say(f"\n有、没有均衡项各训练 {o.balance_steps} 步……")
        shares, drops = balancing(config, mixture, data, o, me)
        if me.master:
            print("\n第一层各专家分到的比例")
            print_table(milestones(shares, max(1, o.balance_steps // 4)), FORMATS)
            save_csv(shares, "expert_parallel_balance", o)
        say("dropped", "训练之后，各容量系数丢掉的比例", drops)


FORMATS = {
    "grad_diff": "{:.1e}", "param_diff": "{:.1e}", "param_moved": "{:.3f}", "loss_diff": "{:.1e}",
    "gap": "{:.1e}", "before": "{:.1e}", "error": "{:.1e}", "against_none": "{:.1e}",
    "router": "{:.2f}", "busiest": "{:.1%}", "idlest": "{:.1%}", "dropped": "{:.1%}",
    **dict.fromkeys(("total", "active", "per_rank", "bytes", "bytes_formula", "formula", "alone",
                     "received"), "{:,}"),
}  # fmt: skip


if __name__ == "__main__":
    run_main(main, Options)
