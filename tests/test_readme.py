"""README 的两条命令、依赖清单与 CI：读者照着做的每一步都站得住。"""

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
for folder in ("benchmarks", "book/_ext"):
    sys.path.insert(0, str(ROOT / folder))

import build_minutes  # noqa: E402
import minutes  # noqa: E402

README = (ROOT / "README.md").read_text(encoding="utf-8")
REQUIREMENTS = (ROOT / "requirements.txt").read_text(encoding="utf-8")
CONSTRAINTS = (ROOT / ".ci/constraints.txt").read_text(encoding="utf-8")
CHAPTERS = sorted(
    path.stem
    for path in (ROOT / "book").glob("*.md")
    if (ROOT / f"experiments/{path.stem}.py").is_file()
)
PIN = re.compile(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.]+)")


def fenced_blocks(text: str) -> list[list[str]]:
    """以 ``` 围起来的各块，每块是行的列表。"""
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [block.splitlines() for block in blocks]


def entries(text: str) -> list[str]:
    """清单里去掉注释和空行之后的行。"""
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return [line for line in lines if line]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_readme_has_exactly_two_one_line_commands() -> None:
    """README 恰有两条命令，各占一行，各建自己的环境、自己装依赖，一条建书，一条跑测试。"""
    blocks = fenced_blocks(README)
    assert [len(block) for block in blocks] == [1, 1], blocks
    commands = [block[0] for block in blocks]
    for command in commands:
        assert "&& pip install -r requirements.txt &&" in command, command
    environments = [re.search(r"-m venv (\S+) && \. (\S+)/bin/activate", c) for c in commands]
    names = [found[1] for found in environments if found and found[1] == found[2]]
    assert len(set(names)) == 2, f"两条命令应各用一个新环境：{commands}"
    assert commands[0].endswith("&& jupyter-book build book"), commands[0]
    assert commands[1].endswith("&& pytest -n 2"), commands[1]


def test_readme_environments_are_ignored_by_git() -> None:
    """README 里新建的环境不会进仓库，也不会被代码检查扫到。"""
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    assert ".venv-*/" in ignored
    assert re.findall(r"-m venv (\S+)", README) == [".venv-book", ".venv-test"]


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_readme_links_exist(link: str) -> None:
    """README 里每个站内链接都指向真实的文件。"""
    assert (ROOT / link).is_file(), f"README 链接了不存在的 {link}"


def test_readme_table_lists_every_chapter() -> None:
    """章节表列出每一个有书页的脚本：书页、脚本、测试同名，按书页的标题称呼，次序与目录相同。"""
    for name in CHAPTERS:
        page = (ROOT / f"book/{name}.md").read_text(encoding="utf-8")
        title = re.search(r"^# (.*)", page, re.MULTILINE)[1]
        assert f"[{title}](book/{name}.md)" in README, f"章节表里没有 {name}：{title}"
        assert f"(experiments/{name}.py)" in README and f"(tests/test_{name}.py)" in README, name
    listed = re.findall(r"^\| \[.*?\]\(book/(\w+)\.md\) \|", README, re.MULTILINE)
    toc = (ROOT / "_toc.yml").read_text(encoding="utf-8")
    order = [name for name in re.findall(r"- file: (\w+)", toc) if name in listed]
    assert listed == order, f"README 的次序 {listed}，目录的次序 {order}"


def test_readme_minutes_are_the_committed_measurement() -> None:
    """README 里的每一个时间都等于 `book/measured/build_minutes.csv` 里的数，按同样的规则取整。"""
    rows = minutes.read_minutes(ROOT / "book")
    assert README == build_minutes.readme_with(README, rows), "请运行 benchmarks/build_minutes.py"
    for name in CHAPTERS:
        said = minutes.spoken(float(rows[name]["seconds"])) if name in rows else "–"
        row = next(line for line in README.splitlines() if f"(book/{name}.md)" in line)
        assert row.endswith(f" | {said} |"), f"{name} 应写 {said}：{row}"
    line = next(line for line in README.splitlines() if "建书" in line and "pytest" not in line)
    for name in ("book", "first", "pytest"):
        if name in rows:
            assert minutes.spoken(float(rows[name]["seconds"])) in line, f"{name}：{line}"


def test_build_minutes_rewrites_every_time_in_the_readme() -> None:
    """`build_minutes.py` 改写 README 的每一处时间：各章的最后一格、建书、第一次建书、测试。"""
    seconds = dict.fromkeys(CHAPTERS, 41.0) | {"book": 500.0, "first": 700.0, "pytest": 400.0}
    rows = {name: {"seconds": str(value)} for name, value in seconds.items()}
    text = build_minutes.readme_with(README, rows)
    assert text.count(" | 50 秒 |") == len(CHAPTERS), text
    assert "建书 9 分钟（第一次含编译 12 分钟），测试 7 分钟；" in text, text
    assert build_minutes.readme_with(text, rows) == text, "再运行一遍不该有变化"


def test_minutes_are_rounded_up_to_what_a_reader_needs() -> None:
    """时间往大里取：十秒以内是“几秒”，一分钟内按十秒，五分钟内按半分钟，再长按分钟。"""
    table = {3: "几秒", 12: "20 秒", 61: "1.5 分钟", 100: "2 分钟", 334: "6 分钟", 700: "12 分钟"}
    assert {seconds: minutes.spoken(seconds) for seconds in table} == table


def test_every_requirement_is_pinned_exactly() -> None:
    """requirements.txt 先引用约束文件，以 -e . 结尾，中间每一行都是 名字==版本。"""
    lines = entries(REQUIREMENTS)
    assert lines[0] == "-c .ci/constraints.txt", lines[0]
    assert lines[-1] == "-e .", lines[-1]
    loose = [line for line in lines[1:-1] if not PIN.fullmatch(line)]
    assert not loose, f"没有写死版本：{loose}"
    names = [normal(line.split("==")[0]) for line in lines[1:-1]]
    assert len(names) == len(set(names)), f"写了两遍：{names}"


def test_constraints_are_portable() -> None:
    """约束文件每行写死一个版本，没有只在某一种机器上存在的包，也不与直接依赖重复。"""
    lines = entries(CONSTRAINTS)
    loose = [line for line in lines if not PIN.fullmatch(line)]
    assert not loose, f"没有写死版本，或带有本地标签：{loose}"
    names = {normal(line.split("==")[0]) for line in lines}
    direct = {normal(line.split("==")[0]) for line in entries(REQUIREMENTS) if "==" in line}
    assert not names & direct, f"两处都写了：{names & direct}"
    platform = {name for name in names if re.match(r"(torch|triton|nvidia|cuda)", name)}
    assert not platform, f"应由各平台自己决定：{platform}"


def imported_packages() -> dict[str, Path]:
    """仓库里导入的第三方模块 -> 一个导入它的文件；benchmarks/ 比的正是没有装的那些，不算。"""
    files = [ROOT / "model.py"]
    for folder in ("tokens", "experiments", "book", "tests"):
        files += (ROOT / folder).rglob("*.py")
    # 自己的包，以及同目录里按文件名导入的模块
    own = {"tokens", "experiments", "benchmarks", "figures", "_ext"} | {path.stem for path in files}
    own |= {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    found: dict[str, Path] = {}
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names = [node.module]
            for name in (name.split(".")[0] for name in names):
                if name not in own and name not in sys.stdlib_module_names:
                    found[name] = path
    return found


def test_everything_imported_is_pinned() -> None:
    """仓库里导入的每个第三方包都在 requirements.txt 或约束文件里写死了版本。"""
    pinned = {normal(name) for name, _ in PIN.findall(REQUIREMENTS + CONSTRAINTS)}
    providers = importlib.metadata.packages_distributions()
    for module, path in imported_packages().items():
        names = {normal(name) for name in providers.get(module, [module])}
        assert names & pinned, f"{path.relative_to(ROOT)} 导入的 {module} 没有写死版本"


def test_installed_versions_are_the_pinned_ones() -> None:
    """当前环境里直接依赖的版本就是 requirements.txt 写的版本：测的正是读者会装到的。"""
    for name, version in PIN.findall("\n".join(entries(REQUIREMENTS))):
        installed = importlib.metadata.version(name).split("+")[0]  # torch 的 +cpu、+cu130
        assert installed == version, f"{name}：装的是 {installed}，写的是 {version}"


def test_ci_runs_the_readme_and_pins_its_actions() -> None:
    """CI 运行 .ci/run，动作都按完整的提交哈希固定，默认只有读权限，只从 main 发布。"""
    assert os.access(ROOT / ".ci/run", os.X_OK), ".ci/run 不可执行"
    text = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read"}, workflow["permissions"]
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    actions = [step["uses"] for step in steps if "uses" in step]
    loose = [use for use in actions if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", use)]
    assert actions and not loose, f"没有按提交哈希固定：{loose}"
    assert any(".ci/run" in step.get("run", "") for step in steps)
    publish = workflow["jobs"]["publish"]
    assert "refs/heads/main" in publish["if"] and publish["needs"] == "check", publish
    assert publish["permissions"] == {"pages": "write", "id-token": "write"}


def test_python_version_is_stated_once() -> None:
    """README、pyproject.toml 与 CI 说的是同一个最低 Python 版本。"""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest = project["requires-python"].removeprefix(">=")
    assert f"Python {oldest}" in README
    assert f'python-version: "{oldest}"' in (ROOT / ".github/workflows/ci.yml").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["-m", "not slow"], []])
def test_the_long_kill_tests_run_only_when_asked(flags: list[str]) -> None:
    """`pytest` 与 `pytest -m "not slow"` 都不跑随机杀进程的长测试；一次要几分钟。"""
    command = [sys.executable, "-m", "pytest", "--collect-only", "tests/test_fault.py", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "test_thirty_of_thirty" not in done.stdout, done.stdout
    assert "deselected" in done.stdout, done.stdout + done.stderr
