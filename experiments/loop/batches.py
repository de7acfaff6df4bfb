"""训练和评估的 batch：第几步读哪些序列，是 (种子, 步数) 的纯函数。

没有迭代器的状态要存，续训就不会重读或跳过；先抽全局 batch 再分给进程，进程数与累积次数
怎么变，读到的都是同一批序列。
"""

from collections.abc import Iterator
from hashlib import blake2b

import torch
from torch import Tensor

from experiments.loop.options import Options
from experiments.ranks.world import World
from experiments.training.recipe import valid_tokens
from model import IGNORE_INDEX
from tokens import load_tokens
from tokens.errors import UserError


def load_data(options: Options) -> dict:
    """真实的 token，或者随机的（量速度用）；两份都要够长，id 都要在词表里。"""
    if options.data == "synthetic":
        g = stream(options.seed, "synthetic")
        train, val = (torch.randint(options.vocab_size, (n,), generator=g) for n in (10**6, 10**5))
        data = {"train": train, "val": val, "meta": {"ids_sha256": f"synthetic-{options.seed}"}}
    else:
        data = load_tokens(options.data or None, vocab_size=options.vocab_size)
    for split in ("train", "val"):
        if len(data[split]) <= options.seq_len:
            raise UserError(
                f"{split} 只有 {len(data[split])} 个 token，不够一个窗口（seq_len + 1 = "
                f"{options.seq_len + 1}）；请减小 --seq-len 或换更长的数据。"
            )
    return data


def stream(*key: object) -> torch.Generator:
    """由 (种子, 用途, 步数) 决定的随机数流：不记录位置，也就没有位置可丢。"""
    seed = int.from_bytes(blake2b(repr(key).encode(), digest_size=4).digest(), "big")
    return torch.Generator().manual_seed(seed)


def windows(tokens: Tensor, starts: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """从 `starts` 取窗口，x、y 各 (B, T) 的 int64；y 比 x 晚一位，不计入的目标换成 −100。"""
    chunk = tokens[starts[:, None] + torch.arange(options.seq_len + 1)].long()
    x, y = chunk[:, :-1].contiguous(), chunk[:, 1:].contiguous()
    return x, y.masked_fill(y == options.ignore_token, IGNORE_INDEX)


def step_batches(
    tokens: Tensor, step: int, options: Options, rank: int, size: int
) -> list[tuple[Tensor, Tensor]]:
    """第 `step` 步里这个进程的 micro-batch。先抽整个全局 batch，再按位置分：

    第 k 个 micro-batch 的第 r 个进程拿第 k·size + r 份。所以进程数、累积次数怎么变，
    全局 batch 都是同一批序列；各进程读的一定不重样。
    """
    sequences = options.global_batch_tokens // options.seq_len
    high = len(tokens) - options.seq_len
    starts = torch.randint(high, (sequences,), generator=stream(options.seed, "train", step))
    return [windows(tokens, s, options) for s in starts.split(options.micro_batch)[rank::size]]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """从锁页内存异步拷贝：CPU 发出就走，不等它。

    拷贝排在计算的同一个流上，所以藏在计算后面的是 CPU 读数据，不是拷贝本身；
    一个 micro-batch 的 id 不到 1 MB，拷贝只要几十微秒，不值得另开一个流。
    """
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor


def to_host(loss: Tensor, norm: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """把两个数异步拷到锁页内存，并记下拷完的事件：等它，不等排在后面的下一步。"""
    values = torch.stack((loss, norm.to(loss.device))).to("cpu", non_blocking=True)
    copied = torch.cuda.Event() if loss.is_cuda else None
    if copied:
        copied.record()
    return values, copied


def feed(
    tokens: Tensor, start: int, options: Options, world: World
) -> Iterator[tuple[Tensor, Tensor, float]]:
    """从第 `start` 步起，依次给出 (x, y, 权重)。

    权重 = 进程数 ÷ 这一步全局的有效 token 数：loss 之和乘它，DDP 再对进程取平均，
    得到的正是 Σ loss ÷ Σ 有效 token，不论各份、各进程的有效 token 有多不一样。
    """
    step = start
    while True:
        batches = step_batches(tokens, step, options, world.rank, world.size)
        valid = world.sum(torch.tensor(valid_tokens(y for _, y in batches))).item()
        for x, y in batches:
            yield to_device(x, world.device), to_device(y, world.device), world.size / max(valid, 1)
        step += 1
