"""把一个模型分给许多进程：数据与张量两个轴摆在一张网格上，权重切成 DTensor。

    layout = lay_out(options, world)          # 谁读哪份数据，谁合切一个矩阵
    cut(model, layout, options, dtype, …)     # 先 parallelize_module，再 fully_shard

切法的道理与手写的版本见 fsdp、tensor_parallel、mesh 三章，这里只用 PyTorch 自己的接口。
只有一个进程，或者 `--parallel ddp` 而不切张量时，什么也不切（`layout.mesh` 是 None）。
初始的权重只由 0 号进程在 CPU 上造一份完整的（或从文件读），一个矩阵一个矩阵地分给大家。
这里**没有**流水线、序列与专家并行。
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from experiments.loop.options import Options, is_cut, readers
from experiments.ranks.world import World
from model import GPT, Block, GPTConfig, rope_table

AXES = ("copy", "shard", "tp")  # 从外到里：各有一份、切开放、合切一个矩阵

# ---------------------------------------------------------------- 网格


@dataclass(frozen=True)
class Layout:
    """进程怎样摆。`readers` 是读不同数据的那些进程（数据这个轴）；没有切开时就是全体。"""

    readers: World
    mesh: DeviceMesh | None = None  # 轴是 AXES

    @property
    def tensor(self) -> int:
        """几个进程合切一个矩阵。"""
        return 1 if self.mesh is None else self.mesh["tp"].size()

    def describe(self) -> str:
        """一句话：权重怎样放；没有切开时是空串。"""
        if self.mesh is None:
            return ""
        shares = self.mesh["shard"].size() * self.tensor
        how = f"，其中 {self.tensor} 个合切每个矩阵" if self.tensor > 1 else ""
        return f"权重切成 {shares} 份放{how}"


def lay_out(options: Options, world: World) -> Layout:
    """建网格，每个进程都要调用。

    tp 是最里面的轴，编号相邻的进程合切一个矩阵，它们在同一台机器上；其余的读不同的数据：
    fsdp 把权重切给它们，ddp 让它们各有一份。
    """
    if not is_cut(options, world.size):
        return Layout(world)
    parts = options.tensor_parallel
    groups = readers(options, world.size)
    data = (1, groups) if options.parallel == "fsdp" else (groups, 1)
    mesh = init_device_mesh(world.device.type, (*data, parts), mesh_dim_names=AXES)
    axis = "shard" if options.parallel == "fsdp" else "copy"
    mine = World(world.rank // parts, groups, world.device, mesh.get_group(axis))
    return Layout(mine, mesh)


# ---------------------------------------------------------------- 切


class SplitQKV(nn.Module):
    """与 `nn.Linear(d, 3d)` 相同的函数，Q、K、V 是三个矩阵：各自按输出等分，分到的就是完整的头。

    融合的一个矩阵直接等分，前几个进程拿走的是全部的 Q（见 tensor_parallel 一章的错误用法）。
    """

    def __init__(self, fused: nn.Linear) -> None:
        super().__init__()
        width = fused.in_features
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        for linear, weight in zip((self.q, self.k, self.v), fused.weight.chunk(3), strict=True):
            linear.weight = nn.Parameter(weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, d) → (B, T, 3d/N)：手里的 Q、K、V 依次接起来。"""
        return torch.cat((self.q(x), self.k(x), self.v(x)), dim=-1)


class RecomputedBlock(Block):
    """一层，前向只留输入，反向时整层重算；参数的名字不变。"""

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(x, rope)
        return checkpoint(super().forward, x, rope, use_reentrant=False)


def recompute_blocks(model: GPT) -> None:
    """把每一层换成反向时重算的那一种。"""
    for block in model.blocks:
        block.__class__ = RecomputedBlock


def cut(
    model: GPT, layout: Layout, options: Options, dtype: torch.dtype, *, compile_blocks: bool
) -> None:
    """就地把模型切开：权重变成 DTensor，每个进程只留自己的那一份，搬到自己的设备上。

    混合精度由 FSDP 做：集齐的权重与激活是 `dtype`，主权重、梯度的归约与优化器是 fp32。
    """
    for block in model.blocks:
        block.attn.qkv = SplitQKV(block.attn.qkv)
    if layout.tensor > 1:
        cut_matrices(model, layout.mesh["tp"])
    mixed = {} if dtype == torch.float32 else {"param_dtype": dtype, "reduce_dtype": torch.float32}
    how = {"mp_policy": MixedPrecisionPolicy(**mixed), "reshard_after_forward": options.reshard}
    mesh = layout.mesh["shard" if options.parallel == "fsdp" else ("copy", "shard")]
    for block in model.blocks:
        if compile_blocks:
            block.forward = torch.compile(block.forward)  # 钩子留在外面：收集与归约不进图
        fully_shard(block, mesh=mesh, **how)
    fully_shard(model, mesh=mesh, **how)


def cut_matrices(model: GPT, mesh: DeviceMesh) -> None:
    """张量并行：每层两个「列切、行切、求一次和」，词嵌入与输出头按词表切，logits 从不集齐。"""
    shared = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
    plan = {
        "attn.qkv": shared, "attn.qkv.q": ColwiseParallel(), "attn.qkv.k": ColwiseParallel(),
        "attn.qkv.v": ColwiseParallel(), "attn.out": RowwiseParallel(),
        "mlp": shared, "mlp.gate": ColwiseParallel(), "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(),
    }  # fmt: skip
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    parallelize_module(model, mesh, {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    })  # fmt: skip
    model.head.weight = model.embed.weight  # 两处各切了一次，重新共享
    model.register_forward_hook(lambda _module, _inputs, out: (None, local(out[1]).clone()))


# ---------------------------------------------------------------- 把完整的分下去


def skeleton(config: GPTConfig) -> GPT:
    """只有形状的模型：内存分配了却从不碰，操作系统不会真的给；值由 `deal` 填。"""
    with torch.device("meta"):
        model = GPT(config)
    model.to_empty(device="cpu")
    model.head.weight = model.embed.weight  # to_empty 给每处一个新的参数，重新共享
    model.rope = rope_table(config)
    return model


def deal(full: dict[str, Tensor], targets: dict[str, Tensor], world: World) -> None:
    """0 号进程的完整张量 `full` 广播给大家，各取自己的那一份，就地写进同名的 DTensor。

    一次一个，所以设备上至多多一个完整的矩阵；别的进程的 `full` 不看。每个进程都要调用。
    """
    for name, target in targets.items():
        if world.master:
            whole_one = full[name].to(world.device, target.dtype).contiguous()
        else:
            whole_one = torch.empty(target.shape, dtype=target.dtype, device=world.device)
        dist.broadcast(whole_one, src=0)
        fill(target, whole_one)


@torch.no_grad()
def fill(target: DTensor, full: Tensor) -> None:
    """从完整的张量里取出 DTensor 自己的那一份，就地写入。"""
    shape, offset = compute_local_shape_and_global_offset(
        full.shape, target.device_mesh, target.placements
    )
    mine = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
    target.to_local().copy_(full[mine])


# ---------------------------------------------------------------- 一步里要用的


@contextmanager
def syncing(model: nn.Module, last: bool, *, always: bool) -> Iterator[None]:
    """罩住一个 micro-batch 的前向和反向：除最后一份外，梯度都只在本地累加。

    DDP 在前向时就决定要不要同步，所以前向也要罩住。切开的权重由开关控制：`always`（ZeRO-3）每份
    都归约、权重用完就放，因为在本地累加要一整份梯度，放不下的正是它；否则只在最后归约与放掉。
    词表切开时，交叉熵在各进程的那一段 logits 上算，反向也是。
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last or always)
        model.set_reshard_after_backward(last or always)
        with loss_parallel():
            yield
        if not torch.is_grad_enabled():  # 评估没有反向来放掉权重；不放，存盘看到的就是集齐的
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
    elif last or not hasattr(model, "no_sync"):
        yield
    else:
        with model.no_sync():
            yield


def clip(parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
    """裁剪**全局**的梯度范数，返回裁剪之前的；`limit` 是 0 就只量。

    本地只有一份的平方和：被哪几个轴切开，就沿那几个轴加起来；不加，范数就小 √份数 倍
    （pytorch #170862）。没有切的轴上各份相同，不能再加。
    """
    parameters = list(parameters)
    if not any(isinstance(p, DTensor) for p in parameters):
        return nn.utils.clip_grad_norm_(parameters, limit or float("inf"))
    gradients = [p.grad for p in parameters if p.grad is not None]
    found: dict[tuple, list[Tensor]] = {}
    for gradient in gradients:
        axes = zip(range(gradient.device_mesh.ndim), gradient.placements, strict=True)
        cut_by = tuple(axis for axis, how in axes if not how.is_replicate())
        found.setdefault((gradient.device_mesh, cut_by), []).append(gradient.to_local())
    total = 0.0
    for (mesh, axes), pieces in found.items():
        square = torch.stack(torch._foreach_norm(pieces)).square().sum()
        for axis in axes:
            dist.all_reduce(square, group=mesh.get_group(axis))
        total = total + square
    norm = total.sqrt()
    if limit:
        scale = (limit / (norm + 1e-6)).clamp(max=1.0)  # 与 nn.utils.clip_grad_norm_ 相同
        torch._foreach_mul_([gradient.to_local() for gradient in gradients], scale)
    return norm


def local(tensor: Tensor) -> Tensor:
    """DTensor 在这个进程上的那一份；普通的张量原样返回。"""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
