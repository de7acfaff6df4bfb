"""一次训练的全部家当：怎样组装起来，怎样收进一个字典，怎样从字典装回去。

nanoGPT 的文件里有裸模型、优化器、六个结构参数、步数与最低 loss、全部选项；这里的 `snapshot` 多出
每个进程的随机数、数据位置、scaler、最近一次评估的步：少了它们，续训就不是接着走，而是另走一条。
怎样安全地写成文件，见 checkpoint.py；权重切给许多进程时，见 parallel.py 与 shards.py。
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from experiments.lab import hardware
from experiments.loop import checkpoint, shards
from experiments.loop.options import Options, accumulation
from experiments.loop.parallel import (
    Layout,
    cut,
    deal,
    lay_out,
    recompute_blocks,
    skeleton,
    syncing,
)
from experiments.loop.start import Start
from experiments.ranks.world import World
from experiments.training.cross_entropy import one_exp_cross_entropy
from experiments.training.recipe import adamw, muon_and_adamw
from experiments.training.step import compiled, keep_freed_memory
from model import GPT
from tokens.errors import UserError

# ---------------------------------------------------------------- 精度：TF32 与 autocast


def pick_dtype(options: Options, device: torch.device) -> torch.dtype:
    """auto：硬件有 bf16 就用 bf16，否则 CUDA 用 fp16、CPU 用 fp32。"""
    if options.dtype != "auto":
        return getattr(torch, options.dtype)
    if hardware.bf16_support(device.type)[0]:
        return torch.bfloat16
    return torch.float16 if device.type == "cuda" else torch.float32


def set_numerics(options: Options, device: torch.device) -> None:
    """剩下的 fp32 矩阵乘法交给 TF32；CPU 上留住内存，总用确定性算法（编译后的续训才逐位相等）。"""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    else:
        keep_freed_memory()
    torch.use_deterministic_algorithms(options.deterministic or device.type == "cpu")
    torch.utils.deterministic.fill_uninitialized_memory = False  # 只为查错，白花时间


# ---------------------------------------------------------------- 组装：模型、优化器、编译、DDP


@dataclass
class Run:
    """一次训练的全部家当。`raw` 是没有任何包装的模型：存它；`forward` 可能编译过：评估用它；
    `model` 外面可能还有 DDP：训练用它。权重切开时三个是同一个，切法在 `layout` 里。"""

    options: Options
    world: World
    data: dict
    dtype: torch.dtype
    raw: GPT
    forward: nn.Module
    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    scaler: torch.amp.GradScaler
    layout: Layout
    accumulation: int  # 一步里，一个进程的 micro-batch 个数
    compiled: bool = False
    step: int = 0  # 已完成的更新次数
    best_loss: float = float("inf")
    evaluated: int = -1  # 最近一次评估在哪一步
    saved: int = -1  # 最近一次存盘在哪一步
    saves: int = 0  # 这次启动存了几次

    @property
    def fused_loss(self) -> Callable | bool:
        """分段算、不留 logits 的交叉熵；F.linear_cross_entropy 的参考实现仍会留下 logits。"""
        return self.options.fused_loss and one_exp_cross_entropy

    def syncing(self, last: bool) -> AbstractContextManager:
        """罩住一个 micro-batch：只有最后一份归约梯度；ZeRO-3 每份都归约。"""
        zero3 = self.options.parallel == "fsdp" and self.options.reshard
        return syncing(self.model, last, always=zero3)

    def autocast(self) -> torch.autocast:
        """前向的精度；权重切开时由 FSDP 转换，不用 autocast。"""
        plain = self.layout.mesh is None and self.dtype != torch.float32
        return torch.autocast(self.world.device.type, self.dtype, enabled=plain)


def build(start: Start, world: World, data: dict) -> Run:
    """模型，切开或编译，scaler 与优化器，然后 DDP，最后把检查点装回去。"""
    options, dtype = start.options, pick_dtype(start.options, world.device)
    layout = lay_out(options, world)
    if options.optimizer == "muon" and dtype == torch.float16:
        raise UserError("--optimizer muon 不能与 float16 同用；请用 --dtype bfloat16 或 float32。")
    if layout.mesh is not None and dtype == torch.float16:  # auto 在旧的 GPU 上选了它
        raise UserError("切开的权重不能用 float16；请用 --dtype bfloat16 或 float32。")
    possible, reason = hardware.compile_support(world.device.type)
    if options.compile and not possible:
        world.say(f"不编译，用 eager：{reason}。")
    compile_it = options.compile and possible
    plain, dealer = layout.mesh is None, world.master and start.shards is None
    if plain:
        raw = initial_model(start, whole=True)
    else:  # 只有 0 号读得到错：先说出来，别人才不会等它广播
        raw = world.together(lambda: initial_model(start, whole=dealer))
    full = {} if plain or not dealer else shards.split_names(raw.state_dict())
    if options.recompute == "blocks":
        recompute_blocks(raw)
    if plain:
        raw.to(world.device)
    else:
        cut(raw, layout, options, dtype, compile_blocks=compile_it)
        if start.shards is None:  # 否则权重与两个矩一起从分片读
            deal(full, dict(raw.named_parameters()), world)
    del full
    torch.manual_seed(options.seed + 1 + world.rank)  # 此后（例如 dropout）各走各的
    scaler = torch.amp.GradScaler(world.device.type, enabled=dtype == torch.float16)
    forward = compiled(raw) if compile_it and plain else raw  # 第一次前向才真的编译
    model = with_ddp(forward, world) if plain and torch.distributed.is_initialized() else forward
    run = Run(options, world, data, dtype, raw, forward, model, optimizers_of(raw, options),
              scaler, layout, accumulation(options, world.size), compiled=compile_it)  # fmt: skip
    if start.state is not None:
        restore(run, start.state, start.shards)
    return run


def initial_model(start: Start, *, whole: bool) -> GPT:
    """在 CPU 上造好整个模型：由种子决定的权重（各进程相同），或者已有的；`whole` 为假只要形状。"""
    if not whole:
        return skeleton(start.config)
    torch.manual_seed(start.options.seed)
    model = GPT(start.config)
    if start.weights is not None:
        try:
            model.load_state_dict(checkpoint.strip_wrappers(start.weights))
        except RuntimeError as error:
            reason = str(error).split("\n")[-1].strip()
            raise UserError(f"权重与模型结构对不上（{reason}）。") from error
    return model


def optimizers_of(model: GPT, options: Options) -> list[torch.optim.Optimizer]:
    """AdamW，或 Muon 与 AdamW。"""
    how = {"betas": (options.beta1, options.beta2), "weight_decay": options.weight_decay}
    if options.optimizer == "muon":
        return muon_and_adamw(model, options.lr, **how)
    return [adamw(model, options.lr, **how)]


def with_ddp(forward: nn.Module, world: World) -> DistributedDataParallel:
    """在外面包上 DDP。

    唯一的缓冲区 RoPE 表是常数，不必每次广播。先编译、后包 DDP：编译出的反向是一整张图，
    桶要等它算完才发出，通信与反向很少重叠（eager 才重叠）；换来的是评估不必经过 DDP。
    """
    cards = [world.device.index] if world.device.type == "cuda" else None
    return DistributedDataParallel(
        forward, device_ids=cards, gradient_as_bucket_view=True, forward_sync_buffers=False
    )


# ---------------------------------------------------------------- 收进字典，装回去


def snapshot(run: Run) -> dict:
    """接着训练需要的一切，只有张量和普通值；权重是 fp32、没有包装前缀。

    权重切开时没有张量（它们由 `store` 写成分片），只有优化器的超参数。
    """
    if run.layout.mesh is None:
        optimizers = [optimizer.state_dict() for optimizer in run.optimizers]
        tensors = {"model": run.raw.state_dict(), "optimizer": optimizers}
    else:
        tensors = shards.optimizer_summary(run.optimizers[0])
    return tensors | {
        "model_config": asdict(run.raw.config),
        "scaler": run.scaler.state_dict(),
        "step": run.step,
        "best_loss": run.best_loss,
        "evaluated": run.evaluated,
        "rng": run.world.gather(checkpoint.rng_state(run.world.device)),  # 每个进程自己的
        "data": data_position(run),
        "tokenizer": run.data["meta"].get("tokenizer_sha256", ""),
        "config": asdict(run.options),
        "run_id": os.environ.get("TORCHELASTIC_RUN_ID", "none"),
        "torch": str(torch.__version__),
    }


def data_position(run: Run) -> dict:
    """数据读到哪里：哪份数据、哪个种子、下一个序列的序号（batch 是它们的纯函数）。"""
    sequences = run.options.global_batch_tokens // run.options.seq_len
    ids = run.data["meta"].get("ids_sha256", f"{len(run.data['train'])} tokens")
    return {"ids": ids, "seed": run.options.seed, "next_sequence": run.step * sequences}


def store(run: Run, *, best: bool) -> str:
    """存成 last（与 best）；返回没有存成的原因，空串是存好了。每个进程都要调用，得到同样的答案。"""
    folder, state = Path(run.options.out_dir), snapshot(run)
    read_back, run.saves = run.saves % checkpoint.READ_BACK == 0, run.saves + 1

    def write() -> str:
        try:
            checkpoint.save(folder, state, best=best, read_back=read_back)
        except (UserError, OSError, RuntimeError) as error:
            return str(error)
        return ""

    if run.layout.mesh is not None:
        tensors = shards.shard_names(run.raw, run.optimizers[0])
        try:
            state["shards"] = shards.write(run.world, folder, run.step, tensors)
        except UserError as error:
            return str(error)
    return run.world.on_master(write)


def restore(run: Run, state: dict, folder: Path | None = None) -> None:
    """`snapshot()` 的反面；权重在 build 里已经装好，只有分片的与两个矩一起从 `folder` 读。"""
    run.step, run.saved, run.evaluated = state["step"], state["step"], state["evaluated"]
    run.best_loss = state["best_loss"]
    if data_position(run)["ids"] != state["data"]["ids"]:
        raise UserError(
            "数据与检查点训练时的不同；请用原来的 --data，或用 --init-from 检查点.pt 只取权重。"
        )
    if run.layout.mesh is not None:
        shards.restore_moments(run.raw, run.optimizers[0], state, folder, run.world)
    else:
        for optimizer, saved in zip(run.optimizers, state["optimizer"], strict=True):
            restore_optimizer(optimizer, saved)
    if run.scaler.is_enabled() and state["scaler"]:
        run.scaler.load_state_dict(state["scaler"])
    if run.world.rank < len(state["rng"]):  # 新增的进程保留 build 给它的种子
        checkpoint.set_rng_state(state["rng"][run.world.rank], run.world.device)


def restore_optimizer(optimizer: torch.optim.Optimizer, saved: dict) -> None:
    """动量来自检查点，超参数来自选项：`load_state_dict` 会把学习率也载回来，再写一遍。"""
    wanted = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    optimizer.load_state_dict(saved)
    for group, settings in zip(optimizer.param_groups, wanted, strict=True):
        group.update(settings)
