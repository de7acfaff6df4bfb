"""流水线并行：把层分给几个 rank，micro-batch 像流水一样依次流过，梯度与单进程相同。

    torchrun --standalone --nproc-per-node 4 experiments/pipeline_parallel.py   # 2 核约 30 秒

依次证明：GPipe、1F1B、交错（interleaved）三张手写的排程，以及 torch.distributed.pipelining 的两张，
一步的梯度都与单进程相同，训练 30 步参数也相同；收发的次数与字节等于公式；气泡（bubble）是
(p−1)/(m+p−1)，交错时是 (p−1)/(v·m+p−1)，与这次运行录下的时间线相比；在途的激活值数出来，
GPipe 是 m 份，1F1B 是 p−rank 份；共享的词嵌入在首尾两段各有一份，梯度要相加；
收发的次序错了会互相等；各 micro-batch 的有效 token 数不同，按总数加权。
结果写进 results/pipeline_parallel_*.csv。

全程在 CPU 上用 gloo，fp32 eager：收发按标签配对，nccl 没有标签，只能靠次序。几个进程共用两个核，
所以每段的真实快慢说明不了扩展性；录时间线时每格补足到同样长，见 `Record` 的 `slot`。
这里**没有**零气泡的排程（zero bubble、DualPipe），也不与数据并行、张量并行叠加（见 mesh 一章）。
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
)

from experiments.lab.results import publish, run_main, save_csv
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
from model import IGNORE_INDEX, Block, GPTConfig, rope_table
from tokens import Batch, global_batch, load_tokens
from tokens.errors import UserError

COMMAND = shown("experiments/pipeline_parallel.py", nproc=4)


@dataclass(frozen=True)
class Options:
    """流水线并行：三张排程、气泡与激活、几种错误用法。要由 torchrun 启动，2 或 4 个进程。"""

    micro_batches: int = 8
    """一步拆成几个 micro-batch（个）"""
    micro_rows: int = 2
    """一个 micro-batch 有几个序列（个）"""
    steps: int = 30
    """与单进程比较时训练几步（次更新）"""
    lr: float = 3e-3
    """学习率"""
    d_model: int = 64
    """模型宽度（维）"""
    n_head: int = 2
    """注意力头数（个）"""
    n_layer: int = 8
    """层数（层）"""
    seq_len: int = 64
    """序列长度（token）"""
    slot_ms: float = 40.0
    """录时间线时前向一格多长（毫秒），反向两格"""
    seed: int = 0
    """随机种子"""


# ---------------------------------------------------------------- 段：模型的几层


class Stage(nn.Module):
    """模型的第 `first` 到 `last`（不含）层；第一段还有词嵌入，最后一段还有归一化和输出头。

    参数的名字与完整的 GPT 相同（`blocks.3.attn.qkv.weight`），梯度因此能按名字对上。
    输出头与词嵌入本是一个矩阵，分在两段上就成了两份。
    """

    def __init__(self, config: GPTConfig, first: int, last: int) -> None:
        super().__init__()
        self.d_model = config.d_model
        self.blocks = nn.ModuleDict({str(i): Block(config) for i in range(first, last)})
        self.embed = nn.Embedding(config.vocab_size, config.d_model) if first == 0 else None
        self.norm = self.head = None
        if last == config.n_layer:
            self.norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
            self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.register_buffer("rope", rope_table(config), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """第一段收 (B, T) 的 token，其余收 (B, T, d)；最后一段给出 logits，其余给出 (B, T, d)。"""
        x = self.embed(x) if self.embed else x
        for block in self.blocks.values():
            x = block(x, self.rope[:, : x.size(1)])
        return self.head(self.norm(x)) if self.head else x


def layer_ranges(n_layer: int, stages: int) -> list[tuple[int, int]]:
    """各段的层 [first, last)；除不尽时前面几段各多一层。层比段少时抛 UserError。"""
    if n_layer < stages:
        raise UserError(
            f"{n_layer} 层不够分成 {stages} 段：请用 --n-layer {stages} 或更多，或者更少的进程"
        )
    size, extra = divmod(n_layer, stages)
    edges = [s * size + min(s, extra) for s in range(stages + 1)]
    return list(zip(edges, edges[1:], strict=False))


def build_chunks(config: GPTConfig, seed: int, me: World, v: int = 1) -> nn.ModuleList:
    """这个 rank 的 `v` 段：全局第 rank、rank + p、… 段；权重取自同一个种子的完整模型。"""
    whole = seeded_gpt(config, seed).state_dict()  # 真实的大模型不能这样建：直接读各段的检查点
    ranges = layer_ranges(config.n_layer, me.size * v)
    chunks = nn.ModuleList(Stage(config, *ranges[me.rank + c * me.size]) for c in range(v))
    for chunk in chunks:
        chunk.load_state_dict({name: whole[name] for name in chunk.state_dict()})
    return chunks


# ---------------------------------------------------------------- 三张排程，手写


@dataclass(frozen=True)
class Action:
    """时间线上的一格：本 rank 的第 `chunk` 段，对第 `micro` 个 micro-batch 做前向 F 或反向 B。"""

    kind: str
    chunk: int
    micro: int


def gpipe(rank: int, p: int, m: int, v: int = 1) -> list[Action]:
    """全部前向，再全部反向（Huang 等 2018，arXiv 1811.06965）。"""
    return [Action(kind, 0, i) for kind in "FB" for i in range(m)]


def one_f_one_b(rank: int, p: int, m: int, v: int = 1) -> list[Action]:
    """先前向几个把流水线灌满，然后一前一后，最后排空（Narayanan 等 2019，PipeDream）。"""
    warmup = min(p - 1 - rank, m)  # 离末段越远，第一个梯度回来得越晚
    order = [Action("F", 0, i) for i in range(warmup)]
    for i in range(m - warmup):
        order += [Action("F", 0, warmup + i), Action("B", 0, i)]
    return order + [Action("B", 0, i) for i in range(m - warmup, m)]


def interleaved(rank: int, p: int, m: int, v: int = 2) -> list[Action]:
    """每个 rank 有 v 段，p 个 micro-batch 一组依次过各段（Megatron，arXiv 2104.04473）。"""

    def forward(k: int) -> Action:
        group, within = divmod(k, p * v)
        return Action("F", within // p, group * p + within % p)

    def backward(k: int) -> Action:
        group, within = divmod(k, p * v)
        return Action("B", v - 1 - within // p, group * p + within % p)

    warmup = min(2 * (p - 1 - rank) + (v - 1) * p, m * v)
    order = [forward(k) for k in range(warmup)]
    for k in range(m * v - warmup):
        order += [forward(warmup + k), backward(k)]
    return order + [backward(k) for k in range(m * v - warmup, m * v)]


# ---------------------------------------------------------------- 照排程执行，手写


def token_loss(logits: Tensor, y: Tensor, count: float) -> Tensor:
    """一个 micro-batch 对整步 loss 的贡献：交叉熵之和 ÷ **整步**的有效 token 数。"""
    how = {"ignore_index": IGNORE_INDEX, "reduction": "sum"}
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), **how) / count


class Mail:
    """与别的段收发张量。发出去不等人，收才等；按标签（方向、段、micro）配对，不靠先后。"""

    def __init__(self, p: int, m: int, shape: tuple[int, ...]) -> None:
        self.p, self.m, self.shape = p, m, shape
        self.outgoing: list[tuple[dist.Work, Tensor]] = []  # 张量要活到送达

    def send(self, tensor: Tensor, to: int, a: Action) -> None:
        """把这一格的结果发给第 `to` 段。"""
        tag = 2 * (to * self.m + a.micro) + (a.kind == "B")
        self.outgoing.append((dist.isend(tensor, to % self.p, tag=tag), tensor))

    def receive(self, source: int, stage: int, a: Action) -> Tensor:
        """第 `stage` 段等第 `source` 段为这一格发来的张量。"""
        box, tag = torch.empty(self.shape), 2 * (stage * self.m + a.micro) + (a.kind == "B")
        dist.recv(box, source % self.p, tag=tag)
        return box

    def flush(self) -> None:
        for work, _ in self.outgoing:
            work.wait()


def run_schedule(chunks: nn.ModuleList, order: list[Action], micros: list[Batch], count: float,
                 me: World, *, slot: float = 0.0) -> "Record":  # fmt: skip
    """照 `order` 一格一格地做：收上一段的激活、前向、发给下一段；收梯度、反向、发回上一段。

    `count` 是整步的有效 token 数。返回录下的东西；loss 只有最后一段所在的 rank 知道。
    `slot` 见 `Record`。
    """
    p, last = me.size, me.size * len(chunks) - 1
    mail = Mail(p, len(micros), (*micros[0][0].shape, chunks[0].d_model))
    kept, record = {}, Record(me.rank, chunks, slot)
    for a in order:
        stage, (x, y) = a.chunk * p + me.rank, micros[a.micro]
        if a.kind == "F":
            if stage > 0:
                x = mail.receive(stage - 1, stage, a).requires_grad_()
            with record.timed(a), record.counted(a):
                out = chunks[a.chunk](x)
                out = token_loss(out, y, count) if stage == last else out
            kept[a.chunk, a.micro] = x, out  # 反向要用：这就是在途的激活
            if stage < last:
                mail.send(out.detach(), stage + 1, a)
            else:
                record.loss += out.item()
        else:
            gradient = mail.receive(stage + 1, stage, a) if stage < last else None
            with record.timed(a):
                x, out = kept.pop((a.chunk, a.micro))
                out.backward(gradient)
                record.release(a)
            if stage > 0:
                mail.send(x.grad, stage - 1, a)
    mail.flush()
    return record


class Record:
    """一次执行录下的：各格的时刻（秒）、同时在途的份数与激活字节的最大值、loss。

    `slot`（秒）大于 0 时，前向一格补足（睡）到 slot/v，反向补足到两倍：等于每段一样重、每个 rank
    有自己的设备，录下的时间线才看得出排程本身。等消息的时间不在格子里，它就是气泡。
    """

    def __init__(self, rank: int, chunks: nn.ModuleList, slot: float) -> None:
        self.rank, self.slot = rank, slot / len(chunks)
        self.resident = [*chunks.parameters(), *chunks.buffers()]
        self.events: list[dict] = []
        self.live: dict[tuple[int, int], int] = {}
        self.peak_count = self.peak_bytes = 0
        self.loss = 0.0

    @contextmanager
    def timed(self, a: Action) -> Iterator[None]:
        """记下一格的开始与结束，不足 `slot` 就睡到足。"""
        start = time.perf_counter()
        yield
        width = self.slot * (1 if a.kind == "F" else 2)
        time.sleep(max(0.0, start + width - time.perf_counter()))
        self.events.append({"rank": self.rank, "kind": a.kind, "chunk": a.chunk,
                            "micro": a.micro, "start": start, "end": time.perf_counter()})

    @contextmanager
    def counted(self, a: Action) -> Iterator[None]:
        """记下这一格的前向为反向留了多少字节。"""
        with saved_for_backward(self.resident) as saved:
            yield
        self.live[a.chunk, a.micro] = sum(saved.values())
        self.peak_count = max(self.peak_count, len(self.live))
        self.peak_bytes = max(self.peak_bytes, sum(self.live.values()))

    def release(self, a: Action) -> None:
        """反向做完，这一份激活就不在途了。"""
        del self.live[a.chunk, a.micro]


def sum_tied(chunks: nn.ModuleList, me: World, ends: dist.ProcessGroup) -> None:
    """词嵌入与输出头是一个矩阵的两份：首尾两段的梯度相加，两份才会一直相同。"""
    for weight in tied_copies(chunks, me):
        dist.all_reduce(weight.grad, group=ends)


def tied_copies(chunks: nn.ModuleList, me: World) -> list[Tensor]:
    """这个 rank 上共享矩阵的那一份：rank 0 是词嵌入，最后一个 rank 是输出头，中间的没有。"""
    if me.rank == 0:
        return [chunks[0].embed.weight]
    return [chunks[-1].head.weight] if me.rank == me.size - 1 else []


# ---------------------------------------------------------------- 纸上的排程：理想时间线与公式


def ideal_timeline(orders: list[list[Action]], forward: float = 1.0, backward: float = 2.0
                   ) -> list[dict]:  # fmt: skip
    """各 rank 照 `orders` 做、通信不花时间时，每一格的开始与结束；互相等死时抛 ValueError。"""
    p = len(orders)
    last = p * (1 + max(a.chunk for a in orders[0])) - 1
    done, clock, at, rows = {}, [0.0] * p, [0] * p, []

    def ready(rank: int, a: Action) -> float | None:
        stage = a.chunk * p + rank
        before = stage - 1 if a.kind == "F" else stage + 1
        if not 0 <= before <= last:  # 末段的反向只等自己的前向
            return 0.0 if a.kind == "F" else done.get(("F", stage, a.micro))
        return done.get((a.kind, before, a.micro))

    while any(at[r] < len(orders[r]) for r in range(p)):
        moved = False
        for r in range(p):
            while at[r] < len(orders[r]) and (when := ready(r, orders[r][at[r]])) is not None:
                a = orders[r][at[r]]
                start = max(clock[r], when)
                clock[r] = start + (forward if a.kind == "F" else backward)
                done[a.kind, a.chunk * p + r, a.micro] = clock[r]
                rows.append({"rank": r, "kind": a.kind, "chunk": a.chunk, "micro": a.micro,
                             "start": start, "end": clock[r]})
                at[r], moved = at[r] + 1, True
        if not moved:
            stuck = "；".join(f"rank {r} 等着做 {orders[r][at[r]]}" for r in range(p)
                             if at[r] < len(orders[r]))  # fmt: skip
            raise ValueError(f"这张排程会互相等死：{stuck}")
    return rows


def bubble(rows: list[dict]) -> float:
    """空闲占的比例：1 − 各格之和 ÷（rank 数 × 从第一格开始到最后一格结束）。"""
    span = max(r["end"] for r in rows) - min(r["start"] for r in rows)
    busy = sum(r["end"] - r["start"] for r in rows)
    return 1 - busy / (span * (1 + max(r["rank"] for r in rows)))


def bubble_formula(p: int, m: int, v: int = 1) -> float:
    """(p−1)/(v·m+p−1)：排头等 p−1 格灌满，队尾等 p−1 格排空，中间每个 rank 做 v·m 对。"""
    return (p - 1) / (v * m + p - 1)


def in_flight_formula(name: str, rank: int, p: int, m: int, v: int = 1) -> int:
    """同时在途的激活最多几份；交错时数的是（段, micro）对，每份只有 1/v 那么多层。"""
    if name == "GPipe":
        return m
    if name == "1F1B":
        return min(p - rank, m)
    return min(2 * (p - 1 - rank) + (v - 1) * p + 1, m * v)


# 排程：(函数, 每个 rank 几段)
SCHEDULES: dict[str, tuple[Callable[..., list[Action]], int]] = {
    "GPipe": (gpipe, 1), "1F1B": (one_f_one_b, 1), "交错 1F1B": (interleaved, 2),
}  # fmt: skip


def schedule(name: str, rank: int, p: int, m: int) -> list[Action]:
    """`SCHEDULES` 里的一张；交错要求 micro-batch 数是 rank 数的倍数，否则抛 UserError。"""
    function, v = SCHEDULES[name]
    if v > 1 and m % p:
        raise UserError(f"{m} 个 micro-batch 不是 {p} 个 rank 的倍数：交错的排程要求整除，"
                        f"请用 --micro-batches {math.ceil(m / p) * p}")  # fmt: skip
    return function(rank, p, m, v)


# ---------------------------------------------------------------- 一步，与单进程比


def split(batch: Batch, m: int) -> list[Batch]:
    """按行拆成 `m` 个同样大小的 micro-batch；除不尽抛 UserError（收发的形状要一致）。"""
    if len(batch[0]) % m:
        raise UserError(f"{len(batch[0])} 行不能平分成 {m} 个 micro-batch：请让行数是它的倍数")
    return list(zip(*(t.chunk(m) for t in batch), strict=True))


def pipeline_gradients(chunks: nn.ModuleList, name: str, batch: Batch, m: int, me: World,
                       ends: dist.ProcessGroup, *, tied: bool = True) -> float:  # fmt: skip
    """流水线走一步的前向与反向，梯度留在 `chunks` 里；返回整步的 loss（各 rank 相同）。"""
    chunks.zero_grad(set_to_none=True)
    order = schedule(name, me.rank, me.size, m)
    record = run_schedule(chunks, order, split(batch, m), valid_tokens(batch[1]), me)
    if tied:
        sum_tied(chunks, me, ends)
    return me.sum(torch.tensor(record.loss, dtype=torch.float64)).item()


def whole_vector(chunks: nn.ModuleList, config: GPTConfig, me: World, what: str) -> Tensor:
    """各段的梯度或参数（`what` 是 grad 或 data）按完整模型的次序接成一个向量，各 rank 都得到。

    共享的矩阵取 rank 0 那一份。
    """
    mine = {name: getattr(p, what).detach() for chunk in chunks
            for name, p in chunk.named_parameters() if name != "head.weight"}  # fmt: skip
    everything = {name: t for part in me.gather(mine) for name, t in part.items()}
    names = [name for name, _ in seeded_gpt(config, 0).named_parameters()]
    return torch.cat([everything[name].flatten() for name in names])


def copies_apart(chunks: nn.ModuleList, me: World) -> float:
    """共享矩阵的两份最多差多少。"""
    copies = [c for part in me.gather([w.detach() for w in tied_copies(chunks, me)]) for c in part]
    return largest_difference(*copies)


def library_gradients(chunks: nn.ModuleList, batch: Batch, m: int, me: World,
                      ends: dist.ProcessGroup) -> float:  # fmt: skip
    """同样的一步，由 torch.distributed.pipelining 排程与收发；每个 rank 一段是 1F1B，几段是交错。

    `scale_grads=False`：它默认再除以 micro-batch 数，而我们的 loss 已经按整步的 token 数除过。
    """
    chunks.zero_grad(set_to_none=True)
    p, count = me.size, valid_tokens(batch[1])
    stages = [PipelineStage(chunk, c * p + me.rank, p * len(chunks), torch.device("cpu"))
              for c, chunk in enumerate(chunks)]  # fmt: skip
    how = {"n_microbatches": m, "loss_fn": lambda logits, y: token_loss(logits, y, count),
           "scale_grads": False}  # fmt: skip
    one = len(stages) == 1
    plan = Schedule1F1B(stages[0], **how) if one else ScheduleInterleaved1F1B(stages, **how)
    losses: list[Tensor] = []
    feed = (batch[0],) if me.rank == 0 else ()
    extra = {"target": batch[1], "losses": losses} if me.rank == p - 1 else {}
    plan.step(*feed, **extra, return_outputs=False)
    sum_tied(chunks, me, ends)
    return me.sum(torch.tensor(sum(part.item() for part in losses), dtype=torch.float64)).item()


def single_gradients(config: GPTConfig, batch: Batch, seed: int) -> tuple[float, Tensor]:
    """一个进程、完整模型、整个 batch：loss 与梯度。"""
    model = seeded_gpt(config, seed)
    loss = model(*batch)[1]
    loss.backward()
    return loss.item(), flat_gradients(model)


def equivalence(config: GPTConfig, batch: Batch, o: Options, me: World,
                ends: dist.ProcessGroup) -> list[dict]:  # fmt: skip
    """每张排程一行：一步的 loss 与梯度，与单进程差多少；最后一行的层数除不尽。"""
    cases = [(name, "手写", config) for name in SCHEDULES]
    cases += [("1F1B", "PyTorch", config), ("交错 1F1B", "PyTorch", config)]
    cases += [("1F1B", "手写", replace(config, n_layer=config.n_layer - 1))]
    rows = []
    for name, by, c in cases:
        chunks = build_chunks(c, o.seed, me, SCHEDULES[name][1])
        if by == "手写":
            loss = pipeline_gradients(chunks, name, batch, o.micro_batches, me, ends)
        else:
            loss = library_gradients(chunks, batch, o.micro_batches, me, ends)
        right_loss, right = single_gradients(c, batch, o.seed)
        layers = me.gather(sum(len(chunk.blocks) for chunk in chunks))
        got = whole_vector(chunks, c, me, "grad")
        rows.append({"schedule": name, "by": by, "layers": "+".join(map(str, layers)),
                     "loss_diff": abs(loss - right_loss),
                     "grad_diff": relative_to_largest(got, right)})  # fmt: skip
    return rows


def train(config: GPTConfig, data: Tensor, o: Options, me: World, ends: dist.ProcessGroup,
          name: str, *, tied: bool = True, steps: int | None = None) -> dict:  # fmt: skip
    """AdamW 训练几步，与单进程比；每个 rank 只有自己那几层的优化器状态。"""
    steps, rows = steps or o.steps, o.micro_batches * o.micro_rows
    chunks = build_chunks(config, o.seed, me, SCHEDULES[name][1])
    optimizer, loss = adamw(chunks, lr=o.lr), math.nan
    batches = [global_batch(data, s, rows, o.seq_len, o.seed) for s in range(steps)]
    for batch in batches:
        loss = pipeline_gradients(chunks, name, batch, o.micro_batches, me, ends, tied=tied)
        optimizer.step()
    got, apart = whole_vector(chunks, config, me, "data"), copies_apart(chunks, me)
    alone = seeded_gpt(config, o.seed)
    start, single = flat_parameters(alone), adamw(alone, lr=o.lr)
    for batch in batches if me.master else ():
        single.zero_grad(set_to_none=True)
        alone_loss = alone(*batch)[1]
        alone_loss.backward()
        single.step()
    if not me.master:
        return {}
    right = flat_parameters(alone)
    return {"schedule": name, "steps": steps, "tied": "相加" if tied else "没有相加",
            "loss": loss, "single_loss": alone_loss.item(), "copies_apart": apart,
            "param_diff": largest_difference(got, right),
            "param_moved": largest_difference(right, start)}  # fmt: skip


# ---------------------------------------------------------------- 气泡、在途的激活、通信


def timelines(config: GPTConfig, data: Tensor, o: Options, me: World
              ) -> tuple[list[dict], list[dict]]:  # fmt: skip
    """录下的与理想的时间线（毫秒），以及每张排程的气泡：公式、理想、录下的。"""
    m, events, table = o.micro_batches, [], []
    cases = [("GPipe", m, True), ("1F1B", m, True), ("交错 1F1B", m, True), ("1F1B", m, False),
             ("1F1B", max(1, m // 2), True), ("1F1B", 2 * m, True)]  # fmt: skip
    for name, count, padded in cases:
        me.say(f"  录 {name}，{count} 个 micro-batch{'' if padded else '，不补足'} …")
        v, slot = SCHEDULES[name][1], o.slot_ms / 1e3 * padded
        batch = global_batch(data, 0, count * o.micro_rows, o.seq_len, o.seed)
        chunks = build_chunks(config, o.seed, me, v)
        orders = [schedule(name, r, me.size, count) for r in range(me.size)]
        dist.barrier()
        record = run_schedule(chunks, orders[me.rank], split(batch, count),
                              valid_tokens(batch[1]), me, slot=slot)  # fmt: skip
        got = [e for part in me.gather(record.events) for e in part]
        zero = min(e["start"] for e in got)
        unit = o.slot_ms / v
        ideal = ideal_timeline(orders, unit, 2 * unit)
        about = {"schedule": name, "micro_batches": count, "padded": padded}
        events += [{**about, "source": "录下", **e, "start": 1e3 * (e["start"] - zero),
                    "end": 1e3 * (e["end"] - zero)} for e in got]  # fmt: skip
        events += [{**about, "source": "理想", **e} for e in ideal if padded]
        table.append({**about, "formula": bubble_formula(me.size, count, v),
                      "ideal": bubble(ideal), "recorded": bubble(got)})  # fmt: skip
    return events, table


def accounting(config: GPTConfig, batch: Batch, o: Options, me: World,
               ends: dist.ProcessGroup) -> list[dict]:  # fmt: skip
    """每张排程、每个 rank 一行：在途的份数与字节、一步收发的次数与字节，数出来的与公式。"""
    rows, m = [], o.micro_batches
    n = batch[0][: len(batch[0]) // m].numel() * config.d_model * 4  # 一个 micro 的隐藏状态，字节
    for name, (_, v) in SCHEDULES.items():
        chunks = build_chunks(config, o.seed, me, v)
        order = schedule(name, me.rank, me.size, m)
        with Traffic() as traffic:
            record = run_schedule(chunks, order, split(batch, m), valid_tokens(batch[1]), me)
            sum_tied(chunks, me, ends)
        ways = sum((c * me.size + me.rank > 0) + (c * me.size + me.rank < v * me.size - 1)
                   for c in range(v))  # 我的各段一共有几个邻居  # fmt: skip
        tied = 4 * config.vocab_size * config.d_model * (me.rank in (0, me.size - 1))
        rows += me.gather({
            "schedule": name, "rank": me.rank,
            "in_flight": record.peak_count,
            "in_flight_formula": in_flight_formula(name, me.rank, me.size, m, v),
            "activation_bytes": record.peak_bytes,
            "sends": traffic.calls("send"), "sends_formula": m * ways,
            "recvs": traffic.calls("recv"), "recvs_formula": m * ways,
            "send_bytes": traffic.sent("send"), "send_bytes_formula": m * ways * n,
            "tied_bytes": traffic.sent("all_reduce"), "tied_bytes_formula": tied,
            "parameters": sum(w.numel() for w in chunks.parameters()),
        })  # fmt: skip
    return rows


# ---------------------------------------------------------------- 错误的用法


def exchange(me: World, how: str, seconds: float = 3.0) -> dict:
    """rank 0 发激活、rank 1 同时发梯度：两个都先「发完再收」就互相等死，先收一个或发完不等就好。

    超时只设在这一组上；返回 rank 0 的结局与等了多久（秒）。
    """
    pair = dist.new_group([0, 1], timeout=timedelta(seconds=seconds))
    dist.barrier()
    outcome, start = "做完", time.perf_counter()
    if me.rank < 2:
        mine, theirs, other = torch.ones(1 << 16), torch.empty(1 << 16), 1 - me.rank
        try:
            if how == "都先发完再收":
                dist.send(mine, other, group=pair)
                dist.recv(theirs, other, group=pair)
            elif how == "一个先发，一个先收":
                for step in (dist.send, dist.recv)[:: 1 if me.rank == 0 else -1]:
                    step(mine if step is dist.send else theirs, other, group=pair)
            else:
                sent = dist.isend(mine, other, group=pair)
                dist.recv(theirs, other, group=pair)
                sent.wait()
        except RuntimeError:
            outcome = f"{seconds:g} 秒后超时"
    waited = time.perf_counter() - start
    dist.barrier()
    return {"how": how, "outcome": outcome, "seconds": waited}


EXCHANGES = ("都先发完再收", "一个先发，一个先收", "发出去不等（isend）")


def unequal_micro_batches(config: GPTConfig, batch: Batch, o: Options, me: World,
                          ends: dist.ProcessGroup) -> list[dict]:  # fmt: skip
    """后一半 micro-batch 只有 1/8 的 token 有效：各自平均再平均是错的，按整步的总数才对。"""
    x, y = batch[0], batch[1].clone()
    y[len(y) // 2 :, max(1, o.seq_len // 8) :] = IGNORE_INDEX
    _, right = single_gradients(config, (x, y), o.seed)
    rows, m = [], o.micro_batches
    for how in ("按整步的 token 数", "各自平均，再除以 m"):
        chunks = build_chunks(config, o.seed, me)
        chunks.zero_grad(set_to_none=True)
        if how == "按整步的 token 数":
            pipeline_gradients(chunks, "1F1B", (x, y), m, me, ends)
        else:
            means_of_means(chunks, (x, y), m, me)
            sum_tied(chunks, me, ends)
        got = whole_vector(chunks, config, me, "grad")
        rows.append({"weighting": how, "error": relative_error(got, right)})
    return rows


def means_of_means(chunks: nn.ModuleList, batch: Batch, m: int, me: World) -> None:
    """错的：每个 micro-batch 按自己的有效 token 数平均，再除以 m。每次只送一个 micro-batch。"""
    for micro in split(batch, m):
        order = schedule("1F1B", me.rank, me.size, 1)
        run_schedule(chunks, order, [micro], m * valid_tokens(micro[1]), me)


# ---------------------------------------------------------------- 入口


def checked(o: Options, size: int) -> GPTConfig:
    """选项不对就抛 UserError，一句话说清给了什么、接受什么；对就返回模型的结构。"""
    for name in ("micro_batches", "micro_rows", "steps"):
        if (value := getattr(o, name)) < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}：至少是 1")
    for name in ("lr", "slot_ms"):
        if not (math.isfinite(value := getattr(o, name)) and value > 0):
            raise UserError(f"--{name.replace('_', '-')} {value}：要一个大于 0 的有限数")
    try:
        config = GPTConfig(d_model=o.d_model, n_head=o.n_head, n_layer=o.n_layer,
                           seq_len=o.seq_len)  # fmt: skip
    except ValueError as error:
        raise UserError(str(error)) from None
    layer_ranges(config.n_layer, 2 * size)  # 交错时每个 rank 两段
    schedule("交错 1F1B", 0, size, o.micro_batches)
    return config


def main(options: Options) -> None:
    """加入进程组，依次运行每个小节；rank 0 打印表格并写 results/pipeline_parallel_*.csv。"""
    o = options
    with torchrun_world(COMMAND, sizes=(2, 4)) as me:
        config = me.together(lambda: checked(o, me.size))
        me.on_master(lambda: load_tokens(vocab_size=config.vocab_size)["meta"])  # 没有时只准备一次
        data = load_tokens(vocab_size=config.vocab_size)["train"]
        ends = dist.new_group([0, me.size - 1])  # 每个 rank 都要调用，不管在不在里面
        batch = global_batch(data, 0, o.micro_batches * o.micro_rows, o.seq_len, o.seed)

        def say(name: str, title: str, rows: list[dict], hide: tuple[str, ...] = ()) -> None:
            if me.master:
                publish(f"pipeline_parallel_{name}", title, rows, o, formats=FORMATS, hide=hide)

        say("equal", f"一步的梯度：{me.size} 段与单进程", equivalence(config, batch, o, me, ends))
        rows = accounting(config, batch, o, me, ends)
        say("activations", "每个 rank 在途的激活：数出来的与公式", rows, hide=COMMUNICATION)
        say("traffic", "每个 rank 一步的通信：数出来的与公式", rows, hide=IN_FLIGHT)
        me.say(f"\n录时间线：前向一格 {o.slot_ms:g} 毫秒，反向两格")
        events, table = timelines(config, data, o, me)
        say("bubble", "气泡：空闲占的比例", table)
        if me.master:
            save_csv(events, "pipeline_parallel_timeline", o)
            print(f"\n训练 {o.steps} 步 …", flush=True)
        trained = [train(config, data, o, me, ends, "1F1B"),
                   train(config, data, o, me, ends, "1F1B", tied=False, steps=10)]  # fmt: skip
        say("train", "AdamW 训练：与单进程相比", trained)
        say("unequal", "后一半 micro-batch 只有 1/8 的 token 有效",
            unequal_micro_batches(config, batch, o, me, ends))  # fmt: skip
        say("exchange", "相邻两段同时要发给对方", [exchange(me, how) for how in EXCHANGES])


IN_FLIGHT = ("in_flight", "in_flight_formula", "activation_bytes", "parameters")
COMMUNICATION = ("sends", "sends_formula", "recvs", "recvs_formula", "send_bytes",
                 "send_bytes_formula", "tied_bytes", "tied_bytes_formula")  # fmt: skip
FORMATS = {
    "loss_diff": "{:.1e}", "grad_diff": "{:.1e}", "param_diff": "{:.1e}", "copies_apart": "{:.1e}",
    "param_moved": "{:.3f}", "loss": "{:.6f}", "single_loss": "{:.6f}", "formula": "{:.3f}",
    "ideal": "{:.3f}", "recorded": "{:.3f}", "error": "{:.1e}", "seconds": "{:.2f}",
    "activation_bytes": "{:,}", "send_bytes": "{:,}", "send_bytes_formula": "{:,}",
    "tied_bytes": "{:,}", "tied_bytes_formula": "{:,}", "parameters": "{:,}",
}  # fmt: skip


if __name__ == "__main__":
    run_main(main, Options)
