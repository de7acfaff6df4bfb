"""书的机器：运行脚本、跟踪依赖、失败即停、离线可读、能搜中文、手机上不横向滚动。"""

import ast
import functools
import http.server
import importlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import psutil
import pytest
import yaml
from docutils import nodes
from docutils.core import publish_doctree

ROOT = Path(__file__).resolve().parents[1]
BOOK = ROOT / "book"
# 书页的工作目录、Sphinx 扩展和 build_minutes.py 所在的目录
for folder in (BOOK, BOOK / "_ext", ROOT / "benchmarks"):
    sys.path.insert(0, str(folder))

import build_minutes  # noqa: E402
import repository_links  # noqa: E402
from _ext import page  # noqa: E402
from chinese_site import JOINT, glossary_terms  # noqa: E402
from glossary_links import link_first_appearances, read_terms  # noqa: E402
from page_dependencies import page_cells, page_files  # noqa: E402

from tokens.errors import UserError  # noqa: E402

# `history` 要建四次书，安静的两核机器上约二十秒，很忙的机器上要几分钟
pytestmark = pytest.mark.timeout(900)

CHAPTERS = sorted(
    path for path in BOOK.glob("*.md") if (ROOT / f"experiments/{path.stem}.py").is_file()
)

HEADER = """---
jupytext:
  text_representation:
    extension: .md
    format_name: myst
kernelspec:
  display_name: Python 3
  language: python
  name: python3
---
"""
INDEX = """(home)=
# 小书

```{toctree}
```
梯度累积与梯度裁剪，公式 $C \\approx 6ND$，源码 {source}`experiments/tiny.py`。
下一句。
**再下一句**没完
接着 Latin
words。

```console
$ python experiments/tiny.py
训练
```

$$
L(N, D) = E + \\frac{A}{N^{\\alpha}} + \\frac{B}{D^{\\beta}} + \\frac{C}{N^{\\alpha} D^{\\beta}}
$$

| 一列 | 又一列 | 再一列 | 最后一列 |
|---|---|---|---|
| `experiments/a_long_name.py` | `tests/another_long_name.py` | 很宽的一格文字 | 1234567890 |
"""
RUNNING = (
    HEADER
    + """
(running)=
# 会运行的页

```{code-cell} ipython3
from _ext.page import glue, plt, results, run, show_figure

run("experiments/tiny.py", "--steps", 3)
```

```{code-cell} ipython3
:tags: [hide-input]
glue("loss", results("tiny")["loss"].iloc[-1])
fig, ax = plt.subplots()
ax.plot([1, 2], [3, 4])
ax.set(xlabel="步", ylabel="损失")
show_figure(fig, "curve")
```

最后的损失是 {glue:text}`loss:.3f`。

```{glue:figure} curve
:name: fig-curve
:alt: 一条上升的线
损失曲线
```
"""
)
STILL = (
    HEADER
    + """
(still)=
# 不依赖脚本的页

多久：{minutes}`still`；{minutes}`running|where`。

(still-part)=
## 一节 with Latin

```{code-cell} ipython3
print("不动")
```
"""
)
TINY = '''"""小脚本。"""
import sys
from pathlib import Path

from experiments.shared import LOSS

print("训练", *sys.argv[1:])
print("进度条", file=sys.stderr)
Path("results").mkdir(exist_ok=True)
Path("results/tiny.csv").write_text(f"step,loss\\n1,{LOSS}\\n")
'''


EXTRA = """(extra)=
# 后加的一章

{ref}`no-such-label`
"""
MINUTES = """page,seconds,cpu,cores,isa,python,torch,date,commit
still,93.0,某种 CPU,2,avx2,3.11.7,2.13.0,2026-01-02,abc
running,3.0,某种 CPU,2,avx2,3.11.7,2.13.0,2026-01-02,abc
"""
PAGES = ("running", "still", "glossary")


class MiniBook:
    """临时目录里的四页小书，用真的配置和真的扩展构建。"""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("_ext", "_static", "figures"):
            shutil.copytree(BOOK / name, root / "book" / name)
        shutil.copy(BOOK / "glossary.md", root / "book")
        shutil.copy(ROOT / "_config.yml", root)
        (root / "experiments").mkdir()
        (root / "book/measured").mkdir()
        self.list_pages(*PAGES)
        (root / "book" / "_toc.yml").symlink_to("../_toc.yml")
        self.write("book/index.md", INDEX.replace("```{toctree}\n```\n", ""))
        self.write("book/running.md", RUNNING)
        self.write("book/still.md", STILL)
        self.write("experiments/tiny.py", TINY)
        self.write("experiments/shared.py", "LOSS = 4.5\n")
        self.write("experiments/__init__.py", "")

    def write(self, name: str, text: str) -> None:
        """写一个文件，修改时间严格晚于上次构建。"""
        (self.root / name).write_text(text, encoding="utf-8")

    def list_pages(self, *names: str) -> None:
        """写目录文件：index 之后是一个部分，依次有这些页。"""
        part = "parts:\n  - caption: 一部分\n    numbered: 1\n    chapters:\n"
        chapters = "".join(f"      - file: {name}\n" for name in names)
        self.write("_toc.yml", f"format: jb-book\nroot: index\n{part}{chapters}")

    def build(self, prefix: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        """构建一次，输出里没有终端颜色；`prefix` 放在命令前面。"""
        environment = os.environ | {
            "GITHUB_REPOSITORY": "someone/fork",
            "CI": "true",  # 有警告即失败
            "NO_COLOR": "1",
            "PYTHONUTF8": "1",
        }
        return subprocess.run(
            [*prefix, Path(sys.executable).with_name("jupyter-book"), "build", "book"],
            cwd=self.root,
            env=environment,
            text=True,
            encoding="utf-8",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=400,
            check=False,
        )

    def keep(self, name: str) -> Path:
        """把网站此刻的样子留一份，后面的构建会改它。"""
        return Path(shutil.copytree(self.root / "_build/html", self.root / name))

    def record(self) -> str:
        """这次构建写下的各页时间。"""
        return (self.root / "_build/execution.json").read_text(encoding="utf-8")


@dataclass(frozen=True)
class History:
    """一本小书接连四次构建的日志，和前三次的网站；每次构建要几秒，几个测试合用它们。

    1. `first`：从零建。
    2. `edited`：改了脚本导入的模块，加了一章，那一章里有一处失效的引用；各页的时间也重新量过。
    3. `removed`：加的那一章又删掉，别的什么也没改。
    4. `failed`：脚本抛出错误。
    """

    first: str
    edited: subprocess.CompletedProcess[str]
    removed: str
    failed: subprocess.CompletedProcess[str]
    first_record: str
    edited_record: str
    site: Path
    edited_site: Path
    removed_site: Path


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    book = MiniBook(tmp_path_factory.mktemp("mini"))

    def good() -> str:
        done = book.build()
        assert done.returncode == 0, done.stdout
        assert not re.search("WARNING|Warning:", done.stdout), done.stdout
        return done.stdout

    first = good()
    site, first_record = book.keep("site"), book.record()
    book.write("experiments/shared.py", "LOSS = 3.25\n")
    book.write("book/extra.md", EXTRA)
    book.list_pages(*PAGES, "extra")
    book.write("book/measured/build_minutes.csv", MINUTES)
    edited = book.build()
    edited_site, edited_record = book.keep("edited"), book.record()
    (book.root / "book/extra.md").unlink()
    book.list_pages(*PAGES)
    removed = good()
    removed_site = book.keep("removed")
    book.write("experiments/tiny.py", TINY + "raise RuntimeError('故意种下的错误')\n")
    return History(
        first, edited, removed, book.build(), first_record, edited_record,
        site, edited_site, removed_site,
    )  # fmt: skip


@pytest.fixture(scope="module")
def site(request: pytest.FixtureRequest) -> Path:
    """环境变量 BOOK_SITE 指的、刚建好的真书（`.ci/run` 这样做）；没有就用小书。

    不去看 `_build/`：那里可能是很久以前建的，测它什么也不证明。
    """
    if built := os.environ.get("BOOK_SITE"):
        assert (Path(built) / "searchindex.js").is_file(), f"BOOK_SITE={built} 不是建好的书"
        return Path(built)
    return request.getfixturevalue("history").site


def read(site: Path, name: str) -> str:
    """网站里的一页。"""
    return (site / f"{name}.html").read_text(encoding="utf-8")


def executed(log: str) -> list[str]:
    """日志里执行过的页，按名字排列。"""
    return sorted(re.findall(r"(\w+)\.md: Executing notebook", log))


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """一个临时的仓库根目录，`run` 在其中找脚本。"""
    monkeypatch.setattr(page, "ROOT", tmp_path)
    (tmp_path / "results").mkdir()
    return tmp_path


# ---- 运行脚本 ----


def test_run_shows_the_command_a_reader_would_type(scripts: Path, capsys) -> None:
    """run 先印读者会键入的命令，再印脚本的输出；线程数写明，stderr 不进书页。"""
    (scripts / "hello.py").write_text(
        "import os, sys\nprint('线程', os.environ['OMP_NUM_THREADS'], os.getcwd())\n"
        "print('进度', file=sys.stderr)\n"
    )
    done = page.run("hello.py", "--name", "a b", threads=3, env={"FLAG": "1"})
    shown = capsys.readouterr().out
    assert shown == f"$ FLAG=1 python hello.py --name 'a b'\n线程 3 {scripts}\n", shown
    assert done.stderr == "进度\n", done


def test_run_shows_torchrun_when_given_a_process_count(scripts: Path) -> None:
    """给了进程数，印出的命令是 torchrun，实际执行的是当前 Python 里的同一个启动器。"""
    (scripts / "ddp.py").touch()
    command, shown = page._command("ddp.py", ["--steps", "3"], 2, {})
    assert shown == "torchrun --standalone --nproc-per-node 2 ddp.py --steps 3", shown
    assert command[:3] == [sys.executable, "-m", "torch.distributed.run"], command


def test_failed_script_raises_with_its_stderr(scripts: Path) -> None:
    """脚本失败时抛出的错误里有命令、退出码和 stderr，进度条只留最后一帧。"""
    (scripts / "bad.py").write_text(
        "import sys\nsys.stderr.write('1%\\r50%\\r99%\\n')\nraise ValueError('坏了')\n"
    )
    with pytest.raises(page.ScriptError) as caught:
        page.run("bad.py")
    message = str(caught.value)
    for needle in ("$ python bad.py", "退出码 1", "ValueError: 坏了", "99%"):
        assert needle in message, message
    assert "50%" not in message, message


def test_expected_failure_is_shown_not_raised(scripts: Path, capsys) -> None:
    """书页演示用错的后果时，期望的退出码不算失败，那一句错误印在页上。"""
    (scripts / "usage.py").write_text(
        "import sys\nprint('错误：x', file=sys.stderr)\nsys.exit(2)\n"
    )
    page.run("usage.py", expect=2)
    assert capsys.readouterr().out == "$ python usage.py\n错误：x\n"
    with pytest.raises(page.ScriptError, match="退出码 2"):
        page.run("usage.py")


def test_output_is_shown_by_its_sections(scripts: Path, capsys) -> None:
    """长的输出按小节分几处印：命令只印一次，小节按标题找，找不到就报错。"""
    (scripts / "long.py").write_text("print('\\n甲：表\\n1\\n\\n乙\\n2\\n\\n丙\\n3')\n")
    done = page.run("long.py", only=("甲",))
    assert capsys.readouterr().out == "$ python long.py\n甲：表\n1\n"
    done.show("丙", "乙")
    assert capsys.readouterr().out == "丙\n3\n\n乙\n2\n"
    with pytest.raises(page.ScriptError, match="没有以“丁”开头的小节"):
        done.show("丁")


def test_timeout_ends_every_descendant(scripts: Path) -> None:
    """超时后脚本和它的后代都不再活着，自立会话的也不例外；已写出的 stderr 在错误里。"""
    (scripts / "hang.py").write_text(
        "import subprocess, sys, time\n"
        "sleep = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "child = subprocess.Popen(sleep, start_new_session=True)\n"
        "print(child.pid, file=sys.stderr, flush=True)\ntime.sleep(60)\n"
    )
    with pytest.raises(page.ScriptError, match="超过 1 秒") as caught:
        page.run("hang.py", timeout=1)
    child = int(str(caught.value).split()[-1])
    for _ in range(50):
        if not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie":
            return
        time.sleep(0.1)
    pytest.fail(f"超时之后子进程 {child} 还活着")


def test_results_refuses_a_file_older_than_the_run(scripts: Path) -> None:
    """脚本刚运行过却没有重写它的结果文件时，书页读到的是错误，不是上一次的数字。"""
    for name in ("silent", "silent_detail", "silently"):
        old = scripts / f"results/{name}.csv"
        old.write_text("a\n1\n")
        os.utime(old, (time.time() - 3600,) * 2)
    (scripts / "silent.py").write_text("print('什么也没写')\n")
    assert page.results("silent")["a"].tolist() == [1], "没运行过脚本时可以读现成的结果"
    page.run("silent.py", quiet=True)
    for name in ("silent", "silent_detail"):
        with pytest.raises(page.ScriptError, match="还旧"):
            page.results(name)
    assert page.results("silently")["a"].tolist() == [1], "别的脚本的结果不受影响"


# ---- 依赖 ----


def test_page_files_follow_scripts_imports_and_measurements(tmp_path: Path) -> None:
    """一页的依赖是它运行的脚本、读的测量、导入的模块，以及沿项目内 import 找到的一切。"""
    files = {
        "model.py": "import torch\n",
        "tokens/__init__.py": "from tokens.data import load\n",
        "tokens/data.py": "",
        "experiments/__init__.py": "",
        "experiments/a.py": "def main():\n    from model import GPT\n    from .shared import x\n",
        "experiments/shared.py": "import tokens\n",
        "experiments/b.py": "",
        "experiments/unused.py": "",
        "book/figures/__init__.py": "",
        "book/figures/a.py": "",
        "book/measured/long.csv": "x\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    text = """
run("experiments/unused.py") 不在代码单元里
```{code-cell} ipython3
:tags: [hide-input]
from figures import a
%matplotlib inline
run("experiments/a.py", "--x", 1); results("b"); measured("long")
```
"""
    found = {path.relative_to(tmp_path).as_posix() for path in page_files(text, tmp_path)}
    assert found == set(files) - {"experiments/unused.py"}, found


def test_page_files_refuse_a_computed_script_name(tmp_path: Path) -> None:
    """脚本名不是字面量时依赖查不到，必须报错，而不是悄悄漏掉。"""
    text = "```{code-cell} ipython3\nrun(name)\n```\n"
    with pytest.raises(ValueError, match="要写成字符串"):
        page_files(text, tmp_path)


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_every_chapter_depends_on_its_own_script(path: Path) -> None:
    """每一章都依赖同名脚本；脚本用到的模型和数据代码也在依赖里。"""
    found = page_files(path.read_text(encoding="utf-8"), ROOT)
    assert ROOT / f"experiments/{path.stem}.py" in found, found


# ---- 构建 ----


@pytest.mark.slow
def test_edited_module_reruns_exactly_the_pages_that_use_it(history: History) -> None:
    """改了脚本导入的模块，下次构建只重跑用到它的那一页，正文里的数字随之改变；没改就都不跑。"""
    assert executed(history.first) == ["running", "still"], history.first
    assert "4.500" in read(history.site, "running")
    assert executed(history.edited.stdout) == ["running"], history.edited.stdout
    assert "3.250" in read(history.edited_site, "running")
    assert executed(history.removed) == [], history.removed


@pytest.mark.slow
def test_failing_script_fails_the_build_and_shows_its_stderr(history: History) -> None:
    """脚本一失败，构建的退出码就非零，日志里有脚本的 stderr。"""
    failed = history.failed
    assert failed.returncode != 0, failed.stdout
    assert "RuntimeError: 故意种下的错误" in failed.stdout, failed.stdout
    assert "$ python experiments/tiny.py --steps 3" in failed.stdout, failed.stdout


@pytest.mark.slow
def test_warning_fails_the_build_in_ci(history: History) -> None:
    """在 CI 里，一处失效的交叉引用就让构建失败。"""
    assert history.edited.returncode != 0, history.edited.stdout
    assert "no-such-label" in history.edited.stdout, history.edited.stdout


@pytest.mark.slow
def test_every_sidebar_follows_the_table_of_contents(history: History) -> None:
    """加一章，没有改动的页侧栏里也有它；删一章，哪页也不再链接它，它的网页也不在了。

    重写这些页时没有重新执行它们。
    """
    names = {path.stem for path in history.site.glob("*.html")}
    assert {"index", "extra", *PAGES} - names == {"extra"}, names
    for name in ("index", *PAGES):
        added, removed = (read(kept, name) for kept in (history.edited_site, history.removed_site))
        assert 'href="extra.html"' in added, f"{name} 的侧栏里没有新的一章"
        assert "extra.html" not in removed, f"{name} 还链接着删掉的一章"
    assert not list(history.removed_site.rglob("extra*")), "删掉的一章还留在网站里"
    assert executed(history.removed) == [], history.removed


@pytest.mark.slow
def test_minutes_come_from_the_committed_measurement(history: History) -> None:
    """页上的“多久”取自提交的测量；没有量过的页照样建得成；重新量过之后换成新的，不重新执行。"""
    assert "多久：还没有量过；还没有量过。" in read(history.site, "still")
    assert executed(history.edited.stdout) == ["running"], "still 不该重新执行"
    said = "多久：约 2 分钟；几秒（2 核，某种 CPU，2026-01-02 量的；换一台机器会不同）。"
    assert said in read(history.edited_site, "still")


@pytest.mark.slow
def test_builds_record_how_long_each_page_took(history: History) -> None:
    """构建写下每页执行的秒数和时刻；`build_minutes.py` 认得哪些页不是在这次构建里执行的。"""
    first, edited = (json.loads(log) for log in (history.first_record, history.edited_record))
    assert set(first["pages"]) == {"running", "still"}, first
    assert all(0 < page["seconds"] < first["seconds"] for page in first["pages"].values()), first
    rows = build_minutes.rows_of(first, {"cpu": "x"}, {"pytest": 1.0})
    assert [row["page"] for row in rows] == ["running", "still", "book", "pytest"], rows
    with pytest.raises(UserError, match="^still 不是在这次构建里执行的"):
        build_minutes.rows_of(edited, {}, {})


@pytest.mark.slow
def test_headings_are_anchored_by_their_labels(site: Path) -> None:
    """标题旁的链接和页内目录用作者写的 ASCII 标签，不用随位置编号的 id5，也不随标题改字而变。"""
    for path in sorted(site.glob("*.html")):
        html = path.read_text(encoding="utf-8")
        anchors = re.findall(r'</?[^<]*<a class="headerlink" href="#([^"]*)"', html)
        unstable = [anchor for anchor in anchors if re.fullmatch(r"id\d+", anchor)]
        assert not unstable, f"{path.name}：{unstable}"
    if not os.environ.get("BOOK_SITE"):
        html = read(site, "still")
        assert 'class="headerlink" href="#still-part"' in html, html
        assert 'nav-link" href="#still-part">' in html, html


@pytest.mark.slow
def test_build_in_a_read_only_checkout_ends_in_one_sentence(tmp_path: Path) -> None:
    """仓库写不进去时，构建以退出码 2 和一句话结束：哪里写不进，该怎么办；没有 traceback。"""
    book = MiniBook(tmp_path / "locked")
    command: list[str] = []
    if os.geteuid() == 0:  # root 不受权限位约束，去掉这项特权才像一个读者
        if not shutil.which("setpriv"):
            pytest.skip("以 root 运行，又没有 setpriv 可以去掉特权")
        command = ["setpriv", "--bounding-set=-dac_override", "--inh-caps=-dac_override"]
    book.root.chmod(0o555)
    try:
        done = book.build(command)
    finally:
        book.root.chmod(0o755)
    assert done.returncode == 2, done.stdout
    assert "Traceback" not in done.stdout, done.stdout
    last = done.stdout.strip().rsplit("\n", 1)[-1]
    assert last.startswith("错误：写不进") and str(book.root) in last, done.stdout


@pytest.mark.slow
def test_buttons_lead_to_the_repository_of_the_build(history: History) -> None:
    """编辑、提问、源码链接都指向构建所在的仓库（这里是一个复刻），不指向别处。"""
    html = read(history.site, "running")
    for link in ("edit/main/book/running.md", "issues/new"):
        assert f"https://github.com/someone/fork/{link}" in html, link
    assert "executablebooks/jupyter-book" not in html
    source = "https://github.com/someone/fork/blob/main/experiments/tiny.py"
    assert source in read(history.site, "index")


@pytest.mark.parametrize(
    ("remote", "name"),
    [
        ("https://github.com/a/b.git", "a/b"),
        ("https://github.com/a/b", "a/b"),
        ("git@github.com:a/b.git", "a/b"),
        ("ssh://git@github.com/a/b.git", "a/b"),
        ("https://token@github.com/a/b.git", "a/b"),
        ("/home/me/b", None),
        ("https://example.org/a/b.git", None),
    ],
)
def test_repository_comes_from_the_origin_remote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remote: str, name: str | None
) -> None:
    """没有 GITHUB_REPOSITORY 时仓库名取自 origin；origin 不在 GitHub 上就没有按钮。"""
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    subprocess.run(["git", "-C", tmp_path, "remote", "add", "origin", remote], check=True)
    assert repository_links.repository(tmp_path) == name


@pytest.mark.slow
def test_page_shows_the_command_and_its_output_once(history: History) -> None:
    """页上先是读者会键入的命令，再是脚本的输出，此外没有别的；进度条不在页上。"""
    outputs = re.findall(
        r'<div class="cell_output.*?<pre>(.*?)</pre>', read(history.site, "running"), re.S
    )
    shown = [re.sub(r"<[^>]+>", "", output) for output in outputs]
    assert shown == ["$ python experiments/tiny.py --steps 3\n训练 --steps 3\n"], shown
    assert "进度条" not in read(history.site, "running")


@pytest.mark.slow
def test_figures_are_numbered_by_chapter(history: History) -> None:
    """第 1 章的第一张图叫“图 1.1”：加一章只改它后面各章的号，章里的次序不动。"""
    assert '<span class="caption-number">图 1.1 </span>' in read(history.site, "running")
    assert '<span class="section-number">2. </span>' in read(history.site, "still")
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    for part in toc["parts"]:
        numbered = part.get("numbered")
        assert (numbered == 1) == (part["caption"] != "附录"), f"{part['caption']}：{numbered}"


@pytest.mark.slow
def test_a_sentence_per_line_leaves_no_spaces_on_the_page(history: History) -> None:
    """源文件里一句一行，网页上的中文段落是连着的。"""
    text = re.sub(r"<[^>]+>", "", read(history.site, "index"))
    assert "。下一句。再下一句没完接着 Latin\nwords。" in text, text[:2000]


@pytest.mark.parametrize(
    ("source", "joined"),
    [
        ("一句。\n又一句", "一句。又一句"),
        ("没完\n接着", "没完接着"),
        ("中文\nLatin", "中文\nLatin"),
        ("句号。\nLatin", "句号。Latin"),
        ("two\nwords", "two\nwords"),
        ("word\n（括号）", "word（括号）"),
        ("末尾。\n", "末尾。"),
    ],
)
def test_lines_join_without_a_space_in_chinese(source: str, joined: str) -> None:
    """源文件一句一行，网页上中文句子之间没有空格，西文之间仍有。"""
    assert JOINT.sub("", source) == joined


# ---- 建好的网站 ----


@pytest.mark.slow
def test_search_index_holds_the_terms_of_the_glossary(site: Path) -> None:
    """站内搜索的索引里有术语表的每一个词，整词，不是碎片。"""
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(index[index.index("(") + 1 : index.rindex(")")])
    indexed = set(index["terms"]) | set(index["titleterms"])
    terms = glossary_terms((BOOK / "glossary.md").read_text(encoding="utf-8"))
    missing = [term for term in terms if term not in indexed]
    assert len(terms) > 40 and not missing, f"{len(terms)} 个词里索引缺 {missing}"


LOADED = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|embed)\b[^>]*\bsrc=["'](https?:|//)[^>]*>"""
    r"""|<link\b(?=[^>]*\brel=["'](?:stylesheet|preload|modulepreload|icon|shortcut icon)["'])"""
    r"""[^>]*\bhref=["'](https?:|//)[^>]*>""",
    re.IGNORECASE,
)
LOADED_BY_CSS = re.compile(r"""(?:@import\s+|url\()\s*["']?(https?:|//)[^)"']*""", re.IGNORECASE)


@pytest.mark.slow
def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    """页面引用的脚本、样式、字体、图片都在站内；没有 thebe，也没有会去外网取东西的脚本。"""
    for path in sorted(site.rglob("*.html")):
        html = path.read_text(encoding="utf-8")
        assert not (found := LOADED.search(html)), f"{path.name}：{found and found[0]}"
        assert "unpkg.com" not in html and "jsdelivr" not in html, path.name
    for path in sorted(site.rglob("*.css")):
        found = LOADED_BY_CSS.search(path.read_text(encoding="utf-8"))
        assert not found, f"{path.name}：{found and found[0]}"


@pytest.mark.slow
def test_mathjax_is_served_only_where_there_are_formulas(history: History) -> None:
    """有公式的页用站内的 MathJax；没有公式的页不加载它；图标脚本哪页都不加载。"""
    assert "mathjax/tex-chtml.js" in read(history.site, "index")
    assert "tex-chtml.js" not in read(history.site, "still")
    assert (history.site / "mathjax/tex-chtml.js").is_file()
    assert "fontawesome.js" not in read(history.site, "still")


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        """不往测试输出里写访问日志。"""


@pytest.fixture(scope="module")
def address(site: Path):
    """在本机端口上提供网站。"""
    handler = functools.partial(Quiet, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def _failed_requests(browser) -> list[str]:
    """性能日志里失败的、或去了外网的请求。"""
    failed = []
    for entry in browser.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        parameters = message["params"]
        if message["method"] == "Network.loadingFailed" and not parameters.get("canceled"):
            failed.append(f"{parameters['type']} {parameters['errorText']}")
        if message["method"] == "Network.responseReceived":
            response = parameters["response"]
            if response["status"] >= 400:
                failed.append(f"{response['status']} {response['url']}")
        if message["method"] == "Network.requestWillBeSent":
            url = parameters["request"]["url"]
            if not url.startswith(("http://127.0.0.1", "data:", "blob:")):
                failed.append(f"外网请求 {url}")
    return failed


PHONE = {"width": 375, "height": 800, "deviceScaleFactor": 1, "mobile": True}
READABLE = """
const figures = [...document.querySelectorAll('.bd-article figure img')];
return figures.filter(f => f.naturalWidth > 100).map(f => ({
    name: f.closest('figure')?.id ?? f.src, width: f.getBoundingClientRect().width}));
"""


@dataclass(frozen=True)
class Visit:
    """浏览器看一页时看到的：控制台错误、坏的请求、公式、复制按钮，以及换成手机后的宽度和图。"""

    page: str
    errors: list
    failed: list[str]
    formulas: int
    typeset: int
    broken: int
    copy_inputs: int
    copy_outputs: int
    width: int
    figures: list[dict]


@pytest.fixture(scope="module")
def visits(browser, address: str, site: Path) -> list[Visit]:
    """每一页打开一次：先按桌面的宽度看，再换成手机的宽度。"""
    return [_visit(browser, address, path) for path in sorted(site.glob("*.html"))]


def _wait(done: Callable[[], object], seconds: float = 30) -> None:
    """等到 `done()` 为真；到时仍不是也返回，由断言去说哪里不对。"""
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(0.05)


def _visit(browser, address: str, path: Path) -> Visit:
    ask = browser.execute_script

    def count(selector: str) -> int:
        return ask(f"return document.querySelectorAll('{selector}').length")

    browser.get(f"{address}/{path.name}")
    formulas = path.read_text(encoding="utf-8").count('class="math')
    # 两样都由脚本加上；MathJax 在忙碌的机器上要好几秒
    _wait(lambda: not formulas or count("mjx-container"))
    _wait(lambda: not count(".cell_input") or count(".copybtn"))
    seen = {
        "errors": [log for log in browser.get_log("browser") if log["level"] == "SEVERE"],
        "failed": _failed_requests(browser),
        "formulas": formulas,
        "typeset": count("mjx-container"),
        "broken": count("mjx-merror"),
        "copy_inputs": count(".cell_input .copybtn"),
        "copy_outputs": count(".cell_output .copybtn"),
    }
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
    try:
        width = ask("return document.documentElement.scrollWidth")
        return Visit(path.name, **seen, width=width, figures=ask(READABLE))
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.slow
@pytest.mark.browser
def test_pages_read_without_network_or_errors(visits: list[Visit]) -> None:
    """断网的浏览器里，每一页都没有控制台错误、没有失败的请求，公式排好了版。"""
    assert len(visits) > 4, [visit.page for visit in visits]
    assert any(visit.formulas for visit in visits)
    for visit in visits:
        assert not visit.errors, f"{visit.page}：{visit.errors}"
        assert not visit.failed, f"{visit.page}：{visit.failed}"
        assert visit.typeset or not visit.formulas, f"{visit.page}：公式没有排版"
        assert visit.broken == 0, f"{visit.page}：{visit.broken} 个公式有错"


@pytest.mark.slow
@pytest.mark.browser
def test_pages_fit_a_phone(visits: list[Visit]) -> None:
    """375 像素宽的屏幕上，每一页都不需要横向滚动。"""
    for visit in visits:
        assert visit.width <= 375, f"{visit.page} 宽 {visit.width} 像素"


@pytest.mark.slow
@pytest.mark.browser
def test_figures_are_readable_on_a_phone(visits: list[Visit]) -> None:
    """手机上图不缩到字看不清：至少 600 像素宽，在自己的框里横向滚动。"""
    figures = [(visit.page, figure) for visit in visits for figure in visit.figures]
    assert figures
    for page_name, figure in figures:
        assert figure["width"] >= 600, f"{page_name} 的 {figure['name']} 宽 {figure['width']} 像素"


@pytest.mark.slow
@pytest.mark.browser
def test_copy_buttons_are_on_code_only(visits: list[Visit]) -> None:
    """代码旁有复制按钮，程序的输出旁没有：没人要把命令、提示符和一张表一起粘进终端。"""
    assert sum(visit.copy_inputs for visit in visits) > 0
    for visit in visits:
        assert visit.copy_outputs == 0, f"{visit.page}：{visit.copy_outputs} 个输出有复制按钮"


@pytest.mark.slow
@pytest.mark.browser
def test_the_clipboard_gets_commands_without_prompts(browser, history: History) -> None:
    """带提示符的块，复制到的是命令本身，没有 "$ "，也没有它的输出。"""
    browser.get((history.site / "index.html").as_uri())
    button = "document.querySelector('.highlight-console .copybtn')"
    _wait(lambda: browser.execute_script(f"return {button}"))
    copied = browser.execute_script(
        "document.execCommand = () => { window.copied = `${getSelection()}`; return true; };"
        f"{button}.click(); return window.copied;"
    )
    assert copied == "python experiments/tiny.py", copied


@pytest.mark.slow
@pytest.mark.browser
def test_search_finds_a_chinese_term(browser, address: str) -> None:
    """在搜索框里输入中文术语，结果里有讲它的页。"""
    browser.get(f"{address}/search.html?q=梯度累积")
    for _ in range(50):
        found = browser.execute_script(
            "return [...document.querySelectorAll('#search-results li a')].map(a => a.href)"
        )
        if found:
            break
        time.sleep(0.1)
    assert any("glossary" in link or "grad_accum" in link for link in found), found


# ---- 书页的写法 ----


@pytest.mark.parametrize("path", sorted(BOOK.glob("*.md")), ids=lambda path: path.stem)
def test_pages_follow_the_house_rules(path: Path) -> None:
    """书页不按行号引代码、不用 ! 或 %run 运行命令；每个标题前都有 ASCII 标签；各章以标题相称。"""
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"\{doc\}`(\w+)( 一章)? <\1>`", text), "用标题称呼一章，不用文件名"
    assert not re.search(r"^:(lines|lineno-match):", text, re.MULTILINE), "按行号引用会随改动错位"
    for cell in re.findall(r"^```\{code-cell\}.*?^```", text, re.MULTILINE | re.DOTALL):
        assert not re.search(r"^\s*(!|%run\b)", cell, re.MULTILINE), cell
        hidden = re.search(r"^:tags:.*(remove|hide)-(input|cell)", cell, re.MULTILINE)
        assert hidden or "glue(" not in cell, f"给正文取数的 glue 不该露在读者面前：{cell}"
    prose = re.sub(r"^(`{3,}|:{3,}).*?^\1[ \t]*$", "", text, flags=re.MULTILINE | re.DOTALL)
    for heading in re.finditer(r"^#{1,6} .*", prose, re.MULTILINE):
        before = prose[: heading.start()].rstrip("\n").rsplit("\n", 1)[-1]
        assert re.fullmatch(r"\([a-z0-9][a-z0-9-]*\)=", before), f"{heading[0]} 前面没有标签"


def neighbours() -> list[tuple[str, str]]:
    """目录里相邻的两页（附录除外）。"""
    parts = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))["parts"]
    names = [one["file"] for part in parts if part.get("numbered") for one in part["chapters"]]
    return list(itertools.pairwise(names))


@pytest.mark.parametrize(("name", "following"), neighbours())
def test_the_next_step_is_the_next_page(name: str, following: str) -> None:
    """一页末尾的“下一步”指的是目录里的下一页：插进一章之后，前一页的指路也要改。"""
    summary = (BOOK / f"{name}.md").read_text(encoding="utf-8").rpartition("## 小结")[2]
    title = (BOOK / f"{following}.md").read_text(encoding="utf-8")
    label = re.search(r"^\((.+)\)=\n# ", title, re.MULTILINE)[1]
    targets = (f"`{following}`", f"<{following}>", f"({following}.md)", f"({label})")
    for line in re.findall(r"^下一[步章].*", summary, re.MULTILINE):
        assert any(target in line for target in targets), f"{name} 之后是 {following}：{line}"


@pytest.mark.parametrize("path", sorted(BOOK.glob("*.md")), ids=lambda path: path.stem)
def test_names_imported_by_pages_exist(path: Path) -> None:
    """书页的单元从脚本里导入的名字都还在：改名不必等到构建失败才知道。"""
    for tree in page_cells(path.read_text(encoding="utf-8")):
        for node in ast.walk(tree):
            root = node.module.split(".")[0] if isinstance(node, ast.ImportFrom) else ""
            if root not in ("experiments", "model", "tokens"):
                continue
            module = importlib.import_module(node.module)
            missing = [one.name for one in node.names if not _has(module, one.name)]
            assert not missing, f"{node.module} 里没有 {missing}"


def _has(module: ModuleType, name: str) -> bool:
    """模块里有这个名字，或者它是一个子模块。"""
    return hasattr(module, name) or (
        hasattr(module, "__path__") and find_spec(f"{module.__name__}.{name}") is not None
    )


@pytest.mark.parametrize("path", sorted(BOOK.glob("*.md")), ids=lambda path: path.stem)
def test_measurements_read_by_pages_are_there(path: Path) -> None:
    """书页用 measured(...) 读的长测量都已提交，每一行带着机器、版本和日期。"""
    for name in re.findall(r"\bmeasured\(\"(\w+)\"\)", path.read_text(encoding="utf-8")):
        table = page.measured(name)
        assert {"cpu", "torch", "date"} <= set(table.columns), f"{name}：{list(table.columns)}"
        assert table[["cpu", "torch", "date"]].notna().all(axis=None), f"{name} 有空的出处"


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_chapters_have_their_furniture(path: Path) -> None:
    """每一章都有自测、常见错误、怎么讲清楚、练习和小结，并按函数嵌入同名脚本。"""
    text = path.read_text(encoding="utf-8")
    for heading in ("自测", "常见错误", "怎么讲清楚", "练习", "小结"):
        assert re.search(rf"^#+ .*{heading}", text, re.MULTILINE), f"缺“{heading}”一节"
    assert f"{{literalinclude}} ../experiments/{path.stem}.py" in text
    assert ":pyobject:" in text


TERMS = """| 中文 | English | 一句话 |
|---|---|---|
| 学习率 | learning rate | 每步走多远。 |
| 学习率预热 | learning-rate warm-up | 从小升到峰值。 |
| 损失 | loss | 太常见。 |
| 缩放点积注意力 | scaled dot-product attention, SDPA | `算子`。 |
"""


def test_terms_link_to_the_glossary_where_they_first_appear() -> None:
    """术语只在第一次出现时连到术语表，长的叫法优先；标题、代码、已有的链接里和两个字的词不连。"""
    text = "SDPA 的 loss：学习率预热之后是学习率，再说 SDPA、XSDPA 和缩放点积注意力。"
    document = publish_doctree(f"学习率\n======\n\n``SDPA`` `SDPA <x.html>`__ 损失\n\n{text}\n")
    link_first_appearances(document, read_terms(TERMS), "glossary.html")
    links = [(node.astext(), node["refuri"]) for node in document.findall(nodes.reference)]
    assert links == [
        ("SDPA", "x.html"),
        ("SDPA", "glossary.html#term-scaled-dot-product-attention"),
        ("loss", "glossary.html#term-loss"),
        ("学习率预热", "glossary.html#term-learning-rate-warm-up"),
        ("学习率", "glossary.html#term-learning-rate"),
    ], links
    assert text in document.astext(), "文字不该有变化"


def test_glossary_has_the_terms_that_readers_tripped_over() -> None:
    """读者绊过的术语都在术语表里，锚不重复，一个叫法只属于一行。"""
    terms = read_terms((BOOK / "glossary.md").read_text(encoding="utf-8"))
    names = [name for term in terms for name in term.names]
    wanted = "eager SDPA AMX IQR Muon Welch all-reduce GradScaler TF32 ZeRO GQA PUE FSDP MFU"
    assert {*wanted.split(), "pinned memory"} <= set(names), names
    for group in (names, [term.anchor for term in terms]):
        twice = {one for one in group if group.count(one) > 1}
        assert not twice, f"出现了两次：{twice}"


@pytest.mark.slow
def test_glossary_links_land_on_their_rows(site: Path) -> None:
    """网页上的术语链接都指向术语表里真有的锚。"""
    anchors = set(re.findall(r'<tr[^>]*\bid="(term-[^"]+)"', read(site, "glossary")))
    assert len(anchors) > 60, anchors
    pages = [path for path in site.glob("*.html") if path.stem != "glossary"]
    linked = {
        anchor
        for path in pages
        for anchor in re.findall(r'href="glossary\.html#(term-[^"]+)"', path.read_text("utf-8"))
    }
    assert linked and linked <= anchors, linked - anchors
