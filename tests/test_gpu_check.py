"""`benchmarks/gpu_check.py` 的断言：没有 GPU 时说出来，量到的一个不丢。"""

import sys

import pandas as pd
import pytest
import torch

from model import GPT, GPTConfig


def test_gpu_check_says_when_there_is_no_gpu(monkeypatch, capsys):
    """没有 GPU：一句话，退出码 2，什么也没有量。"""
    from benchmarks import gpu_check
    from experiments.lab import results as measure

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    with pytest.raises(SystemExit) as left:
        measure.run_main(gpu_check.main, gpu_check.Options)
    message = capsys.readouterr().err.strip()
    assert left.value.code == 2 and "没有可用的 CUDA GPU" in message and "\n" not in message


def test_gpu_check_summary(monkeypatch):
    """日志 → 中位数的速度与 MFU；与 50 % 比较的那句话；超过 100 % 的不给。"""
    from benchmarks import gpu_check

    log = pd.DataFrame({
        "step": [1, 2, 3, 4], "tokens_per_s": [None, 4e5, 5e5, 6e5], "peak_gb": [30, 31, 31, 31],
    })  # fmt: skip
    options = gpu_check.Options(peak_flops=989e12)
    row = gpu_check.summarize(log, options)
    with torch.device("meta"):
        flops = GPT(GPTConfig(**gpu_check.SHAPE)).flops_per_token()
    assert row == {"steps": 4, "tokens_per_s": 5e5, "mfu": round(5e5 * flops / 989e12, 4),
                   "peak_gb": 31.0}  # fmt: skip
    assert "没有达到 50%" in gpu_check.verdict([row, {"error": "x"}])
    assert "达到 50%" in gpu_check.verdict([{"mfu": 0.51}])
    assert gpu_check.summarize(log, gpu_check.Options(peak_flops=1e12))["mfu"] is None
    assert "--peak-flops" in gpu_check.verdict([{"mfu": None}])


@pytest.mark.parametrize(
    ("then", "note"),
    [
        pytest.param("time.sleep(60)", None, marks=pytest.mark.slow),
        ("sys.exit('磁盘满了')", "退出码 1：磁盘满了"),
    ],
)
def test_gpu_check_keeps_what_was_measured(monkeypatch, then, note):
    """到时限被停下、最后出错的训练，已经量到的速度照样算数；一步也没量到才是 error。"""
    from benchmarks import gpu_check

    options = gpu_check.Options(tiny=True)
    for rows, measured in (("1,,1\n2,500,1\n", True), ("1,,1\n", False)):
        text = "step,tokens_per_s,peak_gb\n" + rows
        monkeypatch.setattr(gpu_check, "train_command", lambda *a, text=text: [
            sys.executable, "-c", "import pathlib, sys, time\nprint('第一步 3.5 秒', flush=True)\n"
            f"pathlib.Path({a[-1]!r}, 'log.csv').write_text({text!r})\n{then}",
        ])  # fmt: skip
        row = gpu_check.measure(options, "", False, 3.0)
        assert row["first_step_s"] == 3.5 and row.get("tokens_per_s") == (500 if measured else None)
        if measured:
            assert row.get("note") == note and "error" not in row, row
        else:
            assert (note or "3 秒内没有走完第二步") in row["error"], row


@pytest.mark.slow
def test_gpu_check_runs_its_whole_course_on_a_cpu(tmp_path, capsys, monkeypatch):
    """--tiny：四种配置依次跑，JSON 里有速度与峰值内存；没有编译器时那两行说明原因，不冒充。"""
    import json

    from benchmarks import gpu_check

    monkeypatch.setenv("CXX", "/nowhere/c++")
    out = tmp_path / "r.json"
    gpu_check.main(gpu_check.Options(
        tiny=True, seconds=280, micro_batch=2, accumulation=1, out=str(out)
    ))  # fmt: skip
    result = json.loads(out.read_text())
    assert [(run["data"], run["compiled"]) for run in result["runs"]] == [
        ("novel", True), ("synthetic", True), ("novel", False), ("synthetic", False)
    ]  # fmt: skip
    for run in result["runs"]:
        if run["compiled"]:
            assert "找不到 C++ 编译器" in run["error"], run
        else:
            assert run["tokens_per_s"] > 0 and run["peak_gb"] > 0, run
    assert json.loads(capsys.readouterr().out) == result
