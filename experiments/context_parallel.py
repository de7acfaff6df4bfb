"""上下文并行：一条长序列切给几个 rank，注意力绕环或换头算，梯度与单进程相同。

    torchrun --standalone --nproc-per-node 4 experiments/context_parallel.py   # 2 核约 20 秒

依次证明：手写的环形注意力（online softmax，k、v 绕一圈；反向 dk、dv 也绕一圈）、Ulysses 的
all-to-all、以及用 PyTorch 自带的可求导集体通信写的两种，都与单进程相同；连续切与 zigzag 切时
每个 rank 在因果掩码下各算多少；一步的通信与激活等于公式；三个陷阱各错多少：RoPE 的位置在每份里
从 0 重数、每份的最后一个 token 没有目标、各份先平均再平均。T 除不尽时在末尾补上不计 loss 的位置。
结果写进 results/context_parallel_*.csv。

全程在 CPU 上用 gloo，fp32 eager。几个进程共用两个核，时间说明不了扩展性，这里只数次数与字节。
这里**没有**把通信藏在计算底下，也没有融合的注意力核：真实的实现每一圈调用 FlashAttention。
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

from experiments.lab.results import publish, run_main
from experiments.ranks.compare import (
    flat_gradients,
    flat_parameters,
    largest_difference,
    relative_error,
    relative_to_largest,
)
from experiments.ranks.launch import shown
from experiments.ranks.traffic import Traffic
from experiments.ranks.world import World, torchrun_world
from experiments.training.recipe import adamw, seeded_gpt, valid_tokens
from experiments.training.saved import saved_for_backward
from model import GPT, IGNORE_INDEX, Attention, GPTConfig, explicit_attention, rotate
from tokens import Batch, global_batch, load_tokens
from tokens.errors import UserError

COMMAND = shown("experiments/context_parallel.py", nproc=4)
Core = Callable[[Tensor, Tensor, Tensor], Tensor]  # (q, k, v) -> 结果，各 (B, H, t, head_dim)


@dataclass(frozen=True)
class Options:
    """上下文并行：环、zigzag、Ulysses，通信与激活，几个陷阱。由 torchrun 启动，2 或 4 个进程。"""

    rows: int = 2
    """一步几个序列（个）"""
    steps: int = 30
    """与单进程比较时训练几步（次更新）"""
    lr: float = 3e-3
    """学习率"""
    d_model: int = 64
    """模型宽度（维）"""
    n_head: int = 4
    """注意力头数（个）"""
    n_layer: int = 2
    """层数（层）"""
    seq_len: int = 256
    """序列长度（token）"""
    seed: int = 0
    """随机种子"""


# ---------------------------------------------------------------- 谁拿哪些位置


def positions_of(layout: str, rank: int, size: int, length: int) -> Tensor:
    """`rank` 拿到的位置（升序）。contiguous：连续的一段；zigzag：切成 2·size 块，拿一头一尾两块。

    `length` 要能被 size（zigzag 是 2·size）整除：先用 `padded` 补齐。
    """
    parts = torch.arange(length).chunk(size if layout == "contiguous" else 2 * size)
    if len({len(p) for p in parts}) > 1 or len(parts) % size:
        raise ValueError(f"{length} 个位置不能平分：先补齐")
    if layout == "contiguous":
        return parts[rank]
    return torch.cat((parts[rank], parts[2 * size - 1 - rank]))


def padded(batch: Batch, multiple: int) -> Batch:
    """末尾补到 `multiple` 的倍数：目标是 −100，不计 loss；因果掩码下前面的位置看不见它们。"""
    extra = -batch[0].size(1) % multiple
    return F.pad(batch[0], (0, extra)), F.pad(batch[1], (0, extra), value=IGNORE_INDEX)


# ---------------------------------------------------------------- 环形注意力，手写


def pass_on(tensor: Tensor, me: World) -> Tensor:
    """发给右邻，收左邻的；`batch_isend_irecv` 把一收一发一起发起，不会互相等死。"""
    if me.size == 1:
        return tensor
    box, right, left = torch.empty_like(tensor), (me.rank + 1) % me.size, (me.rank - 1) % me.size
    ops = [dist.P2POp(dist.isend, tensor, right), dist.P2POp(dist.irecv, box, left)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return box


def pairs(here: Tensor, there: Tensor, halves: int) -> list[tuple[slice, slice, Tensor]]:
    """要算的小块：(q 的切片, k 的切片, 掩码)；q 全在 k 之前的小块整块是未来，跳过。"""
    t, blocks = len(here) // halves, []
    cuts = [slice(i * t, (i + 1) * t) for i in range(halves)]
    for a in cuts:
        for b in cuts:
            if here[a][-1] >= there[b][0]:
                blocks.append((a, b, here[a][:, None] < there[b]))  # True 是未来
    return blocks


class Ring(torch.autograd.Function):
    """softmax(QKᵀ)V，k、v 在环上转（Liu 等 2023，arXiv 2310.01889）；输入各 (B, H, t, head_dim)。

    前向只留 q、k、v、结果与每行的 log-sum-exp，不留 (t, T) 的概率：反向再算一遍。
    """

    @staticmethod
    def forward(ctx, q, k, v, me: World, places: list[Tensor], halves: int) -> Tensor:
        scale, kv = q.size(-1) ** -0.5, torch.stack((k, v))
        top = q.new_full((*q.shape[:-1], 1), -math.inf)  # 每行到目前为止最大的分数
        total, out = torch.zeros_like(top), torch.zeros_like(q)
        for step in range(me.size):
            there = places[(me.rank - step) % me.size]  # 手里的 k、v 是谁的
            for a, b, future in pairs(places[me.rank], there, halves):
                scores = (q[..., a, :] @ kv[0][..., b, :].mT * scale).masked_fill(future, -math.inf)
                new = torch.maximum(top[..., a, :], scores.amax(-1, keepdim=True))
                p, shrink = (scores - new).exp(), (top[..., a, :] - new).exp()
                total[..., a, :] = total[..., a, :] * shrink + p.sum(-1, keepdim=True)
                out[..., a, :] = out[..., a, :] * shrink + p @ kv[1][..., b, :]
                top[..., a, :] = new
            kv = pass_on(kv, me) if step < me.size - 1 else kv
        out = out / total
        ctx.save_for_backward(q, k, v, out, top + total.log())
        ctx.rest = me, places, halves
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        (q, k, v, out, lse), (me, places, halves) = ctx.saved_tensors, ctx.rest
        scale, kv = q.size(-1) ** -0.5, torch.stack((k, v))
        dq, dkv = torch.zeros_like(q), torch.zeros_like(kv)
        inner = (grad * out).sum(-1, keepdim=True)  # softmax 的反向里每行的那个和
        for step in range(me.size):
            there = places[(me.rank - step) % me.size]
            for a, b, future in pairs(places[me.rank], there, halves):
                ka, va, g = kv[0][..., b, :], kv[1][..., b, :], grad[..., a, :]
                scores = (q[..., a, :] @ ka.mT * scale).masked_fill(future, -math.inf)
                p = (scores - lse[..., a, :]).exp()
                ds = p * (g @ va.mT - inner[..., a, :]) * scale
                dq[..., a, :] += ds @ ka
                dkv[0][..., b, :] += ds.mT @ q[..., a, :]
                dkv[1][..., b, :] += p.mT @ g
            kv = pass_on(kv, me) if step < me.size - 1 else kv
            dkv = pass_on(dkv, me)  # 比 kv 多走一步：转满一圈，回到主人手里
        return dq, dkv[0], dkv[1], None, None, None


def ring(q: Tensor, k: Tensor, v: Tensor, *, me: World, places: list[Tensor], halves: int
         ) -> Tensor:  # fmt: skip
    """`Ring` 的函数写法；`places` 是各 rank 的位置，`halves` 是每份由几段连续的位置组成。"""
    return Ring.apply(q, k, v, me, places, halves)


# ---------------------------------------------------------------- Ulysses：换头，手写


class Swap(torch.autograd.Function):
    """all-to-all：第 `cut` 维切成 W 份发给各 rank，收到的沿第 `join` 维接起来；反向是倒着换。"""

    @staticmethod
    def forward(ctx, x: Tensor, cut: int, join: int, size: int) -> Tensor:
        ctx.how = join, cut, size
        send = torch.stack(x.chunk(size, dim=cut))
        received = torch.empty_like(send)
        dist.all_to_all_single(received, send)
        return torch.cat(received.unbind(), dim=join)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return Swap.apply(grad.contiguous(), *ctx.how), None, None, None


def ulysses(q: Tensor, k: Tensor, v: Tensor, *, me: World) -> Tensor:
    """每个 rank 从「全部头、一段序列」换成「几个头、整条序列」，算完换回来（arXiv 2309.14509）。"""
    qkv = Swap.apply(torch.stack((q, k, v)), 2, 3, me.size)  # (3, B, H/W, T, head_dim)
    return Swap.apply(explicit_attention(*qkv), 2, 1, me.size)


# ---------------------------------------------------------------- PyTorch 自带的可求导集体通信


def library_ulysses(q: Tensor, k: Tensor, v: Tensor, *, me: World) -> Tensor:
    """同 `ulysses`，换头用 PyTorch 的 all_to_all_single_autograd。"""

    def swap(x: Tensor, cut: int, join: int) -> Tensor:
        send = torch.stack(x.chunk(me.size, dim=cut)).contiguous()
        got = funcol.all_to_all_single_autograd(send, None, None, dist.group.WORLD)
        return torch.cat(got.unbind(), dim=join)

    qkv = swap(torch.stack((q, k, v)), 2, 3)
    return swap(explicit_attention(*qkv), 2, 1)


def library_gather(q: Tensor, k: Tensor, v: Tensor, *, me: World, places: list[Tensor]) -> Tensor:
    """Llama 3 的办法：把 k、v 收齐再算自己的 q；反向的 reduce-scatter 由 PyTorch 做。"""
    mine = torch.stack((k, v))
    both = funcol.all_gather_single_autograd(mine.contiguous(), 0, dist.group.WORLD)
    both = torch.cat(both.view(me.size, *mine.shape).unbind(), dim=3)
    future = places[me.rank][:, None] < torch.cat(places)
    scores = (q @ both[0].mT * q.size(-1) ** -0.5).masked_fill(future, -math.inf)
    return scores.softmax(-1) @ both[1]


def refused_by_pytorch(me: World) -> str:
    """PyTorch 的 context_parallel 在 CPU 上对要梯度的张量怎么说（第一行）；竟然能用则是空串。"""
    mesh = init_device_mesh("cpu", (me.size,))
    q, k, v = (torch.randn(1, 2, 8 * me.size, 8, requires_grad=True) for _ in range(3))
    try:
        with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
            F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    except Exception as error:  # 拒绝的方式随版本而变，这里只转述
        return f"{type(error).__name__}：{(str(error).splitlines() or [''])[0][:90]}"
    return ""


# ---------------------------------------------------------------- 装进模型


class SplitAttention(Attention):
    """与 `Attention` 同样的参数，只把注意力那一步换成 `core`。"""

    core: Core

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        B, t, C = x.shape
        qkv = self.qkv(x).view(B, t, 3, self.config.n_head, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = self.core(rotate(q, rope), rotate(k, rope), v)
        return self.out(y.transpose(1, 2).reshape(B, t, C))


# 名字 -> (怎样切, 怎样算)
WAYS = {
    "环，连续": "contiguous", "环，zigzag": "zigzag", "Ulysses": "contiguous",
    "PyTorch 的 all-to-all": "contiguous", "PyTorch 的 all-gather": "zigzag",
}  # fmt: skip


class Split:
    """一个模型按 `way` 切序列：各 rank 的位置，以及装好了对应注意力的模型。"""

    def __init__(self, model: GPT, way: str, me: World, length: int) -> None:
        self.model, self.me, self.layout = model, me, WAYS[way]
        self.multiple = me.size * (2 if self.layout == "zigzag" else 1)
        total = math.ceil(length / self.multiple) * self.multiple
        places = [positions_of(self.layout, r, me.size, total) for r in range(me.size)]
        self.places, self.mine, halves = places, places[me.rank], self.multiple // me.size
        core = {
            "Ulysses": partial(ulysses, me=me),
            "PyTorch 的 all-to-all": partial(library_ulysses, me=me),
            "PyTorch 的 all-gather": partial(library_gather, me=me, places=places),
        }.get(way, partial(ring, me=me, places=places, halves=halves))
        if "all-to-all" in way or way == "Ulysses":
            check_heads(model.config.n_head, me.size)
        for block in model.blocks:  # 换类不换参数
            block.attn.__class__ = SplitAttention
            block.attn.core = core

    def loss(self, batch: Batch, *, restart: bool = False, mean_first: bool = False,
             late_targets: bool = False) -> Tensor:  # fmt: skip
        """这个 rank 的份额：自己的 loss 之和 ÷ **全体**的有效 token 数，相加就是整批的 loss。

        三个开关都是错的用法：位置从 0 重数；先各自平均；切开之后才错一位取目标。
        """
        x, y = padded(batch, self.multiple)
        x, y = x[:, self.mine], y[:, self.mine]
        if late_targets:  # 在自己那一份里错一位：最后一个位置的目标在别的 rank 手里
            y = F.pad(x[:, 1:], (0, 1), value=IGNORE_INDEX)
        places = torch.arange(len(self.mine)) if restart else self.mine
        rope = self.model.rope[:, places.clamp(max=self.model.config.seq_len - 1)]
        h = self.model.embed(x)
        for block in self.model.blocks:
            h = block(h, rope)
        logits = self.model.head(self.model.norm(h))
        total = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=IGNORE_INDEX,
                                reduction="sum")  # fmt: skip
        mine = valid_tokens(y)
        count = self.me.sum(torch.tensor(float(mine)))
        return total / (max(mine, 1) * self.me.size) if mean_first else total / count

    def backward(self, batch: Batch, **wrong: bool) -> float:
        """前向、反向、梯度相加；返回整批的 loss（各 rank 相同）。"""
        self.model.zero_grad(set_to_none=True)
        loss = self.loss(batch, **wrong)
        loss.backward()
        summed = self.me.sum(flat_gradients(self.model))  # 每个 rank 只有自己那些位置的一份
        sizes = [p.numel() for p in self.model.parameters()]
        for p, g in zip(self.model.parameters(), summed.split(sizes), strict=True):
            p.grad = g.view_as(p).clone()
        return self.me.sum(loss.detach()).item()


def check_heads(n_head: int, size: int) -> None:
    """Ulysses 按头分：头数要是 rank 数的倍数，否则抛 UserError。"""
    if n_head % size:
        raise UserError(f"{n_head} 个头不能平分给 {size} 个 rank：Ulysses 要求整除，"
                        f"请用 --n-head {math.ceil(n_head / size) * size}，或者用环")  # fmt: skip


# ---------------------------------------------------------------- 各小节


def single(model: GPT, batch: Batch) -> tuple[float, Tensor]:
    """一个进程、整条序列：loss 与梯度。"""
    loss = model(*batch)[1]
    loss.backward()
    return loss.item(), flat_gradients(model)


def equivalence(config: GPTConfig, batch: Batch, o: Options, me: World) -> list[dict]:
    """每种切法一行，再加一行 T 除不尽的：一步的 loss 与梯度，与单进程差多少。"""
    odd = (batch[0][:, :-3], batch[1][:, :-3])
    rows = []
    for way, b in [*((way, batch) for way in WAYS), ("环，zigzag", odd)]:
        right_loss, right = single(seeded_gpt(config, o.seed), b)
        split = Split(seeded_gpt(config, o.seed), way, me, b[0].size(1))
        loss = split.backward(b)
        rows.append({"way": way, "T": b[0].size(1), "loss_diff": abs(loss - right_loss),
                     "grad_diff": relative_to_largest(flat_gradients(split.model), right)})
    return rows


def train(config: GPTConfig, data: Tensor, o: Options, me: World, way: str) -> dict:
    """AdamW 训练几步，与单进程比。"""
    batches = [global_batch(data, s, o.rows, o.seq_len, o.seed) for s in range(o.steps)]
    split = Split(seeded_gpt(config, o.seed), way, me, o.seq_len)
    optimizer, loss = adamw(split.model, lr=o.lr), math.nan
    for batch in batches:
        loss = split.backward(batch)
        optimizer.step()
    alone = seeded_gpt(config, o.seed)
    start, single_optimizer = flat_parameters(alone), adamw(alone, lr=o.lr)
    for batch in batches if me.master else ():
        single_optimizer.zero_grad(set_to_none=True)
        alone_loss = alone(*batch)[1]
        alone_loss.backward()
        single_optimizer.step()
    if not me.master:
        return {}
    right = flat_parameters(alone)
    return {"way": way, "steps": o.steps, "loss": loss, "single_loss": alone_loss.item(),
            "param_diff": largest_difference(flat_parameters(split.model), right),
            "param_moved": largest_difference(right, start)}  # fmt: skip


def work(size: int, length: int) -> list[dict]:
    """因果掩码下每个 rank 每一圈算多少个（q, k）对：整块算的，与其中真正需要的。"""
    rows = []
    for layout, halves in (("contiguous", 1), ("zigzag", 2)):
        places = [positions_of(layout, r, size, length) for r in range(size)]
        for rank in range(size):
            for step in range(size):
                there = places[(rank - step) % size]
                blocks = pairs(places[rank], there, halves)
                rows.append({
                    "layout": layout, "rank": rank, "step": step,
                    "computed": sum(f.numel() for _, _, f in blocks),
                    "needed": sum(int((~f).sum()) for _, _, f in blocks),
                })  # fmt: skip
    return rows


def traffic_formula(way: str, size: int, shard: int, layers: int) -> tuple[int, int]:
    """每个 rank 一步里注意力的通信：(次数, 发出的字节)；`shard` 是一份 q 的字节。

    环：前向 W−1 次 kv，反向 W−1 次 kv、W 次 dkv，各 2 份。换头：前向 qkv 3 份、结果 1 份，
    反向一样，发出其中的 (W−1)/W。收齐：前向收 W 份 kv，反向 reduce-scatter 同样多。
    """
    if way.startswith("环"):
        return layers * (3 * size - 2), layers * (3 * size - 2) * 2 * shard
    if way == "PyTorch 的 all-gather":
        return layers * 2, layers * 2 * (size - 1) * 2 * shard
    return layers * 4, layers * 8 * shard * (size - 1) // size


def accounting(config: GPTConfig, batch: Batch, o: Options, me: World) -> list[dict]:
    """每种切法：注意力的通信（数出来的与公式）、梯度相加的字节、这个 rank 的激活字节。"""
    rows = []
    for way in WAYS:
        split = Split(seeded_gpt(config, o.seed), way, me, batch[0].size(1))
        resident = [*split.model.parameters(), *split.model.buffers(), *batch]
        with saved_for_backward(resident) as saved:
            loss = split.loss(batch)
        activation = sum(saved.values())
        del loss
        with Traffic() as traffic:
            split.backward(batch)
        moving = [c for c in traffic.log if c.kind not in ("all_reduce", "recv")]
        shard = len(batch[0]) * len(split.mine) * config.d_model * 4
        calls, sent = traffic_formula(way, me.size, shard, config.n_layer)
        rows += me.gather({
            "way": way, "rank": me.rank, "calls": len(moving), "calls_formula": calls,
            "sent": sum(c.sent for c in moving), "sent_formula": sent,
            "gradient": traffic.payload("all_reduce") - 8,  # 去掉 loss 与 token 数，各 4 字节
            "gradient_formula": 4 * split.model.num_params(), "activation": activation,
        })  # fmt: skip
    return rows


def sharpened(config: GPTConfig, seed: int) -> GPT:
    """qkv 的权重放大 10 倍的模型：刚初始化的注意力近乎均匀，谁的位置错了都看不出来。"""
    model = seeded_gpt(config, seed)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight *= 10
    return model


def traps(config: GPTConfig, batch: Batch, o: Options, me: World) -> list[dict]:
    """三个陷阱各错多少：梯度的相对误差，以及 loss 与正确值之差。

    「先平均」那一行，每条序列后一半是填充，后面几个 rank 的有效 token 因此少得多。
    """
    filled = batch[1].clone()
    filled[:, filled.size(1) // 2 + 5 :] = IGNORE_INDEX
    cases = [("正确", {}, batch[1]), ("位置从 0 重数", {"restart": True}, batch[1]),
             ("切开之后才取目标", {"late_targets": True}, batch[1]),
             ("正确，后一半是填充", {}, filled),
             ("各份先平均，后一半是填充", {"mean_first": True}, filled)]  # fmt: skip
    rows = []
    for name, wrong, y in cases:
        right_loss, right = single(sharpened(config, o.seed), (batch[0], y))
        split = Split(sharpened(config, o.seed), "环，连续", me, y.size(1))
        loss = split.backward((batch[0], y), **wrong)
        rows.append({"case": name, "loss_diff": abs(loss - right_loss),
                     "error": relative_error(flat_gradients(split.model), right)})  # fmt: skip
    return rows


# ---------------------------------------------------------------- 入口


def checked(o: Options, size: int) -> GPTConfig:
    """选项不对就抛 UserError，一句话说清给了什么、接受什么；对就返回模型的结构。"""
    for name in ("rows", "steps"):
        if (value := getattr(o, name)) < 1:
            raise UserError(f"--{name} {value}：至少是 1")
    if not (math.isfinite(o.lr) and o.lr > 0):
        raise UserError(f"--lr {o.lr}：要一个大于 0 的有限数")
    if o.seq_len < 8 * size:
        raise UserError(f"--seq-len {o.seq_len}：切给 {size} 个 rank 太短，至少 {8 * size}")
    try:
        config = GPTConfig(d_model=o.d_model, n_head=o.n_head, n_layer=o.n_layer,
                           seq_len=o.seq_len, attention="explicit")  # fmt: skip
    except ValueError as error:
        raise UserError(str(error)) from None
    check_heads(config.n_head, size)
    return config


def main(options: Options) -> None:
    """加入进程组，依次运行每个小节；rank 0 打印表格并写 results/context_parallel_*.csv。"""
    o = options
    with torchrun_world(COMMAND, sizes=(2, 4)) as group:
        me = replace(group, device=torch.device("cpu"))
        config = me.together(lambda: checked(o, me.size))
        me.on_master(lambda: load_tokens(vocab_size=config.vocab_size)["meta"])  # 没有时只准备一次
        data = load_tokens(vocab_size=config.vocab_size)["train"]
        batch = global_batch(data, 0, o.rows, o.seq_len, o.seed)

        def say(name: str, title: str, rows: list[dict]) -> None:
            if me.master:
                publish(f"context_parallel_{name}", title, rows, o, formats=FORMATS)

        say("equal", f"一步的梯度：{me.size} 份与单进程", equivalence(config, batch, o, me))
        say("work", "因果掩码下每圈算多少个（q, k）对",
            work(me.size, math.ceil(o.seq_len / (2 * me.size)) * 2 * me.size))  # fmt: skip
        say("traffic", "每个 rank 一步的通信与激活，字节", accounting(config, batch, o, me))
        say("traps", "几个陷阱", traps(config, batch, o, me))
        answer = refused_by_pytorch(me)
        say("pytorch", "PyTorch 的 context_parallel，CPU 上要梯度的张量",
            [{"answer": answer or "能用"}])  # fmt: skip
        me.say(f"\n训练 {o.steps} 步 …")
        say("train", "AdamW 训练：与单进程相比",
            [train(config, data, o, me, way) for way in ("环，zigzag", "Ulysses")])  # fmt: skip


FORMATS = {
    "loss_diff": "{:.1e}", "grad_diff": "{:.1e}", "param_diff": "{:.1e}", "param_moved": "{:.3f}",
    "loss": "{:.6f}", "single_loss": "{:.6f}", "error": "{:.1e}", "sent": "{:,}",
    "sent_formula": "{:,}", "gradient": "{:,}", "gradient_formula": "{:,}", "activation": "{:,}",
}  # fmt: skip


if __name__ == "__main__":
    run_main(main, Options)
