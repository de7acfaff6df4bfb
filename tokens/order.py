"""不放回的次序：第几个位置读第几个窗口，由种子和遍数算出来，不存一张表。

    shuffled(torch.arange(8), 8, "train", 0, 3)      # 0…7 的一个排列

一份 10 亿 token 的数据有几百万个窗口，torch.randperm 的表要几十 MB，每个进程一份，续训还得重建。
这里用带密钥的置换：Feistel 网络（Luby 与 Rackoff，1988）把 0…4ᵏ−1 一一对应到自己，落在范围外的
再走一次（cycle walking，Black 与 Rogaway，2002）。任何位置都能单独算，不论从哪里续训、几个进程。

它**不**是密码学意义上的随机，只要求看不出规律；打乱训练数据足够了。
"""

from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

ROUNDS = 4  # Luby 与 Rackoff：四轮就与随机置换难以区分


def shuffled(positions: Tensor, total: int, *key: object) -> Tensor:
    """位置（0…total−1 的 int64，任意形状）→ 窗口的号；同一个 `key` 之下是一一对应。"""
    half = np.uint64(max(1, (int(total - 1).bit_length() + 1) // 2))  # 左右两半各几位
    digest = blake2b(repr(key).encode(), digest_size=8 * ROUNDS).digest()
    keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    numbers = _feistel(positions.flatten().numpy().astype(np.uint64), half, keys)
    while len(outside := np.flatnonzero(numbers >= total)):  # 平均不到四次
        numbers[outside] = _feistel(numbers[outside], half, keys)
    return torch.from_numpy(numbers.astype(np.int64)).view(positions.shape)


def _feistel(numbers: np.ndarray, half: np.uint64, keys: np.ndarray) -> np.ndarray:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = numbers >> half, numbers & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << half) | right


def _mix(x: np.ndarray) -> np.ndarray:
    """把 64 位搅匀：SplitMix64 的收尾（Steele、Lea、Flood，2014）。"""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
