"""书页里的代码单元用到的全部东西：运行脚本、读结果、画图、把数字交给正文。

    from _ext.page import glue, measured, plt, results, run, show_figure

书页（`book/*.md`）执行时工作目录是 `book/`，所以 `_ext` 和 `figures` 可以直接导入。
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
for _folder in (ROOT / "book", ROOT):  # import model 指的是这份代码，而不是别处安装的那份
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))

from figures.style import use_style  # noqa: E402  要等 sys.path 就绪

from experiments.ranks import launch  # noqa: E402

__all__ = [
    "ROOT",
    "Finished",
    "ScriptError",
    "glue",
    "measured",
    "plt",
    "results",
    "run",
    "show_figure",
]

TERMINATE_GRACE = 40.0  # 秒；torchrun 收到 SIGTERM 后最多给各 rank 30 秒
_started: dict[str, float] = {}  # 本页运行过的脚本（文件名去掉 .py）-> 第一次开始的时刻


class ScriptError(RuntimeError):
    """脚本失败或超时；消息里有命令、退出码和脚本的 stderr。"""


@dataclass(frozen=True)
class Finished:
    """一次成功的运行：读者会键入的命令、标准输出、标准错误、耗时（秒）。"""

    command: str
    stdout: str
    stderr: str
    seconds: float

    def show(self, *titles: str) -> None:
        """印标准输出里的这几个小节；小节之间空一行，标题是它的第一行的开头。不给标题就印全部。

        Raises:
            ScriptError: 没有这样开头的小节。
        """
        print(self.sections(*titles) if titles else self.stdout, end="", flush=True)

    def sections(self, *titles: str) -> str:
        """`show` 要印的文字。"""
        blocks = self.stdout.strip("\n").split("\n\n")
        found = [[block for block in blocks if block.startswith(title)] for title in titles]
        if missing := [title for title, some in zip(titles, found, strict=True) if not some]:
            raise ScriptError(f"{self.command} 的输出里没有以“{missing[0]}”开头的小节")
        return "\n\n".join(block for some in found for block in some) + "\n"

    def _ipython_display_(self) -> None:
        """单元的最后一行是 run(...) 时不再显示什么：输出已经印过了。"""


def run(
    script: str,
    *args: object,
    nproc: int | None = None,
    timeout: float = 900.0,
    env: dict[str, str] | None = None,
    threads: int | None = None,
    quiet: bool = False,
    expect: int = 0,
    only: Sequence[str] = (),
) -> Finished:
    """在独立进程里、以仓库根目录为工作目录运行一个脚本，先印命令再印它的标准输出。

    Args:
        script: 相对仓库根目录的路径，如 `experiments/speed.py`。
        args: 命令行参数，逐个转成字符串。
        nproc: 给出时经 `torchrun --standalone --nproc-per-node nproc` 启动。
        timeout: 秒；超时则结束整组进程并抛出 ScriptError。
        env: 另加的环境变量，会作为前缀印在命令里。
        threads: 每个进程的计算线程数；默认把可用的核平分给各进程。
        quiet: 不印任何东西，只返回结果。
        expect: 期望的退出码；演示"用错了会怎样"时可设为 2，此时 stderr 一并印出。
        only: 只印输出里的这几个小节（见 `Finished.show`），其余留给后面的单元。

    Raises:
        ScriptError: 脚本不存在、退出码不是 `expect`，或超时；消息带着脚本的 stderr。
    """
    command, shown = _command(script, [str(a) for a in args], nproc, env or {})
    started = time.time()
    _started.setdefault(Path(script).stem, started)
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=_environment(nproc or 1, threads) | (env or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # 自成一组，超时时才能连同子进程一起结束
    )
    try:
        stdout, stderr = map(_text, process.communicate(timeout=timeout))
    except subprocess.TimeoutExpired:
        stdout, stderr = map(_text, _terminate(process))
        raise ScriptError(_report(shown, f"超过 {timeout:g} 秒仍未结束", stdout, stderr)) from None
    except BaseException:  # 构建被中断时不留下孤儿进程
        _terminate(process)
        raise
    if process.returncode != expect:
        reason = f"退出码 {process.returncode}（应为 {expect}）"
        raise ScriptError(_report(shown, reason, stdout, stderr))
    done = Finished(shown, stdout, stderr, time.time() - started)
    if not quiet:
        output = done.sections(*only) if only else stdout + (stderr if expect else "")
        print(f"$ {shown}", output, sep="\n", end="", flush=True)
    return done


def _command(
    script: str, args: list[str], nproc: int | None, env: dict[str, str]
) -> tuple[list[str], str]:
    """真正执行的命令，以及读者会键入的写法。"""
    if not (ROOT / script).is_file():
        raise ScriptError(f"没有脚本 {script}：路径要相对仓库根目录写，如 experiments/speed.py")
    command = [sys.executable, script, *args]
    if nproc is not None:
        command = launch.torchrun_command(script, *args, nproc=nproc)
    prefix = "".join(f"{name}={value} " for name, value in env.items())
    return command, prefix + launch.shown(script, *args, nproc=nproc)


def _environment(processes: int, threads: int | None) -> dict[str, str]:
    """脚本的环境：在 `child_environment` 之外，导入这份仓库的代码，折行宽度不随终端变化。"""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = launch.child_environment(processes, threads)
    # 书页读的是这份仓库的 results/，脚本就写在那里，不管外面把 BOOK_RESULTS 设成什么
    return environment | {
        "PYTHONPATH": path, "COLUMNS": "100", "BOOK_RESULTS": str(ROOT / "results")
    }  # fmt: skip


def _text(output: bytes) -> str:
    """进程写出的字节转成文字；不用 Popen 的文本模式，它会把进度条的 \\r 变成换行。"""
    return output.decode("utf-8", "replace").replace("\r\n", "\n")


def _terminate(process: subprocess.Popen) -> tuple[bytes, bytes]:
    """先请进程组退出，宽限期后强行结束它的全部后代；返回它已经写出的内容。"""
    launch.end_tree(process, grace=TERMINATE_GRACE)
    return process.communicate()


def _report(shown: str, reason: str, stdout: str, stderr: str) -> str:
    """失败的说明：命令、原因、stderr 全文（进度条只留最后一帧），stdout 只留末尾。"""
    lines = [line.rsplit("\r", 1)[-1] for line in stderr.rstrip().split("\n")]
    tail = "\n".join(stdout.rstrip().split("\n")[-20:])
    return (
        f"脚本失败：{reason}\n$ {shown}\n"
        f"--- 标准输出的末尾 ---\n{tail}\n--- stderr ---\n" + "\n".join(lines[-200:])
    )


def results(name: str) -> pd.DataFrame:
    """读 `results/<name>.csv`：脚本在这次构建里留下的结果。

    同名脚本本页刚运行过、文件却更旧时抛出 ScriptError：绝不把上一次的数字画在新代码下面。
    """
    path = ROOT / "results" / f"{name}.csv"
    if not path.is_file():
        raise ScriptError(f"没有 results/{name}.csv：写出它的脚本要先在本页用 run(...) 运行")
    # 文件时间戳的粒度可能粗到 2 秒
    for script, started in _started.items():  # speed.py 写 speed.csv，也写 speed_profile.csv
        if f"{name}_".startswith(f"{script}_") and path.stat().st_mtime < started - 2.0:
            raise ScriptError(f"results/{name}.csv 比 {script}.py 的这次运行还旧：脚本没有重写它")
    return pd.read_csv(path)


def measured(name: str) -> pd.DataFrame:
    """读 `book/measured/<name>.csv`：太长、不在构建里重跑的测量，随仓库提交。"""
    path = ROOT / "book" / "measured" / f"{name}.csv"
    if not path.is_file():
        raise ScriptError(f"没有 book/measured/{name}.csv")
    return pd.read_csv(path)


def glue(name: str, value: Any, *, display: bool = False) -> None:
    """把一个值交给正文，正文里写 `` {glue:text}`name:.1f` ``；默认不在单元下面显示。"""
    import myst_nb  # 只有书页需要它；测试导入本模块时不必有

    if isinstance(value, np.generic):  # 否则正文里会出现 np.float64(1.5)
        value = value.item()
    myst_nb.glue(name, value, display=display)


def show_figure(figure: Figure, name: str) -> None:
    """把一张图交给正文，由 `{glue:figure} name` 安放并配上图注、替代文字和标签。"""
    glue(name, figure)
    plt.close(figure)  # 否则单元结束时内嵌后端会再显示一次


def _prepare_figures() -> None:
    """设好全书的图形样式；在书页的内核里让图以 SVG 输出。"""
    use_style()
    if "ipykernel" in sys.modules:
        from matplotlib_inline.backend_inline import set_matplotlib_formats

        set_matplotlib_formats("svg")


_prepare_figures()
