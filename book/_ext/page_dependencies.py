"""Sphinx 扩展：改了脚本、模型或数据代码，下次构建只重跑用到它的那些页。

Sphinx 自己只看书页和它 literalinclude 的文件。这里从每页的代码单元里找出它运行的脚本、
读的测量文件、导入的模块，再沿着项目内的 import 找下去，全部登记成这一页的依赖。
"""

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]
CELL = re.compile(
    r"^(?P<fence>`{3,}|:{3,})\{code-cell\}[^\n]*\n(?P<body>.*?)^(?P=fence)[ \t]*$",
    re.MULTILINE | re.DOTALL,
)
OPTIONS = re.compile(r"\A(?:---\n.*?\n---\n|(?::[\w-]+:[^\n]*\n)+)", re.DOTALL)


def page_files(text: str, root: Path = ROOT) -> set[Path]:
    """一页依赖的项目文件（绝对路径）：代码单元里的 run、results、measured 和 import 的闭包。

    Raises:
        ValueError: `run` 等的第一个参数不是字符串字面量，依赖无从得知。
    """
    found: set[Path] = set()
    for tree in page_cells(text):
        found |= set(_imports(tree, root / "book", root))
        found |= set(_named_in_calls(tree, root))
    return _closure(found, root)


def page_cells(text: str) -> Iterator[ast.Module]:
    """每个代码单元的语法树；IPython 的 % 和 ! 行不是 Python，略去。"""
    for match in CELL.finditer(text):
        body = OPTIONS.sub("", match["body"])
        lines = (line for line in body.split("\n") if not line.lstrip().startswith(("%", "!")))
        yield ast.parse("\n".join(lines))


def _named_in_calls(tree: ast.Module, root: Path) -> Iterator[Path]:
    """run("脚本")、results("名字")、measured("名字") 所指的文件。"""
    places = {"run": "{}", "results": "experiments/{}.py", "measured": "book/measured/{}.csv"}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        if node.func.id not in places or not node.args:
            continue
        if not isinstance(node.args[0], ast.Constant):
            raise ValueError(f"{ast.unparse(node)} 的第一个参数要写成字符串，依赖才查得到")
        path = root / places[node.func.id].format(node.args[0].value)
        if path.is_file():  # results 的名字不一定与脚本同名
            yield path


def _imports(tree: ast.Module, folder: Path, root: Path) -> Iterator[Path]:
    """语法树里（包括函数体内）导入的项目文件；`folder` 是导入者所在的目录。"""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _module_files(alias.name, folder, root)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:  # 相对导入：从导入者的包算起
                package = folder.relative_to(root).parts
                package = package[: len(package) - node.level + 1]
                base = ".".join([*package, *filter(None, [base])])
            for name in [base, *(f"{base}.{alias.name}" for alias in node.names)]:
                yield from _module_files(name, folder, root)


def _module_files(name: str, folder: Path, root: Path) -> Iterator[Path]:
    """模块名对应的项目文件，连同各级包的 `__init__.py`；不是项目的模块则没有。"""
    parts = name.split(".")
    for base in {root, root / "book", folder}:
        for depth in range(1, len(parts) + 1):
            path = base.joinpath(*parts[:depth])
            for candidate in (path.with_suffix(".py"), path / "__init__.py"):
                if candidate.is_file():
                    yield candidate


def _closure(files: set[Path], root: Path) -> set[Path]:
    """沿着 import 把间接依赖也收进来。"""
    seen: set[Path] = set()
    waiting = list(files)
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        if path.suffix == ".py":
            tree = ast.parse(path.read_text(encoding="utf-8"))
            waiting.extend(_imports(tree, path.parent, root))
    return seen


def _note(app: Sphinx, docname: str, source: list[str]) -> None:
    try:
        files = page_files(source[0], Path(app.srcdir).resolve().parent)
    except (SyntaxError, ValueError) as error:
        logger.warning("找不出本页的依赖：%s", error, location=docname)
        return
    for path in files:
        app.env.note_dependency(os.path.relpath(path, app.srcdir))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", _note)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
