"""给定模型与卡数，找最快的网格：先看放不放得下，再用步时模型比快慢。只用标准库。

    for cell in table(): ...            # 五个模型 × 六种卡数
    best_layout(PRESETS["llama3-70b"], 512, 2**24)

显存按本书的账（fp32 权重 4 + 梯度 4 + Adam 8，另有 bf16 副本），激活按编译后的逐张量公式除以
TP 与 CP；流水线按 1F1B 在途的 micro-batch 数放大。这里**没有**：选择性重算、把激活搬到 CPU，
所以比真的训练系统保守：Llama 3 不重算的布局靠提前释放张量才放得下，这里会让它重算。
也没有切序列（CP）：这些长度用不着。
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import ceil

from experiments.plan.architecture import PRESETS, Architecture, BudgetError, llama
from experiments.plan.memory import GB, USABLE, head_bytes, layer_bytes
from experiments.plan.planning import Request, default_global_batch, resolve
from experiments.plan.step_time import (
    CHIPS,
    H100,
    Chip,
    Layout,
    StepTime,
    micro_batches,
    step_seconds,
    useful_flops,
)

# 名字 → (形状, 一步的 token 数)；前四个是公开的模型，1T 的形状是自己取的
MODELS: dict[str, tuple[Architecture, int]] = {
    "1B": (llama(2048, 16, 32, 8, 8192, 128256, 8192, tied=True), 2**21),
    "7B": (llama(4096, 32, 32, 32, 11008, 32000, 4096), 2**22),
    "70B": (PRESETS["llama3-70b"], 2**24),
    "405B": (PRESETS["llama3-405b"], 2**24),
    "1T": (llama(20480, 192, 160, 8, 69632, 128256, 8192), 2**25),
}
GPU_COUNTS = (8, 64, 512, 4096, 16_384, 100_000)
LARGEST_BATCH = 1.25  # 为凑整，一步的 token 数最多放大到几倍；再大就不是同一个训练了
LEAST_USED = 0.9  # 布局至少用上九成的卡


def memory_gb(arch: Architecture, layout: Layout, micro: int, seq_len: int) -> float:
    """最挤的一张卡的显存，GB：第一段流水线在途的激活最多，最后一段有 logits。"""
    layers = ceil(arch.n_layer / layout.pp)
    embedding = arch.vocab_size * arch.d_model / layout.tp
    heads = 2 if layout.pp == 1 and not arch.tied else 1
    params = layers * arch.layer_params() / layout.tp + heads * embedding
    shards = layout.dp * layout.cp
    block = arch.layer_params() / layout.tp
    states = {
        "none": 18 * params,  # 16 字节的状态，加 bf16 副本
        "step": (2 + 4 + 12 / shards) * params,  # 集齐的 bf16 权重、整份 fp32 梯度，其余分摊
        "layer": 16 / shards * params + 10 * block + 4 * embedding,
    }[layout.sharding]
    tokens = layout.micro_batch * seq_len / layout.cp
    full = sum(layer_bytes(arch, "compiled").values()) * tokens / layout.tp
    kept = 4 * arch.d_model * tokens / layout.tp if layout.recompute else full
    flight = layout.pp + (layout.pp - 1) / layout.virtual if layout.virtual > 1 else layout.pp
    working = full if layout.recompute else 0
    first = layers * kept * min(micro, flight) + working
    last = layers * kept + max(working, head_bytes(arch, "compiled") * tokens / layout.tp)
    return (states + max(first, last)) / GB


@dataclass(frozen=True)
class Choice:
    """一种放得下的布局，和它的一步。"""

    arch: Architecture
    layout: Layout
    micro: int  # 每条流水线一步的 micro-batch 数
    sequences: int
    seq_len: int
    step: StepTime
    memory: float  # GB
    gpus: int  # 手里的卡，可能比布局用的多

    @property
    def tokens(self) -> int:
        return self.sequences * self.seq_len

    @property
    def seconds_per_token(self) -> float:
        return self.step.total / self.tokens

    def mfu(self, chip: Chip = H100) -> float:
        """百分数；分母是手里全部的卡，闲着的也算。重算不算有用功。"""
        flops = useful_flops(self.arch, self.seq_len) * self.tokens
        return 100 * flops / (self.step.total * self.gpus * chip.peak)

    def days(self, tokens: float) -> float:
        """读完 `tokens` 个 token 的天数，不算中断。"""
        return tokens * self.seconds_per_token / 86400

    def describe(self) -> str:
        """一行：网格、micro-batch、重算与切法。"""
        how = {"none": "权重各有整份", "step": "权重每步集齐一次", "layer": "权重逐层集齐"}
        parts = [self.layout.name(), f"micro-batch {self.layout.micro_batch} × {self.micro}"]
        if self.layout.dp * self.layout.cp > 1:
            parts.append(how[self.layout.sharding])
        if self.layout.virtual > 1:
            parts.append(f"每段 {self.layout.virtual} 个虚拟段")
        return "，".join([*parts, *(["整层重算"] if self.layout.recompute else [])])


def layouts(
    arch: Architecture, gpus: int, goal: int, seq_len: int
) -> Iterator[tuple[Layout, int]]:
    """所有要比的布局与各自的序列数。TP 只在一台机器里：它每层通信四次，出不了 NVLink。"""
    sizes = [2**i for i in range(7)]
    for tp, pp, micro in product((1, 2, 4, 8), sizes, (1, 2, 4)):
        if tp > gpus or arch.n_head % tp or arch.kv_heads % tp or pp > arch.n_layer:
            continue
        dp = gpus // (tp * pp)
        if tp * pp * dp < LEAST_USED * gpus:
            continue
        wanted = goal / (dp * micro)  # 每条流水线走几个 micro-batch；是 pp 的倍数才能交错
        count = max(1, round(wanted / pp)) * pp if wanted >= pp / 2 else max(1, round(wanted))
        if dp * micro * count > LARGEST_BATCH * goal:
            continue
        deepest = arch.n_layer // pp
        virtuals = {1, 2, deepest} if pp > 1 and count % pp == 0 else {1}
        shardings = ("none",) if dp == 1 else ("none", "step", "layer")[: 3 if pp == 1 else 2]
        for virtual, recompute, sharding in product(sorted(virtuals), (False, True), shardings):
            if virtual <= deepest:
                layout = Layout(tp, pp, dp, 1, micro, virtual, recompute, sharding)
                yield layout, dp * micro * count


def best_layout(
    arch: Architecture, gpus: int, batch_tokens: int, *, seq_len: int | None = None,
    chip: Chip = H100, memory: float | None = None,
) -> Choice:
    """放得下的布局里每 token 最快的。

    Raises:
        BudgetError: 都放不下，或 batch 喂不饱这么多卡；消息说差多少。
    """
    length = seq_len or arch.seq_len
    room = USABLE * (memory or chip.memory_gb)
    goal = max(1, batch_tokens // length)
    best, least, tried = None, float("inf"), 0
    for layout, sequences in layouts(arch, gpus, goal, length):
        tried += 1
        micro = micro_batches(arch, layout, sequences, length)
        need = memory_gb(arch, layout, micro, length)
        least = min(least, need)
        if need > room:
            continue
        step = step_seconds(arch, layout, chip, sequences, length)
        choice = Choice(arch, layout, micro, sequences, length, step, need, gpus)
        if best is None or choice.seconds_per_token < best.seconds_per_token:
            best = choice
    if best is not None:
        return best
    if not tried:
        raise BudgetError(
            f"一步只有 {goal:,} 条序列，喂不饱 {gpus:,} 张卡：batch 要超过现在的"
            f" {LARGEST_BATCH:g} 倍才够每条流水线一条；请用更少的卡，或更大的 batch。"
        )
    raise BudgetError(
        f"放不下：最省的切法每卡也要 {least:,.0f} GB，{gpus:,} 张 {chip.name} 每张只有"
        f" {room:.0f} GB 可用；请用更多的卡。"
    )


def starting_words(layout: Layout) -> str:
    """`train_gpu.py` 要怎样的选项才是这个布局；它还不会的说不会。"""
    if layout.pp * layout.cp > 1:
        return "有流水线（或切序列），train_gpu.py 还不会（见 pipeline_parallel、mesh 两章）"
    words = ["--parallel ddp" if layout.sharding == "none" else "--parallel fsdp"]
    words += ["--no-reshard"] if layout.sharding == "step" else []
    words += [f"--tensor-parallel {layout.tp}"] if layout.tp > 1 else []
    words += ["--recompute blocks"] if layout.recompute else []
    return f"train_gpu.py 的选项：{' '.join(words)} --micro-batch {layout.micro_batch}"


def layout_for(request: Request) -> str:
    """`budget.py plan` 的「布局」一行：最快的网格、每卡显存、预测的 MFU。

    Raises:
        BudgetError: 排不出来，或步时模型没有这种卡的规格（只有 A100 与 H100，别的不猜）。
    """
    device, capacity, arch = resolve(request)
    if request.device.lower() not in CHIPS:
        raise BudgetError(f"步时模型只有 {'、'.join(CHIPS)} 的规格，{device.name} 不猜。")
    chip = CHIPS[request.device.lower()]
    batch = request.global_batch or default_global_batch(request.params)
    best = best_layout(
        arch, request.gpus, batch, seq_len=request.seq_len, chip=chip, memory=capacity
    )
    return (
        f"{best.describe()}；每卡约 {best.memory:.0f} GB，步时模型预测 MFU"
        f" {best.mfu(chip):.0f} %（上限，见“混合并行”一章）；{starting_words(best.layout)}"
    )


@dataclass(frozen=True)
class Cell:
    """表里的一格：一个模型、一种卡数；`choice` 为 None 时 `refusal` 是理由。"""

    model: str
    gpus: int
    choice: Choice | None
    refusal: str = ""


def table(models: tuple[str, ...] = tuple(MODELS), counts: tuple[int, ...] = GPU_COUNTS
          ) -> list[Cell]:  # fmt: skip
    """每个模型、每种卡数的最快布局，或拒绝的理由。"""
    cells = []
    for name, gpus in product(models, counts):
        arch, tokens = MODELS[name]
        try:
            cells.append(Cell(name, gpus, best_layout(arch, gpus, tokens)))
        except BudgetError as error:
            cells.append(Cell(name, gpus, None, str(error)))
    return cells
