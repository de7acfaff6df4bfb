"""代码地图：主题 → 文件、行号、符号。由语法树查出来，符号改名或搬走时构建失败，所以不会过期。"""

import ast
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).resolve().parents[2]


def find(path: str, symbol: str) -> int:
    """`symbol`（如 `loop` 或 `World.sum`）在文件里定义的行号；没有就抛出 LookupError。"""
    node: ast.AST = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    for name in symbol.split("."):
        found = [child for child in ast.iter_child_nodes(node) if name in _names(child)]
        if not found:
            raise LookupError(f"代码地图过期了：{path} 里没有 {symbol}")
        node = found[0]
    return node.lineno


def _names(node: ast.AST) -> list[str]:
    """一条语句定义的名字：函数、类，或者模块里的常量。"""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    return [target.id for target in targets if isinstance(target, ast.Name)]


def code_map(rows: list[tuple[str, ...]], other: str | None = None) -> pd.DataFrame:
    """(主题, 文件, 符号) 的列表 → 一张带行号的表。

    `other` 给出时是另一份代码的名字，每一行有第四项：那份代码里做同一件事的地方（没有就是 "–"）。
    """
    table = [
        {"主题": topic, "符号": symbol, "位置": f"{path}:{find(path, symbol)}"}
        for topic, path, symbol, *_ in rows
    ]
    if other:
        for line, row in zip(table, rows, strict=True):
            line[other] = row[3]
    return pd.DataFrame(table)
