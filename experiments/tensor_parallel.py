"""张量并行：把每个矩阵切给 N 个进程，结果与一个进程相同，通信与内存都数得清。

    torchrun --standalone --nproc-per-node 4 experiments/tensor_parallel.py   # 2 核 CPU 上约 20 秒

依次量：每个 rank 的参数与激活占多少字节；一步里通信几次、多少字节，旁边是公式；几种错的写法各错
多少；最后是手写的张量并行、序列并行与 PyTorch 的 `parallelize_module`，训练 30 步之后各与一个进程
差多少。切法：qkv、gate、up 切列，out、down 切行，词嵌入与输出头按词表切，交叉熵不收集 logits。
结果写进 results/tensor_parallel_*.csv。全程 fp32 eager，CPU 上用 gloo。
这里**没有**速度：几个进程挤在两个核上，时间说明不了任何事；也没有与数据并行的组合（见 mesh）。
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from experiments.lab.results import publish, run_main
from experiments.ranks.compare import (
    disagreement,
    flat_gradients,
    flat_parameters,
    largest_difference,
    relative_error,
    relative_to_largest,
)
from experiments.ranks.launch import shown
from experiments.ranks.traffic import Traffic
from experiments.ranks.world import World, torchrun_world
from experiments.training.recipe import adamw, learning_rate, seeded_gpt, set_learning_rate
from model import GPT, IGNORE_INDEX, GPTConfig
from tokens import Batch, global_batch, load_tokens
from tokens.errors import UserError

COMMAND = shown("experiments/tensor_parallel.py", nproc=4)


@dataclass(frozen=True)
class Options:
    """张量并行与单进程的等价：证明、计数与几种错误用法。要由 torchrun 启动。"""

    steps: int = 30
    """训练几步（次更新）"""
    batch: int = 8
    """每步几个序列（个）；张量并行的各个 rank 读同样的数据"""
    lr: float = 3e-3
    """学习率的峰值"""
    warmup: int = 10
    """学习率用几步升到峰值（步）"""
    d_model: int = 64
    """模型宽度（维）"""
    n_head: int = 4
    """注意力头数（个）；每个 rank 至少要分到一个"""
    n_layer: int = 2
    """层数（层）"""
    seq_len: int = 64
    """序列长度（token）；序列并行要求它是 rank 数的倍数"""
    seed: int = 0
    """随机种子"""


# ---------------------------------------------------------------- 切与拼


def cut(weight: Tensor, dim: int, world: int, *, parts: int = 1, units: int) -> list[Tensor]:
    """把 `weight` 的第 `dim` 维切成 `world` 份，每份都是拷贝。

    这一维先看成 `parts` 段（融合的 qkv 是 3 段，其余是 1 段），每段各有 `units` 个不可分的单位
    （头、神经元或词）；每一份从**每一段**里拿走同样的那几个单位。除不尽时前几份各多一个。
    """
    size = weight.size(dim) // (parts * units)
    blocks = weight.unflatten(dim, (parts, units, size))
    return [p.flatten(dim, dim + 2).clone() for p in blocks.tensor_split(world, dim=dim + 1)]


def join(pieces: list[Tensor], dim: int, *, parts: int = 1) -> Tensor:
    """`cut` 的逆：把各 rank 的份拼回完整的权重。"""
    blocks = [piece.unflatten(dim, (parts, -1)) for piece in pieces]
    return torch.cat(blocks, dim=dim + 1).flatten(dim, dim + 1)


# 权重名字的结尾 -> (切第几维, 分几段, 单位是什么)。PyTorch 的 Linear 存的是 (输出, 输入)，
# 所以论文里的「切列」（切输出）切的是第 0 维，「切行」（切输入）切的是第 1 维。
CUTS = {
    "attn.qkv.weight": (0, 3, "n_head"),
    "attn.out.weight": (1, 1, "n_head"),
    "mlp.gate.weight": (0, 1, "ffn_dim"),
    "mlp.up.weight": (0, 1, "ffn_dim"),
    "mlp.down.weight": (1, 1, "ffn_dim"),
    "embed.weight": (0, 1, "vocab_size"),
}


def how_to_cut(name: str) -> tuple[int, int, str] | None:
    """这个权重怎么切；范数的增益不切，返回 None。名字里可以有 `Region` 加上的一节 inner。"""
    plain = name.replace(".inner.", ".")
    return next((how for ending, how in CUTS.items() if plain.endswith(ending)), None)


# ---------------------------------------------------------------- 共轭算子


class CopyIn(torch.autograd.Function):
    """f：前向什么也不做，反向 all-reduce（Megatron-LM，arXiv 1909.08053，图 3）。"""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)  # x 在每个 rank 上都被用了，它的梯度是各处之和
        return grad


class SumOut(torch.autograd.Function):
    """g：前向 all-reduce，反向什么也不做；与 f 互为共轭。"""

    @staticmethod
    def forward(ctx, part: Tensor) -> Tensor:
        whole = part.contiguous().clone()
        dist.all_reduce(whole)  # 各 rank 算出的是同一个和的不同加数
        return whole

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


class GatherSequence(torch.autograd.Function):
    """f̄：前向沿 T 收集 (B, T/W, d) → (B, T, d)，反向 reduce-scatter（arXiv 2205.05198）。"""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return all_gather(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return reduce_scatter(grad)


class ScatterSequence(torch.autograd.Function):
    """ḡ：前向 reduce-scatter (B, T, d) → (B, T/W, d)，反向沿 T 收集；与 f̄ 互为共轭。"""

    @staticmethod
    def forward(ctx, part: Tensor) -> Tensor:
        return reduce_scatter(part)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return all_gather(grad)


def all_gather(x: Tensor) -> Tensor:
    """各 rank 的一段 (B, T/W, d) 沿 T 接起来；集体通信拼的是第 0 维，所以先把 T 换到最前。"""
    mine = x.transpose(0, 1).contiguous()
    whole = mine.new_empty(len(mine) * dist.get_world_size(), *mine.shape[1:])
    dist.all_gather_single(whole, mine)
    return whole.transpose(0, 1).contiguous()


def reduce_scatter(x: Tensor) -> Tensor:
    """各 rank 的 (B, T, d) 求和，自己只留下沿 T 的那一段 (B, T/W, d)。"""
    whole = x.transpose(0, 1).contiguous()
    mine = whole.new_empty(len(whole) // dist.get_world_size(), *whole.shape[1:])
    dist.reduce_scatter_single(mine, whole)
    return mine.transpose(0, 1).contiguous()


@dataclass(frozen=True)
class Edges:
    """张量并行区域的两条边：进去时做什么，出来时做什么。"""

    enter: Callable[[Tensor], Tensor]
    leave: Callable[[Tensor], Tensor]


TENSOR = Edges(CopyIn.apply, SumOut.apply)  # 区域之外：每个 rank 都有完整的激活
SEQUENCE = Edges(GatherSequence.apply, ScatterSequence.apply)  # 区域之外：每个 rank 有 T/W 个位置


class Region(nn.Module):
    """进去 → 手里的那几个头（或神经元）→ 出来。里面的模块原样照用，只是权重变窄了。"""

    def __init__(self, inner: nn.Module, edges: Edges) -> None:
        super().__init__()
        self.inner, self.edges = inner, edges

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        return self.edges.leave(self.inner(self.edges.enter(x), *rest))


# ---------------------------------------------------------------- 词表并行


class VocabParallelLoss(torch.autograd.Function):
    """每个 token 的交叉熵 (N,)，由各 rank 手里的 logits (N, V/W) 得到，谁也不收集 logits。

    −log softmax 要的只是每行的三个数：最大值、指数的和、目标那一格的值。各 rank 求出自己那段的，
    再 all-reduce：先求最大值（N 个数），再一起求后两个的和（2N 个数）。目标是 −100 的行不落在
    任何 rank 的词表里，它的结果没有意义，由调用者去掉。
    """

    @staticmethod
    def forward(ctx, logits: Tensor, target: Tensor, first: int) -> Tensor:
        top = logits.max(dim=1).values
        dist.all_reduce(top, op=dist.ReduceOp.MAX)
        shifted = logits - top[:, None]
        local = target - first
        mine = (local >= 0) & (local < logits.size(1))
        local = local.where(mine, 0)
        picked = shifted.gather(1, local[:, None])[:, 0] * mine
        exponents = shifted.exp()
        sums = torch.stack((exponents.sum(dim=1), picked))
        dist.all_reduce(sums)
        ctx.save_for_backward(exponents / sums[0][:, None], local, mine)
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        probabilities, local, mine = ctx.saved_tensors
        slope = probabilities.clone()
        slope[torch.arange(len(local)), local] -= mine.to(slope.dtype)  # softmax − one-hot
        return slope * grad[:, None], None, None


class ParallelGPT(nn.Module):
    """`whole` 归这个 rank 的那一份；`model(x, y)` → (自己那段词表的 logits, 全体的平均 loss)。

    各 rank 的 `whole`、x、y 要相同。`edges` 是 TENSOR 或 SEQUENCE；`qkv_parts=1` 是连着切 qkv 的
    错误写法，留着量它错多少。头不够分，或序列并行时 T 除不尽，抛 UserError。
    """

    def __init__(self, whole: GPT, me: World, edges: Edges = TENSOR, qkv_parts: int = 3) -> None:
        super().__init__()
        c = whole.config
        if c.n_head < me.size:
            raise UserError(f"{c.n_head} 个头分不给 {me.size} 个 rank：请用更多的头或更少的进程")
        self.config, self.edges, self.me = c, edges, me
        for name, weight in whole.named_parameters():
            if how := how_to_cut(name):
                dim, parts, unit = how
                units = getattr(c, unit)
                if name.endswith("qkv.weight") and qkv_parts == 1:
                    parts, units = 1, me.size
                weight.data = cut(weight.data, dim, me.size, parts=parts, units=units)[me.rank]
        for block in whole.blocks:
            block.attn = Region(block.attn, edges)
            block.mlp = Region(block.mlp, edges)
        self.embed, self.blocks, self.norm = whole.embed, whole.blocks, whole.norm
        self.register_buffer("rope", whole.rope, persistent=False)
        rows = torch.arange(c.vocab_size).tensor_split(me.size)[me.rank]
        self.first = int(rows[0])  # 手里的词从第几个开始

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if self.edges is SEQUENCE and idx.size(1) % self.me.size:
            raise UserError(f"{idx.size(1)} 个位置不能平分给 {self.me.size} 个 rank：请改 seq_len")
        rope, weight = self.rope[:, : idx.size(1)], self.embed.weight  # weight：(V/W, d)
        local = idx - self.first
        mine = (local >= 0) & (local < len(weight))
        found = F.embedding(local.where(mine, 0), weight) * mine[..., None]  # 不在手里的词是 0
        x = self.edges.leave(found)
        for block in self.blocks:
            x = block(x, rope)
        logits = F.linear(self.edges.enter(self.norm(x)), weight)  # (B, T, V/W)
        target = targets.flatten()
        losses = VocabParallelLoss.apply(logits.flatten(0, 1).float(), target, self.first)
        valid = target != IGNORE_INDEX
        return logits, (losses * valid).sum() / valid.sum()

    def norm_gains(self) -> list[nn.Parameter]:
        """不切的参数：每个 rank 都有一份的范数增益。"""
        return [p for p in self.parameters() if p.dim() == 1]

    def after_backward(self) -> None:
        """序列并行时范数只见过 T/W 个位置：增益的梯度要加起来，一次 all-reduce。"""
        if self.edges is SEQUENCE:
            gradients = [p.grad for p in self.norm_gains()]
            total = torch.cat(gradients)
            dist.all_reduce(total)
            for gradient, part in zip(gradients, total.split([len(g) for g in gradients]),
                                      strict=True):  # fmt: skip
                gradient.copy_(part)


# ---------------------------------------------------------------- 用 PyTorch 自己的 API


def by_library(model: GPT, me: World, plan: str = "once") -> GPT:
    """`parallelize_module` 之后的 GPT：权重变成 DTensor，通信由布局推出来。

    plan：`plain` 只写矩阵怎么切；`once` 再声明 MLP 的输入，gate 与 up 反向共用一次 all-reduce；
    `sequence` 是序列并行。头数要是 rank 数的倍数，否则抛 UserError：DTensor 按行切，会把头切开。
    """
    heads, device = model.config.n_head, me.device.type
    if heads % me.size:
        raise UserError(f"{heads} 个头不能平分给 {me.size} 个 rank：ColwiseParallel 会把头切开")
    mesh = init_device_mesh(device, (me.size,))
    for block in model.blocks:
        qkv = block.attn.qkv.weight  # DTensor 只会连着切，所以先把各 rank 该得的行排到一起
        qkv.data = torch.cat(cut(qkv.data, 0, me.size, parts=3, units=heads))
        parallelize_module(block, mesh, block_plan(plan))
    sequence = plan == "sequence"
    edge = Shard(1) if sequence else Replicate()
    parallelize_module(model, mesh, {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=edge),
        "head": ColwiseParallel(input_layouts=edge, output_layouts=Shard(-1),
                                use_local_output=False),
    } | ({"norm": SequenceParallel()} if sequence else {}))  # fmt: skip
    model.head.weight = model.embed.weight  # 两处各切了一次，重新共享
    return model


def block_plan(plan: str) -> dict:
    """一层里每个子模块的切法。"""
    out = Shard(1) if plan == "sequence" else Replicate()
    cuts = {
        "attn.qkv": ColwiseParallel(), "attn.out": RowwiseParallel(output_layouts=out),
        "mlp.gate": ColwiseParallel(), "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=out),
    }  # fmt: skip
    whole = Replicate()
    if plan == "once":
        cuts["mlp"] = PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole)
    if plan == "sequence":
        cuts |= {"attn_norm": SequenceParallel(), "mlp_norm": SequenceParallel()}
        cuts["mlp"] = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=whole)
        cuts["attn"] = PrepareModuleInput(input_layouts=(Shard(1), None),
                                          desired_input_layouts=(whole, None))  # fmt: skip
    return cuts


# ---------------------------------------------------------------- 一步与 30 步


def backward(model: nn.Module, batch: Batch) -> float:
    """一次前向与反向，返回 loss；单进程、手写的、DTensor 的模型都走这里。"""
    with loss_parallel():  # 只对 DTensor 的 logits 起作用
        loss = model(*batch)[1]
        loss.backward()
    if isinstance(model, ParallelGPT):
        model.after_backward()
    return loss.item()


def train(model: nn.Module, batches: Iterable[Batch], o: Options) -> list[float]:
    """每个 batch 更新一次，返回各步的 loss。切开的权重照样是矩阵，优化器不必知道。

    学习率从小升起：AdamW 的头几步把每个元素的更新都放大到学习率那么大，梯度小到与舍入误差
    相当的元素，方向是随机的，两次运行便在那里分开（与并行无关，见对照的那一行）。
    """
    optimizer, losses = adamw(model, lr=o.lr), []
    for step, batch in enumerate(batches):
        rate = learning_rate(step, peak=o.lr, warmup=o.warmup, total=math.inf)
        set_learning_rate(optimizer, rate)
        optimizer.zero_grad(set_to_none=True)
        losses.append(backward(model, batch))
        optimizer.step()
    return losses


def whole_vector(model: nn.Module, me: World, what: str) -> Tensor:
    """把各 rank 的参数（`what="data"`）或梯度（`"grad"`）拼回单进程的次序，接成一个向量。"""
    config, pieces = model.config, []
    for name, p in model.named_parameters():
        value = getattr(p, what)
        how = how_to_cut(name)
        if isinstance(value, DTensor):
            value = value.full_tensor()
            if name.endswith("qkv.weight"):  # 行还按 rank 排着
                value = join(cut(value, 0, me.size, units=config.n_head), 0, parts=3)
        elif how and isinstance(model, ParallelGPT):
            value = join(me.gather(value), how[0], parts=how[1])
        pieces.append(value.detach().flatten())
    return torch.cat(pieces)


def build(method: str, config: GPTConfig, seed: int, me: World) -> nn.Module:
    """同一个种子的模型，按 `METHODS` 里的名字切好。"""
    whole = seeded_gpt(config, seed, me.device)
    return METHODS[method](whole, me)


METHODS: dict[str, Callable[[GPT, World], nn.Module]] = {
    "手写：张量并行": lambda model, me: ParallelGPT(model, me, TENSOR),
    "手写：序列并行": lambda model, me: ParallelGPT(model, me, SEQUENCE),
    "parallelize_module": lambda model, me: by_library(model, me, "once"),
    "parallelize_module：序列并行": lambda model, me: by_library(model, me, "sequence"),
}


@dataclass(frozen=True)
class Run:
    """一种写法训练一遍留下的：第一步的梯度、各步的 loss、最后的参数（单进程的次序）。"""

    gradient: Tensor
    losses: list[float]
    end: Tensor

    def row(self, right: "Run", start: Tensor) -> dict:
        """与 `right` 比：梯度差相对于最大的梯度，loss 与参数是最大的绝对差。"""
        return {
            "param_moved": largest_difference(right.end, start),
            "gradient": relative_to_largest(self.gradient, right.gradient),
            "loss_diff": max(abs(a - b) for a, b in zip(self.losses, right.losses, strict=True)),
            "param_diff": largest_difference(self.end, right.end),
        }


def train_and_note(model: nn.Module, batches: list[Batch], o: Options, me: World) -> Run:
    """先记第一步的梯度，再从头训练。"""
    backward(model, batches[0])
    gradient = whole_vector(model, me, "grad")
    losses = train(model, batches, o)
    return Run(gradient, losses, whole_vector(model, me, "data"))


def equivalence(
    config: GPTConfig, batches: list[Batch], o: Options, me: World
) -> tuple[list[dict], Tensor]:
    """每种写法一行：各与一个进程差多少；还有一个进程训练出的参数，接成一个向量。

    头一行是对照：仍是一个进程，只是每个 batch 里的序列倒着排，数学上什么也没变。
    """

    def as_is(batch: Batch) -> Batch:
        return batch

    def backwards(batch: Batch) -> Batch:
        return batch[0].flip(0), batch[1].flip(0)

    def alone(order: Callable[[Batch], Batch]) -> Run:
        model = seeded_gpt(config, o.seed, me.device)
        return train_and_note(model, [order(batch) for batch in batches], o, me)

    right, control = me.on_master(lambda: (alone(as_is), alone(backwards)))  # 别人等着
    start = flat_parameters(seeded_gpt(config, o.seed))
    runs = {"对照：一个进程，序列倒着排": control}
    for method in METHODS:
        model = build(method, config, o.seed, me)
        runs[method] = train_and_note(model, batches, o, me)
    rows = [{"method": name, "ranks": 1 if run is control else me.size, "steps": len(batches),
             **run.row(right, start)} for name, run in runs.items()]  # fmt: skip
    return rows, right.end


# ---------------------------------------------------------------- 数通信，数内存


def expected(config: GPTConfig, batch: int, seq_len: int, method: str) -> dict:
    """一步里该有的通信：{种类: (次数, 字节)}，fp32；`method` 是 `METHODS` 里的名字。

    每层两个区域、词嵌入与输出头合起来算一个，共 2L + 1 个；每个区域进出各一条边，前向反向
    各有一条要通信。张量并行一条边是一次 B·T·d 的 all-reduce；序列并行每条边都通信，
    reduce-scatter 与 all-gather 各半。交叉熵另有 3N 个数的 all-reduce：手写的分两次，库分三次。
    """
    regions, tokens = 2 * config.n_layer + 1, batch * seq_len
    edge, loss, gains = 4 * tokens * config.d_model, 4 * 3 * tokens, 4 * regions * config.d_model
    by_hand = method.startswith("手写")
    if "序列" not in method:  # 只写矩阵时，gate 与 up 的反向各求和一次
        edges = 2 * regions + (config.n_layer if "只写矩阵" in method else 0)
        return {"all_reduce": (edges + (2 if by_hand else 3), edges * edge + loss)}
    both = (2 * regions, 2 * regions * edge)  # 库把增益的求和留到用它的时候
    return {"all_reduce": (3, loss + gains * by_hand), "all_gather": both, "reduce_scatter": both}


def traffic_rows(config: GPTConfig, batch: Batch, o: Options, me: World) -> list[dict]:
    """每种写法一步里通信几次、多少字节，旁边是公式。"""
    variants = METHODS | {
        "parallelize_module：只写矩阵": lambda model, me: by_library(model, me, "plain")}
    rows = []
    for method, cut_model in variants.items():
        model = cut_model(seeded_gpt(config, o.seed, me.device), me)
        with Traffic() as traffic:
            backward(model, batch)
        formula = expected(config, *batch[0].shape, method)
        for row in traffic.table():
            calls, payload = formula.get(row["kind"], (0, 0))
            rows.append({"method": method, "kind": row["kind"], "calls": row["calls"],
                         "calls_formula": calls, "payload": row["payload"],
                         "payload_formula": payload, "sent": row["sent"]})  # fmt: skip
    return rows


def activation_bytes(model: nn.Module, batch: Batch) -> dict[str, int]:
    """一次前向为反向留下多少字节：{"norms": 范数自己留下的, "total": 全部}；参数不算。"""
    resident = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    saved: dict[int, tuple[int, bool]] = {}
    inside = [False]

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in resident:
            saved.setdefault(storage.data_ptr(), (storage.nbytes(), inside[0]))
        return tensor

    handles = []
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            handles.append(module.register_forward_pre_hook(lambda *_: inside.__setitem__(0, True)))
            handles.append(module.register_forward_hook(lambda *_: inside.__setitem__(0, False)))
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(*batch)[1]  # 计算图活着，留下的存储就不会被复用
    del loss
    for handle in handles:
        handle.remove()
    return {"norms": sum(n for n, norm in saved.values() if norm),
            "total": sum(n for n, _ in saved.values())}  # fmt: skip


def memory_rows(config: GPTConfig, batch: Batch, o: Options, me: World) -> list[dict]:
    """一个进程、张量并行、序列并行：rank 0 的参数（旁边是公式）与激活，字节。

    参数的公式：矩阵 V·d + L·(4d² + 3·d·f) 除以 W，范数增益 (2L + 1)·d 不除。
    """
    c = config
    matrices = c.vocab_size * c.d_model
    matrices += c.n_layer * (4 * c.d_model**2 + 3 * c.d_model * c.ffn_dim)
    gains = (2 * c.n_layer + 1) * c.d_model
    models = {"一个进程": lambda model, me: model} | {
        name: METHODS[name] for name in ("手写：张量并行", "手写：序列并行")}  # fmt: skip
    rows = []
    for name, cut_model in models.items():
        model = cut_model(seeded_gpt(config, o.seed, me.device), me)
        world = 1 if name == "一个进程" else me.size
        rows.append({
            "method": name, "params": sum(p.nbytes for p in model.parameters()),
            "params_formula": 4 * (matrices // world + gains),
            **{f"{kind}_kept": n for kind, n in activation_bytes(model, batch).items()},
        })  # fmt: skip
    return rows


# ---------------------------------------------------------------- 错的写法


class SumBothWays(SumOut):
    """错的 g：前向 all-reduce，反向又 all-reduce 一次（可求导的 all_reduce 就是这样）。"""

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class ForgetfulGPT(ParallelGPT):
    """错的序列并行：反向之后不把范数增益的梯度加起来。"""

    def after_backward(self) -> None:
        pass


MISTAKES: dict[str, Callable[[GPT, World], nn.Module]] = {
    "对的": lambda model, me: ParallelGPT(model, me),
    "进去时没有 f": lambda model, me: ParallelGPT(model, me, Edges(lambda x: x, SumOut.apply)),
    "g 的反向也求和": lambda model, me: ParallelGPT(
        model, me, Edges(CopyIn.apply, SumBothWays.apply)),
    "qkv 连着切": lambda model, me: ParallelGPT(model, me, qkv_parts=1),
    "序列并行忘了范数的梯度": lambda model, me: ForgetfulGPT(model, me, SEQUENCE),
}  # fmt: skip


def mistake_rows(config: GPTConfig, trained: Tensor, batch: Batch, me: World) -> list[dict]:
    """在训练过的权重上，每种写法的 loss 与梯度各错多少，各 rank 的范数增益的梯度一致不一致。"""

    def copy() -> GPT:
        model = GPT(config).to(me.device)
        nn.utils.vector_to_parameters(trained.clone(), model.parameters())
        return model

    one = copy()
    loss, rows = backward(one, batch), []
    right = flat_gradients(one)
    for name, cut_model in MISTAKES.items():
        model = cut_model(copy(), me)
        got = backward(model, batch)
        norms = torch.cat([p.grad for p in model.norm_gains()])
        rows.append({"what": name, "loss": got, "one_process": loss, "loss_diff": abs(got - loss),
                     "gradient_error": relative_error(whole_vector(model, me, "grad"), right),
                     "norms_disagree": disagreement(norms)})  # fmt: skip
    return rows


# ---------------------------------------------------------------- 入口


def checked(options: Options) -> GPTConfig:
    """选项不对就抛 UserError，一句话说清给了什么、接受什么；对就返回模型的结构。"""
    for name in ("steps", "batch", "warmup"):
        if (value := getattr(options, name)) < 1:
            raise UserError(f"--{name} {value}：至少是 1")
    if not (math.isfinite(options.lr) and options.lr > 0):
        raise UserError(f"--lr {options.lr}：要一个大于 0 的有限数")
    try:
        return GPTConfig(d_model=options.d_model, n_head=options.n_head,
                         n_layer=options.n_layer, seq_len=options.seq_len)  # fmt: skip
    except ValueError as error:
        raise UserError(str(error)) from None


def main(options: Options) -> None:
    """加入进程组，依次量各小节；rank 0 打印表格并写 results/tensor_parallel_*.csv。"""
    o, config = options, checked(options)
    with torchrun_world(COMMAND) as me:
        if config.n_head % me.size or config.seq_len % me.size:
            raise UserError(f"n_head {config.n_head}、seq_len {config.seq_len} 都要是"
                            f" {me.size} 个进程的倍数，请改其中一个")  # fmt: skip
        data = load_tokens(vocab_size=config.vocab_size)["train"]
        batches = [tuple(t.to(me.device) for t in global_batch(data, s, o.batch, o.seq_len, o.seed))
                   for s in range(o.steps)]  # fmt: skip

        def say(name: str, title: str, rows: list[dict]) -> None:
            if me.master:
                publish(f"tensor_parallel_{name}", title, rows, o, formats=FORMATS,
                        device=str(me.device))  # fmt: skip

        say("memory", "每个 rank 的参数与激活（字节）", memory_rows(config, batches[0], o, me))
        say("traffic", "一步的通信（每个 rank）", traffic_rows(config, batches[0], o, me))
        me.say(f"\n训练 {o.steps} 步：一个进程，以及 {len(METHODS)} 种写法……")
        rows, trained = equivalence(config, batches, o, me)
        wrong = mistake_rows(config, trained, batches[0], me)
        say("mistakes", "错的写法（在训练过的权重上）", wrong)
        say("equivalence", f"{me.size} 个 rank 与一个进程最多差多少", rows)


FORMATS = {
    "loss": "{:.4f}", "one_process": "{:.4f}", "loss_diff": "{:.1e}", "gradient": "{:.1e}",
    "gradient_error": "{:.1e}", "norms_disagree": "{:.1e}", "param_moved": "{:.3f}",
    "param_diff": "{:.1e}", "payload": "{:,.0f}", "sent": "{:,.0f}",
    "payload_formula": "{:,.0f}",
    "params": "{:,.0f}", "params_formula": "{:,.0f}", "norms_kept": "{:,.0f}",
    "total_kept": "{:,.0f}",
}  # fmt: skip


if __name__ == "__main__":
    run_main(main, Options)
