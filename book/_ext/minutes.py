"""Sphinx 扩展：每一页要跑多久，全书只有一个来源：`book/measured/build_minutes.csv`。

- 角色 `` {minutes}`scaling` `` 写成“约 3 分钟”；
  `` {minutes}`scaling|where` `` 还说在哪台机器、哪天量的。
  还没有量过的页写“还没有量过”，不影响构建。
- 每次构建结束时，把各页最近一次执行的秒数写进 `_build/execution.json`；
  `benchmarks/build_minutes.py` 把它变成上面那份 CSV，并改写 README 里的同一些数。
- CSV 变了，各页重写，但不重新执行：时间是写出网页时才填进去的。
"""

import csv
import json
import time
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.docutils import SphinxRole

ROOT = Path(__file__).resolve().parents[2]
MEASURED = "measured/build_minutes.csv"  # 相对 book/
UNKNOWN = "还没有量过"


def spoken(seconds: float) -> str:
    """秒数 → 读者用得上的精度：几秒、整十秒、半分钟、整分钟，都往大里取。

    >>> [spoken(s) for s in (3, 12, 61, 100, 334, 700)]
    ['几秒', '20 秒', '1.5 分钟', '2 分钟', '6 分钟', '12 分钟']
    """
    if seconds <= 10:
        return "几秒"
    if seconds <= 50:
        return f"{-(-seconds // 10) * 10:.0f} 秒"
    unit = 30 if seconds <= 300 else 60
    return f"{-(-seconds // unit) * unit / 60:g} 分钟"


def read_minutes(book: Path) -> dict[str, dict[str, str]]:
    """{页名: 那一行}；还没有提交过测量时是空的。"""
    path = book / MEASURED
    if not path.is_file():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        return {row["page"]: row for row in csv.DictReader(file)}


def sentence(row: dict[str, str] | None, *, where: bool = False) -> str:
    """一页的时间；`where` 时带上机器和日期。"""
    if row is None:
        return UNKNOWN
    text = spoken(float(row["seconds"]))
    text = text if text == "几秒" else f"约 {text}"
    if where:
        text += f"（{row['cores']} 核，{row['cpu']}，{row['date']} 量的；换一台机器会不同）"
    return text


class Minutes(nodes.Inline, nodes.TextElement):
    """占住位置的节点，写出网页时换成文字。"""


class MinutesRole(SphinxRole):
    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        page, _, flag = self.text.partition("|")
        return [Minutes("", "", page=page, where=flag == "where")], []


def _fill_in(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    rows = read_minutes(Path(app.srcdir))
    for node in list(doctree.findall(Minutes)):
        text = sentence(rows.get(node["page"]), where=node["where"])
        node.parent.replace(node, nodes.Text(text))


def _rewrite_all_when_measured_again(app: Sphinx, env: BuildEnvironment) -> set[str]:
    rows = read_minutes(Path(app.srcdir))
    before, env.book_minutes = getattr(env, "book_minutes", rows), rows
    return set() if before == rows else set(env.found_docs)


def _start_clock(app: Sphinx) -> None:
    app.book_started = time.time()


def _write_execution(app: Sphinx, error: Exception | None) -> None:
    """{"started", "seconds": 这次构建, "pages": {页名: {"seconds", "when"}}}，时刻是 POSIX 秒。"""
    if error or app.builder.format != "html":
        return
    pages = {}
    for name, data in getattr(app.env, "nb_metadata", {}).items():
        executed = data.get("exec_data")
        if executed and executed["succeeded"] and name in app.env.found_docs:
            pages[name] = {"seconds": executed["runtime"], "when": executed["mtime"]}
    record = {
        "started": app.book_started,
        "seconds": time.time() - app.book_started,
        "pages": pages,
    }
    path = Path(app.outdir).parent / "execution.json"
    path.write_text(json.dumps(record, indent=1), encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_role("minutes", MinutesRole())
    app.connect("builder-inited", _start_clock)
    app.connect("env-get-updated", _rewrite_all_when_measured_again)
    app.connect("doctree-resolved", _fill_in)
    app.connect("build-finished", _write_execution)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
