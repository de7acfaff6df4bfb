"""Sphinx 扩展：术语在每一页第一次出现时，连到术语表里它的那一行，鼠标停上去就看见解释。

术语取自 `book/glossary.md` 各表的前两列。两个字的中文词（损失、显存……）太常见，不连；
标题、代码、已有的链接、表格和图注里也不连。链接在写出网页时才加，不引起重新执行。
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

PAGE = "glossary"
ROW = re.compile(r"^\| *([^|]+?) *\| *([^|]+?) *\| *(.+?) *\|$", re.MULTILINE)
MARKUP = re.compile(r"\{\w+\}|[`*$\\]")
SKIP = (
    nodes.reference, nodes.literal, nodes.title, nodes.table, nodes.figure, nodes.caption,
    nodes.raw, nodes.literal_block, nodes.math, nodes.container,
)  # fmt: skip


@dataclass(frozen=True)
class Term:
    """术语表的一行：锚、各种叫法、一句话的解释。"""

    anchor: str
    names: tuple[str, ...]
    meaning: str


def read_terms(text: str) -> list[Term]:
    """术语表的 Markdown → 各行；表头和分隔线不算。"""
    terms = []
    for chinese, english, meaning in ROW.findall(text):
        if chinese == "中文" or set(chinese) <= set("-: "):
            continue
        names = [*re.split(r"[（）、]", chinese), *re.split(r"[,，] *", english)]
        names = tuple(dict.fromkeys(name.strip() for name in names if _linkable(name.strip())))
        anchor = "term-" + nodes.make_id(english.split(",")[0])
        terms.append(Term(anchor, names, MARKUP.sub("", meaning)))
    return terms


def _linkable(name: str) -> bool:
    """两个字的中文词和公式不连；西文的至少三个字母。"""
    return len(name) > 2 and "$" not in name


def _pattern(names: list[str]) -> re.Pattern:
    """长的叫法优先（学习率预热先于学习率）；西文的两边不能还是字母或数字。"""
    longest = sorted(names, key=len, reverse=True)
    parts = [
        rf"(?<![\w.-]){re.escape(name)}(?![\w-])" if name.isascii() else re.escape(name)
        for name in longest
    ]
    # \w 也匹配汉字，而中文里西文词可以紧挨着汉字
    return re.compile("|".join(parts), re.ASCII)


def link_first_appearances(doctree: nodes.document, terms: list[Term], target: str) -> None:
    """原地修改：每个术语第一次出现的地方换成链接；`target` 是术语表的相对地址。"""
    by_name = {name.lower(): term for term in terms for name in term.names}
    names = [name for term in terms for name in term.names]
    pattern = re.compile(_pattern(names).pattern, re.ASCII | re.IGNORECASE)
    seen: set[str] = set()
    for text in list(_prose(doctree)):
        pieces: list[nodes.Node] = []
        rest, end = str(text), 0
        for match in pattern.finditer(rest):
            term = by_name[match[0].lower()]
            if term.anchor in seen:
                continue
            seen.add(term.anchor)
            pieces += [nodes.Text(rest[end : match.start()]), _link(match[0], term, target)]
            end = match.end()
        if pieces:
            text.parent.replace(text, [*pieces, nodes.Text(rest[end:])])


def _prose(doctree: nodes.document) -> Iterator[nodes.Text]:
    for paragraph in doctree.findall(nodes.paragraph):
        for text in paragraph.findall(nodes.Text):
            node = text.parent
            while node is not None and not isinstance(node, SKIP):
                node = node.parent
            if node is None:
                yield text


def _link(shown: str, term: Term, target: str) -> nodes.reference:
    return nodes.reference(
        "", shown, internal=True, refuri=f"{target}#{term.anchor}", classes=["term"],
        reftitle=term.meaning,
    )  # fmt: skip


def _anchor_rows(app: Sphinx, doctree: nodes.document) -> None:
    """术语表的每一行有自己的锚。"""
    if app.env.docname != PAGE:
        return
    for row in doctree.findall(nodes.row):
        cells = [cell.astext() for cell in row.children]
        if len(cells) == 3 and cells[0] != "中文":
            row["ids"].append("term-" + nodes.make_id(cells[1].split(",")[0]))


def _read(app: Sphinx) -> str:
    path = Path(app.srcdir) / f"{PAGE}.md"
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _link_page(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    text = _read(app)
    if docname == PAGE or not text or PAGE not in app.env.found_docs:
        return
    target = app.builder.get_relative_uri(docname, PAGE)
    link_first_appearances(doctree, read_terms(text), target)


def _rewrite_all_when_terms_change(app: Sphinx, env: BuildEnvironment) -> set[str]:
    before, env.book_terms = getattr(env, "book_terms", None), _read(app)
    return set() if env.book_terms == before else set(env.found_docs)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("doctree-read", _anchor_rows)
    app.connect("doctree-resolved", _link_page)
    app.connect("env-get-updated", _rewrite_all_when_terms_change)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
