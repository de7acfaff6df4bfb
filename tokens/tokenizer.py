"""字节级 BPE 分词器：用 HF tokenizers 训练（几秒），存成 tiktoken 的格式，处处用 tiktoken 编解码。

文件每行一个词条：词条字节的 base64，空格，名次（rank）。名次既是 token id，也是合并的先后。
这里**没有**特殊词条（如 <|endoftext|>）：词表恰好是 256 个字节加上合并出来的词条。
"""

import base64
import binascii
import os
from collections.abc import Iterable
from pathlib import Path

import tiktoken

from tokens.errors import UserError

# 先按这个模式把文本切成小段，合并不跨段：一个标点可以粘在后面的字前，数字至多三位一段，
# 连续的标点带上其后的换行。改自 GPT-4 的 cl100k 模式，去掉了英语的缩写。
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"

# 训练时，没有断点的一长串（一行 10 万个“啊”、不加标点的文章）再切成这么多个字符一段：
# 合并一次的代价与段长成正比，不切就是长度的平方。《三国演义》里最长的一段是 24 个字符。
LONGEST_PIECE = 64


def byte_symbols() -> dict[str, int]:
    """HF 字节级 BPE 用来代表 256 个字节的可见字符 → 字节（GPT-2 的约定）。"""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    symbols = {chr(byte): byte for byte in visible}
    return symbols | {chr(256 + n): byte for n, byte in enumerate(others)}


def train_bpe(texts: Iterable[str], vocab_size: int) -> dict[bytes, int]:
    """训练得到 {词条字节: 名次}，至多 `vocab_size` 条；文本太少时不足。

    结果与线程数无关：次数相同的候选按 id 决出先后。
    """
    from tokenizers import Tokenizer, models, trainers

    # 库的线程池省不了几秒，却会在之后 fork 时告警；使用者自己设了就听他的。
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    symbols = byte_symbols()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = training_pieces()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=sorted(symbols), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    ranks = {
        bytes(symbols[symbol] for symbol in entry): rank
        for entry, rank in tokenizer.get_vocab().items()
    }
    return dict(sorted(ranks.items(), key=lambda item: item[1]))


def training_pieces():
    """训练用的切法：按 `PATTERN` 切段，超长的段再切短，最后把字节换成可见字符。

    只在训练时切短：编码时 tiktoken 自己就对付得了长段，切法不变，已有的 id 也就不变。
    """
    from tokenizers import Regex, pre_tokenizers

    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.Split(Regex(f"(?m).{{1,{LONGEST_PIECE}}}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def dump_tiktoken(ranks: dict[bytes, int]) -> bytes:
    """tiktoken 文件的内容。"""
    lines = (base64.b64encode(entry) + b" %d\n" % rank for entry, rank in ranks.items())
    return b"".join(lines)


def read_tokenizer(path: Path) -> tiktoken.Encoding:
    """从文件 `tokenizer.tiktoken` 建 `tiktoken.Encoding`；损坏时抛 `UserError`。

    不用 tiktoken 自己的读取函数：它按路径名缓存到系统临时目录，重新训练之后读到的还是旧词表。
    """
    try:
        pairs = (line.split() for line in path.read_bytes().splitlines())
        ranks = {base64.b64decode(entry, validate=True): int(rank) for entry, rank in pairs}
        if sorted(ranks.values()) != list(range(len(ranks))) or len(ranks) < 256:
            raise ValueError("名次不连续")
        return encoding(ranks)
    except (ValueError, binascii.Error) as error:
        raise UserError(f"{path} 不是完好的 tiktoken 词表：请删掉它，重新准备数据。") from error


def encoding(ranks: dict[bytes, int]) -> tiktoken.Encoding:
    """词表 → 可以编解码的 `tiktoken.Encoding`。"""
    return tiktoken.Encoding("tokens", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
