"""一步要多久：计算、每条链路上的字节、延迟、流水线气泡、重算，逐项相加。只用标准库。

常数只有芯片与链路的公开规格，和一条「规格的八成」（`ACHIEVED`），没有由训练记录拟合的系数；
但八成是在试过 86.9 % 之后取的，`with_share` 给出换一个数时的误差。
把它对着十三个公开的大规模配置（`CONFIGURATIONS`）验一遍，误差多大、错在哪里，都印出来。

算的是一个变压器解码器在 TP × CP × PP × DP 网格上的一步。这里**没有**：专家并行、fp8、
慢节点与抖动、网络的拥塞与多级交换机，也没有数据读取；所以它是上限，不是承诺。
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import ceil

from experiments.plan.architecture import PRESETS, Architecture, BudgetError, gpt2

ACHIEVED = 0.8  # 规格的八成，见 ASSUMPTIONS 第一行
TILE_M, TILE_N = 256, 128  # cuBLAS 最高效的分块；除不尽时最后一波有 SM 闲着


@dataclass(frozen=True)
class Chip:
    """一种加速卡的公开规格。带宽一律是单方向、每张卡，字节/秒。"""

    name: str
    peak: float  # 稠密 bf16，FLOP/s
    processors: int  # SM 的个数
    hbm: float
    nvlink: float
    network: float
    memory_gb: float
    attention: float  # 融合注意力核达到峰值的几成
    achieved: float = ACHIEVED  # 矩阵乘法与各条链路达到规格的几成


A100 = Chip("A100 SXM", 312e12, 108, 2.039e12, 300e9, 25e9, 80, 0.73)
H100 = Chip("H100 SXM", 989e12, 132, 3.35e12, 450e9, 50e9, 80, 0.35)
CHIPS = {"a100": A100, "h100": H100}
GPUS_PER_NODE = 8
LATENCY_NODE, LATENCY_NETWORK = 2e-6, 5e-6  # 环上走一步的延迟，秒：机内、跨机

ASSUMPTIONS: tuple[tuple[str, str, str], ...] = (
    ("矩阵乘法达到峰值的几成", "80 %",
     "ml-engineering（744d01e）的实测：最好的形状 H100 80.3 %、A100 81.1–86.9 %；取八成"),
    ("显存、NVLink、网卡达到规格的几成", "80 %",
     "同一出处：8 卡 all-reduce，A100 235/300 GB/s，H200 368/450 GB/s"),
    ("分块", "256 × 128", "NVIDIA 的矩阵乘法指南；块数除不尽 SM 数，最后一波就有空闲"),
    ("A100：峰值、SM、显存、NVLink、网卡", "312 T、108、2.04 TB/s、300、25 GB/s",
     "NVIDIA 规格书（NVLink 600 GB/s 是双向）；Selene 每卡一块 200 Gb/s 网卡"),
    ("H100：同上", "989 T、132、3.35 TB/s、450、50 GB/s",
     "NVIDIA 规格书（NVLink 900 GB/s 是双向）；Llama 3 每卡 400 Gb/s"),
    ("融合注意力达到峰值的几成", "A100 73 %，H100 35 %",
     "FlashAttention-2（2307.08691）；H100 上的 35 % 见 FlashAttention-3 的摘要（2407.08608）"),
    ("环上一步的延迟", "机内 2 µs，跨机 5 µs", "nccl-tests 小消息的量级；n 个 rank 一圈 n − 1 步"),
    ("张量并行、流水线、注意力环的通信", "不与计算重叠", "2021 年的实现如此；后来只藏住一部分"),
    ("数据并行的通信", "2021 年不重叠；之后藏在反向下", "Megatron 的 local DDP；FSDP 的预取"),
    ("流水线气泡", "(p − 1) / (v·m)", "arXiv 2104.04473，2.2 节；v 是每个 rank 的虚拟段数"),
)


@dataclass(frozen=True)
class Software:
    """软件的年代：决定哪些中间结果要落到显存，哪些通信能藏住。"""

    fused_attention: bool = True  # FlashAttention：T × T 的矩阵不落显存
    sequence_parallel: bool = True  # 归一化与残差也按序列切到各 TP rank
    dropout: bool = False
    bias: bool = False  # 线性层带偏置（GPT-2 一族）
    overlap: bool = True  # 数据并行的通信藏在计算下面
    causal: bool = True  # 只算掩码留下的一半（融合注意力才做得到），FLOPs 也只数这一半


MEGATRON_2021 = Software(False, False, dropout=True, bias=True, overlap=False, causal=False)
TODAY = Software()


@dataclass(frozen=True)
class Layout:
    """网格的四个轴与流水线的切法。TP 在最里面，DP 在最外面。"""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    micro_batch: int = 1  # 一次前向的序列数
    virtual: int = 1  # 每个 PP rank 的虚拟段数（交错 1F1B）
    recompute: bool = False  # 反向时整层重算
    sharding: str = "step"  # none：各有整份；step：每步集齐一次权重；layer：每层用到才集齐

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    def name(self) -> str:
        """TP 8 × PP 16 × DP 64 这样的写法，只写大于 1 的轴。"""
        axes = (("TP", self.tp), ("CP", self.cp), ("PP", self.pp), ("DP", self.dp))
        text = " × ".join(f"{axis} {size}" for axis, size in axes if size > 1) or "一张卡"
        return text.replace("DP", "DP" if self.sharding == "none" else "FSDP")


@dataclass(frozen=True)
class StepTime:
    """一步的秒数，按去处分。都是最慢的那一段流水线上的。"""

    matmul: float
    attention: float
    elementwise: float
    tensor: float  # 张量并行的 all-reduce
    context: float  # 环形注意力的 K、V
    pipeline: float  # 段间传激活
    head: float  # 输出头与交叉熵：只有最后一段有
    bubble: float
    data: float  # 没有藏住的梯度归约与权重集齐
    optimizer: float

    @property
    def total(self) -> float:
        return sum(getattr(self, name) for name in PARTS)


PARTS = {
    "matmul": "矩阵乘法", "attention": "注意力", "elementwise": "逐点运算", "tensor": "TP 通信",
    "context": "CP 通信", "pipeline": "PP 通信", "head": "输出头", "bubble": "气泡",
    "data": "DP 通信", "optimizer": "优化器",
}


# ---------------------------------------------------------------- 一个算子、一次通信


def matmul_seconds(chip: Chip, m: int, n: int, k: int, batch: int = 1) -> float:
    """batch 个 (m, k) × (k, n)：算力与显存带宽里慢的那个；分块占不满最后一波时按整波算。"""
    tiles = ceil(m / TILE_M) * ceil(n / TILE_N) * batch
    full = ceil(tiles / chip.processors) * chip.processors
    compute = 2 * m * n * k * batch / (chip.achieved * chip.peak) * full / tiles
    traffic = 2 * (m * k + k * n + m * n) * batch / (chip.achieved * chip.hbm)
    return max(compute, traffic)


def link(chip: Chip, size: int, stride: int) -> tuple[float, float]:
    """一组 `size` 个 rank、相邻两个相隔 `stride` 张卡：(每卡可用的带宽, 延迟)。

    组全在一台机器里就走 NVLink。跨机时，同一台机器里的成员各有一块网卡，环可以并排走几条，
    所以每卡看到的带宽是网卡的「每台成员数」倍，直到 NVLink 成为瓶颈。
    """
    if size * stride <= GPUS_PER_NODE:
        return chip.achieved * chip.nvlink, LATENCY_NODE
    members = max(1, GPUS_PER_NODE // stride)
    return chip.achieved * min(chip.nvlink, members * chip.network), LATENCY_NETWORK


def ring_seconds(chip: Chip, size: int, stride: int, volume: float, rounds: int = 2) -> float:
    """环形集合通信：all-reduce 两圈，all-gather 与 reduce-scatter 各一圈；`volume` 是字节。"""
    if size == 1:
        return 0.0
    bandwidth, latency = link(chip, size, stride)
    return rounds * (size - 1) * (volume / size / bandwidth + latency)


# ---------------------------------------------------------------- 一层、输出头


@dataclass(frozen=True)
class Layer:
    """一层、一个 micro-batch 的前向（反向另算），秒。"""

    matmul: float
    attention: float
    elementwise: float
    elementwise_backward: float
    tensor: float
    context: float


@cache
def layer_seconds(
    arch: Architecture, layout: Layout, chip: Chip, software: Software, seq_len: int
) -> Layer:
    """逐个算子数一层的前向。逐点运算按读写的字节数除以显存带宽。"""
    tp, d, b = layout.tp, arch.d_model, layout.micro_batch
    rows = seq_len // layout.cp  # 这个 rank 的位置数
    tokens = b * rows
    inner = 2 if arch.gated else 1
    matmul = (
        matmul_seconds(chip, tokens, (arch.q_width + 2 * arch.kv_width) // tp, d)
        + matmul_seconds(chip, tokens, d, arch.q_width // tp)
        + matmul_seconds(chip, tokens, inner * arch.mlp // tp, d)
        + matmul_seconds(chip, tokens, d, arch.mlp // tp)
    )
    whole = tokens * d / (tp if software.sequence_parallel else 1)  # 残差流，每 rank 的个数
    cut = tokens / tp
    score = 0.0 if software.fused_attention else b * arch.n_head / tp * rows * seq_len
    mask = 1 if software.dropout else 0
    # 字节：两次归一化各读写一遍，两次残差相加读二写一（dropout 另写一字节的掩码）
    forward = whole * 2 * (4 + 6 + mask) + cut * (4 * arch.q_width + (2 + 2 * inner) * arch.mlp)
    forward += score * (4 + 5 * mask)  # softmax 读写一遍，dropout 读、写、掩码
    # 归一化：x、dy 读，dx 写；增益的梯度另读一遍 x、dy；残差相加读二写一
    backward = whole * 2 * (6 + 4 + 6 + 5 * mask)
    backward += cut * (4 * arch.q_width + (2 + 4 * inner) * arch.mlp) + score * (6 + 5 * mask)
    if software.bias:  # 四个线性层的偏置梯度：各把输出的梯度再读一遍
        backward += 4 * whole + cut * 2 * (arch.q_width + 2 * arch.kv_width + inner * arch.mlp)
    bandwidth = chip.achieved * chip.hbm
    reduce = ring_seconds(chip, tp, 1, 2.0 * tokens * d)
    keys = 2.0 * 2 * b * seq_len * arch.kv_width / tp  # 整条序列的 K 与 V
    return Layer(
        matmul, attention_seconds(arch, layout, chip, software, seq_len),
        forward / bandwidth, backward / bandwidth, 2 * reduce,
        ring_seconds(chip, layout.cp, tp, keys, rounds=1),
    )


def attention_seconds(
    arch: Architecture, layout: Layout, chip: Chip, software: Software, seq_len: int
) -> float:
    """QKᵀ 与 PV 的前向。不融合时是两次批量矩阵乘法，分数矩阵写回显存再读出。"""
    rows, heads = seq_len // layout.cp, arch.n_head // layout.tp
    head_dim = arch.q_width // arch.n_head
    batch = layout.micro_batch * heads
    if software.fused_attention:
        flops = 4 * batch * rows * seq_len * head_dim * (0.5 if software.causal else 1)
        return flops / (chip.attention * chip.peak)
    return (matmul_seconds(chip, rows, seq_len, head_dim, batch)
            + matmul_seconds(chip, rows, head_dim, seq_len, batch))


@cache
def head_seconds(arch: Architecture, layout: Layout, chip: Chip, seq_len: int) -> float:
    """输出头前向与反向，加 fp32 的 logits 读写四遍；只有最后一段流水线做。"""
    tokens = layout.micro_batch * seq_len // layout.cp
    vocab = arch.vocab_size / layout.tp
    multiply = 3 * matmul_seconds(chip, tokens, ceil(vocab), arch.d_model)
    return multiply + 16 * tokens * vocab / (chip.achieved * chip.hbm)


# ---------------------------------------------------------------- 一步


def step_seconds(
    arch: Architecture, layout: Layout, chip: Chip, sequences: int, seq_len: int,
    software: Software = TODAY,
) -> StepTime:
    """一步的时间：`sequences` 条 `seq_len` 的序列，在 `layout` 上。

    Raises:
        BudgetError: 布局切不开这个模型或这个 batch；消息说是哪一条。
    """
    micro = micro_batches(arch, layout, sequences, seq_len)
    one = layer_seconds(arch, layout, chip, software, seq_len)
    layers = ceil(arch.n_layer / layout.pp)  # 最长的一段
    forwards = 2 if layout.recompute else 1
    kernel = 2.5 if software.fused_attention else 2.0  # 融合注意力的反向另算一遍 QKᵀ
    stage = {
        "matmul": layers * one.matmul * (forwards + 2),
        "attention": layers * one.attention * (forwards + kernel),
        "elementwise": layers * (one.elementwise * forwards + one.elementwise_backward),
        "tensor": layers * one.tensor * (forwards + 1),
        "context": layers * one.context * (forwards + 2),  # 反向：K、V 再转一圈，dK、dV 送回
        "pipeline": pipeline_seconds(arch, layout, chip, seq_len),
    }
    head = head_seconds(arch, layout, chip, seq_len)
    if arch.n_layer % layout.pp:  # 有的段少一层，输出头放在短的段上
        head = max(0.0, head - sum(stage.values()) / layers)
    busy = sum(stage.values())
    bubble = (layout.pp - 1) / layout.virtual * busy
    data = data_seconds(arch, layout, chip, micro)
    if software.overlap:  # 藏在最后一个 micro-batch 的反向（集齐则是整步）下面
        hidden = micro * busy if layout.sharding == "layer" else busy * 2 / 3
        data = max(0.0, data - hidden)
    params = arch.params() / (layout.tp * layout.pp)
    share = params / (1 if layout.sharding == "none" else layout.dp * layout.cp)
    optimizer = 34 * share / (chip.achieved * chip.hbm)  # 主权重与两个矩读写，梯度读，bf16 写
    return StepTime(**{name: micro * value for name, value in stage.items()},
                    head=micro * head, bubble=bubble, data=data, optimizer=optimizer)


def micro_batches(arch: Architecture, layout: Layout, sequences: int, seq_len: int) -> int:
    """每条流水线一步走几个 micro-batch；切不开时抛 BudgetError。"""
    if arch.n_head % layout.tp or arch.mlp % layout.tp:
        raise BudgetError(f"{arch.n_head} 个头、MLP 宽 {arch.mlp} 不能切成 TP {layout.tp} 份。")
    if layout.pp * layout.virtual > arch.n_layer:
        raise BudgetError(f"{arch.n_layer} 层不够分给 PP {layout.pp} × {layout.virtual} 段。")
    if seq_len % (2 * layout.cp) and layout.cp > 1:
        raise BudgetError(f"序列 {seq_len} 不能切成 CP {layout.cp} × 2 块。")
    per_pass = layout.dp * layout.micro_batch
    if sequences % per_pass:
        raise BudgetError(
            f"{sequences} 条序列不能平分给 DP {layout.dp} × micro-batch {layout.micro_batch}。"
        )
    return sequences // per_pass


def pipeline_seconds(arch: Architecture, layout: Layout, chip: Chip, seq_len: int) -> float:
    """一个 micro-batch 在一个 rank 上的段间传递：前向、反向各 `virtual` 次，切成 TP 份同时发。"""
    if layout.pp == 1:
        return 0.0
    volume = 2.0 * layout.micro_batch * seq_len / layout.cp * arch.d_model / layout.tp
    inside = layout.tp * layout.cp * layout.pp <= GPUS_PER_NODE
    bandwidth = chip.achieved * (chip.nvlink if inside else chip.network)
    latency = LATENCY_NODE if inside else LATENCY_NETWORK
    return 2 * layout.virtual * (volume / bandwidth + latency)


def data_seconds(arch: Architecture, layout: Layout, chip: Chip, micro: int) -> float:
    """一步里数据并行的通信（不算重叠）。CP 的各 rank 权重相同，也在这一组里。"""
    size, stride = layout.dp * layout.cp, layout.tp
    params = arch.params() / (layout.tp * layout.pp)
    if layout.sharding == "none":  # bf16 的梯度 all-reduce 一次
        return ring_seconds(chip, size, stride, 2 * params)
    if layout.sharding == "step":  # 梯度 fp32 reduce-scatter，权重 bf16 all-gather，各一次
        return ring_seconds(chip, size, stride, (4 + 2) * params, rounds=1)
    # 每个 micro-batch：前向、反向各集齐一遍 bf16 权重；梯度 fp32 归约
    return micro * ring_seconds(chip, size, stride, (2 + 2 + 4) * params, rounds=1)


def useful_flops(
    arch: Architecture, seq_len: int, software: Software = TODAY, *, passes: int = 3
) -> float:
    """训练一个 token 的 FLOPs：每层 `passes` 遍前向的量，加输出头；因果的只数掩码留下的一半。"""
    scores = 4 * arch.q_width * seq_len * (0.5 if software.causal else 1)
    layer = 2 * sum(arch.layer_matrices().values()) + scores
    return passes * arch.n_layer * layer + 6 * arch.vocab_size * arch.d_model


@dataclass(frozen=True)
class AxisCost:
    """一个轴一步的通信：每张卡收发的字节，整条走 NVLink 或整条走网卡各要几秒（都不算重叠）。"""

    axis: str
    what: str
    calls: int
    volume: float
    inside: float
    across: float


def axis_costs(
    arch: Architecture, layout: Layout, chip: Chip, sequences: int, seq_len: int
) -> list[AxisCost]:
    """TP、PP、DP 各要多少带宽：决定哪个轴留在机器里。"""
    micro = micro_batches(arch, layout, sequences, seq_len)
    tokens = layout.micro_batch * seq_len
    layers = ceil(arch.n_layer / layout.pp)
    inside, across = chip.achieved * chip.nvlink, chip.achieved * chip.network
    rows = []

    def add(axis: str, what: str, calls: int, one: float, hops: int) -> None:
        seconds = [calls * (one / bandwidth + hops * latency) for bandwidth, latency in
                   ((inside, LATENCY_NODE), (across, LATENCY_NETWORK))]  # fmt: skip
        rows.append(AxisCost(axis, what, calls, calls * one, *seconds))

    n, activation = layout.tp, 2.0 * tokens * arch.d_model
    add("TP", "每层四次激活求和", 4 * layers * micro, 2 * (n - 1) / n * activation, 2 * (n - 1))
    add("PP", "段间的激活与梯度", 2 * layout.virtual * micro, activation / n, 1)
    params, d = arch.params() / (layout.tp * layout.pp), layout.dp
    add("DP", "集齐权重、归约梯度", 2, 3 * (d - 1) / d * params, d - 1)
    return rows


# ---------------------------------------------------------------- 与公开的配置对照


@dataclass(frozen=True)
class Configuration:
    """一个公开了每卡 TFLOP/s 的大规模配置。`published` 是每卡 FLOP/s ÷ 峰值，百分数。"""

    name: str
    arch: Architecture
    layout: Layout
    chip: Chip
    software: Software
    sequences: int
    seq_len: int
    tflops: float
    source: str

    @property
    def published(self) -> float:
        return 100 * self.tflops * 1e12 / self.chip.peak

    def counted_flops(self) -> float:
        """发布者的数法下，一步的 FLOPs。Megatron 的数字把整层重算也算进去（式 3）。"""
        return self.sequences * self.seq_len * useful_flops(
            self.arch, self.seq_len, self.software, passes=4 if self.layout.recompute else 3
        )

    @property
    def step(self) -> StepTime:
        return step_seconds(self.arch, self.layout, self.chip, self.sequences, self.seq_len,
                            self.software)

    @property
    def predicted(self) -> float:
        """预测的利用率，百分数。"""
        return 100 * self.counted_flops() / (
            self.step.total * self.layout.gpus * self.chip.peak
        )


# 参数（B）、头、d、层、TP、PP、卡数、batch、TFLOP/s：论文表 1；micro-batch、虚拟段：
# NVIDIA/Megatron-LM 79a3bb6 的 examples/sc21/run_table_1.sh，其余各列也与它核对过
_MEGATRON = (
    (1.7, 24, 2304, 24, 1, 1, 32, 512, 137, 16, 1),
    (3.6, 32, 3072, 30, 2, 1, 64, 512, 138, 16, 1),
    (7.5, 32, 4096, 36, 4, 1, 128, 512, 142, 16, 1),
    (18.4, 48, 6144, 40, 8, 1, 256, 1024, 135, 8, 1),
    (39.1, 64, 8192, 48, 8, 2, 512, 1536, 138, 4, 1),
    (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140, 2, 3),
    (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148, 2, 2),
    (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155, 1, 2),
    (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163, 1, 3),
    (1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163, 1, 1),
)
# 卡数、CP、DP、序列长度、每步的序列数、TFLOP/s：论文表 4；虚拟段没有发布，按每段一层
_LLAMA3 = (
    (8_192, 1, 64, 8_192, 2_048, 430),
    (16_384, 1, 128, 8_192, 2_048, 400),
    (16_384, 16, 8, 131_072, 128, 380),
)


def _configurations() -> tuple[Configuration, ...]:
    rows = []
    for size, heads, d, layers, tp, pp, gpus, batch, tflops, micro, virtual in _MEGATRON:
        layout = Layout(tp, pp, gpus // (tp * pp), micro_batch=micro, virtual=virtual,
                        recompute=True, sharding="none")  # fmt: skip
        arch = gpt2(d, layers, heads, 2048, 51200, bias=False)
        rows.append(Configuration(
            f"Megatron {size:g}B", arch, layout, A100, MEGATRON_2021, batch, 2048, tflops,
            "arXiv 2104.04473，表 1",
        ))
    for gpus, cp, dp, seq_len, sequences, tflops in _LLAMA3:
        layout = Layout(8, 16, dp, cp, virtual=7)
        assert layout.gpus == gpus
        rows.append(Configuration(
            f"Llama 3 405B，{gpus:,} 卡" + (f"，T {seq_len:,}" if cp > 1 else ""),
            PRESETS["llama3-405b"], layout, H100, TODAY, sequences, seq_len, tflops,
            "arXiv 2407.21783，表 4",
        ))
    return tuple(rows)


CONFIGURATIONS = _configurations()


def with_share(achieved: float) -> tuple[Configuration, ...]:
    """同样的配置，但假定达到规格的 `achieved`：看结论有多依赖那个八成。"""
    return tuple(
        replace(row, chip=replace(row.chip, achieved=achieved)) for row in CONFIGURATIONS
    )


def mean_error(rows: tuple[Configuration, ...] = CONFIGURATIONS) -> float:
    """平均绝对误差，百分点。"""
    return sum(abs(row.predicted - row.published) for row in rows) / len(rows)


def swapped_pairs(rows: tuple[Configuration, ...]) -> list[tuple[str, str, float]]:
    """预测与发布次序相反的每一对，以及发布的差（百分点）；发布相等的不算。"""
    return [
        (a.name, b.name, abs(a.published - b.published))
        for i, a in enumerate(rows) for b in rows[i + 1:]
        if (a.published - b.published) * (a.predicted - b.predicted) < 0
    ]
