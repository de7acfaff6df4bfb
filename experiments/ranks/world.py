"""进程与设备：我是第几个进程、用哪个设备、怎样和别的进程说话、怎样被打断。

单进程就是只有一个成员的世界，训练脚本因此不必分两路写。
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tokens.errors import UserError

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"  # 回环网卡的名字


@dataclass(frozen=True)
class World:
    """所有进程与这个进程的位置。单进程就是 size = 1，代码不分两路。

    `group` 给出时是其中的一部分进程：`rank` 与 `size` 是在这一组里的。
    """

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup | None = None

    @property
    def master(self) -> bool:
        """只有它打印和写文件。"""
        return self.rank == 0

    def say(self, message: str, *, error: bool = False) -> None:
        """0 号进程打印一行：平常的到 stdout，警告和错误到 stderr。"""
        if self.master:
            print(message, file=sys.stderr if error else sys.stdout, flush=True)

    def sum(self, tensor: Tensor) -> Tensor:
        """各进程的张量之和（新的张量），每个进程都得到。CPU 张量走 gloo，不打断 GPU。"""
        total = tensor.clone()
        if dist.is_initialized():
            dist.all_reduce(total, group=self.group)
        return total

    def together(self, work: Callable[[], Any]) -> Any:
        """每个进程都做 `work`；有一个报了 `UserError`，大家就报同一个：同进同退，谁也不空等。"""
        result = error = None
        try:
            result = work()
        except UserError as problem:
            error = str(problem)
        errors = [error] * self.size
        if dist.is_initialized():
            dist.all_gather_object(errors, error, group=self.group)
        for problem in filter(None, errors):
            raise UserError(problem)
        return result

    def on_master(self, work: Callable[[], Any]) -> Any:
        """只在 0 号进程做 `work`；返回值（或 `UserError`）每个进程都得到。"""
        answer = [self.together(lambda: work() if self.master else None)]
        if dist.is_initialized():
            dist.broadcast_object_list(answer, group=self.group, group_src=0)
        return answer[0]

    def gather(self, item: Any) -> list:
        """各进程的 `item` 排成一列，按进程号；每个进程都得到。"""
        items = [item] * self.size
        if dist.is_initialized():
            dist.all_gather_object(items, item, group=self.group)
        return items


def pick_device(name: str, local_rank: int) -> torch.device:
    """`auto` 有 GPU 就用 GPU；torchrun 之下第 LOCAL_RANK 个进程用第 LOCAL_RANK 张卡。"""
    has_cuda = torch.cuda.is_available()
    if name == "cpu" or (name == "auto" and not has_cuda):
        return torch.device("cpu")
    kind, _, number = name.partition(":")
    if kind not in ("auto", "cuda") or (number and not number.isdigit()):
        raise UserError(f"--device {name}：只能是 auto、cpu、cuda 或 cuda:N。")
    count = torch.cuda.device_count() if has_cuda else 0
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if number and processes > 1:
        crowd = f"--device {name} 会让 {processes} 个进程挤在一张卡上"
        raise UserError(f"{crowd}；请用 --device cuda，每个进程一张。")
    needed = int(number) + 1 if number else processes
    if needed > count:
        raise UserError(f"需要 {needed} 张 GPU，这台机器只看到 {count} 张；可用 --device cpu。")
    return torch.device("cuda", int(number or local_rank))


def attempt_store(size: int) -> dist.Store:
    """各进程交换地址的 TCP store，没有上一次留下的地址。

    torchrun 重启工作进程时沿用同一个 store，上一次的地址还留在里面：不加前缀，新进程会去连
    已经死掉的进程，报 `Gloo connectFullMesh failed`，把 --max-restarts 一次次耗光。
    不沿用时（TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1，几台机器时要它）每次都是 0 号新开的，不能加
    前缀：一台机器回来之后，它的「第几次重启」与别人的不同，各写各的就永远会不齐。
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agent_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    hosting = os.environ["RANK"] == "0" and not agent_hosts
    store = dist.TCPStore(host, port, size, is_master=hosting, multi_tenant=not agent_hosts)
    if not agent_hosts:
        return store
    return dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def use_loopback() -> None:
    """只有一台机器时让 gloo 走回环网卡：它默认解析主机名，解析不了或解析到别处就连不上。"""
    one_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    if one_machine and sys.platform != "win32":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)


def cannot_join(error: Exception) -> UserError:
    """进程组建不起来：端口被占、少了 MASTER_ADDR、连不上。"""
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return UserError(
        f"进程组建不起来（{where}：{(str(error).splitlines() or [''])[0][:160]}）；"
        "端口被占就换 --master-port，单机请用 torchrun --standalone。"
    )


def start_world(device_name: str, *, timeout: float | None = None) -> World:
    """有 RANK 就是 torchrun 启动的：加入进程组。GPU 之间用 nccl，CPU 上的张量用 gloo。

    `timeout`（秒）是一次通信最多等多久；None 用 PyTorch 的默认（gloo 30 分钟、nccl 10 分钟）。
    """
    device = pick_device(device_name, int(os.environ.get("LOCAL_RANK", 0)))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        return World(0, 1, device)
    use_loopback()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        limit = None if timeout is None else timedelta(seconds=timeout)
        dist.init_process_group(
            backend, store=attempt_store(size), rank=rank, world_size=size, timeout=limit
        )
    except (KeyError, ValueError, RuntimeError) as error:
        raise cannot_join(error) from error
    return World(dist.get_rank(), dist.get_world_size(), device)


def leave_world(world: World) -> None:
    """正常离开：等所有进程都做完再拆进程组，否则先走的进程会让别人的通信中断。"""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


@contextmanager
def joined(device_name: str, *, timeout: float = 120.0) -> Iterator[World]:
    """加入进程组，用完一起退出；中途出错就不等别人，让错误出来。"""
    world = start_world(device_name, timeout=timeout)
    try:
        yield world
        if dist.is_initialized():
            dist.barrier()  # 都做完了再一起走：先退出的进程会让别人的通信断掉
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def torchrun_world(
    command: str, *, sizes: Sequence[int] | None = None, timeout: float = 120.0
) -> Iterator[World]:
    """按 torchrun 设好的环境变量加入进程组，用完退出；每个进程都有 GPU 时用 GPU，否则都用 CPU。

    不是由 torchrun 启动、只有一个进程，或者进程数不在 `sizes` 里（None 表示不限）时抛 UserError，
    给出正确的 `command`。
    """
    if "RANK" not in os.environ:
        raise UserError(f"这个脚本要由 torchrun 启动，请改用：{command}")
    size = int(os.environ["WORLD_SIZE"])
    if size < 2:
        raise UserError(f"只有 {size} 个进程，没有谁可以对比；请改用：{command}")
    if sizes is not None and size not in sizes:
        allowed = "、".join(map(str, sizes))
        raise UserError(f"{size} 个进程：这个脚本只能用 {allowed} 个；请改用：{command}")
    enough = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    with joined("cuda" if enough else "cpu", timeout=timeout) as world:
        yield world


class Interruption:
    """SIGTERM、SIGINT 或到了时限：只记下来，走完手上这一步再存盘退出。

    抢占式机器回收前、torchrun 停止时发 SIGTERM，约 30 秒后才是 SIGKILL；Ctrl-C 是 SIGINT
    （torchrun 会再转发一次，所以第二次也不能当作「立即退出」）。用作上下文管理器。
    """

    def __init__(self, world: World, time_limit: float = 0.0, *, spent: float = 0.0) -> None:
        """`time_limit` 分钟之后停，0 表示不限；`spent` 是这次启动此前已经用掉的秒数。"""
        self.world, self.reason = world, ""
        limit = 60 * time_limit - spent if time_limit else float("inf")
        self.deadline = time.monotonic() + limit

    def __enter__(self) -> "Interruption":
        self.previous = {s: signal.signal(s, self._note) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: object) -> None:
        self.reason = signal.Signals(number).name

    def agreed(self) -> str:
        """有一个进程要停，大家就在同一步停；返回原因，空串表示继续。信号不会同时到达各进程。"""
        if time.monotonic() > self.deadline:
            self.reason = self.reason or "时限已到"
        wanted = self.world.sum(torch.tensor(int(bool(self.reason)))).item()
        # 只看总和：信号若在求和途中到来，reason 已经变了，别的进程却不知道，留到下一步再停。
        return (self.reason or "别的进程要停") if wanted else ""
