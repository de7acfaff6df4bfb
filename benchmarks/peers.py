"""同样的任务，别家的写法要多久：与 nanoGPT、transformers、litgpt 交错地比每秒 token 数。

    python benchmarks/peers.py --nanogpt 路径        # 路径是 nanoGPT 的一份检出，不给则跳过
    python benchmarks/peers.py --shapes 128x4x16x128 --rounds 3

每家一个进程，同一时刻只有一家在走：其余的用 SIGSTOP 停住，几步一轮换。机器忽快忽慢时
大家一起快慢，比值仍可信。每次恢复后的第一步不计（它跨过了暂停）。只能在 Linux 与 macOS 上运行。
留下 results/peers.csv，一行一家一种形状。
"""

import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median, quantiles

from experiments.lab.hardware import bf16_support, matmul_peak
from experiments.lab.results import print_table, run_main, save_csv
from model import GPT, GPTConfig
from tokens import load_tokens
from tokens.errors import UserError

HERE = Path(__file__).resolve().parent
HEAD_DIM = 32
NANO_STEP = re.compile(r"iter \d+: loss \S+, time ([\d.]+)ms")
NANO_FILES = ("train.py", "model.py", "configurator.py")
DEFAULT_PEERS = ("ours", "ours_plain", "nanogpt", "transformers", "trainer", "litgpt")


@dataclass(frozen=True)
class Options:
    """比哪些形状、哪几家、多少步。"""

    nanogpt: Path | None = None
    """nanoGPT 的一份检出（文件夹）；它的文件不会被改动"""
    peers: tuple[str, ...] = DEFAULT_PEERS
    """比哪几家；另有 trainer_fast（Trainer 打开 bf16 与 torch_compile）"""
    shapes: tuple[str, ...] = (
        "128x4x16x128", "64x2x16x128", "256x4x16x128", "512x8x4x128",
        "128x4x32x64", "128x4x4x512", "128x4x2x1024",
    )  # fmt: skip
    """形状，写成 d_model x n_layer x batch x seq_len"""
    rounds: int = 8
    """轮换几轮（轮）"""
    steps: int = 3
    """每轮每家计时几步（步）"""
    warmup: int = 3
    """每家预热几步（步），编译在这里完成，不计时"""
    name: str = "peers"
    """结果文件的名字：results/<name>.csv"""

    def __post_init__(self) -> None:
        if not hasattr(signal, "SIGSTOP"):
            raise UserError("这个系统不能暂停进程（没有 SIGSTOP）：请在 Linux 或 macOS 上运行")
        for shape in self.shapes:
            parse_shape(shape)
        missing = self.nanogpt and [f for f in NANO_FILES if not (self.nanogpt / f).is_file()]
        if missing:
            raise UserError(f"--nanogpt {self.nanogpt}：里面没有 {'、'.join(missing)}")


@dataclass(frozen=True)
class Shape:
    """一种形状：模型宽度、层数、batch（序列数）、序列长度。"""

    d_model: int
    n_layer: int
    batch_size: int
    seq_len: int

    @property
    def config(self) -> GPTConfig:
        return GPTConfig(
            d_model=self.d_model, n_head=self.d_model // HEAD_DIM,
            n_layer=self.n_layer, seq_len=self.seq_len,
        )  # fmt: skip


def parse_shape(text: str) -> Shape:
    """"128x4x16x128" → Shape(128, 4, 16, 128)；写法不对抛出 UserError。"""
    parts = text.split("x")
    if len(parts) != 4 or not all(p.isdecimal() and int(p) for p in parts):
        raise UserError(f"--shapes {text}：要写成 d_model x n_layer x batch x seq_len")
    if int(parts[0]) % HEAD_DIM:
        raise UserError(f"--shapes {text}：d_model 要是 {HEAD_DIM} 的倍数")
    return Shape(*map(int, parts))


@dataclass
class Peer:
    """一家：它的进程，以及计到的每步秒数。"""

    name: str
    process: subprocess.Popen
    params: int = 0
    times: list[float] = field(default_factory=list)

    def pause(self) -> None:
        os.killpg(self.process.pid, signal.SIGSTOP)

    def walk(self, steps: int) -> list[float]:
        """恢复运行，走 `steps` 步，再停住；返回每步的秒数。"""
        os.killpg(self.process.pid, signal.SIGCONT)
        seconds: list[float] = []
        while len(seconds) < steps:
            line = self.process.stdout.readline()
            if not line:
                raise UserError(f"{self.name} 中途结束了：{self.error_tail()}")
            found = NANO_STEP.match(line)
            if line.startswith("PARAMS"):
                self.params = int(line.split()[1])
            elif line.startswith("STEP"):
                seconds.append(float(line.split()[1]))
            elif found:
                seconds.append(float(found.group(1)) / 1e3)
        self.pause()
        return seconds

    def error_tail(self) -> str:
        """它写到标准错误的最后一行。"""
        self.process.wait(timeout=30)
        self.process.stderr.seek(0)
        lines = self.process.stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"退出码 {self.process.returncode}"


@contextmanager
def started(name: str, command: list[str], folder: Path, environment: dict) -> Iterator[Peer]:
    """启动一家（自成一个进程组），离开时结束整组。"""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True,
        )  # fmt: skip
        process.stderr = errors
        try:
            yield Peer(name, process)
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)  # 停住的进程收不到 SIGTERM
            except ProcessLookupError:
                pass
            process.stdout.close()
            process.wait()


def nano_vocab(shape: Shape) -> int:
    """使 nanoGPT 的参数量与我们相差不到 1 % 的词表大小（64 的倍数，不大于我们的）。

    它的 MLP 宽 4d，还有一张位置表，同样的 d 与 L 下多出 2 % 左右；缩小词表对它有利
    （输出头随之变快），不会使我们占便宜。
    """
    d, layers = shape.d_model, shape.n_layer
    body = layers * (12 * d * d + 2 * d) + d + shape.seq_len * d
    target = GPT(shape.config).num_params()
    return min(shape.config.vocab_size, round((target - body) / d / 64) * 64)


def prepare_nanogpt(checkout: Path, folder: Path, shape: Shape) -> tuple[list[str], int]:
    """在 `folder` 里布置好 nanoGPT 要的一切（源文件是链接），返回（命令，参数量）。"""
    for name in NANO_FILES:
        (folder / name).symlink_to((checkout / name).resolve())
    data = folder / "data" / "novel"
    data.mkdir(parents=True)
    vocab = nano_vocab(shape)
    tokens = load_tokens()
    for split in ("train", "val"):  # 缩小词表后越界的 id 取余：只影响 loss，不影响用时
        ids = tokens[split].long().remainder(vocab).numpy().astype("uint16")
        ids.tofile(data / f"{split}.bin")
    with (data / "meta.pkl").open("wb") as file:
        pickle.dump({"vocab_size": vocab}, file)
    settings = {
        "dataset": "novel", "device": "cpu", "compile": True, "out_dir": "out",
        "gradient_accumulation_steps": 1, "batch_size": shape.batch_size,
        "block_size": shape.seq_len, "n_layer": shape.n_layer, "n_head": shape.config.n_head,
        "n_embd": shape.d_model, "eval_interval": 10**9, "eval_iters": 1, "log_interval": 1,
        "learning_rate": 1e-3, "max_iters": 10**9,
    }  # fmt: skip
    command = [sys.executable, "-u", "train.py", *(f"--{k}={v}" for k, v in settings.items())]
    d, layers = shape.d_model, shape.n_layer
    params = layers * (12 * d * d + 2 * d) + d + (shape.seq_len + vocab) * d
    return command, params


def start(name: str, shape: Shape, options: Options, stack: ExitStack) -> Peer:
    """启动一家并预热；它停在那里等着轮到自己。"""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    if name == "nanogpt":
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        command, params = prepare_nanogpt(options.nanogpt, folder, shape)
    else:
        folder, params = HERE.parent, 0
        command = [
            sys.executable, "-u", str(HERE / "workers.py"), "--peer", name,
            "--d-model", str(shape.d_model), "--n-layer", str(shape.n_layer),
            "--batch-size", str(shape.batch_size), "--seq-len", str(shape.seq_len),
        ]  # fmt: skip
    peer = stack.enter_context(started(name, command, folder, environment))
    peer.params = params
    peer.walk(options.warmup)
    return peer


def compare(shape: Shape, options: Options) -> list[dict]:
    """一种形状：几家交错地走，每家一行。"""
    with ExitStack() as stack:
        peers = []
        for name in options.peers:
            if name == "nanogpt" and options.nanogpt is None:
                print("跳过 nanogpt：没有给 --nanogpt", file=sys.stderr)
                continue
            begin = time.perf_counter()
            try:
                peers.append(start(name, shape, options, stack))
                print(f"{name} 预热完：{time.perf_counter() - begin:.0f} s", file=sys.stderr)
            except UserError as error:
                print(f"跳过 {name}：{error}", file=sys.stderr)
        for _ in range(options.rounds):
            for peer in peers:
                peer.times += peer.walk(options.steps + 1)[1:]
        return [row(peer, shape) for peer in peers]


def row(peer: Peer, shape: Shape) -> dict:
    """一家的一行：中位数、四分位、每秒 token 数。"""
    low, middle, high = quantiles(peer.times, n=4)
    return {
        "peer": peer.name, "version": peer_version(peer.name), "d_model": shape.d_model,
        "n_layer": shape.n_layer, "batch": shape.batch_size, "seq_len": shape.seq_len,
        "params": peer.params, "ms": middle * 1e3, "ms_q1": low * 1e3, "ms_q3": high * 1e3,
        "tokens_per_s": shape.batch_size * shape.seq_len / median(peer.times),
        "timed_steps": len(peer.times),
    }  # fmt: skip


def peer_version(name: str) -> str:
    """这一家的版本；nanoGPT 没有版本号，我们的就是这个仓库。"""
    package = {"transformers": "transformers", "trainer": "transformers",
               "trainer_fast": "transformers", "litgpt": "litgpt"}.get(name)  # fmt: skip
    try:
        return version(package) if package else "-"
    except PackageNotFoundError:
        return "-"


def main(options: Options) -> None:
    """逐个形状地比较，打印，写 CSV。"""
    import torch

    # 默认的 SIGTERM 不给 Python 收尾的机会，停住的几家会一直留着
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    has_bf16 = bf16_support()[0]  # 没有指令时，模拟出来的速度不是峰值
    bf16 = matmul_peak(torch.bfloat16) if has_bf16 else float("nan")
    peaks = {"peak_fp32": matmul_peak(), "peak_bf16": bf16}
    rows = []
    for text in options.shapes:
        start_time = time.perf_counter()
        found = compare(parse_shape(text), options)
        ours = next((r["ms"] for r in found if r["peer"] == "ours"), None)
        for r in found:
            r["times_ours"] = r["ms"] / ours if ours else None
        rows += [r | peaks for r in found]
        print(f"{text}：{time.perf_counter() - start_time:.0f} s", file=sys.stderr)
        columns = ("peer", "params", "ms", "ms_q1", "ms_q3", "tokens_per_s", "times_ours")
        print(text)
        print_table(
            [{k: r[k] for k in columns} for r in found],
            {k: "{:.1f}" for k in ("ms", "ms_q1", "ms_q3")}
            | {"tokens_per_s": "{:,.0f}", "times_ours": "{:.2f}"},
        )
        save_csv(rows, options.name)


if __name__ == "__main__":
    run_main(main, Options)
