"""怎样计时：交错进行取中位数；问上限时取最快的一次。"""

import time
from collections.abc import Callable, Mapping
from statistics import median


def interleaved(
    variants: Mapping[str, Callable[[], object]], *, repeats: int = 10, warmup: int = 3
) -> dict[str, list[float]]:
    """交错计时：每一轮把所有变体各跑一次，返回 {名字: [秒, …]}，每个长 `repeats`。

    先各预热 `warmup` 次（编译、缓存、分配器都在这里付账，不计入）。交错使机器忽快忽慢时
    大家一起快慢，比值仍可信；汇总时取中位数。
    """
    for run in variants.values():
        for _ in range(warmup):
            run()
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, run in variants.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return times


def medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    """每个变体的中位数，秒。"""
    return {name: median(values) for name, values in times.items()}


def best_seconds(run: Callable[[], object], seconds: float = 0.3) -> float:
    """反复运行约 `seconds` 秒，最快一次的秒数；先跑一次不计。"""
    run()
    best, deadline = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < deadline:  # 至少一次
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best
