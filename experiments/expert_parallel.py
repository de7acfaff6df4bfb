"""专家并行：一层的专家分放在各个进程，token 用 all-to-all 送过去算，再送回来。

    torchrun --standalone --nproc-per-node 4 experiments/expert_parallel.py   # 2 核 CPU 上约 30 秒

依次证明：手写的分派与合并，和全部专家在一个进程里的结果相同（一步的梯度，30 步之后的参数）；
换成 PyTorch 自己的可微 all-to-all 也相同；通信的次数与字节等于公式；几种错误写法各错多少；
有没有均衡项，各专家分到的 token 差多少。结果写进 results/expert_parallel_*.csv，全程 fp32。
这里**没有**容量上限与丢弃、计算与通信的重叠，也没有速度：两个核上的时间不说明扩展性。
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

from experiments.lab.results import publish, run_main
from experiments.ranks.compare import (
    largest_difference,
    relative_error,
    relative_to_largest,
)
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


@dataclass(frozen=True)
class Options:
    """专家并行与单进程的等价、通信量、均衡与错误用法。要由 torchrun 启动。"""

    steps: int = 30
    """训练几步（次更新）"""
    rows: int = 16
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
    lr: float = 3e-3
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


def by_library(rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
    """PyTorch 自己的可微 all-to-all，参数的次序是先收后发。"""
    return all_to_all_single_autograd(rows.contiguous(), receive, send, dist.group.WORLD)


def dispatch_and_combine(
    moe: MoE, x: Tensor, gates: Tensor, chosen: Tensor, exchange: Callable = AllToAll.apply
) -> Tensor:
    """专家分放在各 rank 时的 Σ_j 门_j · 专家_j(x)；x (n, d)，gates、chosen (n, k) → (n, d)。"""
    k, world = chosen.size(1), dist.get_world_size()
    # 一、按专家排好队：第 i 行是 (token order[i] // k) 的一份拷贝
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
    # 四、恢复到手时的次序，原路送回，乘上门，加到各自的 token 上
    returned = exchange(done[regroup.argsort()], receive, send)
    weighted = returned * gates.flatten()[order, None]
    return torch.zeros_like(x).index_add(0, order // k, weighted)


def with_library(moe: MoE, x: Tensor, gates: Tensor, chosen: Tensor) -> Tensor:
    """同一个函数，只换掉 all-to-all。"""
    return dispatch_and_combine(moe, x, gates, chosen, by_library)


# ---------------------------------------------------------------- 一步


def held(experts: int, rank: int, world: int) -> slice:
    """rank 手里的一段专家；除不尽时抛 UserError。"""
    if experts % world:
        raise UserError(
            f"{experts} 个专家不能平分给 {world} 个进程：请让 --experts 是 {world} 的倍数"
        )
    return slice(rank * experts // world, (rank + 1) * experts // world)


def parallel_model(
    config: GPTConfig, mixture: Mixture, seed: int, me: World, mix: Callable
) -> GPT:
    """每层只留自己那一段专家；其余的参数各进程都有一份。"""
    model, mine = moe_gpt(config, mixture, seed, mix), held(mixture.experts, me.rank, me.size)
    for moe in moe_layers(model):
        moe.keep(mine)
    return model


def is_expert(name: str) -> bool:
    """参数是不是专家的（`blocks.0.mlp.up`），而不是各进程都有一份的。"""
    return ".mlp." in name and name.rsplit(".", 1)[-1] in EXPERTS


def backward(model: GPT, batch: Batch, valid: int, positions: int, total: Callable) -> float:
    """本进程那几行对**全局** loss 的一份：除以全局的有效 token 数；返回这一份。"""
    x, y = batch
    loss = model(x, y, reduction="sum")[1] / valid + balance_loss(model, positions, total)
    loss.backward()
    return loss.item()


def share_gradients(model: GPT) -> None:
    """只有共享的参数要 all-reduce；专家的梯度已由 all-to-all 的反向从各 rank 收齐。"""
    shared = [p.grad for name, p in model.named_parameters() if not is_expert(name)]
    flat = torch.cat([g.flatten() for g in shared])
    dist.all_reduce(flat)
    for g, total in zip(shared, flat.split([g.numel() for g in shared]), strict=True):
        g.copy_(total.view_as(g))


def parallel_backward(model: GPT, batch: Batch, me: World) -> float:
    """全局 batch 里自己的几行：反向，再把共享参数的梯度相加；返回自己那一份 loss。"""
    rows = len(batch[0]) // me.size
    mine = tuple(t[me.rank * rows : (me.rank + 1) * rows] for t in batch)
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


# ---------------------------------------------------------------- 小节


def train_alone(
    config: GPTConfig, mixture: Mixture, batches: list[Batch], lr: float, seed: int
) -> dict:
    """全部专家在这个进程里，不用任何通信：起点、第一步的梯度、终点、每个专家的 token 数。"""
    model = moe_gpt(config, mixture, seed, local_mix)
    optimizer, seen = adamw(model, lr), {"start": whole(model, None, parameters)}
    for step, batch in enumerate(batches):
        optimizer.zero_grad(set_to_none=True)
        backward(model, batch, valid_tokens(batch[1]), batch[0].numel(), lambda t: t)
        if step == 0:
            seen["grad"] = whole(model, None, gradients)
            seen["counts"] = torch.stack([m.counts for m in moe_layers(model)])
        optimizer.step()
    return seen | {"end": whole(model, None, parameters)}


def equivalence(
    config: GPTConfig, mixture: Mixture, batches: list[Batch], lr: float, seed: int,
    me: World, mixes: dict[str, Callable],
) -> list[dict]:  # fmt: skip
    """每种 all-to-all 一行：第一步的梯度、训练完的参数，与单进程（由 rank 0 算）差多少。"""
    right = train_alone(config, mixture, batches, lr, seed) if me.master else None
    rows = []
    for how, mix in mixes.items():
        split = parallel_model(config, mixture, seed, me, mix)
        optimizer = adamw(split, lr)
        for step, batch in enumerate(batches):
            optimizer.zero_grad(set_to_none=True)
            parallel_backward(split, batch, me)
            if step == 0:
                grad = whole(split, me, gradients)
            optimizer.step()
        end = whole(split, me, parameters)
        if right:
            rows.append({
                "all_to_all": how, "ranks": me.size, "steps": len(batches),
                "grad_diff": relative_to_largest(grad, right["grad"]),
                "largest_grad": right["grad"].abs().max().item(),
                "fewest_tokens": right["counts"].min().item(),
                "most_tokens": right["counts"].max().item(),
                "param_moved": largest_difference(right["end"], right["start"]),
                "param_diff": largest_difference(end, right["end"]),
            })  # fmt: skip
    return rows


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
    assigned = batch[0].numel() // me.size * mixture.top_k
    mine, received = held(E, me.rank, me.size), 0
    for moe in moe_layers(model):
        received += int(me.sum(moe.counts)[mine].sum())
    shared = sum(p.numel() for n, p in model.named_parameters() if not is_expert(n))
    formula = {
        "all_to_all": (5 * layers, 8 * E * layers + 8 * d * (assigned * layers + received)),
        "all_reduce": (1 + layers, 4 * shared + 8 * E * layers),
    }
    rows = [{"rank": me.rank, "kind": kind, "calls": traffic.calls(kind), "calls_formula": calls,
             "bytes": traffic.payload(kind), "bytes_formula": size}
            for kind, (calls, size) in formula.items()]  # fmt: skip
    return sum(me.gather(rows), [])


def detached_gates(moe: MoE, x: Tensor, gates: Tensor, chosen: Tensor) -> Tensor:
    """错：门不带梯度，路由器从 loss 里什么也学不到。"""
    return dispatch_and_combine(moe, x, gates.detach(), chosen)


def wrong_order(moe: MoE, x: Tensor, gates: Tensor, chosen: Tensor) -> Tensor:
    """错：送回来的行按专家排着，却当成还是 token 的次序来合并。"""
    straight = torch.arange(chosen.numel()).view_as(chosen)
    out = dispatch_and_combine(moe, x, torch.ones_like(gates), chosen)
    order = chosen.flatten().argsort(stable=True)
    shuffled = out[order // chosen.size(1)] * gates.flatten()[straight.flatten(), None]
    return torch.zeros_like(x).index_add(0, straight.flatten() // chosen.size(1), shuffled)


def wrong_ways(
    config: GPTConfig, mixture: Mixture, batch: Batch, seed: int, me: World
) -> list[dict]:
    """几种写法的一步梯度，对单进程的相对误差；`router` 是路由器的梯度还剩多大（倍）。"""
    mixture = replace(mixture, balance=0.0)  # 均衡项也给路由器梯度，会掩盖断掉的门
    right_model = moe_gpt(config, mixture, seed)
    backward(right_model, batch, valid_tokens(batch[1]), batch[0].numel(), lambda t: t)
    right = whole(right_model, None, gradients)
    expected = right_model.blocks[0].mlp.router.weight.grad.norm()
    rows = []
    plans = {"正确": dispatch_and_combine, "共享参数的梯度没有 all-reduce": dispatch_and_combine,
             "专家的梯度又除以 rank 数": dispatch_and_combine, "门不带梯度": detached_gates,
             "合并的次序错了": wrong_order}  # fmt: skip
    for plan, mix in plans.items():
        model = parallel_model(config, mixture, seed, me, mix)
        size = len(batch[0]) // me.size
        mine = tuple(t[me.rank * size : (me.rank + 1) * size] for t in batch)
        backward(model, mine, valid_tokens(batch[1]), batch[0].numel(), me.sum)
        if not plan.startswith("共享参数"):
            share_gradients(model)
        if plan.startswith("专家的梯度"):
            for name, p in model.named_parameters():
                if is_expert(name):
                    p.grad /= me.size
        router = model.blocks[0].mlp.router.weight.grad.norm()
        rows.append({"plan": plan, "error": relative_error(whole(model, me, gradients), right),
                     "router": (router / expected).item()})  # fmt: skip
    return rows


def balancing(
    config: GPTConfig, mixture: Mixture, data: Tensor, o: Options, me: World
) -> list[dict]:
    """有、没有均衡项各训练一遍：第一层每个专家每步分到的 token 占几成。"""
    rows = []
    for alpha in (0.0, mixture.balance):
        model = parallel_model(config, replace(mixture, balance=alpha), o.seed, me,
                               dispatch_and_combine)  # fmt: skip
        optimizer = adamw(model, o.lr)
        for step in range(o.balance_steps):
            batch = global_batch(data, step, o.rows, o.seq_len, o.seed)
            optimizer.zero_grad(set_to_none=True)
            parallel_backward(model, batch, me)
            optimizer.step()
            counts = me.sum(next(moe_layers(model)).counts)
            shares = (counts / counts.sum()).tolist()
            rows += [{"alpha": alpha, "step": step, "expert": e, "share": s}
                     for e, s in enumerate(shares)]  # fmt: skip
            if step % 20 == 19:
                me.say(f"均衡项 {alpha:g}：第 {step + 1} 步，最忙的专家占 {max(shares):.0%}")
    return rows


def unequal(batch: Batch) -> Batch:
    """前一半的行只留 8 个目标：各 rank 的有效 token 数不同。"""
    targets = batch[1].clone()
    targets[: len(targets) // 2, 8:] = IGNORE_INDEX
    return batch[0], targets


def main(o: Options) -> None:
    """加入进程组，依次运行每个小节；rank 0 打印表格并写 results/expert_parallel_*.csv。"""
    config = GPTConfig(d_model=64, n_head=2, n_layer=2, seq_len=o.seq_len)
    mixture = Mixture(o.experts, o.top_k, o.width)
    with torchrun_world(COMMAND) as me:
        held(o.experts, me.rank, me.size)
        if o.rows < me.size or o.rows % me.size or min(o.steps, o.balance_steps) < 1:
            raise UserError(f"--rows {o.rows} 要是进程数 {me.size} 的倍数，步数至少是 1")
        data = load_tokens(vocab_size=config.vocab_size)["train"]
        batches = [global_batch(data, s, o.rows, o.seq_len, o.seed) for s in range(o.steps)]

        def say(name: str, title: str, rows: list[dict], every: int = 1) -> None:
            if me.master:
                publish(f"expert_parallel_{name}", title, rows, o, formats=FORMATS, every=every)

        full, split = (
            moe_gpt(config, mixture, o.seed),
            parallel_model(config, mixture, o.seed, me, local_mix),
        )
        say("parameters", "参数（个）", [{
            "total": full.num_params(), "active": active_parameters(full),
            "per_rank": split.num_params()}])  # fmt: skip
        say("communication", "一步里的通信，数到的与公式", communication(
            config, mixture, batches[0], o.seed, me, dispatch_and_combine))  # fmt: skip
        say("wrong", "错误的写法，一步的梯度", wrong_ways(
            config, mixture, unequal(batches[0]), o.seed, me))  # fmt: skip
        say("balance", "各专家分到的比例", balancing(config, mixture, data, o, me),
            every=20 * o.experts)  # fmt: skip
        me.say(f"与单进程各训练 {o.steps} 步……")
        seen = [unequal(batches[0]), *batches[1:]]
        mixes = {"手写": dispatch_and_combine, "PyTorch 的": with_library}
        say("equivalence", "与全部专家在一个进程里比", equivalence(
            config, mixture, seen, o.lr, o.seed, me, mixes))  # fmt: skip


FORMATS = {
    "grad_diff": "{:.1e}", "largest_grad": "{:.3f}", "param_moved": "{:.3f}",
    "param_diff": "{:.1e}", "error": "{:.1e}", "router": "{:.2f}", "share": "{:.3f}",
}  # fmt: skip


if __name__ == "__main__":
    run_main(main, Options)
