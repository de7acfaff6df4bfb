"""从模型里取出文字：logits → 概率（温度、top-k、top-p）→ 抽一个 token → 半个字不印的文字流。

    text = sample_text(model, load_tokenizer(), "曹操", 60, Sampling(temperature=0.8))

上下文超过 seq_len 之后怎么办，由 `context_start` 一处规定：有没有缓存都照它来，结果才相同。
这里没有束搜索、重复惩罚，也没有结束符：我们的词表里没有特殊词条，写够个数就停。
"""

import codecs
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import tiktoken
import torch
from torch import Tensor

from experiments.loop.kv_cache import KVCache, cached_logits
from model import GPT
from tokens.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """怎样从分布里挑一个 token。不合理的值在建立时抛 `UserError`。"""

    temperature: float = 0.8  # logits 除以它；0 是贪心：总取最大的
    top_k: int = 0  # 只留最大的 k 个；0 表示不限
    top_p: float = 1.0  # 只留概率之和刚够 p 的最少几个；1 表示不限
    seed: int = 0  # 第 i 个 token 用第 i 个随机数，所以有没有缓存抽到的一样

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"--temperature {self.temperature}：要一个不小于 0 的有限数。")
        if self.top_k < 0:
            raise UserError(f"--top-k {self.top_k}：要一个不小于 0 的整数，0 表示不限。")
        if not 0 < self.top_p <= 1:
            raise UserError(f"--top-p {self.top_p}：要大于 0、不超过 1，1 表示不限。")
        if not 0 <= self.seed < 1 << 63:
            raise UserError(f"--seed {self.seed}：要在 0 与 2⁶³ 之间。")


def candidates(logits: Tensor, how: Sampling) -> tuple[Tensor, Tensor]:
    """一个位置的 logits（V,）→ (id, 概率)，各 (m,)，概率从大到小、和为 1。

    次序是：温度，top-k，top-p（Holtzman 等 2020，arXiv 1904.09751，第 3.1 节）；至少留一个。
    在 float64 里算：几千个概率的累加在 float32 里误差会碰到 top-p 的边界。
    """
    ordered, ids = logits.double().sort(descending=True, stable=True)
    if how.temperature == 0:
        return ids[:1], torch.ones(1, dtype=torch.float64)
    keep = min(how.top_k or len(ids), len(ids))
    # 先减去最大的再除：温度再小也不会溢出成 NaN
    p = ((ordered[:keep] - ordered[0]) / how.temperature).softmax(0)
    if how.top_p < 1:
        before = p.cumsum(0) - p  # 比它更可能的那些合计多少；已经够了，它就不要
        p = p[before < how.top_p]
        p = p / p.sum()
    return ids[: len(p)], p


def draw(logits: Tensor, how: Sampling, uniform: float) -> int:
    """用一个 [0, 1) 的随机数从分布里抽一个 id：累计概率第一次超过它的那个。"""
    ids, p = candidates(logits, how)
    place = torch.searchsorted(p.cumsum(0), torch.tensor([uniform], dtype=p.dtype), right=True)
    return int(ids[min(int(place), len(ids) - 1)])  # 舍入使总和略小于 1 时取最后一个


def context_start(length: int, seq_len: int) -> int:
    """已有 `length` 个 token 时，模型从第几个读起：装得下就从头，满了就丢掉较早的半个窗口。

    一次丢半个而不是一个：每丢一次，所有位置都变了，缓存要重建；丢一个就得每步重建。
    """
    if length <= seq_len:
        return 0
    hop = max(1, seq_len // 2)
    return math.ceil((length - seq_len) / hop) * hop


@torch.no_grad()
def next_logits(model: GPT, ids: list[int], cache: KVCache | None, seen: int) -> Tensor:
    """`ids` 之后那个 token 的 logits（V,）；缓存里已有前 `seen` 个。没有缓存就全部重算。"""
    device = model.embed.weight.device
    if cache is None:
        return model(torch.tensor([ids], device=device))[0][0, -1]
    return cached_logits(model, torch.tensor([ids[seen:]], device=device), cache)[0]


def generate(
    model: GPT, prompt: list[int], count: int, how: Sampling, *, cached: bool = True,
    vocabulary: int | None = None,
) -> Iterator[int]:  # fmt: skip
    """逐个给出接在 `prompt` 后面的 `count` 个 id；提示不能是空的（没有东西可以接）。

    `vocabulary` 是分词器的词条数：模型的词表可能补大了，多出来的 id 没有文字，不抽它们。
    """
    if not prompt:
        raise ValueError("提示至少要有一个 token")
    generator = torch.Generator().manual_seed(how.seed)
    ids, start, seen, cache = list(prompt), 0, 0, None
    for _ in range(count):
        if (now := context_start(len(ids), model.config.seq_len)) != start:
            start, cache = now, None  # 窗口移动了，位置都变了：缓存作废，重新读
        if cached and cache is None:
            cache, seen = KVCache(model), 0
        logits = next_logits(model, ids[start:], cache, seen)[:vocabulary].cpu()
        seen = len(ids) - start
        ids.append(draw(logits, how, torch.rand((), generator=generator).item()))
        yield ids[-1]


def text_pieces(ids: Iterable[int], tokenizer: tiktoken.Encoding) -> Iterator[str]:
    """id 的流 → 文字的流：每来一个 token 给出已经完整的字，半个字先攒着，绝不给出。

    字节级 BPE 的 token 可以断在一个汉字中间。模型写出了拼不成字的字节时，在该处给出一个 �；
    最后还没写完的半个字不要：再写一个 token 它也许就完整了，它不是错误。
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in ids:
        if piece := decoder.decode(tokenizer.decode_single_token_bytes(token)):
            yield piece


def encode_prompt(prompt: str, tokenizer: tiktoken.Encoding) -> list[int]:
    """提示 → id。空提示从一个换行开始：语料里换行之后总是新的一段。语料里没有的字按字节编码。"""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"提示的第 {error.start + 1} 个字符不是合法的 Unicode 文字；"
                        "请用 UTF-8 的终端重新输入。") from error  # fmt: skip
    return tokenizer.encode_ordinary(prompt or "\n")


def sample_text(
    model: GPT, tokenizer: tiktoken.Encoding, prompt: str, count: int, how: Sampling
) -> str:
    """提示接上 `count` 个 token 的文字；训练脚本可以用它以模型的一句话收尾。"""
    ids = encode_prompt(prompt, tokenizer)
    new = generate(model, ids, count, how, vocabulary=tokenizer.n_vocab)
    return prompt + "".join(text_pieces(new, tokenizer))
