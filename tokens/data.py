"""训练时用的数据：给定的 tokens.pt → 核对过的张量。

    data = read_tokens(Path("runs/novels/tokens.pt"), vocab_size=8192)

这里**不**找默认位置，也不准备数据：那是 `tokens.load_tokens` 的事。
"""

import hashlib
import math
import pickle
from pathlib import Path

import numpy as np
import torch

from tokens.errors import UserError

DEFAULT = Path(__file__).parent
_CHUNK = 1 << 22  # 检查 id 时每次看多少个


def id_dtype(vocab_size: int) -> torch.dtype:
    """装得下 0…vocab_size−1 的最省的类型：至多 65,536 个词条用 uint16，再多用 int32。"""
    return torch.uint16 if vocab_size <= 1 << 16 else torch.int32


def read_tokens(path: Path, vocab_size: int | None = None) -> dict:
    """映射（不是读进）文件 `path`，返回 {"train": 一维张量, "val": 一维张量, "meta": dict}。

    张量类型 uint16 或 int32；每个 id 都小于 `vocab_size`（模型的词表；None 则取文件里写的）。
    文件损坏、与同一文件夹里的分词器不配套、id 超出词表时抛 `UserError`。
    """
    data = _read(path)
    _check_pair(path, data["meta"])
    _check_ids(path, data["meta"], vocab_size or data["meta"]["vocab_size"])
    return data


def read_meta(path: Path) -> dict:
    """只要 meta：不核对分词器和 id。文件损坏时抛 `UserError`。"""
    return _read(path)["meta"]


def part_of(data: dict, split: str, corpus: str) -> torch.Tensor:
    """混合的数据里，`split`（train 或 val）属于语料 `corpus` 的那一段。

    没有这个语料时抛 `UserError`。
    """
    begin = 0
    for name, part in data["meta"].get("parts", {}).items():
        if name == corpus:
            return data[split][begin : begin + part[f"{split}_tokens"]]
        begin += part[f"{split}_tokens"]
    raise UserError(_no_corpus(data["meta"], corpus))


def bits_per_byte(loss: float, meta: dict, split: str = "val", corpus: str | None = None) -> float:
    """每个 token 的损失（nat）换算成每个 UTF-8 字节的损失（bit）：换了分词器也可以比。

    loss ÷ ln 2 × token 数 ÷ 字节数，取 `split`（给了 `corpus` 就是其中那个语料）自己的数。
    meta 里没有这些数（旧版本或别处准备的）、没有这个语料时抛 `UserError`。
    """
    counts = meta if corpus is None else meta.get("parts", {}).get(corpus)
    if counts is None:
        raise UserError(_no_corpus(meta, corpus))
    if f"{split}_bytes" not in counts:
        raise UserError(f"数据的 meta 里没有 {split}_bytes，算不出每字节的损失：请重新准备数据。")
    return loss / math.log(2) * counts[f"{split}_tokens"] / counts[f"{split}_bytes"]


def _no_corpus(meta: dict, corpus: str) -> str:
    names = "、".join(meta.get("parts", {})) or "没有分开记，请重新准备"
    return f"数据里没有语料 {corpus!r}（有：{names}）。"


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


def _check_pair(path: Path, meta: dict) -> None:
    """同一文件夹里的分词器必须就是编出这些 id 的那一个。"""
    tokenizer = path.with_name("tokenizer.tiktoken")
    expected = meta.get("tokenizer_sha256")
    if expected is None or not tokenizer.exists():
        return
    if hashlib.sha256(tokenizer.read_bytes()).hexdigest() != expected:
        raise UserError(f"{path} 与同一文件夹里的 tokenizer.tiktoken 不配套：请重新准备数据。")


def _check_ids(path: Path, meta: dict, vocab_size: int) -> None:
    """最大的 id 在准备时就记进了 meta；只有旧版本准备的、别处来的文件才扫一遍。"""
    for name in ("train", "val"):
        low, high = 0, meta.get(f"{name}_largest_id")
        if high is None:
            low, high = scan_ids(path, name)
        if low < 0 or high >= vocab_size:
            raise UserError(
                f"{path} 的 {name} 里有 id {high}（最小 {low}），"
                f"但词表只有 {vocab_size} 个词条（0…{vocab_size - 1}）："
                f"请把模型的 vocab_size 设为至少 {high + 1}，或重新准备数据。"
            )


def scan_ids(path: Path, name: str) -> tuple[int, int]:
    """扫一遍 `name` 那一份，返回最小和最大的 id。

    用另一个映射，扫完就解除，不让这些页算在进程的常驻内存里。
    """
    ids = torch.load(path, mmap=True, weights_only=True)[name].numpy()
    chunks = (ids[i : i + _CHUNK] for i in range(0, len(ids), _CHUNK))
    low, high = np.array([(chunk.min(), chunk.max()) for chunk in chunks], dtype=np.int64).T
    return int(low.min()), int(high.max())
