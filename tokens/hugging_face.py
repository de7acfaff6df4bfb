"""把 tiktoken 的词表换成 Hugging Face 的快速分词器：同样的文本得到同样的 id。

tiktoken 只记词条和名次，Hugging Face 还要「哪两条合并成它」。这个信息没有丢：拿名次更小的词条
去切一个词条，最后必然剩下两段，它们就是那一对。
"""

import tiktoken
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from tokens.errors import UserError
from tokens.tokenizer import PATTERN, byte_symbols


def split_entry(entry: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """只用名次比 `entry` 小的词条，按 BPE 的规则合并它的字节；训练得到的词条最后剩两段。

    >>> split_entry(b"abc", {b"a": 0, b"b": 1, b"c": 2, b"ab": 3, b"abc": 4})
    [b'ab', b'c']
    """
    parts = [bytes([byte]) for byte in entry]
    while len(parts) > 1:
        joined = [ranks.get(a + b, len(ranks)) for a, b in zip(parts, parts[1:], strict=False)]
        if (best := min(joined)) >= ranks[entry]:
            break
        i = joined.index(best)  # 名次相同时先合并左边的
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def fast_tokenizer(encoding: tiktoken.Encoding) -> Tokenizer:
    """与 `encoding` 编出同样 id 的 `tokenizers.Tokenizer`；不是 BPE 训练出的词表时抛 `UserError`。

    `ignore_merges`：一段正好是一个词条时直接取它，这是 tiktoken 的规则。
    """
    entries = [encoding.decode_single_token_bytes(i) for i in range(encoding.n_vocab)]
    ranks = {entry: rank for rank, entry in enumerate(entries)}
    symbol = {byte: name for name, byte in byte_symbols().items()}

    def visible(piece: bytes) -> str:
        return "".join(symbol[byte] for byte in piece)

    merges = []
    for entry in entries:
        if len(entry) == 1:
            continue
        pair = split_entry(entry, ranks)
        if len(pair) != 2:
            raise UserError(
                f"词条 {entry!r} 由 {len(pair)} 段组成，不是两段合并来的："
                "这份词表不是 BPE 训练出来的，换不成 Hugging Face 的格式。"
            )
        merges.append((visible(pair[0]), visible(pair[1])))
    vocabulary = {visible(entry): rank for entry, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
