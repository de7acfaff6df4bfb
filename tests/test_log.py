"""`experiments/loop/log.py` 的断言：MFU 怎么算，什么时候宁可不说，日志留下什么。"""

from types import SimpleNamespace

import pytest
import torch
from tiny_training import train

from experiments import train_gpu
from experiments.lab import hardware
from experiments.loop.log import Meter, RunLog


def metered(tokens_per_s: float, **changes) -> tuple[dict, Meter]:
    settings = {"flops_per_token": 10**9, "tokens_per_step": 1000, "cards": 1, "peak_flops": 1e12}
    meter = Meter(device=torch.device("cpu"), **settings | changes)
    meter.steps, meter.seconds = 10, 10 * 1000 / tokens_per_s
    return meter.read(), meter


def test_mfu_formula():
    """MFU = FLOPs/token × token/s ÷（峰值 × 卡数）：nanoGPT 的 100 个序列 0.755 秒是 37.14 %。"""
    row, _ = metered(
        100 * 1024 / 0.755, flops_per_token=875_062_886_400 / 1024, peak_flops=312e12
    )
    assert row["mfu"] == pytest.approx(0.3714, abs=1e-4)
    assert metered(400.0, cards=2)[0]["mfu"] == pytest.approx(0.2)


def test_mfu_is_a_running_average():
    """显示 0.9·旧 + 0.1·新。"""
    _, meter = metered(500.0)
    meter.steps, meter.seconds = 1, 1.0  # 1000 token/s → 100 %
    assert meter.read()["mfu"] == pytest.approx(0.9 * 0.5 + 0.1 * 1.0)


def test_first_step_is_not_the_start_of_the_average():
    """含编译的第一步整个丢掉：之后显示的 MFU 与没有它时相同，而不是从它慢慢爬上来。"""
    settings = {"flops_per_token": 10**9, "tokens_per_step": 1000, "cards": 1}
    meter = Meter(device=torch.device("cpu"), **settings, peak_flops=1e12)
    log = Spoken()
    run = SimpleNamespace(world=log, step=1, options=SimpleNamespace(log_interval=50))
    meter.steps, meter.seconds = 1, 100.0
    train_gpu.log_line(run, None, meter, 5.0, 1.0, 1e-3, first=True)
    assert meter.mfu is None and "第一步 100.0 秒" in log.said[0]
    meter.steps, meter.seconds = 10, 20.0
    assert meter.read()["mfu"] == pytest.approx(0.5), meter.mfu


class Spoken:
    """只记下说了什么的 World。"""

    def __init__(self) -> None:
        self.said, self.device, self.master = [], torch.device("cpu"), True

    def say(self, message: str, *, error: bool = False) -> None:
        self.said.append(message)


def test_mfu_is_refused_rather_than_wrong():
    """不认识的设备没有 MFU；算出 104 % 时拒绝显示并说峰值错了，以后也不再显示。"""
    row, meter = metered(500.0, peak_flops=0.0)
    assert "mfu" not in row and "--peak-flops" in meter.refusal
    row, meter = metered(1040.0)
    assert "mfu" not in row and "104%" in meter.refusal
    meter.steps, meter.seconds = 1, 10.0
    assert "mfu" not in meter.read()


def test_log_keeps_every_digit_of_the_token_count(tmp_path):
    """10 亿以上的 token 数一位不差；小数仍是 9 位有效数字。"""
    log = RunLog(tmp_path)
    log.write(step=1, tokens=123_456_789_012, loss=1 / 3)
    log.close()
    line = (tmp_path / "log.csv").read_text().splitlines()[1]
    assert line.startswith("1,123456789012,0.333333333,"), line


def test_matmul_peak_measures_at_least_once():
    """给它 0 秒也量一次：峰值 0 会让后面的除法出错。"""
    assert hardware.matmul_peak(size=64, seconds=0.0) > 0


@pytest.mark.slow
def test_tensorboard_is_optional_and_written(tmp_path):
    """--tensorboard 另写一份同样的数。"""
    pytest.importorskip("tensorboard")
    assert train(tmp_path, steps=2, tensorboard=True) == 0
    assert list((tmp_path / "tensorboard").glob("events*"))
