"""房子的规矩：房间之间的箭头只往下，脚本不导入脚本，实验不知道书；全由语法树查出来。"""

import ast
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# 每个房间可以用哪些别的房间；"plan" 只看设备表
ROOMS = {
    "lab": set(),
    "training": {"lab"},
    "ranks": {"lab", "training"},
    "loop": {"lab", "training", "ranks"},
    "plan": {"lab.devices"},
}


def imports(source: str) -> Iterator[str]:
    """一段源码导入的模块的全名；`from a import b` 同时给出 a 与 a.b（b 可能是模块）。"""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_of(path: Path, root: Path) -> str:
    """文件 → 模块的全名。"""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def wrong_arrows(root: Path) -> list[str]:
    """不该有的箭头，一句一条。"""
    problems = []
    for path in sorted((root / "experiments").rglob("*.py")):
        here = module_of(path, root).split(".")[1:]  # ["lab", "results"] 或 ["speed"]
        room = here[0] if len(here) > 1 or (here and here[0] in ROOMS) else None
        for name in set(imports(path.read_text(encoding="utf-8"))):
            parts = name.split(".")
            if parts[0] in ("book", "figures", "_ext", "tests", "benchmarks"):
                problems.append(f"{path.name} 导入了 {name}")
            if parts[0] != "experiments" or len(parts) < 2:
                continue
            target = parts[1]
            if target not in ROOMS:
                if (root / "experiments" / f"{target}.py").exists() and here[:1] != [target]:
                    problems.append(f"{'.'.join(here)} 导入了脚本 {target}")
            elif room and target != room and not _allowed(room, parts[1:]):
                problems.append(f"{'.'.join(here)} 不该用 {'.'.join(parts[1:])}")
    for path in [root / "model.py", *(root / "tokens").rglob("*.py")]:
        for name in imports(path.read_text(encoding="utf-8")):
            if name.split(".")[0] in ("experiments", "book"):
                problems.append(f"{path.name} 导入了 {name}")
    return problems


def _allowed(room: str, target: list[str]) -> bool:
    """`room` 里可不可以写 `target`（如 ["lab", "devices"]）。"""
    if target[0] in ROOMS[room]:
        return True
    names = {name.split(".")[0] for name in ROOMS[room] if "." in name}
    return target[0] in names and (len(target) == 1 or ".".join(target[:2]) in ROOMS[room])


def circle(root: Path, folders: tuple[str, ...]) -> list[str]:
    """导入的圈；没有就是空的。函数体里的导入也算；`tokens/__init__` 除外，只有它知道怎样准备。"""
    files = {module_of(path, root): path for folder in folders for path in
             (root / folder).rglob("*.py")}  # fmt: skip
    graph = {}
    for name, path in files.items():
        used = set(imports(path.read_text(encoding="utf-8")))
        packages = set(folders)  # 包名自己不算：from tokens import X 用的是它门口的名字
        graph[name] = (used & files.keys()) - {name} - packages
    graph.pop("tokens", None)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_arrows_run_down_only():
    """lab ← training ← ranks ← loop ← 脚本，plan 只看设备表；脚本不导入脚本，谁也不导入书。"""
    assert not wrong_arrows(ROOT), "\n".join(wrong_arrows(ROOT))


def test_there_is_no_import_circle():
    """experiments/ 与 tokens/ 里没有导入的圈。"""
    found = circle(ROOT, ("experiments", "tokens"))
    assert not found, " → ".join(found)


def test_nothing_in_experiments_names_the_book():
    """实验的代码里没有 book/ 的路径：数据只往一个方向流。文档字符串和注释可以指路。"""
    for path in (ROOT / "experiments").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        documents = {id(node.body[0].value) for node in ast.walk(tree)
                     if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
                     and node.body and isinstance(node.body[0], ast.Expr)}  # fmt: skip
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named = node.value.startswith("book/") and id(node) not in documents
                assert not named, f"{path.name}：{node.value}"


def test_the_top_of_experiments_is_the_table_of_contents():
    """experiments/ 的顶层只有各章的脚本、presets/ 与五个房间；每个脚本都有同名的页和测试。"""
    top = {path.name for path in (ROOT / "experiments").iterdir() if path.name != "__pycache__"}
    scripts = {name.removesuffix(".py") for name in top if name.endswith(".py")} - {"__init__"}
    assert top - {f"{s}.py" for s in scripts} == {*ROOMS, "presets", "__init__.py"}, f"{top}"
    for name in scripts:
        assert (ROOT / f"book/{name}.md").exists(), f"{name} 没有同名的页"
        assert (ROOT / f"tests/test_{name}.py").exists(), f"{name} 没有同名的测试"


def test_rooms_share_no_name_with_a_chapter_or_the_library():
    """脚本运行时 experiments/ 在搜索路径最前面：房间的名字不能盖住标准库，也不能与章同名。"""
    assert not set(ROOMS) & set(sys.stdlib_module_names)
    assert not set(ROOMS) & {path.stem for path in (ROOT / "experiments").glob("*.py")}


@pytest.mark.parametrize(
    ("where", "line", "said"),
    [
        ("experiments/lab/x.py", "from experiments.training import step", "lab.x 不该用 training"),
        ("experiments/plan/x.py", "from experiments.lab import hardware", "plan.x 不该用 lab"),
        ("experiments/a.py", "import experiments.b", "a 导入了脚本 b"),
        ("experiments/loop/x.py", "from experiments import b", "loop.x 导入了脚本 b"),
        ("experiments/a.py", "from figures.style import box", "a.py 导入了 figures.style"),
        ("tokens/x.py", "from experiments.lab import timing", "x.py 导入了 experiments.lab"),
    ],
)
def test_a_wrong_arrow_is_seen(tmp_path, where, line, said):
    """往每个方向放一条错的箭头：说得出是哪一条。"""
    for name in ("experiments/a.py", "experiments/b.py", "model.py", "tokens/y.py", where):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / where).write_text(line + "\n")
    assert any(problem.startswith(said) for problem in wrong_arrows(tmp_path)), (
        wrong_arrows(tmp_path)
    )


def test_a_circle_is_seen(tmp_path):
    """两个模块互相导入，哪怕写在函数里：说得出这个圈。"""
    folder = tmp_path / "tokens"
    folder.mkdir()
    (folder / "a.py").write_text("import tokens.b\n")
    (folder / "b.py").write_text("def f():\n    from tokens import a\n")
    assert set(circle(tmp_path, ("tokens",))) == {"tokens.a", "tokens.b"}
