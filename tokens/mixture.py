"""内置的几个语料，和按比例混合它们。

    python tokens/prepare.py --mix sanguo=1 poetry=3 --out runs/mixture

比例按训练文本的字节算；在一篇也不重复的前提下取到最多。各语料的验证部分总是全部，所以换了比例仍可比较。
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokens import novel, poetry, texts
from tokens.errors import UserError

NAMES = ("sanguo", "poetry")


@dataclass
class Corpus:
    """一个语料：训练和验证各是一篇篇文档；`notes` 是要记进 meta 的数字。"""

    train: Sequence[str]
    val: Sequence[str]
    notes: dict[str, int] = field(default_factory=dict)


def load(name: str, tgz: Path | None, traditional: bool) -> Corpus:
    """读一个内置的语料，需要时先下载。"""
    if name == "sanguo":
        # 先规范化，按字节分的比例才不把空白算进去
        chapters = ["\n".join(texts.normalise(chapter)) for chapter in novel.chapters()]
        return Corpus(chapters[: novel.TRAIN_CHAPTERS], chapters[novel.TRAIN_CHAPTERS :])
    found = poetry.poems(tgz, traditional)
    notes = {"read": found.read, "broken": found.broken, "duplicates": found.duplicates}
    return Corpus(found.train, found.val, notes)


def weights(mix: Sequence[str]) -> dict[str, float]:
    """`["sanguo=1", "poetry=3"]` → {"sanguo": 1.0, "poetry": 3.0}；写错了抛 `UserError`。"""
    parsed: dict[str, float] = {}
    for item in mix:
        name, equals, value = item.partition("=")
        try:
            weight = float(value) if equals else math.nan
        except ValueError:
            weight = math.nan
        if name not in NAMES or not 0 < weight < math.inf or name in parsed:
            raise UserError(
                f"--mix 里的 {item!r} 不对：每一项是 语料=比例，语料是 {'、'.join(NAMES)} 之一，"
                "各写一次，比例大于 0；例如 --mix sanguo=1 poetry=3。"
            )
        parsed[name] = weight
    return parsed


def mix(corpora: dict[str, Corpus], weights: dict[str, float]) -> dict[str, Corpus]:
    """各语料的训练部分按 `weights` 取开头的若干篇，验证部分不动。

    第 i 个取 w_i·s 字节，s = min_i(训练字节 ÷ w_i)：最紧的那个语料全取，没有一篇取两遍。
    """
    # 每篇之后还有两个换行
    sizes = {name: [len(d.encode()) + 2 for d in corpus.train] for name, corpus in corpora.items()}
    scale = min(sum(sizes[name]) / weights[name] for name in corpora)
    mixed = {}
    for name, corpus in corpora.items():
        count, total, budget = 0, 0, weights[name] * scale * (1 + 1e-9)
        while count < len(corpus.train) and total + sizes[name][count] <= budget:
            total += sizes[name][count]
            count += 1
        if not count:
            raise UserError(
                f"按这个比例，{name} 只分到 {budget:.0f} 字节，一篇也放不下：请把它的比例加大。"
            )
        mixed[name] = Corpus(corpus.train[:count], corpus.val, corpus.notes)
    return mixed
