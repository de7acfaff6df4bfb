"""准备训练数据：语料 → 字节级 BPE 分词器 → tokens.pt。

    python tokens/prepare.py
    python tokens/prepare.py --text 红楼梦.txt 水浒传.txt --out runs/novels
    python tokens/prepare.py --text corpus.jsonl --text-key content --out runs/big

得到两个文件：tokenizer.tiktoken（tiktoken 格式的词表）和 tokens.pt（train、val、meta）。
内存有界：文本分块读，分块编码，id 先写到临时文件；内存占用不随文本变大。
"""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import mmap
import shutil
import struct
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import filelock
import numpy as np
import tiktoken
import torch
from torch.serialization import skip_data
from tqdm import tqdm

from tokens import data, novel, texts
from tokens.data import id_dtype
from tokens.errors import UserError
from tokens.files import atomic_write, describe_write_error, expanded
from tokens.tokenizer import dump_tiktoken, encoding, train_bpe

BLOCK = 1 << 19  # 每块约 512 KiB 文本，在段落之间切开
THREADS = 4  # 一批 4 块，每块一个线程


@dataclass(frozen=True)
class Options:
    text: tuple[Path, ...] = ()
    """自己的语料，一个或多个文件：.txt（UTF-8）、.jsonl、.parquet。不给就用内置的《三国演义》。"""
    text_key: str = "text"
    """jsonl 的字段名、parquet 的列名：正文在哪里。"""
    vocab_size: int = novel.VOCAB_SIZE
    """词表大小，个；至少 256（全部字节）。"""
    val_fraction: float = 0.1
    """每个文件末尾留作验证的比例，0 与 1 之间。内置语料不用它：固定是后 12 回。"""
    sample_mb: float = 10.0
    """训练分词器用的样本上限，MB（UTF-8）：训练部分更大时，均匀地取这么多。"""
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
    )
    check_options(options)
    with preparing(folder := options.out or data.DEFAULT):
        return _prepare(options, folder)


def prepare_once(is_ready: Callable[[], bool]) -> None:
    """默认位置的数据第一次被用到时：一个进程准备，其余的等它做完就用。"""
    with preparing(data.DEFAULT):
        if not is_ready():
            _prepare(Options(), data.DEFAULT)


def check_options(options: Options) -> None:
    """不合理的选项抛 `UserError`。"""
    if options.text and options.out is None:
        raise UserError("给了 --text 还要用 --out 给一个输出文件夹，例如 --out runs/mine。")
    standard = (options.vocab_size, options.sample_mb) == (novel.VOCAB_SIZE, Options.sample_mb)
    if options.out is None and not standard:
        raise UserError(
            "换了 --vocab-size 或 --sample-mb，还要用 --out 给输出文件夹，例如 --out runs/mine；"
            "tokens/ 里的是全书共用的。"
        )
    if options.vocab_size < 256:
        raise UserError(f"--vocab-size {options.vocab_size} 太小：至少 256（全部字节）。")
    if not 0 < options.val_fraction < 1:
        raise UserError(f"--val-fraction {options.val_fraction} 不在 0 与 1 之间；例如 0.1。")
    if options.sample_mb <= 0:
        raise UserError(f"--sample-mb {options.sample_mb} 应大于 0；例如 10。")


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
        repairs = write_texts(options, work)
        megabytes = min(options.sample_mb, (work / "train.txt").stat().st_size / 1e6)
        print(f"训练分词器：{megabytes:.2f} MB 样本……", file=sys.stderr)
        ranks = train_bpe(sample(work / "train.txt", options.sample_mb), options.vocab_size)
        if len(ranks) < options.vocab_size:
            wanted = options.vocab_size
            print(f"文本太少：只合并出 {len(ranks)} 个词条（想要 {wanted}）。", file=sys.stderr)
        meta = encode(options, work, ranks) | repairs
        (work / "tokenizer.tiktoken").write_bytes(dump_tiktoken(ranks))
        meta["tokenizer_sha256"] = file_sha256(work / "tokenizer.tiktoken")
        check_standard(options, meta)
        # 若在两次改名之间被杀，load_tokens 会由 tokenizer_sha256 看出二者不配套。
        with atomic_write(folder / "tokens.pt") as temporary:
            write_tokens(work, meta, temporary)
            with atomic_write(folder / "tokenizer.tiktoken") as tokenizer:
                shutil.copyfile(work / "tokenizer.tiktoken", tokenizer)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return meta


def write_texts(options: Options, work: Path) -> dict:
    """规范化的文本写成 `train.txt` 和 `val.txt`（UTF-8），不把全文放进内存。

    返回 meta 里的两项：换成 U+FFFD 的代理项和略过的空值各几个；有的话也在 stderr 上说一句。
    """
    totals = {"replaced_surrogates": 0, "skipped_nulls": 0}
    with (work / "train.txt").open("w+b") as train, (work / "val.txt").open("w+b") as val:
        if not options.text:
            chapters = novel.chapters()
            write_lines(chapter_lines(chapters[: novel.TRAIN_CHAPTERS]), train)
            write_lines(chapter_lines(chapters[novel.TRAIN_CHAPTERS :]), val)
            return totals
        for path in tqdm(options.text, desc="读文本", unit="个文件"):
            begin, repairs = train.tell(), texts.Repairs()
            write_lines(texts.read_lines(path, options.text_key, repairs), train)
            if said := str(repairs):
                tqdm.write(f"{path}：{said}。", file=sys.stderr)
            totals["replaced_surrogates"] += repairs.surrogates
            totals["skipped_nulls"] += repairs.nulls
            move_tail(train, val, begin, options.val_fraction, path)
    return totals


def chapter_lines(chapters: Iterable[str]) -> Iterator[str]:
    """各回规范化的行，回与回之间一个空行。"""
    for chapter in chapters:
        yield from texts.normalise(chapter)
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


def sample(path: Path, megabytes: float) -> Iterator[str]:
    """训练分词器的样本：文本不超过 `megabytes` 就是全部，否则均匀地取若干块。逐行给出。"""
    size = path.stat().st_size
    keep = min(1.0, megabytes * 1e6 / size) if size else 1.0
    taken = 0.0
    for number, block in enumerate(blocks(path), start=1):
        if number * keep - taken >= 1 - 1e-9 or keep == 1.0:
            taken += 1
            yield from block.decode().splitlines(keepends=True)


def encode(options: Options, work: Path, ranks: dict[bytes, int]) -> dict:
    """把两份文本编成 `train.bin`、`val.bin`，返回 meta。"""
    tokenizer = encoding(ranks)
    meta: dict = {
        "corpus": "、".join(path.name for path in options.text) or novel.PACKAGE,
        "vocab_size": len(ranks),
    }
    text_hash, ids_hash, counts = hashlib.sha256(), hashlib.sha256(), {}
    for name in ("train", "val"):
        text, binary = work / f"{name}.txt", work / f"{name}.bin"
        counts[name], characters = encode_file(tokenizer, text, binary, text_hash, ids_hash)
        meta[f"{name}_tokens"] = int(counts[name].sum())
        meta[f"{name}_characters"] = characters
        meta[f"{name}_bytes"] = text.stat().st_size
        meta[f"{name}_largest_id"] = int(counts[name].nonzero()[0].max())
    meta["text_sha256"], meta["ids_sha256"] = text_hash.hexdigest(), ids_hash.hexdigest()
    meta["unigram_entropy"] = unigram_entropy(counts["train"])
    meta["unigram_val_loss"] = unigram_loss(counts["train"], counts["val"])
    meta["sample_mb"] = min(options.sample_mb, meta["train_bytes"] / 1e6)
    meta |= {name: importlib.metadata.version(name) for name in ("tokenizers", "tiktoken", "torch")}
    return meta


def encode_file(
    tokenizer: tiktoken.Encoding, text: Path, binary: Path, text_hash, ids_hash
) -> tuple[np.ndarray, int]:
    """`text` 的 id 以小端整数写进 `binary`；返回各 id 的次数（长 n_vocab）和字符数。"""
    dtype = np.dtype("<u2" if id_dtype(tokenizer.n_vocab) == torch.uint16 else "<i4")
    counts = np.zeros(tokenizer.n_vocab, dtype=np.int64)
    characters = 0
    size = text.stat().st_size
    progress = tqdm(total=size, desc=f"编码 {text.stem}", unit="B", unit_scale=True)
    # 固定的几个线程：tiktoken 自己的批量接口每批都开新线程，各留一份正则缓存，内存会慢慢涨。
    with ThreadPoolExecutor(THREADS) as pool, binary.open("wb") as output, progress:
        for batch in batched(blocks(text), THREADS):
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
    if options.text or options.sample_mb != Options.sample_mb:
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


def file_sha256(path: Path) -> str:
    """文件的 sha256，十六进制。"""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def print_summary(meta: dict) -> None:
    """两份数据各一行，然后是不看上下文的基线：模型的损失至少要低于它。"""
    print(
        f"语料 {meta['corpus']}，词表 {meta['vocab_size']}，"
        f"分词器由训练部分的 {meta['sample_mb']:.2f} MB 训练"
    )
    print(f"{'split':<6}{'characters':>13}{'tokens':>12}{'chars/token':>13}")
    for name in ("train", "val"):
        characters, tokens = meta[f"{name}_characters"], meta[f"{name}_tokens"]
        print(f"{name:<6}{characters:>13,}{tokens:>12,}{characters / tokens:>13.3f}")
    print(f"损失的基线（nat）：均匀乱猜 {np.log(meta['vocab_size']):.2f}；", end="")
    print(f"只看词频，训练 {meta['unigram_entropy']:.2f}，验证 {meta['unigram_val_loss']:.2f}")
    print(f"id 的 sha256：{meta['ids_sha256']}")


if __name__ == "__main__":
    import tyro

    try:
        main(tyro.cli(Options, description=__doc__))
    except UserError as error:
        print(f"错误：{error}", file=sys.stderr)
        sys.exit(2)
