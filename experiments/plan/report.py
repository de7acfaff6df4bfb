"""把一个计划写成文字。命令行 `budget.py plan` 与书页上的计算器印出的每个字都来自这里。

计算器（`book/figures/calculator.js`）是这一套的 JavaScript 版，`tests/test_budget_page.py`
用几百组随机输入逐字比较。只用标准库。
"""

from __future__ import annotations

from experiments.plan.architecture import BudgetError
from experiments.plan.memory import USABLE, Memory, estimate
from experiments.plan.number_text import duration, fixed, grouped, readable, scientific
from experiments.plan.planning import (
    MFU_HIGH,
    MFU_LOW,
    STRATEGY_NAMES,
    Plan,
    Request,
    default_global_batch,
    make_plan,
    resolve,
    training_hours,
)

# 计算器里并排比较的几种放法
COMPARED = (("ddp", False), ("zero3", False), ("ddp", True), ("zero3", True))


def strategy_name(strategy: str, checkpoint: bool) -> str:
    return STRATEGY_NAMES[strategy] + ("，激活重算" if checkpoint else "")


def report(plan: Plan) -> dict[str, str]:
    """计划的各行文字，键是行首的标签。"""
    arch, request, cost, memory = plan.arch, plan.request, plan.cost, plan.memory
    best, worst = (
        training_hours(plan.flops, request.gpus, plan.device.peak_bf16, mfu)
        for mfu in (MFU_HIGH, MFU_LOW)
    )
    return {
        "模型": f"{grouped(arch.params())} 参数：d {arch.d_model}，{arch.n_layer} 层，"
                f"{arch.n_head} 头，词表 {arch.vocab_size}，序列 {request.seq_len}",
        "数据": f"{readable(plan.tokens)} token，C = 6ND = {scientific(plan.flops, 2)} FLOPs",
        "并行": strategy_name(plan.strategy, plan.checkpoint),
        "batch": f"{plan.micro_batch} 条 × {request.gpus} 张卡 × 累积 {plan.accumulation} 次 = "
                 f"{grouped(plan.global_batch)} token/步，共 {grouped(plan.steps)} 步"
                 + crowded(plan),
        "显存": f"每卡 {fixed(memory.total, 1)} / {fixed(plan.capacity, 0)} GB：{parts(memory)}",
        "时间": f"{duration(cost.hours)}（MFU {fixed(100 * request.mfu, 0)} %）；"
                f"{fixed(100 * MFU_HIGH, 0)} % 到 {fixed(100 * MFU_LOW, 0)} % 是"
                f" {duration(best)}到 {duration(worst)}；"
                f"算上注意力再多 {fixed(100 * plan.attention_share, 1)} %",
        "卡时": grouped(cost.gpu_hours, 1),
        "价格": "没有参考价，请给出单价" if cost.price is None else f"${grouped(cost.price)}",
        "电": "未知" if cost.energy is None else f"{grouped(cost.energy)} kWh（满功率、PUE 1.1）",
    }


def crowded(plan: Plan) -> str:
    """没有指定全局 batch，而每卡一条就已超过常用的大小：说出来，不悄悄放大。"""
    usual = default_global_batch(plan.request.params)
    least = plan.micro_batch * plan.accumulation == 1
    if plan.request.global_batch is not None or not least or plan.global_batch <= usual:
        return ""
    return f"（这个规模常用 {grouped(usual)}；卡太多，每卡一条也有这么大）"


def parts(memory: Memory) -> str:
    """显存的四部分。"""
    return (
        f"状态 {fixed(memory.states, 1)}，权重副本 {fixed(memory.working, 1)}，"
        f"激活 {fixed(memory.activations, 1)}，logits 等 {fixed(memory.peak, 1)}"
    )


def bars(request: Request, micro_batch: int) -> list[tuple[str, str, str, bool]]:
    """各种放法在同一个 micro-batch 下的每卡显存：(名字, 合计, 四部分, 放不放得下)。"""
    _, capacity, arch = resolve(request)
    rows = []
    for strategy, checkpoint in COMPARED:
        memory = estimate(
            arch, micro_batch=micro_batch, seq_len=request.seq_len, strategy=strategy,
            gpus=request.gpus, execution=request.execution, checkpoint=checkpoint,
        )
        rows.append((
            strategy_name(strategy, checkpoint), fixed(memory.total, 1), parts(memory),
            memory.total <= USABLE * capacity,
        ))
    return rows


def answer(request: Request) -> dict:
    """计算器的全部输出：可行时是计划的各行，否则是一句理由；都附上并排的显存。"""
    try:
        plan = make_plan(request)
    except BudgetError as error:
        return {"impossible": str(error), "bars": bars(request, 1)}
    return {"report": report(plan), "bars": bars(request, plan.micro_batch)}
