"""训练时用的数据：映射 tokens.pt，核对它。

    from tokens import load_tokens

    data = load_tokens(vocab_size=8192)
"""

import hashlib
import os
import pickle
from pathlib import Path

import numpy as np
import torch

from tokens import novel
from tokens.errors import UserError

DEFAULT = Path(__file__).parent
_CHUNK = 1 << 22  # 检查 id 时每次看多少个


def id_dtype(vocab_size: int) -> torch.dtype:
    """装得下 0…vocab_size−1 的最省的类型：至多 65,536 个词条用 uint16，再多用 int32。"""
    return torch.uint16 if vocab_size <= 1 << 16 else torch.int32


def load_tokens(path: str | os.PathLike | None = None, vocab_size: int | None = None) -> dict:
    """映射（不是读进）`tokens.pt`，返回 {"train": 一维张量, "val": 一维张量, "meta": dict}。

    `path` 是文件或它所在的文件夹；默认是内置语料，第一次用时自动准备（一个进程准备，其余等待）。
    张量类型 uint16 或 int32；每个 id 都核对过小于 `vocab_size`（模型的词表；None 则取文件里写的）。
    文件不存在、损坏、与分词器不配套、id 超出词表时抛 `UserError`。
    """
    path = resolve(path, "tokens.pt")
    data = _read(path)
    if path.parent == DEFAULT and _outdated(data["meta"]):
        from tokens.prepare import prepare_once

        prepare_once(is_ready=lambda: not _outdated(_read(path)["meta"]))
        data = _read(path)
    _check_pair(path, data["meta"])
    _check_ids(path, vocab_size or data["meta"]["vocab_size"])
    return data


def resolve(path: str | os.PathLike | None, name: str) -> Path:
    """文件或文件夹 → 存在的文件；默认位置还没有时先准备，别处没有就抛 `UserError`。"""
    path = DEFAULT if path is None else Path(path).resolve()
    path = path / name if path.is_dir() else path
    if path.exists():
        return path
    if path.parent == DEFAULT:
        from tokens.prepare import prepare_once

        prepare_once(is_ready=path.exists)
        return path
    raise UserError(
        f"找不到 {path}；请先运行 `python tokens/prepare.py --text 文件… --out {path.parent}`。"
    )


def _read(path: Path) -> dict:
    try:
        data = torch.load(path, mmap=True, weights_only=True)
        good = all(data[name].dim() == 1 and len(data[name]) for name in ("train", "val"))
        good = good and data["meta"]["vocab_size"] > 0
    except (RuntimeError, pickle.UnpicklingError, EOFError, OSError, ValueError) as error:
        raise UserError(_broken(path)) from error
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} 里不是 train、val、meta：请用 tokens/prepare.py 准备。") from error
    if not good:
        raise UserError(_broken(path))
    return data


def _broken(path: Path) -> str:
    return (
        f"{path} 损坏或不完整：请删掉它，再重新运行 `python tokens/prepare.py`"
        "（自己的语料加上原来的 --text 和 --out）。"
    )


def _outdated(meta: dict) -> bool:
    """默认位置上的内置语料是否由旧版本的代码准备；读者自己的语料不在此列。"""
    standard = meta.get("corpus") == novel.PACKAGE and meta["vocab_size"] == novel.VOCAB_SIZE
    return standard and meta.get("ids_sha256") != novel.IDS_SHA256


def _check_pair(path: Path, meta: dict) -> None:
    """同一文件夹里的分词器必须就是编出这些 id 的那一个。"""
    tokenizer = path.with_name("tokenizer.tiktoken")
    expected = meta.get("tokenizer_sha256")
    if expected is None or not tokenizer.exists():
        return
    if hashlib.sha256(tokenizer.read_bytes()).hexdigest() != expected:
        raise UserError(f"{path} 与同一文件夹里的 tokenizer.tiktoken 不配套：请重新准备数据。")


def _check_ids(path: Path, vocab_size: int) -> None:
    """扫一遍所有 id。用另一个映射，扫完就解除，不让这些页算在进程的常驻内存里。"""
    scan = torch.load(path, mmap=True, weights_only=True)
    for name in ("train", "val"):
        ids = scan[name].numpy()
        chunks = (ids[i : i + _CHUNK] for i in range(0, len(ids), _CHUNK))
        low, high = np.array([(chunk.min(), chunk.max()) for chunk in chunks], dtype=np.int64).T
        if low.min() < 0 or high.max() >= vocab_size:
            raise UserError(
                f"{path} 的 {name} 里有 id {high.max()}（最小 {low.min()}），"
                f"但词表只有 {vocab_size} 个词条（0…{vocab_size - 1}）："
                f"请把模型的 vocab_size 设为至少 {high.max() + 1}，或重新准备数据。"
            )
