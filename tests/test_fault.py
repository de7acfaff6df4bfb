"""故障测试：训练进程在随机的时刻被 SIGKILL，保存中也不例外；续训的结果与没有被杀逐位相等。

`pytest` 里杀 5 次，`pytest -m fault` 杀 30 次，再在 torchrun 之下杀两个进程中的一个。
杀的时刻一半是随机的，一半挑在临时文件出现的那一瞬，也就是正在保存。
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import psutil
import pytest
from tiny_training import TINY, difference, start, state, trace, train_ranks

from experiments.loop import checkpoint
from experiments.ranks.world import LOOPBACK

SCRIPT = Path(__file__).resolve().parent.parent / "experiments" / "train_gpu.py"
EVERY_STEP = {"save_interval": 1}  # 每步都存：一半以上的时间在保存


def saving(folder: Path) -> bool:
    """此刻是否正在保存：临时文件在。"""
    return any(folder.glob(f".{checkpoint.LAST}.*.tmp"))


def wait_to_kill(folder: Path, alive: Callable[[], bool], dice: random.Random) -> None:
    """等到第一份检查点出现，再等一个随机的时刻；一半的时候再等到它正在保存。"""
    while alive() and not (folder / checkpoint.LAST).exists():
        time.sleep(0.002)
    moment, in_save = time.monotonic() + dice.uniform(0, 0.5), dice.random() < 0.5
    while alive() and (time.monotonic() < moment or (in_save and not saving(folder))):
        time.sleep(0.0005)


def kill_once(folder: Path, dice: random.Random) -> tuple[bool, bool]:
    """派生一个训练进程并杀掉它；返回（杀到了吗，死在保存中吗）。"""
    (process,) = start(1, folder, init_from="resume", **EVERY_STEP)
    wait_to_kill(folder, process.is_alive, dice)
    process.kill()
    process.join()
    return process.exitcode == -signal.SIGKILL, saving(folder)


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory) -> Path:
    """没有被杀过的一次训练。"""
    folder = tmp_path_factory.mktemp("unharmed")
    assert train_ranks(1, folder, **EVERY_STEP) == [0]
    return folder


def evaluations(folder: Path) -> list[tuple[int, float]]:
    """日志里的每次评估：(步, 验证 loss)，不重不漏。"""
    log = pd.read_csv(folder / "log.csv").dropna(subset="val_loss")
    return list(zip(log["step"], log["val_loss"], strict=True))


def assert_same(ours: Path, theirs: Path, what: str) -> None:
    """最后的权重、优化器、best 与日志里的每步 loss 都逐位相等，没有临时文件留下。"""
    assert difference(state(ours), state(theirs)) == 0.0, what
    assert difference(state(ours, checkpoint.BEST), state(theirs, checkpoint.BEST)) == 0.0, what
    assert trace(ours).equals(trace(theirs)), what
    assert evaluations(ours) == evaluations(theirs), what
    assert not saving(ours), what


@pytest.mark.slow
def test_five_kills_lose_nothing(unharmed, tmp_path):
    """一次训练被 SIGKILL 五次、每次续训：最后的权重、优化器状态、best、日志与没有被杀逐位相等。"""
    dice, kills, torn = random.Random(5), 0, 0
    for attempt in range(20):
        folder = tmp_path / str(attempt)
        for _ in range(5):
            killed, in_save = kill_once(folder, dice)
            kills, torn = kills + killed, torn + in_save
            if not killed or kills == 5:
                break
        assert train_ranks(1, folder, init_from="resume", **EVERY_STEP) == [0]
        assert_same(folder, unharmed, f"第 {kills} 次杀之后，其中 {torn} 次死在保存中")
        if kills >= 5:
            break
    assert kills >= 5, f"只杀到 {kills} 次"


# ---------------------------------------------------------------- 长测试：30 次，与 torchrun


@pytest.mark.fault
@pytest.mark.timeout(600)
def test_thirty_of_thirty(unharmed, tmp_path):
    """30 次训练各在随机的时刻被 SIGKILL 再续训：30 次都与没有被杀逐位相等，至少 5 次死在保存中。"""
    dice, kills, torn = random.Random(30), 0, 0
    for attempt in range(60):
        folder = tmp_path / str(attempt)
        killed, in_save = kill_once(folder, dice)
        if not killed:
            continue  # 抢先走完了，不算
        kills, torn = kills + 1, torn + in_save
        assert train_ranks(1, folder, init_from="resume", **EVERY_STEP) == [0]
        assert_same(folder, unharmed, f"第 {kills} 次，{torn} 次死在保存中")
        shutil.rmtree(folder)
        if kills == 30:
            break
    print(f"杀到 {kills} 次，{torn} 次死在保存中，全部逐位相等")
    assert kills == 30 and torn >= 5, f"杀到 {kills} 次，{torn} 次死在保存中"


def torchrun(folder: Path) -> list[str]:
    """像读者那样启动：两个真实的进程，允许重启三次。"""
    options = {**TINY, **EVERY_STEP, "out_dir": folder}
    flags = [f"--{'' if options.pop(name) else 'no-'}{name.replace('_', '-')}"
             for name in ("compile", "fused_loss")]  # fmt: skip
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                "--max-restarts", "3"]  # fmt: skip
    return [sys.executable, *launcher, str(SCRIPT), *flags, *words]


@pytest.mark.fault
@pytest.mark.timeout(600)
def test_torchrun_survives_random_kills_of_a_rank(tmp_path):
    """torchrun --max-restarts：3 次随机杀一个进程，都自己恢复，与没有被杀的 DDP 逐位相等。"""
    assert train_ranks(2, tmp_path / "unharmed", **EVERY_STEP) == [0, 0]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": LOOPBACK}
    dice = random.Random(7)
    for trial in range(3):
        folder, log = tmp_path / str(trial), tmp_path / f"{trial}.log"
        with open(log, "w") as output:
            agent = subprocess.Popen(
                torchrun(folder), env=environment, stdout=output, stderr=output
            )
        wait_to_kill(folder, lambda agent=agent: agent.poll() is None, dice)
        victims = psutil.Process(agent.pid).children()
        if victims:
            dice.choice(victims).kill()
        assert agent.wait(timeout=150) == 0, log.read_text()[-2000:]
        assert_same(folder, tmp_path / "unharmed", f"第 {trial} 次")
