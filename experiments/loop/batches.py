"""训练和评估的 batch：第几步读哪些序列，是 (种子, 步数) 的纯函数。

没有迭代器的状态要存，续训就不会重读或跳过；先抽全局 batch 再分给进程，进程数与累积次数
怎么变，读到的都是同一批序列。
"""

import math
import os
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from experiments.loop.options import Options
from experiments.ranks.world import World
from experiments.training.recipe import valid_tokens
from model import IGNORE_INDEX
from tokens import Batch, load_shards, load_tokens, windows
from tokens.errors import UserError
from tokens.files import expanded
from tokens.shards import MANIFEST, Shards, is_sharded

VERIFIED = 8e9  # 字节；分片合计不超过它，每次启动就核对一遍哈希（每 GB 约一秒）
MOST_EPOCHS = 100  # 没有给 --data 时，内置的小说至多读这么多遍


def load_data(options: Options) -> dict:
    """真实的 token（一个文件或许多分片），或者随机的；两份都要够长，id 都要在词表里。"""
    if options.data == "synthetic":
        g = generator_for(options.seed, "synthetic")
        train, val = (torch.randint(options.vocab_size, (n,), generator=g) for n in (10**6, 10**5))
        data = {"train": train, "val": val, "meta": {"ids_sha256": f"synthetic-{options.seed}"}}
    elif options.data and is_sharded(path := expanded(options.data)):
        data = read_shards(path.parent if path.name == MANIFEST else path, options.vocab_size)
    else:
        data = load_tokens(options.data or None, vocab_size=options.vocab_size)
    refuse_rereading(options, len(data["train"]))
    for split in ("train", "val"):
        if len(data[split]) <= options.seq_len:
            raise UserError(
                f"{split} 只有 {len(data[split])} 个 token，不够一个窗口（seq_len + 1 = "
                f"{options.seq_len + 1}）；请减小 --seq-len 或换更长的数据。"
            )
    return data


def read_shards(folder: Path, vocab_size: int) -> dict:
    """映射许多分片，各接成一条流。哈希只由 0 号进程核对；太大就只核对大小。"""
    data = load_shards(folder, vocab_size)
    size = sum(part.nbytes for split in ("train", "val") for part in data[split])
    if os.environ.get("RANK", "0") == "0" and size <= VERIFIED:
        load_shards(folder, vocab_size, verify=True)
    return {"train": Shards(data["train"]), "val": Shards(data["val"]), "meta": data["meta"]}


def refuse_rereading(options: Options, tokens: int) -> None:
    """没有给 --data 而要把内置的小说读上百遍：多半是忘了给语料，训练之前就说。"""
    epochs = options.steps * options.global_batch_tokens / tokens
    if not options.data and epochs > MOST_EPOCHS:
        raise UserError(
            f"{options.steps} 步要把内置的小说读 {epochs:,.0f} 遍（它只有 {tokens:,} 个 token）；"
            "请用 --data 给更大的语料（python tokens/prepare.py --text …），或减小 --steps；"
            "真要这样，就写明 --data tokens/tokens.pt。"
        )


def generator_for(*key: object) -> torch.Generator:
    """由 (种子, 用途, 步数) 决定的随机数流：不记录位置，也就没有位置可丢。"""
    seed = int.from_bytes(blake2b(repr(key).encode(), digest_size=4).digest(), "big")
    return torch.Generator().manual_seed(seed)


def masked_windows(tokens: Tensor, starts: Tensor, options: Options) -> Batch:
    """从 `starts` 取窗口，x、y 各 (B, T) 的 int64；不计入的目标换成 −100。"""
    x, y = windows(tokens, starts, options.seq_len)
    return x, y.masked_fill(y == options.ignore_token, IGNORE_INDEX)


def step_batches(
    tokens: Tensor | Shards, step: int, options: Options, rank: int, size: int
) -> list[Batch]:
    """第 `step` 步里这个进程的 micro-batch。先抽整个全局 batch，再按位置分：

    第 k 个 micro-batch 的第 r 个进程拿第 k·size + r 份。所以进程数、累积次数怎么变，
    全局 batch 都是同一批序列；各进程读的一定不重样。
    一个文件里有放回地抽；许多分片则一遍一遍不放回地读，第几个序列在哪里同样是算出来的。
    """
    sequences = options.global_batch_tokens // options.seq_len
    if isinstance(tokens, Shards):
        starts = tokens.starts(step * sequences, sequences, options.seq_len, options.seed, "train")
    else:
        high, g = len(tokens) - options.seq_len, generator_for(options.seed, "train", step)
        starts = torch.randint(high, (sequences,), generator=g)
    mine = starts.split(options.micro_batch)[rank::size]
    return [masked_windows(tokens, some, options) for some in mine]


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


def evaluation_batches(
    tokens: Tensor, split: str, options: Options, readers: World
) -> Iterator[Batch]:
    """这个进程分到的固定的评估 batch：同一份数据总是同一批序列，不论模型、时刻与 micro_batch。

    每个进程给出同样多、同样大的 batch，不够的用没有有效目标的序列补齐：权重切开之后前向要通信，
    少走一次，别人就一直等；大小不变，编译过的模型也不必再编译一次。
    """
    count, micro = max(1, options.eval_tokens // options.seq_len), options.micro_batch
    starts = torch.randint(len(tokens) - options.seq_len, (count,),
                           generator=generator_for(options.seed, "evaluate", split))  # fmt: skip
    mine = starts[readers.rank :: readers.size]
    rounds = math.ceil(count / (readers.size * micro))
    padded = torch.cat((mine, starts[:1].expand(rounds * micro - len(mine))))
    for number, some in enumerate(padded.split(micro)):
        x, y = masked_windows(tokens, some, options)
        y[max(0, len(mine) - number * micro) :] = IGNORE_INDEX
        yield x, y


class Feed:
    """从第 `step` 步起，一份一份地给出 (x, y, 权重)；`prefetch` 先读好下一份，`take` 取走它。

    权重 = 进程数 ÷ 这一步全局的有效 token 数：loss 之和乘它，DDP（或 FSDP）再对进程取平均，
    得到的正是 Σ loss ÷ Σ 有效 token，不论各份、各进程的有效 token 有多不一样。
    `readers` 是读不同数据的那些进程；合切一个矩阵的几个读的是同样的，只算一个。
    """

    def __init__(self, tokens: Tensor, step: int, options: Options, readers: World) -> None:
        self.source = self._read(tokens, step, options, readers)
        self.ready: tuple[Tensor, Tensor, float] | None = None

    def prefetch(self) -> None:
        """读好下一份；已经读好就不动。"""
        if self.ready is None:
            self.ready = next(self.source)

    def take(self) -> tuple[Tensor, Tensor, float]:
        """取走下一份；没有读好就现读。"""
        self.prefetch()
        taken, self.ready = self.ready, None
        return taken

    @staticmethod
    def _read(
        tokens: Tensor, step: int, options: Options, readers: World
    ) -> Iterator[tuple[Tensor, Tensor, float]]:
        while True:
            batches = step_batches(tokens, step, options, readers.rank, readers.size)
            valid = readers.sum(torch.tensor(valid_tokens(y for _, y in batches))).item()
            for x, y in batches:
                yield (to_device(x, readers.device), to_device(y, readers.device),
                       readers.size / max(valid, 1))  # fmt: skip
            step += 1
