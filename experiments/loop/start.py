"""一次训练从哪里开始：从头、续训，或者已有的权重。"""

import os
from dataclasses import asdict, dataclass, fields, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.loop import checkpoint
from experiments.loop.llama import load_llama
from experiments.loop.options import STRUCTURE, Options, check, is_cut
from experiments.loop.shards import locate
from experiments.ranks.world import World
from model import GPTConfig
from tokens.errors import UserError


@dataclass
class Start:
    """从哪里开始：最终的选项、模型结构、权重（None 表示随机），续训时还有整个检查点。

    检查点是分片的、这次也要切开时，`state` 里没有张量：切好之后从 `shards` 就地读，各读各的。
    """

    options: Options
    config: GPTConfig
    weights: dict[str, Tensor] | None = None
    state: dict | None = None
    shards: Path | None = None
    foreign: bool = False  # 权重来自别人的模型：它的分词器多半不是我们的
    tokenizer: str = ""  # 权重是用哪个分词器训练的（它的 sha256）；不知道就是空串


def choose_start(options: Options, given: set[str], world: World) -> Start:
    """scratch | resume | 路径；torchrun 重启的进程不管命令行写的是什么，都续训。"""
    out_dir = Path(options.out_dir)
    path = world.on_master(lambda: checkpoint.prepare(out_dir, world.say))
    if path is not None:
        state = world.together(lambda: checkpoint.peek(path))  # prepare 已经核对过
        finished = state["step"] >= state["config"]["steps"]
        restarted = checkpoint.same_launch(state, out_dir)
        if finished and world.on_master(checkpoint.restart_count) == 0:  # 各台的次数可以不同
            restarted = False  # 走完了的不会再被重启：相同的 --rdzv-id 只是忘了换
        if options.init_from == "resume" or restarted:
            return resume(options, given, state, path, world)
    if options.init_from not in ("scratch", "resume"):  # 结构来自那里，读出来才能查
        return world.together(lambda: pretrained(options, Path(options.init_from)))
    check(options, world.size)
    if options.init_from == "resume":
        world.say(f"{out_dir} 里没有检查点：从头开始。")
    return Start(options, GPTConfig(**{name: getattr(options, name) for name in STRUCTURE}))


def resume(options: Options, given: set[str], state: dict, path: Path, world: World) -> Start:
    """沿用检查点里的选项，只改这次明确写出的；结构永远来自检查点。每处不同都说出来。"""
    world.say(f"从 {path} 的第 {state['step']} 步继续。")
    saved = rebuild(Options, state["config"], path)
    if "preset" in given and options.preset != saved.preset:
        world.say(f"选项来自检查点（预设 {saved.preset}），预设 {options.preset} 不起作用。")
    changes = {"out_dir": options.out_dir, "init_from": options.init_from}
    for name in sorted(given - {"preset", "config", *changes}):
        old, new = getattr(saved, name), getattr(options, name)
        if old != new and name in STRUCTURE:
            world.say(f"结构来自检查点：{name} 仍是 {old}，命令行的 {new} 不起作用。")
        elif old != new:
            world.say(f"这次改了 {name}：{old} → {new}。")
            changes[name] = new
    merged = replace(saved, **changes)
    if merged.optimizer != saved.optimizer:
        raise UserError(f"检查点是用 {saved.optimizer} 训练的，续训不能换成 {merged.optimizer}。")
    check(merged, world.size)
    config = rebuild(GPTConfig, state["model_config"], path)
    if "shards" in state and is_cut(merged, world.size):
        return Start(merged, config, state=state, shards=locate(path, state["shards"]))
    whole = world.master or not is_cut(merged, world.size)  # 切开时只有 0 号读，由它分下去
    state = world.together(lambda: checkpoint.read(path, verify=False) if whole else state)
    return Start(merged, config, state.get("model"), state)


def rebuild(kind: type, values: dict, path: Path) -> Any:
    """由检查点里的字典造回 dataclass；有不认识的键（另一版代码存的）就说出是哪些。"""
    if unknown := sorted(set(values) - {field.name for field in fields(kind)}):
        raise UserError(
            f"{path} 里有这一版不认识的选项 {'、'.join(unknown)}；"
            "请换用存下它的那一版代码，或从头训练。"
        )
    return kind(**values)


def pretrained(options: Options, path: Path) -> Start:
    """只取权重，步数从 0 开始：Llama 文件夹，或者我们自己的检查点。结构也来自那里。"""
    foreign, tokenizer = False, ""
    if path.is_dir():
        config, weights = load_llama(path, options.seq_len)
        foreign = True
    elif path.exists():
        state = checkpoint.read(path)
        config, weights = rebuild(GPTConfig, state["model_config"], path), state["model"]
        tokenizer = state.get("tokenizer", "")
    else:
        raise UserError(
            f"--init-from {path}：没有这个文件或文件夹；可以是 scratch、resume、"
            "一个 Llama 文件夹或一个 .pt 检查点。"
        )
    options = replace(options, **{name: getattr(config, name) for name in STRUCTURE})
    check(options, int(os.environ.get("WORLD_SIZE", 1)))
    return Start(options, config, weights, foreign=foreign, tokenizer=tokenizer)


def same_everywhere(options: Options, world: World) -> None:
    """每个进程的选项、PyTorch 的版本与代码都要相同；不同时每个进程都抛同一个 `UserError`。"""
    mine = {f"选项 {name}": value for name, value in asdict(options).items() if name != "config"}
    first, *others = world.gather(mine | {"PyTorch": torch.__version__, "代码": code_digest()})
    for rank, theirs in enumerate(others, start=1):
        for name, value in first.items():
            if theirs[name] != value:
                raise UserError(
                    f"{rank} 号进程的{name} 是 {theirs[name]}，0 号的是 {value}：各机器要用同样的"
                    "命令、配置文件、代码与 PyTorch。"
                )


def code_digest() -> str:
    """决定训练结果的源码的摘要：模型、数据与循环。"""
    root = Path(__file__).resolve().parents[2]
    hasher = blake2b(digest_size=6)
    for part in ("model.py", "tokens", "experiments"):
        paths = [root / part] if part.endswith(".py") else sorted((root / part).rglob("*.py"))
        for path in paths:
            hasher.update(path.read_bytes().replace(b"\r\n", b"\n"))
    return hasher.hexdigest()


def compare_vocabulary(start: Start, data: dict, world: World) -> None:
    """外来的权重与数据词表不同大时大声说：同一个 id 在两边不是同一个词，预训练等于没有。"""
    ours, theirs = data["meta"].get("vocab_size"), start.config.vocab_size
    if start.foreign and ours not in (None, theirs):
        world.say(
            f"警告：权重的词表有 {theirs} 个词条，数据的分词器只有 {ours} 个，不是同一个分词器；"
            "请用原模型的分词器准备 --data。", error=True,
        )  # fmt: skip
    mine = data["meta"].get("tokenizer_sha256", "")
    if start.tokenizer and mine and start.tokenizer != mine:
        world.say(
            f"警告：权重是用另一个分词器训练的（{start.tokenizer[:12]}…，数据的是 {mine[:12]}…），"
            "词表一样大，同一个 id 却是另一个词；请用原来的分词器准备 --data。", error=True,
        )  # fmt: skip
