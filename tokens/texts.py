"""把各种来源的文本变成一行行规范化的段落，内存有界：任何时候只有几 MB 在内存里。

规范化只动空白：每段一行，行内连续的空白（制表符、全角空格）并成一个半角空格，空行删去；
文档之间空一行。这**不**做 Unicode 归一，不改标点，不去重，不过滤。
"""

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path

from tokens.errors import UserError

BLOCK = 1 << 20  # 每次读 1 MiB
LONGEST_LINE = 1 << 20  # 没有换行的超长文本每 1 Mi 字符断一次，否则内存无界
SUFFIXES = {".txt": "纯文本", ".jsonl": "每行一个 JSON 对象", ".parquet": "Parquet 表"}

_BLANK = re.compile(r"\s+")


def normalise(text: str) -> Iterator[str]:
    """一段文本的非空行，行内空白已合并；不含换行符。"""
    for line in text.split("\n"):
        if line := _BLANK.sub(" ", line).strip():
            yield line


def read_lines(path: Path, text_key: str) -> Iterator[str]:
    """文件里规范化的行；空字符串表示一篇文档的结束。

    `.txt` 整个文件算一篇；`.jsonl` 每行、`.parquet` 每条记录各算一篇，正文取自 `text_key`。
    文件不存在、后缀不认识、不是 UTF-8、缺字段时抛 `UserError`。
    """
    readers = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
    if path.suffix.lower() not in readers:
        accepted = "、".join(f"{suffix}（{name}）" for suffix, name in SUFFIXES.items())
        raise UserError(f"不认识 {path} 的格式：接受 {accepted}；请先转换。")
    if not path.is_file():
        raise UserError(f"找不到文本文件 {path}；请检查 --text 的路径。")
    return readers[path.suffix.lower()](path, text_key)


def _read_txt(path: Path, text_key: str) -> Iterator[str]:
    rest = ""
    for text in _decode_blocks(path):
        head, newline, rest = (rest + text).rpartition("\n")
        yield from normalise(head)
        if len(rest) > LONGEST_LINE:
            yield from normalise(rest)
            rest = ""
    yield from normalise(rest)
    yield ""


def _decode_blocks(path: Path) -> Iterator[str]:
    """逐块解码 UTF-8；`\\r\\n` 与 `\\r` 都算换行。开头的 BOM 去掉。"""
    decoder = codecs.getincrementaldecoder("utf-8-sig")("strict")
    position = 0
    with path.open("rb") as file:
        while True:
            block = file.read(BLOCK)
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{path} 不是 UTF-8 文本（约第 {position + error.start} 字节起无法解码）："
                    f"请先转换，例如 `iconv -f GB18030 -t UTF-8 {path.name} > utf8.txt`。"
                ) from error
            yield text.replace("\r\n", "\n").replace("\r", "\n")
            if not block:
                return
            position += len(block)


def _read_jsonl(path: Path, text_key: str) -> Iterator[str]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:  # 也包括 UnicodeDecodeError
                raise UserError(
                    f"{path} 第 {number} 行不是 UTF-8 编码的 JSON：请改正这一行。"
                ) from error
            text = record.get(text_key) if isinstance(record, dict) else None
            if not isinstance(text, str):
                keys = "、".join(record) if isinstance(record, dict) else "（不是对象）"
                raise UserError(
                    f"{path} 第 {number} 行没有字符串字段 {text_key!r}（有：{keys}）；"
                    "请用 --text-key 指明正文字段。"
                )
            yield from normalise(text)
            yield ""


def _read_parquet(path: Path, text_key: str) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        # 一次一个行组：内存的上限由写文件的人定的行组大小决定。
        file = pyarrow.parquet.ParquetFile(path, pre_buffer=False)
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{path} 不是完好的 Parquet 文件：请重新下载或重新导出。") from error
    with file:
        if text_key not in file.schema_arrow.names:
            names = "、".join(file.schema_arrow.names)
            raise UserError(
                f"{path} 没有列 {text_key!r}（有：{names}）；请用 --text-key 指明正文列。"
            )
        for batch in file.iter_batches(batch_size=256, columns=[text_key]):
            for text in batch.column(0).to_pylist():
                yield from normalise(text or "")
                yield ""
