"""赛跑：达到朴素配方的验证 loss，最少要训练多久。

    python experiments/speedrun.py                        # 起跑线与纪录各一次，两三分钟
    python experiments/speedrun.py --recipes record       # 只跑纪录，不到一分钟（多半是编译）
    python experiments/speedrun.py --recipes all --seeds 10 11 12 13 14   # 整张纪录表，正式的种子
    python experiments/speedrun.py --recipes ablations --seeds 10 11 12 13 14 --name X --resume

规则：数据相同，参数量与起跑线相差不超过 1 %，在同样的 8 个固定 batch 上用 fp32 评估；
计时从取第一个 batch 起，到最后一次更新止，编译与预热在计时之前（另列一栏），评估不计时。
目标是一个常数（TARGET），检验只有一种（`ruling`），调配方用过的种子（TUNED_SEEDS）不算成绩。
每个配方在自己的进程里跑，几个配方轮流来：机器忽快忽慢时大家一起快慢。
留下 results/speedrun.csv，一行是一个配方的一个种子；`--resume` 跳过已经在里面的。
"""

import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Literal

import pandas as pd
import torch
from torch import Tensor, nn
from tqdm import tqdm

from experiments.lab.paired import Ratio, paired_ratio
from experiments.lab.results import (
    as_recipe,
    print_table,
    provenance,
    results_folder,
    run_main,
    save_csv,
)
from experiments.lab.workers import BIND, own_process
from experiments.training.recipe import adamw, evaluate, learning_rate
from experiments.training.step import StepOptions, best_options, make_step
from model import GPT, GPTConfig
from tokens import load_tokens, sample_batch
from tokens.errors import UserError

Batch = tuple[Tensor, Tensor]  # x 与 y，各 (B, T) 的 int64
HEAD_DIM = 32  # 每个注意力头的维数，与全书相同
SEQ_LEN = 128  # token；训练与评估都是这个长度
EVAL_BATCHES, EVAL_SIZE, EVAL_SEED = 8, 32, 1  # 固定的验证 batch：8 个，每个 32 个序列
PARAMS_TOLERANCE = 0.01  # 参数量与起跑线最多差这么多（相对）
TARGET = 7.13  # nat/token；2026-11-30 由朴素配方的几次运行定下（平均 7.1315），从此不再改
TUNED_SEEDS = (0, 1, 2)  # 调配方时看过的种子：它们的成绩偏好，不算数
MIN_SEEDS, MAX_P = 5, 0.01  # 要几个种子，p 值要小于多少
PRELOAD = ("experiments.training.step", "torch._inductor.compile_fx")  # 各配方共用，先导入


@dataclass(frozen=True)
class Recipe:
    """一份完整的配方；默认值就是起跑线（`scaling` 一章的 1.8 M 模型）。"""

    name: str = "base"
    change: str = "起跑线：fp32、eager、AdamW"
    d_model: int = 128
    n_layer: int = 4
    tied: bool = True  # 输出头与词嵌入共享一个矩阵
    zero_init: bool = False  # 写回残差流的矩阵（与单独的输出头）从零开始
    steps: int = 400
    batch_size: int = 16
    order: Literal["random", "epoch"] = "random"  # 有放回地抽窗口 | 一遍一遍不重复地读
    fast: bool = False  # 这台机器上最快的一步（bf16、编译、合成的交叉熵……）
    optimizer: Literal["adamw", "muon", "adam"] = "adamw"  # muon：矩阵用 Muon；adam：都用 Adam
    lr: float = 3e-3  # 只有 optimizer="adamw" 用：所有参数一个学习率
    matrix_lr: float = 0.01  # 各层的矩阵，Muon 或 Adam
    split_qkv: bool = False  # muon：q、k、v 各自正交化，而不是接成的那一个 (3d, d) 矩阵
    embed_lr: float = 0.01  # Adam，词嵌入
    head_lr: float = 0.01  # Adam，单独的输出头
    gain_lr: float = 0.01  # Adam，RMSNorm 的增益
    betas: tuple[float, float] = (0.9, 0.95)
    embed_std: float = 0.02  # 词嵌入的初始标准差
    warmup: int = 50  # 步
    decay: Literal["cosine", "linear"] = "cosine"  # 余弦到 10 % | 最后一段线性到 0
    decay_share: float = 1.0  # linear：最后多大一部分用来下降


BASE = Recipe()

_FAST = replace(BASE, name="fast", change="换成最快的一步，配方不变", fast=True)
_MUON = replace(
    _FAST, name="muon", change="矩阵用 Muon，词嵌入的学习率放大，batch 减半",
    optimizer="muon", matrix_lr=0.01, embed_lr=0.02, batch_size=8, steps=410, warmup=10,
)  # fmt: skip
_EPOCH = replace(_MUON, name="epoch", change="不重复地读数据", order="epoch", steps=320)
_SHAPE = replace(
    _EPOCH, name="schedule", change="残差支路从零开始；不预热，线性降到零；β 改为 0.8、0.99",
    zero_init=True, embed_lr=0.04, warmup=0, decay="linear", decay_share=0.8, betas=(0.8, 0.99),
    steps=250,
)  # fmt: skip
_UNTIED = replace(
    _SHAPE, name="untied", change="输出头单独一个矩阵；为此宽度减到 96，层数减到 2",
    tied=False, d_model=96, n_layer=2, embed_lr=0.1, head_lr=0.015, embed_std=0.5, steps=245,
)  # fmt: skip
RECORD = replace(
    _UNTIED, name="adam", change="矩阵也用 Adam，仍是自己的学习率；最后四成才开始降",
    optimizer="adam", matrix_lr=4e-3, decay_share=0.4, steps=216,
)  # fmt: skip
LADDER = {r.name: r for r in (BASE, _FAST, _MUON, _EPOCH, _SHAPE, _UNTIED, RECORD)}
MUON_RATES = (0.0025, 0.005, 0.01, 0.02)  # 说 Muon 没用之前，它也要调过
# 从纪录里每次拿掉一件事，读同样多的 token：看每一件值多少
ABLATIONS = {
    recipe.name: recipe
    for recipe in (
        replace(RECORD, name="no_adam", change="矩阵用 Muon", optimizer="muon", matrix_lr=0.01),
        *(replace(RECORD, name=f"muon_{rate:g}", change=f"矩阵用 Muon，q、k、v 分开，{rate:g}",
                  optimizer="muon", split_qkv=True, matrix_lr=rate) for rate in MUON_RATES),
        replace(RECORD, name="no_epoch", change="有放回地抽", order="random"),
        replace(RECORD, name="no_zero", change="残差支路与输出头不从零开始", zero_init=False),
        replace(RECORD, name="no_decay", change="预热与余弦", warmup=10, decay="cosine"),
        replace(RECORD, name="no_late", change="更早开始降（最后八成）", decay_share=0.8),
        replace(RECORD, name="no_betas", change="β 用回 0.9、0.95", betas=(0.9, 0.95)),
        replace(RECORD, name="no_b8", change="batch 加倍，步数减半", batch_size=16, steps=108),
        replace(RECORD, name="no_untied", change="输出头共享，128 × 4 层", tied=True,
                d_model=128, n_layer=4, embed_lr=0.04, embed_std=0.02),
    )
}  # fmt: skip
RECIPES = LADDER | ABLATIONS
GROUPS = {"record": {RECORD.name}, "all": set(LADDER), "ablations": {RECORD.name, *ABLATIONS}}


# --- 一次训练的零件 ---


def build(recipe: Recipe, seed: int) -> GPT:
    """按配方建模型：大小、输出头是否共享、残差支路是否从零开始。

    参数量与起跑线相差超过 1 % 时抛出 ValueError：那是另一场比赛。
    """
    torch.manual_seed(seed)
    model = GPT(
        GPTConfig(
            d_model=recipe.d_model, n_head=recipe.d_model // HEAD_DIM,
            n_layer=recipe.n_layer, seq_len=SEQ_LEN,
        )
    )  # fmt: skip
    if not recipe.tied:  # 先复制再放大：输出头的标准差总是 0.02，否则开始时的 logits 过大
        model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    with torch.no_grad():
        model.embed.weight.mul_(recipe.embed_std / 0.02)
    if recipe.zero_init:
        zero_outputs(model, recipe.tied)
    check_params(model)
    return model


@torch.no_grad()
def zero_outputs(model: GPT, tied: bool) -> None:
    """残差支路的最后一个矩阵清零：开始时每一层都是恒等映射；单独的输出头也清零。"""
    for block in model.blocks:
        block.attn.out.weight.zero_()
        block.mlp.down.weight.zero_()
    if not tied:
        model.head.weight.zero_()  # 开始时对每个 token 的预测都是均匀分布


def check_params(model: GPT) -> None:
    """比赛规则：参数量与起跑线相差不超过 1 %。"""
    base = GPT(GPTConfig()).num_params()
    if abs(model.num_params() / base - 1) > PARAMS_TOLERANCE:
        raise ValueError(f"{model.num_params():,} 个参数，起跑线是 {base:,}：相差超过 1 %")


class Together:
    """几个优化器当作一个用：各管各的参数，一起更新。

    `pieces` 是 (整个参数, 它的一段, 行) 的列表：优化器更新的是那一段（与整个参数同一块内存），
    梯度在更新之前从整个参数的梯度里取来。
    """

    def __init__(self, *optimizers: torch.optim.Optimizer, pieces: Sequence = ()) -> None:
        self.optimizers, self.pieces = optimizers, pieces
        self.param_groups = [g for o in optimizers for g in o.param_groups]

    def step(self) -> None:
        for whole, piece, rows in self.pieces:
            piece.grad = whole.grad[rows]
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)
        for whole, _, _ in self.pieces:  # 整个的那一份不归任何优化器
            whole.grad = None


def qkv_pieces(model: GPT) -> list[tuple[nn.Parameter, nn.Parameter, slice]]:
    """每层的 qkv 权重 (3d, d) 切成 q、k、v 三段，各 (d, d)，与原来的权重同一块内存。"""
    pieces = []
    for block in model.blocks:
        whole = block.attn.qkv.weight
        d = whole.size(1)
        for rows in (slice(0, d), slice(d, 2 * d), slice(2 * d, 3 * d)):
            pieces.append((whole, nn.Parameter(whole.detach()[rows]), rows))
    return pieces


def make_optimizer(model: GPT, recipe: Recipe) -> torch.optim.Optimizer | Together:
    """起跑线是 AdamW；muon 与 adam 按参数的角色分组，每组有自己的学习率。

    Muon 只管残差流里的矩阵：它把更新正交化，使每个方向走同样的步长（Jordan 2024）。
    词嵌入和输出头的一行对应一个 token，增益是向量，都不是从一个空间到另一个空间的映射，用 Adam。
    """
    if recipe.optimizer == "adamw":
        return adamw(model, recipe.lr, betas=recipe.betas, fused=recipe.fast)
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
    gains = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": [model.embed.weight], "lr": recipe.embed_lr},
        {"params": gains, "lr": recipe.gain_lr},
    ]
    if not recipe.tied:
        groups.append({"params": [model.head.weight], "lr": recipe.head_lr})
    if recipe.optimizer == "adam":
        groups.append({"params": matrices, "lr": recipe.matrix_lr})
    adam = torch.optim.AdamW(groups, betas=recipe.betas, weight_decay=0.0, fused=True)
    if recipe.optimizer == "muon":
        pieces = qkv_pieces(model) if recipe.split_qkv else []
        cut = {id(whole) for whole, _, _ in pieces}
        whole = [p for p in matrices if id(p) not in cut] + [piece for _, piece, _ in pieces]
        muon = torch.optim.Muon(whole, lr=recipe.matrix_lr, weight_decay=0.0)
        return Together(muon, adam, pieces=pieces)
    return adam


def rate_factor(step: int, recipe: Recipe) -> float:
    """第 `step` 步（从 0 数）的学习率是峰值的几倍；在 (0, 1] 之内。"""
    if recipe.decay == "cosine":
        return learning_rate(step, peak=1.0, warmup=recipe.warmup, total=recipe.steps)
    rising = (step + 1) / recipe.warmup if step < recipe.warmup else 1.0
    return min(rising, (recipe.steps - step) / (recipe.decay_share * recipe.steps))


def batches(data: Tensor, recipe: Recipe, seed: int) -> Iterator[Batch]:
    """训练 batch，没有尽头：有放回地抽，或一遍一遍不重复地读。

    不重复地读：每一遍随机错开起点，把整本书切成相连的窗口，打乱之后依次取，
    读完一遍之前没有一个 token 被当作目标两次。`data` 是一维的训练 token。
    """
    generator = torch.Generator().manual_seed(seed)
    if recipe.order == "random":
        while True:
            yield sample_batch(data, recipe.batch_size, SEQ_LEN, generator)
    starts = torch.empty(0, dtype=torch.int64)
    while True:
        while len(starts) < recipe.batch_size:
            offset = int(torch.randint(SEQ_LEN, (1,), generator=generator))
            windows = (len(data) - 1 - offset) // SEQ_LEN
            order = torch.randperm(windows, generator=generator)
            starts = torch.cat((starts, offset + SEQ_LEN * order))
        rows = starts[: recipe.batch_size, None] + torch.arange(SEQ_LEN + 1)
        starts = starts[recipe.batch_size :]
        window = data[rows].long()  # (B, T + 1)
        yield window[:, :-1].contiguous(), window[:, 1:].contiguous()


def held_out(data: Tensor) -> list[Batch]:
    """固定的验证 batch；所有配方、所有种子都用这同一批。"""
    generator = torch.Generator().manual_seed(EVAL_SEED)
    return [sample_batch(data, EVAL_SIZE, SEQ_LEN, generator) for _ in range(EVAL_BATCHES)]


# --- 跑一次 ---


def warm_up(step, model: GPT, source: Iterator[Batch]) -> float:
    """走两步再把权重放回去：编译、分配器、线程池都在这里付账；返回用掉的秒数。"""
    start = time.perf_counter()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(2):
        step(*next(source))
    model.load_state_dict(before)
    return time.perf_counter() - start


def train(recipe: Recipe, seed: int, *, threads: int | None = None) -> dict:
    """按配方训练一次，返回一行结果；`loss` 的单位是 nat/token，`seconds` 不含编译与评估。

    在各自的进程里调用：最快的一步会改动整个进程的内存分配器。
    """
    if threads:
        torch.set_num_threads(threads)
    data = load_tokens(vocab_size=GPTConfig().vocab_size)
    model = build(recipe, seed)
    fast = best_options()[0] if recipe.fast else StepOptions()
    # 预热用单独的优化器：它的动量与二阶矩不能带进比赛
    throwaway = make_step(model, make_optimizer(model, recipe), fast)
    warm_seconds = warm_up(throwaway, model, batches(data["train"], recipe, seed=10**6))
    optimizer = make_optimizer(model, recipe)
    step = make_step(model, optimizer, fast)
    losses, seconds = run_steps(recipe, step, optimizer, batches(data["train"], recipe, seed))
    return {
        "recipe": recipe.name, "seed": seed, "steps": recipe.steps,
        "tokens": recipe.steps * recipe.batch_size * SEQ_LEN, "params": model.num_params(),
        "val_loss": evaluate(model, held_out(data["val"])),
        "train_loss": sum(losses[-20:]) / len(losses[-20:]), "seconds": seconds,
        "ms_per_step": seconds / recipe.steps * 1e3, "warm_up_s": warm_seconds,
    }  # fmt: skip


def run_steps(
    recipe: Recipe, step, optimizer, source: Iterator[Batch]
) -> tuple[list[float], float]:
    """计时的那一段：从取第一个 batch 到最后一次更新。返回（每步的训练 loss，秒）。"""
    peaks = [group["lr"] for group in optimizer.param_groups]
    losses = []
    start = time.perf_counter()
    for i in tqdm(range(recipe.steps), desc=recipe.name, file=sys.stderr, mininterval=2,
                  leave=False):  # fmt: skip
        factor = rate_factor(i, recipe)
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * factor
        losses.append(step(*next(source)).item())
    return losses, time.perf_counter() - start


# --- 比赛 ---


@dataclass(frozen=True)
class Options:
    """跑哪些配方、哪些种子。"""

    recipes: tuple[str, ...] = ("base", "record")
    """配方的名字；record 是现在的纪录，all 是整张纪录表，ablations 是每次少一件事的对照"""
    seeds: tuple[int, ...] = (0,)
    """种子；正式的成绩要 5 个以上，而且不用 0、1、2（调配方时看过它们）"""
    bind: bool = False
    """把计算线程绑在核上（OMP_PROC_BIND、OMP_PLACES）；所有配方一样"""
    resume: bool = False
    """接着 results/<name>.csv：同样的配方、同样的种子已经在里面的，跳过"""
    name: str = "speedrun"
    """结果文件的名字：results/<name>.csv"""

    def __post_init__(self) -> None:
        for name in self.recipes:
            if name not in {*RECIPES, *GROUPS}:
                known = "、".join((*RECIPES, *GROUPS))
                raise UserError(f"--recipes {name}：没有这个配方；有 {known}")
        if not self.recipes or not self.seeds:
            raise UserError("--recipes 与 --seeds 都至少要有一个")

    @property
    def chosen(self) -> list[Recipe]:
        """要跑的配方，按纪录表的顺序，不重复。"""
        wanted: set[str] = set()
        for name in self.recipes:
            wanted |= GROUPS.get(name, {name})
        return [recipe for name, recipe in RECIPES.items() if name in wanted]


def race(runs: Sequence[tuple[Recipe, int]], *, bind: bool = False) -> Iterator[dict]:
    """轮流跑 `runs` 里的（配方, 种子），跑完一次就给出一行。

    每个配方一个进程，一直留着：编译只做一次，同一时刻只有一个进程在算。
    """
    threads = torch.get_num_threads()
    with ExitStack() as stack:
        pools = {
            name: stack.enter_context(
                own_process(threads=threads, env=BIND if bind else None, preload=PRELOAD)
            )
            for name in dict.fromkeys(recipe.name for recipe, _ in runs)
        }
        for recipe, seed in runs:
            row = pools[recipe.name].submit(train, recipe, seed, threads=threads).result()
            yield {**provenance(threads=threads), **row, "config": as_recipe(recipe), "bind": bind}


def already_there(name: str, runs: Sequence[tuple[Recipe, int]]) -> list[dict]:
    """`results/<name>.csv` 里属于 `runs` 的行：配方的每一项都相同，种子相同。"""
    path = results_folder() / f"{name}.csv"
    if not path.exists():
        return []
    wanted = {(as_recipe(recipe), seed) for recipe, seed in runs}
    rows = pd.read_csv(path).to_dict("records")
    return [row for row in rows if (row.get("config"), row["seed"]) in wanted]


def summarize(rows: pd.DataFrame) -> pd.DataFrame:
    """每个配方一行：平均的 loss 与用时，是起跑线的几倍速度（同一个种子是一对）和区间。"""
    table = rows.groupby("recipe", sort=False).agg(
        steps=("steps", "first"), tokens=("tokens", "first"), seeds=("seed", "count"),
        val_loss=("val_loss", "mean"), seconds=("seconds", "mean"),
        ms_per_step=("ms_per_step", "mean"), warm_up_s=("warm_up_s", "max"),
    ).reset_index()  # fmt: skip
    ratios = [speed_ratio(rows, name) for name in table["recipe"]]
    for column in ("value", "low", "high"):
        name = "speedup" if column == "value" else f"speedup_{column}"
        table[name] = [getattr(r, column) if r else math.nan for r in ratios]
    return table


def speed_ratio(rows: pd.DataFrame, name: str) -> Ratio | None:
    """配方 `name` 是起跑线的几倍速度：同一次比赛里同一个种子的用时是一对；不到两对时是 None。"""
    seconds = rows.pivot(index="seed", columns="recipe", values="seconds")
    if name == BASE.name or not {BASE.name, name} <= set(seconds):
        return None
    pairs = seconds[[BASE.name, name]].dropna()
    return paired_ratio(pairs[BASE.name], pairs[name]) if len(pairs) > 1 else None


@dataclass(frozen=True)
class Ruling:
    """按规则的裁定。`valid`：种子够不够、是不是都没有调过；`p` 没有可比的起跑线时是 nan。"""

    seeds: int
    mean: float
    p: float
    valid: bool

    @property
    def record(self) -> bool:
        """算不算一条纪录。"""
        return self.valid and self.mean <= TARGET and self.p < MAX_P

    def __str__(self) -> str:
        said = f"{self.seeds} 个种子，平均 {self.mean:.4f}（目标 {TARGET}），p = {self.p:.1e}"
        if self.valid:
            return f"{said}：{'算纪录' if self.record else '不算纪录'}"
        return f"{said}：不是正式成绩，要 {MIN_SEEDS} 个以上没有调过的种子"


def ruling(rows: pd.DataFrame, name: str, *, official: bool = True) -> Ruling:
    """裁定配方 `name`：平均 loss 不高于 TARGET，而且低于起跑线不是碰巧。

    检验只有一种：精确的秩检验（Mann–Whitney，单侧）。把 `name` 与起跑线各个种子的 loss 排在一起，
    问：如果两者其实一样，名次这么偏的排法占全部排法的几分之几。它只看名次，不假设分布。
    `official` 时去掉 TUNED_SEEDS。
    """
    from scipy.stats import mannwhitneyu

    counted = rows[~rows["seed"].isin(TUNED_SEEDS)] if official else rows
    ours = counted.loc[counted["recipe"] == name, "val_loss"]
    plain = counted.loc[counted["recipe"] == BASE.name, "val_loss"]
    p = math.nan
    if len(ours) and len(plain):
        p = float(mannwhitneyu(ours, plain, alternative="less", method="exact").pvalue)
    enough = min(len(ours), len(plain)) >= MIN_SEEDS
    return Ruling(len(ours), float(ours.mean()), p, valid=official and enough)


def say(row: dict) -> None:
    """一次训练的结果，写到 stderr。"""
    print(
        f"{row['recipe']} 种子 {row['seed']}：{row['steps']} 步 {row['seconds']:.1f} s，"
        f"验证 loss {row['val_loss']:.4f}（预热与编译另 {row['warm_up_s']:.1f} s）",
        file=sys.stderr,
    )


def main(options: Options) -> None:
    """比赛、打印、写 CSV。"""
    if any(recipe.fast for recipe in options.chosen):
        for reason in best_options()[1]:
            print(f"提示：{reason}", file=sys.stderr)
    load_tokens()  # 数据还没有时先准备好，不让它落进某个配方的时间里
    runs = [(recipe, seed) for seed in options.seeds for recipe in options.chosen]
    rows = already_there(options.name, runs) if options.resume else []
    done = {(row["config"], row["seed"]) for row in rows}
    todo = [run for run in runs if (as_recipe(run[0]), run[1]) not in done]
    if rows:
        print(f"已有 {len(rows)} 次，还要跑 {len(todo)} 次", file=sys.stderr)
    for row in race(todo, bind=options.bind):
        rows.append(row)
        say(row)
        save_csv(rows, options.name)
    table = pd.DataFrame(rows)
    formats = {"val_loss": "{:.4f}", "speedup": "{:.2f}", "speedup_low": "{:.2f}",
               "speedup_high": "{:.2f}", "seconds": "{:.1f}", "ms_per_step": "{:.1f}",
               "warm_up_s": "{:.1f}", "tokens": "{:,}"}  # fmt: skip
    print_table(summarize(table).dropna(axis=1, how="all"), formats)
    for name in dict.fromkeys(table["recipe"]):
        if name != BASE.name and BASE.name in set(table["recipe"]):
            print(f"{name}：{ruling(table, name)}")


if __name__ == "__main__":
    run_main(main, Options)
