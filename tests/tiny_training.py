"""train_gpu 的测试共用的东西：一个极小的配置，在本进程、在子进程、在两个进程里跑它。

子进程由 forkserver 派生：torch 只导入一次，起一个进程不到两秒；它可以像真的进程一样被 SIGKILL。
"""

import multiprocessing
import os
import sys
from pathlib import Path

import pandas as pd
import torch

from experiments import train_gpu
from experiments.loop import checkpoint
from experiments.loop.options import Options
from experiments.ranks.launch import free_port
from experiments.ranks.world import LOOPBACK

METHODS = multiprocessing.get_all_start_methods()  # Windows 上只有 spawn
FORK = multiprocessing.get_context("forkserver" if "forkserver" in METHODS else "spawn")
FORK.set_forkserver_preload(["torch", "experiments.train_gpu", "tiny_training"])

# 28,832 个参数；一步 16 个序列：单进程累积 4 次，两个进程各 2 次。
TINY = {
    "vocab_size": 256, "d_model": 32, "n_head": 2, "n_layer": 2, "seq_len": 32, "micro_batch": 4,
    "global_batch_tokens": 512, "steps": 40, "warmup_steps": 5, "decay_steps": 40, "lr": 3e-3,
    "eval_interval": 10, "eval_tokens": 512, "log_interval": 1, "data": "synthetic",
    "device": "cpu", "dtype": "float32", "compile": False, "fused_loss": True,
}  # fmt: skip


def tiny(folder: Path, **changes) -> Options:
    """极小的配置，结果放在 `folder`。"""
    return Options(**{**TINY, "out_dir": str(folder), **changes})


def train(folder: Path, **changes) -> int:
    """在本进程里训练；返回退出码。"""
    return train_gpu.main(tiny(folder, **changes))


def _child(rank: int, size: int, port: int, options: Options, hook) -> None:
    torch.set_num_threads(1)
    sys.stdout = sys.stderr = open(os.devnull, "w")
    if size > 1:
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": LOOPBACK,
        }  # fmt: skip
    if hook is not None:
        hook(rank)
    sys.exit(train_gpu.main(options))


def start(size: int, folder: Path, hook=None, **changes) -> list:
    """派生 `size` 个进程训练，立即返回；`hook(rank)` 在每个进程里先运行，可以动手脚。"""
    options, port = tiny(folder, **changes), free_port()
    processes = [
        FORK.Process(target=_child, args=(rank, size, port, options, hook)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    return processes


def train_ranks(size: int, folder: Path, hook=None, **changes) -> list[int]:
    """同上，等到都结束；返回各进程的退出码。"""
    processes = start(size, folder, hook, **changes)
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def state(folder: Path, name: str = checkpoint.LAST) -> dict:
    """核对过的检查点。"""
    return checkpoint.read(folder / name)


def difference(a: dict, b: dict) -> float:
    """两份检查点的权重与优化器状态的最大绝对差；0.0 就是逐位相等（张量的类型也相同）。"""
    worst = 0.0
    for left, right in zip(tensors(a), tensors(b), strict=True):
        assert left.dtype == right.dtype and left.shape == right.shape
        if not torch.equal(left, right):
            worst = max(worst, (left.double() - right.double()).abs().max().item(), 1e-300)
    return worst


def tensors(state: dict) -> list[torch.Tensor]:
    """权重，以及优化器里的每个张量，按次序。"""
    found = list(state["model"].values())
    for optimizer in state["optimizer"]:
        for entry in optimizer["state"].values():
            found += [value for value in entry.values() if isinstance(value, torch.Tensor)]
    return found


def trace(folder: Path) -> pd.DataFrame:
    """日志里与时间无关的列：每步的 loss、梯度范数、学习率。"""
    log = pd.read_csv(folder / "log.csv").dropna(subset="loss")
    return log[["step", "tokens", "loss", "grad_norm", "lr"]].reset_index(drop=True)
