"""分片读多大的文件都不占内存：2 GB 与 2 MB 相比，私有的常驻内存差多少，取一个 batch 慢多少。

    python benchmarks/shards_memory.py                 # 约一分钟，临时占 2 GB 磁盘
    python benchmarks/promote.py shards_memory         # 看过之后收进 book/measured/

两份数据都是随机的 id，除了大小没有不同；几个进程轮流，各自像 train_gpu 那样打开（连同核对哈希），
取许多个 micro-batch。私有的常驻内存是 /proc 里的 RssAnon：映射的文件页不算，系统随时可以收回它们。
只在 Linux 上有。这里**不**量冷的磁盘：文件刚写完，多半还在页缓存里。
"""

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch

from experiments.lab.results import print_table, run_main, save_csv
from experiments.loop.batches import Feed, load_data
from experiments.loop.options import Options as TrainOptions
from experiments.ranks.launch import child_environment
from experiments.ranks.world import World
from tokens import load_tokenizer
from tokens.errors import UserError
from tokens.files import sha256
from tokens.tokenizer import dump_tiktoken, train_bpe

VOCAB = 300
SHAPE = {"vocab_size": VOCAB, "seq_len": 512, "micro_batch": 32, "global_batch_tokens": 65_536}


@dataclass(frozen=True)
class Options:
    """两份大小不同的分片。"""

    megabytes: tuple[int, ...] = (2, 2000)
    """训练分片的大小（10⁶ 字节）"""
    batches: int = 400
    """每个进程取几个 micro-batch（各 32 × 512）"""
    rounds: int = 3
    """每份轮流几次，各是一个新进程"""
    folder: str = ""
    """只给子进程用：读这一份，打印一行 JSON"""


def make(folder: Path, megabytes: int) -> None:
    """一份分片：一个训练文件、一个小的验证文件，id 均匀随机；一块一块地写，算着哈希。"""
    base = folder / "shards-random"
    base.mkdir(parents=True)
    tokenizer = folder / "tokenizer.tiktoken"
    tokenizer.write_bytes(dump_tiktoken(train_bpe(["天地玄黄宇宙洪荒" * 200], VOCAB)))
    assert load_tokenizer(tokenizer).n_vocab <= VOCAB
    rng, shard = np.random.default_rng(0), {"source": "随机", "tokenizer_sha256": sha256(tokenizer)}
    for split, size in (("train", megabytes * 10**6), ("val", 200_000)):
        path = base / f"00000.{split}.bin"
        with path.open("wb") as file:
            for begin in range(0, size, 1 << 24):
                count = min(1 << 24, size - begin) // 2
                file.write(rng.integers(0, VOCAB, count, dtype=np.uint16).tobytes())
        shard[split] = {"tokens": size // 2, "largest_id": VOCAB - 1, "sha256": sha256(path)}
    manifest = {
        "vocab_size": VOCAB, "folder": base.name, "tokenizer_sha256": shard["tokenizer_sha256"],
        "train_largest_id": VOCAB - 1, "val_largest_id": VOCAB - 1, "shards": [shard],
        "ids_sha256": shard["train"]["sha256"],
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


def anonymous_mb() -> float:
    """这个进程私有的常驻内存，10⁶ 字节。"""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024 / 1e6


def read(options: Options) -> dict:
    """子进程：打开、取 `batches` 个，返回内存与每个的毫秒数（中位数）。"""
    torch.set_num_threads(1)
    settings = TrainOptions(data=options.folder, device="cpu", **SHAPE)
    begun = time.perf_counter()
    data = load_data(settings)
    opened = time.perf_counter() - begun
    feed, spent = Feed(data["train"], 0, settings, World(0, 1, torch.device("cpu"))), []
    for _ in range(options.batches):
        begun = time.perf_counter()
        feed.take()
        spent.append(1e3 * (time.perf_counter() - begun))
    # 每 4 个一起抽出来：单个的时间一个高、三个低，先凑成组
    group = SHAPE["global_batch_tokens"] // (SHAPE["micro_batch"] * SHAPE["seq_len"])
    groups = [sum(spent[i : i + group]) / group for i in range(group, len(spent), group)]
    size = sum(part.nbytes for part in data["train"].parts) / 1e6
    return {"megabytes": size, "anonymous_mb": anonymous_mb(), "batch_ms": median(groups),
            "open_s": opened}  # fmt: skip


def main(options: Options) -> None:
    """两份轮流，打印并保存。"""
    if not Path("/proc/self/status").exists():
        raise UserError("这个系统没有 /proc/self/status，量不了私有的常驻内存；请在 Linux 上运行。")
    if options.folder:
        print(json.dumps(read(options)))
        return
    rows = []
    with tempfile.TemporaryDirectory(prefix="shards_memory_") as work:
        for size in options.megabytes:
            make(Path(work) / str(size), size)
        for turn in range(options.rounds):
            for size in options.megabytes:
                command = [sys.executable, __file__, "--folder", str(Path(work) / str(size)),
                           "--batches", str(options.batches)]  # fmt: skip
                done = subprocess.run(command, capture_output=True, text=True, check=True,
                                      env=child_environment(threads=1))  # fmt: skip
                rows.append({"round": turn, **json.loads(done.stdout)})
    print_table(rows, {"megabytes": "{:,.0f}", "anonymous_mb": "{:.1f}", "batch_ms": "{:.3f}",
                       "open_s": "{:.1f}"})  # fmt: skip
    print(f"结果写在 {save_csv(rows, 'shards_memory', options, threads=1)}。")


if __name__ == "__main__":
    run_main(main, Options)
