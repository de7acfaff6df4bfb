"""时间去哪儿了：同一步训练，一级一级地变快，每一级值多少。

    python experiments/speed.py            # fp32、bf16、compile、最快的一级，与 roofline；约半分钟
    python experiments/speed.py --ladder   # 每次只改一处，从最朴素到最快；约 4 分钟
    python experiments/speed.py --growth   # 时间随 token 数、参数量、序列长度怎么长；约半分钟
    python experiments/speed.py --roofline # 只量每个运算受算力还是受带宽限制；约 10 秒

每个变体在自己的进程里走同样的步，交错计时。快还是慢只有一条规矩（`lab/paired.py`）：同一轮里
两者的用时取比值，区间整个在 1 的一边才算。占比的分母是同一次运行里实测的矩阵乘法峰值。
结果在 results/speed*.csv：speed、speed_ladder、speed_growth、speed_roofline，两张 _profile，
和两张 _steps（每一步的用时，区间由它算出）。这里不做：GPU，别的模型，多机。
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from statistics import mean, median

import pandas as pd
import torch

from experiments.lab import hardware
from experiments.lab.paired import Ratio, paired_ratio
from experiments.lab.results import print_table, run_main, save_csv
from experiments.lab.roofline import SQUARE, category, copy_bandwidth, operations
from experiments.lab.workers import BIND, own_process, process_context
from experiments.training import step
from experiments.training.step import StepOptions
from experiments.training.variant import (
    Setting,
    Variant,
    build_model,
    last_loss_and_peak_memory,
    profiled_shares,
    progress,
    seconds_per_step,
    settle,
    timed_steps,
    training_step,
)
from tokens.errors import UserError

VOCAB = 8192  # 全书的词表大小
STINT = 2  # 轮到一个变体时连走几步：太长就不算交错，太短则多半时间在走不计时的那一步
PRELOAD = ("experiments.training.variant", "torch._inductor.compile_fx")  # 各变体共用，先导入
FP32_TOLERANCE, BF16_TOLERANCE = 1e-3, 3e-2  # 走完同样的步之后，loss 与朴素写法的相对差


@dataclass(frozen=True)
class Options:
    """量一步训练的时间。"""

    ladder: bool = False
    """爬完整的梯子：每一级只改一处"""
    growth: bool = False
    """改变 token 数、参数量、序列长度，看时间怎么长"""
    roofline: bool = False
    """只量各个运算的算力与访存"""
    batch_size: int = 16
    """每步几个序列（个）"""
    seq_len: int = 128
    """序列长度（token）"""
    d_model: int = 128
    """模型的宽度；层数固定 4，每头 32 维"""
    warmup: int = 3
    """不计入的预热步数（步）；编译发生在第一步"""
    steps: int = 10
    """每个变体计时的步数（步）；每两步与别的变体成一对，至少 4"""
    threads: int = field(default_factory=torch.get_num_threads)
    """计算线程数（个）；默认用 PyTorch 的默认值，即物理核数"""
    peak_seconds: float = 0.5
    """每种精度用多久量矩阵乘法的峰值（秒）"""

    def __post_init__(self) -> None:
        for name in ("batch_size", "seq_len", "d_model", "warmup", "steps", "threads"):
            if getattr(self, name) < 1:
                flag = name.replace("_", "-")
                raise UserError(f"--{flag} {getattr(self, name)}：要一个不小于 1 的整数")
        if self.steps < 2 * STINT:
            raise UserError(f"--steps {self.steps}：至少 {2 * STINT}，不然凑不出两对来比")
        if self.peak_seconds <= 0:
            raise UserError(f"--peak-seconds {self.peak_seconds:g}：要一个正数（秒）")
        if self.d_model % 32:
            raise UserError(f"--d-model {self.d_model}：要是 32 的倍数（每个注意力头 32 维）")

    def setting(self) -> Setting:
        return Setting(
            batch_size=self.batch_size, seq_len=self.seq_len, d_model=self.d_model
        )


# --- 每一级改什么 ---


@dataclass(frozen=True)
class Rung:
    """梯子的一级：在下面一级的基础上只改一处。"""

    name: str
    why: str  # 为什么会快，或者为什么没有用
    needs: str | None = None  # bf16、compile、allocator、cores：机器要有什么
    step: dict = field(default_factory=dict)  # 改 StepOptions 的哪一项
    variant: dict = field(default_factory=dict)  # 改 Variant 的哪一项
    keep: bool = True  # False：不在默认的一步里，只从最高一级出发量一次


PLAIN = Variant(gather=False, fused_adamw=False)

# 省得固定的小事（优化器、取 batch）放在最后：一步越短，同样几毫秒占得越多，越看得清
LADDER = (
    Rung("朴素 fp32", "逐个切片取 batch，逐个参数更新，SDPA，完整的 logits"),
    Rung("留住内存", "大块内存不还给系统，不再缺页", "allocator", {"keep_memory": True}),
    Rung("compile", "逐元素的运算合并，少读写几遍内存", "compile", {"compile": True}),
    Rung("bf16", "矩阵乘法走 bf16 指令，转换合并进别的内核", "bf16", {"bf16": True}),
    Rung("显式注意力", "T 短时直接写 softmax(QKᵀ)V 更快", None, {"attention": "auto"}),
    Rung("存下掩码", "掩码不在内核里现算，缩放并进 RoPE", None, {"stored_mask": True}),
    Rung("合成交叉熵", "输出头与交叉熵一起算，不返回 logits", None, {"fused_loss": True}),
    Rung("只算一遍 exp", "不写出 softmax，反向不再算 exp", None, {"one_exp": True}),
    Rung("融合的 AdamW", "所有参数一次内核调用，少读写几遍", variant={"fused_adamw": True}),
    Rung("向量化取 batch", "一次索引取出所有窗口", variant={"gather": True}),
    Rung(
        "+ 线程绑核", "线程不在核之间搬动，也不与别的进程抢同一个核", "cores",
        variant={"env": tuple(BIND.items())}, keep=False,
    ),
    Rung(
        "+ 更新也编译", "AdamW 已是一次融合的内核，只多了编译", "compile",
        {"compile_update": True}, keep=False,
    ),
    Rung(
        "+ 合并 gate 与 up", "乘法少一次、大一倍，权重却要先接起来", None,
        {"merged_mlp": True}, keep=False,
    ),
    Rung(
        "+ max-autotune", "训练时权重在变，只有批量乘法能换模板", "compile",
        {"compile_mode": "max-autotune-no-cudagraphs"}, keep=False,
    ),
    Rung(
        "+ 2 MiB 大页", "内存留住之后已不缺页，只少查几次页表", "allocator",
        variant={"env": (("THP_MEM_ALLOC_ENABLE", "1"),)}, keep=False,
    ),
    Rung("+ 只用 1 个线程", "少一个核的算力", "cores", variant={"threads": 1}, keep=False),
)  # fmt: skip


def support(need: str | None, threads: int) -> tuple[bool, str]:
    """机器有没有这一级要的东西，以及理由。"""
    if need == "bf16":
        return hardware.bf16_support()
    if need == "compile":
        return hardware.compile_support()
    if need == "allocator":
        return step.allocator_support()
    if need == "cores":
        return threads > 1, "只有一个计算线程，少不了" if threads == 1 else "不止一个线程"
    return True, ""


def accumulated_variants(
    rungs: Sequence[Rung], threads: int
) -> tuple[dict[str, Variant], dict[str, str]]:
    """逐级累积改动，返回 ({级: 变体}, {跳过的级: 理由})；跳过的级不影响上面的级。"""
    variants, skipped, current = {}, {}, PLAIN
    for rung in rungs:
        able, reason = support(rung.needs, threads)
        if not able:
            skipped[rung.name] = reason
            continue
        changed = replace(current, step=replace(current.step, **rung.step), **rung.variant)
        variants[rung.name] = changed
        current = changed if rung.keep else current
    return variants, skipped


def rungs_below(rungs: Sequence[Rung], climbed: Sequence[str]) -> dict[str, str]:
    """{级: 与它比的那一级}：路上的级比下面一级，旁边试的都比最高一级；`climbed` 是没跳过的级。"""
    below, top = {}, None
    for rung in (rung for rung in rungs if rung.name in climbed):
        if top is not None:
            below[rung.name] = top
        top = rung.name if rung.keep else top
    return below


def short_list() -> tuple[dict[str, Variant], dict[str, str]]:
    """默认的四个变体：每次只开一个开关，最后是这台机器上最快的一组。"""
    wanted = {
        "fp32": (None, StepOptions()),
        "bf16": ("bf16", StepOptions(bf16=True)),
        "compile": ("compile", StepOptions(compile=True)),
    }
    variants, skipped = {}, {}
    for name, (need, options) in wanted.items():
        able, reason = support(need, 1)
        if able:
            variants[name] = Variant(options)
        else:
            skipped[name] = reason
    variants["最快"] = Variant(step.best_options()[0])
    return variants, skipped


# --- 量 ---


@dataclass(frozen=True)
class Peaks:
    """这台机器的实测上限：矩阵乘法（FLOP/s）与访存（字节/s）。"""

    fp32: float
    bf16: float | None
    bandwidth: float

    def larger(self, other: "Peaks") -> "Peaks":
        """逐项取大。"""
        bf16 = max(self.bf16, other.bf16) if self.bf16 and other.bf16 else None
        return Peaks(max(self.fp32, other.fp32), bf16, max(self.bandwidth, other.bandwidth))

    def seen_in(self, table: pd.DataFrame) -> "Peaks":
        """`operations` 的表里又量了一次同样的方阵：取大，同一样东西只留一个数。"""
        squares = table[table["operation"] == SQUARE].set_index("dtype")["gflops"] * 1e9
        return self.larger(Peaks(squares["float32"], squares.get("bfloat16"), 0.0))

    def row(self) -> dict[str, float]:
        """写进结果的三列，单位 GFLOP/s 与 GB/s；没有 bf16 指令的机器那一列是 nan。"""
        bf16 = self.bf16 / 1e9 if self.bf16 else float("nan")
        return {"fp32_peak_gflops": self.fp32 / 1e9, "bf16_peak_gflops": bf16,
                "bandwidth_gb": self.bandwidth / 1e9}  # fmt: skip


def above_the_square(points: pd.DataFrame) -> pd.DataFrame:
    """`operations` 的表里比同一精度的方阵还快一成以上的运算：峰值是一把尺子，不是物理上限。"""
    square = points[points["operation"] == SQUARE].set_index("dtype")["gflops"]
    return points[points["gflops"] > 1.1 * points["dtype"].map(square)]


def measure_peaks(options: Options) -> Peaks:
    """实测矩阵乘法的 fp32、bf16 峰值和内存带宽。"""
    seconds = options.peak_seconds
    has_bf16 = hardware.bf16_support()[0]
    return Peaks(
        fp32=hardware.matmul_peak(torch.float32, seconds=seconds),
        bf16=hardware.matmul_peak(torch.bfloat16, seconds=seconds) if has_bf16 else None,
        bandwidth=copy_bandwidth(seconds),
    )


@dataclass(frozen=True)
class Timing:
    """一个变体量到的：第一步的秒数，每一轮里各步的秒数，最后的 loss，内存的峰值（字节）。"""

    first: float
    rounds: list[list[float]]
    loss: float
    peak_memory: int | None

    @property
    def steps(self) -> list[float]:
        return [seconds for one in self.rounds for seconds in one]

    def against(self, other: "Timing") -> Ratio:
        """速度是 `other` 的几倍：一轮是一对。"""
        return paired_ratio(*([mean(one) for one in t.rounds] for t in (other, self)))


def race(
    variants: dict[str, Variant], profiled: Sequence[str], options: Options
) -> tuple[dict[str, Timing], pd.DataFrame]:
    """交错计时所有变体，返回（{变体: 用时}，`profiled` 那几个的时间去向）。"""
    with ExitStack() as stack:
        pools = {
            name: stack.enter_context(own_process(
                threads=variant.threads or options.threads, env=dict(variant.env), preload=PRELOAD
            )) for name, variant in variants.items()
        }  # fmt: skip
        first: dict[str, float] = {}
        for name, pool in pools.items():
            progress(f"预热：{name}")
            work = (settle, variants[name], options.setting(), options.warmup)
            first[name] = pool.submit(*work).result()
        rounds: dict[str, list[list[float]]] = {name: [] for name in pools}
        for _ in range(options.steps // STINT):
            for name, pool in pools.items():
                rounds[name].append(pool.submit(timed_steps, STINT).result())
        ends = {name: pool.submit(last_loss_and_peak_memory).result()
                for name, pool in pools.items()}  # fmt: skip
        timings = {name: Timing(first[name], rounds[name], *ends[name]) for name in pools}
        shares = [
            {"variant": name, "kernel": kernel, "kind": category(kernel), "share": share,
             "profiled_ms": seconds * 1e3}
            for name in profiled
            for report, seconds in [pools[name].submit(profiled_shares).result()]
            for kernel, share in report
        ]  # fmt: skip
    return timings, pd.DataFrame(shares)


def as_rows(
    variants: dict[str, Variant], timings: dict[str, Timing], below: dict[str, str],
    options: Options,
) -> pd.DataFrame:  # fmt: skip
    """一个变体一行；`rated_against` 补上峰值之后就写进 CSV。列：

    ms、mean_ms、iqr_ms、fastest_ms 每步毫秒的中位数、平均、四分位距、最小；
    first_step_s 第一步（秒）；tokens_per_s、gflops 按平均一步算；memory_mb 内存峰值（MiB）；loss；
    compared_with、ratio、ratio_low、ratio_high、verdict 与谁比，几倍速度，区间，快、慢或分不出；
    speedup、speedup_low、speedup_high 与第一行比的同样三个数；loss_change 与第一行的相对差；
    pays_after 编译多花的时间要多少步赚回来。
    """
    flops = build_model(options.setting()).flops_per_token(options.seq_len)
    tokens = options.batch_size * options.seq_len
    rows, base = [], next(iter(timings.values()))
    for name, timing in timings.items():
        seconds = mean(timing.steps)
        quarter, three = pd.Series(timing.steps).quantile([0.25, 0.75])
        rows.append({
            "variant": name, "ms": median(timing.steps) * 1e3, "mean_ms": seconds * 1e3,
            "iqr_ms": (three - quarter) * 1e3, "fastest_ms": min(timing.steps) * 1e3,
            "tokens_per_s": tokens / seconds, "gflops": tokens * flops / seconds / 1e9,
            "bf16": variants[name].step.bf16,
            "memory_mb": (timing.peak_memory or float("nan")) / 2**20,
            "first_step_s": timing.first, "loss": timing.loss,
            **ratio_columns(timings, name, below.get(name)),
            "loss_change": abs(timing.loss / base.loss - 1),
            "pays_after": pays_after(timing, base),
        })  # fmt: skip
    return pd.DataFrame(rows)


def ratio_columns(timings: dict[str, Timing], name: str, below: str | None) -> dict:
    """与下面一级、与第一行的比值和区间；第一行自己没有可比的。"""
    base = next(iter(timings))
    steps = timings[name].against(timings[below]) if below else None
    whole = timings[name].against(timings[base]) if name != base else Ratio(1.0, 1.0, 1.0)
    nan = float("nan")
    return {
        "compared_with": below or "", "verdict": steps.verdict if steps else "",
        "ratio": steps.value if steps else nan, "ratio_low": steps.low if steps else nan,
        "ratio_high": steps.high if steps else nan,
        "speedup": whole.value, "speedup_low": whole.low, "speedup_high": whole.high,
    }  # fmt: skip


def pays_after(timing: Timing, base: Timing) -> float:
    """第一步多花的时间（编译）要多少步赚回来；不比 `base` 快则永远赚不回来，是 nan。"""
    seconds, saved = mean(timing.steps), mean(base.steps) - mean(timing.steps)
    return (timing.first - seconds) / saved if saved > 0 else float("nan")


def long_table(timings: dict[str, Timing]) -> pd.DataFrame:
    """每一步一行：variant、round（轮，从 0 数）、ms；轮相同的是一对。"""
    return pd.DataFrame([
        {"variant": name, "round": i, "ms": seconds * 1e3}
        for name, timing in timings.items()
        for i, one in enumerate(timing.rounds)
        for seconds in one
    ])  # fmt: skip


def loss_is_kept(table: pd.DataFrame) -> pd.Series:
    """走完同样的步之后，loss 与朴素写法的差是否在容差之内。"""
    limit = table["bf16"].map({True: BF16_TOLERANCE, False: FP32_TOLERANCE})
    return table["loss_change"] <= limit


# --- 随规模怎么长 ---


def growth(options: Options) -> pd.DataFrame:
    """改变 batch、参数量、序列长度，量每步时间，并与 6N + 12·L·T·d 的预言比较。

    各形状交错地走。预言只用默认形状的实测速度（FLOP/s）换算：时间 = FLOPs ÷ 那个速度。
    """
    default = options.setting()
    points = [("默认", default)]
    points += [("batch", replace(default, batch_size=b)) for b in (1, 2, 4, 8, 16, 32)]
    points += [
        ("参数", replace(default, d_model=d, n_layer=n))
        for d, n in ((64, 2), (96, 3), (128, 4), (192, 4), (256, 6))
    ]
    points += [  # token 总数不变，只是切得更长
        ("长度", replace(default, seq_len=t, batch_size=max(1, 2048 // t)))
        for t in (32, 64, 128, 256, 512, 1024)
    ]
    fast = replace(step.best_options()[0], compile=False)  # 每个形状都编译太久
    progress(f"{len(points)} 种形状，交错地走")
    runs = [training_step(Variant(fast), setting) for _, setting in points]
    for run in runs:
        seconds_per_step(run, options.warmup)
    times: list[list[float]] = [[] for _ in points]
    for _ in range(max(1, options.steps // 2)):
        for spent, run in zip(times, runs, strict=True):
            spent += seconds_per_step(run, 3)[1:]  # 第一步把缓存暖回来，不计
    table = pd.DataFrame([
        growth_row(series, setting, spent)
        for (series, setting), spent in zip(points, times, strict=True)
    ])  # fmt: skip
    anchor = table[table["flops"] == table["flops"].iloc[0]]["ms"].median()
    return table.assign(predicted_ms=table["flops"] / table["flops"].iloc[0] * anchor)


def growth_row(series: str, setting: Setting, times: list[float]) -> dict:
    """一种形状的一行：参数量、token 数、按公式的 FLOPs、每步毫秒的中位数与四分位距。"""
    model, tokens = build_model(setting), setting.batch_size * setting.seq_len
    quarter, three = pd.Series(times).quantile([0.25, 0.75])
    return {
        "series": series, "batch_size": setting.batch_size, "seq_len": setting.seq_len,
        "d_model": setting.d_model, "n_layer": setting.n_layer, "params": model.num_params(),
        "tokens": tokens, "flops": tokens * model.flops_per_token(setting.seq_len),
        "ms": median(times) * 1e3, "iqr_ms": (three - quarter) * 1e3,
    }  # fmt: skip


# --- 说 ---


def describe_machine(peaks: Peaks) -> str:
    """机器的一段话：核、指令集、实测的上限。"""
    about = hardware.describe()
    bf16 = f"{peaks.bf16 / 1e9:.0f}" if peaks.bf16 else "没有 bf16 指令，未测"
    return (
        f"机器：{about['cpu']}，{about['cores']} 核，{about['threads']} 个线程\n"
        f"指令集 {about['isa']}；PyTorch {about['torch']}\n"
        f"实测峰值：矩阵乘法 fp32 {peaks.fp32 / 1e9:.0f}、bf16 {bf16} GFLOP/s；"
        f"内存带宽 {peaks.bandwidth / 1e9:.1f} GB/s"
    )


def show(table: pd.DataFrame) -> None:
    """把计时的表打印出来。"""
    columns = {
        "variant": "变体", "ms": "中位数 ms", "mean_ms": "平均 ms", "iqr_ms": "四分位距",
        "speedup": "速度", "tokens_per_s": "token/s", "gflops": "GFLOP/s", "mfu": "占峰值",
        "memory_mb": "内存 MiB", "first_step_s": "首步 s", "loss": "loss",
    }  # fmt: skip
    formats = {
        "中位数 ms": "{:.1f}", "平均 ms": "{:.1f}", "四分位距": "{:.1f}", "速度": "{:.2f}×",
        "token/s": "{:,.0f}", "GFLOP/s": "{:.0f}", "占峰值": "{:.1%}", "内存 MiB": "{:.0f}",
        "首步 s": "{:.1f}", "loss": "{:.4f}",
    }  # fmt: skip
    print_table(table[list(columns)].rename(columns=columns), formats)


def in_words(row: pd.Series, name: str | None = None) -> str:
    """一行与它比的那一级的结论，一句话；脚本打印的、书页上写的都是这一句。"""
    what = f"{name or '“' + row['variant'] + '”'}是“{row['compared_with']}”的 "
    what += f"{Ratio(row['ratio'], row['ratio_low'], row['ratio_high'])}倍速度"
    return what + {"快": "，更快", "慢": "，更慢", "分不出": "，分不出快慢"}[row["verdict"]]


def bf16_verdict(table: pd.DataFrame) -> str:
    """“这台机器上只开 bf16 快不快”，一句话；默认那四个变体的表才有这个问题的答案。"""
    if "bf16" not in set(table["variant"]):
        return f"没有量 bf16：{hardware.bf16_support()[1]}"
    return in_words(table[table["variant"] == "bf16"].iloc[0], "只开 bf16 ")


def conclusions(table: pd.DataFrame) -> list[str]:
    """由测量生成的几句话；换一台机器，话也跟着变。"""
    base, best = table.iloc[0], table[table["keep"]].iloc[-1]
    said = [in_words(row) for _, row in table.iloc[1:].iterrows()]
    share = f"{100 * best['mfu']:.0f} %" if pd.notna(best["mfu"]) else "（峰值量低了，不报）"
    whole = Ratio(best["speedup"], best["speedup_low"], best["speedup_high"])
    said.append(
        f"“{best['variant']}”每步平均 {best['mean_ms']:.0f} ms，是“{base['variant']}”的 {whole}"
        f"倍速度，达到 {'bf16' if best['bf16'] else 'fp32'} 峰值的 {share}"
    )
    changed = table.loc[~loss_is_kept(table), "variant"]
    kept = "与朴素写法的差都在容差之内" if changed.empty else f"{'、'.join(changed)} 超出了容差"
    return [*said, f"走完同样的步之后的 loss：{kept}"]


def report(table: pd.DataFrame, shares: pd.DataFrame, skipped: dict[str, str]) -> None:
    """打印表、跳过的理由、结论和时间的去向。"""
    print("\n计时（速度与第一行比，同一轮取比值）：")
    show(table)
    if table["mfu"].isna().any():
        print("占峰值超过 100 % 的不报：量峰值时机器被别的程序占用了，请在空闲时重跑")
    for name, reason in skipped.items():
        print(f"跳过 {name}：{reason}")
    print("\n结论（括号里是 95 % 区间，不含 1 才下结论）：")
    for sentence in conclusions(table):
        print(f"· {sentence}")
    print("\n时间去了哪里（ms/步：剖析只给占比，乘以上面平均的一步）：")
    spent = spent_ms(shares, table).unstack(0).fillna(0)
    spent = spent.sort_values(spent.columns[0], ascending=False).reset_index(names="去向")
    print_table(spent, dict.fromkeys(spent.columns[1:], "{:.1f}"))
    print("· " + profiling_cost(shares, table).replace("：", "：\n  ", 1).replace("；", "；\n  "))


def spent_ms(shares: pd.DataFrame, table: pd.DataFrame) -> pd.Series:
    """(变体, 类别) → 每步毫秒：剖析的占比 × 没有剖析时平均的一步。各类加起来就是那一步。"""
    share = shares.groupby(["variant", "kind"], sort=False)["share"].sum()
    whole = table.set_index("variant")["mean_ms"]
    return share * share.index.get_level_values("variant").map(whole)


def profiling_cost(shares: pd.DataFrame, table: pd.DataFrame) -> str:
    """剖析要花多少时间，一句话。"""
    slow = shares.groupby("variant", sort=False)["profiled_ms"].first()
    whole = table.set_index("variant")["mean_ms"]
    each = "；".join(f"{name} 一步 {ms:.0f} ms，平时 {whole[name]:.0f} ms"
                     for name, ms in slow.items())  # fmt: skip
    return f"剖析本身也花时间：{each}"


# --- 跑 ---


def measure_race(options: Options) -> tuple[pd.DataFrame, pd.DataFrame, dict]:
    """默认的四个变体，或整架梯子：（一行一个变体的表，时间去向，跳过的理由）；写下每一步。"""
    if options.ladder:
        variants, skipped = accumulated_variants(LADDER, options.threads)
        rungs = {rung.name: rung for rung in LADDER}
        below = rungs_below(LADDER, list(variants))
    else:
        variants, skipped = short_list()
        rungs, below = {}, dict.fromkeys(list(variants)[1:], next(iter(variants)))
    kept = {name: name not in rungs or rungs[name].keep for name in variants}
    top = [name for name in variants if kept[name]][-1]
    timings, shares = race(variants, list(dict.fromkeys([next(iter(variants)), top])), options)
    table = as_rows(variants, timings, below, options)
    table["keep"] = table["variant"].map(kept)
    table["why"] = [rungs[name].why if name in rungs else "" for name in table["variant"]]
    save_csv(long_table(timings), f"{race_name(options)}_steps", options, threads=options.threads)
    return table, shares, skipped


def race_name(options: Options) -> str:
    """这次计时的结果叫什么。"""
    return "speed_ladder" if options.ladder else "speed"


def rated_against(table: pd.DataFrame, peaks: Peaks) -> pd.DataFrame:
    """补上 peak_gflops（bf16 的变体用 bf16 的峰值）、mfu（占它的比例）和三列峰值。

    占比超过 1 的不报：那是量峰值时机器正忙。
    """
    peak = table["bf16"].map({True: peaks.bf16 or peaks.fp32, False: peaks.fp32}) / 1e9
    share = table["gflops"] / peak
    return table.assign(peak_gflops=peak, mfu=share.where(share <= 1), **peaks.row())


def with_square_at(points: pd.DataFrame, peaks: Peaks) -> pd.DataFrame:
    """`operations` 的表里，方阵那几行就写认定的峰值：同一样东西不出现两个数。"""
    square = points["operation"] == SQUARE
    peak = points["dtype"].map({"float32": peaks.fp32, "bfloat16": peaks.bf16}) / 1e9
    bytes_per_s = peak / points["intensity"]
    return points.assign(gflops=points["gflops"].where(~square, peak),
                         gb_per_s=points["gb_per_s"].where(~square, bytes_per_s))  # fmt: skip


def main(options: Options) -> None:
    """按选项量、打印、写 CSV。峰值只有一个：前后各量一次，再与 roofline 里同样的方阵取大。"""
    torch.set_num_threads(options.threads)
    if options.growth:
        table = growth(options)
        formats = {"params": "{:,}", "flops": "{:.2e}", "ms": "{:.1f}", "predicted_ms": "{:.1f}"}
        print_table(table, formats)
        save_csv(table, "speed_growth", options, threads=options.threads)
        return
    process_context(PRELOAD)  # 工作进程的母体先去导入，与量峰值重叠；第一次峰值只会量低
    peaks = measure_peaks(options)
    raced = None if options.roofline else measure_race(options)
    tokens = options.batch_size * options.seq_len
    points = operations(tokens, options.d_model, VOCAB, hardware.bf16_support()[0])
    peaks = peaks.larger(measure_peaks(options)).seen_in(points)
    points = with_square_at(points, peaks)
    print(describe_machine(peaks))
    if raced:
        table, shares, skipped = raced
        table = rated_against(table, peaks)
        report(table, shares, skipped)
        save_csv(table, race_name(options), options, threads=options.threads)
        save_csv(shares, f"{race_name(options)}_profile", options, threads=options.threads)
    if not options.ladder:
        print("\n几个运算的算术强度（FLOP/字节）与实测速度：")
        print_table(points, {"intensity": "{:.2f}", "gflops": "{:.0f}", "gb_per_s": "{:.1f}"})
        save_csv(points.assign(**peaks.row()), "speed_roofline", options, threads=options.threads)


if __name__ == "__main__":
    run_main(main, Options)
