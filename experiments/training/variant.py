"""一步训练的一个变体：怎样造出来，怎样量它的时间、去向和内存。

变体住在自己的进程里（`lab/workers.py` 的 `own_process`）：主进程先派 `settle` 把它造好，
再一轮一轮地派 `timed_steps`；`profiled_shares` 与 `last_loss_and_peak_memory` 最后派。
"""

import sys
import time
from collections.abc import Callable
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
    lr: float = 1e-3


@dataclass(frozen=True)
class Variant:
    """一个变体怎么走一步。"""

    step: StepOptions = field(default_factory=StepOptions)
    gather: bool = True  # 一次索引取出整个 batch；否则逐个窗口切片再拼起来
    fused_adamw: bool = True
    threads: int | None = None  # None：与别的变体一样多
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


def training_step(variant: Variant, setting: Setting) -> Callable[[], Tensor]:
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


def profile(run: Callable[[], Tensor], count: int = 2) -> tuple[list[tuple[str, float]], float]:
    """`torch.profiler` 看 `count` 步：（[(算子或内核的名字, 占全部自身时间的比例)], 每步的秒数）。

    只给比例：剖析器记下每一次调用，自己也花时间，走一步要多久得另外用没有剖析的步来量。
    第二个返回值是剖析着走一步的墙上时间，与平时的一步相比，就是剖析的代价。
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        start = time.perf_counter()
        for _ in range(count):
            run()
        seconds = (time.perf_counter() - start) / count
    spent = {e.key: e.self_cpu_time_total for e in seen.key_averages()}
    total = sum(spent.values())
    return [(name, part / total) for name, part in spent.items()], seconds


def peak_memory(reset: bool = False) -> int | None:
    """这个进程常驻内存的峰值，字节；`reset` 让峰值从现在重新数。报不出时是 None（Linux 才有）。"""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return None


# --- 在变体自己的进程里 ---

_run: Callable[[], Tensor]  # 这个进程的变体走一步；settle 造好
_loss: Tensor  # 最近一步的 loss


def _run_and_keep_loss() -> None:
    global _loss
    _loss = _run()


def settle(variant: Variant, setting: Setting, warmup: int) -> float:
    """造好这个变体并预热 `warmup` 步，返回第一步的秒数（编译就在那里）；峰值内存从此重新数。"""
    global _run
    if variant.step.compile:  # 编译出的内核在剖析里有名字
        torch._inductor.config.cpp.enable_kernel_profile = True
    _run = training_step(variant, setting)
    first = seconds_per_step(_run_and_keep_loss, warmup)[0]
    peak_memory(reset=True)
    return first


def timed_steps(count: int) -> list[float]:
    """走 `count` 步，返回每一步的秒数；先走一步不计。

    那一步把别的进程占走的缓存暖回来，等别的进程的线程睡下去。
    """
    return seconds_per_step(_run_and_keep_loss, 1 + count)[1:]


def profiled_shares() -> tuple[list[tuple[str, float]], float]:
    """这个变体的剖析，见 `profile`。"""
    return profile(_run)


def last_loss_and_peak_memory() -> tuple[float, int | None]:
    """最近一步的 loss（nat/token），预热之后常驻内存的峰值（字节）。"""
    return _loss.item(), peak_memory()


def progress(text: str) -> None:
    """一行进度，写到 stderr。"""
    print(text, file=sys.stderr, flush=True)
