"""续训的断言：无论在哪里停下、由谁接着，结果逐位相等；旧的一轮不会丢。"""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pandas as pd
import pytest
import torch
from tiny_training import TINY, difference, start, state, tensors, trace, train, train_ranks

from experiments import train_gpu
from experiments.lab import hardware
from experiments.loop import checkpoint
from experiments.ranks.launch import SINGLE_NODE, torchrun_command
from experiments.ranks.world import LOOPBACK, Interruption, World
from experiments.training.recipe import learning_rate
from tokens.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "experiments" / "train_gpu.py"


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> Path:
    """两个进程、不间断的 40 步。"""
    folder = tmp_path_factory.mktemp("two")
    assert train_ranks(2, folder) == [0, 0]
    return folder


@pytest.mark.parametrize("legs", [(20,), (7, 19, 33)])
def test_resume_is_bitwise(straight, tmp_path, legs):
    """run(40) = run(20) + resume(20) = 任意次打断：权重、优化器状态、每步的 loss 都逐位相等。"""
    for number, steps in enumerate([*legs, 40]):
        assert train(tmp_path, steps=steps, init_from="resume" if number else "scratch") == 0
    assert difference(state(straight), state(tmp_path)) == 0.0
    pd.testing.assert_frame_equal(trace(straight), trace(tmp_path), check_exact=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{"dtype": "bfloat16"}, {"dtype": "float16"}, {"optimizer": "muon"}]
)
def test_resume_is_bitwise_in_16_bits_and_with_muon(tmp_path, changes):
    """bf16、fp16（连同 scaler）和 Muon 的续训也逐位相等；存下的权重都是 fp32。"""
    assert train(tmp_path / "a", steps=12, **changes) == 0
    assert train(tmp_path / "b", steps=6, **changes) == 0
    assert train(tmp_path / "b", steps=12, init_from="resume", **changes) == 0
    a, b = state(tmp_path / "a"), state(tmp_path / "b")
    assert difference(a, b) == 0.0 and a["scaler"] == b["scaler"]
    assert {t.dtype for t in tensors(a)} == {torch.float32}
    assert all(not name.startswith(checkpoint.WRAPPERS) for name in a["model"])


def interrupt_at(step: int, number: int, monkeypatch) -> None:
    """走完第 `step` 步时给自己发一个信号，像抢占的机器或 Ctrl-C 那样。"""
    original = train_gpu.log_line

    def report(run, *args, **kwargs):
        original(run, *args, **kwargs)
        if run.step == step:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(train_gpu, "log_line", report)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_exits_with_75(straight, tmp_path, monkeypatch, capsys, number):
    """SIGTERM、SIGINT：走完这一步，存盘，退出码 75；接着训练与没有被打断逐位相等，best 也一样。"""
    before = signal.getsignal(number)  # 后台启动的 pytest 里 SIGINT 本来就被忽略
    with monkeypatch.context() as patched:
        interrupt_at(20, number, patched)  # 20 正是该评估的步：来不及评估，留给续训
        assert train(tmp_path) == 75
    assert state(tmp_path)["step"] == 20 and state(tmp_path)["evaluated"] == 10
    assert "SIG" in capsys.readouterr().out
    assert signal.getsignal(number) == before
    assert train(tmp_path, init_from="resume") == 0
    assert difference(state(straight), state(tmp_path)) == 0.0
    assert difference(state(straight, checkpoint.BEST), state(tmp_path, checkpoint.BEST)) == 0.0
    ours, theirs = (pd.read_csv(f / "log.csv")["val_loss"].dropna() for f in (tmp_path, straight))
    assert ours.tolist() == theirs.tolist()


def test_a_signal_during_the_agreement_waits_for_the_next_step(monkeypatch):
    """信号在求和途中到来：这一步谁也不停，下一步一起停；否则一个进程走了，别的永远等它。"""
    world = World(0, 1, torch.device("cpu"))
    interruption = Interruption(world)
    with monkeypatch.context() as patched:

        def late(self, tensor):
            interruption.reason = "SIGTERM"
            return tensor

        patched.setattr(World, "sum", late)
        assert interruption.agreed() == ""
    assert interruption.agreed() == "SIGTERM"


@pytest.mark.slow
def test_a_signal_at_the_very_last_step_leaves_the_evaluation_to_the_resume(tmp_path, monkeypatch):
    """信号正好在最后一步到来：来不及评估，所以不算走完（75）；续训只补上评估，以 0 退出。"""
    with monkeypatch.context() as patched:
        interrupt_at(7, signal.SIGTERM, patched)
        assert train(tmp_path, steps=7) == 75
    assert train(tmp_path, steps=7, init_from="resume") == 0
    log = pd.read_csv(tmp_path / "log.csv").dropna(subset="val_loss")
    assert log["step"].tolist() == [0, 7] and len(trace(tmp_path)) == 7


@pytest.mark.slow
def test_time_limit_stops_like_a_signal(tmp_path):
    """--time-limit 到了也是存好、退出码 75。"""
    assert train(tmp_path, steps=10**6, decay_steps=10**6, time_limit=0.01) == 75
    assert state(tmp_path)["step"] > 0


@pytest.mark.slow
def test_resume_takes_options_from_the_checkpoint(tmp_path, capsys):
    """续训不必重写选项：没有明说的沿用检查点的；结构永远来自检查点，并说出来；峰值学习率不变。"""
    assert train(tmp_path, steps=5, lr=2e-3) == 0
    argv = ["--out-dir", str(tmp_path), "--init-from", "resume", "--steps", "9", "--d-model",
            "999", "--device", "cpu", "--preset", "tiny_cpu"]  # fmt: skip
    assert train_gpu.command_line(argv) == 0
    said = capsys.readouterr().out
    assert "d_model 仍是 32" in said and "tiny_cpu 不起作用" in said and "steps：5 → 9" in said
    saved = state(tmp_path)
    assert saved["step"] == 9 and saved["config"]["lr"] == 2e-3
    wanted = [learning_rate(s, peak=2e-3, warmup=5, total=40) for s in range(9)]
    assert trace(tmp_path)["lr"].tolist() == pytest.approx(wanted, rel=1e-8)


@pytest.mark.slow
def test_explicit_hyperparameters_win_on_resume(tmp_path):
    """明说的超参数在续训时生效：优化器的动量来自检查点，权重衰减来自命令行。"""
    assert train(tmp_path, steps=4) == 0
    argv = ["--out-dir", str(tmp_path), "--init-from", "resume", "--steps", "6",
            "--weight-decay", "0.3", "--device", "cpu"]  # fmt: skip
    assert train_gpu.command_line(argv) == 0
    groups = state(tmp_path)["optimizer"][0]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
    assert state(tmp_path)["optimizer"][0]["state"][0]["step"] == 6


def test_a_checkpoint_of_another_revision_names_the_keys(tmp_path):
    """检查点里有这一版没有的选项：说出是哪些，而不是 TypeError。"""
    assert train(tmp_path, steps=1) == 0
    for part in ("config", "model_config"):
        saved = state(tmp_path)
        saved[part]["dropout"] = 0.1
        checkpoint.save(tmp_path / part, saved)
        with pytest.raises(UserError, match="不认识的选项 dropout"):
            train(tmp_path / part, init_from="resume")


def test_loaded_state_is_dropped(straight, tmp_path, monkeypatch):
    """检查点装好之后就放手：训练途中不再占一份内存。"""
    starts, loop = [], train_gpu.loop
    choose = train_gpu.choose_start
    monkeypatch.setattr(
        train_gpu, "choose_start", lambda *a: starts.append(choose(*a)) or starts[0]
    )

    def looked(run, *args):
        assert run.step == 40 and starts[0].state is None and starts[0].weights is None
        return loop(run, *args)

    monkeypatch.setattr(train_gpu, "loop", looked)
    shutil.copytree(straight, tmp_path, dirs_exist_ok=True)
    assert train(tmp_path, init_from="resume") == 0


@pytest.mark.slow
def test_resume_without_a_checkpoint_starts_and_says_so(tmp_path, capsys):
    """抢占式机器的启动命令可以永远写 --init-from resume：第一次没有检查点，就说明并从头开始。"""
    assert train(tmp_path, steps=2, init_from="resume") == 0
    assert "没有检查点：从头开始" in capsys.readouterr().out


@pytest.mark.slow
def test_scratch_in_a_used_folder_keeps_the_old_run(tmp_path, capsys):
    """从头训练时文件夹里已有的一轮移到 old-1 并说出来，不覆盖。"""
    for _ in range(2):
        assert train(tmp_path, steps=2) == 0
    assert "old-1" in capsys.readouterr().out
    assert difference(state(tmp_path / "old-1"), state(tmp_path)) == 0.0
    assert (tmp_path / "old-1" / "log.csv").exists()


@pytest.mark.slow
def test_a_restart_by_torchrun_resumes_by_itself(straight, tmp_path, monkeypatch, capsys):
    """同一个 torchrun 重启的进程，命令行写着 scratch 也接着走；另一次启动的 scratch 才从头。"""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-1")
    assert train(tmp_path, steps=15) == 0
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert train(tmp_path) == 0
    assert difference(state(straight), state(tmp_path)) == 0.0
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-2")
    assert train(tmp_path, steps=1) == 0
    assert state(tmp_path)["step"] == 1 and "old-1" in capsys.readouterr().out
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert train(tmp_path, steps=2) == 0
    assert not (tmp_path / "old-2").exists()


def test_a_launch_that_died_before_setting_aside_does_not_adopt_the_old_run(tmp_path, monkeypatch):
    """没有 run id 时：移开旧的一轮之前就死了，重启的进程从头开始；移开之后的重启才接着走。"""
    assert train(tmp_path, steps=3) == 0  # 上一轮
    checkpoint.prepare(tmp_path)  # 新的启动，还没有移开就死了
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert train(tmp_path, steps=1) == 0
    assert state(tmp_path)["step"] == 1 and state(tmp_path / "old-1")["step"] == 3
    assert train(tmp_path, steps=2) == 0
    assert trace(tmp_path)["step"].tolist() == [1, 2] and not (tmp_path / "old-2").exists()


@pytest.mark.slow
def test_broken_last_falls_back_and_recovers(straight, tmp_path, capsys):
    """last 坏了：说出来，从 previous 重走那一段，最后仍与没坏过逐位相等。"""
    assert train(tmp_path, steps=25) == 0
    data = (tmp_path / "last.pt").read_bytes()
    (tmp_path / "last.pt").unlink()
    (tmp_path / "last.pt").write_bytes(data[:-1000])
    assert train(tmp_path, init_from="resume") == 0
    said = capsys.readouterr().out
    assert "损坏" in said and "的第 20 步继续" in said
    assert difference(state(straight), state(tmp_path)) == 0.0
    assert (tmp_path / "broken-last.pt").exists()


@pytest.mark.slow
def test_start_from_our_own_weights(straight, tmp_path):
    """--init-from 检查点.pt 只取权重：步数从 0 开始，结构来自检查点，不合理的预设结构不碍事。"""
    path = str(straight / "best.pt")
    assert train(tmp_path, steps=1, init_from=path, d_model=63, seq_len=1024) == 0
    log = pd.read_csv(tmp_path / "log.csv")
    assert log["step"].tolist()[0] == 0 and state(tmp_path)["config"]["d_model"] == 32
    best = state(straight, checkpoint.BEST)["best_loss"]
    assert log["val_loss"].dropna().tolist()[0] == pytest.approx(best, abs=1e-6)


@pytest.mark.slow
def test_ddp_resume_is_bitwise(two_ranks, tmp_path):
    """两个进程：run(40) = run(20) + resume(20)，逐位；每个进程恢复自己的随机数，不是 0 号的。"""
    assert train_ranks(2, tmp_path, steps=20) == [0, 0]
    assert train_ranks(2, tmp_path, init_from="resume") == [0, 0]
    ours, theirs = state(tmp_path), state(two_ranks)
    assert difference(ours, theirs) == 0.0
    assert not torch.equal(ours["rng"][0]["cpu"], ours["rng"][1]["cpu"])
    for mine, wanted in zip(ours["rng"], theirs["rng"], strict=True):
        assert torch.equal(mine["cpu"], wanted["cpu"])


@pytest.mark.slow
def test_ddp_and_single_checkpoints_are_interchangeable(straight, two_ranks, tmp_path):
    """2 个进程与 1 个进程走同样的全局 batch；中途换进程数，两个方向，权重都差 < 1e-5。"""
    close = difference_of_weights(straight, two_ranks)
    assert train_ranks(2, tmp_path / "a", steps=20) == [0, 0]
    assert train(tmp_path / "a", init_from="resume") == 0
    assert train(tmp_path / "b", steps=20) == 0
    assert train_ranks(2, tmp_path / "b", init_from="resume") == [0, 0]
    down, up = (difference_of_weights(straight, tmp_path / name) for name in "ab")
    assert max(close, down, up) < 1e-5, f"2 对 1：{close:.1e}，2→1：{down:.1e}，1→2：{up:.1e}"


def difference_of_weights(a: Path, b: Path) -> float:
    left, right = state(a)["model"], state(b)["model"]
    return max((left[name] - right[name]).abs().max().item() for name in left)


def wait_for_rows(folder: Path, count: int, alive) -> None:
    """等到日志有 `count` 行：训练已经在走。"""
    while not (folder / "log.csv").exists() or len(trace(folder)) < count:
        time.sleep(0.05)
        assert alive(), "还没走几步就结束了"


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_after_the_same_step(tmp_path):
    """SIGTERM 只到了 1 号进程：两个进程停在同一步，都以 75 退出，检查点是好的。"""
    processes = start(2, tmp_path, steps=10**6, decay_steps=10**6, eval_interval=10**6)
    wait_for_rows(tmp_path, 3, lambda: all(p.exitcode is None for p in processes))
    os.kill(processes[1].pid, signal.SIGTERM)
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [75, 75]
    assert state(tmp_path)["step"] == trace(tmp_path)["step"].max()


@pytest.mark.slow
def test_compiled_resume_is_bitwise_and_interchangeable(straight, tmp_path):
    """编译后（确定性算法打开）续训逐位相等；编译与 eager 的检查点互通，权重差 < 1e-4。"""
    if not hardware.compile_support()[0]:
        pytest.skip(hardware.compile_support()[1])
    torch._dynamo.reset()
    assert train(tmp_path / "a", compile=True) == 0
    assert train(tmp_path / "b", compile=True, steps=20) == 0
    assert train(tmp_path / "b", compile=True, init_from="resume") == 0
    assert difference(state(tmp_path / "a"), state(tmp_path / "b")) == 0.0
    assert list(state(tmp_path / "a")["model"]) == list(state(straight)["model"])
    assert train(tmp_path / "c", steps=20) == 0
    assert train(tmp_path / "c", compile=True, init_from="resume") == 0
    assert train(tmp_path / "d", compile=True, steps=20) == 0
    assert train(tmp_path / "d", compile=False, init_from="resume") == 0
    gaps = {name: difference_of_weights(straight, tmp_path / name) for name in "acd"}
    assert max(gaps.values()) < 1e-4, gaps


def tiny_words(folder: Path, **changes) -> list[str]:
    options = {**TINY, "out_dir": folder, **changes}
    flags = [f"--{'' if options.pop(name) else 'no-'}{name.replace('_', '-')}"
             for name in ("compile", "fused_loss")]  # fmt: skip
    return flags + [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]


@pytest.mark.slow
def test_torchrun_recovers_by_itself_when_a_rank_is_killed(two_ranks, tmp_path):
    """torchrun --max-restarts：一个进程被 SIGKILL，它自己重启并续训，最后与没有被杀逐位相等。"""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": LOOPBACK, "OMP_NUM_THREADS": "1"}
    marker = tmp_path / "killed"
    suicide = (
        "import os, runpy, signal, sys\n"
        "from pathlib import Path\n"
        "from experiments import train_gpu\n"
        "report = train_gpu.log_line\n"
        "def patched(run, *args, **kwargs):\n"
        "    report(run, *args, **kwargs)\n"
        f"    marker = Path({str(marker)!r})\n"
        "    if run.world.rank == 1 and run.step == 27 and not marker.exists():\n"
        "        marker.touch()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "train_gpu.log_line = patched\n"
        "sys.exit(train_gpu.command_line())\n"
    )
    (tmp_path / "script.py").write_text(suicide)
    command = torchrun_command(str(SCRIPT), *tiny_words(tmp_path / "run"), nproc=2,
                               flags=(*SINGLE_NODE, "--max-restarts", "3"))  # fmt: skip
    command[command.index(str(SCRIPT))] = str(tmp_path / "script.py")
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert marker.exists() and "的第 20 步继续" in done.stdout
    assert done.stdout.count("个进程。") == 2, "重启了不止一次：旧的地址还留在 store 里"
    assert difference(state(two_ranks), state(tmp_path / "run")) == 0.0


@pytest.mark.slow
def test_sigterm_to_torchrun_saves_on_every_rank(tmp_path):
    """停机时 SIGTERM 发给 torchrun：它转给每个进程，大家停在同一步、存好；torchrun 自己返回 1。"""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": LOOPBACK, "OMP_NUM_THREADS": "1"}
    words = tiny_words(tmp_path, steps=10**6, decay_steps=10**6, eval_interval=10**6)
    agent = subprocess.Popen(
        torchrun_command(str(SCRIPT), *words, nproc=2), env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    wait_for_rows(tmp_path, 3, lambda: agent.poll() is None)
    agent.send_signal(signal.SIGTERM)
    output = agent.communicate(timeout=60)[0]
    assert "SIGTERM：停在第" in output and agent.returncode != 0, output[-2000:]
    assert state(tmp_path)["step"] == trace(tmp_path)["step"].max()
