"""更大的模型好多少：同样的数据、同样的步数，训练四种大小的模型，比较训练与验证的 loss。

    python experiments/scaling.py                                # 一个种子；2 核 CPU 上几分钟
    python experiments/scaling.py --quick                        # 短版：100 步，一分钟左右
    python experiments/scaling.py --seeds 0 1 2 3 4              # 每种大小五个种子；约一刻钟
    python experiments/scaling.py --seeds 0 1 2 3 4 --control    # 对照：另留十回不训练，夹在中间
    python experiments/scaling.py --sizes 128x4 --lr 1e-3        # 换一个学习率，只训一种大小
    python experiments/scaling.py --data 文件夹 --name more_data  # 换成自己的语料

几次训练读同样的 batch、用同样的学习率曲线，只有模型不同；最大的一种训练之前，先由较小的几种预言它。
步数固定，所以这里看到的是「数据一样多时，参数该多少」的一条切片，**不是**算力一样多时的比较。
一个种子：留下 results/scaling.csv（一行一种大小）和 results/scaling_curve.csv（一行一步）。
几个种子或对照：results/scaling_seeds.csv、results/scaling_control.csv，一行一个验证的时刻；
做完的训练不重做，中断了再运行同一条命令就接着走。
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean

import numpy as np
import pandas as pd
import torch
from scipy import stats

from experiments.lab.results import print_table, results_folder, run_main, save_csv
from experiments.training.recipe import seeded_gpt
from experiments.training.small_run import HEAD_DIM, TAIL, SmallRun, moments, sweep, train
from experiments.training.step import StepOptions, best_options
from tokens import Batch, held_out_batches, load_tokenizer, load_tokens
from tokens.errors import UserError

# 同一种大小只换种子，400 步后验证 loss 的标准差（nat）；由 book/measured 里的五个种子算出，测试核对
SEED_SD = 0.07
QUICK_STEPS, QUICK_WARMUP, QUICK_SD = 100, 12, 0.025  # 短版的步数、预热与种子的标准差（nat）
CONTROL_EVERY = 11  # 对照：训练的 108 回里每 11 回留出一回


@dataclass(frozen=True)
class Options:
    """四种大小的模型，各训练 400 步。"""

    sizes: tuple[str, ...] = ("64x2", "96x3", "128x4", "192x4")
    """要训练哪些模型，写成 d_model x n_layer；注意力头数是 d_model / 32"""
    seeds: tuple[int, ...] = (0,)
    """种子，决定初始权重与抽样；几个种子时各大小读同样的 batch，差可以逐对比较"""
    control: bool = False
    """从训练的回目里均匀留出十回：既没训练过，题材又与训练集相同（只用于内置语料）"""
    steps: int = 400
    """每个模型训练几步（优化器更新的次数）"""
    batch_size: int = 16
    """每步读几个序列（个）"""
    seq_len: int = 128
    """序列长度（token）"""
    lr: float = 3e-3
    """学习率的峰值"""
    warmup: int = 50
    """线性预热几步（步），之后余弦衰减到峰值的十分之一"""
    weight_decay: float = 0.1
    """权重衰减，只用在矩阵上"""
    clip: float = 1.0
    """梯度范数的上限"""
    eval_batches: int = 8
    """验证用几个固定的 batch（个），每个 32 个序列"""
    plain: bool = False
    """用朴素的一步（fp32、eager），而不是这台机器上最快的一步"""
    quick: bool = False
    """短版：100 步、预热 12 步，不编译（编译四种大小比这几步训练还久）"""
    data: str | None = None
    """tokens.pt 或它所在的文件夹；不给则用内置的《三国演义》"""
    name: str = "scaling"
    """结果文件的名字：results/<name>.csv、<name>_curve.csv；多个种子时 <name>_seeds.csv"""

    def __post_init__(self) -> None:
        if self.steps < 4:
            raise UserError(f"--steps {self.steps} 太少：要在四个时刻验证，至少 4 步")
        for name in ("batch_size", "seq_len", "eval_batches"):
            if getattr(self, name) < 1:
                flag = name.replace("_", "-")
                raise UserError(f"--{flag} {getattr(self, name)}：要一个不小于 1 的整数")
        for name in ("lr", "clip", "warmup", "weight_decay"):
            value, positive = getattr(self, name), name in ("lr", "clip")
            if not math.isfinite(value) or value < 0 or (positive and value == 0):
                limit = "大于 0" if positive else "不小于 0"
                raise UserError(f"--{name.replace('_', '-')} {value}：要一个{limit}的有限数")
        if not self.seeds or min(self.seeds) < 0 or len(set(self.seeds)) < len(self.seeds):
            given = " ".join(map(str, self.seeds)) or "（空）"
            raise UserError(f"--seeds {given}：要至少一个不小于 0 的整数，不重复")
        if self.control and self.data:
            raise UserError("--control 要按回目留出，只能用内置的语料；请去掉 --data 或 --control")
        for size in self.sizes:
            parse_size(size)

    def runs(self) -> list[SmallRun]:
        """全部训练，先按种子、再按大小：中途停下时，做完的种子各大小都齐。"""
        steps, warmup = self.steps, self.warmup
        if self.quick:
            steps, warmup = QUICK_STEPS, QUICK_WARMUP
        base = SmallRun(
            steps=steps, batch_size=self.batch_size, seq_len=self.seq_len, lr=self.lr,
            warmup=warmup, weight_decay=self.weight_decay, clip=self.clip, plain=self.plain,
            corpus="留出十回" if self.control else self.data or "",
        )  # fmt: skip
        shapes = [parse_size(size) for size in self.sizes]
        return [replace(base, seed=seed, d_model=d_model, n_layer=n_layer)
                for seed in self.seeds for d_model, n_layer in shapes]  # fmt: skip


    def step_options(self) -> StepOptions:
        """一步怎么算：这台机器上最快的一组；短版不编译，`--plain` 全都不用。"""
        if self.plain:
            return StepOptions()
        best = best_options()[0]
        return replace(best, compile=best.compile and not self.quick)

    @property
    def seed_sd(self) -> float:
        """一次训练的最后验证 loss 随种子的标准差（nat），四种大小合起来的。"""
        return QUICK_SD if self.quick else SEED_SD


def parse_size(size: str) -> tuple[int, int]:
    """"128x4" → (128, 4)；写法不对，或 d_model 不是 32 的倍数，抛出 UserError。"""
    d_model, cross, n_layer = size.partition("x")
    if not (cross and d_model.isdecimal() and n_layer.isdecimal()):
        raise UserError(f"--sizes {size}：要写成 d_model x n_layer，例如 128x4")
    if int(d_model) % HEAD_DIM or not int(d_model) or not int(n_layer):
        raise UserError(f"--sizes {size}：d_model 要是 {HEAD_DIM} 的倍数，n_layer 至少是 1")
    return int(d_model), int(n_layer)


# ---------------------------------------------------------------- 数据：标准的，与留出十回的对照


def held_out(data: Mapping, options: Options) -> dict[str, list[Batch]]:
    """{"val": 固定的验证 batch}；对照里另有 "inside"：训练部分之间留出的那几回。"""
    splits = [name for name in ("val", "inside") if name in data]
    return {name: held_out_batches(data[name], options.eval_batches, options.seq_len, seed=1)
            for name in splits}  # fmt: skip


def control_data() -> dict:
    """内置语料，但训练的 108 回里每 11 回留出一回（inside）：没训练过，题材与训练集相同。

    训练与验证的差距里，「记住了读过的」与「后 12 回本来就更难」由此分开。
    """
    from tokens.novel import TRAIN_CHAPTERS, chapters
    from tokens.texts import normalise

    tokenizer, parts = load_tokenizer(), {"train": [], "inside": []}
    for number, chapter in enumerate(chapters()[:TRAIN_CHAPTERS]):
        text = "".join(line + "\n" for line in normalise(chapter)) + "\n"
        part = "inside" if number % CONTROL_EVERY == CONTROL_EVERY // 2 else "train"
        parts[part] += tokenizer.encode_ordinary(text)
    standard = load_tokens()
    ids = {name: torch.tensor(part, dtype=torch.int32) for name, part in parts.items()}
    return ids | {"val": standard["val"], "meta": standard["meta"]}


# ---------------------------------------------------------------- 一个种子：当场看


def summarize(run: SmallRun, params: int, curve: pd.DataFrame) -> dict:
    """一种大小的一行结果；gap 是最后的验证 loss 减去最后 50 步的平均训练 loss。"""
    val = curve.dropna(subset="val_loss").set_index("step")["val_loss"]
    train_mean = fmean(curve["train_loss"].tail(TAIL))
    return {
        "d_model": run.d_model, "n_layer": run.n_layer, "params": params,
        **{f"val_{step}": loss for step, loss in val.items()},
        "train_mean": train_mean, "train_last": curve["train_loss"].iloc[-1],
        "gap": val.iloc[-1] - train_mean,
        # 第一步含编译，单列出来；ms_per_step 取中位数
        "first_step_s": curve["seconds"].iloc[0],
        "ms_per_step": curve["seconds"].median() * 1e3, "seconds": curve["seconds"].sum(),
    }  # fmt: skip


def one_seed(options: Options) -> tuple[pd.DataFrame, pd.DataFrame, list[str]]:
    """每种大小训练一次，返回（一行一种大小的表，所有曲线的长表，训练最大的之前写下的预言）。

    预言在最大的一种开始训练之前就印出来；表里最大的一行是结果。
    """
    data = load_tokens(options.data)
    checks, rows, curves, said = held_out(data, options), [], [], []
    runs = sorted(options.runs(), key=lambda run: run.config(8192).d_model * run.n_layer)
    for number, run in enumerate(runs):
        model = seeded_gpt(run.config(data["meta"]["vocab_size"]), run.seed)
        params = model.num_params()
        if number == len(runs) - 1 >= 3:
            known = pd.DataFrame(rows)
            losses = known.filter(like="val_").iloc[:, -1]
            said.append(foretell(known["params"], losses, params, options.seed_sd))
            print(said[-1], file=sys.stderr)
        print(f"训练 {run.size}：{params:,} 个参数", file=sys.stderr)
        curve = train(run, data, checks, model=model, fast=options.step_options())
        rows.append(summarize(run, params, curve))
        curves.append(curve.assign(size=run.size, d_model=run.d_model, params=params))
    return pd.DataFrame(rows), pd.concat(curves, ignore_index=True), said


# ---------------------------------------------------------------- 预言


def predict(
    params: Sequence[float], losses: Sequence[float], target: float, sd: float = SEED_SD
) -> tuple[float, float]:
    """由几种大小的 loss 沿 log N 的直线外推到 `target` 个参数；返回 (预言, 95 % 区间的半宽)。

    半宽按最小二乘的预测方差算：sd²·(1 + x₀ᵀ(XᵀX)⁻¹x₀)，`sd` 是一次训练随种子的标准差（nat）。
    它只含种子的起伏；「本来是条曲线，却当作直线」的误差不在里面。少于 3 种大小时抛 ValueError。
    """
    x = np.log(np.asarray(params, dtype=float))
    if len(set(x.tolist())) < 3:
        raise ValueError(f"只有 {len(set(x.tolist()))} 种大小：外推一条直线至少要 3 种")
    design = np.column_stack((np.ones_like(x), x))
    at = np.array([1.0, math.log(target)])
    gram = np.linalg.inv(design.T @ design)
    intercept_slope = gram @ design.T @ np.asarray(losses, dtype=float)
    half = stats.norm.ppf(0.975) * sd * math.sqrt(1 + at @ gram @ at)
    return float(at @ intercept_slope), float(half)


def foretell(
    params: Sequence[float], losses: Sequence[float], target: int, sd: float = SEED_SD
) -> str:
    """训练最大的模型之前说的那句话。"""
    guess, half = predict(params, losses, target, sd)
    return (f"预言：{target:,} 个参数的模型最后的验证 loss 是 {guess:.3f} ± {half:.3f} nat"
            "（由较小的几种沿 log N 外推，95 % 区间）")  # fmt: skip


# ---------------------------------------------------------------- 几个种子：能分清什么


def last_moments(table: pd.DataFrame) -> pd.DataFrame:
    """几个种子的长表里，每次训练的最后一个时刻。"""
    return table[table["step"] == table["steps"]]


def by_size(table: pd.DataFrame, column: str = "val_loss") -> pd.DataFrame:
    """每种大小一行：种子数、平均、标准差（单个种子的）、平均值的 95 % 区间半宽（t 分布）。"""
    grouped = last_moments(table).groupby("params")[column]
    rows = grouped.agg(["count", "mean", "std"]).reset_index()
    t = stats.t.ppf(0.975, rows["count"] - 1)
    return rows.assign(half=t * rows["std"] / np.sqrt(rows["count"]))


def ladder(table: pd.DataFrame) -> pd.DataFrame:
    """每种大小一行，各种子的平均：四个时刻的验证 loss、最后 50 步的训练 loss、两者的差距。"""
    shape = ["d_model", "n_layer", "params"]
    val = table.pivot_table(index=shape, columns="step", values="val_loss")
    last = last_moments(table).groupby(shape)["train_mean"].mean()
    rows = val.add_prefix("val_").assign(train_mean=last, gap=val.iloc[:, -1] - last)
    return rows.rename_axis(columns=None).reset_index().sort_values("params")


def neighbours(table: pd.DataFrame, column: str = "val_loss") -> pd.DataFrame:
    """相邻两种大小的逐种子之差：平均、95 % 区间、要几个种子才分得清（区间不含 0）。

    同一个种子的各大小读同样的 batch，逐对相减就去掉了共有的起伏（有多少是共有的，看 `sd` 比
    两次独立训练之差小多少）；`told_apart` 说区间不含 0。
    """
    wide = last_moments(table).pivot(index="seed", columns="params", values=column).dropna()
    rows = []
    for small, large in pairwise(sorted(wide.columns)):
        gain = wide[small] - wide[large]  # 正数：大的更好
        half = stats.t.ppf(0.975, len(gain) - 1) * gain.std() / math.sqrt(len(gain))
        rows.append({
            "small": small, "large": large, "seeds": len(gain), "gain": gain.mean(),
            "sd": gain.std(), "low": gain.mean() - half, "high": gain.mean() + half,
            "told_apart": gain.mean() - half > 0,
            "one_seed_wrong": float(stats.norm.cdf(-gain.mean() / gain.std())),
        })  # fmt: skip
    return pd.DataFrame(rows)


def memory_and_subject(table: pd.DataFrame) -> pd.DataFrame:
    """对照的两份差距，每种大小一行：记忆 = 留出的十回 − 训练；题材 = 后 12 回 − 留出的十回。

    各附 95 % 区间的半宽（几个种子的 t 分布）。训练 loss 是最后 50 步的平均，nat/token。
    """
    last = last_moments(table)
    last = last.assign(memory=last["inside_loss"] - last["train_mean"],
                       subject=last["val_loss"] - last["inside_loss"])  # fmt: skip
    parts = {name: by_size(last, name) for name in ("memory", "subject")}
    result = parts["memory"][["params", "count"]].copy()
    for name, rows in parts.items():
        result[name], result[f"{name}_half"] = rows["mean"], rows["half"]
    return result


def several_seeds(options: Options) -> pd.DataFrame:
    """全部种子的长表；做完的不重做。"""
    data = control_data() if options.control else load_tokens(options.data)
    checks = held_out(data, options)
    path = results_folder() / f"{options.name}_{'control' if options.control else 'seeds'}.csv"

    def train_one(run: SmallRun) -> pd.DataFrame:
        model = seeded_gpt(run.config(data["meta"]["vocab_size"]), run.seed)
        curve = train(run, data, checks, model=model, fast=options.step_options())
        return moments(run, curve, model.num_params())

    return sweep(options.runs(), path, train_one)


# ---------------------------------------------------------------- 说


def conclusions(
    table: pd.DataFrame, said: Sequence[str] = (), sd: float = SEED_SD
) -> list[str]:
    """一个种子能说的话，由数字生成：差小于种子的起伏时，只说「分不清」。"""
    if len(table) < 2:
        return []
    ordered = table.sort_values("params")
    final = ordered.filter(like="val_").columns[-1]
    margin = 2 * sd  # 两次训练之差的标准差是 √2 倍；约 1.4 个标准差，错的可能不到一成
    steps = []
    for (_, small), (_, large) in pairwise(ordered.iterrows()):
        gain = small[final] - large[final]
        verdict = "低" if gain > margin else "高" if gain < -margin else "分不清"
        steps.append(f"{small['params'] / 1e6:.2f} M → {large['params'] / 1e6:.2f} M 验证 loss "
                     f"{verdict}（{-gain:+.3f}）")  # fmt: skip
    small, large = ordered.iloc[0], ordered.iloc[-1]
    gain, times = small[final] - large[final], large["params"] / small["params"]
    lines = [
        f"参数是 {times:.1f} 倍，最后的验证 loss {'低' if gain > 0 else '高'} {abs(gain):.3f} nat",
        f"相邻的大小（一个种子，差不到 {margin:.2f} nat 就分不清）：{'；'.join(steps)}",
        f"验证与训练的差距从 {small['gap']:.3f} nat 到 {large['gap']:.3f} nat",
    ]
    return [*lines, *(f"{text}；结果 {large[final]:.3f}" for text in said)]


def main(options: Options) -> None:
    """训练、打印、写 CSV。"""
    for reason in [] if options.plain else best_options()[1]:
        print(f"提示：{reason}", file=sys.stderr)
    if len(options.seeds) > 1 or options.control:
        table = several_seeds(options)
        formats = dict.fromkeys(("mean", "std", "half"), "{:.4f}") | {"params": "{:,}"}
        print_table(by_size(table), formats)
        if len(options.seeds) > 1:
            print_table(neighbours(table), dict.fromkeys(("gain", "sd", "low", "high"), "{:.4f}"))
        if options.control:
            print_table(memory_and_subject(table))
        return
    table, curves, said = one_seed(options)
    losses = [n for n in table.columns if n.startswith(("val_", "train_")) or n == "gap"]
    formats = dict.fromkeys(losses, "{:.3f}")
    formats |= {"first_step_s": "{:.1f}", "ms_per_step": "{:.0f}", "seconds": "{:.0f}"}
    print_table(table, formats | {"params": "{:,}"})
    for sentence in conclusions(table, said, options.seed_sd):
        print(f"· {sentence}")
    save_csv(table.assign(predicted=said[0] if said else ""), options.name, options)
    save_csv(curves, f"{options.name}_curve", options)


if __name__ == "__main__":
    run_main(main, Options)
