"""等算力（isoFLOP）：同样的算力，模型大些、数据少些好，还是反过来？四档算力，各训六种大小。

    python experiments/isoflop.py --quick              # 内置的小说，两档很小的算力；半分钟
    python tokens/prepare.py --mix sanguo=1 poetry=4 --vocab-size 512 --out runs/isoflop
    python experiments/isoflop.py --data runs/isoflop  # 全部：72 次训练，一个核约五十分钟
    python experiments/isoflop.py --data runs/isoflop --seeds 0 --budgets 2e10

一档算力 C 里，N 个参数的模型读 D = C/(6N) 个 token；N 数全部参数（共享的词嵌入与输出头数一次）。
没有一个 token 读两遍；每次训练的学习率都在自己的最后一步降到底。
留下 results/isoflop.csv（--quick：isoflop_quick.csv），一行一次训练；做完的不重做，中断了再运行
同一条命令就接着走。拟合在 `training/law.py`，由这张表当场算。
"""

import contextlib
import math
import sys
from dataclasses import dataclass, replace

import pandas as pd
import torch

from experiments.lab.results import print_table, results_folder, run_main
from experiments.training.law import Valleys, find_valleys, valley
from experiments.training.recipe import seeded_gpt
from experiments.training.small_run import SmallRun, moments, sweep, train
from tokens import held_out_batches, load_tokens
from tokens.data import bits_per_byte
from tokens.errors import UserError
from tokens.prepare import Options as PrepareOptions
from tokens.prepare import prepare

# 一档算力（FLOPs）训哪些大小：谷底两边都要有点
LADDER = {
    2e10: ("12x1", "16x1", "20x1", "24x1", "32x1", "48x1"),
    8e10: ("16x1", "24x1", "32x1", "32x2", "48x1", "48x2"),
    3.2e11: ("24x1", "32x2", "48x1", "48x2", "64x2", "64x4"),
    1.28e12: ("48x1", "48x2", "64x2", "64x3", "64x4", "96x3"),
}
QUICK = {1e9: ("12x1", "16x1", "24x1", "32x1"), 4e9: ("12x1", "16x1", "24x1", "32x1")}
VOCAB = 512  # 词表再大，这么小的模型就几乎只剩词嵌入
SMALLEST = 2e10  # 最小的一档；batch 从它算起


@dataclass(frozen=True)
class Options:
    """四档算力，各六种大小，三个种子。"""

    budgets: tuple[float, ...] = tuple(LADDER)
    """哪几档算力（FLOPs），从 2e10、8e10、3.2e11、1.28e12 里选"""
    seeds: tuple[int, ...] = (0, 1, 2)
    """种子，决定初始权重与数据的次序"""
    quick: bool = False
    """只看个样子：内置的小说，两档 1e9 与 4e9，各四种大小，一个种子"""
    data: str | None = None
    """tokens.pt 或它所在的文件夹；不给则用内置的小说，词表 512（全部的量法读不够，会拒绝）"""
    lr_scale: float = 0.04
    """学习率的峰值 = 它 ÷ √d_model：越宽越小，各种大小同一条规则"""
    seq_len: int = 32
    """序列长度（token）"""
    eval_batches: int = 16
    """验证用几个固定的 batch（个），每个 32 个序列"""

    def __post_init__(self) -> None:
        if unknown := [budget for budget in self.budgets if budget not in LADDER]:
            known = " ".join(f"{budget:g}" for budget in LADDER)
            raise UserError(f"--budgets {unknown[0]:g}：没有这一档，只有 {known}")
        if not self.budgets or not self.seeds or min(self.seeds) < 0:
            raise UserError("--budgets 与 --seeds 各要至少一个，种子不小于 0")
        if not (math.isfinite(self.lr_scale) and self.lr_scale > 0):
            raise UserError(f"--lr-scale {self.lr_scale}：要一个大于 0 的有限数")
        for name in ("seq_len", "eval_batches"):
            if getattr(self, name) < 1:
                flag = name.replace("_", "-")
                raise UserError(f"--{flag} {getattr(self, name)}：要一个不小于 1 的整数")


# ---------------------------------------------------------------- 一档算力怎样变成几次训练


def plan(size: str, budget: float, options: Options, vocab_size: int = VOCAB) -> SmallRun:
    """一种大小在一档算力里的训练：步数由 C = 6ND 决定，取最近的整数。

    batch 随算力的平方根长（D_opt 大约也是），于是各档谷底的步数差不多：最小的一档 2 个序列，
    算力是 4 倍，batch 是 2 倍；batch 再大，小算力的训练就只走得了几十步，什么也没学到。
    预热占一成，学习率与宽度的平方根成反比。
    """
    d_model, n_layer = map(int, size.split("x"))
    run = SmallRun(
        d_model=d_model, n_layer=n_layer, seq_len=options.seq_len, order="epoch", plain=True,
        moments=1, lr=options.lr_scale / math.sqrt(d_model),
        batch_size=max(2, round(2 * math.sqrt(budget / SMALLEST))),
    )  # fmt: skip
    N = seeded_gpt(run.config(vocab_size), 0).num_params()
    steps = max(1, round(budget / (6 * N * run.batch_size * run.seq_len)))
    return replace(run, steps=steps, warmup=max(1, round(0.1 * steps)))


def runs(options: Options, corpus: str, vocab_size: int = VOCAB) -> list[tuple[float, SmallRun]]:
    """全部（算力, 训练）；先按种子，再按算力：中途停下时，做完的种子各档都齐。"""
    ladder = QUICK if options.quick else {c: LADDER[c] for c in options.budgets}
    seeds = options.seeds[:1] if options.quick else options.seeds
    base = [(budget, replace(plan(size, budget, options, vocab_size), corpus=corpus))
            for budget, sizes in ladder.items() for size in sizes]  # fmt: skip
    return [(budget, replace(run, seed=seed)) for seed in seeds for budget, run in base]


def check_fresh(planned: list[tuple[float, SmallRun]], tokens: int) -> None:
    """读得最多的一次也不能读完一遍：否则有的 token 读了两次，D 就不是「新数据」的量了。"""
    most = max(run.steps * run.batch_size * run.seq_len + run.seq_len for _, run in planned)
    if most > tokens:
        raise UserError(
            f"数据只有 {tokens:,} 个 token，读得最多的一次要 {most:,} 个，不够一遍；"
            "请用 tokens/prepare.py --mix sanguo=1 poetry=4 --vocab-size 512 --out 文件夹 "
            "准备混合的语料，再给 --data 文件夹，或只选较小的 --budgets"
        )


def load(options: Options) -> dict:
    """给定的数据；不给就是词表 512 的内置小说，放在结果旁边，没有就准备一次。"""
    if options.data:
        return load_tokens(options.data)
    folder = results_folder() / f"tokens_{VOCAB}"
    if not (folder / "tokens.pt").is_file():
        with contextlib.redirect_stdout(sys.stderr):
            prepare(PrepareOptions(vocab_size=VOCAB, out=folder))
    return load_tokens(folder, VOCAB)


def measure(options: Options, name: str) -> pd.DataFrame:
    """做完全部训练，一行一次；表里有两种 N、D、名义的与数出来的 FLOPs、每字节的 loss。"""
    data = load(options)
    meta = data["meta"]
    planned = runs(options, f"{meta['corpus']}，词表 {meta['vocab_size']}", meta["vocab_size"])
    check_fresh(planned, len(data["train"]))
    held_out = {"val": held_out_batches(data["val"], options.eval_batches, options.seq_len, 1)}
    budgets = {replace(run, seed=0): budget for budget, run in planned}

    def train_one(run: SmallRun) -> pd.DataFrame:
        model = seeded_gpt(run.config(meta["vocab_size"]), run.seed)
        rows = moments(run, train(run, data, held_out, model=model), model.num_params())
        embedding = model.embed.weight.numel()
        return rows.assign(
            budget=budgets[replace(run, seed=0)], inner=rows["params"] - embedding,
            flops=6 * rows["params"] * rows["tokens"],
            flops_counted=model.flops_per_token() * rows["tokens"],
            gflops_per_s=model.flops_per_token() * rows["tokens"] / rows["seconds"] / 1e9,
            val_bits_per_byte=bits_per_byte(rows["val_loss"], meta),
            threads=torch.get_num_threads(),
        )  # fmt: skip

    return sweep([run for _, run in planned], results_folder() / f"{name}.csv", train_one)


# ---------------------------------------------------------------- 说


def valleys(table: pd.DataFrame, column: str = "params") -> pd.DataFrame:
    """每档一行：谷底的 N 与 D，或者为什么定不出（`reason` 不空）；`column` 是 params 或 inner。"""
    rows = []
    for budget, part in table.groupby("budget"):
        row = {"budget": budget, "N": math.nan, "D": math.nan, "loss": math.nan, "reason": ""}
        try:
            row |= valley(part[column], part["val_loss"], part["tokens"])._asdict()
        except ValueError as error:
            row["reason"] = str(error)
        rows.append(row)
    return pd.DataFrame(rows)


def all_valleys(table: pd.DataFrame, column: str = "params") -> Valleys:
    """全部各档的谷底与重抽；`column` 是 params（全部参数）或 inner（不含词嵌入）。"""
    return find_valleys(table["budget"], table[column], table["val_loss"], table["tokens"])


def main(options: Options) -> None:
    """训练，打印每档的谷底与指数；定不出的说出理由。"""
    if options.quick:
        print("这是缩小的版本：一本小说，一个种子，两档很小的算力；只看个样子，不下结论。")
    table = measure(options, "isoflop_quick" if options.quick else "isoflop")
    shown = table.groupby(["budget", "params"], as_index=False).agg(
        inner=("inner", "first"), tokens=("tokens", "first"), steps=("steps", "first"),
        seeds=("seed", "count"), val_loss=("val_loss", "mean"))  # fmt: skip
    print_table(shown, {
        "budget": "{:.2g}", "params": "{:,}", "inner": "{:,}", "tokens": "{:,}",
        "val_loss": "{:.3f}"})  # fmt: skip
    for row in valleys(table).itertuples():
        print(f"· C = {row.budget:.2g}：" + (row.reason or (
            f"谷底在 N = {row.N:,.0f}、D = {row.D:,.0f}，每参数 {row.D / row.N:.1f} 个 token")))
    try:
        found = all_valleys(table).exponents()
    except ValueError as error:
        print(f"· 不拟合指数：{error}")
        return
    print(f"· N_opt ∝ C^{found.a:.2f}（{found.a_low:.2f} 到 {found.a_high:.2f}），"
          f"D_opt ∝ C^{found.b:.2f}（{found.b_low:.2f} 到 {found.b_high:.2f}）")  # fmt: skip


if __name__ == "__main__":
    run_main(main, Options)
