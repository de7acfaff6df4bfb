"""一次短训练：`scaling`、`speedrun` 和以后要扫一遍又一遍的各章，都从这里走。

    run = SmallRun(d_model=96, n_layer=3, seed=1)
    curve = train(run, data, {"val": held_out_batches(data["val"], 8, 128, seed=1)})

决定结果的一切都是 `SmallRun` 的字段，所以一行结果知道自己是怎么来的；`sweep` 把每次训练的
几行写进同一个 CSV，已经在里面的跳过：中断的一夜从停下的地方接着走。
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from experiments.lab.results import provenance
from experiments.training.recipe import adamw, evaluate, learning_rate, seeded_gpt
from experiments.training.step import StepOptions, best_options, make_step
from model import GPT, GPTConfig
from tokens import Batch, sample_batch, windows
from tokens.files import atomic_write

HEAD_DIM = 32  # 全书的模型每个注意力头都是 32 维；更窄的只有一个头
TAIL = 50  # 训练 loss 取最后这么多步的平均：单步的 loss 随 batch 起伏


@dataclass(frozen=True)
class SmallRun:
    """决定一次短训练结果的全部选择；默认值是全书的 1.8 M 模型、400 步。"""

    d_model: int = 128
    n_layer: int = 4
    seq_len: int = 128  # token
    batch_size: int = 16  # 序列
    steps: int = 400  # 更新次数；学习率在自己的最后一步降到底
    lr: float = 3e-3  # 峰值
    warmup: int = 50  # 步
    floor_ratio: float = 0.1  # 最低学习率与峰值之比
    weight_decay: float = 0.1  # 只用在矩阵上
    clip: float = 1.0  # 梯度范数的上限
    order: Literal["random", "epoch"] = "random"  # 有放回地抽窗口 | 一遍一遍不重复地读
    seed: int = 0  # 初始权重与抽样
    moments: int = 4  # 在全程的几等分处验证
    plain: bool = False  # 朴素的一步（fp32、eager），而不是这台机器上最快的一步
    corpus: str = ""  # 数据的名字，只为了记下来；空是内置的小说

    @property
    def size(self) -> str:
        """"128x4" 这样的写法。"""
        return f"{self.d_model}x{self.n_layer}"

    @property
    def evaluated_at(self) -> tuple[int, ...]:
        """走完第几步之后验证：全程的 1/k、2/k … k/k。"""
        return tuple(sorted({max(1, self.steps * i // self.moments)
                             for i in range(1, self.moments + 1)}))  # fmt: skip

    def config(self, vocab_size: int) -> GPTConfig:
        """模型的结构。"""
        return GPTConfig(vocab_size=vocab_size, d_model=self.d_model, n_layer=self.n_layer,
                         n_head=max(1, self.d_model // HEAD_DIM), seq_len=self.seq_len)  # fmt: skip


# ---------------------------------------------------------------- 数据的次序


def batches(data: Tensor, batch_size: int, seq_len: int, order: str, seed: int) -> Iterator[Batch]:
    """训练 batch，没有尽头；同一个种子总是同样的次序，与模型的大小无关。

    `random` 有放回地抽。`epoch` 不重复：每一遍随机错开起点，把整份数据切成相连的窗口，打乱之后
    依次取，读完一遍之前没有一个 token 被当作目标两次。`data` 是一维的训练 token。
    """
    generator = torch.Generator().manual_seed(seed)
    if order == "random":
        while True:
            yield sample_batch(data, batch_size, seq_len, generator)
    starts = torch.empty(0, dtype=torch.int64)
    while True:
        while len(starts) < batch_size:
            offset = int(torch.randint(seq_len, (1,), generator=generator))
            count = (len(data) - 1 - offset) // seq_len
            starts = torch.cat((starts, offset + seq_len * torch.randperm(count,
                                                                          generator=generator)))
        yield windows(data, starts[:batch_size], seq_len)
        starts = starts[batch_size:]


# ---------------------------------------------------------------- 一次训练


def train_steps(
    step: Callable[[Tensor, Tensor], Tensor],
    optimizer: Any,
    source: Iterator[Batch],
    *,
    steps: int,
    factor: Callable[[int], float],
    watch: Callable[[int], Mapping[str, float]] = lambda done: {},
    label: str = "",
) -> list[dict[str, float]]:
    """走 `steps` 步：定学习率、取 batch、走一步。一步一行：step、factor、train_loss、seconds。

    每个参数组的学习率 = 它开始时的值 × `factor(第几步，从 0 数)`。`watch(走完几步)` 在两步之间
    调用，返回的量并进这一行；它的时间不算在 `seconds` 里。
    """
    peaks = [group["lr"] for group in optimizer.param_groups]
    rows = []
    for i in tqdm(range(steps), desc=label, file=sys.stderr, mininterval=2, leave=False):
        start = time.perf_counter()
        now = factor(i)
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * now
        loss = step(*next(source)).item()
        seconds = time.perf_counter() - start
        row = {"step": i + 1, "factor": now, "train_loss": loss, "seconds": seconds}
        rows.append(row | dict(watch(i + 1)))
    return rows


def train(
    run: SmallRun,
    data: Mapping[str, Any],
    held_out: Mapping[str, Sequence[Batch]],
    *,
    model: GPT | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    fast: StepOptions | None = None,
) -> pd.DataFrame:
    """训练一次，返回逐步的曲线：step、lr、train_loss、seconds，验证的那几步还有 <名字>_loss。

    `data` 是 `load_tokens()` 的返回值；`held_out` 是 {名字: 固定的验证 batch}，例如
    {"val": …}；loss 的单位是 nat/token。`model` 给出时训练它（原地），否则由 `run` 造一个；
    `optimizer` 给出时用它（各组的学习率就是峰值），否则是全书的 AdamW。
    """
    model = model or seeded_gpt(run.config(data["meta"]["vocab_size"]), run.seed)
    if fast is None:
        fast = StepOptions() if run.plain else best_options()[0]
    optimizer = optimizer or adamw(model, run.lr, weight_decay=run.weight_decay)

    def watch(done: int) -> dict[str, float]:
        if done not in run.evaluated_at:
            return {}
        return {f"{name}_loss": evaluate(model, some) for name, some in held_out.items()}

    rows = train_steps(
        make_step(model, optimizer, fast, clip=run.clip), optimizer,
        batches(data["train"], run.batch_size, run.seq_len, run.order, run.seed),
        steps=run.steps, watch=watch, label=f"{run.size} 种子 {run.seed}",
        factor=lambda i: learning_rate(i, peak=1.0, warmup=run.warmup, total=run.steps,
                                       floor_ratio=run.floor_ratio),
    )  # fmt: skip
    curve = pd.DataFrame(rows)
    for name in held_out:  # 步数少于等分数时也有这一列
        if f"{name}_loss" not in curve:
            curve[f"{name}_loss"] = float("nan")
    return curve.assign(lr=run.lr * curve["factor"]).drop(columns="factor")


def moments(run: SmallRun, curve: pd.DataFrame, params: int) -> pd.DataFrame:
    """曲线 → 每个验证的时刻一行：step、tokens、各验证 loss、train_mean（此前 50 步）、累计秒数。"""
    smooth = curve["train_loss"].rolling(TAIL, min_periods=1).mean()
    table = curve.assign(train_mean=smooth, seconds=curve["seconds"].cumsum())
    table = table[table["step"].isin(run.evaluated_at)].drop(columns="lr")
    table["tokens"] = table["step"] * run.batch_size * run.seq_len
    return table.assign(params=params).reset_index(drop=True)


# ---------------------------------------------------------------- 许多次


def run_key(run: SmallRun) -> str:
    """一次训练的名片：全部字段的 JSON。两次训练的名片相同，结果就该相同。"""
    return json.dumps(asdict(run), sort_keys=True, ensure_ascii=False)


def finished(path: Path) -> set[str]:
    """CSV 里已经做完的训练。"""
    return set(pd.read_csv(path)["run"]) if path.exists() else set()


def append(path: Path, rows: pd.DataFrame) -> None:
    """把几行接到 CSV 后面（原子地重写整个文件：中断时要么有整次训练的几行，要么没有）。"""
    table = pd.concat([pd.read_csv(path), rows]) if path.exists() else rows
    with atomic_write(path) as temporary:
        table.to_csv(temporary, index=False)


def sweep(
    runs: Sequence[SmallRun],
    path: Path,
    train_one: Callable[[SmallRun], pd.DataFrame],
    *,
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
) -> pd.DataFrame:
    """依次做完 `runs`，返回 CSV 里属于它们的行；已经在 CSV 里的跳过。

    `train_one(run)` 给出一次训练的几行（如 `moments` 的结果）。每做完一次就写盘，并说出还要多久：
    按已经做完的训练每单位计算量（参数 × token）用掉的时间推算。
    CSV 的列：`train_one` 的列，`run`（名片）与其中的每个字段，出处（机器、提交、日期……）。
    """
    done = finished(path)
    todo = [run for run in runs if run_key(run) not in done]
    if len(todo) < len(runs):
        say(f"{path.name} 里已有 {len(runs) - len(todo)} 次训练，跳过；还要做 {len(todo)} 次。")
    work = [_work(run) for run in todo]
    started, paid = time.monotonic(), 0.0
    for number, run in enumerate(todo):
        rows = train_one(run)
        extra = {name: value for name, value in asdict(run).items() if name not in rows}
        where = {k: v for k, v in provenance().items() if k not in ("recipe",)}
        append(path, rows.assign(run=run_key(run), **extra, **where))
        paid += work[number]
        left = (time.monotonic() - started) / paid * sum(work[number + 1 :])
        say(f"做完 {number + 1}/{len(todo)}：{run.size} 种子 {run.seed}；"
            f"还要约 {left / 60:.0f} 分钟。")  # fmt: skip
    table = pd.read_csv(path)
    wanted = {run_key(run) for run in runs}
    return table[table["run"].isin(wanted)].reset_index(drop=True)


def _work(run: SmallRun) -> float:
    """计算量的相对大小：参数（不算词嵌入的查表，但算输出头）× token。"""
    params = 12 * run.n_layer * run.d_model**2 + 8192 * run.d_model
    return float(params * run.steps * run.batch_size * run.seq_len)


def over_seeds(run: SmallRun, seeds: Sequence[int]) -> list[SmallRun]:
    """同一次训练换几个种子。"""
    return [replace(run, seed=seed) for seed in seeds]


