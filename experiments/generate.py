"""让模型说话，以及把它交给别人：带 KV 缓存的生成，采样，写成 Hugging Face 的 Llama 文件夹。

    python experiments/generate.py say --checkpoint runs/train_gpu --prompt 曹操
    python experiments/generate.py say --checkpoint runs/train_gpu --temperature 0 --no-cache
    python experiments/generate.py study --checkpoint runs/train_gpu          # 这一章的几张表
    python experiments/generate.py export --checkpoint runs/train_gpu --out runs/llama

`--checkpoint` 是 train_gpu 的 .pt 文件、装着 last.pt 的文件夹，或者一个 Llama 文件夹；
`experiments/train_gpu.py --init-from runs/llama` 从写出的文件夹继续训练。
`study` 的结果写进 results/generate_*.csv。
这里**没有**：许多请求拼成一批、量化、对话模板；词表里没有结束符，写够 `--tokens` 个就停。
"""

import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import tiktoken
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from experiments.lab.results import publish, run_main
from experiments.loop import checkpoint
from experiments.loop.export import export_llama
from experiments.loop.kv_cache import KVCache, cache_bytes, cached_logits, decode_flops
from experiments.loop.llama import load_llama
from experiments.loop.sampling import (
    Sampling,
    candidates,
    context_start,
    encode_prompt,
    generate,
    text_pieces,
)
from model import GPT, GPTConfig
from tokens import load_tokenizer
from tokens.errors import UserError

LONGEST = 1 << 20  # Llama 文件夹写着多长就用多长；这只是上限
STUDY = {  # 一张表里并排看的几种采样
    "贪心": Sampling(temperature=0),
    "温度 0.5": Sampling(temperature=0.5),
    "温度 1": Sampling(temperature=1.0),
    "温度 1.5": Sampling(temperature=1.5),
    "top-k 20": Sampling(temperature=1.0, top_k=20),
    "top-p 0.8": Sampling(temperature=1.0, top_p=0.8),
}


@dataclass(frozen=True)
class Say:
    """接着提示往下写，写一个字印一个字。"""

    checkpoint: Path = Path("runs/train_gpu")
    """.pt 检查点、装着 last.pt 的文件夹，或 Llama 文件夹"""
    prompt: str = "曹操"
    """提示；空串从新的一段开始"""
    tokens: int = 100
    """写几个 token"""
    temperature: float = 0.8
    """温度；0 是贪心，总取最可能的"""
    top_k: int = 0
    """只在最可能的 k 个里抽；0 表示不限"""
    top_p: float = 1.0
    """只在概率之和刚够 p 的最少几个里抽；1 表示不限"""
    seed: int = 0
    """随机种子"""
    cache: bool = True
    """用 KV 缓存；--no-cache 每步重算整个上下文，写出的一样"""
    tokenizer: Path | None = None
    """tokenizer.tiktoken；默认由检查点所用的数据决定"""


@dataclass(frozen=True)
class Export:
    """写成 transformers 能读的 Llama 文件夹。"""

    checkpoint: Path = Path("runs/train_gpu")
    """.pt 检查点，或装着 last.pt 的文件夹"""
    out: Path = Path("runs/llama")
    """写到哪里；已有内容时不覆盖"""
    license: str = ""
    """模型卡里的许可（SPDX 名）；空是 mit（内置的小说）或 other（自己的数据）"""
    lm_head: bool = False
    """另存一份输出头，给认不得共享权重的程序"""
    tokenizer: Path | None = None
    """tokenizer.tiktoken；默认由检查点所用的数据决定"""


@dataclass(frozen=True)
class Study:
    """这一章的几张表：缓存等不等于重算、省了多少 FLOPs、占多少内存，几种采样并排。"""

    checkpoint: Path = Path("runs/train_gpu")
    """.pt 检查点、装着 last.pt 的文件夹，或 Llama 文件夹"""
    prompt: str = "曹操"
    """提示"""
    tokens: int = 60
    """各写几个 token"""
    seed: int = 0
    """随机种子"""
    tokenizer: Path | None = None
    """tokenizer.tiktoken；默认由检查点所用的数据决定"""


# ---------------------------------------------------------------- 从文件到模型


@dataclass
class Speaker:
    """读出来的模型，它的分词器（随机 token 训练的没有），以及怎样训练出来的。"""

    model: GPT
    tokenizer: tiktoken.Encoding | None
    data: str  # tokens.pt 的路径；空串是内置的小说
    training: str  # 一句话，写进模型卡


def load(path: Path, tokenizer: Path | None = None) -> Speaker:
    """检查点或 Llama 文件夹 → `Speaker`；不是这两种就抛 `UserError`。"""
    if path.is_dir() and (path / "config.json").exists():
        config, weights = load_llama(path, LONGEST)
        own = path / "tokenizer.tiktoken"
        found = tokenizer or (own if own.exists() else None)
        if found is None:
            raise UserError(f"{path} 里没有 tokenizer.tiktoken；请用 --tokenizer 给出它的词表。")
        state, data = {"config": {"data": str(path)}}, str(path)
    else:
        state = checkpoint.read(find_checkpoint(path))
        config, weights = structure(state, path), checkpoint.strip_wrappers(state["model"])
        data = state.get("config", {}).get("data", "")
        found = tokenizer or (Path(data).parent if data else None)
    words = None if data == "synthetic" and tokenizer is None else load_tokenizer(found)
    if words is not None and words.n_vocab > config.vocab_size:
        raise UserError(f"分词器有 {words.n_vocab} 个词条，模型的词表只有 {config.vocab_size}："
                        "不是配套的；请用 --tokenizer 给出训练时的那一份。")  # fmt: skip
    return Speaker(assemble(config, weights, path), words, data, training_story(state))


def find_checkpoint(path: Path) -> Path:
    """文件夹 → 里面的 last.pt；什么也没有时说明怎样得到一个。"""
    file = path / checkpoint.LAST if path.is_dir() else path
    if file.exists():
        return file
    raise UserError(
        f"没有检查点 {file}；请用 --checkpoint 给出一个，或先训练一个："
        f"`python experiments/train_gpu.py --preset tiny_cpu --out-dir {path}`。"
    )


def structure(state: dict, path: Path) -> GPTConfig:
    """检查点里的模型结构。"""
    try:
        return GPTConfig(**state["model_config"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} 里没有这一版认识的模型结构（{error}）；"
                        "请换用存下它的那一版代码。") from error  # fmt: skip


def assemble(config: GPTConfig, weights: dict[str, Tensor], path: Path) -> GPT:
    """结构与权重合成模型，不再训练。"""
    model = GPT(config).eval().requires_grad_(False)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = str(error).split("\n")[-1].strip()
        raise UserError(f"{path} 的权重与模型结构对不上（{reason}）。") from error
    return model


def training_story(state: dict) -> str:
    """这个检查点是怎样训练的，一句话。"""
    options = state.get("config", {})
    if "step" not in state or "global_batch_tokens" not in options:
        return "没有记录。"
    tokens = state["step"] * options["global_batch_tokens"]
    loss = state.get("best_loss", float("nan"))
    return (f"{state['step']} 步，每步 {options['global_batch_tokens']} 个 token，共 {tokens:,} 个"
            f"（可能重复读同样的文本）；学习率峰值 {options.get('lr')}；验证 loss 最低 {loss:.4f}"
            "（nat/token）。")  # fmt: skip


# ---------------------------------------------------------------- 说


def say(options: Say) -> None:
    """边写边印；最后一行（到 stderr）是个数与速度。"""
    how = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    if options.tokens < 1:
        raise UserError(f"--tokens {options.tokens}：至少是 1。")
    speaker = with_words(load(options.checkpoint, options.tokenizer), options.checkpoint)
    prompt = encode_prompt(options.prompt, speaker.tokenizer)
    seq_len = speaker.model.config.seq_len
    if skipped := context_start(len(prompt), seq_len):
        note(f"提示有 {len(prompt)} 个 token，模型一次只看 {seq_len} 个：前 {skipped} 个没有读。")
    new = generate(speaker.model, prompt, options.tokens, how, cached=options.cache,
                   vocabulary=speaker.tokenizer.n_vocab)  # fmt: skip
    print(options.prompt, end="", flush=True)
    begun = time.perf_counter()
    for piece in text_pieces(new, speaker.tokenizer):
        print(piece, end="", flush=True)
    seconds = time.perf_counter() - begun
    print(flush=True)
    note(f"{options.tokens} 个 token，{options.tokens / seconds:,.0f} token/s。")
    if (total := len(prompt) + options.tokens) > seq_len:
        note(f"共 {total} 个 token，超过了 seq_len={seq_len}：每次写满，就忘掉较早的半个窗口。")


def with_words(speaker: Speaker, path: Path) -> Speaker:
    """没有分词器的模型说不出话。"""
    if speaker.tokenizer is None:
        raise UserError(f"{path} 是用随机 token 训练的，没有文字可说；"
                        "请换一个检查点，或用 --tokenizer 给出词表。")  # fmt: skip
    return speaker


def note(text: str) -> None:
    """不属于正文的话写到 stderr：重定向 stdout 得到的只有文字。"""
    print(text, file=sys.stderr, flush=True)


# ---------------------------------------------------------------- 量：缓存与采样


def compare_cache(model: GPT, prompt: list[int], count: int, vocabulary: int) -> list[dict]:
    """贪心与抽样各写 `count` 个：有没有缓存，id 相同；每个位置的 logits 最多差多少。"""
    rows = []
    for name in ("贪心", "温度 1"):
        how, args = STUDY[name], {"vocabulary": vocabulary}
        fast = list(generate(model, prompt, count, how, cached=True, **args))
        slow = list(generate(model, prompt, count, how, cached=False, **args))
        sequence = (prompt + fast)[: model.config.seq_len]
        rows.append({"how": name, "tokens": count, "same_ids": fast == slow,
                     "logits_diff": largest_gap(model, sequence)})  # fmt: skip
    return rows


@torch.no_grad()
def largest_gap(model: GPT, ids: list[int]) -> float:
    """一个一个地经过缓存，与一次读完整个序列，logits 的最大绝对差。"""
    cache, whole = KVCache(model), model(torch.tensor([ids]))[0][0]
    steps = [cached_logits(model, torch.tensor([[i]]), cache)[0] for i in ids]
    return (torch.stack(steps) - whole).abs().max().item()


def count_cache(model: GPT) -> list[dict]:
    """上下文 n 个 token 时写下一个：数出来的 FLOPs 与公式；缓存的字节数与公式。"""
    rows, n = [], 1
    while n <= model.config.seq_len:
        rows.append({"context": n, **counted(model, n),
                     "formula_cached": decode_flops(model, n, True),
                     "formula_recomputed": decode_flops(model, n, False),
                     "cache_bytes": cache_bytes(model.config, n)})  # fmt: skip
        n *= 2
    return rows


@torch.no_grad()
def counted(model: GPT, n: int) -> dict[str, int]:
    """FlopCounterMode 数出的 FLOPs，以及缓存里前 n 个位置真正占的字节。"""
    idx, cache = torch.zeros(1, n, dtype=torch.long), KVCache(model)
    if n > 1:
        cached_logits(model, idx[:, :-1], cache)
    explicit = GPT(replace(model.config, attention="explicit"))  # SDPA 在 CPU 上数不到
    with FlopCounterMode(display=False) as one:
        cached_logits(model, idx[:, -1:], cache)
    with FlopCounterMode(display=False) as all_:
        explicit(idx)
    store = cache.store[..., : cache.length, :]
    return {"cached": one.get_total_flops(), "recomputed": all_.get_total_flops(),
            "store_bytes": store.numel() * store.element_size()}  # fmt: skip


def sampled(speaker: Speaker, options: Study) -> list[dict]:
    """同一个提示、同一个种子，几种采样各写一段；`kept` 是第一步留下的候选个数。"""
    rows, prompt = [], encode_prompt(options.prompt, speaker.tokenizer)
    args = {"vocabulary": speaker.tokenizer.n_vocab}
    start = context_start(len(prompt), speaker.model.config.seq_len)
    first = speaker.model(torch.tensor([prompt[start:]]))[0][0, -1, : args["vocabulary"]]
    for name, how in STUDY.items():
        how = replace(how, seed=options.seed)
        new = list(generate(speaker.model, prompt, options.tokens, how, **args))
        ids, p = candidates(first, how)
        rows.append({"how": name, "kept": len(ids), "top": p[0].item(),
                     "distinct": len(set(new)),
                     "text": options.prompt + "".join(text_pieces(new, speaker.tokenizer))})
    return rows


def study(options: Study) -> None:
    """三张表，写成 CSV。"""
    if options.tokens < 1:
        raise UserError(f"--tokens {options.tokens}：至少是 1。")
    speaker = with_words(load(options.checkpoint, options.tokenizer), options.checkpoint)
    model, words = speaker.model, speaker.tokenizer
    prompt = encode_prompt(options.prompt, words)
    publish("generate_equal", "有没有缓存，写出的一样吗",
            compare_cache(model, prompt, options.tokens, words.n_vocab), options,
            formats={"logits_diff": "{:.1e}"})  # fmt: skip
    publish("generate_cache", "写下一个 token 的 FLOPs 与缓存的字节数", count_cache(model), options,
            formats=dict.fromkeys(("cached", "recomputed", "cache_bytes"), "{:,}"),
            hide=("formula_cached", "formula_recomputed", "store_bytes"))  # fmt: skip
    rows = sampled(speaker, options)
    publish("generate_sampling", "同一个提示，几种采样", rows, options,
            formats={"top": "{:.3f}"}, hide=("text",))  # fmt: skip
    for row in rows:
        print(f"\n{row['how']}：{row['text']}")


# ---------------------------------------------------------------- 交出去


def export(options: Export) -> None:
    """检查点 → Llama 文件夹，说出写了什么。"""
    if options.checkpoint.is_dir() and (options.checkpoint / "config.json").exists():
        raise UserError(f"{options.checkpoint} 已经是一个 Llama 文件夹；请给一个 .pt 检查点。")
    speaker = load(options.checkpoint, options.tokenizer)
    export_llama(
        options.out, speaker.model.config, speaker.model.state_dict(), speaker.tokenizer,
        data=speaker.data, training=speaker.training, license=options.license,
        lm_head=options.lm_head,
    )  # fmt: skip
    for path in sorted(options.out.iterdir()):
        print(f"{path.stat().st_size:>12,}  {path}")
    if speaker.tokenizer is None:
        note("用随机 token 训练的：没有写分词器。")


# ---------------------------------------------------------------- 入口


def main(options: Say | Export | Study) -> None:
    """按子命令分派。"""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # 终端的编码装不下的字印成 ?，而不是中断
    try:
        with torch.no_grad():
            {Say: say, Export: export, Study: study}[type(options)](options)
    except BrokenPipeError:  # 接在 head 之类后面，对方先走了
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    run_main(main, Say | Export | Study)
