"""训练的预算：要几张卡、几小时、多少钱、放不放得下。核心只用标准库。

    python experiments/budget.py                                       # 三个规模的一张表
    python experiments/budget.py plan --params 1.3e9 --gpus 8 --device h100
    python experiments/budget.py published                             # 公式与公开记录对照
    python experiments/budget.py memory --model 1.3b --micro-batch 8   # DDP 与 FSDP 的每卡显存
    python experiments/budget.py count --model llama3-8b               # 参数、FLOPs、KV 缓存
    python experiments/budget.py optimal --money 1000                  # 一笔钱最该训多大的模型
    python experiments/budget.py scale                                 # 步时模型：8 到 10 万张卡
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from experiments.plan import failures, layouts, memory, planning, published, step_time
from experiments.plan.architecture import (
    Architecture,
    BudgetError,
    check_positions,
    executed_flops_per_token,
    flops_per_token,
    from_config_json,
    kv_cache_bytes,
    preset,
)
from experiments.plan.layouts import layout_for
from experiments.plan.number_text import duration, readable
from experiments.plan.planning import (
    Plan,
    Request,
    device_of,
    make_plan,
    training_flops,
    training_hours,
)
from experiments.plan.report import report

PEAK_H100, MFU = 989e12, 0.4
STATE_BYTES = 16  # 每参数：fp32 权重 4 + 梯度 4 + Adam 两个矩 8；ZeRO 论文的账是 2 + 2 + 12


@dataclass(frozen=True)
class Scale:
    """入门表的一行：规模与训练它的卡数，以及算激活用的形状。"""

    name: str
    params: float
    gpus: int
    d_model: int
    n_layer: int
    seq_len: int
    batch: int  # 每卡的 micro-batch（序列数）


SCALES = (
    Scale("124M", 124e6, 1, 768, 12, 1024, 16),
    Scale("1.3B", 1.3e9, 8, 2048, 24, 2048, 8),
    Scale("7B", 7e9, 64, 4096, 32, 4096, 2),
)


@dataclass(frozen=True)
class Row:
    """入门表的一行结果。显存单位 GB（10^9 字节）。"""

    scale: Scale
    tokens: float
    flops: float
    hours: float
    states: float
    states_sharded: float
    activations: float


def table_row(scale: Scale) -> Row:
    """D = 20N，C = 6ND，小时 = C/(卡数·峰值·MFU)/3600，状态 16 字节/参数，激活 34·s·b·d·L。"""
    tokens = planning.TOKENS_PER_PARAM * scale.params
    flops = training_flops(scale.params, tokens)
    states = STATE_BYTES * scale.params / memory.GB
    return Row(
        scale, tokens, flops, training_hours(flops, scale.gpus, PEAK_H100, MFU),
        states, states / scale.gpus,
        memory.simple_activations(scale.seq_len, scale.batch, scale.d_model, scale.n_layer),
    )


def display_width(text: str) -> int:
    """终端里的宽度：中文字符占两格。"""
    return sum(2 if ord(c) > 0x2E7F else 1 for c in text)


def print_rows(
    title: tuple[str, ...], rows: list[tuple[str, ...]], *, notes: bool = False
) -> None:
    """列右对齐的表；`notes` 表示最后一列是说明，左对齐。中文字符按两格宽计。"""
    columns = [max(map(display_width, column)) for column in zip(title, *rows, strict=True)]
    for row in (title, *rows):
        cells = [
            " " * (width - display_width(text)) + text
            for width, text in zip(columns, row, strict=True)
        ]
        if notes:
            cells[-1] = row[-1]
        print("  ".join(cells).rstrip())


def print_table() -> None:
    """三个规模的表：H100、MFU 40 %、每参数 20 个 token。"""
    title = ("规模", "token", "FLOPs", "GPU", "小时", "状态 GB", "分片后 GB", "激活 GB")
    print_rows(title, [
        (
            row.scale.name, f"{row.tokens / 1e9:.1f} B", f"{row.flops:.1e}", str(row.scale.gpus),
            f"{row.hours:.1f}", f"{row.states:.1f}", f"{row.states_sharded:.2f}",
            f"{row.activations:.1f}",
        )
        for row in map(table_row, SCALES)
    ])


# --- Chinchilla 最优 ----------------------------------------------------------------------

def optimal_by_rule(flops: float, ratio: float = planning.TOKENS_PER_PARAM) -> tuple[float, float]:
    """算力 C 下的 (N, D)：C = 6ND 且 D = ratio·N，所以 N = √(C / (6·ratio))。"""
    params = math.sqrt(flops / (6 * ratio))
    return params, ratio * params


def flops_for_money(money: float, price_per_hour: float, peak: float, mfu: float) -> float:
    """一笔钱买得到的 FLOPs：卡时 × 峰值 × MFU。"""
    return money / price_per_hour * 3600 * peak * mfu


# --- 子命令 ------------------------------------------------------------------------------

@dataclass(frozen=True)
class PlanOptions:
    """排一个计划，写出配置文件与启动命令。"""

    params: float = 0.0
    """参数量（个），如 1.3e9；用 --model 或 --config-json 时不必给"""
    model: str = ""
    """预设的名字，如 1.3b、llama3-8b；给出时用它的形状"""
    config_json: str = ""
    """Hugging Face 的 config.json 的路径；给出时用它的形状"""
    gpus: int = 8
    """卡数（张）"""
    device: str = "h100"
    """设备的短名，如 a100、h100、4090"""
    memory_gb: float | None = None
    """每卡显存（GB）；缺省取该型号最大的规格"""
    mfu: float = 0.4
    """预期的 MFU（0 到 1）"""
    tokens: float | None = None
    """训练的 token 数（个）；缺省每参数 20 个"""
    seq_len: int | None = None
    """序列长度（token）；缺省 2048，位置表更短的模型取它的行数"""
    global_batch: int | None = None
    """一次更新的 token 数，要是卡数 × 序列长度的整数倍；缺省随规模取 0.5–4 M"""
    gpus_per_node: int = planning.GPUS_PER_NODE
    """一台机器几张卡（张）；多于一台时卡数要是它的整数倍"""
    data: str = ""
    """训练数据（tokens.pt 的路径），写进配置"""
    price: float | None = None
    """单价（美元/卡时）；缺省用设备表的参考价"""
    vocab_size: int | None = None
    """词表（个）；缺省 50304，小模型 8192"""
    eager: bool = False
    """按不编译估计显存"""
    out: str = ""
    """配置文件写到哪里；空则只打印"""


@dataclass(frozen=True)
class PublishedOptions:
    """公式与公开记录对照的两张表。"""


@dataclass(frozen=True)
class MemoryOptions:
    """DDP 与 FSDP 的每卡显存。"""

    model: str = "1.3b"
    """预设的名字"""
    micro_batch: int = 8
    """每卡一次前向的序列数（个）"""
    gpus: int = 8
    """卡数（张）"""
    eager: bool = False
    """按不编译估计"""


@dataclass(frozen=True)
class CountOptions:
    """参数量、每 token 的 FLOPs、KV 缓存。"""

    model: str = ""
    """预设的名字"""
    config_json: str = ""
    """或者 Hugging Face 的 config.json 的路径"""
    seq_len: int = 0
    """序列长度（token）；0 表示模型自己的上限"""


@dataclass(frozen=True)
class OptimalOptions:
    """给定算力或一笔钱，最该训多大的模型、多少数据。"""

    flops: float = 0.0
    """算力（FLOPs）；与 --money 二选一"""
    money: float = 0.0
    """预算（美元）"""
    device: str = "h100"
    """设备的短名"""
    price: float | None = None
    """单价（美元/卡时）；缺省用设备表的参考价"""
    mfu: float = 0.4
    """预期的 MFU（0 到 1）"""


@dataclass(frozen=True)
class ScaleOptions:
    """步时模型与公开配置对照；1B 到 1T 在 8 到 10 万张 H100 上最快的布局；多久存一次检查点。"""

    section: Literal["all", "check", "layouts", "failures"] = "all"
    """印哪一节：对照、布局、中断，或全部"""


def chosen_architecture(model: str, config_json: str) -> Architecture | None:
    """由预设名或 config.json 得到形状；两个都没给时返回 None。"""
    if model and config_json:
        raise BudgetError("--model 与 --config-json 只能给一个。")
    if model:
        return preset(model)
    return from_config_json(user_path(config_json)) if config_json else None


def user_path(text: str) -> str:
    """命令行里的路径：开头的 ~ 换成家目录（`--out=~/x` 时 shell 不会替我们换）。"""
    try:
        return str(Path(text).expanduser())
    except RuntimeError as error:
        raise BudgetError(f"{text}：不知道 ~ 指哪里（{error}）；请写完整的路径。") from error


def request_of(options: PlanOptions) -> Request:
    """命令行 → 计划的输入。"""
    arch = chosen_architecture(options.model, options.config_json)
    if arch is None and options.params == 0:
        raise BudgetError("要给出模型：--params 1.3e9，或 --model 1.3b，或 --config-json 路径。")
    if arch is not None and options.params:
        raise BudgetError("--params 与 --model、--config-json 只能给一个。")
    params = float(arch.params()) if arch else options.params
    planning.require("params（参数量）", params, 1e6, 1e13)
    planning.require("gpus（卡数）", options.gpus, 1, 1e6)
    planning.require("gpus_per_node（每台的卡数）", options.gpus_per_node, 1, 1024)
    planning.nodes_of(options.gpus, options.gpus_per_node)
    shortest = arch.seq_len if arch and arch.learned_positions else 2048
    if options.tokens is not None:
        planning.require("tokens（训练 token 数）", options.tokens, 1e4, 1e16)
    return Request(
        params, options.device, options.gpus, options.mfu,
        planning.TOKENS_PER_PARAM if options.tokens is None else options.tokens / params,
        min(2048, shortest) if options.seq_len is None else options.seq_len,
        options.global_batch, options.memory_gb, options.price,
        arch.vocab_size if arch else options.vocab_size,
        "eager" if options.eager else "compiled", arch,
        user_path(options.data) if options.data else "",
    )


def print_plan(plan: Plan) -> None:
    """计划的全文：模型、放得下的办法、batch、时间与价格、先做什么、要看什么。"""
    lines = report(plan) | {
        "先做": "小模型上验证：数据、分词器、循环、续训、评估、学习率",
        "要看": "loss、梯度范数、token/s、MFU、显存、生成的样本、评估",
    }
    for label, text in lines.items():
        print(label + " " * (8 - display_width(label)) + text)


def run_plan(options: PlanOptions) -> None:
    """排计划、打印，写出配置文件与启动命令；train_gpu.py 跑不了的结构不写，说出理由。"""
    request = request_of(options)
    try:
        plan = make_plan(request)
    except BudgetError as error:
        raise BudgetError(f"{error}{other_way(request)}") from error
    print_plan(plan)
    if plan.strategy != "ddp" or plan.checkpoint:
        try:
            print(f"布局    {layout_for(request)}")
        except BudgetError as error:
            print(f"布局    没有：{error}")
    if reason := planning.cannot_launch(plan):
        print(f"\n没有写配置：{reason}。")
        return
    launch_id = planning.new_launch_id()
    name = user_path(options.out) if options.out else f"runs/{launch_id}.toml"
    text = planning.config_toml(plan, launch_id)
    if options.out:
        write_text(name, text)
        print(f"\n已写 {name}。启动：")
    else:
        print(f"\n配置（用 --out FILE 写成文件）：\n\n{text}\n存为 {name} 后启动：")
    gpus, per_node = plan.request.gpus, options.gpus_per_node
    print(f"  {planning.launch_command(gpus, name, launch_id, per_node)}")
    if planning.nodes_of(gpus, per_node)[0] > 1:
        print("  （每台机器各运行一次。再启动一次新的训练，要换一个 --rdzv-id 与 out_dir。）")


def other_way(request: Request) -> str:
    """只用 FSDP 放不下时，再切张量与流水线放不放得下；放得下就给出布局，否则是空串。"""
    try:
        return f"也切张量与流水线就放得下：{layout_for(request)}。"
    except BudgetError:
        return ""


def write_text(path: str, text: str) -> None:
    """原子地写一个文本文件；写不了时一句话说明。"""
    from tokens.files import atomic_write

    try:
        with atomic_write(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BudgetError(f"写不了 {path}（{error}）；请换一个路径。") from error


def run_published(_: PublishedOptions) -> None:
    """先是 MFU，再是整次训练的时间。"""
    print_rows(("记录", "发布的 MFU %", "重算 %", "约定"), [
        (run.name, f"{run.published:g}", f"{run.ours:.2f}", run.convention)
        for run in published.MFU_RUNS
    ], notes=True)
    print()
    low, high = published.MFU_SEEN
    print_rows(("整次训练", f"预测 h（{high:.0%}–{low:.0%}）", "发布 h", "反推 MFU %", "说明"), [
        (
            run.name, f"{run.predicted(high):,.1f}–{run.predicted(low):,.1f}",
            f"{run.hours:,.1f}", f"{100 * run.implied_mfu:.1f}", run.why,
        )
        for run in published.WHOLE_RUNS
    ], notes=True)


def memory_rows(
    arch: Architecture, micro_batch: int, gpus: int, execution: str
) -> list[tuple[str, memory.Memory]]:
    """两种策略 × 重算与否的每卡显存。"""
    return [
        (
            planning.STRATEGY_NAMES[strategy] + (" + 重算" if checkpoint else ""),
            memory.estimate(
                arch, micro_batch=micro_batch, strategy=strategy, gpus=gpus,
                execution=execution, checkpoint=checkpoint,
            ),
        )
        for checkpoint in (False, True) for strategy in memory.STRATEGIES
    ]


def run_memory(options: MemoryOptions) -> None:
    """打印各策略的每卡显存，GB。"""
    planning.require("gpus（卡数）", options.gpus, 1, 1e6)
    rows = memory_rows(
        preset(options.model), options.micro_batch, options.gpus,
        "eager" if options.eager else "compiled",
    )
    print_rows(("策略", "状态", "权重副本", "激活", "logits 等", "合计 GB"), [
        (name, *(f"{x:.1f}" for x in (m.states, m.working, m.activations, m.peak, m.total)))
        for name, m in rows
    ])


def run_count(options: CountOptions) -> None:
    """打印参数量、FLOPs、KV 缓存。"""
    arch = chosen_architecture(options.model, options.config_json)
    if arch is None:
        raise BudgetError("要给出模型：--model 1.3b，或 --config-json 路径。")
    length = options.seq_len or arch.seq_len
    planning.require("seq_len（序列长度）", length, 1, 2**24)
    check_positions(arch, length)
    print(f"参数            {arch.params():,}（矩阵乘法里的 {arch.matmul_params():,}）")
    print(f"训练 FLOPs      {flops_per_token(arch, length):,} 每 token（6N + 12LTd，T = {length}）")
    print(f"逐个乘法数出    {executed_flops_per_token(arch, length):,}；整层重算时 "
          f"{executed_flops_per_token(arch, length, recompute='full'):,}")
    print(f"KV 缓存         {kv_cache_bytes(arch, length):,} 字节（一条序列，bf16）")


def run_optimal(options: OptimalOptions) -> None:
    """按 20 token/参数与三组拟合给出最优的 N 与 D。"""
    if (options.flops > 0) == (options.money > 0):
        raise BudgetError("--flops 与 --money 要给一个，且是正数。")
    device = device_of(options.device)
    planning.require("mfu", options.mfu, 0.01, 1.0, "（稠密峰值下不可能超过 1）")
    price = device.price_per_hour if options.price is None else options.price
    if options.money and not price:
        raise BudgetError(f"{device.name} 没有参考价；请用 --price 给出每卡每小时的价格（美元）。")
    flops = options.flops or flops_for_money(options.money, price, device.peak_bf16, options.mfu)
    planning.require("算力（FLOPs）", flops, 1e12, 1e30)
    print(f"算力 C = {flops:.2e} FLOPs")
    pairs = [("每参数 20 个 token", *optimal_by_rule(flops))]
    from experiments.training.law import PUBLISHED  # 要 numpy 与 scipy，核心不要

    pairs += [(name, *law.optimum(flops)) for name, law in PUBLISHED.items()]
    print_rows(("依据", "参数", "token", "token/参数"), [
        (name, readable(n), readable(d), f"{d / n:.1f}") for name, n, d in pairs
    ])


def print_check() -> None:
    """预测与发布的利用率。"""
    rows = []
    for row in step_time.CONFIGURATIONS:
        step = row.step
        shares = [f"{100 * part / step.total:.1f}" for part in (step.tensor, step.bubble)]
        gap = f"{row.predicted - row.published:+.1f}"
        rows.append((row.name, f"{row.published:.1f}", f"{row.predicted:.1f}", gap, *shares))
    print_rows(("配置", "发布 %", "预测 %", "差", "其中 TP 通信 %", "气泡 %"), rows)
    print(f"平均绝对误差 {step_time.mean_error():.1f} 个百分点")


def print_layouts() -> None:
    """每个模型、每种卡数的最快布局，或放不下的理由。"""
    title = ("模型", "GPU", "GB/卡", "秒/步", "MFU %", "读完 20N", "布局")
    rows = []
    for cell in layouts.table():
        if cell.choice is None:
            rows.append((cell.model, f"{cell.gpus:,}", "", "", "", "", cell.refusal))
            continue
        c = cell.choice
        rows.append((
            cell.model, f"{cell.gpus:,}", f"{c.memory:.0f}", f"{c.step.total:.2f}",
            f"{c.mfu():.0f}",
            duration(24 * c.days(planning.TOKENS_PER_PARAM * c.arch.params())).split("（")[0],
            c.describe(),
        ))
    print_rows(title, rows, notes=True)


def print_failures() -> None:
    """每种规模每天坏几次，多久存一次检查点。"""
    title = ("模型", "GPU", "次/天", "平均几小时坏一次", "存一次 s", "最佳间隔 min", "白费 %")
    print_rows(title, [
        (
            name, f"{u.gpus:,}", f"{u.per_day:.2f}", f"{u.mtbf / 3600:,.1f}", f"{u.save:.1f}",
            f"{u.interval / 60:.1f}", f"{100 * u.lost:.1f}",
        )
        for name, u in failures.table()
    ])


def run_scale(options: ScaleOptions) -> None:
    """按节打印。"""
    sections = {"check": print_check, "layouts": print_layouts, "failures": print_failures}
    for number, (name, show) in enumerate(sections.items()):
        if options.section in ("all", name):
            if number and options.section == "all":
                print()
            show()


def print_in_any_encoding() -> None:
    """stdout 的编码写不出某个字（gbk 没有「⁻」，latin-1 没有汉字）时印成「?」，不中断。"""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def command_line() -> None:
    """没有参数时打印入门表；否则由 tyro 解析子命令。使用者的错误只说一句，退出码 2。"""
    print_in_any_encoding()
    if len(sys.argv) == 1:
        print_table()
        return
    import tyro  # 只有子命令要它：不装任何东西也能打印入门表

    commands = {
        "plan": (PlanOptions, run_plan), "published": (PublishedOptions, run_published),
        "memory": (MemoryOptions, run_memory), "count": (CountOptions, run_count),
        "optimal": (OptimalOptions, run_optimal), "scale": (ScaleOptions, run_scale),
    }
    options = tyro.extras.subcommand_cli_from_dict(
        {name: kind for name, (kind, _) in commands.items()}, description=__doc__
    )
    run = next(run for kind, run in commands.values() if isinstance(options, kind))
    try:
        run(options)
    except BudgetError as error:
        print(f"错误：{error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    command_line()
