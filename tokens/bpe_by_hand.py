"""手写的 BPE，只为看懂它：反复找最常见的一对相邻编号，合并成一个新编号。

    python tokens/bpe_by_hand.py

这里**不**先切段，也不快：每合并一次都重扫全文。真正的训练见 `tokens/tokenizer.py`；
测试断言二者在同一段文字上得到同样的合并。

手工走一遍 "aaabdaaabac"（Gage 1994 提出 BPE 时用的例子），合并三次：

    a a a b d a a a b a c      最常见的一对是 (a, a)，出现 4 次 → 记作 Z
    Z a b d Z a b a c          (Z, a) 与 (a, b) 都出现 2 次；同数时取编号小的一对 (a, b) → Y
    Z Y d Z Y a c              (Z, Y) 出现 2 次 → X
    X d X a c                  11 个符号变成 5 个

>>> merges, ids = train(list(b"aaabdaaabac"), 3)
>>> merges
{(97, 97): 256, (97, 98): 257, (256, 257): 258}
>>> ids
[258, 100, 258, 97, 99]
"""

from collections import Counter

Pair = tuple[int, int]


def count_pairs(ids: list[int]) -> Counter[Pair]:
    """每一对相邻编号出现的次数。"""
    return Counter(zip(ids, ids[1:], strict=False))


def merge(ids: list[int], pair: Pair, new: int) -> list[int]:
    """从左到右，把每一处 `pair` 换成 `new`。"""
    merged = []
    i = 0
    while i < len(ids):
        found = (*ids[i : i + 2],) == pair
        merged.append(new if found else ids[i])
        i += 2 if found else 1
    return merged


def train(ids: list[int], steps: int) -> tuple[dict[Pair, int], list[int]]:
    """合并 `steps` 次；返回 {一对编号: 新编号} 和合并之后的序列。没有重复的对就提前停。"""
    merges: dict[Pair, int] = {}
    for new in range(256, 256 + steps):
        pairs = count_pairs(ids)
        # 次数最多的；同数时取编号小的一对，结果才唯一。
        pair = max(pairs, key=lambda pair: (pairs[pair], -pair[0], -pair[1]), default=None)
        if pair is None or pairs[pair] < 2:
            break
        merges[pair] = new
        ids = merge(ids, pair, new)
    return merges, ids


def spell(merges: dict[Pair, int]) -> dict[int, bytes]:
    """每个编号对应的字节串。"""
    spelled = {byte: bytes([byte]) for byte in range(256)}
    for (left, right), new in merges.items():
        spelled[new] = spelled[left] + spelled[right]
    return spelled


def main(text: str = "玄德公玄德曰玄武门", steps: int = 10) -> None:
    """逐步打印：第几次、哪一对、几次、拼成什么、序列还剩多长。"""
    ids = list(text.encode())
    print(f"{text}：{len(text)} 个字符，{len(ids)} 个字节")
    merges, _ = train(ids, steps)
    spelled = spell(merges)
    for (left, right), new in merges.items():
        count = count_pairs(ids)[left, right]
        ids = merge(ids, (left, right), new)
        parts = " + ".join(show(spelled[part]) for part in (left, right))
        print(f"{new}：{parts} → {show(spelled[new])}，{count} 次；剩 {len(ids)} 个")


def show(entry: bytes) -> str:
    """完整的字显示为字，半个字显示为十六进制字节。"""
    try:
        return entry.decode()
    except UnicodeDecodeError:
        return "<" + entry.hex(" ") + ">"


if __name__ == "__main__":
    main()
