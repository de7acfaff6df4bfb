"""机器会坏：每天中断几次，多久存一次检查点最划算。只用标准库。

失败率取自一次公开的训练：16,384 张 H100，54 天，计划外的中断 419 次（arXiv 2407.21783，3.3.4 节）。
最佳间隔是 Young（1974）与 Daly（2006）的一阶近似 √(2·δ·M)，δ 是存一次的时间，M 是平均多久坏一次。
假定失败彼此独立、与卡数成正比；没有算备用机器，也没有算异步存盘（那时 δ 只是暂停的时间）。
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from experiments.plan.architecture import BudgetError
from experiments.plan.layouts import MODELS

INTERRUPTIONS, DAYS, GPUS = 419, 54, 16_384  # 公开的：计划外的中断、天数、卡数
EFFECTIVE = 0.90  # 同一处：有效训练时间「超过 90 %」
RATE = INTERRUPTIONS / DAYS / GPUS  # 每张卡每天
CHECKPOINT_BYTES = 12  # 每参数：fp32 权重 4 + Adam 两个矩 8
STORAGE = 2e12  # 存储的持续吞吐，字节/秒（同一篇，3.3.1 节：2 TB/s 持续，7 TB/s 峰值）
WRITE_PER_NODE = 2e9  # 一台机器写得出多快，字节/秒：假定；小集群时它是瓶颈
RESTART = 600.0  # 发现、重新排队、读回检查点、编译，秒：假定


@dataclass(frozen=True)
class Upkeep:
    """一种规模的养护账。时间的单位是秒。"""

    gpus: int
    per_day: float  # 每天中断几次
    mtbf: float
    save: float  # 存一次检查点
    interval: float  # 最佳间隔
    lost: float  # 白费的时间所占的比例：存盘 + 重做 + 重启


def best_interval(save: float, mtbf: float) -> float:
    """√(2·δ·M)。δ 远小于 M 时才成立；不是时抛 BudgetError。"""
    if not 0 < save < mtbf / 2:
        raise BudgetError(
            f"存一次要 {save:.0f} 秒，而平均 {mtbf:.0f} 秒就坏一次：存盘太慢，先把它变快。"
        )
    return sqrt(2 * save * mtbf)


def lost_share(interval: float, save: float, mtbf: float, restart: float = RESTART) -> float:
    """每隔 `interval` 存一次，白费几成：存盘 δ/τ，平均重做半个间隔 τ/2M，重启 R/M。"""
    return save / interval + interval / (2 * mtbf) + restart / mtbf


def upkeep(params: float, gpus: int, gpus_per_node: int = 8) -> Upkeep:
    """这个规模每天坏几次，多久存一次，一共白费几成。"""
    mtbf = 86400 / (RATE * gpus)
    nodes = max(1, gpus // gpus_per_node)
    save = CHECKPOINT_BYTES * params / min(STORAGE, nodes * WRITE_PER_NODE)
    interval = best_interval(save, mtbf)
    return Upkeep(gpus, RATE * gpus, mtbf, save, interval, lost_share(interval, save, mtbf))


SCALES = (("7B", 64), ("70B", 512), ("70B", 4096), ("405B", 16_384), ("1T", 100_000))


def table() -> list[tuple[str, Upkeep]]:
    """几种规模的养护账，模型的形状与 `layouts.MODELS` 相同。"""
    return [(name, upkeep(MODELS[name][0].params(), gpus)) for name, gpus in SCALES]


def most_lost_per_interruption() -> float:
    """由「有效时间超过 90 %」反推：每次中断平均最多花掉多少秒（重启、重做、存盘都在内）。"""
    return (1 - EFFECTIVE) * DAYS * 86400 / INTERRUPTIONS
