"""Sphinx 扩展：多次构建之后网站仍然是一个整体。

- 目录变了（加一章、删一章、改一个标题），每一页的侧栏都要跟着变：全部重写，但只有改过的页重新执行。
- 删掉的页不留在网站里：否则旧侧栏和搜索引擎还会把读者带到那里。
- 标题的锚是它前面的 ASCII 标签，不是随位置编号的 id5：加一节，别处的链接不会失效。
"""

import json
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

BEFORE_COLLECTORS = 400  # Sphinx 自己在 500 收集目录，那时锚已经要排好


def _site_map(env: BuildEnvironment) -> str:
    """侧栏里看得见的一切：目录的结构、分部的名字、每页的标题。"""
    structure = getattr(env, "external_site_map", None)  # 单页构建没有目录文件
    titles = {name: env.titles[name].astext() for name in sorted(env.found_docs & set(env.titles))}
    return json.dumps([structure.as_json() if structure else None, titles], sort_keys=True)


def _rewrite_all_when_the_map_changes(app: Sphinx, env: BuildEnvironment) -> set[str]:
    """要重写的页；重写用的是存下的 doctree，代码单元不会再执行。"""
    before, env.book_site_map = getattr(env, "book_site_map", None), _site_map(env)
    return set() if env.book_site_map == before else set(env.found_docs)


def _delete_removed_pages(app: Sphinx, error: Exception | None) -> None:
    """`_sources/` 记着写过哪些页；其中不再属于这本书的，网页和源文都删掉。"""
    if error or app.builder.format != "html":
        return
    sources = Path(app.outdir) / "_sources"
    for source in sources.rglob("*.md"):
        name = source.relative_to(sources).with_suffix("").as_posix()
        if name not in app.env.found_docs:
            source.unlink()
            (Path(app.outdir) / f"{name}.html").unlink(missing_ok=True)


def _label_first(app: Sphinx, doctree: nodes.document) -> None:
    """一节的几个 id 里，作者写的标签排到最前：标题旁的链接和页内目录用的是第一个。"""
    labels = {identifier for name, identifier in doctree.nameids.items() if doctree.nametypes[name]}
    for section in doctree.findall(nodes.section):
        section["ids"].sort(key=lambda identifier: identifier not in labels)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("env-get-updated", _rewrite_all_when_the_map_changes)
    app.connect("build-finished", _delete_removed_pages)
    app.connect("doctree-read", _label_first, priority=BEFORE_COLLECTORS)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
