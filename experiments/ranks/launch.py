"""启动别的进程：torchrun 的命令只在这里写一次，子进程的环境只在这里定一次。

书页、测试、计划和检查都用它：`torchrun_command` 是真正执行的，`shown` 是读者会键入的。
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from shlex import join
from typing import Any

import psutil
import torch

from experiments.ranks.world import LOOPBACK, joined

SINGLE_NODE = ("--standalone",)


def torchrun_command(script: str, *args: object, nproc: int, flags: tuple[str, ...] = SINGLE_NODE
                     ) -> list[str]:  # fmt: skip
    """真正执行的命令：`-m` 的写法等于 torchrun，但不要求虚拟环境的 bin 目录在 PATH 里。"""
    launcher = [sys.executable, "-m", "torch.distributed.run", *flags]
    return [*launcher, "--nproc-per-node", str(nproc), script, *map(str, args)]


def shown(script: str, *args: object, nproc: int | None = None,
          flags: tuple[str, ...] = SINGLE_NODE) -> str:  # fmt: skip
    """读者会键入的那一行；`nproc` 为 None 时是 python，否则是 torchrun。"""
    launcher = ["python"]
    if nproc is not None:
        launcher = ["torchrun", *flags, "--nproc-per-node", str(nproc)]
    return join([*launcher, script, *map(str, args)])


def usable_cores() -> int:
    """这个进程能用几个核；容器或任务集限制了就是限制之后的数。"""
    count = getattr(os, "process_cpu_count", None)  # Python 3.13 起
    affinity = getattr(os, "sched_getaffinity", None)  # 只有 Linux 有
    return (count() if count else len(affinity(0)) if affinity else os.cpu_count()) or 1


def child_environment(processes: int = 1, threads: int | None = None) -> dict[str, str]:
    """子进程的环境：线程数写明（默认平分可用的核）、不开窗口、gloo 走回环网卡、UTF-8。

    去掉 torchrun 给这个进程的变量：子进程是另一个世界的成员。
    """
    threads = threads or max(1, usable_cores() // processes)
    mine = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items()
           if name not in mine and not name.startswith("TORCHELASTIC_")}  # fmt: skip
    return env | {
        "OMP_NUM_THREADS": str(threads),  # 不写明时 torchrun 会悄悄设成 1
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        "MPLBACKEND": "Agg",
        "PYTHONUTF8": "1",
        "PYTHONIOENCODING": "utf-8",
    }


def family_of(pid: int) -> list[psutil.Process]:
    """进程和它此刻的全部后代；进程已经不在时是空的。"""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kill_all(family: Iterable[psutil.Process]) -> None:
    """一个不留；已经不在的跳过。"""
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()


def kill_tree(pid: int) -> None:
    """杀掉进程和它的全部后代：torchrun 给每个 worker 开了新的会话，只杀进程组会漏掉它们。"""
    kill_all(family_of(pid))


def end_tree(process: subprocess.Popen, *, grace: float) -> None:
    """先请进程组退出（SIGTERM），`grace` 秒之后还在的全部后代强行结束。

    `process` 要是自成一组启动的（`start_new_session=True`）。
    """
    family = family_of(process.pid)
    with contextlib.suppress(ProcessLookupError):
        if hasattr(os, "killpg"):  # Windows 没有进程组信号
            os.killpg(process.pid, signal.SIGTERM)
        else:
            process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=grace)
    kill_all(family)


def free_port() -> int:
    """一个此刻没人用的端口。"""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# ---------------------------------------------------------------- 不经 torchrun 的几个进程


class RanksFailed(RuntimeError):
    """有一个进程没有做完；消息里是它的 traceback，或者「超时」。"""


def run_ranks(function: Callable[..., Any], size: int, *args: object, timeout: float = 120.0,
              device: str = "cpu") -> list[Any]:  # fmt: skip
    """起 `size` 个进程，每个都加入同一个进程组并执行 `function(world, *args)`。

    `device` 是 cpu（gloo）或 cuda（nccl，每个进程一张卡）。

    返回各进程的返回值，按 rank。`function` 要能 pickle（模块顶层的函数）。每个进程一个计算线程。
    有一个出错就杀掉其余的，抛 `RanksFailed`，带着它的 traceback；`timeout`（秒）之内没有做完也是。
    进程从一个只导入过 PyTorch 的进程派生，所以不到两秒就绪。
    """
    methods = multiprocessing.get_all_start_methods()  # Windows 上只有 spawn
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if "forkserver" in methods:
        context.set_forkserver_preload(["torch", "torch.distributed", "experiments.ranks.launch"])
    port, processes, pipes = free_port(), [], []
    for rank in range(size):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank_main, args=(theirs, rank, size, port, device, function, args), daemon=True
        )
        process.start()
        theirs.close()  # 只留子进程那一份：它一死这边就读到 EOF
        processes.append(process)
        pipes.append(mine)
    try:
        return _collect(pipes, timeout)
    finally:
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                kill_tree(process.pid)
            process.join()


def _collect(pipes: list, timeout: float) -> list[Any]:
    """按到达的先后收回答；第一个失败就停。"""
    answers: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        ready = multiprocessing.connection.wait(list(waiting), max(0, deadline - time.monotonic()))
        if not ready:
            late = "、".join(map(str, sorted(waiting.values())))
            raise RanksFailed(f"{timeout:g} 秒之内没有做完的 rank：{late}（多半在等通信）")
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                ok, answer = pipe.recv()
            except EOFError:
                raise RanksFailed(f"rank {rank} 没有回答就退出了") from None
            if not ok:
                raise RanksFailed(f"rank {rank} 出错：\n{answer}")
            answers[rank] = answer
    return [answers[rank] for rank in range(len(pipes))]


def _rank_main(
    pipe, rank: int, size: int, port: int, device: str, function: Callable, args: tuple
) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": LOOPBACK,
    }  # fmt: skip
    try:
        with joined(device) as world:
            answer = function(world, *args)
        pipe.send((True, answer))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
