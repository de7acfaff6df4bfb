"""把数字写成文字：定点、分组、科学计数、时长。只用标准库。

一律十进制四舍五入、恰好一半时进位，与 JavaScript 的 `toFixed` 相同：
书页上的计算器与命令行因此印出同样的每一位。
"""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal


def fixed(value: float, digits: int) -> str:
    """定点小数。

    >>> fixed(0.125, 2), f"{0.125:.2f}"
    ('0.13', '0.12')
    """
    return str(Decimal(value).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


def grouped(value: float, digits: int = 0) -> str:
    """每三位一个逗号。"""
    return f"{Decimal(fixed(value, digits)):,}"


def scientific(value: float, digits: int = 1) -> str:
    """科学计数，如 1.8e+18。"""
    exact = Decimal(value)
    exponent = exact.adjusted()
    mantissa = fixed(exact.scaleb(-exponent), digits)
    if mantissa.startswith("10"):  # 9.96 进位成 10.0
        exponent, mantissa = exponent + 1, fixed(1, digits)
    return f"{mantissa}e{exponent:+03d}"


def readable(count: float) -> str:
    """个数的读法，三位有效数字：1.31 B、26.0 B、124 M、8,192。"""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if count >= size:
            scaled = count / size
            return f"{fixed(scaled, 0 if scaled >= 100 else 1 if scaled >= 10 else 2)} {unit}"
    return grouped(count)


def duration(hours: float) -> str:
    """时长：不足一小时用分钟，三天以上另注天数。"""
    if hours < 1:
        return f"{fixed(hours * 60, 1)} 分钟"
    if hours < 72:
        return f"{fixed(hours, 1)} 小时"
    return f"{grouped(hours, 1)} 小时（{grouped(hours / 24, 1)} 天）"
