"""Sphinx 扩展：写不进去就在开头用一句话说明，而不是在中途抛出一屏幕的错误。

建书要写两处：网站所在的 `_build/`，脚本留下结果的 `results/`。
"""

import sys
import tempfile
from pathlib import Path

from sphinx.application import Sphinx


def refusal(folder: Path) -> str | None:
    """在 `folder` 里（没有就建）写不了文件时，返回说明原因的一句话。"""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return (
            f"错误：写不进 {folder}（{error.strerror}）；建书要在仓库里写 _build/ 和 results/，"
            "请把仓库复制到可写的目录再建。"
        )


def setup(app: Sphinx) -> dict[str, bool]:
    for folder in (Path(app.outdir), Path(app.srcdir).resolve().parent / "results"):
        if message := refusal(folder):
            print(message, file=sys.stderr)
            raise SystemExit(2)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
