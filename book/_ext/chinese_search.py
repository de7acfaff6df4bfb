"""Sphinx 扩展：让站内搜索认得本书的术语。

Sphinx 用 jieba 把中文切成词再建索引，词典里没有的术语（梯度累积、有效词元……）会被切碎，
搜不到。这里把术语表（`book/glossary.md` 表格的第一列）都加进 jieba 的词典。
"""

import logging
import re
from pathlib import Path

import jieba
from sphinx.application import Sphinx
from sphinx.config import Config

ROW = re.compile(r"^\|([^|]+)\|", re.MULTILINE)
CHINESE = re.compile(r"[\u4e00-\u9fff]{2,}")


def glossary_terms(text: str) -> list[str]:
    """术语表里的中文词：每个表格行第一列的每一段连续汉字。"""
    return sorted({term for cell in ROW.findall(text) for term in CHINESE.findall(cell)})


def _teach_jieba(app: Sphinx, config: Config) -> None:
    jieba.setLogLevel(logging.WARNING)  # 不要它往 stderr 写"Building prefix dict"
    glossary = Path(app.srcdir) / "glossary.md"
    if glossary.is_file():
        for term in glossary_terms(glossary.read_text(encoding="utf-8")):
            jieba.add_word(term, freq=100_000)  # 足够大，总按整词切


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("config-inited", _teach_jieba)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
