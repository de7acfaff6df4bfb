"""出事时的断言：发散、溢出、磁盘满、坏文件、端口被占：一句话说清楚，什么也不丢。"""

import socket

import pytest
import torch
from tiny_training import TINY, difference, state, tensors, train

from experiments import train_gpu
from experiments.lab import hardware
from experiments.loop import checkpoint
from experiments.loop.batches import generator_for


def poison(step: int, monkeypatch, what: str) -> None:
    """第 `step` 步之前把一个权重变成 NaN，或者让梯度变成 NaN 而 loss 不变。"""
    original = train_gpu.train_step

    def train_step(run, *args):
        weight = run.raw.blocks[0].mlp.up.weight
        if run.step == step and what == "weight":
            weight.data[0, 0] = float("nan")
        if run.step == step and what == "gradient":
            weight.register_hook(lambda grad: grad * float("nan"))
        return original(run, *args)

    monkeypatch.setattr(train_gpu, "train_step", train_step)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["weight", "gradient"])
@pytest.mark.parametrize("interval", [1, 50])
def test_divergence_stops_and_saves_nothing_ruined(tmp_path, monkeypatch, capsys, what, interval):
    """loss 或梯度变成 NaN：退出码 3，说出步数、数据位置、最后的好检查点；毁掉的权重没有存下。"""
    poison(19, monkeypatch, what)
    assert train(tmp_path, log_interval=interval) == 3
    message = capsys.readouterr().err
    for needed in ("第 19 步", "nan", "第 304–319 个序列", "last.pt（第 10 步）"):
        assert needed in message, message
    saved = state(tmp_path)
    assert saved["step"] == 10 and all(t.isfinite().all() for t in tensors(saved))


def test_endless_fp16_overflow_stops(tmp_path, monkeypatch, capsys):
    """fp16 的梯度步步溢出：比例减到 1e-3 以下就停，退出码 3，而不是白走到底。"""
    original = train_gpu.train_step

    def train_step(run, *args):
        hook = run.raw.norm.weight.register_hook(lambda grad: grad * float("inf"))
        result = original(run, *args)
        hook.remove()
        return result

    monkeypatch.setattr(train_gpu, "train_step", train_step)
    assert train(tmp_path, dtype="float16", log_interval=10) == 3
    message = capsys.readouterr().err
    assert "到第 30 步" in message and "每步溢出" in message, message


@pytest.mark.slow
def test_full_disk_during_a_run(straight, tmp_path, monkeypatch, capsys):
    """训练途中存不下：大声说，旧的仍好，训练继续，下次再存；最后一次也存不下才以 2 退出。"""
    original = checkpoint.torch.save
    full = {20}

    def save(content, file):
        if content["step"] in full:
            raise OSError(28, "No space left on device")
        original(content, file)

    monkeypatch.setattr(checkpoint.torch, "save", save)
    assert train(tmp_path / "once") == 0
    assert "第 20 步没有存成" in capsys.readouterr().err
    assert difference(state(straight), state(tmp_path / "once")) == 0.0
    full |= {30, 40}
    assert train(tmp_path / "always") == 2
    assert "最后存下的是第 10 步" in capsys.readouterr().err
    assert state(tmp_path / "always")["step"] == 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "needed"),
    [("vocabulary", "词表只有 100"), ("truncated", "损坏"), ("short", "不够一个窗口"),
     ("other data", "数据与检查点训练时的不同"), ("other optimizer", "不能换成 muon"),
     ("foreign checkpoint", "不是 train_gpu"), ("unwritable", "不能在")],
)  # fmt: skip
def test_bad_files_lose_nothing(tmp_path, capsys, damage, needed):
    """词表不符、数据截断、换了数据、别家的检查点、不能写的文件夹：一句话，退出码 2，旧的还在。"""
    data, run = tmp_path / "data", tmp_path / "run"
    data.mkdir()
    tokens = torch.randint(200, (3000,), generator=generator_for(0, "x"), dtype=torch.int32)
    meta = {"vocab_size": 256, "ids_sha256": "abc"}
    torch.save({"train": tokens, "val": tokens[:500], "meta": meta}, data / "tokens.pt")
    assert train(run, steps=3, data=str(data / "tokens.pt")) == 0
    changes: dict = {"data": str(data / "tokens.pt"), "init_from": "resume", "steps": 5}
    if damage == "vocabulary":
        changes |= {"vocab_size": 100, "init_from": "scratch"}
    elif damage == "truncated":
        content = (data / "tokens.pt").read_bytes()
        (data / "tokens.pt").write_bytes(content[: len(content) // 2])
    elif damage == "short":
        changes |= {"seq_len": 512, "micro_batch": 1, "init_from": "scratch"}
    elif damage == "other data":
        changes |= {"data": "synthetic"}
    elif damage == "other optimizer":
        changes |= {"optimizer": "muon"}
    elif damage == "foreign checkpoint":
        torch.save({"weights": 1}, tmp_path / "x.pt")
        changes |= {"init_from": str(tmp_path / "x.pt"), "out_dir": str(tmp_path / "new")}
    elif damage == "unwritable":
        changes |= {"out_dir": "/proc/nowhere/run"}
    words = [f"--{k.replace('_', '-')}={v}" for k, v in {**TINY, "out_dir": run, **changes}.items()
             if k not in ("compile", "fused_loss")]  # fmt: skip
    assert train_gpu.command_line([*words, "--no-compile", "--fused-loss"]) == 2
    message = capsys.readouterr().err.strip()
    assert needed in message and "\n" not in message, message
    assert state(run)["step"] == 3 and not list(run.glob("old-*"))


def test_port_in_use_is_one_sentence(tmp_path, monkeypatch, capsys):
    """端口被占：一句话，说出地址，退出码 2。"""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"),
                            ("MASTER_PORT", str(taken.getsockname()[1]))):  # fmt: skip
            monkeypatch.setenv(name, value)
        argv = ["--preset", "tiny_cpu", "--out-dir", str(tmp_path), "--device", "cpu"]
        assert train_gpu.command_line(argv) == 2
    message = capsys.readouterr().err.strip()
    assert "端口" in message and message.splitlines()[-1].startswith("错误："), message


@pytest.mark.slow
def test_no_compiler_falls_back_to_eager_and_says_why(tmp_path, monkeypatch, capsys):
    """没有编译器：用 eager，并说原因。"""
    monkeypatch.setattr(hardware, "compile_support", lambda *_: (False, "找不到 C++ 编译器"))
    assert train(tmp_path, steps=1, compile=True) == 0
    said = capsys.readouterr().out
    assert "不编译，用 eager：找不到 C++ 编译器" in said and "eager，1 个进程" in said


def test_compile_support_looks_at_the_device(monkeypatch):
    """GPU 上要的是 Triton 和 Volta 以后的卡；CPU 上 CXX 不能带参数（PyTorch 不认），说明白。"""
    for capability, wanted in (((6, 1), False), ((8, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda c=capability: c)
        monkeypatch.setattr(hardware, "find_spec", lambda _: True)
        assert hardware.compile_support("cuda")[0] is wanted
    monkeypatch.setattr(hardware, "find_spec", lambda _: None)
    assert "Triton" in hardware.compile_support("cuda")[1]
    monkeypatch.setenv("CXX", "ccache g++")
    works, reason = hardware.compile_support()
    assert not works and "CXX=ccache g++" in reason, reason


def test_a_compiler_that_cannot_find_python_h_is_no_compiler(monkeypatch):
    """有编译器却没有 Python.h（没装 python3-dev）：不编译，并说出编译器的那句错误。"""
    if not hardware.compile_support()[0]:
        pytest.skip(hardware.compile_support()[1])
    hardware.compiler_problem.cache_clear()
    monkeypatch.setattr(hardware.sysconfig, "get_path", lambda name: "/nowhere")
    works, reason = hardware.compile_support()
    hardware.compiler_problem.cache_clear()
    assert not works and "Python.h" in reason, reason
