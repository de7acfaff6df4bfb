"""更大的模型好多少：同样的数据、同样的步数，训练四种大小的模型，比较训练与验证的 loss。

    python experiments/scaling.py                                # 2 核 CPU 上约两分半
    python experiments/scaling.py --sizes 128x4 --lr 1e-3        # 换一个学习率，只训一种大小
    python experiments/scaling.py --data 文件夹 --name more_data  # 换成自己的语料

四次训练读同样的 batch、用同样的学习率曲线，只有模型不同。步数固定，所以这里看到的是
「数据一样多时，参数该多少」的一条切片，**不是**算力一样多时的比较（那要让小模型多走几步）。
留下 results/scaling.csv（一行一种大小）和 results/scaling_curve.csv（一行一步）。
"""

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from experiments.lab.results import print_table, run_main, save_csv
from experiments.training.recipe import adamw, evaluate, learning_rate, set_learning_rate
from experiments.training.step import StepOptions, best_options, make_step
from model import GPT, GPTConfig
from tokens import load_tokens, sample_batch
from tokens.errors import UserError

Batch = tuple[Tensor, Tensor]  # x 与 y，各 (B, T) 的 int64
HEAD_DIM = 32  # 全书的模型每个注意力头都是 32 维
TAIL = 50  # 训练 loss 取最后这么多步的平均：单步的 loss 随 batch 起伏


@dataclass(frozen=True)
class Options:
    """四种大小的模型，各训练 400 步。"""

    sizes: tuple[str, ...] = ("64x2", "96x3", "128x4", "192x4")
    """要训练哪些模型，写成 d_model x n_layer；注意力头数是 d_model / 32"""
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
    seed: int = 0
    """初始权重与抽样的种子"""
    plain: bool = False
    """用朴素的一步（fp32、eager），而不是这台机器上最快的一步"""
    data: str | None = None
    """tokens.pt 或它所在的文件夹；不给则用内置的《三国演义》"""
    name: str = "scaling"
    """结果文件的名字：results/<name>.csv 与 results/<name>_curve.csv"""

    def __post_init__(self) -> None:
        if self.steps < 4:
            raise UserError(f"--steps {self.steps} 太少：要在四个时刻验证，至少 4 步")
        for name in ("batch_size", "seq_len", "eval_batches"):
            if getattr(self, name) < 1:
                flag = name.replace("_", "-")
                raise UserError(f"--{flag} {getattr(self, name)}：要一个不小于 1 的整数")
        for name in ("lr", "clip", "warmup", "weight_decay", "seed"):
            value, positive = getattr(self, name), name in ("lr", "clip")
            if not math.isfinite(value) or value < 0 or (positive and value == 0):
                limit = "大于 0" if positive else "不小于 0"
                raise UserError(f"--{name.replace('_', '-')} {value}：要一个{limit}的有限数")
        for size in self.sizes:
            parse_size(size)

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """在走完第几步之后验证：全程的 1/4、2/4、3/4、4/4。"""
        return tuple(self.steps * k // 4 for k in (1, 2, 3, 4))


def parse_size(size: str) -> tuple[int, int]:
    """"128x4" → (128, 4)；写法不对，或 d_model 不是 32 的倍数，抛出 UserError。"""
    d_model, cross, n_layer = size.partition("x")
    if not (cross and d_model.isdecimal() and n_layer.isdecimal()):
        raise UserError(f"--sizes {size}：要写成 d_model x n_layer，例如 128x4")
    if int(d_model) % HEAD_DIM or not int(d_model) or not int(n_layer):
        raise UserError(f"--sizes {size}：d_model 要是 {HEAD_DIM} 的倍数，n_layer 至少是 1")
    return int(d_model), int(n_layer)


def build(size: str, vocab_size: int, seq_len: int, seed: int) -> GPT:
    """按大小建一个随机初始化的模型。"""
    d_model, n_layer = parse_size(size)
    torch.manual_seed(seed)
    return GPT(
        GPTConfig(
            vocab_size=vocab_size, d_model=d_model, n_head=d_model // HEAD_DIM,
            n_layer=n_layer, seq_len=seq_len,
        )
    )  # fmt: skip


def fixed_batches(data: Tensor, count: int, seq_len: int, seed: int) -> list[Batch]:
    """`count` 个固定的验证 batch，每个 32 个序列；所有模型、所有时刻都用这同一批。"""
    generator = torch.Generator().manual_seed(seed)
    return [sample_batch(data, 32, seq_len, generator) for _ in range(count)]


def train(
    model: GPT, data: Tensor, held_out: Sequence[Batch], options: Options, fast: StepOptions
) -> pd.DataFrame:
    """训练一个模型，返回逐步的表：step、lr、train_loss、val_loss（只在验证的那几步有值）、seconds。

    `data` 是一维的训练 token；`held_out` 是固定的验证 batch；loss 的单位是 nat/token。
    """
    generator = torch.Generator().manual_seed(options.seed)  # 每个模型读同样的 batch
    optimizer = adamw(model, options.lr, weight_decay=options.weight_decay)
    step = make_step(model, optimizer, fast, clip=options.clip)
    rows = []
    for i in tqdm(range(options.steps), file=sys.stderr, mininterval=2, leave=False):
        start = time.perf_counter()
        lr = learning_rate(i, peak=options.lr, warmup=options.warmup, total=options.steps)
        set_learning_rate(optimizer, lr)
        x, y = sample_batch(data, options.batch_size, options.seq_len, generator)
        loss = step(x, y).item()
        seconds = time.perf_counter() - start
        val_loss = evaluate(model, held_out) if i + 1 in options.checkpoints else None
        rows.append(
            {"step": i + 1, "lr": lr, "train_loss": loss, "val_loss": val_loss, "seconds": seconds}
        )
    return pd.DataFrame(rows)


def summarize(size: str, params: int, curve: pd.DataFrame, seconds: float) -> dict:
    """一种大小的一行结果；gap 是最后的验证 loss 减去最后 50 步的平均训练 loss。"""
    d_model, n_layer = parse_size(size)
    val = curve.dropna(subset="val_loss").set_index("step")["val_loss"]
    train_mean = fmean(curve["train_loss"].tail(TAIL))
    return {
        "d_model": d_model, "n_layer": n_layer, "params": params,
        **{f"val_{step}": loss for step, loss in val.items()},
        "train_mean": train_mean, "train_last": curve["train_loss"].iloc[-1],
        "gap": val.iloc[-1] - train_mean,
        # 第一步含编译，单列出来；ms_per_step 取中位数
        "first_step_s": curve["seconds"].iloc[0],
        "ms_per_step": curve["seconds"].median() * 1e3, "seconds": seconds,
    }  # fmt: skip


def compare(options: Options) -> tuple[pd.DataFrame, pd.DataFrame]:
    """训练每一种大小，返回（一行一种大小的表，所有曲线的长表）。"""
    data = load_tokens(options.data)
    vocab_size = data["meta"]["vocab_size"]
    held_out = fixed_batches(data["val"], options.eval_batches, options.seq_len, options.seed + 1)
    fast, reasons = (StepOptions(), []) if options.plain else best_options()
    for reason in reasons:
        print(f"提示：{reason}", file=sys.stderr)
    rows, curves = [], []
    for size in options.sizes:
        model = build(size, vocab_size, options.seq_len, options.seed)
        print(f"训练 {size}：{model.num_params():,} 个参数", file=sys.stderr)
        start = time.perf_counter()
        curve = train(model, data["train"], held_out, options, fast)
        row = summarize(size, model.num_params(), curve, time.perf_counter() - start)
        rows.append(row)
        curves.append(curve.assign(size=size, d_model=row["d_model"], params=row["params"]))
    return pd.DataFrame(rows), pd.concat(curves, ignore_index=True)


def larger_is_better(table: pd.DataFrame) -> dict[str, bool]:
    """每个检查点（列 val_*）上，参数更多的模型验证 loss 是否都更低。"""
    ordered = table.sort_values("params")
    return {
        name: bool(ordered[name].is_monotonic_decreasing and ordered[name].is_unique)
        for name in table.columns
        if name.startswith("val_")
    }


def conclusions(table: pd.DataFrame) -> list[str]:
    """由测量结果生成的几句话；换一台机器、换一份语料，话也跟着变。"""
    if len(table) < 2:
        return []
    ordered = table.sort_values("params")
    small, large = ordered.iloc[0], ordered.iloc[-1]
    final = [name for name in table.columns if name.startswith("val_")][-1]
    better = larger_is_better(table)
    failed = [name.removeprefix("val_") for name, holds in better.items() if not holds]
    return [
        f"第 {'、'.join(failed)} 步上并不是越大越好" if failed else "每个检查点上都是越大越好",
        f"参数 {large['params'] / small['params']:.1f} 倍，"
        f"最后的验证 loss 低了 {small[final] - large[final]:.3f} nat",
        f"验证与训练的差距从 {small['gap']:.3f} nat "
        f"{'扩大' if large['gap'] > small['gap'] else '变'}到 {large['gap']:.3f} nat",
    ]


def main(options: Options) -> None:
    """训练、打印、写 CSV。"""
    table, curves = compare(options)
    losses = [n for n in table.columns if n.startswith(("val_", "train_")) or n == "gap"]
    formats = dict.fromkeys(losses, "{:.3f}")
    formats |= {"first_step_s": "{:.1f}", "ms_per_step": "{:.0f}", "seconds": "{:.0f}"}
    print_table(table, formats | {"params": "{:,}"})
    for sentence in conclusions(table):
        print(f"· {sentence}")
    save_csv(table, options.name)
    save_csv(curves, f"{options.name}_curve")


if __name__ == "__main__":
    run_main(main, Options)
