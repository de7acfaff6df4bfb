"""设备表：稠密 bf16 峰值、显存、板卡功率、参考租价。只用标准库。

峰值一律是**稠密**矩阵乘法的 bf16 数字（FLOP/s）。厂商的宣传页常写「稀疏」数字，
正好是稠密的两倍；拿它做分母，MFU 会凭空减半，拿别的卡做分母则可能算出 104 %。
价格会变：表里只有能从公开训练记录反推的三种，都注明出处；其余留空，由使用者给出。
"""

from __future__ import annotations

import re
from dataclasses import dataclass

PRICE_DATE = "2025-10"  # 参考租价的时点；过期即失效，所有脚本都能用 --price 改写


@dataclass(frozen=True)
class Device:
    """一种加速卡。

    peak_bf16 是稠密 bf16 峰值（FLOP/s），memory_gb 是出售过的显存规格（10^9 字节），
    power_w 是板卡功率上限（W），price_per_hour 是每卡每小时的参考租价（美元，没有可靠出处为
    None），match 是 torch.cuda.get_device_name() 里的特征词组（小写，按词匹配）。
    """

    name: str
    peak_bf16: float
    memory_gb: tuple[int, ...] | None
    power_w: int | None
    price_per_hour: float | None
    match: tuple[str, ...]


# 租价出处：H100 来自 nanochat 的「8 卡约 24 美元/小时」；
# A100 来自 llm.c 的「8 卡 94.3 分钟约 20 美元」；
# 3090 来自 minimind 的「2.31 小时 3.0 元」（按 7.1 元/美元折算）。
DEVICES: dict[str, Device] = {
    "a100": Device("A100 SXM", 312e12, (40, 80), 400, 1.6, ("a100",)),
    "h100": Device("H100 SXM", 989e12, (80,), 700, 3.0, ("h100",)),
    "h100-nvl": Device("H100 NVL", 835e12, (94,), 400, None, ("h100 nvl",)),
    "h100-pcie": Device("H100 PCIe", 756e12, (80,), 350, None, ("h100 pcie",)),
    "h200": Device("H200 SXM", 989e12, (141,), 700, None, ("h200",)),
    "b200": Device("B200", 2.25e15, (180,), 1000, None, ("b200",)),
    "gb200": Device("GB200", 2.5e15, (186,), 1200, None, ("gb200",)),
    "l40s": Device("L40S", 362e12, (48,), 350, None, ("l40s",)),
    "l4": Device("L4", 121e12, (24,), 72, None, ("l4",)),
    "a40": Device("A40", 149.7e12, (48,), 300, None, ("a40",)),
    "a30": Device("A30", 165e12, (24,), 165, None, ("a30",)),
    "a10": Device("A10", 125e12, (24,), 150, None, ("a10",)),
    "4090": Device("RTX 4090", 165.2e12, (24,), 450, None, ("rtx 4090",)),
    "3090": Device("RTX 3090", 71e12, (24,), 350, 0.18, ("rtx 3090",)),
    "5090": Device("RTX 5090", 209.5e12, (32,), 575, None, ("rtx 5090",)),
    "mi300x": Device("MI300X", 1.3074e15, (192,), 750, None, ("mi300x",)),
    "mi355x": Device("MI355X", 2.5e15, (288,), 1400, None, ("mi355x",)),
    # 一块 MI250X 在 torch 里是两个设备，各有一半峰值：按名字认会把 MFU 算低一半，所以不认。
    "mi250x": Device("MI250X（整卡，两个 GCD）", 383e12, (128,), 560, None, ()),
}

# 名字里有这些词的是另一种卡（峰值不同）或一块卡的切片（MIG、vGPU），宁可不认也不报错的数字。
_OTHER_CARD = {"ti", "d", "laptop", "mig", "max", "super", "vgpu", "grid"}
_SLICE = re.compile(r"\d+[abcq]")  # vGPU 规格的后缀：A100-10C 是一块 A100 切下的 10 GB
_SIZE = re.compile(r"(\d+)gb")


def find_device(torch_device_name: str) -> Device | None:
    """由 torch.cuda.get_device_name() 的返回值认出设备；认不出返回 None，绝不猜。

    >>> find_device("NVIDIA H100 80GB HBM3").name
    'H100 SXM'
    >>> find_device("NVIDIA RTX A4000") is None  # 不是 A40
    True
    """
    words = re.split(r"[\s\-_/,()]+", torch_device_name.lower())
    if _OTHER_CARD & set(words) or any(map(_SLICE.fullmatch, words)):
        return None
    best: tuple[int, Device | None] = (0, None)
    for device in DEVICES.values():
        for phrase in device.match:
            needed = phrase.split()
            if set(needed) <= set(words) and len(needed) > best[0]:
                best = (len(needed), device)
    found = best[1]
    if found and "nvl" in words and "nvl" not in found.match[0]:
        return None  # 例如 H200 NVL：峰值与 SXM 版不同，表里没有
    sizes = {int(size[1]) for word in words if (size := _SIZE.fullmatch(word))}
    if found and sizes - set(found.memory_gb or ()):
        return None  # 例如 64 GB 的 A100：没有卖过这个规格，是定制的另一种卡
    return found
