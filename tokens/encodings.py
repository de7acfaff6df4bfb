"""不是 UTF-8 的文件究竟是什么：看 BOM、NUL、截断的末尾，再看按各种编码读出来像不像文字。

只在读不下去时才来问，回答一句话；这**不**替读者转换：猜错的转换会悄悄得到满篇乱码。
"""

import shlex
from pathlib import Path

from tokens.errors import UserError

SAMPLE = 1 << 16  # 看多少字节就够下判断

BOMS = (  # UTF-32 LE 的 BOM 以 UTF-16 LE 的开头，所以先比长的
    (b"\xff\xfe\x00\x00", "UTF-32"), (b"\x00\x00\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16"),
)  # fmt: skip

# 候选：iconv 的名字 → Python 的名字。GB18030 含 GBK 与 GB2312。
CANDIDATES = {
    "GB18030": "gb18030", "BIG5-HKSCS": "big5hkscs", "UTF-16LE": "utf-16-le",
    "UTF-16BE": "utf-16-be", "SHIFT_JIS": "cp932", "EUC-JP": "euc_jp", "EUC-KR": "cp949",
    "WINDOWS-1252": "cp1252",
}  # fmt: skip
ENOUGH = 8  # 这么多个字符都解得出，就真是 UTF-8
CLEAR = 0.15  # 第一名比第二名至少像这么多，才只说第一名
LIKELY = 0.7  # 像文字的字符不到这么多，就不算候选


def check_start(path: Path) -> None:
    """开头是 UTF-16、UTF-32 的 BOM 或 NUL 排得像 UTF-16 就抛 `UserError`。

    NUL 也是合法的 UTF-8：英文的 UTF-16 解码不会出错，只会得到夹着 NUL 的文本，所以要先看。
    """
    with path.open("rb") as file:
        head = file.read(SAMPLE)
    if (found := _wide(head)) is not None:
        name, why = found
        raise UserError(f"{path} 是 {name} 文本（{why}）：{_convert(path, name)}。")


def _wide(head: bytes) -> tuple[str, str] | None:
    for bom, name in BOMS:
        if head.startswith(bom):
            return name, f"开头是它的 BOM {bom.hex(' ').upper()}"
    if len(head) < 4 or head.count(0) * 20 < len(head):
        return None
    share = [head[i::4].count(0) / len(head[i::4]) for i in range(4)]
    big, little = "BE", "LE"  # 高位字节在前，则 NUL 多在前
    for ends, order in ((share[:2], big), (share[2:], little)):
        if min(ends) > 0.9:
            return "UTF-32" + order, "没有 BOM，每四个字节里至少两个是 NUL"
    even, odd = share[0] + share[2], share[1] + share[3]
    if max(even, odd) > 5 * min(even, odd):
        return "UTF-16" + (big if even > odd else little), "没有 BOM，NUL 总在同一奇偶位"
    return None


def describe(path: Path, position: int, wide_before: int) -> str:
    """`path` 从第 `position` 字节起不是 UTF-8：一句话说它像什么、怎么办。

    `wide_before` 是那之前解出的非 ASCII 字符数：别的编码碰巧解出 `ENOUGH` 个的机会可以不计。
    """
    rest, mixed = path.stat().st_size - position, wide_before >= ENOUGH
    with path.open("rb") as file:
        file.seek(position)
        tail = file.read(4)
        file.seek(position if mixed else 0)
        sample = file.read(SAMPLE)
    truncated = rest < 4 and _begins_character(tail)
    if truncated and wide_before:
        return (
            f"{path} 是 UTF-8，但末尾的一个字符只剩 {rest} 个字节：文件被截断；请重新取得，"
            f"或去掉这半个字符：`head -c {position} {quoted(path)} > {_output(path)}`。"
        )
    text = sample.decode("utf-8", errors="replace")
    good = sum(c > "\x7f" and c != "\ufffd" for c in text)
    bad = text.count("\ufffd") - sample.count("\ufffd".encode())
    if good > 10 * bad:
        return (
            f"{path} 第 {position} 字节起有坏字节，其余是 UTF-8（看过的 {len(sample)} 字节里坏了"
            f" {bad} 处）：请重新取得文件，或丢掉坏字节："
            f"`iconv -c -f UTF-8 -t UTF-8 {quoted(path)} > {_output(path)}`。"
        )
    start = f"{path} 不是 UTF-8 文本（第 {position} 字节起无法解码）"
    if truncated:
        start = f"{path} 不是 UTF-8 文本，或者末尾的一个字符被截断（第 {position} 字节起无法解码）"
    if mixed:
        start = f"{path} 第 {position} 字节之前是 UTF-8，之后不是（像是两种编码拼在一起）"
    readings = _readings(sample)
    if not readings:
        return f"{start}，也不像任何一种常见的文字编码：请检查它是不是文本文件。"
    shown = "，".join(f"按 {name} 读是“{text}”" for name, text in readings)
    if mixed:
        return f"{start}：后面{shown}；请把两部分分别转换成 UTF-8 再合并。"
    choice = "" if len(readings) == 1 else "取读得通的一种，"
    return f"{start}：{shown}；{choice}{_convert(path, readings[0][0])}。"


def _begins_character(piece: bytes) -> bool:
    """`piece` 是某个 UTF-8 字符的前几个字节（不完整）。"""
    try:
        piece.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data" and error.start == 0
    return False


def _readings(sample: bytes) -> list[tuple[str, str]]:
    """按哪些编码读得通：（名字，开头读出来的几个字），最像的在前；一家独大时只留它。"""
    found = []
    for name, codec in CANDIDATES.items():
        text = _decoded(sample, codec)
        if text is not None and (score := _plausible(text)) >= LIKELY:
            excerpt = next((i for i, c in enumerate(text) if c > "\x7f"), 0)
            found.append((score, name, " ".join(text[excerpt : excerpt + 12].split())))
    found.sort(key=lambda item: -item[0])
    return [(name, text) for score, name, text in found if score > found[0][0] - CLEAR]


def _decoded(sample: bytes, codec: str) -> str | None:
    """严格解码；末尾切断的半个字符不算错。一处解不开就是 None。"""
    for end in range(len(sample), max(len(sample) - 4, 0), -1):
        try:
            return sample[:end].decode(codec)
        except UnicodeDecodeError as error:
            if error.start < end - 4:
                return None
    return None


def _plausible(text: str) -> float:
    """非 ASCII 字符里，常用汉字、中文标点、假名、谚文和西文字母占多少；控制字符倒扣。"""
    others = [c for c in text if c > "\x7f"]
    control = sum(c < " " and c not in "\t\r\n\f" for c in text)
    if not others:
        return 0.0
    return (sum(map(_ordinary, others)) - 5 * control) / len(others)


def _ordinary(char: str) -> bool:
    if "\u3000" <= char <= "\u30ff" or "\uff01" <= char <= "\uff5e" or "\uac00" <= char <= "\ud7a3":
        return True
    if "\u00c0" <= char <= "\u00ff" or "\u2010" <= char <= "\u2027":
        return True
    # GB2312 的一级汉字（首字节 B0–D7）和 Big5 的常用字（A4–C6）：各自最常用的四五千字
    gb = char.encode("gb2312", errors="ignore")
    big5 = char.encode("big5", errors="ignore")
    return (len(gb) == 2 and 0xB0 <= gb[0] <= 0xD7) or (len(big5) == 2 and 0xA4 <= big5[0] <= 0xC6)


def _convert(path: Path, name: str) -> str:
    return f"请先转换：`iconv -f {name} -t UTF-8 {quoted(path)} > {_output(path)}`"


def quoted(path: Path) -> str:
    """可以原样贴进 shell 的路径。"""
    return shlex.quote(str(path))


def _output(path: Path) -> str:
    return quoted(path.with_name(f"{path.stem}.utf8{path.suffix}"))
