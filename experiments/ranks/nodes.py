"""一台电脑上的两台「机器」：两个网络命名空间，一对虚拟网卡连着；可以整台杀掉、冻住、限速、再开机。

    with two_nodes() as nodes:                       # 不能建命名空间时抛 UserError，说明原因
        nodes[0].start(command, environment, log)    # 这台机器上的进程
        nodes[0].kill()                              # 断电：它的进程一个不留

命名空间里有自己的网卡、地址和路由，两边只能经过那根线说话；磁盘还是同一块，正好当共享盘。
要 Linux、root 和 iproute2；`loopback=True` 时退而求其次，两台都在回环网卡上，各用一个地址。
离开 with 时，进程全部结束，命名空间和网卡全部删除，中途出错也一样。
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import join

import psutil

from experiments.ranks.launch import family_of, kill_all
from experiments.ranks.world import LOOPBACK
from tokens.errors import UserError

ADDRESSES = ("10.77.0.1", "10.77.0.2")  # 只在这两个命名空间里有效，与外面的网络无关
ON_LOOPBACK = ("127.0.0.1", "127.0.0.2")


@dataclass
class Node:
    """一台「机器」：它的地址、网卡，和在它上面启动的进程。`space` 是命名空间，空串是没有。"""

    name: str
    address: str
    interface: str
    space: str = ""
    started: list[subprocess.Popen] = field(default_factory=list)

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> subprocess.Popen:
        """在这台机器上启动 `command`，两个输出都接到 `log` 的末尾。"""
        prefix = ["ip", "netns", "exec", self.space] if self.space else []
        with open(log, "ab") as output:
            process = subprocess.Popen(
                [*prefix, *command], env=dict(environment), stdin=subprocess.DEVNULL,
                stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        self.started.append(process)
        return process

    def processes(self) -> list[psutil.Process]:
        """此刻这台机器上的全部进程，子孙也算。"""
        found = [member for process in self.started if process.poll() is None
                 for member in family_of(process.pid)]  # fmt: skip
        if self.space:
            known = {member.pid for member in found}
            listed = subprocess.run(
                ["ip", "netns", "pids", self.space], capture_output=True, text=True
            ).stdout.split()
            with contextlib.suppress(psutil.NoSuchProcess):
                found += [psutil.Process(int(pid)) for pid in listed if int(pid) not in known]
        return found

    def kill(self) -> None:
        """断电：全部进程 SIGKILL，父进程死后留下的也不漏。"""
        self.freeze()  # 先冻住：杀父进程的那一瞬，不让它再生出新的
        while family := self.processes():
            kill_all(family)
            psutil.wait_procs(family, timeout=5)
        for process in self.started:
            process.wait()

    def freeze(self) -> None:
        """冻住全部进程（SIGSTOP）：一台忽然慢得像停了的机器。"""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """接着走（SIGCONT）。"""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def limit(self, megabits: float) -> None:
        """把这台机器往外发的速度限到每秒 `megabits` 兆比特；要有命名空间。"""
        run("tc", "-n", self.space, "qdisc", "replace", "dev", self.interface, "root", "tbf",
            "rate", f"{megabits}mbit", "burst", "16kb", "latency", "200ms")  # fmt: skip


def run(*command: str) -> None:
    """执行一条系统命令；失败抛 `UserError`，带着它自己的话。"""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{join(command)} 没有做成（{done.stderr.strip() or done.returncode}）。")


def why_not() -> str:
    """这台电脑为什么建不了网络命名空间；建得了就是空串。"""
    if not sys.platform.startswith("linux"):
        return "网络命名空间只有 Linux 有"
    if missing := [name for name in ("ip", "tc") if not shutil.which(name)]:
        return f"没有 {'、'.join(missing)}（Debian 的 iproute2）"
    try:
        with two_nodes() as (a, _):  # 建得成也未必进得去：容器里不许挂载 /sys
            run("ip", "netns", "exec", a.space, "true")
            return ""
    except UserError as error:
        return f"不能建网络命名空间或虚拟网卡（多半不是 root）：{error}"


@contextlib.contextmanager
def terminated_politely() -> Iterator[None]:
    """被 SIGTERM 时像 Ctrl-C 那样抛出异常，`finally` 才有机会拆掉机器；不在主线程里就不管。"""

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextlib.contextmanager
def two_nodes(*, loopback: bool = False) -> Iterator[tuple[Node, Node]]:
    """两台机器，用完全部拆掉；建不成时抛 `UserError`。"""
    if loopback:
        nodes = tuple(Node(name, address, LOOPBACK)
                      for name, address in zip("AB", ON_LOOPBACK, strict=True))  # fmt: skip
    else:
        tag = f"bk{os.getpid()}"  # 网卡的名字至多 15 个字符；同时跑几份也不撞
        nodes = tuple(Node(name, address, f"{tag}{name}", space=f"{tag}{name}")
                      for name, address in zip("AB", ADDRESSES, strict=True))  # fmt: skip
    try:
        with terminated_politely():
            if not loopback:
                connect(*nodes)
            yield nodes
    finally:
        for node in nodes:
            node.kill()
            if node.space:  # 网卡在里面，随它一起消失
                subprocess.run(["ip", "netns", "del", node.space], capture_output=True)


def connect(a: Node, b: Node) -> None:
    """建两个命名空间，一根线连起来，各设地址。"""
    for node in (a, b):
        run("ip", "netns", "add", node.space)
        run("ip", "-n", node.space, "link", "set", "lo", "up")
    run("ip", "link", "add", a.interface, "netns", a.space, "type", "veth",
        "peer", "name", b.interface, "netns", b.space)  # fmt: skip
    for node in (a, b):
        run("ip", "-n", node.space, "addr", "add", f"{node.address}/24", "dev", node.interface)
        run("ip", "-n", node.space, "link", "set", node.interface, "up")
