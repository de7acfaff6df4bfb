"""`experiments/loop/batches.py` 的断言：batch 是步数的纯函数，与进程数、累积次数无关。"""

import torch
from tiny_training import tiny

from experiments.loop.batches import generator_for, masked_windows, step_batches
from experiments.loop.options import Options
from model import IGNORE_INDEX


def global_batch(tokens, step: int, options: Options, size: int) -> torch.Tensor:
    """把各进程、各 micro-batch 的序列按全局次序放回去，(序列数, T)。"""
    ranks = [step_batches(tokens, step, options, rank, size) for rank in range(size)]
    return torch.cat([x for group in zip(*ranks, strict=True) for x, _ in group])


def test_same_global_batch_for_any_ranks_and_accumulation(tmp_path):
    """1、2、4 个进程，micro-batch 2、4、8：第 s 步的全局 batch 都是同样的序列、同样的次序。"""
    tokens = torch.randint(256, (5000,), generator=generator_for(0, "test"))
    for step in (0, 7):
        wanted = global_batch(tokens, step, tiny(tmp_path), 1)
        assert wanted.shape == (16, 32)
        for size in (1, 2, 4):
            for micro in (1, 2, 4):
                got = global_batch(tokens, step, tiny(tmp_path, micro_batch=micro), size)
                assert torch.equal(got, wanted), (step, size, micro)


def test_ranks_steps_and_seeds_read_different_data(tmp_path):
    """两个进程没有一个相同的序列；步数或种子一变，batch 就变（不会每个 epoch 重放同一个次序）。"""
    tokens = torch.arange(60_000)
    options = tiny(tmp_path)
    ranks = [step_batches(tokens, 3, options, rank, 2) for rank in (0, 1)]
    mine, other = (torch.cat([x for x, _ in batches]) for batches in ranks)
    assert not set(mine[:, 0].tolist()) & set(other[:, 0].tolist())
    base = global_batch(tokens, 3, options, 1)
    assert not torch.equal(base, global_batch(tokens, 4, options, 1))
    assert not torch.equal(base, global_batch(tokens, 3, tiny(tmp_path, seed=1), 1))


def test_windows_shift_by_one_and_mask(tmp_path):
    """y 比 x 晚一位；等于 ignore_token 的目标换成 −100，输入不动。"""
    tokens = torch.arange(100).to(torch.uint16)
    x, y = masked_windows(tokens, torch.tensor([3, 10]), tiny(tmp_path, ignore_token=12))
    assert torch.equal(x[0], torch.arange(3, 35)) and x.dtype == torch.int64
    assert y[0, 0] == 4 and y[0, 8] == IGNORE_INDEX and x[0, 9] == 12
    assert (y == IGNORE_INDEX).sum() == 2
