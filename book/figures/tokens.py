"""`tokens` 页的示意图：一次合并怎样一层层叠上去；窗口怎样从 token 流里抽出来。"""

from matplotlib.figure import Figure

from .style import arrow, box, brace, canvas, note


def merges() -> Figure:
    """“玄德”的六个字节经四次合并成为一个 token（与 `tokens/bpe_by_hand.py` 的输出一致）。"""
    figure, ax = canvas(12.6, 5.6)
    for i, byte in enumerate(("e7", "8e", "84", "e5", "be", "b7")):
        box(ax, 0.2 + 1.5 * i, 0.2, 1.2, 0.8, byte, role="plain")
    rows = (  # x、y、宽、文字、两个部分的中心
        (1.7, 1.5, 2.7, "8e 84", (2.3, 1.0), (3.8, 1.0)),
        (0.2, 2.8, 4.2, "玄", (0.8, 1.0), (3.05, 2.3)),
        (6.2, 1.5, 2.7, "be b7", (6.8, 1.0), (8.3, 1.0)),
        (4.7, 2.8, 4.2, "德", (5.3, 1.0), (7.55, 2.3)),
        (0.2, 4.1, 8.7, "玄德", (2.3, 3.6), (6.8, 3.6)),
    )
    for x, y, width, text, *parts in rows:
        box(ax, x, y, width, 0.8, text, role="data", size=12)
        for part in parts:
            arrow(ax, part, (part[0], y))
    labels = ("字节：编号 0…255", "第 256、258 号", "第 257、259 号：完整的字", "第 260 号：词")
    for y, text in zip((0.6, 1.9, 3.2, 4.5), labels, strict=True):
        note(ax, 9.2, y, text)
    return figure


def windows(pieces: list[str], seq_len: int = 5, start: int = 3) -> Figure:
    """从 token 流 `pieces`（每个 token 的文字，至少 12 个）抽一个窗口，错一位得到 x 和 y。"""
    figure, ax = canvas(14.4, 5.4)
    for i, piece in enumerate(pieces[:12]):
        inside = start <= i <= start + seq_len
        box(ax, 0.1 + 1.2 * i, 4.2, 1.1, 0.8, piece, role="data" if inside else "plain")
    brace(ax, 0.1 + 1.2 * start, 1.2 * (start + seq_len + 1), 4.0, "seq_len + 1 个连续的 token")
    for row, (name, shift, role) in enumerate((("x", 0, "data"), ("y", 1, "weight"))):
        y = 2.1 - 1.7 * row
        note(ax, 1.2 * start - 0.3, y + 0.4, f"{name} =", size=12, align="right")
        for i in range(seq_len):
            piece = pieces[start + i + shift]
            box(ax, 0.1 + 1.2 * (start + i), y, 1.1, 0.8, piece, role=role)
    for i in range(seq_len):
        center = 0.65 + 1.2 * (start + i)
        arrow(ax, (center, 2.1), (center, 1.2))
    note(ax, 0.4 + 1.2 * (start + seq_len), 1.65, "读到这里为止，猜下一个")
    return figure
