"""一张卡上的训练显存：每一项是什么、有多大、出自哪里。只用标准库，单位 GB（10^9 字节）。

公式由逐张量跟踪（`benchmarks/track_memory.py`）核对，误差见 `book/measured/budget_memory.csv`。
这里**没有**：CUDA 上下文、显存池碎片、cuBLAS 与 NCCL 的缓冲；`USABLE` 为它们留出一成。
"""

from __future__ import annotations

from dataclasses import dataclass

from experiments.plan.architecture import Architecture, BudgetError, check_positions

GB = 1e9
USABLE = 0.9  # 显存的一成留给 CUDA 上下文、碎片与通信缓冲
STRATEGIES = ("ddp", "zero3")  # 逐张量跟踪过的两种；ZeRO-1/2 只算状态，不估整步的峰值
STAGES = ("ddp", "zero1", "zero2", "zero3")
EXECUTIONS = ("eager", "compiled")
# 同样是 16 字节的两本账：（权重, 梯度, 优化器）。本书的循环用 autocast，权重与梯度都是 fp32，
# bf16 的权重是另外的临时副本；ZeRO 论文的权重与梯度是 bf16，fp32 的主权重算在优化器里。
LEDGERS = {"book": (4, 4, 8), "paper": (2, 2, 12)}


def zero_bytes_per_param(stage: str, gpus: int, ledger: str = "book") -> float:
    """每个参数的状态字节数（ZeRO，arXiv 1910.02054，图 1），按 `LEDGERS` 里的一本账。

    ZeRO-1 分摊优化器，ZeRO-2 再分摊梯度，ZeRO-3（FSDP）连权重也分摊。不分摊与全分摊时
    两本账相同；ZeRO-1、ZeRO-2 不同，因为整份留下的东西一本是 fp32，一本是 bf16。
    """
    if stage not in STAGES:
        raise BudgetError(f"策略 {stage!r}：只有 {'、'.join(STAGES)}。")
    if ledger not in LEDGERS:
        raise BudgetError(f"账本 {ledger!r}：只有 {'、'.join(LEDGERS)}。")
    weights, gradients, optimizer = LEDGERS[ledger]
    cut = STAGES.index(stage)  # 从优化器数起，分摊了几样
    return float(
        weights / (gpus if cut > 2 else 1) + gradients / (gpus if cut > 1 else 1)
        + optimizer / (gpus if cut > 0 else 1)
    )


def simple_activations(seq_len: int, batch: int, d_model: int, n_layer: int) -> float:
    """34·s·b·d·L **字节**（arXiv 2205.05198，选择性重算；FlashAttention 起同样作用），返回 GB。

    公式里的 34 已经是字节数，再乘 2 就错了一倍。
    """
    return 34 * seq_len * batch * d_model * n_layer / GB


def layer_bytes(arch: Architecture, execution: str) -> dict[str, int]:
    """一层为反向保留的激活，每 token 的字节数，逐个张量。

    残差流是 fp32（4 字节），矩阵乘法的输入输出是 bf16（2 字节）。eager 下 autocast 给同一个
    归一化结果各做一份 bf16 副本，逐点算子各留一份中间结果；编译后它们在反向时顺手重算。
    """
    d, q, kv, m = arch.d_model, arch.q_width, arch.kv_width, arch.mlp
    attention = {
        "qkv 的输出": 2 * (q + 2 * kv),
        "旋转后的 q、k": 2 * (q + kv),
        "注意力的输出与 logsumexp": 2 * q + 4 * arch.n_head,
        "输出的连续副本": 2 * q,
    }
    inputs = 2 if arch.gated else 1  # 读同一个归一化结果的矩阵个数（gate、up）
    if execution == "eager":
        return {
            "两个归一化的输入（残差流）": 8 * d,
            "归一化的中间结果": 8 * d,
            "给 qkv 与 MLP 的 bf16 副本": 2 * d * (1 + inputs),
            **attention,
            "MLP 的中间结果": 2 * m * (4 if arch.gated else 2),
        }
    if execution == "compiled":
        return {
            "两个归一化的输入（残差流）": 8 * d,
            "给 qkv 与 MLP 的 bf16 副本": 4 * d,
            **attention,
            "MLP 的中间结果": 2 * m * (3 if arch.gated else 2),
        }
    raise BudgetError(f"执行方式 {execution!r}：只有 {'、'.join(EXECUTIONS)}。")


@dataclass(frozen=True)
class Memory:
    """一张卡的峰值显存，GB。"""

    states: float  # 权重、梯度、优化器
    working: float  # bf16 的权重副本；FSDP 是临时集齐的层与还没分摊的梯度
    activations: float  # 各层为反向保留的张量
    peak: float  # 最挤的时刻另需的：logits 及其梯度，或正在重算的一层

    @property
    def total(self) -> float:
        return self.states + self.working + self.activations + self.peak


def head_bytes(arch: Architecture, execution: str) -> int:
    """输出端最挤的时刻，每 token 的字节数：最后的归一化，加 logits 及其梯度。

    eager 同时有三份 fp32（log-softmax、它的梯度、logits 的梯度）：12·V；
    融合的交叉熵只有 bf16 的 logits 与梯度：4·V。
    """
    if execution == "eager":
        return 10 * arch.d_model + 12 * arch.vocab_size
    return 6 * arch.d_model + 4 * arch.vocab_size


def estimate(
    arch: Architecture, *, micro_batch: int, seq_len: int | None = None, strategy: str = "ddp",
    gpus: int = 1, execution: str = "compiled", checkpoint: bool = False,
) -> Memory:
    """一张卡一步训练的峰值显存（bf16 混合精度、AdamW、有梯度累积），按本书的账（4 + 4 + 8）。

    checkpoint: 每层只留输入，反向时整层重算。一张卡上没有可分摊的，zero3 等于 ddp。

    Raises:
        BudgetError: 策略、执行方式不认识，或个数不是正整数。
    """
    length = arch.seq_len if seq_len is None else seq_len
    for name, value in (("micro_batch", micro_batch), ("gpus", gpus), ("seq_len", length)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BudgetError(f"{name} = {value!r}：要一个正整数。")
    if strategy not in STRATEGIES:
        raise BudgetError(f"策略 {strategy!r}：整步的峰值只会估 {'、'.join(STRATEGIES)}。")
    check_positions(arch, length)
    states = zero_bytes_per_param(strategy, gpus) * arch.params()
    layer = sum(layer_bytes(arch, execution).values())
    if strategy == "zero3" and gpus > 1:
        phases = _sharded_phases(arch, micro_batch * length, layer, execution, checkpoint)
    else:
        phases = _replicated_phases(arch, micro_batch * length, layer, execution, checkpoint)
    working, activations, peak = max(phases, key=lambda phase: phase[0] + phase[1] + phase[2])
    return Memory(states / GB, working / GB, activations / GB, peak / GB)


Phase = tuple[float, float, float]  # working、activations、peak，字节


def _replicated_phases(
    arch: Architecture, tokens: int, layer: int, execution: str, checkpoint: bool
) -> list[Phase]:
    """每张卡都有整个模型时（DDP）可能最挤的几个时刻。"""
    embedding = arch.vocab_size * arch.d_model
    copies = 2 * arch.matmul_params()  # autocast 的 bf16 副本
    head = head_bytes(arch, execution) * tokens
    if not checkpoint:
        phases = [(copies, layer * arch.n_layer * tokens, head)]
    else:
        kept = 4 * arch.d_model * arch.n_layer * tokens
        phases = [(2 * embedding, kept, head), (4 * embedding, kept, layer * tokens)]
        if execution == "eager":  # 前向结束：副本还在缓存里，logits 有 bf16 与两份 fp32
            phases.append((copies, kept, head - 2 * arch.vocab_size * tokens))
    if execution == "compiled":  # 反向结束：整张图的 fp32 梯度一起交还，再累加
        phases.append((4 * arch.params() + 2 * embedding, 0, 0))
    return phases


def _sharded_phases(
    arch: Architecture, tokens: int, layer: int, execution: str, checkpoint: bool
) -> list[Phase]:
    """FSDP2（ZeRO-3，param bf16、reduce fp32）可能最挤的两个时刻。

    残差流是 bf16，比 autocast 每层少 2·d；bf16 的权重一次只集齐一层，另预取一层。
    """
    embedding, block = arch.vocab_size * arch.d_model, arch.layer_params()
    layer -= 2 * arch.d_model
    kept = 2 * arch.d_model * arch.n_layer if checkpoint else layer * arch.n_layer
    rest = kept if checkpoint else layer * (arch.n_layer - 1)
    return [
        # 输出端：词嵌入、最后一层、预取的一层
        (2 * embedding + 4 * block, kept * tokens, head_bytes(arch, execution) * tokens),
        # 一层的反向将尽：再加这一层 bf16 与 fp32 的梯度，和共享词嵌入的梯度
        (4 * embedding + 10 * block, rest * tokens, layer * tokens if checkpoint else 0),
    ]
