"""激活参数与 token 数相同时，稠密与混合专家在本书语料上谁的验证 loss 低；几个种子，成对比较。

    OMP_NUM_THREADS=1 python benchmarks/experts_or_dense.py

每做完一次就追加到 results/expert_parallel_dense.csv，已有的行跳过，所以中断了可以接着跑；
提交用 `python benchmarks/promote.py expert_parallel_dense`。四种，种子与 batch 成对：

- `dense`：稠密的 SwiGLU，宽 160；
- `moe`、`moe_balanced`：8 个宽 80 的专家走 2 个，没有、有均衡项；激活参数与 `dense` 相同，
  只多出路由器的 d·E 个一层（不到 1 %，没有扣除）；
- `dense_wide`：宽 640，总参数与混合专家相同，每个 token 的计算多得多，作参照。

训练的 token、学习率曲线、裁剪都相同，学习率没有为每一种另调。一次只用一个线程。
语料还是《三国演义》，词表缩到 1024（第一次运行时准备）：词表 8192 时这么小的模型八成的参数与
计算在输出头，看不出前馈层的差别。所以这里的 loss 与别的章不能比，只在这几种之间比。
"""

from dataclasses import dataclass

import pandas as pd
import torch

from experiments.lab.results import provenance, results_folder, run_main
from experiments.training.moe import (
    Mixture,
    active_parameters,
    balance_loss,
    moe_gpt,
    moe_layers,
)
from experiments.training.recipe import (
    adamw,
    evaluate,
    learning_rate,
    seeded_gpt,
    set_learning_rate,
)
from model import GPT, GPTConfig
from tokens import global_batch, held_out_batches, load_tokens
from tokens.files import atomic_write
from tokens.prepare import Options as PrepareOptions
from tokens.prepare import prepare

NAME = "expert_parallel_dense"


@dataclass(frozen=True)
class Options:
    """稠密、无均衡项的专家、有均衡项的专家、宽的稠密，各训练几个种子。"""

    steps: int = 500
    """训练几步（次更新）"""
    rows: int = 8
    """每步几个序列（个）"""
    seq_len: int = 64
    """序列长度（token）"""
    lr: float = 3e-3
    """学习率的峰值"""
    seeds: int = 5
    """几个种子（个）"""
    vocab_size: int = 1024
    """词表（个）"""


# 宽 640 的一个专家就是稠密的 SwiGLU：只有一个可选，门恒为 1（路由器只有 d 个参数，也学不动）
MIXTURES = {
    "moe": Mixture(8, 2, 80, balance=0.0), "moe_balanced": Mixture(8, 2, 80, balance=0.01),
    "dense_wide": Mixture(1, 1, 640, balance=0.0),
}  # fmt: skip
KINDS = ("dense", *MIXTURES)


def build(kind: str, config: GPTConfig, seed: int) -> GPT:
    """`KINDS` 里的一种，初始权重由种子决定。"""
    return seeded_gpt(config, seed) if kind == "dense" else moe_gpt(config, MIXTURES[kind], seed)


def prepared(vocab_size: int) -> dict:
    """词表这么大的《三国演义》，放在结果旁边；没有就准备一次。"""
    folder = results_folder() / f"tokens_{vocab_size}"
    if not (folder / "tokens.pt").is_file():
        prepare(PrepareOptions(vocab_size=vocab_size, out=folder))
    return load_tokens(folder, vocab_size)


def one_run(kind: str, seed: int, tokens: dict, o: Options) -> dict:
    """训练一次：验证 loss、参数、激活参数、最忙的专家（最后一个验证 batch）是平均的几倍。"""
    config = GPTConfig(o.vocab_size, d_model=64, n_head=2, n_layer=2, seq_len=o.seq_len)
    model = build(kind, config, seed)
    optimizer = adamw(model, o.lr)
    for step in range(o.steps):
        set_learning_rate(optimizer, learning_rate(step, peak=o.lr, warmup=40, total=o.steps))
        x, y = global_batch(tokens["train"], step, o.rows, o.seq_len, seed)
        loss = model(x, y)[1]
        if kind != "dense":
            loss = loss + balance_loss(model, x.numel())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    val = evaluate(model, held_out_batches(tokens["val"], 8, o.seq_len, 1234))
    busy = [(m.counts.max() / m.counts.float().mean()).item() for m in moe_layers(model)]
    return {"kind": kind, "seed": seed, "val_loss": val, "params": model.num_params(),
            "active_params": active_parameters(model),
            "busiest_over_mean": max(busy, default=1.0)}  # fmt: skip


def main(o: Options) -> None:
    """跑还没有的那些，一次一行。"""
    torch.set_num_threads(1)
    path = results_folder() / f"{NAME}.csv"
    table = pd.read_csv(path) if path.is_file() else pd.DataFrame(columns=["kind", "seed"])
    tokens = prepared(o.vocab_size)
    for seed in range(o.seeds):
        for kind in KINDS:
            if ((table.kind == kind) & (table.seed == seed)).any():
                continue
            row = one_run(kind, seed, tokens, o) | provenance(o, threads=1)
            table = pd.concat([table, pd.DataFrame([row])], ignore_index=True)
            with atomic_write(path) as temporary:
                table.to_csv(temporary, index=False)
            print(f"{kind:<13} 种子 {seed}  验证 loss {row['val_loss']:.4f}", flush=True)


if __name__ == "__main__":
    run_main(main, Options)
