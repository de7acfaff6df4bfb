"""每个变体一个进程：分配器、线程数、环境变量是整个进程的事，同一个进程里比不出来。

主进程用管道发命令，工作进程照做并回答；同一时刻只有一个进程在算，别的都睡着，
所以可以一轮一轮地交错计时，机器忽快忽慢时大家一起快慢。
"""

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from experiments.training.recipe import adamw
from experiments.training.step import StepOptions, make_step
from model import GPT, GPTConfig
from tokens import load_tokens, sample_batch


@dataclass(frozen=True)
class Setting:
    """所有变体共用的设定：同一个模型、同样的种子、同样的 batch。"""

    batch_size: int = 16
    seq_len: int = 128
    d_model: int = 128
    n_layer: int = 4
    seed: int = 0
    threads: int = 2
    lr: float = 1e-3


@dataclass(frozen=True)
class Variant:
    """一个变体怎么走一步。"""

    step: StepOptions = field(default_factory=StepOptions)
    gather: bool = True  # 一次索引取出整个 batch；否则逐个窗口切片再拼起来
    fused_adamw: bool = True
    threads: int | None = None  # None：用 Setting 的
    env: tuple[tuple[str, str], ...] = ()  # 进程启动之前设好的环境变量


def sliced_batch(
    data: Tensor, batch_size: int, seq_len: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """与 `sample_batch` 抽到同样的窗口，但写成逐个切片再拼接的循环。"""
    starts = torch.randint(len(data) - seq_len, (batch_size, 1), generator=generator)
    x = torch.stack([data[i : i + seq_len].long() for i in starts.flatten().tolist()])
    y = torch.stack([data[i + 1 : i + 1 + seq_len].long() for i in starts.flatten().tolist()])
    return x, y


def build_model(setting: Setting) -> GPT:
    """按设定建一个随机初始化的模型；每头 32 维，`sdpa` 是多数实现的默认写法。"""
    torch.manual_seed(setting.seed)
    config = GPTConfig(
        d_model=setting.d_model, n_layer=setting.n_layer, n_head=max(1, setting.d_model // 32),
        seq_len=setting.seq_len, attention="sdpa",
    )  # fmt: skip
    return GPT(config)


def build(variant: Variant, setting: Setting) -> Callable[[], Tensor]:
    """造一个 `run()`：抽一个 batch，走一步，返回 loss。"""
    model = build_model(setting)
    optimizer = adamw(model, setting.lr, fused=variant.fused_adamw or None)
    step = make_step(model, optimizer, variant.step)
    data = load_tokens(vocab_size=model.config.vocab_size)["train"]
    generator = torch.Generator().manual_seed(setting.seed)
    draw = sample_batch if variant.gather else sliced_batch
    return lambda: step(*draw(data, setting.batch_size, setting.seq_len, generator))


def seconds_per_step(run: Callable[[], Tensor], count: int) -> list[float]:
    """连走 `count` 步，返回每一步的秒数。"""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times


def profile(run: Callable[[], Tensor], count: int = 2) -> list[tuple[str, float]]:
    """`torch.profiler` 看 `count` 步：[(算子或内核的名字, 每步自身秒数)]。"""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        for _ in range(count):
            run()
    return [(e.key, e.self_cpu_time_total / count / 1e6) for e in seen.key_averages()]


def peak_memory(reset: bool = False) -> int | None:
    """这个进程常驻内存的峰值，字节；`reset` 让峰值从现在重新数。报不出时是 None（Linux 才有）。"""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return None


def serve(pipe, variant: Variant, setting: Setting) -> None:
    """工作进程：("prepare", 预热步数)、("time", 步数)、("profile",)、("report",)、("stop",)。"""
    try:
        torch.set_num_threads(variant.threads or setting.threads)
        if variant.step.compile:  # 编译出的内核在剖析里有名字
            torch._inductor.config.cpp.enable_kernel_profile = True
        run = build(variant, setting)
        losses: list[Tensor] = []

        def recorded() -> None:
            losses.append(run())

        while (message := pipe.recv())[0] != "stop":
            match message:
                case ("prepare", warmup):
                    answer = seconds_per_step(recorded, warmup)
                    peak_memory(reset=True)
                case ("time", count):
                    answer = seconds_per_step(recorded, count)
                case ("profile",):
                    answer = profile(run)
                case ("report",):
                    answer = {"loss": losses[-1].item(), "peak_memory": peak_memory()}
            pipe.send(("ok", answer))
        pipe.send(("ok", None))
    except Exception:
        pipe.send(("failed", traceback.format_exc()))


def process_context(fresh: bool = False) -> multiprocessing.context.BaseContext:
    """工作进程怎么启动。Linux 上从一个只导入过 PyTorch、什么也没算过的进程派生，省去各自导入；

    别的系统，或要在 PyTorch 加载之前就设好环境变量时（`fresh`），从头启动。
    """
    if sys.platform != "linux" or fresh:
        return multiprocessing.get_context("spawn")
    from multiprocessing import forkserver  # 别的系统上不一定有

    context = multiprocessing.get_context("forkserver")
    modules = ["__main__", "experiments.training.variant", "torch._inductor.compile_fx"]
    context.set_forkserver_preload(modules)
    forkserver.ensure_running()  # 不等它导入完；已经在运行时什么也不做
    return context


class Worker:
    """主进程这一边：`ask(...)` 发命令，等回答；工作进程出错时把它的错误抛出来。"""

    def __init__(self, name: str, variant: Variant, setting: Setting) -> None:
        context = process_context(fresh=bool(variant.env))
        self.name = name
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, variant, setting), daemon=True)
        with environment({"OMP_NUM_THREADS": str(variant.threads or setting.threads)}):
            with environment(dict(variant.env)):
                self.process.start()
        theirs.close()  # 只留工作进程那一份，它一死这边就读到 EOF

    def ask(self, *message: object) -> object:
        self.pipe.send(message)
        try:
            state, answer = self.pipe.recv()
        except EOFError:
            raise RuntimeError(f"{self.name}：工作进程意外退出") from None
        if state == "failed":
            raise RuntimeError(f"{self.name}：工作进程出错\n{answer}")
        return answer

    def close(self) -> None:
        """请它自己退出；正忙着的（主进程被打断时）只好杀掉。"""
        try:
            self.pipe.send(("stop",))
        except OSError:
            pass  # 它已经死了
        self.process.join(timeout=2)
        if self.process.is_alive():
            self.process.terminate()
        self.process.join()


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """临时设置环境变量；子进程启动时继承它们。"""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def workers(variants: dict[str, Variant], setting: Setting) -> Iterator[dict[str, Worker]]:
    """给每个变体开一个工作进程（同时启动，导入 PyTorch 的时间重叠），用完全部结束。"""
    started: dict[str, Worker] = {}
    try:
        for name, variant in variants.items():
            started[name] = Worker(name, variant, setting)
        yield started
    finally:
        for worker in started.values():
            worker.close()


def progress(text: str) -> None:
    """一行进度，写到 stderr。"""
    print(text, file=sys.stderr, flush=True)
