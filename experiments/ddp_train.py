"""数据并行：N 个进程各算一份数据，反向时把梯度平均，结果与单进程算整批相同。

    torchrun --standalone --nproc-per-node 2 experiments/ddp_train.py      # 2 核 CPU 上约 20 秒

依次证明：两个进程训练 30 步，参数与单进程训练同样的 16 个序列只差浮点误差；初始权重由 rank 0
广播；各 rank 读同样的数据等于白忙；`no_sync` 要同时罩住前向和反向，通信才降到 1/k；各 rank 的
有效 token 数不同时要按全局 token 数加权；日志、评估、存档只在 rank 0 上、经 `.module` 做。
CPU 上用 gloo，每个进程一块 GPU 时用 nccl。结果写进 results/ddp_train_*.csv。全程 fp32 eager。
这里**没有**参数或优化器状态的切分（ZeRO、FSDP）：每个 rank 都有完整的一份。
"""

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DistributedSampler

from experiments.lab.results import publish, run_main
from experiments.ranks.compare import (
    disagreement,
    flat_gradients,
    flat_parameters,
    relative_error,
)
from experiments.ranks.launch import shown
from experiments.ranks.world import World, torchrun_world
from experiments.training.recipe import adamw, evaluate, seeded_gpt, valid_tokens
from model import IGNORE_INDEX, GPTConfig
from tokens import Batch, global_batch, load_tokens
from tokens.errors import UserError
from tokens.files import atomic_write

COMMAND = shown("experiments/ddp_train.py", nproc=2)


@dataclass(frozen=True)
class Options:
    """DDP 与单进程的等价：证明、正确用法与几种错误用法。要由 torchrun 启动。"""

    steps: int = 30
    """训练几步（次更新）"""
    per_rank: int = 8
    """每个 rank 每步几个序列（个）"""
    accumulation: int = 4
    """no_sync 一节里每步几个 micro-batch（个）"""
    lr: float = 3e-3
    """学习率"""
    d_model: int = 64
    """模型宽度（维）"""
    n_head: int = 2
    """注意力头数（个）"""
    n_layer: int = 2
    """层数（层）"""
    seq_len: int = 64
    """序列长度（token）"""
    seed: int = 0
    """随机种子"""
    checkpoint: Path = Path("runs/ddp_train/model.pt")
    """存档一节把模型存在哪里"""


# ---------------------------------------------------------------- 谁读哪些数据


def wrap(model: nn.Module, me: World, **options) -> DDP:
    """套上 DDP：构造时广播 rank 0 的参数，反向时按桶 all-reduce 梯度。

    RoPE 的表是常数，不必每次前向都广播缓冲区，所以 `forward_sync_buffers=False`。
    """
    devices = [me.device.index] if me.device.type == "cuda" else None
    return DDP(model, device_ids=devices, **{"forward_sync_buffers": False} | options)


def shard(batch: Batch, rank: int, world: int) -> Batch:
    """全局 batch 里归 `rank` 的那几行；行数不能被 `world` 整除时抛 ValueError。"""
    rows = len(batch[0])
    if rows % world:
        raise ValueError(f"{rows} 行不能平分给 {world} 个 rank：请让全局 batch 是它的倍数")
    mine = slice(rank * rows // world, (rank + 1) * rows // world)
    return batch[0][mine], batch[1][mine]


def accumulation_steps(batch: int, micro_batch: int, world: int) -> int:
    """全局 batch = micro × ranks × accumulation：给定前两项求累积次数，除不尽抛 UserError。

    `world` 是进程总数，不是本机的卡数：两台 8 卡的机器上它是 16。
    """
    per_pass = micro_batch * world
    if micro_batch < 1 or world < 1 or batch < per_pass or batch % per_pass:
        fits = max(1, round(batch / per_pass)) * per_pass if per_pass > 0 else 0
        example = f"（例如 {fits}）" if fits else ""
        raise UserError(
            f"全局 batch {batch} 不是 micro {micro_batch} × {world} 个 rank = {per_pass} 的整数倍："
            f"请改全局 batch{example}或 micro"
        )
    return batch // per_pass


def sampler_orders(size: int, world: int, epochs: int, set_epoch: bool) -> list[dict]:
    """`DistributedSampler` 让每个 rank 在每个 epoch 读哪些样本；`size` 个样本，打乱。"""
    rows = []
    for rank in range(world):
        sampler = DistributedSampler(range(size), num_replicas=world, rank=rank, seed=0)
        for epoch in range(epochs):
            if set_epoch:
                sampler.set_epoch(epoch)
            order = " ".join(map(str, sampler))
            rows.append({"set_epoch": set_epoch, "epoch": epoch, "rank": rank, "order": order})
    return rows


def token_shard(data: Tensor, rank: int, world: int) -> Tensor:
    """一维 token 流里归 `rank` 的连续一段；末尾除不尽的几个 token 谁也不读。"""
    length = len(data) // world
    return data[rank * length : (rank + 1) * length]


# ---------------------------------------------------------------- 训练：DDP 与单进程是同一个循环


def train(model: nn.Module, batches: Iterator[Batch], lr: float) -> list[float]:
    """每个 batch 更新一次，返回各步的 loss。`model` 是裸模型还是 DDP，这里看不出区别。"""
    optimizer = adamw(model, lr=lr)
    losses = []
    for x, y in batches:
        optimizer.zero_grad(set_to_none=True)
        loss = model(x, y)[1]
        loss.backward()  # DDP：梯度在这里边算边平均
        optimizer.step()
        losses.append(loss.item())
    return losses


def equivalence(
    config: GPTConfig, data: Tensor, o: Options, me: World
) -> tuple[list[dict], dict, DDP]:
    """DDP 与「一个进程算整批」各训练一遍：每步的 loss，最后的参数差，以及 DDP 模型。"""
    rows = o.per_rank * me.size
    everything = [global_batch(data, s, rows, o.seq_len, o.seed) for s in range(o.steps)]
    ddp = wrap(seeded_gpt(config, o.seed, me.device), me)
    mine = [to_device(shard(b, me.rank, me.size), me) for b in everything]
    local = torch.tensor(train(ddp, mine, o.lr), dtype=torch.float64, device=me.device)
    dist.all_reduce(local)  # 日志要的是各 rank 的平均，不是 rank 0 自己的
    averaged, spread = (local / me.size).tolist(), disagreement(flat_parameters(ddp))
    alone = seeded_gpt(config, o.seed, me.device)
    if not me.master:
        return [], {}, ddp
    single = train(alone, [to_device(b, me) for b in everything], o.lr)
    trace = [{"step": s, "ddp": a, "single": b}
             for s, (a, b) in enumerate(zip(averaged, single, strict=True))]  # fmt: skip
    gap = (flat_parameters(ddp) - flat_parameters(alone)).abs().max().item()
    start = flat_parameters(seeded_gpt(config, o.seed, me.device))
    moved = (flat_parameters(alone) - start).abs().max().item()
    summary = {"ranks": me.size, "steps": o.steps, "params": ddp.module.num_params(),
               "rank_spread": spread, "param_diff": gap, "param_moved": moved,
               "loss_diff": max(abs(r["ddp"] - r["single"]) for r in trace)}  # fmt: skip
    return trace, summary, ddp


# ---------------------------------------------------------------- 初始权重、相同的数据


def initial_weights(config: GPTConfig, data: Tensor, o: Options, me: World) -> list[dict]:
    """各 rank 用不同的种子造模型：DDP 构造时广播了 rank 0 的；关掉广播，训练再久也不会一致。"""
    rows = []
    for broadcast in (True, False):
        model = seeded_gpt(config, o.seed + me.rank, me.device)
        before = disagreement(flat_parameters(model))
        ddp = wrap(model, me, init_sync=broadcast)
        after = disagreement(flat_parameters(ddp))
        batches = [global_batch(data, s, o.per_rank * me.size, o.seq_len, o.seed)
                   for s in range(3)]  # fmt: skip
        train(ddp, [to_device(shard(b, me.rank, me.size), me) for b in batches], o.lr)
        rows.append({"broadcast": broadcast, "before": before, "after": after,
                     "after_3_steps": disagreement(flat_parameters(ddp))})  # fmt: skip
    return rows


def same_data(config: GPTConfig, data: Tensor, o: Options, me: World) -> list[dict]:
    """各 rank 读不同的、相同的数据：得到的梯度分别是整批的、一个 rank 自己的。"""
    batch = to_device(global_batch(data, 0, o.per_rank * me.size, o.seq_len, o.seed), me)
    whole = reference(config, o, me, [batch])
    one = reference(config, o, me, [shard(batch, 0, me.size)])
    ddp, rows = wrap(seeded_gpt(config, o.seed, me.device), me), []
    for name, rank in (("不同", me.rank), ("相同", 0)):
        ddp.zero_grad(set_to_none=True)
        ddp(*shard(batch, rank, me.size))[1].backward()
        got = flat_gradients(ddp)
        rows.append({"data": name, "error_vs_all": relative_error(got, whole),
                     "error_vs_one_rank": relative_error(got, one)})  # fmt: skip
    return rows


# ---------------------------------------------------------------- 通信：按桶、与反向重叠、数得清


class CommLog:
    """DDP 的通信钩子：照常 all-reduce，同时记下每个桶的字节数、发出与完成的时刻（秒）。"""

    def __init__(self, ddp: DDP) -> None:
        self.calls: list[dict] = []
        ddp.register_comm_hook(None, self.hook)

    def hook(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        call = {"bytes": bucket.buffer().nbytes, "start": time.perf_counter()}
        self.calls.append(call)

        def finished(future: torch.futures.Future) -> Tensor:
            call["end"] = time.perf_counter()
            return future.value()[0] if isinstance(future.value(), list) else future.value()

        return allreduce_hook(None, bucket).then(finished)


def overlap(config: GPTConfig, data: Tensor, o: Options, me: World) -> list[dict]:
    """把桶改小（64 KiB），看反向进行到哪里时发出了哪个桶：时刻都以反向开始为 0，单位毫秒。"""
    ddp = wrap(seeded_gpt(config, o.seed, me.device), me, bucket_cap_mb=1 / 16)
    log = CommLog(ddp)
    batch = to_device(shard(global_batch(
        data, 0, o.per_rank * me.size, o.seq_len, o.seed), me.rank, me.size), me)  # fmt: skip
    for _ in range(3):  # 第一次反向之后 DDP 才按梯度就绪的次序重排桶
        ddp.zero_grad(set_to_none=True)
        log.calls.clear()
        loss = ddp(*batch)[1]
        start = time.perf_counter()
        loss.backward()
        end = time.perf_counter()
    return [
        {"bucket": i, "bytes": call["bytes"], "sent_ms": 1e3 * (call["start"] - start),
         "done_ms": 1e3 * (call["end"] - start), "backward_ms": 1e3 * (end - start)}
        for i, call in enumerate(log.calls)
    ]  # fmt: skip


# 每个方案：(第 i 份, 是不是最后一份) -> (前向时关同步, 反向时关同步)
PLANS = {
    "每份都同步": lambda i, last: (False, False),
    "no_sync 罩住前向和反向": lambda i, last: (not last, not last),
    "no_sync 只罩住反向": lambda i, last: (False, not last),
    "前向之后才改标志": lambda i, last: (i > 0, not last),  # 前向看见的是上一份留下的标志
    "第一份同步，其余不同步": lambda i, last: (i > 0, i > 0),
}


def accumulate(ddp: DDP, micros: list[Batch], plan: str) -> None:
    """依次前向、反向 k 份，按 `PLANS[plan]` 决定哪几次不同步；各份等长，所以除以 k。"""

    def quiet(off: bool) -> AbstractContextManager:
        return ddp.no_sync() if off else nullcontext()

    for i, (x, y) in enumerate(micros):
        forward_off, backward_off = PLANS[plan](i, i == len(micros) - 1)
        with quiet(forward_off):
            loss = ddp(x, y)[1] / len(micros)
        with quiet(backward_off):
            loss.backward()


def synchronisation(config: GPTConfig, data: Tensor, o: Options, me: World) -> list[dict]:
    """每种方案一步里发了几次 all-reduce，梯度对不对，各 rank 一致不一致。"""
    rows = o.per_rank * me.size * o.accumulation
    batch = to_device(global_batch(data, 0, rows, o.seq_len, o.seed), me)
    right = reference(config, o, me, [batch])
    micros = list(zip(*(t.chunk(o.accumulation) for t in shard(batch, me.rank, me.size)),
                      strict=True))  # fmt: skip
    table = []
    for plan in PLANS:
        ddp = wrap(seeded_gpt(config, o.seed, me.device), me)
        log = CommLog(ddp)
        for _ in range(2):  # 第二步的桶已经重排好，数的是稳定之后的次数
            ddp.zero_grad(set_to_none=True)
            log.calls.clear()
            accumulate(ddp, micros, plan)
        got = flat_gradients(ddp)
        table.append({"plan": plan, "all_reduces": len(log.calls),
                      "bytes": sum(call["bytes"] for call in log.calls),
                      "error": relative_error(got, right), "rank_spread": disagreement(got)})
    return table


# ---------------------------------------------------------------- 各 rank 的有效 token 数不同


def backward_by_tokens(ddp: nn.Module, batch: Batch, world: int) -> float:
    """按全局 token 数加权的反向；返回全局的平均 loss（各 rank 得到同一个数）。

    DDP 会把梯度除以 rank 数，所以先乘回来：Σ_r (world·sum_r/N) / world = Σ_r sum_r / N。
    """
    count = torch.tensor(float(valid_tokens(batch[1])), device=batch[0].device)
    dist.all_reduce(count)
    loss = ddp(*batch, reduction="sum")[1] * world / count
    loss.backward()
    total = loss.detach() / world
    dist.all_reduce(total)
    return total.item()


def unequal_ranks(config: GPTConfig, data: Tensor, o: Options, me: World) -> list[dict]:
    """rank 0 的序列是满的，别的 rank 只有 1/8 有效：各自取平均是错的，按全局 token 数才对。"""
    x, y = to_device(global_batch(data, 0, o.per_rank * me.size, o.seq_len, o.seed), me)
    y = y.clone()
    y[o.per_rank :, max(1, o.seq_len // 8) :] = IGNORE_INDEX
    whole, mine = (x, y), shard((x, y), me.rank, me.size)
    right = reference(config, o, me, [whole])
    ddp, rows = wrap(seeded_gpt(config, o.seed, me.device), me), []
    for weighting in ("各 rank 自己平均", "按全局 token 数"):
        ddp.zero_grad(set_to_none=True)
        if weighting == "按全局 token 数":
            backward_by_tokens(ddp, mine, me.size)
        else:
            ddp(*mine)[1].backward()
        counts = [valid_tokens(shard(whole, r, me.size)[1]) for r in range(me.size)]
        rows.append({"weighting": weighting, "tokens": " ".join(map(str, counts)),
                     "error": relative_error(flat_gradients(ddp), right)})  # fmt: skip
    return rows


# ---------------------------------------------------------------- 只在 rank 0：评估与存档


def save_and_check(
    ddp: DDP, config: GPTConfig, batches: list[Batch], me: World, path: Path
) -> dict:
    """rank 0 经 `.module` 评估并存档，别人在屏障处等；然后每个 rank 用裸模型读回来核对。"""
    loss = torch.zeros((), device=me.device, dtype=torch.float64)
    if me.master:
        loss += evaluate(ddp.module, batches)  # 经过 ddp(...) 会等别的 rank，而它们不在这里
        with atomic_write(path) as temporary:
            torch.save(ddp.module.state_dict(), temporary)
    dist.barrier()
    dist.broadcast(loss, src=0)
    bare = seeded_gpt(config, 1, me.device)
    bare.load_state_dict(torch.load(path, map_location=me.device, weights_only=True))
    equal = torch.equal(flat_parameters(bare), flat_parameters(ddp))
    return {"val_loss": loss.item(), "reload_loss": evaluate(bare, batches), "equal": equal,
            "wrapped_key": next(iter(ddp.state_dict())),
            "saved_key": next(iter(bare.state_dict()))}  # fmt: skip


# ---------------------------------------------------------------- 小工具


def to_device(batch: Batch, me: World) -> Batch:
    """把一批数据放到这个 rank 的设备上。"""
    return batch[0].to(me.device), batch[1].to(me.device)


def reference(config: GPTConfig, o: Options, me: World, batches: list[Batch]) -> Tensor:
    """单进程、裸模型在这些数据上的梯度（每个 batch 的平均 loss 相加）。"""
    model = seeded_gpt(config, o.seed, me.device)
    for batch in batches:
        model(*batch)[1].backward()
    return flat_gradients(model)


# ---------------------------------------------------------------- 入口


def checked(options: Options) -> GPTConfig:
    """选项不对就抛 UserError，一句话说清给了什么、接受什么；对就返回模型的结构。"""
    for name in ("steps", "per_rank", "accumulation"):
        if (value := getattr(options, name)) < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}：至少是 1")
    if not (math.isfinite(options.lr) and options.lr > 0):
        raise UserError(f"--lr {options.lr}：要一个大于 0 的有限数")
    try:
        return GPTConfig(d_model=options.d_model, n_head=options.n_head,
                         n_layer=options.n_layer, seq_len=options.seq_len)  # fmt: skip
    except ValueError as error:
        raise UserError(str(error)) from None


def main(options: Options) -> None:
    """加入进程组，依次运行每个小节；rank 0 打印表格并写 results/ddp_train_*.csv。"""
    o, config = options, checked(options)
    with torchrun_world(COMMAND) as me:
        tokens = load_tokens(vocab_size=config.vocab_size)
        data = tokens["train"]
        trace, summary, ddp = equivalence(config, data, o, me)
        def say(name: str, title: str, rows: list[dict], every: int = 1) -> None:
            if me.master:
                publish(f"ddp_train_{name}", title, rows, o, formats=FORMATS, every=every,
                        device=str(me.device))  # fmt: skip

        say("loss", f"{me.size} 个 rank 与单进程：每步的 loss", trace, every=5)
        say("equivalence", f"训练 {o.steps} 步之后", [summary])
        say("weights", "初始权重：各 rank 相差多少", initial_weights(config, data, o, me))
        say("data", "各 rank 的数据", same_data(config, data, o, me))
        say("sampler", "DistributedSampler：10 个样本，2 个 rank",
               sampler_orders(10, 2, 2, False) + sampler_orders(10, 2, 2, True))  # fmt: skip
        say("buckets", "反向里的通信", overlap(config, data, o, me))
        say("sync", f"一步 {o.accumulation} 个 micro-batch", synchronisation(
            config, data, o, me))  # fmt: skip
        say("unequal", "各 rank 的有效 token 数不同", unequal_ranks(config, data, o, me))
        held_out = [to_device(global_batch(tokens["val"], s, o.per_rank, o.seq_len, 7), me)
                    for s in range(4)]  # fmt: skip
        saved = save_and_check(ddp, config, held_out, me, o.checkpoint)
        say("checkpoint", f"存档 {o.checkpoint}", [saved])


FORMATS = {
    "ddp": "{:.6f}", "single": "{:.6f}", "rank_spread": "{:.1e}", "param_diff": "{:.1e}",
    "param_moved": "{:.3f}", "loss_diff": "{:.1e}", "before": "{:.3f}", "after": "{:.1e}",
    "after_3_steps": "{:.1e}", "error": "{:.1e}", "error_vs_all": "{:.1e}",
    "error_vs_one_rank": "{:.1e}", "sent_ms": "{:.2f}", "done_ms": "{:.2f}",
    "backward_ms": "{:.2f}", "val_loss": "{:.4f}", "reload_loss": "{:.4f}",
}  # fmt: skip


if __name__ == "__main__":
    run_main(main, Options)
