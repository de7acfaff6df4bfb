"""扫学习率：最低点随宽度怎样移动；μP 之后还移不移。

    python experiments/lr_sweep.py --quick    # 两种宽度、三个学习率、一个种子；半分钟上下
    python experiments/lr_sweep.py            # 四种宽度、三个种子，两种参数化；单线程十多分钟

每个宽度对一串学习率各训练一次（2 层、120 步，词表截到 1,024），记下最后的验证 loss：一条 U 形线。
最低点和它两旁的邻居定一条抛物线，顶点就是最优的学习率；最低点在最边上时没有邻居，拒绝回答。
每个种子各求一次，种子之间的 t 分布给出区间；最优学习率对宽度的斜率也是这样。
μP 的基准宽度上，两种参数化是同一个模型，只训练一次。
留下 results/<name>.csv，一行一次训练；做完的不重做，中断了再运行同一条命令就接着走。
results/<name>_coordinates.csv：走几步之后各处的激活变了多少（坐标检查）。
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import tiktoken
import torch
from scipy import stats

from experiments.lab.results import print_table, results_folder, run_main, save_csv
from experiments.training.mup import WidthRun, build, changes_after
from experiments.training.small_run import HEAD_DIM, moments, sweep, train
from experiments.training.step import best_options
from tokens import held_out_batches, load_tokenizer, load_tokens
from tokens.errors import UserError
from tokens.tokenizer import PATTERN

NAMES = {"standard": "标准", "mup": "μP"}
VOCAB = 1024  # 只留分词器最早的这些词条：输出头便宜，各层的矩阵才占主要
EVAL_BATCHES = 4  # 固定的验证 batch，每个 32 个序列
COORDINATE_STEPS = 4  # 坐标检查走几步
REACH = 2  # 抛物线用最低点两旁各几个学习率


@dataclass(frozen=True)
class Options:
    """四种宽度、两种参数化、三个种子。"""

    widths: tuple[int, ...] = (32, 64, 128, 256)
    """d_model；每个头 32 维"""
    rates: tuple[float, ...] = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
    """标准参数化的学习率（峰值）"""
    mup_rates: tuple[float, ...] = (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2, 1.28e-1)
    """μP 的学习率（基准宽度上的峰值）"""
    base_width: int = 32
    """μP 以这个宽度为准"""
    seeds: tuple[int, ...] = (0, 1, 2)
    """种子，决定初始权重与抽样"""
    n_layer: int = 2
    """层数"""
    steps: int = 120
    """每次训练几步"""
    batch_size: int = 8
    """每步几个序列（个）"""
    seq_len: int = 64
    """序列长度（token）"""
    quick: bool = False
    """当场看的小版本：宽度 32 与 96，各三个学习率，一个种子；每次从头做"""
    name: str = "lr_sweep"
    """结果文件的名字：results/<name>.csv；--quick 时 <name>_quick.csv"""

    def __post_init__(self) -> None:
        for name in ("widths", "rates", "mup_rates", "seeds"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                given = " ".join(map(str, values)) or "（空）"
                raise UserError(f"--{name.replace('_', '-')} {given}：要至少一个，不重复")
        for width in (*self.widths, self.base_width):
            if width < HEAD_DIM or width % HEAD_DIM:
                raise UserError(f"宽度 {width}：要是 {HEAD_DIM} 的倍数（每个头 {HEAD_DIM} 维）")
        for rate in (*self.rates, *self.mup_rates):
            if not (math.isfinite(rate) and rate > 0):
                raise UserError(f"学习率 {rate}：要一个大于 0 的有限数")
        for name in ("steps", "batch_size", "seq_len", "n_layer"):
            if getattr(self, name) < 1:
                flag = name.replace("_", "-")
                raise UserError(f"--{flag} {getattr(self, name)}：要一个不小于 1 的整数")
        if min(self.seeds) < 0:
            raise UserError(f"--seeds {min(self.seeds)}：要不小于 0 的整数")

    def small(self) -> "Options":
        """`--quick` 的那一版。"""
        return replace(self, widths=(32, 96), rates=(1e-3, 4e-3, 1.6e-2),
                       mup_rates=(4e-3, 1.6e-2, 6.4e-2), seeds=(0,),
                       name=f"{self.name}_quick", quick=False)  # fmt: skip

    def runs(self) -> list[WidthRun]:
        """全部训练，种子在最外层：中途停下时，做完的种子各宽度都齐。"""
        base = WidthRun(n_layer=self.n_layer, steps=self.steps, batch_size=self.batch_size,
                        seq_len=self.seq_len, warmup=max(1, self.steps // 10), moments=1,
                        base_width=self.base_width, corpus=f"词表截到 {VOCAB}")  # fmt: skip
        both = sorted({*self.rates, *self.mup_rates})
        return [
            replace(base, seed=seed, parametrization=how, d_model=width, lr=rate)
            for seed in self.seeds
            for how in NAMES
            for width in self.widths
            if not (how == "mup" and width == self.base_width)  # 与标准的是同一个模型
            for rate in (both if width == self.base_width
                         else self.rates if how == "standard" else self.mup_rates)
        ]  # fmt: skip


# ---------------------------------------------------------------- 训练


def coarse_tokens() -> dict:
    """内置语料，分词器只留最早的 `VOCAB` 个词条（256 个字节与最早的合并）。"""
    full, standard = load_tokenizer(), load_tokens()
    ranks = {full.decode_single_token_bytes(rank): rank for rank in range(VOCAB)}
    coarse = tiktoken.Encoding("coarse", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    ids = {
        name: torch.tensor(coarse.encode_ordinary(full.decode(standard[name].tolist())),
                           dtype=torch.int32)
        for name in ("train", "val")
    }  # fmt: skip
    return ids | {"meta": {"vocab_size": VOCAB}}


def train_one(run: WidthRun, data: Mapping) -> pd.DataFrame:
    """训练一次，返回一行（最后的验证 loss）；eager，其余是这台机器上最快的一步。"""
    model, optimizer = build(run, data["meta"]["vocab_size"])
    checks = {"val": held_out_batches(data["val"], EVAL_BATCHES, run.seq_len, seed=1)}
    fast = replace(best_options()[0], compile=False)  # 每种宽度编译一次，比训练本身还久
    curve = train(run, data, checks, model=model, optimizer=optimizer, fast=fast)
    return moments(run, curve, model.num_params())


# ---------------------------------------------------------------- 最低点


def optimum(rates: Sequence[float], losses: Sequence[float], reach: int = REACH) -> float:
    """U 形线的最低处：最低点与两旁各 k 个邻居的最小二乘抛物线（横轴 log lr）的顶点，返回学习率。

    k 是 `reach`，离边更近时少些。最低点在最边上、邻居没有有限的 loss、顶点落到这几个点之外时，
    抛出 ValueError：看不出哪边更低。
    """
    order = np.argsort(rates)
    x, y = np.log(np.asarray(rates, float)[order]), np.asarray(losses, float)[order]
    low = int(np.argmin(np.where(np.isfinite(y), y, np.inf)))
    k = min(reach, low, len(x) - 1 - low)
    if k < 1:
        raise ValueError(f"最低点在最边上（学习率 {np.exp(x[low]):.3g}）：往那一边再加几个学习率")
    if not np.isfinite(y[low - k : low + k + 1]).all():
        raise ValueError(f"学习率 {np.exp(x[low]):.3g} 的邻居发散了：把间隔取小一些")
    near = slice(low - k, low + k + 1)
    a, b, _ = np.polyfit(x[near], y[near], 2)
    if a <= 0 or not x[near][0] < -b / (2 * a) < x[near][-1]:
        raise ValueError(f"学习率 {np.exp(x[low]):.3g} 附近不是 U 形：起伏盖过了弯曲")
    return float(np.exp(-b / (2 * a)))


def both_ways(table: pd.DataFrame) -> pd.DataFrame:
    """训练的长表，再把基准宽度的各行也记在 μP 名下（同一个模型，没有重训）。"""
    same = (table["parametrization"] == "standard") & (table["d_model"] == table["base_width"])
    return pd.concat([table, table[same].assign(parametrization="mup")], ignore_index=True)


def optima(table: pd.DataFrame, reach: int = REACH) -> pd.DataFrame:
    """每种参数化、每个宽度、每个种子的最优学习率；求不出的是 NaN，`refused` 说为什么。"""
    rows = []
    keys = ["parametrization", "d_model", "seed"]
    for key, one in both_ways(table).groupby(keys, sort=True):
        row = dict(zip(keys, key, strict=True)) | {"best": math.nan, "refused": ""}
        try:
            row["best"] = optimum(one["lr"], one["val_loss"], reach)
        except ValueError as error:
            row["refused"] = str(error)
        rows.append(row | {"lowest": one["val_loss"].min()})
    return pd.DataFrame(rows)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """几个种子的平均与 95 % 区间的半宽（t 分布）；有 NaN 或只有一个时半宽是 NaN。"""
    values = np.asarray(values, float)
    if len(values) < 2:
        return float(values.mean()), math.nan
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values))
    return float(values.mean()), float(half)


def by_width(found: pd.DataFrame) -> pd.DataFrame:
    """每种参数化、每个宽度一行：最优学习率（几何平均）与它的 95 % 区间 low、high。

    一个种子拒绝回答，这个宽度就是 NaN：只留回答了的那些种子会偏。
    """
    rows = []
    for (how, width), one in found.groupby(["parametrization", "d_model"], sort=True):
        mean, half = interval(np.log(one["best"]))
        rows.append({"parametrization": how, "d_model": width, "seeds": len(one),
                     "refused": int(one["best"].isna().sum()), "best": math.exp(mean),
                     "low": math.exp(mean - half), "high": math.exp(mean + half)})  # fmt: skip
    return pd.DataFrame(rows)


def slopes(found: pd.DataFrame, parametrization: str) -> np.ndarray:
    """每个种子的 log 最优学习率对 log 宽度的斜率。

    只用每个种子都有答案的宽度；不到两个时为空。
    """
    wide = found[found["parametrization"] == parametrization].pivot(
        index="d_model", columns="seed", values="best"
    )
    wide = wide.dropna()
    if len(wide) < 2:
        return np.array([])
    x = np.log(wide.index.to_numpy(float))
    return np.array([np.polyfit(x, np.log(wide[seed]), 1)[0] for seed in wide.columns])


def shift(found: pd.DataFrame, parametrization: str) -> tuple[float, float]:
    """最优学习率按宽度的几次方变：几个种子的（平均，95 % 区间的半宽）；说不出时是 NaN。

    0 是不动，−1 是宽度翻倍、学习率减半。
    """
    powers = slopes(found, parametrization)
    return interval(powers) if len(powers) else (math.nan, math.nan)


def penalty(table: pd.DataFrame, parametrization: str) -> pd.DataFrame:
    """把最窄的模型上最好的学习率直接用在每个宽度上，比这个宽度自己最好的高多少 nat。

    「最好」取扫过的学习率里几个种子的平均最低的一个；一行一个宽度：平均与区间半宽。
    """
    one = both_ways(table)
    one = one[one["parametrization"] == parametrization]
    mean = one.groupby(["d_model", "lr"])["val_loss"].mean()
    carried = mean[min(one["d_model"])].idxmin()
    rows = []
    for width in sorted(one["d_model"].unique()):
        own = mean[width].idxmin()
        here = one[one["d_model"] == width].pivot(index="seed", columns="lr", values="val_loss")
        cost = interval(here[carried] - here[own]) if carried in here else (math.nan, math.nan)
        rows.append({"d_model": width, "carried": carried, "own": own, "cost": cost[0],
                     "half": cost[1]})  # fmt: skip
    return pd.DataFrame(rows)


# ---------------------------------------------------------------- 坐标检查


def coordinates(options: Options, data: Mapping, lr: float = 1e-3) -> pd.DataFrame:
    """每种参数化、宽度、种子、位置一行：走几步之后，同一个 batch 的激活变了多少。"""
    rows = []
    for how in NAMES:
        for width in options.widths:
            for seed in options.seeds:
                run = WidthRun(d_model=width, n_layer=options.n_layer, seq_len=options.seq_len,
                               batch_size=options.batch_size, lr=lr, seed=seed,
                               parametrization=how, base_width=options.base_width)  # fmt: skip
                changed = changes_after(run, data, COORDINATE_STEPS)
                rows += [{"parametrization": how, "d_model": width, "seed": seed, "where": where,
                          "change": value} for where, value in changed.items()]  # fmt: skip
    return pd.DataFrame(rows)


def growth(changes: pd.DataFrame) -> pd.DataFrame:
    """log 变化对 log 宽度的斜率，每种参数化、每个位置、每个种子一行：0 是与宽度无关。"""
    rows = []
    keys = ["parametrization", "where", "seed"]
    for key, one in changes.groupby(keys, sort=False):
        slope = np.polyfit(np.log(one["d_model"]), np.log(one["change"]), 1)[0]
        rows.append(dict(zip(keys, key, strict=True)) | {"slope": float(slope)})
    return pd.DataFrame(rows)


# ---------------------------------------------------------------- 说


def said_shift(slope: float, half: float) -> str:
    """斜率与区间 → 一句话：有区间才说移不移。"""
    if math.isnan(slope):
        return "有答案的宽度不到两个，说不出最优学习率怎样移动"
    if math.isnan(half):
        return f"最优学习率约按宽度的 {slope:+.2f} 次方变；一个种子，没有区间"
    verdict = "随宽度移动" if abs(slope) > half else "区间含 0，看不出移动"
    return f"最优学习率按宽度的 {slope:+.2f} ± {half:.2f} 次方变，{verdict}"


def conclusions(table: pd.DataFrame) -> list[str]:
    """由数字生成的几句话：有区间才说移不移，求不出的照实说。"""
    found, lines = optima(table), []
    for row in found[found["refused"] != ""].itertuples():
        where = f"{NAMES[row.parametrization]}，宽 {row.d_model}，种子 {row.seed}"
        lines.append(f"{where}：{row.refused}")
    lines += [f"{NAMES[how]}：{said_shift(*shift(found, how))}" for how in NAMES]
    return lines


def show(table: pd.DataFrame, changes: pd.DataFrame) -> None:
    """印三张表：loss、最优的学习率、坐标检查，再印结论。"""
    for how, name in NAMES.items():
        one = both_ways(table)
        one = one[one["parametrization"] == how]
        losses = one.pivot_table(index="lr", columns="d_model", values="val_loss")
        print(f"\n{name}：最后的验证 loss（nat/token），一行一个学习率，一列一个宽度")
        print_table(losses.reset_index(), dict.fromkeys(losses.columns, "{:.3f}") | {"lr": "{:g}"})
    best = by_width(optima(table))
    print("\n最优的学习率")
    print_table(best.replace({"parametrization": NAMES}),
                dict.fromkeys(("best", "low", "high"), "{:.2e}"))  # fmt: skip
    slopes = growth(changes).groupby(["where", "parametrization"], sort=False)["slope"].mean()
    print(f"\n坐标检查：{COORDINATE_STEPS} 步之后激活的变化按宽度的几次方长")
    slopes = slopes.unstack().rename(columns=NAMES).reset_index()
    print_table(slopes, dict.fromkeys(NAMES.values(), "{:+.2f}"))
    print("\n结论")
    for sentence in conclusions(table):
        print(f"· {sentence}")


def main(options: Options) -> None:
    """训练、打印、写 CSV。"""
    wanted = options
    if options.quick:
        options = options.small()
        (results_folder() / f"{options.name}.csv").unlink(missing_ok=True)
    data = coarse_tokens()
    print(f"训练 {len(options.runs())} 次", file=sys.stderr)
    table = sweep(options.runs(), results_folder() / f"{options.name}.csv",
                  lambda run: train_one(run, data))  # fmt: skip
    changes = coordinates(options, data)
    save_csv(changes, f"{options.name}_coordinates", wanted)
    show(table, changes)


if __name__ == "__main__":
    run_main(main, Options)
