"""时间去哪儿了：同一步训练，一级一级地变快，每一级值多少。

    python experiments/speed.py            # fp32、bf16、compile、最快的一级；约半分钟
    python experiments/speed.py --ladder   # 每次只改一处，从最朴素到最快；约 4 分钟
    python experiments/speed.py --growth   # 时间随 token 数、参数量、序列长度怎么长；约半分钟
    python experiments/speed.py --roofline # 每个运算受算力还是受带宽限制；约 10 秒

每个变体在自己的进程里走同样的步，交错计时，取中位数；占比的分母是同一次运行里实测的矩阵乘法峰值。
结果在 results/speed*.csv：speed、speed_ladder、speed_growth、speed_roofline，和两张 _profile。
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import pandas as pd
import torch

from experiments.lab import hardware
from experiments.lab.results import print_table, run_main, save_csv
from experiments.lab.roofline import category, copy_bandwidth, operations
from experiments.training import step
from experiments.training.step import StepOptions
from experiments.training.variant import (
    Setting,
    Variant,
    build,
    build_model,
    process_context,
    progress,
    seconds_per_step,
    workers,
)
from tokens.errors import UserError

VOCAB = 8192  # 全书的词表大小
STINT = 5  # 轮到一个变体时连走几步：太长就不算交错，太短则多半时间在走不计时的那一步
FP32_TOLERANCE, BF16_TOLERANCE = 1e-3, 3e-2  # 走完同样的步之后，loss 与朴素写法的相对差


@dataclass(frozen=True)
class Options:
    """量一步训练的时间。"""

    ladder: bool = False
    """爬完整的梯子：每一级只改一处"""
    growth: bool = False
    """改变 token 数、参数量、序列长度，看时间怎么长"""
    roofline: bool = False
    """量各个运算的算力与访存，画 roofline"""
    batch_size: int = 16
    """每步几个序列（个）"""
    seq_len: int = 128
    """序列长度（token）"""
    d_model: int = 128
    """模型的宽度；层数固定 4，每头 32 维"""
    warmup: int = 3
    """不计入的预热步数（步）；编译发生在第一步"""
    steps: int = 10
    """计时的步数（步）"""
    threads: int = field(default_factory=torch.get_num_threads)
    """计算线程数（个）；默认用 PyTorch 的默认值，即物理核数"""
    peak_seconds: float = 0.5
    """每种精度用多久量矩阵乘法的峰值（秒）"""

    def __post_init__(self) -> None:
        for name in ("batch_size", "seq_len", "d_model", "warmup", "steps", "threads"):
            if getattr(self, name) < 1:
                flag = name.replace("_", "-")
                raise UserError(f"--{flag} {getattr(self, name)}：要一个不小于 1 的整数")
        if self.peak_seconds <= 0:
            raise UserError(f"--peak-seconds {self.peak_seconds:g}：要一个正数（秒）")
        if self.d_model % 32:
            raise UserError(f"--d-model {self.d_model}：要是 32 的倍数（每个注意力头 32 维）")

    def setting(self) -> Setting:
        return Setting(
            batch_size=self.batch_size, seq_len=self.seq_len, d_model=self.d_model,
            threads=self.threads,
        )  # fmt: skip


# --- 每一级改什么 ---


@dataclass(frozen=True)
class Rung:
    """梯子的一级：在下面一级的基础上只改一处。"""

    name: str
    why: str  # 为什么会快，或者为什么没有用
    needs: str | None = None  # bf16、compile、allocator、cores：机器要有什么
    step: dict = field(default_factory=dict)  # 改 StepOptions 的哪一项
    variant: dict = field(default_factory=dict)  # 改 Variant 的哪一项
    keep: bool = True  # False：试过，不值得留在梯子上，只在最高一级上量一次


PLAIN = Variant(gather=False, fused_adamw=False)

LADDER = (
    Rung("朴素 fp32", "逐个切片取 batch，逐个参数更新，SDPA，完整的 logits"),
    Rung("向量化取 batch", "一次索引取出所有窗口", variant={"gather": True}),
    Rung("融合的 AdamW", "所有参数一次内核调用，少读写几遍", variant={"fused_adamw": True}),
    Rung("留住内存", "大块内存不还给系统，不再缺页", "allocator", {"keep_memory": True}),
    Rung("bf16", "矩阵乘法走 bf16 指令", "bf16", {"bf16": True}),
    Rung("compile", "逐元素的运算合并，少读写几遍内存", "compile", {"compile": True}),
    Rung("显式注意力", "T 短时直接写 softmax(QKᵀ)V 更快", None, {"attention": "auto"}),
    Rung("存下掩码", "掩码不在内核里现算，缩放并进 RoPE", None, {"stored_mask": True}),
    Rung("合成交叉熵", "输出头与交叉熵一起算，不返回 logits", None, {"fused_loss": True}),
    Rung("只算一遍 exp", "不写出 softmax，反向不再算 exp", None, {"one_exp": True}),
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
    Rung(
        "+ 线程绑核", "线程不多于核，调度器本来就不大搬动它们", "cores",
        variant={"env": (("OMP_PROC_BIND", "close"), ("OMP_PLACES", "cores"))}, keep=False,
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


def climb(rungs: Sequence[Rung], threads: int) -> tuple[dict[str, Variant], dict[str, str]]:
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

    def at_least(self, operations: pd.DataFrame) -> "Peaks":
        """抬到不低于任何一个运算的实测速度（dtype、gflops 两列）：低了，是量峰值时机器正忙。"""
        best = operations.groupby("dtype")["gflops"].max() * 1e9
        return self.larger(Peaks(best["float32"], best.get("bfloat16"), self.bandwidth))

    def row(self) -> dict[str, float]:
        """写进结果的三列，单位 GFLOP/s 与 GB/s；没有 bf16 指令的机器那一列是 nan。"""
        bf16 = self.bf16 / 1e9 if self.bf16 else float("nan")
        return {"fp32_peak_gflops": self.fp32 / 1e9, "bf16_peak_gflops": bf16,
                "bandwidth_gb": self.bandwidth / 1e9}  # fmt: skip

    def of(self, variant: Variant) -> float:
        """这个变体的矩阵乘法该与哪个峰值比。"""
        return self.bf16 if variant.step.bf16 and self.bf16 else self.fp32


def measure_peaks(options: Options) -> Peaks:
    """实测矩阵乘法的 fp32、bf16 峰值和内存带宽。"""
    torch.set_num_threads(options.threads)
    seconds = options.peak_seconds
    has_bf16 = hardware.bf16_support()[0]
    return Peaks(
        fp32=hardware.matmul_peak(torch.float32, seconds=seconds),
        bf16=hardware.matmul_peak(torch.bfloat16, seconds=seconds) if has_bf16 else None,
        bandwidth=copy_bandwidth(seconds),
    )


def race(
    variants: dict[str, Variant], top: str, options: Options
) -> tuple[pd.DataFrame, pd.DataFrame, Peaks]:
    """交错计时所有变体，返回（一行一个变体的表，第一个与 `top` 的时间去向，实测峰值）。

    峰值在前后各量一次，取大的：机器正忙时量低了的峰值，会让占比虚高。第一次与工作进程的启动
    重叠，只会量低。
    """
    process_context()
    peaks = measure_peaks(options)
    with workers(variants, options.setting()) as team:
        first: dict[str, float] = {}
        for name, worker in team.items():
            progress(f"预热：{name}")
            first[name] = worker.ask("prepare", options.warmup)[0]
        times: dict[str, list[float]] = {name: [] for name in team}
        for done in range(0, options.steps, STINT):
            for name, worker in team.items():
                count = min(STINT, options.steps - done)
                # 多走一步不计：它要把别的进程占走的缓存暖回来，等别的进程的线程睡下去
                times[name] += worker.ask("time", 1 + count)[1:]
        reports = {name: worker.ask("report") for name, worker in team.items()}
        breakdown = [
            {"variant": name, "kernel": kernel, "kind": category(kernel), "ms": seconds * 1e3}
            for name in (next(iter(team)), top)
            for kernel, seconds in team[name].ask("profile")
        ]
    peaks = peaks.larger(measure_peaks(options))
    rows = [
        summarize(name, variants[name], times[name], first[name], reports[name], options, peaks)
        for name in team
    ]
    return compare(pd.DataFrame(rows)), pd.DataFrame(breakdown), peaks


def summarize(
    name: str, variant: Variant, times: list[float], first: float, report: dict,
    options: Options, peaks: Peaks,
) -> dict:  # fmt: skip
    """一个变体的一行：中位数、四分位距、吞吐、算力、占峰值的比例、内存、loss。"""
    seconds = median(times)
    tokens = options.batch_size * options.seq_len
    flops = tokens * build_model(options.setting()).flops_per_token(options.seq_len)
    mfu = flops / seconds / peaks.of(variant)
    quarter, three = pd.Series(times).quantile([0.25, 0.75])
    return {
        "variant": name, "ms": seconds * 1e3, "iqr_ms": (three - quarter) * 1e3,
        "fastest_ms": min(times) * 1e3, "tokens_per_s": tokens / seconds,
        "gflops": flops / seconds / 1e9, "peak_gflops": peaks.of(variant) / 1e9,
        "mfu": mfu if mfu <= 1 else float("nan"), "bf16": variant.step.bf16,
        "memory_mb": (report["peak_memory"] or float("nan")) / 2**20,
        "first_step_s": first, "loss": report["loss"],
    }  # fmt: skip


def compare(table: pd.DataFrame) -> pd.DataFrame:
    """补上与第一行（朴素写法）和上一行的比值，以及 loss 的相对差。"""
    table["speedup"] = table["ms"].iloc[0] / table["ms"]
    table["loss_change"] = (table["loss"] / table["loss"].iloc[0] - 1).abs()
    saved = (table["ms"].iloc[0] - table["ms"]) / 1e3
    extra = table["first_step_s"] - table["ms"] / 1e3
    # 编译多花的时间，多少步之后赚回来；不比朴素写法快则永远赚不回来
    table["pays_after"] = (extra / saved).where(saved > 0)
    return table


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
    runs = [build(Variant(fast), setting) for _, setting in points]
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
        f"机器：{about['cpu']}，{about['cores']} 核，{about['threads']} 个线程，"
        f"指令集 {about['isa']}，PyTorch {about['torch']}\n"
        f"实测峰值：矩阵乘法 fp32 {peaks.fp32 / 1e9:.0f}、bf16 {bf16} GFLOP/s；"
        f"内存带宽 {peaks.bandwidth / 1e9:.1f} GB/s"
    )


def show(table: pd.DataFrame) -> None:
    """把计时的表打印出来。"""
    columns = {
        "variant": "变体", "ms": "ms/步", "iqr_ms": "四分位距", "speedup": "倍数",
        "tokens_per_s": "token/s", "gflops": "GFLOP/s", "mfu": "占峰值",
        "memory_mb": "内存 MiB", "first_step_s": "首步 s", "loss": "loss",
    }  # fmt: skip
    formats = {
        "ms/步": "{:.1f}", "四分位距": "{:.1f}", "倍数": "{:.2f}", "token/s": "{:,.0f}",
        "GFLOP/s": "{:.0f}", "占峰值": "{:.1%}", "内存 MiB": "{:.0f}", "首步 s": "{:.1f}",
        "loss": "{:.4f}",
    }  # fmt: skip
    print_table(table[list(columns)].rename(columns=columns), formats)


def conclusions(table: pd.DataFrame) -> list[str]:
    """由测量生成的几句话；换一台机器，话也跟着变。"""
    rows = table.set_index("variant")
    base, best = table.iloc[0], table[table["keep"]].iloc[-1]
    said = []
    for name in ("bf16", "compile"):
        if base["variant"] == "fp32" and name in rows.index:  # 梯子是累积的，没有「只开」
            ratio = base["ms"] / rows.loc[name, "ms"]
            verdict = f"快 {ratio:.2f} 倍" if ratio > 1 else f"反而慢 {1 / ratio:.2f} 倍"
            said.append(f"只开 {name}：比 {base['variant']} {verdict}")
    share = f"{best['mfu']:.0%}" if pd.notna(best["mfu"]) else "（峰值量低了，不报）"
    said.append(
        f"{best['variant']}：每步 {best['ms']:.0f} ms，是 {base['variant']} 的 "
        f"{best['speedup']:.2f} 倍速度，达到 {'bf16' if best['bf16'] else 'fp32'} 峰值的 {share}"
    )
    changed = table.loc[~loss_is_kept(table), "variant"]
    kept = "与朴素写法的差都在容差之内" if changed.empty else f"{'、'.join(changed)} 超出了容差"
    return [*said, f"走完同样的步之后的 loss：{kept}"]


def report(table: pd.DataFrame, breakdown: pd.DataFrame, skipped: dict[str, str]) -> None:
    """打印表、跳过的理由和结论。"""
    show(table)
    if table["mfu"].isna().any():
        print("占峰值超过 100 % 的不报：量峰值时机器被别的程序占用了，请在空闲时重跑")
    for name, reason in skipped.items():
        print(f"跳过 {name}：{reason}")
    for sentence in conclusions(table):
        print(f"· {sentence}")
    shares = breakdown.groupby(["variant", "kind"], sort=False)["ms"].sum().unstack(0).fillna(0)
    shares = shares.sort_values(shares.columns[0], ascending=False).reset_index(names="去向")
    print("\n时间去了哪里（ms/步，torch.profiler）：")
    print_table(shares, dict.fromkeys(shares.columns[1:], "{:.1f}"))


def run_race(options: Options) -> None:
    """默认的四个变体，或整架梯子。"""
    variants, skipped = climb(LADDER, options.threads) if options.ladder else short_list()
    rungs = {rung.name: rung for rung in LADDER} if options.ladder else {}
    kept = {name: name not in rungs or rungs[name].keep for name in variants}
    top = [name for name in variants if kept[name]][-1]
    table, breakdown, peaks = race(variants, top, options)
    print(describe_machine(peaks))
    table["keep"] = table["variant"].map(kept)
    table["why"] = [rungs[name].why if name in rungs else "" for name in table["variant"]]
    report(table, breakdown, skipped)
    name = "speed_ladder" if options.ladder else "speed"
    save_csv(table.assign(**peaks.row()), name)
    save_csv(breakdown, f"{name}_profile")


def main(options: Options) -> None:
    """按选项量、打印、写 CSV。"""
    if options.roofline:
        peaks = measure_peaks(options)
        table = operations(
            options.batch_size * options.seq_len, options.d_model, VOCAB, hardware.bf16_support()[0]
        )
        peaks = peaks.at_least(table)
        print(describe_machine(peaks))
        print_table(table, {"intensity": "{:.1f}", "gflops": "{:.0f}", "gb_per_s": "{:.1f}"})
        save_csv(table.assign(**peaks.row()), "speed_roofline")
    if options.growth:
        table = growth(options)
        formats = {"params": "{:,}", "flops": "{:.2e}", "ms": "{:.1f}", "predicted_ms": "{:.1f}"}
        print_table(table, formats)
        save_csv(table, "speed_growth")
    if options.ladder or not (options.roofline or options.growth):
        run_race(options)


if __name__ == "__main__":
    run_main(main, Options)
