"""从「多大的模型、什么卡、几张」到一个能开工的计划。只用标准库。

依次回答：取什么形状，用哪种并行策略，micro-batch 多大、累积几次，要几小时、多少钱；
放不下时，最近的可行计划是什么。书页上的计算器（`book/figures/calculator.js`）是同一套算法。
"""

from __future__ import annotations

import json
import math
import secrets
from dataclasses import dataclass, replace
from datetime import datetime
from shlex import quote

from experiments.lab.devices import DEVICES, Device
from experiments.plan.architecture import (
    Architecture,
    BudgetError,
    check_positions,
    flops_per_token,
    gpt,
)
from experiments.plan.memory import USABLE, Memory, estimate
from experiments.plan.number_text import duration, fixed, grouped, readable

TOKENS_PER_PARAM = 20.0  # Chinchilla（arXiv 2203.15556）
ENOUGH_TOKENS = 4096  # 一个 micro-batch 至少这么多 token，矩阵乘法才够大
MAX_MICRO_BATCH = 256
PUE = 1.1  # 数据中心的总耗电与设备耗电之比（LLaMA，arXiv 2302.13971）
MFU_LOW, MFU_HIGH = 0.30, 0.50  # 常见范围，给出最好与最坏的小时数
# 由快到慢：先不切分、不重算；FSDP 多一半通信；重算多三分之一计算
ATTEMPTS = (("ddp", False), ("zero3", False), ("ddp", True), ("zero3", True))
STRATEGY_NAMES = {"ddp": "DDP", "zero3": "FSDP（ZeRO-3）"}
GPUS_PER_NODE = 8  # 一台机器几张卡；NVLink 连着的通常就是它们
# GPT-3（arXiv 2005.14165，表 2.1）的峰值学习率：参数量上限 → 学习率
GPT3_RATES = (
    (2e8, 6e-4), (5e8, 3e-4), (1e9, 2.5e-4), (2e9, 2e-4), (4.5e9, 1.6e-4), (9e9, 1.2e-4),
)


def require(name: str, value: float, low: float, high: float, unit: str = "") -> None:
    """数值要有限且在 [low, high] 内，否则一句话拒绝。"""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not low <= value <= high:
        shown = f"{value:g}" if number else repr(value)
        raise BudgetError(f"{name} = {shown}：要一个 {low:g} 到 {high:g} 之间的数{unit}。")


def device_of(name: str) -> Device:
    """按短名取设备；没有时列出全部。"""
    if name.lower() not in DEVICES:
        raise BudgetError(f"没有叫 {name} 的设备；可选：{'、'.join(DEVICES)}。")
    return DEVICES[name.lower()]


def half_up(value: float) -> int:
    """四舍五入到整数，恰好一半时向上（与 JavaScript 的 Math.round 相同）。"""
    return math.floor(value + 0.5)


def training_flops(params: float, tokens: float) -> float:
    """C = 6·N·D。"""
    return 6 * params * tokens


def training_hours(flops: float, gpus: int, peak: float, mfu: float) -> float:
    """C / (卡数 × 峰值 × MFU)，小时。"""
    return flops / (gpus * peak * mfu) / 3600


@dataclass(frozen=True)
class Cost:
    """一次训练的时间与花费。price 是美元，单价未知时为 None；energy 是 kWh。"""

    hours: float
    gpu_hours: float
    price: float | None
    energy: float | None


def cost_of(
    flops: float, device: Device, gpus: int, mfu: float, price_per_hour: float | None
) -> Cost:
    """时间、卡时、价格与电（板卡功率 × PUE，是上限：卡不会一直满功率）。"""
    hours = training_hours(flops, gpus, device.peak_bf16, mfu)
    gpu_hours = hours * gpus
    return Cost(
        hours, gpu_hours,
        None if price_per_hour is None else gpu_hours * price_per_hour,
        None if device.power_w is None else gpu_hours * device.power_w * PUE / 1000,
    )


def default_vocab(params: float) -> int:
    """GPT-2 的词表（补到 64 的倍数）；小模型用本书的 8192，否则参数都花在词表上。"""
    return 8192 if params < 8e7 else 50304


def choose_shape(params: float, seq_len: int, vocab: int) -> Architecture:
    """参数量最接近的形状：d 是 64 的倍数，每个头 64 或 128 维，宽深比 d/L 在 64–128 附近。

    在宽深比可接受（16–192）的形状里，优先参数量准，其次宽深比。大模型的头数是 4 或 8 的倍数，
    张量并行才切得开。

    Raises:
        BudgetError: 参数量小到连词嵌入都放不下。
    """
    best, best_score = None, math.inf
    for d in (*range(64, 1024, 64), *range(1024, 2048, 128), *range(2048, 4096, 512),
              *range(4096, 32769, 1024)):  # fmt: skip
        n_head = d // 64 if d < 2048 else d // 128
        layer = gpt(d, 1, n_head, seq_len, vocab).layer_params()
        n_layer = half_up((params - vocab * d - d) / layer)
        if n_layer < 1 or not 16 * n_layer <= d <= 192 * n_layer:
            continue
        error = abs((vocab * d + d + n_layer * layer) / params - 1)
        wanted = min(max(d / 24, 64), 128)
        score = error + 0.05 * abs(d / n_layer / wanted - 1)
        if score < best_score:
            best, best_score = (d, n_layer, n_head), score
    if best is None:
        raise BudgetError(
            f"参数量 {params:g}、词表 {vocab}：没有合适的形状；请加大参数量或减小 --vocab-size。"
        )
    return gpt(*best, seq_len, vocab)


def default_global_batch(params: float) -> int:
    """一次更新的 token 数：约 0.5 M（GPT-2）、2 M、4 M，随规模增大（GPT-3、Llama 的做法）。"""
    return 2**19 if params < 5e8 else 2**21 if params < 5e9 else 2**22


def check_global_batch(tokens: float, gpus: int, seq_len: int) -> None:
    """指定的全局 batch 要能照办：每卡至少一条完整的序列。不能就拒绝，绝不悄悄换成别的数。"""
    least = gpus * seq_len
    if tokens % least:
        nearest = max(1, half_up(tokens / least)) * least
        raise BudgetError(
            f"global_batch = {grouped(tokens)} token 不能平分给 {gpus} 张卡、每条 {seq_len} token："
            f"要是 {gpus} × {seq_len} = {grouped(least)} 的整数倍，最近的是 {grouped(nearest)}。"
        )


@dataclass(frozen=True)
class Request:
    """计划的输入。单位见各字段；None 表示由规模推出。"""

    params: float  # 参数量（个）
    device: str = "h100"
    gpus: int = 8
    mfu: float = 0.4
    tokens_per_param: float = TOKENS_PER_PARAM
    seq_len: int = 2048
    global_batch: int | None = None  # token
    memory_gb: float | None = None  # 每卡显存；None：该型号最大的规格
    price_per_hour: float | None = None  # 美元/卡时；None：参考价
    vocab_size: int | None = None  # None：大模型 50304，小模型 8192
    execution: str = "compiled"
    arch: Architecture | None = None  # 已有模型时给出，不再挑形状
    data: str = ""  # 训练数据的路径，原样写进配置；空：开工之前要自己填

    def __post_init__(self) -> None:
        require("params（参数量）", self.params, 1e6, 1e13)
        require("gpus（卡数）", self.gpus, 1, 1e6)
        require("mfu", self.mfu, 0.01, 1.0, "（稠密峰值下不可能超过 1）")
        require("tokens_per_param（每参数 token 数）", self.tokens_per_param, 0.1, 1e5)
        require("seq_len（序列长度）", self.seq_len, 16, 2**20)
        require("vocab_size（词表）", self.vocab, 16, 2**21)
        if self.global_batch is not None:
            require("global_batch（token）", self.global_batch, self.seq_len, 1e9)
        if self.memory_gb is not None:
            require("memory_gb（每卡显存）", self.memory_gb, 1, 1e5)
        if self.price_per_hour is not None:
            require("price_per_hour（单价）", self.price_per_hour, 0, 1e5)
        if any(int(v) != v for v in (self.gpus, self.seq_len, self.vocab)):
            raise BudgetError("gpus、seq_len、vocab_size 要是整数。")
        device_of(self.device)
        if self.arch is not None:
            check_positions(self.arch, self.seq_len)
        if self.global_batch is not None:
            check_global_batch(self.global_batch, self.gpus, self.seq_len)

    @property
    def vocab(self) -> int:
        return default_vocab(self.params) if self.vocab_size is None else self.vocab_size


@dataclass(frozen=True)
class Plan:
    """一个可行的计划。"""

    request: Request
    device: Device
    capacity: float  # 每卡显存，GB
    arch: Architecture
    strategy: str
    checkpoint: bool
    micro_batch: int
    accumulation: int
    global_batch: int  # 凑整后的 token 数
    steps: int
    tokens: float
    flops: float
    memory: Memory
    cost: Cost

    @property
    def attention_share(self) -> float:
        """注意力那一项占 6N 的比例：6ND 没有算它，真实时间要长这么多。"""
        return flops_per_token(self.arch, self.request.seq_len) / (6 * self.arch.params()) - 1


def largest_micro_batch(
    request: Request, arch: Architecture, capacity: float, strategy: str, checkpoint: bool,
    gpus: int | None = None,
) -> int:
    """放得下的最大 micro-batch（2 的幂），0 表示一条也放不下；不超过每卡应分到的序列数。

    指定了全局 batch 时，micro-batch 要整除每卡的序列数：累积次数才是整数，batch 才一个不差。
    """
    gpus = gpus or request.gpus
    goal = request.global_batch or default_global_batch(request.params)
    share, rest = divmod(goal, request.seq_len * gpus)  # 每卡应分到的序列数
    if request.global_batch and rest:
        return 0  # 换了卡数就分不均
    most = max(1, min(MAX_MICRO_BATCH, share))
    size = 0
    micro = 1
    while micro <= most and not (request.global_batch and share % micro):
        memory = estimate(
            arch, micro_batch=micro, seq_len=request.seq_len, strategy=strategy,
            gpus=gpus, execution=request.execution, checkpoint=checkpoint,
        )
        if memory.total > USABLE * capacity:
            break
        size, micro = micro, micro * 2
    return size


def choose_strategy(
    request: Request, arch: Architecture, capacity: float, gpus: int | None = None
) -> tuple[str, bool, int] | None:
    """最快的可行策略：(策略, 是否重算, micro-batch)；都放不下时返回 None。

    按由快到慢的次序，取第一个 micro-batch 够大的；没有够大的，就取 micro-batch 最大的。
    """
    gpus = gpus or request.gpus
    goal = request.global_batch or default_global_batch(request.params)
    enough = min(ENOUGH_TOKENS, max(request.seq_len, goal // gpus // 2))
    best = None
    for strategy, checkpoint in ATTEMPTS:
        if strategy == "zero3" and gpus == 1:
            continue
        micro = largest_micro_batch(request, arch, capacity, strategy, checkpoint, gpus)
        if micro * request.seq_len >= enough:
            return strategy, checkpoint, micro
        if micro and (best is None or micro > best[2]):
            best = strategy, checkpoint, micro
    return best


def resolve(request: Request) -> tuple[Device, float, Architecture]:
    """请求里隐含的三样：设备、每卡显存（GB）、模型形状。"""
    device = device_of(request.device)
    capacity = request.memory_gb or float(max(device.memory_gb or (0,)))
    arch = request.arch or choose_shape(request.params, request.seq_len, request.vocab)
    return device, capacity, arch


def make_plan(request: Request) -> Plan:
    """排出计划。

    Raises:
        BudgetError: 放不下；消息里有最近的可行办法。
    """
    device, capacity, arch = resolve(request)
    chosen = choose_strategy(request, arch, capacity)
    if chosen is None:
        raise BudgetError(_impossible(request, device, capacity, arch))
    strategy, checkpoint, micro = chosen
    goal = request.global_batch or default_global_batch(request.params)
    per_pass = micro * request.seq_len * request.gpus
    accumulation = max(1, half_up(goal / per_pass))
    tokens = request.tokens_per_param * request.params
    flops = training_flops(request.params, tokens)
    price = request.price_per_hour
    return Plan(
        request, device, capacity, arch, strategy, checkpoint, micro, accumulation,
        accumulation * per_pass, math.ceil(tokens / (accumulation * per_pass)), tokens, flops,
        estimate(
            arch, micro_batch=micro, seq_len=request.seq_len, strategy=strategy,
            gpus=request.gpus, execution=request.execution, checkpoint=checkpoint,
        ),
        cost_of(
            flops, device, request.gpus, request.mfu,
            device.price_per_hour if price is None else price,
        ),
    )


def _impossible(request: Request, device: Device, capacity: float, arch: Architecture) -> str:
    """放不下时的一句话：差多少，以及最近的可行办法（加卡、换卡、缩小模型）。"""
    least = estimate(
        arch, micro_batch=1, seq_len=request.seq_len, execution=request.execution,
        strategy="zero3", gpus=request.gpus, checkpoint=True,
    ).total
    ways = []
    gpus = 1
    while gpus <= request.gpus:
        gpus *= 2
    while gpus <= 65536 and not choose_strategy(request, arch, capacity, gpus):
        gpus *= 2
    if gpus <= 65536:
        ways.append(f"同样的卡用 {gpus} 张")
    for name, other in sorted(DEVICES.items(), key=lambda item: max(item[1].memory_gb or (0,))):
        room = float(max(other.memory_gb or (0,)))
        if room > capacity and choose_strategy(request, arch, room):
            ways.append(f"换成 {request.gpus} 张 {name}（{fixed(room, 0)} GB）")
            break
    if smaller := largest_model(request, capacity):
        ways.append(f"模型缩到约 {readable(smaller)} 参数")
    return (
        f"{readable(arch.params())} 参数放不进 {request.gpus} 张 {device.name}：FSDP 加重算、"
        f"micro-batch 为 1 时每卡仍要 {fixed(least, 1)} GB，"
        f"可用的只有 {fixed(USABLE * capacity, 1)} GB；"
        f"最近的可行办法：{'；或'.join(ways) or '缩短序列或缩小词表'}。"
    )


def largest_model(request: Request, capacity: float) -> float | None:
    """同样的卡数上放得下的最大参数量：从请求的大小起，每次减一成。"""
    params = request.params
    while (params := params * 0.9) >= 1e7:
        smaller = replace(request, params=params, arch=None)
        try:
            arch = choose_shape(params, smaller.seq_len, smaller.vocab)
        except BudgetError:
            return None
        if choose_strategy(smaller, arch, capacity):
            return params
    return None


def learning_rate(params: float) -> float:
    """同规模 GPT-3 的峰值学习率：一个起点，真值要在小模型上扫出来。"""
    return next((rate for limit, rate in GPT3_RATES if params < limit), 1e-4)


def cannot_launch(plan: Plan) -> str | None:
    """train_gpu.py 不能直接跑这个计划的理由；能跑时为 None。"""
    arch = plan.arch
    if arch != gpt(arch.d_model, arch.n_layer, arch.n_head, arch.seq_len, arch.vocab_size):
        return "train_gpu.py 只训练本书的 GPT，这个结构要用它自己的训练器"
    return None


def parallel_values(plan: Plan) -> dict[str, str]:
    """怎样切、要不要重算，只写与 `train_gpu.py` 的默认值（DDP，不重算）不同的。"""
    values = {"parallel": "fsdp"} if plan.strategy == "zero3" else {}
    return values | ({"recompute": "blocks"} if plan.checkpoint else {})


def new_launch_id() -> str:
    """每次都不同的编号：日期、时刻与四位随机数。

    torchrun 的 `--rdzv-id` 与输出文件夹都用它：编号相同的两次启动会被当成同一次训练的继续。
    """
    return f"plan-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def config_values(plan: Plan, launch_id: str) -> dict[str, int | float | str]:
    """写进 TOML 的键值，名字与 `train_gpu.py` 的选项相同。"""
    arch = plan.arch
    warmup = min(2000, max(1, plan.steps // 25))
    return {
        "vocab_size": arch.vocab_size, "d_model": arch.d_model, "n_head": arch.n_head,
        "n_layer": arch.n_layer, "seq_len": plan.request.seq_len,
        "micro_batch": plan.micro_batch, "global_batch_tokens": plan.global_batch,
        "steps": plan.steps, "warmup_steps": warmup, "decay_steps": plan.steps,
        "lr": learning_rate(plan.request.params), "eval_interval": max(1, plan.steps // 50),
        **parallel_values(plan), "out_dir": f"runs/{launch_id}",
    } | ({"data": plan.request.data} if plan.request.data else {})


def config_toml(plan: Plan, launch_id: str) -> str:
    """配置文件的全文。没有给数据时留一行说明：内置的小说只有约 40 万个 token。"""
    lines = [
        f"# {plan.arch.params():,} 个参数，{readable(plan.tokens)} token，"
        f"{plan.request.gpus} 张 {plan.device.name}，约 {duration(plan.cost.hours)}"
        f"（MFU {plan.request.mfu:.0%}）。",
        f"# 由 experiments/budget.py plan 写出；预计每卡 {fixed(plan.memory.total, 1)} GB。",
    ]
    for key, value in config_values(plan, launch_id).items():
        text = json.dumps(value, ensure_ascii=False) if isinstance(value, str) else value
        lines.append(f"{key} = {text}")
    if not plan.request.data:
        lines.append(
            f'# data = "…/tokens.pt"  # 填上：这个计划要读 {readable(plan.tokens)} token，'
            "不填就反复读内置的小说"
        )
    return "\n".join(lines) + "\n"


def nodes_of(gpus: int, per_node: int = GPUS_PER_NODE) -> tuple[int, int]:
    """(机器数, 每台的进程数)，乘积恰好是卡数；一台放得下就是一台。

    Raises:
        BudgetError: 多于一台而又放不满；消息里有最近的可行办法。
    """
    if gpus <= per_node:
        return 1, gpus
    if gpus % per_node == 0:
        return gpus // per_node, per_node
    below, above = gpus // per_node * per_node, math.ceil(gpus / per_node) * per_node
    even = max((k for k in range(2, per_node) if gpus % k == 0), default=None)
    way = f"；或者每台只用 {even} 张（{gpus // even} 台）：--gpus-per-node {even}" if even else ""
    raise BudgetError(
        f"{gpus} 张卡放不满每台 {per_node} 张的机器，torchrun 要每台的进程数相同："
        f"请用 {below} 或 {above} 张{way}。"
    )


def launch_command(
    gpus: int, config: str, launch_id: str, gpus_per_node: int = GPUS_PER_NODE
) -> str:
    """启动这个计划的命令；多于一台机器时每台各运行一次，`launch_id` 在各台上要相同。"""
    script = f"experiments/train_gpu.py --config {quote(config)}"
    if gpus == 1:
        return f"python {script}"
    nodes, processes = nodes_of(gpus, gpus_per_node)
    if nodes == 1:  # --standalone 每次自己取一个新的编号
        return f"torchrun --standalone --max-restarts 3 --nproc-per-node {processes} {script}"
    # 多机时节点会增减：不设这个变量，各次集合共用一个 store，重启时常连不上
    return (
        f"TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes {nodes} --max-restarts 3 "
        f"--rdzv-backend c10d --rdzv-endpoint 主机名:29500 --rdzv-id {launch_id} "
        f"--nproc-per-node {processes} {script}"
    )
