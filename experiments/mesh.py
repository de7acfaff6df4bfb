"""混合并行：数据、流水线、张量三个轴摆成一张网格，合起来仍与单进程相同。

    torchrun --standalone --nproc-per-node 8 experiments/mesh.py      # 2 核 CPU 上约半分钟
    torchrun --standalone --nproc-per-node 4 experiments/mesh.py      # 只有两个轴，更快

依次证明：DP × TP、DP × PP、DP × PP × TP（手写，一份代码）与 FSDP × TP、FSDP × TP × PP（DeviceMesh、
parallelize_module、fully_shard、pipelining）的梯度与训练后的参数都等于单进程；每个轴每步收发
几次、多少字节，与公式相等；数据按 rank 分、梯度在所有 rank 上平均、梯度范数只算本地，各错多少。
结果写进 results/mesh_*.csv。全程 fp32、eager，CPU 上用 gloo。
这里**没有** 1F1B 的时间线（见 pipeline_parallel）、词表并行（见 tensor_parallel）与专家并行。
"""

import itertools
import logging
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from experiments.lab.results import publish, run_main
from experiments.ranks.launch import shown
from experiments.ranks.world import World, torchrun_world
from experiments.training.recipe import adamw, seeded_gpt
from model import GPT, Attention, Block, GPTConfig, explicit_attention, rotate
from tokens import Batch, global_batch, load_tokens
from tokens.errors import UserError

COMMAND = shown("experiments/mesh.py", nproc=8)
AXES = ("dp", "pp", "tp")  # 从外到里：最里面的轴，编号相邻，住在同一台机器
COLUMNS = ("mlp.gate", "mlp.up")  # 按输出切
ROWS = ("attn.out", "mlp.down")  # 按输入切


@dataclass(frozen=True)
class Options:
    """几个轴的网格与单进程的等价。要由 torchrun 启动，4 或 8 个进程。"""

    steps: int = 30
    """训练几步（次更新）"""
    rows: int = 8
    """每步几个序列（个），全体合计"""
    micro_batches: int = 2
    """流水线每步几个 micro-batch（个）"""
    lr: float = 1e-3
    """学习率；再大，不预热就会放大舍入误差，单进程拆成两份算也一样"""
    d_model: int = 64
    """模型宽度（维）"""
    n_head: int = 4
    """注意力头数（个）"""
    n_layer: int = 2
    """层数（层）"""
    seq_len: int = 32
    """序列长度（token）"""
    vocab_size: int = 8192
    """词表（个）"""
    seed: int = 0
    """随机种子"""


@dataclass(frozen=True)
class Shape:
    """网格的三个边长，乘积是进程数。"""

    dp: int
    pp: int
    tp: int

    def __str__(self) -> str:
        sizes = {"DP": self.dp, "PP": self.pp, "TP": self.tp}
        return " × ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)


# ---------------------------------------------------------------- 网格：坐标、进程组、记账


class Mesh:
    """我在网格里的坐标，三个轴各一个进程组；经过它的通信按轴记下次数与字节。"""

    def __init__(self, me: World, shape: Shape) -> None:
        grid = torch.arange(me.size).view(shape.dp, shape.pp, shape.tp)
        self.shape, self.rank = shape, me.rank
        self.at = dict(zip(AXES, (grid == me.rank).nonzero()[0].tolist(), strict=True))
        self.members: dict[str, list[int]] = {}
        self.groups: dict[str, dist.ProcessGroup] = {}
        self.traffic = {axis: [0, 0] for axis in (*AXES, "tied")}
        for i, axis in enumerate(AXES):
            for line in grid.movedim(i, -1).reshape(-1, grid.size(i)).tolist():
                self._join(axis, line, me)
        for line in grid[:, [0, -1]].movedim(1, -1).reshape(-1, 2).tolist():
            self._join("tied", sorted(set(line)), me)  # 第一段与最后一段：词嵌入两头都有

    def _join(self, axis: str, line: list[int], me: World) -> None:
        group = dist.new_group(line)  # 每个进程都要建每一个组，次序相同，不在里面也要建
        if me.rank in line:
            self.members[axis], self.groups[axis] = line, group

    @property
    def first(self) -> bool:
        return self.at["pp"] == 0

    @property
    def last(self) -> bool:
        return self.at["pp"] == self.shape.pp - 1

    def note(self, axis: str, tensor: Tensor) -> None:
        """记一次通信：次数与这个张量的字节数。"""
        self.traffic[axis][0] += 1
        self.traffic[axis][1] += tensor.nbytes

    def sum(self, tensor: Tensor, axis: str) -> Tensor:
        """沿一个轴原地求和；这个轴只有一个进程时不通信。"""
        if len(self.members[axis]) > 1:
            dist.all_reduce(tensor, group=self.groups[axis])
            self.note(axis, tensor)
        return tensor

    def send(self, tensor: Tensor, step: int) -> None:
        """发给流水线上相邻的一段：step 为 1 是下一段，−1 是上一段。"""
        dist.send(tensor.contiguous(), self.members["pp"][self.at["pp"] + step])
        self.note("pp", tensor)

    def receive(self, like: Tensor, step: int) -> Tensor:
        """从流水线上相邻的一段收一个与 `like` 同形的张量。"""
        tensor = torch.empty_like(like)
        dist.recv(tensor, self.members["pp"][self.at["pp"] + step])
        return tensor


# ---------------------------------------------------------------- 张量并行：切权重，两个共轭算子


def cut(name: str, weight: Tensor, part: int, parts: int) -> Tensor:
    """一个权重里归第 `part` 份的那一块；qkv 按头切，所以先分成 Q、K、V 三段再各取一块。"""
    if name.endswith("attn.qkv.weight"):
        return weight.view(3, parts, -1, weight.size(1))[:, part].flatten(0, 1)
    if name.endswith(tuple(f"{m}.weight" for m in COLUMNS)):
        return weight.chunk(parts, 0)[part]
    if name.endswith(tuple(f"{m}.weight" for m in ROWS)):
        return weight.chunk(parts, 1)[part]
    return weight


def join(name: str, pieces: list[Tensor]) -> Tensor:
    """`cut` 的逆：把各份拼回完整的权重；没有切的取第一份。"""
    if name.endswith("attn.qkv.weight"):
        return torch.cat([p.view(3, -1, p.size(1)) for p in pieces], 1).flatten(0, 1)
    if name.endswith(tuple(f"{m}.weight" for m in COLUMNS)):
        return torch.cat(pieces, 0)
    if name.endswith(tuple(f"{m}.weight" for m in ROWS)):
        return torch.cat(pieces, 1)
    return pieces[0]


class Enter(torch.autograd.Function):
    """进入切开的区域：前向原样，反向把各份的梯度加起来。"""

    @staticmethod
    def forward(ctx, x: Tensor, mesh: Mesh) -> Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.mesh.sum(grad.clone(), "tp"), None


class Leave(torch.autograd.Function):
    """离开切开的区域：前向把各份的部分和加起来，反向原样。"""

    @staticmethod
    def forward(ctx, x: Tensor, mesh: Mesh) -> Tensor:
        return mesh.sum(x.clone(), "tp")

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class LocalHeads(Attention):
    """注意力，头数由权重的行数定：切成几份就算几个头。"""

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        B, T, C = x.shape
        qkv = self.qkv(x).view(B, T, 3, -1, C // self.config.n_head)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # 各 (B, 本地的头, T, head_dim)
        y = explicit_attention(rotate(q, rope), rotate(k, rope), v)
        return self.out(y.transpose(1, 2).flatten(2))


class CutBlock(Block):
    """手写张量并行的一层：注意力与 MLP 各是「列切、行切、一次求和」。"""

    mesh: Mesh

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        h = Enter.apply(self.attn_norm(x), self.mesh)
        x = x + Leave.apply(self.attn(h, rope), self.mesh)
        h = Enter.apply(self.mlp_norm(x), self.mesh)
        return x + Leave.apply(self.mlp(h), self.mesh)


def cut_block(block: Block, mesh: Mesh) -> CutBlock:
    """把一层换成它的第 `tp` 份。"""
    cut_one = CutBlock(block.attn.config)
    cut_one.attn = LocalHeads(block.attn.config)
    cut_one.mesh = mesh
    for name, weight in block.named_parameters():
        module, _, leaf = name.rpartition(".")
        mine = cut(name, weight.detach(), mesh.at["tp"], mesh.shape.tp).clone()
        setattr(cut_one.get_submodule(module), leaf, nn.Parameter(mine))
    return cut_one


# ---------------------------------------------------------------- 流水线：一段模型，两趟


class Stage(nn.Module):
    """流水线的一段：几层，第一段另有词嵌入，最后一段另有归一化与输出头。

    各层用全局的序号命名，所以参数的名字与整个模型里的相同。只有一段时输出头与词嵌入仍是同一个
    参数；有几段时它们在两头各有一份，梯度要加起来。
    """

    def __init__(self, model: GPT, index: int, count: int) -> None:
        super().__init__()
        layers = torch.arange(len(model.blocks)).tensor_split(count)[index].tolist()
        self.first, self.last = index == 0, index == count - 1
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in layers})
        if self.first:
            self.embed = model.embed
        if self.last:
            self.norm, self.head = model.norm, model.head
            if not self.first:
                self.head.weight = nn.Parameter(model.head.weight.detach().clone())
        self.register_buffer("rope", model.rope, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) if self.first else x
        for block in self.blocks.values():
            h = block(h, self.rope[:, : h.size(1)])
        return self.head(self.norm(h)) if self.last else h


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """每个位置的交叉熵的平均，nat。"""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def pipeline_step(stage: Stage, mesh: Mesh, micros: list[Batch]) -> float:
    """GPipe：先把每个 micro-batch 的前向走完，再依次反向；返回平均 loss（最后一段才有）。"""
    config = next(iter(stage.blocks.values())).attn.config
    kept, total = [], 0.0
    for x, y in micros:
        if not mesh.first:
            x = mesh.receive(torch.empty(*x.shape, config.d_model), -1).requires_grad_()
        out = stage(x)
        if mesh.last:
            out = cross_entropy(out, y) / len(micros)
            total += out.item()
        else:
            mesh.send(out.detach(), 1)
        kept.append((x, out))
    for x, out in kept:
        out.backward(None if mesh.last else mesh.receive(out, 1))
        if not mesh.first:
            mesh.send(x.grad, -1)
    return total


# ---------------------------------------------------------------- 一步：三个轴合起来


def rows_of(batch: Batch, part: int, parts: int) -> Batch:
    """全局 batch 里归第 `part` 份的那几行。"""
    return batch[0].chunk(parts)[part], batch[1].chunk(parts)[part]


def tie(stage: Stage, mesh: Mesh) -> None:
    """词嵌入与输出头是同一个矩阵，却在两头各有一份：把两份梯度加起来。"""
    if mesh.shape.pp > 1 and (mesh.first or mesh.last):
        weight = stage.embed.weight if mesh.first else stage.head.weight
        grad = weight.grad.to_local() if isinstance(weight.grad, DTensor) else weight.grad
        mesh.sum(grad, "tied")


def hand_gradients(
    stage: Stage, mesh: Mesh, batch: Batch, micro_batches: int, mistake: str = ""
) -> float:
    """手写的一步：前向、反向、词嵌入的两份相加、沿 DP 平均。返回本列的 loss。

    `mistake` 演示错误用法："rows" 按 rank 编号分数据，"world" 在所有进程上平均梯度。
    """
    size = mesh.shape.dp * mesh.shape.pp * mesh.shape.tp
    part = (mesh.rank, size) if mistake == "rows" else (mesh.at["dp"], mesh.shape.dp)
    mine = rows_of(batch, *part)
    chunks = min(micro_batches, len(mine[0])) if mesh.shape.pp > 1 else 1
    micros = list(zip(*(t.chunk(chunks) for t in mine), strict=True))
    stage.zero_grad(set_to_none=True)
    loss = pipeline_step(stage, mesh, micros)
    tie(stage, mesh)
    for param in stage.parameters():
        if mistake == "world":
            dist.all_reduce(param.grad)
            param.grad /= size
        else:
            mesh.sum(param.grad, "dp").div_(mesh.shape.dp)
    return loss


def hand_stage(model: GPT, mesh: Mesh) -> Stage:
    """手写：取流水线上自己那一段，每一层再取张量并行的那一份。"""
    stage = Stage(model, mesh.at["pp"], mesh.shape.pp)
    for name, block in stage.blocks.items():
        stage.blocks[name] = cut_block(block, mesh)
    return stage


# ---------------------------------------------------------------- 同样的网格，用 PyTorch 的接口


def library_stage(model: GPT, mesh: Mesh) -> tuple[Stage, dist.DeviceMesh]:
    """DeviceMesh 上的同一段：TP 用 parallelize_module，DP 用 fully_shard。先切张量，再切数据。"""
    shape = mesh.shape
    device_mesh = init_device_mesh("cpu", (shape.dp, shape.pp, shape.tp), mesh_dim_names=AXES)
    plan = {"attn.qkv": ColwiseParallel()}
    plan |= {name: ColwiseParallel() for name in COLUMNS}
    plan |= {name: RowwiseParallel() for name in ROWS}
    stage = Stage(model, mesh.at["pp"], shape.pp)
    for block in stage.blocks.values():
        heads = LocalHeads(block.attn.config)
        heads.load_state_dict(block.attn.state_dict())
        block.attn = heads
        if shape.tp > 1:  # 库按行等分：先把 qkv 的行排成「每份各有自己的 Q、K、V」
            weight = heads.qkv.weight
            parts = [cut("attn.qkv.weight", weight.data, i, shape.tp) for i in range(shape.tp)]
            weight.data = torch.cat(parts)
            parallelize_module(block, device_mesh["tp"], plan)
        fully_shard(block, mesh=device_mesh["dp"])
    fully_shard(stage, mesh=device_mesh["dp"])
    return stage, device_mesh


class LibraryStep:
    """库的一步：有几段时用 Schedule1F1B，一段时直接前向、反向；FSDP 在反向里归约梯度。"""

    def __init__(self, stage: Stage, device_mesh: dist.DeviceMesh, mesh: Mesh, micro: int) -> None:
        self.stage, self.mesh, self.schedule = stage, mesh, None
        if mesh.shape.pp > 1:
            part = PipelineStage(
                stage, mesh.at["pp"], mesh.shape.pp, torch.device("cpu"),
                group=device_mesh.get_group("pp"),
            )
            self.schedule = Schedule1F1B(part, micro, loss_fn=cross_entropy)

    def __call__(self, batch: Batch) -> float:
        x, y = rows_of(batch, self.mesh.at["dp"], self.mesh.shape.dp)
        self.stage.zero_grad(set_to_none=True)
        if self.schedule is None:
            loss = cross_entropy(self.stage(x), y)
            loss.backward()
            return loss.item()
        losses: list[Tensor] = []
        if self.mesh.first:
            self.schedule.step(x)
        else:
            self.schedule.step(**({"target": y, "losses": losses} if self.mesh.last else {}))
        tie(self.stage, self.mesh)
        return sum(loss.item() for loss in losses) / max(1, len(losses))


# ---------------------------------------------------------------- 收回来，与单进程比


def collect(tensors: dict[str, Tensor], mesh: Mesh, me: World) -> dict[str, Tensor]:
    """各进程手里的块拼成整个模型的字典（名字与 GPT 的相同）；每个进程都得到。

    DTensor 先沿自己的网格拼全（qkv 的行再排回来）；手写的按 TP 拼，DP 的各份取第一份。
    """
    # 两个轴切了同一维时，拼全要两次 all-gather，每个进程都会提醒一次；这里只为比较，不要紧
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    whole, library = {}, False
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            library, full = True, tensor.full_tensor()
            if name.endswith("attn.qkv.weight"):
                full = join(name, list(full.chunk(mesh.shape.tp)))
            tensor = full
        whole[name] = tensor.detach().clone()
    spare = mesh.at["dp"] > 0 or (library and mesh.at["tp"] > 0)  # 与别人手里的相同，不必再发
    found: dict[str, list[Tensor]] = {}
    for theirs in me.gather({} if spare else whole):
        for name, tensor in theirs.items():
            found.setdefault(name, []).append(tensor)
    return {name: join(name, pieces) for name, pieces in found.items()}


def gap(got: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """最大的绝对差，在单进程有的每一个参数上。"""
    return max((got[name] - right[name]).abs().max().item() for name in right)


def largest(tensors: dict[str, Tensor]) -> float:
    return max(t.abs().max().item() for t in tensors.values())


def named_gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in module.named_parameters()}


@dataclass(frozen=True)
class Reference:
    """单进程的答案：第一步的梯度，训练之后的参数与 loss。"""

    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    loss: float


def reference(config: GPTConfig, data: Tensor, o: Options) -> Reference:
    """一个进程、整个模型、整个 batch，训练 `steps` 步。"""
    model = seeded_gpt(config, o.seed)
    optimizer, first = adamw(model, o.lr), {}
    for step in range(o.steps):
        optimizer.zero_grad(set_to_none=True)
        loss = model(*global_batch(data, step, o.rows, o.seq_len, o.seed))[1]
        loss.backward()
        first = first or {name: g.clone() for name, g in named_gradients(model).items()}
        optimizer.step()
    return Reference(first, {n: p.detach() for n, p in model.named_parameters()}, loss.item())


@dataclass(frozen=True)
class Trained:
    """网格上训练的结果：拼全的梯度与参数，第一步的通信，最后一步的 loss。"""

    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    traffic: dict[str, tuple[int, int]]
    loss: float


def train_on_mesh(
    config: GPTConfig, data: Tensor, o: Options, me: World, shape: Shape, how: str
) -> Trained:
    """在网格上训练同样的步数。"""
    mesh, model = Mesh(me, shape), seeded_gpt(config, o.seed)
    if how == "手写":
        stage = hand_stage(model, mesh)

        def step(batch: Batch) -> float:
            return hand_gradients(stage, mesh, batch, o.micro_batches)
    else:
        stage, device_mesh = library_stage(model, mesh)
        step = LibraryStep(stage, device_mesh, mesh, o.micro_batches)
    optimizer, first, traffic, loss = adamw(stage, o.lr, fused=None), {}, {}, 0.0
    for number in range(o.steps):
        loss = step(global_batch(data, number, o.rows, o.seq_len, o.seed))
        if not first:
            first = collect(named_gradients(stage), mesh, me)
            traffic = {axis: tuple(count) for axis, count in mesh.traffic.items()}
        optimizer.step()
    losses = [value for last, value in me.gather((mesh.last and not mesh.at["tp"], loss)) if last]
    parameters = collect(dict(stage.named_parameters()), mesh, me)
    return Trained(first, parameters, traffic, sum(losses) / len(losses))


def equality(
    config: GPTConfig, data: Tensor, o: Options, me: World
) -> tuple[list[dict], list[dict]]:
    """每种网格、每种写法与单进程比：(误差, 手写的每个轴收发了多少)。"""
    right = reference(config, data, o) if me.master else None
    rows, traffic = [], []
    for shape, how in grids(me.size):
        me.say(f"… {name_of(shape, how)}")
        got = train_on_mesh(config, data, o, me, shape, how)
        if not me.master:
            continue
        embed = got.parameters["embed.weight"]
        other = got.parameters.get("head.weight", embed)  # 有几段时词嵌入有两份
        rows.append({
            "grid": name_of(shape, how), "how": how,
            "grad_error": gap(got.gradients, right.gradients) / largest(right.gradients),
            "param_diff": gap(got.parameters, right.parameters),
            "loss_diff": abs(got.loss - right.loss),
            "tied_gap": (other - embed).abs().max().item(),
        })
        if how == "手写":
            traffic += traffic_rows(config, o, shape, got.traffic)
    return rows, traffic


def grids(size: int) -> list[tuple[Shape, str]]:
    """这么多进程要证明的网格与写法。"""
    if size == 4:
        return [(Shape(2, 1, 2), "手写"), (Shape(2, 2, 1), "手写"), (Shape(1, 2, 2), "手写"),
                (Shape(2, 1, 2), "库"), (Shape(2, 2, 1), "库")]  # fmt: skip
    return [(Shape(4, 1, 2), "手写"), (Shape(4, 2, 1), "手写"), (Shape(2, 2, 2), "手写"),
            (Shape(4, 1, 2), "库"), (Shape(2, 2, 2), "库")]  # fmt: skip


def name_of(shape: Shape, how: str) -> str:
    """库的 DP 轴是 fully_shard：写成 FSDP。"""
    return str(shape).replace("DP", "FSDP") if how == "库" else str(shape)


# ---------------------------------------------------------------- 数一数每个轴


def expected_traffic(config: GPTConfig, o: Options, shape: Shape) -> dict[str, tuple[int, int]]:
    """第 0 号进程（第一段）一步里每个轴的（次数, 字节），由公式：fp32，4 字节。"""
    layers = len(torch.arange(config.n_layer).tensor_split(shape.pp)[0])
    rows = o.rows // shape.dp
    micro = min(o.micro_batches, rows) if shape.pp > 1 else 1
    activation = 4 * rows // micro * o.seq_len * config.d_model
    embedding = 4 * config.vocab_size * config.d_model
    d, f, parts = config.d_model, config.ffn_dim, shape.tp
    local = 4 * layers * ((4 * d * d + 3 * d * f) // parts + 2 * d) + embedding
    tensors = 8 * layers - layers + 1  # 每层 5 个矩阵、2 个增益，加词嵌入
    if shape.pp == 1:
        local, tensors = local + 4 * d, tensors + 1  # 最后的归一化
    return {
        "tp": (4 * layers * micro, 4 * layers * micro * activation) if parts > 1 else (0, 0),
        "pp": (micro, micro * activation) if shape.pp > 1 else (0, 0),
        "tied": (1, embedding) if shape.pp > 1 else (0, 0),
        "dp": (tensors, local) if shape.dp > 1 else (0, 0),
    }


AXIS_NAMES = {
    "tp": "TP：激活求和", "pp": "PP：发激活", "tied": "PP：词嵌入的梯度", "dp": "DP：梯度求和",
}


def traffic_rows(
    config: GPTConfig, o: Options, shape: Shape, counted: dict[str, tuple[int, int]]
) -> list[dict]:
    """数到的与公式给的，一个轴一行。"""
    rows = []
    for axis, (calls, size) in expected_traffic(config, o, shape).items():
        if counted[axis][0] or calls:
            rows.append({"grid": str(shape), "axis": AXIS_NAMES[axis], "calls": counted[axis][0],
                         "bytes": counted[axis][1], "calls_formula": calls, "bytes_formula": size})
    return rows


# ---------------------------------------------------------------- 错误用法


MISTAKES = {
    "": "按坐标分数据、沿 DP 平均", "rows": "按 rank 编号分数据", "world": "在所有进程上平均梯度",
}


def mistakes(config: GPTConfig, data: Tensor, o: Options, me: World) -> list[dict]:
    """同一步，对的与两种错的：梯度与单进程差多少（相对于最大的梯度）。"""
    shape = Shape(me.size // 2, 1, 2)
    batch = global_batch(data, 0, o.rows, o.seq_len, o.seed)
    model = seeded_gpt(config, o.seed)
    model(*batch)[1].backward()
    right, rows = named_gradients(model), []
    for mistake, name in MISTAKES.items():
        mesh = Mesh(me, shape)
        stage = hand_stage(seeded_gpt(config, o.seed), mesh)
        hand_gradients(stage, mesh, batch, o.micro_batches, mistake)
        got = collect(named_gradients(stage), mesh, me)
        rows.append({"rule": name, "grad_error": gap(got, right) / largest(right)})
    return rows


def gradient_norm(stage: Stage, mesh: Mesh, how: str) -> float:
    """整个模型的梯度范数。切开的参数沿 TP 与 PP 把平方相加，没有切的只数一份。

    how："right"；"local" 只算自己手里的；"sum" 把没有切的也沿 TP 加了几遍。
    """
    split, shared = torch.zeros(()), torch.zeros(())
    for name, param in stage.named_parameters():
        if name == "head.weight" and mesh.shape.pp > 1:
            continue  # 词嵌入的另一份，梯度已经相同
        is_cut = cut(name, param, 0, 2) is not param and mesh.shape.tp > 1
        target = split if is_cut else shared
        target += param.grad.square().sum()
    if how == "local":
        return (split + shared).sqrt().item()
    if how == "sum":
        split, shared = split + shared, torch.zeros(())
    total = mesh.sum(split, "tp") + shared
    return mesh.sum(total, "pp").sqrt().item()


NORMS = {"right": "切开的相加，没切的数一份", "local": "只算自己手里的", "sum": "全都沿 TP 相加"}


def norms(config: GPTConfig, data: Tensor, o: Options, me: World) -> list[dict]:
    """梯度范数的三种算法是单进程的几倍（各进程里最小与最大的）：裁剪用错，学习率就等于改了。"""
    batch = global_batch(data, 0, o.rows, o.seq_len, o.seed)
    model = seeded_gpt(config, o.seed)
    model(*batch)[1].backward()
    right = torch.stack([g.square().sum() for g in named_gradients(model).values()]).sum().sqrt()
    shape = Shape(me.size // 4, 2, 2)
    mesh = Mesh(me, shape)
    stage = hand_stage(seeded_gpt(config, o.seed), mesh)
    hand_gradients(stage, mesh, batch, o.micro_batches)
    rows = []
    for how, name in NORMS.items():
        found = [norm / right.item() for norm in me.gather(gradient_norm(stage, mesh, how))]
        rows.append({"rule": name, "smallest": min(found), "largest": max(found)})
    return rows


def places(me: World) -> list[dict]:
    """每个 rank 的坐标，与三个轴上各和谁说话。"""
    shape = Shape(me.size // 4, 2, 2)
    mesh = Mesh(me, shape)
    mine = {"rank": me.rank} | mesh.at | {
        f"{axis}_group": " ".join(map(str, mesh.members[axis])) for axis in AXES
    }
    return me.gather(mine)


# ---------------------------------------------------------------- 入口


def checked(o: Options, size: int) -> GPTConfig:
    """选项不对就抛 UserError；对就返回模型的结构。"""
    for name in ("steps", "rows", "micro_batches"):
        if (value := getattr(o, name)) < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}：至少是 1。")
    if not 0 < o.lr < 1:
        raise UserError(f"--lr {o.lr}：要一个 0 与 1 之间的数。")
    if o.n_head % 2:
        raise UserError(f"--n-head {o.n_head}：TP 2 按头切，要是 2 的倍数。")
    if o.n_layer < 2:
        raise UserError(f"--n-layer {o.n_layer}：PP 2 每段至少一层，要不少于 2。")
    if o.rows % (size // 2 * o.micro_batches):
        raise UserError(
            f"--rows {o.rows}：要平分给 DP {size // 2} 与 {o.micro_batches} 个 micro-batch，"
            f"请用 {size // 2 * o.micro_batches} 的倍数。"
        )
    try:
        return GPTConfig(o.vocab_size, o.d_model, o.n_head, o.n_layer, o.seq_len)
    except ValueError as error:
        raise UserError(str(error)) from None


def main(options: Options) -> None:
    """加入进程组，依次运行每个小节；rank 0 打印表格并写 results/mesh_*.csv。"""
    with torchrun_world(COMMAND, sizes=(4, 8)) as me:
        config = checked(options, me.size)
        data = load_tokens(vocab_size=config.vocab_size)["train"]
        sections = itertools.chain(
            [("places", "网格里的坐标", places(me))],
            zip(("equality", "traffic"), ("与单进程比", "第 0 号进程一步里的通信"),
                equality(config, data, options, me), strict=True),
            [("mistakes", "错在哪个轴上", mistakes(config, data, options, me)),
             ("norms", "裁剪用的梯度范数", norms(config, data, options, me))],
        )  # fmt: skip
        for name, title, rows in sections:
            if me.master:
                publish(f"mesh_{name}", title, rows, options, formats=FORMATS)


FORMATS = {
    "grad_error": "{:.1e}", "param_diff": "{:.1e}", "loss_diff": "{:.1e}", "tied_gap": "{:.1e}",
    "bytes": "{:,}", "bytes_formula": "{:,}", "smallest": "{:.3f}", "largest": "{:.3f}",
}  # fmt: skip


if __name__ == "__main__":
    run_main(main, Options)
