"""每个变体一个进程：分配器、线程数、环境变量是整个进程的事，同一个进程里比不出来。

一个进程就是一个只有一名工人的 `ProcessPoolExecutor`：任务里出的错连同它的 traceback 一起回来。
主进程等着一个任务做完才派下一个，所以同一时刻只有一个进程在算，可以一轮一轮地交错计时。

    with own_process(threads=2, env={"OMP_PROC_BIND": "close"}) as pool:
        pool.submit(function, ...).result()
"""

import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

import torch

BIND = {"OMP_PROC_BIND": "close", "OMP_PLACES": "cores"}  # 把计算线程一个一个绑在核上


def process_context(
    preload: tuple[str, ...] = (), fresh: bool = False
) -> multiprocessing.context.BaseContext:
    """工作进程怎么启动。Linux 上从一个只导入过 PyTorch、什么也没算过的进程派生，省去各自导入。

    别的系统，或要在 PyTorch 加载之前就设好环境变量时（`fresh`），从头启动。
    `preload` 是另外要先导入的模块；第一次调用时说了算。
    """
    if sys.platform != "linux" or fresh:
        return multiprocessing.get_context("spawn")
    from multiprocessing import forkserver  # 别的系统上不一定有

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", "experiments.lab.workers", *preload])
    forkserver.ensure_running()  # 不等它导入完；已经在运行时什么也不做
    return context


@contextmanager
def own_process(
    *, threads: int, env: Mapping[str, str] | None = None, preload: tuple[str, ...] = ()
) -> Iterator[ProcessPoolExecutor]:
    """一个自己的进程，派给它的任务依次做；离开时等它做完手上的再结束。

    `threads` 是它的计算线程数，`env` 是进程启动之前就设好的环境变量（例如 `BIND`）。
    """
    context = process_context(preload, fresh=bool(env))
    with ProcessPoolExecutor(1, context, _set_up, (threads,)) as pool:
        with environment({"OMP_NUM_THREADS": str(threads), **(env or {})}):
            pool.submit(os.getpid)  # 进程在派第一个任务时启动，继承此刻的环境
        yield pool


def _set_up(threads: int) -> None:
    """工作进程的开头：设线程数；主进程一没就跟着结束（它被杀掉时没有人来收尾）。"""
    torch.set_num_threads(threads)
    parent = multiprocessing.parent_process()

    def leave_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """临时设置环境变量；子进程启动时继承它们。"""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
