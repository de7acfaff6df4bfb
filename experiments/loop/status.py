"""一次训练怎样占住它的文件夹，又怎样留下结局：`status.json` 给调度器看。

torchrun 的退出码只有 0 和 1，所以结局写在文件里：

    {"state": "running | finished | interrupted | diverged | refused | failed",
     "step": 400, "code": 0, "reason": "", "launch": "…", "started": 1767225600.0}

同一次启动里，被 torchrun 重启的进程先看它：时限从第一次开始算；已经发散或被拒绝的，再来一遍也一样，
立即以同样的退出码结束。锁由操作系统持有，进程一死就放开。
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

from experiments.loop.checkpoint import restart_count
from experiments.ranks.world import World
from tokens.errors import UserError
from tokens.files import atomic_write

STATUS, LOCK = "status.json", ".train.lock"
PATIENCE = 5.0  # 秒；重启时，上一个进程可能正在退出
HOPELESS = ("diverged", "refused")  # 重启也改变不了的结局
STATES = {0: "finished", 2: "refused", 3: "diverged", 75: "interrupted"}


def launch_id() -> str:
    """这次启动的名字：torchrun 的 run id，不在它之下是 none。"""
    return os.environ.get("TORCHELASTIC_RUN_ID", "none")


@contextmanager
def exclusive(folder: Path, world: World) -> Iterator[None]:
    """训练期间独占 `folder`；别的训练正在用它时，每个进程都抛同一个 `UserError`。"""
    lock = filelock.FileLock(folder / LOCK)

    def acquire() -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=PATIENCE if restart_count() else 0)
        except filelock.Timeout:
            raise UserError(
                f"另一个训练正在用 {folder}；请等它结束，或换一个 --out-dir。"
            ) from None
        except OSError as error:
            raise UserError(
                f"不能在 {folder} 里写文件（{error.strerror}）；请改权限，或换一个 --out-dir。"
            ) from error

    world.on_master(acquire)
    try:
        yield
    finally:
        lock.release()


def read_status(folder: Path) -> dict:
    """上一次留下的 `status.json`；没有或读不出时是空字典。"""
    try:
        return json.loads((folder / STATUS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def write_status(folder: Path, **values: object) -> None:
    """原子地写 `status.json`；写不下不该毁掉训练，所以不抛。"""
    try:
        with atomic_write(folder / STATUS) as temporary:
            text = json.dumps({**values, "launch": launch_id()}, ensure_ascii=False, indent=1)
            temporary.write_text(text + "\n", encoding="utf-8")
    except (OSError, UserError):
        pass


def begin(folder: Path, world: World) -> tuple[float, int | None]:
    """记下「在跑」。返回（这次启动已经用掉的秒数，None 或：不必再跑、以它为退出码）。"""

    def look() -> tuple[float, int | None]:
        old = read_status(folder)
        again = restart_count() > 0 and old.get("launch") == launch_id()
        if again and old.get("state") in HOPELESS:
            return 0.0, int(old.get("code", 2))
        started = float(old.get("started", time.time())) if again else time.time()
        write_status(folder, state="running", started=started)
        return max(0.0, time.time() - started), None

    return world.on_master(look)


def end(folder: Path, world: World, code: int, *, step: int = -1, reason: str = "") -> None:
    """记下结局；只在 0 号进程写。"""
    if world.master:
        started = read_status(folder).get("started")
        write_status(folder, state=STATES.get(code, "failed"), code=code, step=step, reason=reason,
                     started=started)  # fmt: skip
