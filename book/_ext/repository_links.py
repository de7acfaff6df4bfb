"""Sphinx 扩展：仓库、编辑、提问的按钮，以及指向源文件的 {source} 角色。

仓库地址事先不知道：在 GitHub 上取环境变量 GITHUB_REPOSITORY，在本机取 git 的远程 origin，
所以复刻（fork）里的读者改的是自己的复刻。两处都没有时不显示按钮，绝不留死链。
"""

import os
import re
import subprocess
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.util.docutils import SphinxRole

BRANCH = "main"
HOST = "https://github.com"
REMOTE = re.compile(r"(?:https?://(?:[^@/]+@)?|ssh://git@|git@)github\.com[:/](.+?)(?:\.git)?/?$")


def repository(root: Path) -> str | None:
    """`用户/仓库`；既不在 GitHub Actions 里、origin 又不指向 GitHub 时为 None。"""
    if name := os.environ.get("GITHUB_REPOSITORY"):
        return name
    command = ["git", "-C", str(root), "remote", "get-url", "origin"]
    try:
        url = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # 没有 git，或不是克隆来的
        return None
    found = REMOTE.match(url)
    return found[1] if found else None


def _set_links(app: Sphinx, config: Config) -> None:
    name = repository(Path(app.srcdir).resolve().parent)
    options = config.html_theme_options
    for button in ("use_repository_button", "use_edit_page_button", "use_issues_button"):
        options[button] = name is not None
    options["repository_url"] = f"{HOST}/{name}" if name else ""  # 否则是 Jupyter Book 自己的
    options["repository_branch"] = BRANCH
    options["path_to_docs"] = "book"
    if name:
        user, repo = name.split("/", 1)
        config.html_context |= {
            "github_user": user,
            "github_repo": repo,
            "github_version": BRANCH,
            "doc_path": "book",
        }


class SourceRole(SphinxRole):
    """`` {source}`experiments/speed.py` ``：仓库里这个文件的链接；没有仓库地址时只写路径。"""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        root = Path(self.env.srcdir).resolve().parent
        if not (root / self.text).exists():
            message = self.inliner.reporter.warning(f"仓库里没有 {self.text}", line=self.lineno)
            return [], [message]
        literal = nodes.literal(self.text, self.text)
        url = self.config.html_theme_options.get("repository_url")
        if not url:
            return [literal], []
        kind = "tree" if (root / self.text).is_dir() else "blob"
        target = f"{url}/{kind}/{BRANCH}/{self.text}"
        return [nodes.reference("", "", literal, refuri=target)], []


def setup(app: Sphinx) -> dict[str, bool]:
    # 早于主题读取这些选项
    app.connect("config-inited", _set_links, priority=100)
    app.add_role("source", SourceRole())
    return {"parallel_read_safe": True, "parallel_write_safe": True}
