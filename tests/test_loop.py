"""`experiments/loop` 的断言：一个文件夹一个训练，每次启动有自己的结局，坏的情形当时说清楚。"""

import errno
import json

import filelock
import pytest
import torch
from tiny_training import state, tiny, train

from experiments import train_gpu
from experiments.lab import hardware
from experiments.loop import checkpoint, status
from experiments.loop.log import RunLog
from experiments.ranks.world import Interruption, World
from tokens.errors import UserError
from tokens.files import describe_write_error

ONE = World(0, 1, torch.device("cpu"))


def ending(folder) -> dict:
    return json.loads((folder / status.STATUS).read_text(encoding="utf-8"))


# ---- 一个文件夹，一个训练 ----


def test_two_runs_in_one_folder_are_refused(tmp_path):
    """别的训练正在用这个文件夹：一句话拒绝，正在用的那份一个字也不动（seml #177）。"""
    assert train(tmp_path, steps=1) == 0
    before = (tmp_path / "last.pt").read_bytes()
    with filelock.FileLock(tmp_path / status.LOCK):
        with pytest.raises(UserError, match="另一个训练正在用"):
            train(tmp_path, steps=2)
    assert (tmp_path / "last.pt").read_bytes() == before and not (tmp_path / "old-1").exists()
    assert train(tmp_path, steps=2) == 0, "锁放开之后应当能训练"


def test_a_finished_run_is_not_continued_by_a_new_launch(tmp_path, monkeypatch):
    """同一个 --rdzv-id 再启动一次，上一次已经走完：从头训练，不是「继续」一句就算完成。"""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert train(tmp_path, steps=2) == 0
    first = state(tmp_path)["model"]["embed.weight"]
    assert train(tmp_path, steps=2, lr=1e-2) == 0
    assert (tmp_path / "old-1").exists(), "旧的一轮应当移开"
    assert not torch.equal(first, state(tmp_path)["model"]["embed.weight"]), "什么也没有训练"


# ---- 结局 ----


def test_every_end_is_written_down(tmp_path, monkeypatch):
    """走完、发散、被拒绝各有自己的 status.json：torchrun 的退出码分不清它们。"""
    assert train(tmp_path, steps=2) == 0
    assert (ending(tmp_path)["state"], ending(tmp_path)["step"]) == ("finished", 2)
    with pytest.raises(UserError):
        train(tmp_path, steps=1, init_from=str(tmp_path / "nothing.pt"))
    assert ending(tmp_path)["state"] == "refused" and "nothing.pt" in ending(tmp_path)["reason"]

    def diverged(*_):
        raise train_gpu.Diverged("第 1 步的 loss 是 nan")

    monkeypatch.setattr(train_gpu, "train_step", diverged)
    assert train(tmp_path, steps=2) == 3
    assert (ending(tmp_path)["state"], ending(tmp_path)["code"]) == ("diverged", 3)


@pytest.mark.parametrize(("end", "code"), [("diverged", 3), ("refused", 2)])
def test_a_restart_of_a_hopeless_run_gives_up_at_once(tmp_path, monkeypatch, capsys, end, code):
    """同一次启动里已经发散或被拒绝：重启的进程立即以同样的退出码结束；新的启动照常训练。"""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-1")
    status.write_status(tmp_path, state=end, code=code, started=0.0)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert train(tmp_path, steps=1) == code
    assert "不再训练" in capsys.readouterr().err and not (tmp_path / "last.pt").exists()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-2")
    assert train(tmp_path, steps=1) == 0


def test_the_time_limit_counts_over_restarts(tmp_path, monkeypatch):
    """重启不重新计时：这次启动已经用掉的秒数从时限里扣掉；新的启动从 0 算。"""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-1")
    spent, _ = status.begin(tmp_path, ONE)
    assert spent < 1
    old = status.read_status(tmp_path)
    status.write_status(tmp_path, **{**old, "started": old["started"] - 90})
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    spent, _ = status.begin(tmp_path, ONE)
    assert 90 <= spent < 100, f"{spent} 秒"
    assert Interruption(ONE, 1.0, spent=spent).agreed() == "时限已到"
    assert Interruption(ONE, 2.0, spent=spent).agreed() == ""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-2")
    assert status.begin(tmp_path, ONE)[0] < 1


# ---- 说出来，或者拒绝 ----


def test_schedules_left_behind_by_steps_are_said(tmp_path, capsys):
    """只改 --steps：预热走不完，或者降不到底，都说一句（Megatron-Bridge #2857）。"""
    assert train(tmp_path, steps=2, warmup_steps=5) == 0
    assert "预热却要 5 步" in capsys.readouterr().out
    assert train(tmp_path, steps=6, warmup_steps=5, decay_steps=40) == 0
    assert "要到第 40 步才降到最低" in capsys.readouterr().out
    assert train(tmp_path, steps=6, warmup_steps=5, decay_steps=6) == 0
    assert "才降到最低" not in capsys.readouterr().out


def test_the_novel_is_not_read_a_hundred_times_by_accident(tmp_path, tiny_tokens, capsys):
    """没有给 --data 而要读上百遍：训练之前拒绝，说出遍数；给了就照做，超过 4 遍说一声。"""
    with pytest.raises(UserError, match="遍.*--data"):
        train(tmp_path, data="", vocab_size=8192, steps=100_000)
    assert not (tmp_path / "last.pt").exists()
    assert train(tmp_path, data=str(tiny_tokens), steps=40) == 0  # 40 × 512 ÷ 4096 = 5 遍
    assert "读 5.0 遍" in capsys.readouterr().out


def test_a_split_without_targets_is_refused(tmp_path):
    """一份数据的目标全被忽略：拒绝，而不是印 val_loss 0.0000（nanochat #610）。"""
    data = tmp_path / "tokens.pt"
    ids = torch.randint(256, (2000,), dtype=torch.int32)
    torch.save({"train": ids, "val": torch.full((500,), 7, dtype=torch.int32),
                "meta": {"vocab_size": 256}}, data)  # fmt: skip
    with pytest.raises(UserError, match="val 的评估里没有一个有效的目标"):
        train(tmp_path / "run", data=str(data), ignore_token=7, steps=2)


def test_weights_of_another_tokenizer_are_named(tmp_path, capsys):
    """词表一样大、分词器不同：检查点记得它的哈希，说出来（litgpt #471）；相同就不说。"""
    files = {}
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        ids = torch.randint(256, (2000,), dtype=torch.int32)
        meta = {"vocab_size": 256, "tokenizer_sha256": name * 64}
        files[name] = folder / "tokens.pt"
        torch.save({"train": ids, "val": ids[:500], "meta": meta}, files[name])
    assert train(tmp_path / "run", data=str(files["a"]), steps=1) == 0
    source = str(tmp_path / "run" / "last.pt")
    for name, said in (("a", False), ("b", True)):
        capsys.readouterr()
        assert train(tmp_path / f"to-{name}", data=str(files[name]), steps=1, init_from=source) == 0
        assert ("另一个分词器训练的" in capsys.readouterr().err) is said, name


def test_tilde_and_bom_are_understood(tmp_path, monkeypatch):
    """~ 展开成主目录（lightning #19058）；带 BOM 的 TOML 照样读（lm-proxy #79）。"""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "c.toml").write_bytes("﻿steps = 7\n".encode())
    words = ["--config=~/c.toml", "--out-dir=~/run", "--data", "~/d"]
    options, given = train_gpu.parse(train_gpu.Options, words, presets=train_gpu.PRESETS,
                                     description="", paths=train_gpu.PATHS)  # fmt: skip
    assert options.steps == 7 and options.out_dir == str(tmp_path / "run")
    assert options.data == str(tmp_path / "d") and "steps" in given


# ---- 写不下 ----


def test_a_full_disk_is_named_as_such():
    """torch.save 写到一半满了的几种说法，都说成「磁盘已满」。"""
    full = "磁盘已满"
    torn = RuntimeError("[enforce fail at inline_container.cc] . unexpected pos 2488960 vs 2488852")
    for error in (torn, OSError(errno.ENOSPC, "No space left on device")):
        assert full in (describe_write_error(error, checkpoint.Path("x")) or ""), error
    assert describe_write_error(RuntimeError("别的"), checkpoint.Path("x")) is None


def test_a_log_that_cannot_be_written_does_not_end_the_training(tmp_path, capsys):
    """log.csv 写不下：说一次，训练继续；关文件也不出错。"""
    log = RunLog(tmp_path)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    log.writer.writerow = full
    log.write(step=1, loss=1.0)
    log.write(step=2, loss=1.0)
    log.close()
    assert capsys.readouterr().err.count("磁盘已满") == 1


def test_best_loss_is_lowered_only_when_best_was_written(tmp_path, monkeypatch):
    """最好的一份没有存成，就还不是「最好的」：下一次仍要存它。"""
    original, refused = checkpoint.save, []

    def save(folder, snapshot, *, best=False, **how):
        if best and not refused and snapshot["step"]:
            refused.append(snapshot["step"])
            raise UserError("磁盘已满")
        return original(folder, snapshot, best=best, **how)

    losses = {0: 5.0, 10: 3.0, 20: 4.0}
    monkeypatch.setattr(train_gpu, "evaluate", lambda run: {"val_loss": losses[run.step]})
    monkeypatch.setattr(checkpoint, "save", save)
    assert train(tmp_path, steps=20, eval_interval=10) == 0
    assert refused == [10]
    best = state(tmp_path, checkpoint.BEST)
    assert (best["step"], best["best_loss"]) == (20, 4.0), "第 10 步没有存成，第 20 步该存"


# ---- 这台机器 ----


def test_a_cache_folder_with_a_space_is_not_compiled_into(monkeypatch):
    """TMPDIR 里有空格：编译之前就说不能编译，用 eager（pytorch #191010）。"""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(hardware.tempfile, "gettempdir", lambda: "/tmp/my folder")
    able, reason = hardware.compile_support()
    assert not able and "my folder" in reason and "TORCHINDUCTOR_CACHE_DIR" in reason
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/plain")
    assert hardware.cache_problem() is None


def test_a_busy_machine_is_named(monkeypatch):
    """核已经不够分时提醒一句；闲着就不说。"""
    monkeypatch.setattr(hardware.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(hardware.os, "getloadavg", lambda: (9.0, 9.0, 9.0))
    assert "OMP_NUM_THREADS=1" in hardware.busy_note()
    monkeypatch.setattr(hardware.os, "getloadavg", lambda: (0.5, 0.5, 0.5))
    assert hardware.busy_note() == ""


@pytest.mark.parametrize("encoding", ["gbk", "latin-1", "ascii"])
def test_narrow_output_does_not_kill_a_script(run_script, encoding):
    """标准输出装不下某些字时印成「?」，脚本照常结束（LLaMA-Factory #3311）。"""
    done = run_script("experiments/train_gpu.py", "--help",
                      env={"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"})  # fmt: skip
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr[-500:]


def test_tiny_is_what_the_other_tests_use(tmp_path):
    """极小的配置通过全部检查：这里的测试拒绝的都是别的原因。"""
    train_gpu.check(tiny(tmp_path), 1)
