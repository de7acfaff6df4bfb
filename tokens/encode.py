"""文本怎样流过磁盘：规范化的行 → 训练与验证两个文本文件 → 分块 → 一串 id，内存有界。

`prepare` 和 `shards` 用这些零件；这里**不**认识选项，也不决定文件放在哪里。
"""

import mmap
import shutil
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import numpy as np
import tiktoken
import torch
from tqdm import tqdm

from tokens import texts
from tokens.data import id_dtype
from tokens.errors import UserError

BLOCK = 1 << 19  # 每块约 512 KiB 文本，在段落之间切开
THREADS = 4  # 一批 4 块，每块一个线程


def write_file(
    path: Path, text_key: str, fraction: float, train: BinaryIO, val: BinaryIO
) -> texts.Repairs:
    """一个文件规范化的文本接在 `train`（要能读写）后面，末尾约 `fraction` 移到 `val`。

    返回改了什么、略过了什么；有的话也在 stderr 上说一句。
    """
    begin, repairs = train.tell(), texts.Repairs()
    write_lines(texts.read_lines(path, text_key, repairs), train)
    if said := str(repairs):
        tqdm.write(f"{path}：{said}。", file=sys.stderr)
    move_tail(train, val, begin, fraction, path)
    return repairs


def document_lines(documents: Iterable[str]) -> Iterator[str]:
    """各篇规范化的行，篇与篇之间一个空行。"""
    for document in documents:
        yield from texts.normalise(document)
        yield ""


def write_lines(lines: Iterable[str], file) -> None:
    """每行加换行写出；连着的空行只留一个，开头的不留。"""
    previous = ""
    for line in lines:
        if line or previous:
            file.write(line.encode() + b"\n")
        previous = line


def move_tail(train, val, begin: int, fraction: float, path: Path) -> None:
    """把 `train` 从 `begin` 起的最后一份（约 `fraction`）移到 `val`。

    在两篇文档之间切：一条记录不会一半训练、一半验证；整个文件只有一篇时才在段落之间切。
    """
    end = train.tell()
    if end == begin:
        raise UserError(f"{path} 里没有文字：请检查文件内容（以及 --text-key）。")
    cut = find_cut(train, begin, end, fraction)
    if cut is None:
        raise UserError(
            f"{path} 只有 {end - begin} 字节，按 --val-fraction {fraction} 在段落之间分不出"
            "训练和验证两份：请给更多文本（分成多个段落），或改这个比例。"
        )
    train.seek(cut)
    shutil.copyfileobj(train, val)
    train.seek(cut)
    train.truncate()


def find_cut(file, begin: int, end: int, fraction: float) -> int | None:
    """`begin` 与 `end` 之间离目标最近的一篇的开头；只有一篇就是下一段的开头；没有就是 None。"""
    target = begin + int((end - begin) * (1 - fraction))
    file.flush()
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        # 各篇之后有一个空行，篇内没有空行
        found = (text.rfind(b"\n\n", begin, target), text.find(b"\n\n", target - 1, end))
        starts = [at + 2 for at in found if at >= 0 and at + 2 < end]
        if starts:
            return min(starts, key=lambda start: abs(start - target))
        at = text.find(b"\n", target, end)
        return at + 1 if at >= 0 and text[at + 1 : end].strip() else None


def blocks(path: Path) -> Iterator[bytes]:
    """文件分块，每块约 `BLOCK` 字节，只在一段（及其后的空行）之后切。

    切点落在分词模式本来就断开的地方，所以分块编码与整篇编码得到同样的 id。
    """
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            block += file.readline()
            while file.peek(1)[:1] == b"\n":
                block += file.read(1)
            yield block


def sample(paths: list[Path], megabytes: float) -> Iterator[str]:
    """训练分词器的样本：文本不超过 `megabytes` 就是全部，否则均匀地取若干块。逐行给出。"""
    size = sum(path.stat().st_size for path in paths)
    keep = min(1.0, megabytes * 1e6 / size) if size else 1.0
    print(f"训练分词器：{keep * size / 1e6:.2f} MB 样本……", file=sys.stderr)
    taken = 0.0
    every = (block for path in paths for block in blocks(path))
    for number, block in enumerate(every, start=1):
        if number * keep - taken >= 1 - 1e-9 or keep == 1.0:
            taken += 1
            yield from block.decode().splitlines(keepends=True)


def encode_file(
    tokenizer: tiktoken.Encoding,
    text: Path,
    output: BinaryIO,
    text_hash,
    ids_hash,
    threads: int = THREADS,
) -> tuple[np.ndarray, int]:
    """`text` 的 id 以小端整数写进 `output`；返回各 id 的次数（长 n_vocab）和字符数。"""
    dtype = np.dtype("<u2" if id_dtype(tokenizer.n_vocab) == torch.uint16 else "<i4")
    counts = np.zeros(tokenizer.n_vocab, dtype=np.int64)
    characters = 0
    size = text.stat().st_size
    quiet = threads == 1  # 几个进程各编各的时候，进度由主进程按文件报
    progress = tqdm(total=size, desc=f"编码 {text.stem}", unit="B", unit_scale=True, disable=quiet)
    # 固定的几个线程：tiktoken 自己的批量接口每批都开新线程，各留一份正则缓存，内存会慢慢涨。
    with ThreadPoolExecutor(threads) as pool, progress:
        for batch in batched(blocks(text), threads):
            strings = [block.decode() for block in batch]
            encoded = pool.map(tokenizer.encode_ordinary, strings)
            ids = np.concatenate([np.array(block, dtype=dtype) for block in encoded])
            output.write(ids.tobytes())
            text_hash.update(b"".join(batch))
            ids_hash.update(ids.tobytes())
            counts += np.bincount(ids, minlength=len(counts))
            characters += sum(map(len, strings))
            progress.update(sum(map(len, batch)))
    return counts, characters


def batched(items: Iterable, size: int) -> Iterator[list]:
    """每 `size` 个一组（itertools.batched 要 Python 3.12）。"""
    group: list = []
    for item in items:
        group.append(item)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def unigram_entropy(counts: np.ndarray) -> float:
    """只看词频、不看上下文时每个 token 的熵，nat：H = −Σ p ln p（Shannon 1948）。"""
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def unigram_loss(train: np.ndarray, val: np.ndarray) -> float:
    """用训练部分的词频去猜验证部分，每个 token 的损失，nat。

    次数各加一（Laplace 平滑），否则训练里没出现过的 token 损失无穷大。
    """
    p = (train + 1) / (train.sum() + len(train))
    return float(-(val * np.log(p)).sum() / val.sum())
