"""从一维 token 流里取窗口：从给定的起点、随机、固定的验证 batch、与进程数无关的全局 batch。

    x, y = sample_batch(data["train"], batch_size=16, seq_len=128, generator=generator)

x、y 都是 (B, T) 的 int64，y 比 x 晚一位：y[:, t] 是读完 x[:, :t+1] 之后该猜的 token。
"""

import torch
from torch import Tensor

from tokens.errors import UserError

Batch = tuple[Tensor, Tensor]  # x 与 y，各 (B, T) 的 int64
HELD_OUT_SIZE = 32  # 一个固定的验证 batch 有几个序列


def windows(data: Tensor, starts: Tensor, seq_len: int) -> Batch:
    """从一维的 `data` 里取起点为 `starts`（B,）的窗口；窗口要整个落在 `data` 里。

    `data` 也可以是 `tokens.shards.Shards`：许多分片接成的一条。
    """
    if isinstance(data, Tensor):
        chunk = data[starts[:, None] + torch.arange(seq_len + 1)].long()  # (B, T + 1)
    else:
        chunk = data.chunks(starts, seq_len + 1)
    return chunk[:, :-1].contiguous(), chunk[:, 1:].contiguous()


def sample_batch(
    data: Tensor, batch_size: int, seq_len: int, generator: torch.Generator | None = None
) -> Batch:
    """从一维 token 流均匀地、有放回地抽 `batch_size` 个窗口。

    `data` 不足 seq_len + 1 个 token 时抛 `UserError`。
    """
    if len(data) < seq_len + 1:
        raise UserError(
            f"这一份数据只有 {len(data)} 个 token，不够一个窗口（seq_len + 1 = {seq_len + 1}）："
            "请减小 seq_len，或准备更多文本（或更大的 --val-fraction）。"
        )
    starts = torch.randint(len(data) - seq_len, (batch_size, 1), generator=generator)
    return windows(data, starts.flatten(), seq_len)


def held_out_batches(data: Tensor, count: int, seq_len: int, seed: int) -> list[Batch]:
    """`count` 个固定的验证 batch，每个 32 个序列；同一个种子总是同一批，不论模型与时刻。"""
    generator = torch.Generator().manual_seed(seed)
    return [sample_batch(data, HELD_OUT_SIZE, seq_len, generator) for _ in range(count)]


def global_batch(data: Tensor, step: int, rows: int, seq_len: int, seed: int) -> Batch:
    """第 `step` 步的全局 batch：只由 (seed, step) 决定，与有几个进程、拆成几份无关。"""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    return sample_batch(data, rows, seq_len, generator)
