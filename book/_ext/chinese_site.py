"""Sphinx 扩展：中文书该有的样子：搜得到术语，断行处没有多余的空格，执行表是中文的。"""

import logging
import re
from pathlib import Path

import jieba
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.config import Config

ROW = re.compile(r"^\|([^|]+)\|", re.MULTILINE)
CHINESE = re.compile(r"[\u4e00-\u9fff]{2,}")

HAN = r"[\u4e00-\u9fff]"
FULL = r"[\u3000-\u303f\uff00-\uff60\u2018-\u201d\u2014\u2026]"  # 全角标点
JOINT = re.compile(rf"(?<={FULL})\n|(?<={HAN})\n(?={HAN}|{FULL})|\n(?={FULL})")

EXECUTION_TABLE = {
    "Document": "页面",
    "Modified": "执行时间",
    "Method": "方式",
    "Run Time (s)": "秒",
    "Status": "结果",
    "force": "执行",
    "✅": "成功",  # 不少系统没有这个符号的字形
    "❌": "失败",
}


def glossary_terms(text: str) -> list[str]:
    """术语表里的中文词：每个表格行第一列的每一段连续汉字。"""
    return sorted({term for cell in ROW.findall(text) for term in CHINESE.findall(cell)})


def _teach_jieba(app: Sphinx, config: Config) -> None:
    """Sphinx 用 jieba 切词建索引；词典里没有的术语（梯度累积……）会被切碎，搜不到。

    所以把术语表（`book/glossary.md` 各表的第一列）都加进它的词典。
    """
    jieba.setLogLevel(logging.WARNING)  # 不要它往 stderr 写"Building prefix dict"
    glossary = Path(app.srcdir) / "glossary.md"
    if glossary.is_file():
        for term in glossary_terms(glossary.read_text(encoding="utf-8")):
            jieba.add_word(term, freq=100_000)  # 足够大，总按整词切


def _join_lines(app: Sphinx, doctree: nodes.document) -> None:
    """源文件一句一行；浏览器会把换行画成空格，中文句子之间不该有。"""
    for text in list(doctree.findall(nodes.Text)):
        if text != "\n":  # MyST 把行末的换行解析成单独的文本节点
            continue
        siblings = text.parent.children
        # 按身份找位置：内容相同的换行节点不止一个，比较相等会找错
        place = next(i for i, node in enumerate(siblings) if node is text)
        before = "".join(node.astext() for node in siblings[:place])[-1:]
        after = "".join(node.astext() for node in siblings[place + 1 :])[:1]
        if JOINT.search(f"{before}\n{after}"):
            del siblings[place]


def _translate_execution_table(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """`{nb-exec-table}` 的表头是写死的英文。"""
    for table in doctree.findall(nodes.table):
        texts = list(table.findall(nodes.Text))
        if texts and texts[0] == "Document":
            for text in texts:
                if text in EXECUTION_TABLE:
                    text.parent.replace(text, nodes.Text(EXECUTION_TABLE[text]))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("config-inited", _teach_jieba)
    app.connect("doctree-read", _join_lines)
    app.connect("doctree-resolved", _translate_execution_table)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
