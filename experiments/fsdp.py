"""ZeRO 与 FSDP：把优化器状态、梯度、参数切给各个进程，结果仍与一个进程相同。

    torchrun --standalone --nproc-per-node 4 experiments/fsdp.py      # 2 核 CPU 上约 30 秒

依次量：ZeRO-1、2、3 与不切时，每个 rank 静止与峰值各占多少字节，旁边是公式；一步里通信几次、
多少字节，2Ψ 还是 3Ψ；重算省下多少字节、多花多少计算；每个 rank 至少多少 token 才藏得住通信；
梯度裁剪记错的范数；最后是手写的三级与 PyTorch 的 `fully_shard`，训练 30 步之后各与一个进程差多少。
结果写进 results/fsdp_*.csv。全程 fp32 eager，CPU 上用 gloo。
这里**没有**预取和重叠：手写的按次序收集、计算、释放，讲清楚切了什么；也没有分片的检查点。
"""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from statistics import median
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from experiments.lab.results import publish, run_main
from experiments.plan.memory import zero_bytes_per_param
from experiments.ranks.compare import (
    flat_gradients,
    flat_parameters,
    largest_difference,
    relative_to_largest,
)
from experiments.ranks.launch import shown
from experiments.ranks.traffic import Traffic
from experiments.ranks.world import World, torchrun_world
from experiments.training.recipe import (
    adamw,
    learning_rate,
    seeded_gpt,
    set_learning_rate,
    valid_tokens,
)
from model import GPT, IGNORE_INDEX, GPTConfig
from tokens import Batch, global_batch, load_tokens
from tokens.errors import UserError

COMMAND = shown("experiments/fsdp.py", nproc=4)


@dataclass(frozen=True)
class Options:
    """ZeRO 三级与 fully_shard：等价、字节、通信与重算。要由 torchrun 启动。"""

    steps: int = 30
    """训练几步（次更新）"""
    per_rank: int = 2
    """每个 rank 每步几个序列（个）"""
    lr: float = 3e-3
    """学习率的峰值"""
    warmup: int = 10
    """学习率用几步升到峰值（步）"""
    d_model: int = 64
    """模型宽度（维）；手写的按第 0 维平分，要是 rank 数的倍数"""
    n_head: int = 2
    """注意力头数（个）"""
    n_layer: int = 2
    """层数（层）"""
    seq_len: int = 64
    """序列长度（token）"""
    seed: int = 0
    """随机种子"""


# ---------------------------------------------------------------- ZeRO 的三级，手写


class Unit:
    """一起收集、一起归约的一组参数；每个参数沿第 0 维切成 W 段，`shards` 是自己管的那一段。

    stage：0 什么也不切；1 切优化器状态；2 再切梯度；3 再切参数（ZeRO，arXiv 1910.02054，§5）。
    """

    def __init__(self, params: Iterable[nn.Parameter], stage: int, me: World) -> None:
        self.params, self.stage, self.me = list(params), stage, me
        self.buffer = self.waiting = 0  # 正在通信的缓冲区（字节）；还差几个参数的梯度
        for p in self.params:
            if stage and len(p) % me.size:
                raise UserError(f"{tuple(p.shape)} 的参数不能沿第 0 维平分给 {me.size} 个 rank："
                                "请换进程数或宽度（fully_shard 会补零）")  # fmt: skip
        pieces = [self.mine(p.data) if stage else p.data for p in self.params]
        self.shards = [nn.Parameter(piece.clone() if stage == 3 else piece) for piece in pieces]
        self.sizes = [shard.numel() for shard in self.shards]
        if stage == 3:
            self.release()

    def mine(self, whole: Tensor) -> Tensor:
        """完整的张量里自己的那一段；是视图，不占新的内存。"""
        return whole.chunk(self.me.size)[self.me.rank]

    def gather(self, note: Callable[[], None]) -> None:
        """all-gather：把各 rank 的段拼成完整的参数。"""
        local = torch.cat([shard.detach().flatten() for shard in self.shards])
        whole = local.new_empty(self.me.size, len(local))
        dist.all_gather_single(whole.view(-1), local)
        for p, piece in zip(self.params, whole.split(self.sizes, dim=1), strict=True):
            p.untyped_storage().resize_(p.nbytes)  # release 放掉的存储，原地要回来
            p.data.view(self.me.size, -1).copy_(piece)
        self.buffer = local.nbytes + whole.nbytes
        note()
        self.buffer = 0

    def release(self) -> None:
        """放掉完整的参数；计算图里存的是同一块存储，反向之前收集回来就又有了。"""
        for p in self.params:
            p.untyped_storage().resize_(0)

    def reduce(self, note: Callable[[], None]) -> None:
        """各 rank 的梯度求和：stage 0 人人都要全部（all-reduce），否则只要自己那一段。"""
        rows = self.me.size if self.stage else 1
        whole = torch.cat([p.grad.view(rows, -1) for p in self.params], dim=1)
        local = whole.new_empty(whole.size(1)) if self.stage else whole.view(-1)
        if self.stage:
            dist.reduce_scatter_single(local, whole.view(-1))
        else:
            dist.all_reduce(local)
        self.buffer = whole.nbytes + local.nbytes * bool(self.stage)
        note()
        self.buffer = 0
        for p, shard, piece in zip(self.params, self.shards, local.split(self.sizes), strict=True):
            if self.stage >= 2:  # 完整的梯度到此为止
                p.grad, shard.grad = None, piece.view_as(shard)
            else:
                shard.grad = self.mine(p.grad) if self.stage else p.grad
                shard.grad.copy_(piece.view_as(shard))


class Zero:
    """ZeRO 的第 `stage` 级，包住 `model`：词嵌入与末尾的范数是一个 `Unit`，每层各是一个。

    用法：`backward(batch, count)`，优化器更新 `shards`，再 `publish()`。
    """

    def __init__(self, model: GPT, me: World, stage: int) -> None:
        self.model, self.me, self.stage, self.optimizer = model, me, stage, None
        self.names = {p: name for name, p in model.named_parameters()}
        self.root = Unit([model.embed.weight, model.norm.weight], stage, me)
        blocks = [Unit(block.parameters(), stage, me) for block in model.blocks]
        self.units, self.peak = [self.root, *blocks], {}
        self.shards = nn.ParameterList(s for unit in self.units for s in unit.shards)
        for unit in self.units:
            for p in unit.params:
                p.register_post_accumulate_grad_hook(partial(self.ready, unit))
        if stage == 3:
            for block, unit in zip(model.blocks, blocks, strict=True):
                block.register_forward_pre_hook(lambda *_, u=unit: u.gather(self.note))
                block.register_forward_hook(lambda *_, u=unit: u.release())
                block.register_full_backward_pre_hook(lambda *_, u=unit: u.gather(self.note))

    def ready(self, unit: Unit, _: Tensor) -> None:
        """一个参数的梯度算好了；整个单元都好了，第 2、3 级立刻归约，不等反向做完。"""
        unit.waiting = (unit.waiting or len(unit.params)) - 1
        self.note()
        if unit.waiting == 0 and self.stage >= 2:
            unit.reduce(self.note)
            if self.stage == 3:
                unit.release()
        self.note()

    def backward(self, batch: Batch, count: int) -> float:
        """前向与反向；loss 除以**全局**的有效 token 数，所以梯度求和而不是平均。返回自己的那份。"""
        if self.stage == 3:
            self.root.gather(self.note)
        loss = self.model(*batch, reduction="sum")[1] / count
        if self.stage == 3:  # 照论文的写法：前向用完就放，反向之前再收集
            self.root.release()
            self.root.gather(self.note)
        loss.backward()
        if self.stage < 2:
            for unit in self.units:
                unit.reduce(self.note)
        return loss.item()

    def publish(self) -> None:
        """第 1、2 级更新之后：各 rank 只更新了自己那段参数，收集成完整的。"""
        if self.stage in (1, 2):
            for unit in self.units:
                unit.gather(self.note)
        self.note()

    def zero_grad(self) -> None:
        """参数和分片的梯度都放掉。"""
        for p in (*self.names, *self.shards):
            p.grad = None

    def held(self) -> dict[str, int]:
        """此刻这个 rank 手里的字节：参数、梯度、优化器状态、通信缓冲区；共用的存储只数一次。"""
        states = self.optimizer.state.values() if self.optimizer else ()
        tensors = {
            "params": [*self.names, *self.shards],
            "gradients": [p.grad for p in (*self.names, *self.shards) if p.grad is not None],
            "optimizer": [t for state in states for t in state.values() if t.dim()],
        }  # fmt: skip
        count = {kind: storage_bytes(group) for kind, group in tensors.items()}
        return count | {"buffers": sum(unit.buffer for unit in self.units)}

    def note(self) -> None:
        """记下各项到此为止的峰值。"""
        for kind, value in self.held().items():
            self.peak[kind] = max(self.peak.get(kind, 0), value)

    def whole(self, what: str) -> Tensor:
        """各 rank 的段拼回单进程的次序，接成一个向量；`what` 是 data 或 grad。"""
        found = {}
        for unit in self.units:
            for p, shard in zip(unit.params, unit.shards, strict=True):
                value = getattr(shard, what)
                found[self.names[p]] = torch.cat(self.me.gather(value)) if self.stage else value
        return torch.cat([found[name].detach().flatten() for name in self.names.values()])


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """这些张量占的存储共多少字节，同一块只数一次。"""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


# ---------------------------------------------------------------- 用 PyTorch 自己的 API


class Recomputed(nn.Module):
    """一层，前向只留输入，反向时整层重算。"""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        return checkpoint(self.block, x, rope, use_reentrant=False)


class Library:
    """`fully_shard`：每层一个单元，余下的（词嵌入、末尾的范数）归根模块。接口与 `Zero` 相同。"""

    def __init__(self, model: GPT, me: World, recompute: bool = False) -> None:
        self.model, self.me, self.optimizer = model, me, None
        mesh = init_device_mesh(me.device.type, (me.size,))
        if recompute:
            model.blocks = nn.ModuleList(Recomputed(block) for block in model.blocks)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        self.shards = model

    def backward(self, batch: Batch, count: int) -> float:
        """FSDP 把梯度除以 rank 数，所以先乘回来。"""
        loss = self.model(*batch, reduction="sum")[1] / count
        (loss * self.me.size).backward()
        return loss.item()

    def publish(self) -> None:
        """没有要做的：下一次前向会自己收集。"""

    def zero_grad(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def held(self) -> dict[str, int]:
        """此刻手里的分片（不含临时收集的）。"""
        params = list(self.model.parameters())
        states = self.optimizer.state.values() if self.optimizer else ()
        tensors = {
            "params": params, "gradients": [p.grad for p in params if p.grad is not None],
            "optimizer": [t for state in states for t in state.values() if t.dim()],
        }  # fmt: skip
        return {kind: sum(local(t).nbytes for t in group) for kind, group in tensors.items()}

    def whole(self, what: str) -> Tensor:
        """`full_tensor()` 收集完整的参数或梯度，接成一个向量。"""
        values = [getattr(p, what) for p in self.model.parameters()]
        return torch.cat([v.full_tensor().detach().flatten() for v in values])


def local(tensor: Tensor) -> Tensor:
    """DTensor 在这个 rank 上的那一份。"""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


METHODS: dict[str, Callable[[GPT, World], Zero | Library]] = {
    "不切（DDP）": partial(Zero, stage=0), "ZeRO-1": partial(Zero, stage=1),
    "ZeRO-2": partial(Zero, stage=2), "ZeRO-3": partial(Zero, stage=3),
    "fully_shard": Library, "fully_shard + 重算": partial(Library, recompute=True),
}  # fmt: skip


# ---------------------------------------------------------------- 一步与 30 步


def mine(batch: Batch, me: World) -> Batch:
    """全局 batch 里归这个 rank 的那几行。"""
    return tuple(t.chunk(me.size)[me.rank].to(me.device) for t in batch)


def step(engine: Zero | Library, batch: Batch, count: int, me: World) -> float:
    """一次更新；返回全局的平均 loss。"""
    engine.zero_grad()
    loss = engine.backward(batch, count)
    engine.optimizer.step()
    engine.publish()
    return me.sum(torch.tensor(loss)).item()


def rate(number: int, o: Options) -> float:
    """第 `number` 步的学习率：从小升到峰值，之后不变。"""
    return learning_rate(number, peak=o.lr, warmup=o.warmup, total=math.inf)


def train(engine: Zero | Library, batches: list[Batch], o: Options, me: World) -> list[float]:
    """每个全局 batch 更新一次，返回各步的 loss。"""
    engine.optimizer = adamw(engine.shards, lr=o.lr)
    losses = []
    for number, batch in enumerate(batches):
        set_learning_rate(engine.optimizer, rate(number, o))
        losses.append(step(engine, mine(batch, me), valid_tokens(batch[1]), me))
    return losses


@dataclass(frozen=True)
class Run:
    """训练一遍留下的：第一步的梯度、各步的 loss、最后的参数（单进程的次序）。"""

    gradient: Tensor
    losses: list[float]
    end: Tensor


def alone(config: GPTConfig, batches: list[Batch], o: Options) -> Run:
    """一个进程算整个全局 batch。"""
    model = seeded_gpt(config, o.seed)
    model(*batches[0])[1].backward()
    gradient, optimizer, losses = flat_gradients(model), adamw(model, lr=o.lr), []
    for number, batch in enumerate(batches):
        set_learning_rate(optimizer, rate(number, o))
        optimizer.zero_grad(set_to_none=True)
        loss = model(*batch)[1]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Run(gradient, losses, flat_parameters(model))


def equivalence(config: GPTConfig, batches: list[Batch], o: Options, me: World) -> list[dict]:
    """每种切法一行：第一步的梯度、各步的 loss、最后的参数各与一个进程差多少。"""
    right = me.on_master(lambda: alone(config, batches, o))  # 别的 rank 等着，不重复算
    start, rows = flat_parameters(seeded_gpt(config, o.seed)), []
    for method, wrap in METHODS.items():
        engine = wrap(seeded_gpt(config, o.seed, me.device), me)
        engine.backward(mine(batches[0], me), valid_tokens(batches[0][1]))
        gradient = relative_to_largest(engine.whole("grad"), right.gradient)
        losses = train(engine, batches, o, me)
        rows.append({
            "method": method, "ranks": me.size, "steps": len(batches),
            "param_moved": largest_difference(right.end, start), "gradient": gradient,
            "loss_diff": max(abs(a - b) for a, b in zip(losses, right.losses, strict=True)),
            "param_diff": largest_difference(engine.whole("data"), right.end),
        })  # fmt: skip
    return rows


# ---------------------------------------------------------------- 数字节


def unit_sizes(config: GPTConfig) -> tuple[int, int]:
    """(根单元的参数个数, 一层的参数个数)。"""
    c = config
    block = 4 * c.d_model**2 + 3 * c.d_model * c.ffn_dim + 2 * c.d_model
    return (c.vocab_size + 1) * c.d_model, block


def all_params(config: GPTConfig) -> int:
    """参数个数 Ψ。"""
    root, block = unit_sizes(config)
    return root + config.n_layer * block


def at_rest(psi: int, world: int, stage: int) -> dict[str, int]:
    """静止时（更新之后）每个 rank 的字节，fp32 的账：参数 4、梯度 4、AdamW 的两个矩 8。"""
    share = {kind: world if stage >= level else 1
             for kind, level in (("params", 3), ("gradients", 2), ("optimizer", 1))}  # fmt: skip
    return {kind: size * psi // share[kind]
            for kind, size in (("params", 4), ("gradients", 4), ("optimizer", 8))}  # fmt: skip


def at_peak(config: GPTConfig, world: int, stage: int) -> dict[str, int]:
    """一步之中每一项的最大值，字节（各项的峰值不在同一时刻）。

    第 3 级的参数：自己的分片，加上此刻完整的根单元与一层。第 2、3 级的梯度：已经归约的分片，
    加上正在算的那个单元完整的一份；反向先到的末尾范数要等词嵌入一起归约，一直占着 4·d。
    通信缓冲区：一个单元完整的一份，加上自己的一段。
    """
    root, block = unit_sizes(config)
    psi, layers = root + config.n_layer * block, config.n_layer
    peak = at_rest(psi, world, stage)
    if stage == 3:
        peak["params"] = 4 * (psi // world + root + block)
    if stage >= 2:
        during = [config.d_model + done * block // world + block for done in range(layers)]
        peak["gradients"] = 4 * max(*during, layers * block // world + root, psi // world)
    biggest = max(root, block)
    return peak | {"buffers": 4 * (biggest + (biggest // world if stage else 0))}


def memory_rows(config: GPTConfig, batches: list[Batch], me: World) -> list[dict]:
    """每种切法走两步，rank 0 的参数、梯度、优化器状态：静止、峰值，旁边是公式（字节）。

    `paper` 是 ZeRO 论文的账（bf16 参数 2、bf16 梯度 2、fp32 主权重与两个矩 12）下的静止合计。
    """
    psi, rows = all_params(config), []
    for stage, method in enumerate(list(METHODS)[:5]):
        engine = METHODS[method](seeded_gpt(config, 0, me.device), me)
        engine.optimizer = adamw(engine.shards, lr=1e-3)
        for batch in batches[:2]:
            step(engine, mine(batch, me), valid_tokens(batch[1]), me)
        library = stage == 4
        level = min(stage, 3)
        rest, strategy = at_rest(psi, me.size, level), ("ddp", "zero1", "zero2", "zero3")[level]
        peak = None if library else at_peak(config, me.size, level)
        for kind, value in engine.held().items():
            rows.append({
                "method": method, "kind": kind, "rest": value, "rest_formula": rest.get(kind, 0),
                "peak": None if library else engine.peak[kind],
                "peak_formula": peak[kind] if peak else None,
                "paper": zero_bytes_per_param(strategy, me.size, "paper") * psi,
            })  # fmt: skip
    return rows


def traffic_formula(config: GPTConfig, method: str) -> dict[str, tuple[int, int]]:
    """一步的通信 {种类: (次数, 字节)}：Ψ 个参数、U 个单元，字节是完整张量的。

    不切：all-reduce Ψ（环形算法里值两个 Ψ）；ZeRO-1、2：归约 Ψ，收集 Ψ；ZeRO-3：收集两次，
    归约一次。fully_shard 的根单元前向之后不放掉，少收集一次。
    """
    root, block = unit_sizes(config)
    units, whole = 1 + config.n_layer, 4 * (root + config.n_layer * block)
    once = (units, whole)
    if method == "不切（DDP）":
        return {"all_reduce": once}
    if method in ("ZeRO-1", "ZeRO-2"):
        return {"reduce_scatter": once, "all_gather": once}
    if method == "ZeRO-3":
        return {"reduce_scatter": once, "all_gather": (2 * units, 2 * whole)}
    return {"reduce_scatter": once, "all_gather": (2 * units - 1, 2 * whole - 4 * root)}


def traffic_rows(config: GPTConfig, batch: Batch, me: World) -> list[dict]:
    """每种切法一步里通信几次、多少字节，旁边是公式；`volume` 是论文的算法：几个 Ψ。"""
    psi, rows = all_params(config), []
    for method, wrap in METHODS.items():
        engine = wrap(seeded_gpt(config, 0, me.device), me)
        engine.optimizer = adamw(engine.shards, lr=1e-3)
        data, count = mine(batch, me), valid_tokens(batch[1])
        with Traffic() as traffic:
            engine.backward(data, count)
            engine.optimizer.step()
            engine.publish()
        formula = traffic_formula(config, method)
        volume = (traffic.payload() + traffic.payload("all_reduce")) / 4 / psi
        for row in traffic.table():
            calls, payload = formula.get(row["kind"], (0, 0))
            rows.append({"method": method, "kind": row["kind"], "calls": row["calls"],
                         "calls_formula": calls, "payload": row["payload"],
                         "payload_formula": payload, "sent": row["sent"], "volume": volume})
    return rows


# ---------------------------------------------------------------- 重算：字节换计算


class LiveBytes(TorchDispatchMode):
    """上下文管理器：其中产生的张量此刻共占多少字节（`now()`），最多时占多少（`peak`）。

    `resident` 是早就有的（参数），它们的视图不算。
    """

    def __init__(self, resident: Iterable[Tensor]) -> None:
        super().__init__()
        self.resident = [t.untyped_storage() for t in resident]
        self.known = {storage._cdata for storage in self.resident}
        self.alive: dict[int, ref] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self.alive and key not in self.known:
                    gone = partial(lambda key, _: self.alive.pop(key, None), key)
                    self.alive[key] = ref(storage, gone)
        self.peak = max(self.peak, self.now())
        return out

    def now(self) -> int:
        """此刻还活着的存储合计多少字节。"""
        found = [weak() for weak in list(self.alive.values())]
        return sum(storage.nbytes() for storage in found if storage is not None)


def recompute_rows(layers: int = 6, d: int = 64, rows: int = 4, length: int = 128) -> list[dict]:
    """一叠层（没有词嵌入与输出头），留下全部激活与整层重算各一行；只在一个进程里做。

    kept：前向结束时留着的字节；重算时公式是每层的输入，4·L·B·T·d。peak：一步里的峰值。
    flops：前向加反向的浮点运算；ms：几次的中位数，核是几个进程共用的，只供参考。
    """
    config = GPTConfig(d_model=d, n_head=d // 32, n_layer=layers, seq_len=length)
    model, table = seeded_gpt(config, 0), []
    torch.manual_seed(0)
    start, resident = torch.randn(rows, length, d), [*model.parameters(), *model.buffers()]
    for name, wrap in (("全部留下", lambda block: block), ("整层重算", Recomputed)):
        blocks = [wrap(block) for block in model.blocks]

        def forward(blocks: list = blocks) -> Tensor:
            x = start.clone().requires_grad_()
            for block in blocks:
                x = block(x, model.rope)
            return x

        model.zero_grad(set_to_none=True)
        with LiveBytes(resident) as live:
            out = forward()
            kept = live.now() - out.nbytes  # 最后一层的输出不是为反向留的
            out.sum().backward()
        del out
        with FlopCounterMode(display=False) as counter:
            forward().sum().backward()
        seconds = []
        for _ in range(3):
            begin = time.perf_counter()
            forward().sum().backward()
            seconds.append(time.perf_counter() - begin)
        again = name == "整层重算"
        table.append({
            "what": name, "kept": kept,
            "kept_formula": 4 * layers * rows * length * d if again else None,
            "peak": live.peak, "flops": counter.get_total_flops(),
            "flops_formula": layers * rows * length * layer_flops(config, again),
            "ms": 1e3 * median(seconds),
        })  # fmt: skip
    return table


def layer_flops(config: GPTConfig, again: bool) -> int:
    """一层里一个 token 前向加反向的浮点运算：3 倍前向；重算再加一次前向，除了最后的 down。

    反向要的中间结果都有了，重算就停下，down 的输出没人要，所以不到 4/3 倍。
    """
    d, f = config.d_model, config.ffn_dim
    forward = 2 * (4 * d**2 + 3 * d * f) + 4 * config.seq_len * d
    return 3 * forward + (forward - 2 * d * f if again else 0)


# ---------------------------------------------------------------- 藏不藏得住


def hidden_tokens(flops: float, bandwidth: float, bytes_per_param: float = 6.0) -> float:
    """每个 rank 每步至少多少 token，ZeRO-3 的通信才短于计算。

    计算 6Ψ·n/flops 秒，通信 bytes_per_param·Ψ/bandwidth 秒（bf16 收集两次、归约一次，各 2 字节，
    W 很大），Ψ 约掉了：n = bytes_per_param·flops/(6·bandwidth)。flops 是实际达到的 FLOP/s。
    """
    return bytes_per_param * flops / (6 * bandwidth)


LINKS = {"NVLink，450 GB/s": 450e9, "400 Gb/s 网络": 50e9, "100 Gb/s 网络": 12.5e9}


def overlap_rows(flops: float = 0.5 * 989e12) -> list[dict]:
    """几种连线上的门槛：H100 达到峰值的一半，每张卡独享标明的带宽。"""
    return [{"link": name, "GB_per_s": bandwidth / 1e9, "tokens": hidden_tokens(flops, bandwidth)}
            for name, bandwidth in LINKS.items()]  # fmt: skip


# ---------------------------------------------------------------- 裁剪记错的范数


def clip_rows(config: GPTConfig, batch: Batch, o: Options, me: World) -> list[dict]:
    """DTensor 的范数，`.item()` 取到的可能只是自己分片的。每个 rank 一行。

    embed_item、embed_full：词嵌入梯度的范数，`.item()` 与 `.full_tensor()`，ratio 是两者之比。
    clip_item、clip_full：`clip_grad_norm_` 返回的全局范数，两种取法；one_process 是一个进程的。
    clipped_diff：裁剪之后的梯度与一个进程裁剪之后的最多差多少（相对最大的）。
    fp32 累加几十万个平方，范数自己就有 10⁻⁴ 左右的相对误差，两边的分法不同，误差也不同。
    """
    one = seeded_gpt(config, o.seed)
    one(*batch)[1].backward()
    limit = 0.5 * flat_gradients(one).norm().item()
    right = nn.utils.clip_grad_norm_(one.parameters(), limit).item()
    engine = Library(seeded_gpt(config, o.seed, me.device), me)
    engine.backward(mine(batch, me), valid_tokens(batch[1]))
    embed = engine.model.embed.weight.grad.norm()
    item, full = embed.item(), embed.full_tensor().item()
    norm = nn.utils.clip_grad_norm_(engine.model.parameters(), limit)
    difference = relative_to_largest(engine.whole("grad"), flat_gradients(one))
    row = {"rank": me.rank, "embed_item": item, "embed_full": full, "ratio": full / item,
           "clip_item": norm.item(), "clip_full": norm.full_tensor().item(),
           "one_process": right, "clipped_diff": difference}  # fmt: skip
    return me.gather(row)


# ---------------------------------------------------------------- 入口


def checked(options: Options) -> GPTConfig:
    """选项不对就抛 UserError，一句话说清给了什么、接受什么；对就返回模型的结构。"""
    for name in ("steps", "per_rank", "warmup"):
        if (value := getattr(options, name)) < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}：至少是 1")
    if not (math.isfinite(options.lr) and options.lr > 0):
        raise UserError(f"--lr {options.lr}：要一个大于 0 的有限数")
    try:
        return GPTConfig(d_model=options.d_model, n_head=options.n_head,
                         n_layer=options.n_layer, seq_len=options.seq_len)  # fmt: skip
    except ValueError as error:
        raise UserError(str(error)) from None


def uneven(batch: Batch) -> Batch:
    """各行的有效 token 数不同：第 i 行从第 T·(i+1)/行数 个位置起不计入 loss。"""
    x, y = batch
    y = y.clone()
    for row in range(len(y)):
        y[row, y.size(1) * (row + 1) // len(y) :] = IGNORE_INDEX
    return x, y


def main(options: Options) -> None:
    """加入进程组，依次量各小节；rank 0 打印表格并写 results/fsdp_*.csv。"""
    o, config = options, checked(options)
    with torchrun_world(COMMAND) as me:
        data = load_tokens(vocab_size=config.vocab_size)["train"]
        batches = [uneven(global_batch(data, s, o.per_rank * me.size, o.seq_len, o.seed))
                   for s in range(o.steps)]  # fmt: skip

        def say(name: str, title: str, rows: list[dict], hide: tuple[str, ...] = ()) -> None:
            if me.master:
                publish(f"fsdp_{name}", title, rows, o, formats=FORMATS, hide=hide,
                        device=str(me.device))  # fmt: skip

        say("memory", f"{me.size} 个 rank，每个 rank 的字节", memory_rows(config, batches, me),
            hide=("paper",))  # fmt: skip
        say("traffic", "一步的通信（每个 rank）", traffic_rows(config, batches[0], me))
        say("recompute", "重算：6 层，一个进程", me.on_master(recompute_rows))
        say("overlap", "藏得住通信的 token 数（每个 rank，每步）", overlap_rows())
        say("clip", "裁剪的范数", clip_rows(config, batches[0], o, me))
        me.say(f"\n训练 {o.steps} 步：一个进程，以及 {len(METHODS)} 种切法……")
        say("equivalence", f"{me.size} 个 rank 与一个进程最多差多少",
            equivalence(config, batches, o, me))  # fmt: skip


COUNTS = ("rest", "rest_formula", "peak", "peak_formula", "payload", "payload_formula", "sent",
          "kept", "kept_formula", "flops", "flops_formula", "tokens", "GB_per_s")  # fmt: skip
NORMS = ("embed_item", "embed_full", "clip_item", "clip_full", "one_process")
FORMATS = {
    "loss_diff": "{:.1e}", "gradient": "{:.1e}", "param_moved": "{:.3f}", "param_diff": "{:.1e}",
    "volume": "{:.3f}", "ms": "{:.1f}", "ratio": "{:.2f}", "clipped_diff": "{:.1e}",
} | dict.fromkeys(COUNTS, "{:,.0f}") | dict.fromkeys(NORMS, "{:.5f}")  # fmt: skip


if __name__ == "__main__":
    run_main(main, Options)
