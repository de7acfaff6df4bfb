"""两台机器一起训练，然后弄坏它们：杀一台，杀会合的那台，冻住一台，只来一台；结果应当像没发生过。

    python experiments/multi_node.py                     # 要 Linux 和 root：两个网络命名空间
    python experiments/multi_node.py --loopback          # 没有 root：两台都在回环网卡上
    python experiments/multi_node.py --events calm node  # 只做其中几件

每台「机器」运行的就是读者会用的 presets/cluster/torchrun.sh，里面是 torchrun 与 train_gpu.py。
没有被打扰的一次作为标准，其余各次的最后一份检查点（权重与优化器）和每一步的 loss 都与它逐位比较。
这里**不**量速度：两台机器挤在同一颗 CPU 上；也没有第二块磁盘，共享盘就是本机的一个文件夹。
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pandas as pd
import torch

from experiments.lab.results import ROOT, publish, run_main, save_csv
from experiments.loop import checkpoint
from experiments.ranks.launch import child_environment, free_port
from experiments.ranks.nodes import Node, two_nodes, why_not
from tokens.errors import UserError

LAUNCHER = ROOT / "experiments" / "presets" / "cluster" / "torchrun.sh"
Event = Literal["calm", "node", "master", "slow", "nobody"]
NAMES = {
    "calm": "不受打扰", "node": "杀掉 B，再开机", "master": "杀掉 A（会合处），再开机",
    "slow": "B 冻住一会儿", "nobody": "只来了 A",
}  # fmt: skip
MODEL = {
    "preset": "tiny_cpu", "d_model": 32, "n_head": 1, "n_layer": 2, "seq_len": 32,
    "micro_batch": 4, "global_batch_tokens": 512, "warmup_steps": 10,
    "log_interval": 1, "device": "cpu", "dtype": "float32",
}  # fmt: skip


@dataclass(frozen=True)
class Options:
    """两台机器的几件坏事。"""

    events: tuple[Event, ...] = ("calm", "node", "master", "slow", "nobody")
    """做哪几件；calm 是标准，总要有"""
    steps: int = 100
    """训练走几步"""
    save_every: int = 10
    """每隔几步存一份检查点"""
    strike: int = 45
    """走到第几步动手"""
    down: float = 1.0
    """被杀的机器过几秒再开机"""
    frozen: float = 3.0
    """冻住几秒"""
    wait: int = 60
    """等别的机器至多几秒（torchrun.sh 的 WAIT）；「只来了 A」时是 5 秒"""
    loopback: bool = False
    """不用网络命名空间：两台都在回环网卡上，不要 root"""

    def __post_init__(self) -> None:
        """走不到动手的那一步就没有意义。"""
        if not 0 < self.strike < self.steps:
            raise UserError(f"--strike {self.strike}：要在 0 与 --steps {self.steps} 之间。")


@dataclass
class Outcome:
    """一件坏事的经过与结果。"""

    event: str
    codes: tuple[int | None, ...] = ()  # 两台机器的 torchrun.sh 的退出码；没有启动的是 None
    seconds: float = 0.0
    progress: list[tuple[float, int]] = field(default_factory=list)  # （秒，日志里的步数）
    struck: float = float("nan")  # 动手的时刻（秒）
    back: float = float("nan")  # 那台机器回来（开机、解冻）的时刻（秒）
    said: str = ""  # 两台机器打印的全部

    def reached(self) -> int:
        """那台机器回来之前走到了第几步：动手的那一瞬，正在走的一步还会走完。"""
        return max((step for at, step in self.progress if at <= self.back), default=0)

    def recovery(self) -> float:
        """从动手到走得比坏之前更远，过了几秒；没有再往前走是 NaN。"""
        later = [at for at, step in self.progress if at > self.back and step > self.reached()]
        return min(later, default=float("nan")) - self.struck

    def redone(self) -> int:
        """回来之后退回了几步：从检查点重做的。"""
        after = [step for at, step in self.progress if at > self.back]
        return max(0, self.reached() - min(after, default=self.reached()))


# ---------------------------------------------------------------- 启动与旁观


def start(node: Node, host: Node, folder: Path, options: Options, port: int, wait: int) -> None:
    """在一台机器上运行 torchrun.sh：与读者在真的机器上键入的相同，只是模型小。"""
    environment = child_environment(threads=1)
    environment.pop("GLOO_SOCKET_IFNAME")  # 走哪块网卡由 torchrun.sh 自己认
    environment |= {
        "HOST": host.address, "NODES": "2", "JOB": folder.name, "OUT": str(folder / "out"),
        "PORT": str(port), "PROCS": "1", "WAIT": str(wait),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    if not node.space:  # 同一块网卡上分不清谁是谁：写明
        environment |= {"ADDRESS": node.address, "IS_HOST": str(int(node is host))}
    settings = {**MODEL, "steps": options.steps, "decay_steps": options.steps,
                "eval_interval": options.steps, "save_interval": options.save_every}  # fmt: skip
    words = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    node.start(["bash", str(LAUNCHER), "--no-compile", *words], environment,
               folder / f"{node.name}.log")  # fmt: skip


def logged_step(folder: Path) -> int:
    """log.csv 里最后一个写完的步数；还没有就是 0。"""
    try:
        lines = (folder / "out" / "log.csv").read_text(encoding="utf-8").split("\n")[1:-1]
    except FileNotFoundError:
        return 0
    return int(lines[-1].split(",")[0]) if lines else 0


class Watch:
    """旁观一次训练：记下（秒，步数），等到某件事发生；太久就报错，带着两台机器的输出。"""

    def __init__(self, folder: Path, nodes: tuple[Node, Node], limit: float = 180.0) -> None:
        self.folder, self.nodes, self.limit = folder, nodes, limit
        self.begun, self.progress = time.monotonic(), []

    def now(self) -> float:
        """从启动到现在的秒数。"""
        return time.monotonic() - self.begun

    def until(self, done: Callable[[], bool]) -> None:
        """每 20 毫秒看一眼，直到 `done()`。"""
        while not done():
            step = logged_step(self.folder)
            if not self.progress or self.progress[-1][1] != step:
                self.progress.append((round(self.now(), 3), step))
            if self.now() > self.limit:
                raise RuntimeError(f"{self.limit:g} 秒还没有等到：\n{self.said()}")
            time.sleep(0.02)

    def step(self, number: int) -> None:
        """等到日志里走过第 `number` 步；两台都退出了就是等不到。"""
        self.until(lambda: logged_step(self.folder) >= number or not any(map(running, self.nodes)))
        if logged_step(self.folder) < number:
            raise RuntimeError(f"没有走到第 {number} 步就退出了：\n{self.said()}")

    def pause(self, seconds: float) -> None:
        """等这么久，照样记。"""
        deadline = self.now() + seconds
        self.until(lambda: self.now() >= deadline)

    def said(self) -> str:
        """两台机器打印的全部。"""
        return "".join(f"── {node.name} ──\n{path.read_text(encoding='utf-8', errors='replace')}"
                       for node in self.nodes
                       if (path := self.folder / f"{node.name}.log").exists())  # fmt: skip


def running(node: Node) -> bool:
    """这台机器上最近一次启动的还在跑。"""
    return bool(node.started) and node.started[-1].poll() is None


# ---------------------------------------------------------------- 几件坏事


def happen(event: str, options: Options, nodes: tuple[Node, Node], folder: Path) -> Outcome:
    """两台机器训练一次，途中发生 `event`；返回经过。A 是会合的那台，也是 rank 0。"""
    a, b = nodes
    port, wait = (free_port(), options.wait) if not a.space else (29500, options.wait)
    wait = 5 if event == "nobody" else wait
    folder.mkdir()

    def power_on(node: Node) -> None:
        start(node, a, folder, options, port, wait)

    outcome, watch = Outcome(event), Watch(folder, nodes)
    power_on(a)
    if event != "nobody":
        power_on(b)
    if event in ("node", "master", "slow"):
        watch.step(options.strike)
        outcome.struck = watch.now()
        victim = a if event == "master" else b
        if event == "slow":
            victim.freeze()
            watch.pause(options.frozen)
            outcome.back = watch.now()
            victim.thaw()
        else:
            victim.kill()
            watch.pause(options.down)
            outcome.back = watch.now()
            power_on(victim)
    watch.until(lambda: not any(map(running, nodes)))
    outcome.seconds, outcome.progress = watch.now(), watch.progress
    outcome.codes = tuple(node.started[-1].wait() if node.started else None for node in nodes)
    outcome.said = watch.said()
    return outcome


# ---------------------------------------------------------------- 与没发生过比


def tensors(tree: object) -> Iterator[torch.Tensor]:
    """字典与列表里的全部张量，按遍历次序。"""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for child in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors(child)


def losses(folder: Path) -> pd.DataFrame:
    """日志里每一步的 loss、梯度范数与学习率，不含时间。"""
    log = pd.read_csv(folder / "out" / "log.csv").dropna(subset="loss")
    return log[["step", "loss", "grad_norm", "lr"]].reset_index(drop=True)


def same_as(calm: Path, folder: Path) -> bool:
    """最后的权重、优化器状态、每一步的 loss 都与没有被打扰的逐位相等。"""
    ours, theirs = (checkpoint.read(where / "out" / checkpoint.LAST) for where in (calm, folder))
    pairs = zip(tensors([ours["model"], ours["optimizer"]]),
                tensors([theirs["model"], theirs["optimizer"]]), strict=True)  # fmt: skip
    equal = all(torch.equal(x, y) for x, y in pairs)
    return equal and losses(calm).equals(losses(folder))


def row(outcome: Outcome, calm: Path, folder: Path) -> dict:
    """结果表的一行。"""
    alone = outcome.event == "nobody"
    return {
        "event": outcome.event, "发生了什么": NAMES[outcome.event],
        "退出码": "、".join(str(code) for code in outcome.codes if code is not None),
        "全程秒数": outcome.seconds,
        "恢复秒数": outcome.recovery(), "重做步数": None if alone else outcome.redone(),
        "与没发生过": "–" if alone else "逐位相等" if same_as(calm, folder) else "不同",
    }  # fmt: skip


def last_sentence(said: str) -> str:
    """最后一行以「错误」开头的话。"""
    return next((line for line in reversed(said.splitlines()) if line.startswith("错误")), "")


@contextmanager
def machines(options: Options) -> Iterator[tuple[Node, Node]]:
    """两台新的机器。"""
    with two_nodes(loopback=options.loopback) as nodes:
        yield nodes


def main(options: Options) -> None:
    """一件一件做，打印表，写 CSV。"""
    if not options.loopback and (reason := why_not()):
        print(f"{reason}。\n改用回环网卡上的两个地址。")
        options = Options(**{**vars(options), "loopback": True})
    how = "回环网卡上的两个地址" if options.loopback else "两个网络命名空间，一对虚拟网卡"
    print(f"两台机器：{how}；每台一个进程，{options.steps} 步，每 {options.save_every} 步存一份。")
    rows, progress, sentence = [], [], ""
    with tempfile.TemporaryDirectory(prefix="multi_node_") as work:
        calm = Path(work) / "calm"
        for event in dict.fromkeys(("calm", *options.events)):
            folder = Path(work) / event
            with machines(options) as nodes:
                outcome = happen(event, options, nodes, folder)
            rows.append(row(outcome, calm, folder))
            progress += [{"event": event, "seconds": at, "step": step, "struck": outcome.struck}
                         for at, step in outcome.progress]  # fmt: skip
            if event == "nobody":
                sentence = last_sentence(outcome.said)
    publish("multi_node", "几件坏事，以及结果", rows, options, hide=("event",),
            formats={"全程秒数": "{:.0f}", "恢复秒数": "{:.1f}", "重做步数": "{:.0f}"})  # fmt: skip
    save_csv(progress, "multi_node_progress", options)
    if sentence:
        print(f"\n只来了 A 的时候，它说\n{sentence}")


if __name__ == "__main__":
    run_main(main, Options)
