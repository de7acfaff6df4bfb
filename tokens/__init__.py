"""数据：从语料到分词器，再到 tokens.pt 和抽样的 batch。

    from tokens import load_tokens, load_tokenizer

只有这里知道“默认位置上还没有数据就先准备一次”；`data` 和 `tokenizer` 只管把给定的文件读成对象。
"""

import os
from pathlib import Path

import tiktoken

from tokens import data, novel
from tokens.data import bits_per_byte, part_of
from tokens.errors import UserError
from tokens.files import expanded
from tokens.tokenizer import read_tokenizer
from tokens.windows import Batch, global_batch, held_out_batches, sample_batch, windows

__all__ = [
    "Batch", "bits_per_byte", "global_batch", "held_out_batches", "load_tokenizer", "load_tokens",
    "load_shards", "part_of", "sample_batch", "windows",
]


def load_tokens(path: str | os.PathLike | None = None, vocab_size: int | None = None) -> dict:
    """映射（不是读进）`tokens.pt`，返回 {"train": 一维张量, "val": 一维张量, "meta": dict}。

    `path` 是文件或它所在的文件夹；默认是内置语料，第一次用时自动准备（一个进程准备，其余等待）。
    张量类型和抛出的错误见 `tokens.data.read_tokens`；`vocab_size` 是模型的词表大小。
    """
    path = _find(path, "tokens.pt")
    if path.parent == data.DEFAULT and novel.outdated(data.read_meta(path)):
        from tokens.prepare import prepare_once

        prepare_once(is_ready=lambda: not novel.outdated(data.read_meta(path)))
    return data.read_tokens(path, vocab_size)


def load_shards(
    path: str | os.PathLike, vocab_size: int | None = None, verify: bool = False
) -> dict:
    """映射 `prepare.py --shards` 做的文件夹：{"train": [张量…], "val": [张量…], "meta": dict}。

    见 `tokens.shards.read_shards`。
    """
    from tokens.shards import read_shards

    return read_shards(expanded(path), vocab_size, verify)


def load_tokenizer(path: str | os.PathLike | None = None) -> tiktoken.Encoding:
    """从 `tokenizer.tiktoken`（文件，或它所在的文件夹；默认内置语料的）建 `tiktoken.Encoding`。

    文件不存在或损坏时抛 `UserError`；默认位置还没有时先准备。
    """
    return read_tokenizer(_find(path, "tokenizer.tiktoken"))


def _find(path: str | os.PathLike | None, name: str) -> Path:
    """文件或文件夹 → 存在的文件；默认位置还没有时先准备，别处没有就抛 `UserError`。"""
    path = data.DEFAULT if path is None else expanded(path).resolve()
    path = path / name if path.is_dir() else path
    if path.exists():
        return path
    if path.parent == data.DEFAULT:
        from tokens.prepare import prepare_once

        prepare_once(is_ready=path.exists)
        return path
    raise UserError(
        f"找不到 {path}；请先运行 `python tokens/prepare.py --text 文件… --out {path.parent}`。"
    )
