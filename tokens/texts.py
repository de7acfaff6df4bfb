"""把各种来源的文本变成一行行规范化的段落，内存有界：任何时候只有几 MB 在内存里。

规范化只动空白：每段一行，行内连续的空白（制表符、全角空格）并成一个半角空格，空行删去；
文档之间空一行。这**不**做 Unicode 归一，不改标点，不去重，不过滤。
"""

import codecs
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokens import encodings
from tokens.errors import UserError

BLOCK = 1 << 20  # 每次读 1 MiB
LONGEST_LINE = 1 << 20  # 没有换行的超长文本每 1 Mi 字符断一次，否则内存无界
SUFFIXES = {".txt": "纯文本", ".jsonl": "每行一个 JSON 对象", ".parquet": "Parquet 表"}

_BLANK = re.compile(r"\s+")
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass
class Repairs:
    """读一个文件时改了什么、略过了什么。"""

    surrogates: int = 0
    """换成 U+FFFD 的孤立代理项，个：JSON 的 \\ud83d 这样的半个字符，不能编成 UTF-8。"""
    first_surrogate: str = ""
    """第一处在哪里，如“第 3 行”。"""
    nulls: int = 0
    """正文为空值（null）而略过的记录，条；jsonl 与 parquet 一样对待。"""

    def __str__(self) -> str:
        """一句话；没有改动就是空字符串。"""
        said = []
        if self.surrogates:
            said.append(
                f"{self.surrogates} 个孤立的代理项换成了 U+FFFD（第一个在{self.first_surrogate}）"
            )
        if self.nulls:
            said.append(f"略过 {self.nulls} 条正文为空值的记录")
        return "，".join(said)


def normalise(text: str) -> Iterator[str]:
    """一段文本的非空行，行内空白已合并；不含换行符。超长的行每 `LONGEST_LINE` 个字符断开。"""
    for line in text.split("\n"):
        for start in range(0, len(line), LONGEST_LINE):
            if piece := _BLANK.sub(" ", line[start : start + LONGEST_LINE]).strip():
                yield piece


def read_lines(path: Path, text_key: str, repairs: Repairs | None = None) -> Iterator[str]:
    """文件里规范化的行；空字符串表示一篇文档的结束。

    `.txt` 整个文件算一篇；`.jsonl` 每行、`.parquet` 每条记录各算一篇，正文取自 `text_key`。
    改了什么、略过了什么，边读边记进 `repairs`。
    文件不存在、后缀不认识、不是 UTF-8、缺字段、正文不是字符串时抛 `UserError`。
    """
    if path.suffix.lower() not in SUFFIXES:
        accepted = "、".join(f"{suffix}（{name}）" for suffix, name in SUFFIXES.items())
        raise UserError(f"不认识 {path} 的格式：接受 {accepted}；请先转换。")
    if not path.is_file():
        raise UserError(f"找不到文本文件 {path}；请检查 --text 的路径。")
    if path.suffix.lower() == ".txt":
        return _read_txt(path)
    records = {".jsonl": _read_jsonl, ".parquet": _read_parquet}[path.suffix.lower()]
    return _documents(records(path, text_key), repairs or Repairs())


def _documents(records: Iterator[tuple[str, str | None]], repairs: Repairs) -> Iterator[str]:
    """（在哪里，正文或空值）→ 规范化的行；一条记录一篇文档。"""
    for where, text in records:
        if text is None:
            repairs.nulls += 1
            continue
        if _SURROGATE.search(text):
            text, replaced = join_surrogates(text)
            repairs.surrogates += replaced
            repairs.first_surrogate = repairs.first_surrogate or (where if replaced else "")
        yield from normalise(text.replace("\r\n", "\n").replace("\r", "\n"))
        yield ""


def join_surrogates(text: str) -> tuple[str, int]:
    """成对的代理项合成它代表的字符，孤立的换成 U+FFFD；返回（文本，换了几个）。"""
    joined = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return joined, joined.count("\ufffd") - text.count("\ufffd")


def _read_txt(path: Path) -> Iterator[str]:
    rest = ""
    for text in _decode_blocks(path):
        head, newline, rest = (rest + text).rpartition("\n")
        yield from normalise(head)
        while len(rest) > LONGEST_LINE:
            yield from normalise(rest[:LONGEST_LINE])
            rest = rest[LONGEST_LINE:]
    yield from normalise(rest)
    yield ""


def _decode_blocks(path: Path) -> Iterator[str]:
    """逐块解码 UTF-8；`\\r\\n` 与 `\\r` 都算换行（跨块的也是）。开头的 BOM 去掉。"""
    encodings.check_start(path)
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    newlines = io.IncrementalNewlineDecoder(None, translate=True)
    position, wide = 0, 0  # 读到第几字节；其中有几个非 ASCII 的字符
    with path.open("rb") as file:
        while True:
            block = file.read(BLOCK)
            pending = len(decoder.getstate()[0])  # 上一块末尾还没拼完的字节
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                wide += _count_wide(error.object[: error.start].decode())
                begin = position - pending + error.start
                raise UserError(encodings.describe(path, begin, wide)) from error
            wide += _count_wide(text)
            yield newlines.decode(text if position else text.removeprefix("\ufeff"), not block)
            if not block:
                return
            position += len(block)


def _count_wide(text: str) -> int:
    return 0 if text.isascii() else sum(character > "\x7f" for character in text)


def _read_jsonl(path: Path, text_key: str) -> Iterator[tuple[str, str | None]]:
    encodings.check_start(path)
    wide = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"第 {number} 行"
            try:
                text = line.decode("utf-8", "surrogatepass")
            except UnicodeDecodeError as error:
                wide += _count_wide(line[: error.start].decode("utf-8", "surrogatepass"))
                begin = file.tell() - len(line) + error.start
                raise UserError(f"{where}：{encodings.describe(path, begin, wide)}") from error
            wide += _count_wide(text)
            text = text.removeprefix("\ufeff") if number == 1 else text
            if text.strip():
                yield where, _text_of(_parse(text, path, where), text_key, path, where)


def _parse(line: str, path: Path, where: str) -> dict:
    """一行 JSON → 对象；不是 JSON、不是对象时抛 `UserError`。"""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = f"第 {error.colno} 个字符起" if isinstance(error, json.JSONDecodeError) else ""
        raise UserError(f"{path} {where}不是 JSON（{reason or error}）：请改正这一行。") from error
    if not isinstance(record, dict):
        raise UserError(
            f"{path} {where}是 JSON 的 {type(record).__name__}，不是对象："
            '每行应是一个 {"text": "正文"} 这样的对象。'
        )
    return record


def _text_of(record: dict, text_key: str, path: Path, where: str) -> str | None:
    """对象里的正文；空值是 None，缺字段、不是字符串时抛 `UserError`。"""
    if text_key not in record:
        keys = "、".join(map(repr, record)) or "没有任何字段"
        raise UserError(
            f"{path} {where}没有字段 {text_key!r}（有：{keys}）；请用 --text-key 指明正文字段。"
        )
    text = record[text_key]
    if text is not None and not isinstance(text, str):
        raise UserError(
            f"{path} {where}的字段 {text_key!r} 是 {type(text).__name__}，不是字符串："
            "请用 --text-key 指明正文字段，或先转换成字符串。"
        )
    return text


def _read_parquet(path: Path, text_key: str) -> Iterator[tuple[str, str | None]]:
    import pyarrow
    import pyarrow.parquet

    try:
        # 一次一个行组：内存的上限由写文件的人定的行组大小决定。
        file = pyarrow.parquet.ParquetFile(path, pre_buffer=False)
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{path} 不是完好的 Parquet 文件：请重新下载或重新导出。") from error
    with file:
        _check_column(file.schema_arrow, text_key, path)
        number = 0
        for batch in file.iter_batches(batch_size=256, columns=[text_key]):
            column = batch.column(0)
            if pyarrow.types.is_dictionary(column.type):
                column = column.dictionary_decode()
            # 取字节自己解码：写文件的人未必核对过 UTF-8
            for text in column.cast(pyarrow.large_binary()).to_pylist():
                number += 1
                where = f"第 {number} 条记录"
                yield where, None if text is None else _decode_cell(text, path, where)


def _check_column(schema, text_key: str, path: Path) -> None:
    """列要在，类型要是字符串（或全是空值），否则抛 `UserError`。"""
    import pyarrow

    columns = "、".join(f"{field.name} {field.type}" for field in schema)
    if text_key not in schema.names:
        raise UserError(
            f"{path} 没有列 {text_key!r}（有：{columns}）；请用 --text-key 指明正文列。"
        )
    kind = schema.field(text_key).type
    value = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    accepted = {pyarrow.string(), pyarrow.large_string(), pyarrow.string_view(), pyarrow.null()}
    if value not in accepted:
        raise UserError(
            f"{path} 的列 {text_key!r} 是 {kind}，不是字符串（有：{columns}）；"
            "请用 --text-key 指明正文列，或先转换成字符串。"
        )


def _decode_cell(text: bytes, path: Path, where: str) -> str:
    try:
        return text.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} {where}的正文不是 UTF-8（第 {error.start} 字节起）：请重新导出这个文件。"
        ) from error
