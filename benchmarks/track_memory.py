"""逐张量跟踪一步训练的显存：不分配任何内存，却得到每一字节的去向。

    python benchmarks/track_memory.py                           # 124M，约一分半钟
    python benchmarks/track_memory.py --models 124M 1.3B 7B     # 全部，约八分钟，内存不到 1 GB

FakeTensorMode 让每个算子只推形状，MemTracker 记下每块存储的生与死；FSDP 用假的进程组。
这里**没有**：CUDA 的显存池碎片、cuBLAS 工作区、NCCL 缓冲、CUDA 上下文——真卡上再加约 1–2 GB。
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from experiments.lab.results import print_table, run_main, save_csv
from experiments.plan.architecture import gpt
from experiments.plan.memory import estimate
from model import GPT, GPTConfig
from tokens.errors import UserError

GB = 1e9


@dataclass(frozen=True)
class Shape:
    """一个待跟踪的模型与它的一个 micro-batch：micro_batch 条、每条 seq_len 个 token。"""

    d_model: int
    n_layer: int
    n_head: int
    seq_len: int
    micro_batch: int
    vocab_size: int = 50304


SHAPES = {
    "124M": Shape(768, 12, 12, 1024, 16),
    "1.3B": Shape(2048, 24, 16, 2048, 8),
    "7B": Shape(4096, 32, 32, 4096, 2),
}
WORLD = {"124M": 8, "1.3B": 8, "7B": 64}  # FSDP 的卡数
VARIANTS = ("eager", "compiled", "checkpoint")
FSDP_VARIANTS = ("eager", "checkpoint")


@dataclass(frozen=True)
class Options:
    """跟踪显存的选项。"""

    models: tuple[str, ...] = ("124M",)
    """要跟踪的模型：124M、1.3B、7B"""
    fsdp: bool = True
    """是否也跟踪 FSDP2（假的进程组，124M 与 1.3B 用 8 卡，7B 用 64 卡）"""


class FusedCrossEntropy(torch.autograd.Function):
    """融合的交叉熵的内存足迹：只留 bf16 的 logits，反向只写出 bf16 的梯度。

    FakeTensor 里没有数值，这个替身与 inductor 生成的核读写同样的张量；数值不可用。
    """

    @staticmethod
    def forward(ctx, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.sum(dtype=torch.float32)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (logits,) = ctx.saved_tensors
        return torch.empty_like(logits)


def compiled_forward(model: nn.Module, idx: Tensor) -> nn.Module:
    """torch.compile 决定保留哪些激活的那一半：AOTAutograd、inductor 的分解、min-cut 划分。

    后端不生成代码，所以逐点算子没有合并成一个核；留到反向的张量与真正编译时相同。
    """
    from functorch.compile import min_cut_rematerialization_partition
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._inductor.decomposition import select_decomp_table

    captured = {}

    def graph(module, _):
        def call(inputs: list[Tensor]):  # 用完一个张量就放掉一个，与 inductor 的代码一样
            return torch.fx.Interpreter(module).boxed_run(inputs)

        call._boxed_call = True
        return call

    def backend(module, example):
        captured["call"] = aot_module_simplified(
            module, example, fw_compiler=graph, bw_compiler=graph,
            decompositions=select_decomp_table(),
            partition_fn=min_cut_rematerialization_partition,
        )
        captured["inputs"] = example
        return captured["call"]

    torch._dynamo.reset()
    with torch.autocast("cpu", torch.bfloat16):
        torch.compile(model, backend=backend)(idx)
    # dynamo 不肯在 MemTracker 之下运行，所以直接调用编译好的函数，输入次序照旧
    return lambda: captured["call"](*captured["inputs"])[0]


def checkpoint_blocks(model: GPT) -> None:
    """每层只留下输入，反向到这一层时再算一遍（非重入式）。"""
    for block in model.blocks:
        forward = block.forward
        block.forward = lambda x, rope, f=forward: checkpoint(f, x, rope, use_reentrant=False)


def snapshot(tracker, when: str) -> dict[str, float]:
    """跟踪器的快照：类别 → GB。"""
    (categories,) = tracker.get_tracker_snapshot(when).values()
    return {getattr(k, "value", k): v / GB for k, v in categories.items()}


def train(tracker, optimizer, loss_of_batch: Callable[[], Tensor]) -> float:
    """先走一步让优化器状态出现，再累积两个 micro-batch；返回前向结束时的激活（GB）。

    第二个 micro-batch 前向时梯度已在，这是带累积的训练里最挤的时刻。
    """
    with tracker:
        for micro_batches in (1, 2):
            for _ in range(micro_batches):
                loss = loss_of_batch()
                activations = snapshot(tracker, "current")["Activation"]
                loss.backward()
                del loss
                tracker.reset_mod_stats()
            if micro_batches == 1:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
    return activations


def loss_function(model: GPT, x: Tensor, variant: str) -> Callable[[], Tensor]:
    """一个 micro-batch 的前向；compiled 用编译划分的图，其余按原样执行。"""
    call = compiled_forward(model, x) if variant == "compiled" else None

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return FusedCrossEntropy.apply(call()) if call else model(x, x)[1]

    return loss


def build(shape: Shape) -> GPT:
    """按形状建模型；长序列一律用 SDPA，它不留下 T×T 的注意力矩阵。"""
    return GPT(GPTConfig(
        vocab_size=shape.vocab_size, d_model=shape.d_model, n_head=shape.n_head,
        n_layer=shape.n_layer, seq_len=shape.seq_len, attention="sdpa",
    ))


def track(shape: Shape, variant: str) -> dict[str, float]:
    """单设备（DDP 的每张卡也是如此，不计通信桶）一步训练的峰值，GB。"""
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build(shape)
        if variant == "checkpoint":
            checkpoint_blocks(model)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        x = torch.zeros(shape.micro_batch, shape.seq_len, dtype=torch.int64)
        tracker = MemTracker()
        tracker.track_external(model, optimizer, x)
        activations = train(tracker, optimizer, loss_function(model, x, variant))
        peak = snapshot(tracker, "peak")
    # 编译的函数绕过模块的钩子，梯度被记成临时量；梯度与参数同样大，直接用参数的大小
    states = 2 * peak["Parameter"] + peak["Optstate"]
    return {
        "states": states, "activations": activations,
        "temp": peak["Total"] - states - activations, "peak": peak["Total"],
    }


def track_fsdp(shape: Shape, variant: str, world_size: int) -> dict[str, float]:
    """FSDP2（ZeRO-3）每张卡一步训练的峰值，GB；进程组是假的，集合通信只推形状。"""
    import torch.distributed as dist
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (world_size,))  # 它要读真的数值，所以在 FakeTensor 之外
        with FakeTensorMode(allow_non_fake_inputs=True):
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            model = build(shape)
            if variant == "checkpoint":
                checkpoint_blocks(model)
            for block in model.blocks:
                fully_shard(block, mesh=mesh, mp_policy=policy)
            fully_shard(model, mesh=mesh, mp_policy=policy)
            optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
            x = torch.zeros(shape.micro_batch, shape.seq_len, dtype=torch.int64)
            tracker = FSDPMemTracker(model, optimizer)
            tracker.track_inputs((x,))
            activations = train(tracker, optimizer, lambda: model(x, x)[1])
            peak = snapshot(tracker, "peak")
    finally:
        dist.destroy_process_group()
    states = peak["Sharded Param"] + peak["Sharded Grad"] + peak["OptState"]
    return {
        "states": states, "activations": activations,
        "temp": peak["Total"] - states - activations, "peak": peak["Total"],
    }


def predict(shape: Shape, variant: str, strategy: str, gpus: int) -> float:
    """`memory.estimate` 对同一情形的预测，GB。"""
    arch = gpt(
        shape.d_model, shape.n_layer, shape.n_head, shape.seq_len, shape.vocab_size
    )
    return estimate(
        arch, micro_batch=shape.micro_batch, strategy=strategy, gpus=gpus,
        execution="compiled" if variant == "compiled" else "eager",
        checkpoint=variant == "checkpoint",
    ).total


def rows(options: Options) -> Iterator[dict]:
    """逐个情形跟踪，得到 CSV 的行：跟踪值、预测值与误差（%）。"""
    for name in options.models:
        if name not in SHAPES:
            raise UserError(f"没有叫 {name} 的形状；可选：{'、'.join(SHAPES)}。")
        cases = [("ddp", 1, variant) for variant in VARIANTS]
        if options.fsdp:
            cases += [("zero3", WORLD[name], variant) for variant in FSDP_VARIANTS]
        for strategy, gpus, variant in tqdm(cases, desc=name, file=sys.stderr):
            shape = SHAPES[name]
            if strategy == "ddp":
                tracked = track(shape, variant)
            else:
                tracked = track_fsdp(shape, variant, gpus)
            predicted = predict(shape, variant, strategy, gpus)
            yield {
                "model": name, "strategy": strategy, "gpus": gpus, "variant": variant,
                "micro_batch": shape.micro_batch, "seq_len": shape.seq_len,
                **{f"{key}_gb": round(value, 3) for key, value in tracked.items()},
                "predicted_gb": round(predicted, 3),
                "error_percent": round(100 * (predicted / tracked["peak"] - 1), 2),
            }


def main(options: Options) -> None:
    """跟踪、打印、写 results/track_memory.csv。"""
    table = list(rows(options))
    save_csv(table, "track_memory")
    print_table(table)


if __name__ == "__main__":
    run_main(main, Options)
