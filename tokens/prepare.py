"""准备训练数据：语料 → 字节级 BPE 分词器 → tokens.pt。

    python tokens/prepare.py
    python tokens/prepare.py --text 红楼梦.txt 水浒传.txt --out runs/novels
    python tokens/prepare.py --text corpus.jsonl --text-key content --out runs/big
    python tokens/prepare.py --mix sanguo=1 poetry=3 --out runs/mixture
    python tokens/prepare.py --text data/ --shards --out runs/big

得到两个文件：tokenizer.tiktoken（tiktoken 格式的词表）和 tokens.pt（train、val、meta）。
内存有界：文本分块读，分块编码，id 先写到临时文件；内存占用不随文本变大。
"""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import os
import shutil
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import filelock
import numpy as np
import torch
from torch.serialization import skip_data
from tqdm import tqdm

from tokens import data, mixture, novel, poetry, shards
from tokens.data import id_dtype
from tokens.encode import (
    document_lines,
    encode_file,
    sample,
    unigram_entropy,
    unigram_loss,
    write_file,
    write_lines,
)
from tokens.errors import UserError, tolerate_narrow_output
from tokens.files import atomic_write, describe_write_error, expanded, sha256
from tokens.tokenizer import dump_tiktoken, encoding, train_bpe


@dataclass(frozen=True)
class Options:
    text: tuple[Path, ...] = ()
    """自己的语料，一个或多个文件（.txt（UTF-8）、.jsonl、.parquet）或文件夹。不给就用内置的语料。"""
    corpus: Literal["sanguo", "poetry"] = "sanguo"
    """内置的语料：sanguo 是《三国演义》，poetry 是三十余万首唐宋诗词（要 npm 和 opencc）。"""
    mix: tuple[str, ...] = ()
    """混合几个内置的语料，各写 语料=比例（按训练文本的字节）；给了它就不看 --corpus。"""
    poetry_tgz: Path | None = None
    """自己下载的 chinese-poetry-2.0.1.tgz；不给就用 npm 下载一次，留在 tokens/.cache。"""
    traditional: bool = False
    """诗词不转成简体，保留原来的字（多是繁体）；不需要 opencc。"""
    text_key: str = "text"
    """jsonl 的字段名、parquet 的列名：正文在哪里。"""
    vocab_size: int = novel.VOCAB_SIZE
    """词表大小，个；至少 256（全部字节）。"""
    val_fraction: float = 0.1
    """每个文件末尾留作验证的比例，0 与 1 之间。内置语料不用它：它们的验证部分是固定的。"""
    sample_mb: float = 10.0
    """训练分词器用的样本上限，MB（UTF-8）：训练部分更大时，均匀地取这么多。"""
    shards: bool = False
    """文件很多、很大时：几个进程并行，一个文件一个分片，加一份 manifest.json，中断了接着做。"""
    workers: int = 0
    """做分片的进程数；0 是 CPU 的核数。结果与它无关。"""
    out: Path | None = None
    """输出文件夹；默认 tokens/。改了语料、词表或样本时必须给，免得悄悄换掉全书共用的数据。"""


def main(options: Options) -> None:
    """准备一次，打印一张表。"""
    meta = prepare(options)
    print_summary(meta)


def prepare(options: Options) -> dict:
    """在锁的保护下准备数据，返回 `tokens.pt` 里的 meta。同时来的进程依次进行，互不破坏。"""
    options = dataclasses.replace(
        options,
        text=tuple(map(expanded, options.text)),
        out=options.out and expanded(options.out),
        poetry_tgz=options.poetry_tgz and expanded(options.poetry_tgz),
    )
    check_options(options)
    if options.text:
        options = dataclasses.replace(options, text=shards.expand(options.text))
    with preparing(folder := options.out or data.DEFAULT):
        if options.shards:
            return prepare_shards(options, folder)
        return _prepare(options, folder)


def prepare_shards(options: Options, folder: Path) -> dict:
    """在 `folder` 里做分片，返回 manifest。"""
    plan = shards.Plan(
        files=options.text,
        text_key=options.text_key,
        val_fraction=options.val_fraction,
        vocab_size=options.vocab_size,
        sample_mb=options.sample_mb,
    )
    return shards.prepare_shards(plan, folder, options.workers or os.cpu_count() or 1)


def prepare_once(is_ready: Callable[[], bool]) -> None:
    """默认位置的数据第一次被用到时：一个进程准备，其余的等它做完就用。"""
    with preparing(data.DEFAULT):
        if not is_ready():
            _prepare(Options(), data.DEFAULT)


def check_options(options: Options) -> None:
    """不合理的选项抛 `UserError`。"""
    if options.text and (options.mix or options.corpus != Options.corpus):
        raise UserError("--text 是自己的语料，不能与 --corpus、--mix 同时给：请去掉其中一个。")
    mixture.weights(options.mix)
    standard = (options.vocab_size, options.sample_mb) == (novel.VOCAB_SIZE, Options.sample_mb)
    for given, what in (
        (options.text, "给了 --text"),
        (chosen(options) != {"sanguo": 1}, "换了 --corpus 或 --mix"),
        (not standard, "换了 --vocab-size 或 --sample-mb"),
    ):
        if given and options.out is None:
            raise UserError(
                f"{what}，还要用 --out 给输出文件夹，例如 --out runs/mine；"
                "tokens/ 里的是全书共用的。"
            )
    if options.shards and not options.text:
        raise UserError("--shards 是给自己的许多文件用的：请用 --text 给出文件或文件夹。")
    if options.workers < 0 or (options.workers and not options.shards):
        raise UserError(f"--workers {options.workers} 不对：它是做分片的进程数，与 --shards 同用。")
    if options.vocab_size < 256:
        raise UserError(f"--vocab-size {options.vocab_size} 太小：至少 256（全部字节）。")
    if not 0 < options.val_fraction < 1:
        raise UserError(f"--val-fraction {options.val_fraction} 不在 0 与 1 之间；例如 0.1。")
    if options.sample_mb <= 0:
        raise UserError(f"--sample-mb {options.sample_mb} 应大于 0；例如 10。")


def chosen(options: Options) -> dict[str, float]:
    """用哪些内置语料，各占多少；给了 --text 时没有意义。"""
    return mixture.weights(options.mix or (f"{options.corpus}=1",))


@contextlib.contextmanager
def preparing(folder: Path) -> Iterator[None]:
    """独占 `folder`。锁由操作系统持有：准备到一半被杀的进程不会把别人锁在门外。"""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(folder / ".prepare.lock")
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            print(f"另一个进程正在准备 {folder}，等它做完……", file=sys.stderr)
            lock.acquire()
        try:
            yield
        finally:
            lock.release()
    except OSError as error:
        if (problem := describe_write_error(error, folder)) is not None:
            raise UserError(problem) from error
        raise


def _prepare(options: Options, folder: Path) -> dict:
    """全部中间结果放在一个临时文件夹里；最后两次改名才使新数据生效。"""
    work = folder / ".prepare.tmp"
    shutil.rmtree(work, ignore_errors=True)  # 上一次被杀时留下的
    work.mkdir()
    try:
        parts = write_texts(options, work)
        ranks = train_bpe(sample(part_files(work, "train"), options.sample_mb), options.vocab_size)
        if len(ranks) < options.vocab_size:
            wanted = options.vocab_size
            print(f"文本太少：只合并出 {len(ranks)} 个词条（想要 {wanted}）。", file=sys.stderr)
        meta = encode(options, parts, work, ranks)
        (work / "tokenizer.tiktoken").write_bytes(dump_tiktoken(ranks))
        meta["tokenizer_sha256"] = sha256(work / "tokenizer.tiktoken")
        check_standard(options, meta)
        # 若在两次改名之间被杀，load_tokens 会由 tokenizer_sha256 看出二者不配套。
        with atomic_write(folder / "tokens.pt") as temporary:
            write_tokens(work, meta, temporary)
            with atomic_write(folder / "tokenizer.tiktoken") as tokenizer:
                shutil.copyfile(work / "tokenizer.tiktoken", tokenizer)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return meta


def write_texts(options: Options, work: Path) -> dict[str, dict]:
    """规范化的文本（UTF-8）写成 `train.0.txt`、`val.0.txt`；混合时第 n 个语料是 `….n.txt`。

    返回 {语料的名字: 要记进 meta 的数字}；自己的文本合起来算一个，名叫 text。
    """
    if options.text:
        return {"text": write_own(options, work)}
    weights = chosen(options)
    corpora = {
        name: mixture.load(name, options.poetry_tgz, options.traditional) for name in weights
    }
    corpora = mixture.mix(corpora, weights)
    for number, corpus in enumerate(corpora.values()):
        for split in ("train", "val"):
            with (work / f"{split}.{number}.txt").open("wb") as file:
                write_lines(document_lines(getattr(corpus, split)), file)
    return {
        name: corpus.notes
        | {"train_documents": len(corpus.train), "val_documents": len(corpus.val)}
        for name, corpus in corpora.items()
    }


def write_own(options: Options, work: Path) -> dict[str, int]:
    """自己的文本；返回换成 U+FFFD 的代理项和略过的空值各几个。"""
    totals = {"replaced_surrogates": 0, "skipped_nulls": 0}
    with (work / "train.0.txt").open("w+b") as train, (work / "val.0.txt").open("wb") as val:
        for path in tqdm(options.text, desc="读文本", unit="个文件"):
            repairs = write_file(path, options.text_key, options.val_fraction, train, val)
            totals["replaced_surrogates"] += repairs.surrogates
            totals["skipped_nulls"] += repairs.nulls
    return totals


def part_files(work: Path, split: str) -> list[Path]:
    """`split` 的各部分文本，按次序。"""
    return sorted(work.glob(f"{split}.*.txt"), key=lambda path: int(path.suffixes[0][1:]))


def encode(options: Options, parts: dict[str, dict], work: Path, ranks: dict[bytes, int]) -> dict:
    """各部分依次编成 `train.bin`、`val.bin`，返回 meta；各语料自己的数在 `meta["parts"]` 里。"""
    tokenizer = encoding(ranks)
    meta: dict = {"corpus": corpus_name(options), "vocab_size": len(ranks)}
    text_hash, ids_hash = hashlib.sha256(), hashlib.sha256()
    counts = {name: np.zeros(len(ranks), dtype=np.int64) for name in ("train", "val")}
    for name in ("train", "val"):
        with (work / f"{name}.bin").open("wb") as binary:
            for part, text in zip(parts.values(), part_files(work, name), strict=True):
                found, characters = encode_file(tokenizer, text, binary, text_hash, ids_hash)
                counts[name] += found
                part[f"{name}_tokens"] = int(found.sum())
                part[f"{name}_characters"] = characters
                part[f"{name}_bytes"] = text.stat().st_size
        for unit in ("tokens", "characters", "bytes"):
            meta[f"{name}_{unit}"] = sum(part[f"{name}_{unit}"] for part in parts.values())
        meta[f"{name}_largest_id"] = int(counts[name].nonzero()[0].max())
    meta["parts"] = parts
    meta["text_sha256"], meta["ids_sha256"] = text_hash.hexdigest(), ids_hash.hexdigest()
    meta["unigram_entropy"] = unigram_entropy(counts["train"])
    meta["unigram_val_loss"] = unigram_loss(counts["train"], counts["val"])
    meta["sample_mb"] = min(options.sample_mb, meta["train_bytes"] / 1e6)
    meta |= {name: importlib.metadata.version(name) for name in ("tokenizers", "tiktoken", "torch")}
    return meta


def corpus_name(options: Options) -> str:
    """记进 meta、打印出来的语料名。"""
    if options.text:
        return "、".join(path.name for path in options.text)
    weights = chosen(options)
    if len(weights) == 1:
        return {"sanguo": novel.PACKAGE, "poetry": poetry.PACKAGE}[next(iter(weights))]
    return "、".join(f"{name}={weight:g}" for name, weight in weights.items())


def write_tokens(work: Path, meta: dict, path: Path) -> None:
    """写 `torch.save` 格式的 {train, val, meta}，但不把张量放进内存。

    先存一个只占位置的文件（`skip_data`），再把 `.bin` 的内容拷到每个张量的位置上。
    zip 里这两项的 CRC 因此不对；`torch.load` 不看它，完整与否由改名和 meta 里的哈希保证。
    """
    dtype, names = id_dtype(meta["vocab_size"]), ("train", "val")
    empty = {name: torch.empty(meta[f"{name}_tokens"], dtype=dtype) for name in names}
    # 传打开的文件而不是路径：否则 torch 把临时文件名写进 zip，同样的数据得不到同样的文件。
    with path.open("wb") as file, skip_data():
        torch.save({**empty, "meta": meta}, file)
    with path.open("r+b") as file:
        for name, offset in zip(names, storage_offsets(path), strict=True):
            file.seek(offset)
            with (work / f"{name}.bin").open("rb") as source:
                shutil.copyfileobj(source, file)


def storage_offsets(path: Path) -> list[int]:
    """`torch.save` 的文件里各个张量的数据从第几字节开始，按存入的先后。

    数据在本地文件头之后：定长 30 字节，再加第 26、28 字节处写着的文件名长和附加段长（zip 规范）。
    """
    with zipfile.ZipFile(path) as archive:
        starts = {info.filename: info.header_offset for info in archive.infolist()}
    names = sorted((name for name in starts if "/data/" in name), key=lambda n: int(Path(n).name))
    with path.open("rb") as file:
        offsets = []
        for name in names:
            file.seek(starts[name] + 26)
            name_length, extra_length = struct.unpack("<HH", file.read(4))
            offsets.append(starts[name] + 30 + name_length + extra_length)
    return offsets


def check_standard(options: Options, meta: dict) -> None:
    """内置语料在任何机器上都得到同样的文本和同样的 id，否则抛 `UserError`。"""
    own = options.text or chosen(options) != {"sanguo": 1}
    if own or options.sample_mb != Options.sample_mb:
        return
    problem = None
    if meta["text_sha256"] != novel.TEXT_SHA256:
        problem = f"文本 {meta['text_sha256'][:12]}…（应为 {novel.TEXT_SHA256[:12]}…）"
    elif options.vocab_size == novel.VOCAB_SIZE and meta["ids_sha256"] != novel.IDS_SHA256:
        problem = f"token id {meta['ids_sha256'][:12]}…（应为 {novel.IDS_SHA256[:12]}…）"
    if problem:
        raise UserError(
            f"准备出来的{problem} 与本书的不同，后面的数字不可比："
            f"tokenizers {meta['tokenizers']}、tiktoken {meta['tiktoken']} 的版本是否与"
            " requirements.txt 一致？请重新运行 `pip install -r requirements.txt`。"
        )


def print_summary(meta: dict) -> None:
    """每份数据一行（混合时各语料也一行），然后是不看上下文的基线：模型的损失至少要低于它。"""
    print(
        f"语料 {meta['corpus']}，词表 {meta['vocab_size']}，"
        f"分词器由训练部分的 {meta['sample_mb']:.2f} MB 训练"
    )
    for name, part in meta["parts"].items():
        if "read" in part:
            kept = part["read"] - part["broken"] - part["duplicates"]
            print(
                f"{name}：读到 {part['read']:,} 篇，丢掉残缺的 {part['broken']:,}、"
                f"重复的 {part['duplicates']:,}，可用 {kept:,}；"
                f"这里训练用 {part['train_documents']:,} 篇，验证 {part['val_documents']:,} 篇"
            )
    print(f"{'split':<13}{'characters':>13}{'bytes':>13}{'tokens':>13}{'chars/token':>13}")
    rows = {"": meta} | (meta["parts"] if len(meta["parts"]) > 1 else {})
    for split in ("train", "val"):
        for name, counts in rows.items():
            characters, size, tokens = (
                counts[f"{split}_{unit}"] for unit in ("characters", "bytes", "tokens")
            )
            label = f"{split} {name}".strip()
            print(
                f"{label:<13}{characters:>13,}{size:>13,}{tokens:>13,}{characters / tokens:>13.3f}"
            )
    print(f"损失的基线（nat）：均匀乱猜 {np.log(meta['vocab_size']):.2f}；", end="")
    print(f"只看词频，训练 {meta['unigram_entropy']:.2f}，验证 {meta['unigram_val_loss']:.2f}")
    print(f"id 的 sha256：{meta['ids_sha256']}")


if __name__ == "__main__":
    import tyro

    tolerate_narrow_output()
    try:
        main(tyro.cli(Options, description=__doc__))
    except UserError as error:
        print(f"错误：{error}", file=sys.stderr)
        sys.exit(2)
