"""Sphinx 扩展：建好的网站不向外取任何东西，也不带用不上的东西。

- 公式用随站点发布的 MathJax（构建时从 PyPI 包里取一个脚本和它的字体，仓库不存放副本）。
- 去掉 thebe：它要连外网的 Binder，而且在每页加载两遍。
- 去掉 fontawesome.js：图标已由同名的网络字体画出，这个脚本有 1.5 MB。
- 在 CI 里（环境变量 CI 非空）有警告就算构建失败。
"""

import os
import re
import shutil
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.errors import ExtensionError

PACKAGE = "sphinx-mathjax-offline"
MATHJAX = ("tex-chtml.js", "output/chtml/fonts/woff-v2")
FONTAWESOME = re.compile(r'\s*<script defer src="[^"]*/scripts/fontawesome\.js[^"]*"></script>')


def _mathjax_source() -> Path:
    """PyPI 包里 MathJax 所在的目录；那个包的目录名带连字符，不能导入，只好查它的文件表。"""
    try:
        package = distribution(PACKAGE)
    except PackageNotFoundError:
        raise ExtensionError(f"没有 {PACKAGE}：请先 pip install -r requirements.txt") from None
    for file in package.files or []:
        if file.name == MATHJAX[0]:
            return Path(package.locate_file(file)).parent
    raise ExtensionError(f"{PACKAGE} 里没有 {MATHJAX[0]}")


def _copy_mathjax(app: Sphinx, error: Exception | None) -> None:
    target = Path(app.outdir) / "mathjax"
    if error or app.builder.format != "html" or target.exists():
        return
    source = _mathjax_source()
    for piece in MATHJAX:
        copy = shutil.copytree if (source / piece).is_dir() else shutil.copy
        (target / piece).parent.mkdir(parents=True, exist_ok=True)
        copy(source / piece, target / piece)


def _drop_thebe(app: Sphinx, config: Config) -> None:
    """让 sphinx-thebe 的钩子和样式都不再起作用：Jupyter Book 固定加载它，没有开关。"""
    styles = app.registry.css_files
    styles[:] = [style for style in styles if "thebe" not in style[0]]
    for listeners in app.events.listeners.values():
        for listener in [one for one in listeners if one.handler.__module__ == "sphinx_thebe"]:
            listeners.remove(listener)


def _drop_fontawesome_script(app: Sphinx, error: Exception | None) -> None:
    """这个标签写死在主题模板里，只能在写出之后删。"""
    if error or app.builder.format != "html":
        return
    for page in Path(app.outdir).rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        if FONTAWESOME.search(text):
            page.write_text(FONTAWESOME.sub("", text), encoding="utf-8")
    for script in Path(app.outdir).glob("_static/scripts/fontawesome.js*"):
        script.unlink()


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("build-finished", _copy_mathjax)
    app.connect("build-finished", _drop_fontawesome_script)
    app.connect("config-inited", _drop_thebe, priority=0)
    if os.environ.get("CI"):
        app.keep_going = True  # Sphinx 据此在有警告时返回非零，但仍建完，好一次看到全部警告
    return {"parallel_read_safe": True, "parallel_write_safe": True}
