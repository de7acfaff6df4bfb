"""许多文件的语料：几个进程并行，一个文件一个分片，manifest.json 记下全部；中断了接着做。

    python tokens/prepare.py --text data/ --shards --workers 8 --out runs/big

三个阶段：并行读文本（规范化、分出验证），一个进程训练分词器，并行编码。每做完一个文件就留下一个标记，
同样的命令再运行一次，从没做完的文件接着做。每个文件的结果只由这个文件和分词器决定，
分词器只由全部文件决定，所以几个进程都得到同样的 id。

读的时候，`Shards` 把一份的全部分片当作一条流，按遍打乱、不放回；都是内存映射，不读进内存。
"""

import contextlib
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from tokens import texts
from tokens.data import id_dtype
from tokens.encode import encode_file, sample, unigram_entropy, unigram_loss, write_file
from tokens.errors import UserError
from tokens.files import atomic_write, sha256
from tokens.order import shuffled
from tokens.tokenizer import dump_tiktoken, read_tokenizer, train_bpe

MANIFEST = "manifest.json"
SPLITS = ("train", "val")
UNITS = ("tokens", "characters", "bytes")
VERSION = 2  # 分片的格式；改了它，旧的半成品就不接着用


@dataclass(frozen=True)
class Plan:
    """决定结果的一切；进程数不在其中。"""

    files: tuple[Path, ...]
    text_key: str
    val_fraction: float
    vocab_size: int
    sample_mb: float

    def fingerprint(self) -> str:
        """计划的指纹：选项，和每个文件的路径、大小、修改时间。"""
        stats = [(str(path.resolve()), *_stamp(path)) for path in self.files]
        options = [self.text_key, self.val_fraction, self.vocab_size, self.sample_mb, VERSION]
        return hashlib.sha256(json.dumps([options, stats]).encode()).hexdigest()[:12]


def _stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def expand(paths: Sequence[Path]) -> tuple[Path, ...]:
    """文件夹换成其中（连下层的）全部认识的文件，按路径排。

    不存在、给了两遍、文件夹里一个也没有时抛 `UserError`。
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = (p for p in path.rglob("*") if p.suffix.lower() in texts.SUFFIXES)
            files += sorted(p for p in inside if p.is_file())
        elif path.is_file():
            files.append(path)
        else:
            raise UserError(f"找不到文本文件 {path}；请检查 --text 的路径。")
    if not files:
        accepted = "、".join(texts.SUFFIXES)
        raise UserError(f"{paths[0]} 里没有 {accepted} 文件；请检查 --text 的路径。")
    if len(set(files)) < len(files):
        twice = next(path for path in files if files.count(path) > 1)
        raise UserError(f"{twice} 给了两遍：它的文字会读两遍；请去掉重复的。")
    return tuple(files)


def prepare_shards(plan: Plan, folder: Path, workers: int) -> dict:
    """在 `folder` 里做出分片、`tokenizer.tiktoken` 和 `manifest.json`，返回 manifest 的内容。

    已经做完的（同样的文件、同样的选项）直接返回；做到一半的、缺了分片的接着做。
    分片在以指纹命名的文件夹里，manifest 最后才换：换之前别人读到的总是旧的完整数据。
    """
    work, current = folder / f"shards-{plan.fingerprint()}", folder / MANIFEST
    if current.exists() and (manifest := _load(current))["folder"] == work.name:
        dtype = id_dtype(manifest["vocab_size"])
        if all(_intact(path, counts, dtype) for path, counts in _files(folder, manifest)):
            print(f"{folder} 里已经是这些文件的分片，不用再做。", file=sys.stderr)
            return manifest
    work.mkdir(exist_ok=True)
    _forget_broken(plan, work)
    tokenizer = work / "tokenizer.tiktoken"
    with _pool(min(workers, len(plan.files))) as pool:
        each(pool, "读文本", plan, work, "text", _read_one)
        if not tokenizer.exists():
            read = [work / f"{number:05}.train.txt" for number in range(len(plan.files))]
            ranks = train_bpe(sample(read, plan.sample_mb), plan.vocab_size)
            with atomic_write(tokenizer) as temporary:
                temporary.write_bytes(dump_tiktoken(ranks))
        each(pool, "编码", plan, work, "ids", _encode_one)
    manifest = _manifest(plan, work)
    with atomic_write(folder / "tokenizer.tiktoken") as temporary:
        shutil.copyfile(tokenizer, temporary)
    with atomic_write(current) as temporary:
        temporary.write_text(json.dumps(manifest, ensure_ascii=False, indent=1), encoding="utf-8")
    for other in folder.glob("shards-*"):  # 以前的分片，没做完的别的计划
        if other != work:
            shutil.rmtree(other, ignore_errors=True)
    return manifest


def _forget_broken(plan: Plan, work: Path) -> None:
    """标记说做完了、东西却不在的文件，去掉标记重做：分片被删、被截断，中间的文本被删。"""
    tokenizer = work / "tokenizer.tiktoken"
    dtype = id_dtype(read_tokenizer(tokenizer).n_vocab) if tokenizer.exists() else None
    for number in range(len(plan.files)):
        marks = [work / f"{number:05}.{stage}.json" for stage in ("ids", "text")]
        if dtype is not None and marks[0].exists():
            found = _load(marks[0])
            if all(_intact(work / f"{number:05}.{s}.bin", found[s], dtype) for s in SPLITS):
                continue
        marks[0].unlink(missing_ok=True)
        if not all((work / f"{number:05}.{split}.txt").exists() for split in SPLITS):
            marks[1].unlink(missing_ok=True)


def _intact(path: Path, counts: dict, dtype: torch.dtype) -> bool:
    return path.is_file() and path.stat().st_size == counts["tokens"] * dtype.itemsize


def _pool(workers: int) -> ProcessPoolExecutor | contextlib.nullcontext:
    """`workers` 个进程；只要一个时不另开进程，给出 None。

    用 spawn：不复制已有的线程，在各个系统上也都一样。
    """
    if workers <= 1:
        return contextlib.nullcontext()
    return ProcessPoolExecutor(workers, mp_context=get_context("spawn"))


def each(
    pool: ProcessPoolExecutor | None,
    title: str,
    plan: Plan,
    work: Path,
    stage: str,
    function: Callable[[Plan, Path, int], dict],
) -> None:
    """对还没有标记 `NNNNN.<stage>.json` 的每个文件运行 `function`，做完一个写一个标记。"""
    waiting = [n for n in range(len(plan.files)) if not (work / f"{n:05}.{stage}.json").exists()]
    sizes = [path.stat().st_size for path in plan.files]
    left = sum(sizes[number] for number in waiting)
    with tqdm(
        total=sum(sizes), initial=sum(sizes) - left, desc=title, unit="B", unit_scale=True
    ) as progress:
        for number, found in _results(pool, function, plan, work, waiting):
            _mark(work, number, stage, found)
            progress.update(sizes[number])


def _results(
    pool: ProcessPoolExecutor | None, function: Callable, plan: Plan, work: Path, numbers: list[int]
) -> Iterator[tuple[int, dict]]:
    """（文件的号，结果），先做完的先给；一个出错就不再开始别的。"""
    if pool is None:
        yield from ((number, function(plan, work, number)) for number in numbers)
        return
    running = {pool.submit(function, plan, work, number): number for number in numbers}
    try:
        for done in as_completed(running):
            yield running[done], done.result()
    except BrokenProcessPool as error:
        raise UserError(
            "一个工作进程被系统杀掉了（多半是内存不够）：请减小 --workers 再运行同样的命令，"
            "会从没做完的文件接着做。"
        ) from error
    finally:
        for future in running:
            future.cancel()


def _mark(work: Path, number: int, stage: str, content: dict) -> None:
    """写下“这个文件的这个阶段做完了”；编码做完之后，它的文本就不再需要。"""
    with atomic_write(work / f"{number:05}.{stage}.json") as temporary:
        temporary.write_text(json.dumps(content), encoding="utf-8")
    if stage == "ids":
        for split in SPLITS:
            (work / f"{number:05}.{split}.txt").unlink()


def _read_one(plan: Plan, work: Path, number: int) -> dict:
    """第 `number` 个文件 → `NNNNN.train.txt`、`NNNNN.val.txt`；返回改动的个数。"""
    names = [work / f"{number:05}.{split}.txt" for split in SPLITS]
    with names[0].open("w+b") as train, names[1].open("wb") as val:
        path = plan.files[number]
        repairs = write_file(path, plan.text_key, plan.val_fraction, train, val)
    return {"replaced_surrogates": repairs.surrogates, "skipped_nulls": repairs.nulls}


def _encode_one(plan: Plan, work: Path, number: int) -> dict:
    """`NNNNN.train.txt`、`NNNNN.val.txt` → `….bin`（小端整数）；返回各自的数。"""
    path = work / "tokenizer.tiktoken"
    tokenizer, found = read_tokenizer(path), {"tokenizer_sha256": sha256(path)}
    for split in SPLITS:
        text = work / f"{number:05}.{split}.txt"
        ids_hash = hashlib.sha256()
        with text.with_suffix(".bin").open("wb") as output:
            count, characters = encode_file(
                tokenizer, text, output, hashlib.sha256(), ids_hash, threads=1
            )
            output.flush()
            os.fsync(output.fileno())
        found[split] = {
            "tokens": int(count.sum()), "characters": characters, "bytes": text.stat().st_size,
            "largest_id": int(count.nonzero()[0].max(initial=0)), "sha256": ids_hash.hexdigest(),
        }  # fmt: skip
    return found


def _manifest(plan: Plan, work: Path) -> dict:
    """各分片的数和它们的总和；总和的键与 `tokens.pt` 的 meta 相同。"""
    vocab_size = read_tokenizer(work / "tokenizer.tiktoken").n_vocab
    numbers = range(len(plan.files))
    shards = [{"source": str(plan.files[n]), **_load(work / f"{n:05}.ids.json")} for n in numbers]
    repairs = [_load(work / f"{n:05}.text.json") for n in numbers]
    manifest = {"corpus": f"{len(shards)} 个文件", "vocab_size": vocab_size, "folder": work.name}
    for split in SPLITS:
        for unit in UNITS:
            manifest[f"{split}_{unit}"] = sum(shard[split][unit] for shard in shards)
        manifest[f"{split}_largest_id"] = max(shard[split]["largest_id"] for shard in shards)
    hashes = "".join(shard[split]["sha256"] for split in SPLITS for shard in shards)
    counts = {split: _count(work, split, len(shards), vocab_size) for split in SPLITS}
    return manifest | {
        "ids_sha256": hashlib.sha256(hashes.encode()).hexdigest(),
        "tokenizer_sha256": sha256(work / "tokenizer.tiktoken"),
        "unigram_entropy": unigram_entropy(counts["train"]),
        "unigram_val_loss": unigram_loss(counts["train"], counts["val"]),
        "sample_mb": min(plan.sample_mb, manifest["train_bytes"] / 1e6),
        "replaced_surrogates": sum(found["replaced_surrogates"] for found in repairs),
        "skipped_nulls": sum(found["skipped_nulls"] for found in repairs),
        "parts": {},
        "shards": shards,
    }


def _count(work: Path, split: str, shards: int, vocab_size: int) -> np.ndarray:
    """`split` 的全部分片里各 id 的次数，长 `vocab_size`；一块一块地读。"""
    dtype = np.dtype("<u2" if id_dtype(vocab_size) == torch.uint16 else "<i4")
    total = np.zeros(vocab_size, dtype=np.int64)
    for number in range(shards):
        with (work / f"{number:05}.{split}.bin").open("rb") as file:
            while block := file.read(1 << 22):
                total += np.bincount(np.frombuffer(block, dtype), minlength=vocab_size)
    return total


def _load(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} 读不出来：请删掉它，重新运行 prepare.py --shards。") from error


def _files(folder: Path, manifest: dict) -> list[tuple[Path, dict]]:
    """（分片文件，manifest 里它的数），先全部训练，再全部验证。"""
    base = folder / manifest["folder"]
    return [
        (base / f"{number:05}.{split}.bin", shard[split])
        for split in SPLITS
        for number, shard in enumerate(manifest["shards"])
    ]


def is_sharded(path: Path) -> bool:
    """`path` 是不是 `prepare.py --shards` 的结果：它的文件夹，或者其中的 manifest.json。

    文件夹里同时有 tokens.pt 时抛 `UserError`：不猜要哪一份。
    """
    if path.name == MANIFEST:
        return True
    if not path.is_dir() or not ((path / MANIFEST).exists() or any(path.glob("shards-*"))):
        return False
    if (path / "tokens.pt").exists():
        raise UserError(
            f"{path} 里既有 tokens.pt 又有分片；请写明要哪一份：--data {path / 'tokens.pt'} 或 "
            f"--data {path / MANIFEST}。"
        )
    return True


def read_shards(folder: Path, vocab_size: int | None = None, verify: bool = False) -> dict:
    """映射 `folder` 里的分片，返回 {"train": [一维张量…], "val": [一维张量…], "meta": manifest}。

    张量类型 uint16 或 int32，次序是准备时文件的次序。`verify` 时把每个分片读一遍，核对它的哈希。
    没有 manifest、缺分片、大小不对、与分词器不配套、id 超出 `vocab_size` 时抛 `UserError`。
    """
    if not (folder / MANIFEST).is_file():
        raise UserError(f"{folder} 里没有 {MANIFEST}：请先运行 prepare.py --shards，或等它做完。")
    manifest = _load(folder / MANIFEST)
    try:
        _check_manifest(folder, manifest, vocab_size or manifest["vocab_size"])
        dtype, files = id_dtype(manifest["vocab_size"]), _files(folder, manifest)
        mapped = [_map(path, counts, dtype, verify) for path, counts in files]
    except (KeyError, TypeError, IndexError) as error:
        raise UserError(f"{folder / MANIFEST} 里缺东西（{error}）：请重新准备数据。") from error
    count = len(manifest["shards"])
    return {"train": mapped[:count], "val": mapped[count:], "meta": manifest}


def _check_manifest(folder: Path, manifest: dict, vocab_size: int) -> None:
    """全部分片、分词器与模型说的是同一个词表；不是就抛 `UserError`。"""
    tokenizer, mine = folder / "tokenizer.tiktoken", manifest["tokenizer_sha256"]
    if not tokenizer.exists() or sha256(tokenizer) != mine:
        raise UserError(f"{folder} 的分片与 tokenizer.tiktoken 不配套：请重新准备数据。")
    for number, shard in enumerate(manifest["shards"]):
        if (theirs := shard.get("tokenizer_sha256", mine)) != mine:  # 旧的 manifest 没有记
            raise UserError(
                f"{folder} 里的第 {number} 个分片（{shard.get('source')}）是用另一个分词器编的"
                f"（{theirs[:12]}…，别的是 {mine[:12]}…）：同一个 id 是两个词；"
                "请把这些文件放在一起重新准备。"
            )
    largest = max(manifest["train_largest_id"], manifest["val_largest_id"])
    if largest >= vocab_size:
        raise UserError(
            f"{folder} 里有 id {largest}，但词表只有 {vocab_size} 个词条："
            f"请把模型的 vocab_size 设为至少 {largest + 1}，或重新准备数据。"
        )


def _map(path: Path, counts: dict, dtype: torch.dtype, verify: bool) -> torch.Tensor:
    again = "请运行准备数据时的那条命令，只有这一个文件会重做。"
    if not path.is_file():
        raise UserError(f"缺分片 {path}：{again}")
    if not _intact(path, counts, dtype):
        expected = counts["tokens"] * dtype.itemsize
        raise UserError(
            f"分片 {path} 应为 {expected} 字节，实为 {path.stat().st_size} 字节：{again}"
        )
    if verify and sha256(path) != counts["sha256"]:
        raise UserError(f"分片 {path} 的哈希与 {MANIFEST} 里的不符，已经损坏：请删掉它，{again}")
    if not counts["tokens"]:  # 太短的文件分不出验证部分；空文件不能映射
        return torch.empty(0, dtype=dtype)
    return torch.from_file(str(path), shared=False, size=counts["tokens"], dtype=dtype)


class Shards:
    """一份数据（train 或 val）的全部分片，首尾相接成一条流；什么也不读进内存。

    窗口可以跨过分片的边界，正如它可以跨过一个文件里两篇文章的边界。
    """

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        self.parts = [part for part in parts if len(part)]
        lengths = torch.tensor([0, *map(len, self.parts)])
        self.edges = lengths.cumsum(0)  # 各分片在流里的起点，末尾是总长

    def __len__(self) -> int:
        """token 数。"""
        return int(self.edges[-1])

    def starts(self, first: int, count: int, seq_len: int, *key: object) -> torch.Tensor:
        """从第 `first` 个序列起的 `count` 个序列的起点，(count,) 的 int64；由 `key` 打乱。

        流切成首尾相接的窗口，每一遍里每个窗口恰好出现一次，次序每遍不同；要至少有一个窗口。
        """
        total = (len(self) - 1) // seq_len  # 最后一个窗口还要多一个 token 作目标
        positions = torch.arange(first, first + count)
        numbers = torch.empty_like(positions)
        for epoch in range(first // total, (first + count - 1) // total + 1):
            inside = positions // total == epoch
            numbers[inside] = shuffled(positions[inside] % total, total, *key, epoch)
        return numbers * seq_len

    def chunks(self, starts: torch.Tensor, length: int) -> torch.Tensor:
        """从 `starts`（B,）起各取 `length` 个 token，(B, length) 的 int64。"""
        out = torch.empty(len(starts), length, dtype=torch.int64)
        numbers = torch.searchsorted(self.edges, starts, right=True) - 1  # 各落在哪个分片
        offsets = starts - self.edges[numbers]
        for row, number, offset in zip(out, numbers.tolist(), offsets.tolist(), strict=True):
            filled = 0
            while filled < length:  # 多半一次；跨过边界时接着读下一个分片
                piece = self.parts[number][offset : offset + length - filled]
                row[filled : filled + len(piece)] = piece
                filled, offset, number = filled + len(piece), 0, number + 1
        return out
