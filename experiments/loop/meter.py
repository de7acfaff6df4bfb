"""速度表：ms/步、token/s、MFU、峰值内存；评估和存盘的时间不算在里面。"""

import sys
import time

import torch

from experiments.lab import hardware


def peak_memory_gb(device: torch.device) -> float:
    """到现在为止的峰值，10⁹ 字节：GPU 上是张量占的显存，CPU 上是常驻内存（查不到为 NaN）。"""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    try:
        import resource
    except ImportError:  # Windows
        return float("nan")
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss 的单位：macOS 字节，Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


class Meter:
    """`go()` 开始计时，`stop()` 暂停，`read()` 给出上次以来的速度并清零。

    MFU = 每 token 的 FLOPs（PaLM 附录 B：6N + 12·L·d·T）× token/s ÷（一张卡的峰值 × 卡数），
    显示滑动平均 0.9·旧 + 0.1·新。它是数量级的量规：不知道峰值就没有 MFU，超过 100% 就说明峰值
    给错了，都拒绝显示，而不是给一个错的数。
    """

    def __init__(
        self, flops_per_token: int, tokens_per_step: int, device: torch.device, cards: int,
        peak_flops: float = 0.0,
    ) -> None:  # fmt: skip
        self.flops_per_token, self.tokens_per_step = flops_per_token, tokens_per_step
        known = peak_flops or hardware.peak_flops(str(device))
        self.peak = known * cards if known else None
        self.mfu: float | None = None
        self.refusal = "" if known else "设备表里没有这个设备的峰值，用 --peak-flops 给出"
        self.seconds, self.steps, self.started = 0.0, 0, None

    def go(self) -> None:
        """开始或继续计时；已经在走就不动。"""
        if self.started is None:
            self.started = time.perf_counter()

    def stop(self) -> None:
        """在同步点之后调用：GPU 上的计算是异步的，没等它做完的时间不算数。"""
        if self.started is not None:
            self.seconds += time.perf_counter() - self.started
            self.started = None

    def discard(self) -> None:
        """丢掉上次以来的时间与步数：编译、预热不算速度，也不能成为滑动平均的起点。"""
        self.seconds, self.steps, self.started = 0.0, 0, None

    def read(self) -> dict[str, float]:
        """{"step_ms", "tokens_per_s"}，可信时还有 "mfu"；然后清零。"""
        tokens_per_s = self.steps * self.tokens_per_step / self.seconds
        row = {"step_ms": 1e3 * self.seconds / self.steps, "tokens_per_s": tokens_per_s}
        self.seconds, self.steps = 0.0, 0
        if self.peak:
            now = self.flops_per_token * tokens_per_s / self.peak
            if now > 1:
                self.refusal = f"算出 {now:.0%}，不可能：峰值给小了（或者拿错了设备）"
                self.peak = self.mfu = None
            else:
                self.mfu = now if self.mfu is None else 0.9 * self.mfu + 0.1 * now
                row["mfu"] = self.mfu
        return row
