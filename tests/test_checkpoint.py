"""检查点文件的断言：任何时刻被杀、写满、损坏，都还有一份好的。"""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch

from experiments.loop import checkpoint
from experiments.loop.checkpoint import BEST, LAST, PREVIOUS, BrokenCheckpoint
from tokens.errors import UserError


def content(step: int, size: int = 300) -> dict:
    """一份小的内容：张量（含 0 维和空的）与普通值，每一步都不同。"""
    generator = torch.Generator().manual_seed(step)
    return {
        "model": {"a": torch.randn(size, generator=generator), "b": torch.tensor(float(step))},
        "optimizer": [{"state": {0: {"step": torch.tensor(3.0)}}, "betas": (0.9, 0.95)}],
        "empty": torch.empty(0, dtype=torch.int16),
        "rng": [checkpoint.rng_state(torch.device("cpu"))],
        "step": step,
        "best_loss": float("inf"),
        "none": None,
    }


def step_of(folder: Path, name: str = LAST) -> int:
    return checkpoint.read(folder / name)["step"]


def test_round_trip_is_exact(tmp_path):
    """存下再读出，每个张量、每个普通值、每层容器的类型都不变；plain torch.load 也读得出来。"""
    saved = content(1)
    checkpoint.save(tmp_path, saved)
    loaded = checkpoint.read(tmp_path / LAST)
    assert checkpoint.digest(loaded) == checkpoint.digest({"format": 1, **saved})
    assert torch.equal(loaded["model"]["a"], saved["model"]["a"])
    assert loaded["optimizer"][0]["betas"] == (0.9, 0.95)
    assert torch.load(tmp_path / LAST, weights_only=True)["step"] == 1


def test_three_files(tmp_path):
    """last 是最新的，previous 是它的前一份，best 只在说好的时候换；没有别的文件留下。"""
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, content(step), best=step == 2)
    assert [step_of(tmp_path, name) for name in (LAST, PREVIOUS, BEST)] == [3, 2, 2]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted((LAST, PREVIOUS, BEST))


def test_works_without_hard_links(tmp_path, monkeypatch):
    """文件系统没有硬链接时改为复制，三份照样都在。"""

    def refuse(*_):
        raise PermissionError("no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    for step in (1, 2):
        checkpoint.save(tmp_path, content(step), best=True)
    assert [step_of(tmp_path, name) for name in (LAST, PREVIOUS, BEST)] == [2, 1, 2]


@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_truncated_file_falls_back_aloud(tmp_path, part):
    """last 被截断（掉电、写了一半）：说出来，用 previous；坏的移开，不会再覆盖好的那份。"""
    for step in (1, 2):
        checkpoint.save(tmp_path, content(step))
    data = (tmp_path / LAST).read_bytes()
    (tmp_path / LAST).unlink()  # previous 是另一个文件，不受影响
    (tmp_path / LAST).write_bytes(data[: int(len(data) * part)])
    said = []
    assert checkpoint.newest(tmp_path, said.append) == tmp_path / PREVIOUS
    assert "损坏" in said[0] and LAST in said[0] and PREVIOUS in said[1], said
    checkpoint.save(tmp_path, content(3))
    assert (step_of(tmp_path), step_of(tmp_path, PREVIOUS)) == (3, 1)


def test_every_flipped_bit_in_the_tensors_is_found(tmp_path):
    """文件里翻转一个比特：要么读不出来，要么摘要不符，要么翻在 zip 的填充里、内容一字不差。

    torch.load 自己不检查 zip 的 CRC：没有摘要，张量里的翻转会悄悄进入模型。
    """
    checkpoint.save(tmp_path, content(1, size=40))
    good = (tmp_path / LAST).read_bytes()
    expected = checkpoint.digest(checkpoint.read(tmp_path / LAST))
    found = harmless = silent = 0
    path = tmp_path / "flipped.pt"
    for position in range(7, len(good), 83):
        bad = bytearray(good)
        bad[position] ^= 1 << (position % 8)
        path.write_bytes(bad)
        try:
            loaded = checkpoint.read(path)
        except (BrokenCheckpoint, UserError):
            found += 1
        else:
            harmless += 1
            silent += checkpoint.digest(loaded) != expected
    assert silent == 0 and found > 15, f"发现 {found}，无害 {harmless}，漏掉 {silent}"


def test_a_flip_that_torch_load_accepts_is_refused(tmp_path):
    """改动一个权重的一个字节，torch.load 照样读出（错的）值，我们拒绝。"""
    checkpoint.save(tmp_path, content(1))
    value = checkpoint.read(tmp_path / LAST)["model"]["a"]
    data = bytearray((tmp_path / LAST).read_bytes())
    where = data.index(value.numpy().tobytes()[:64])
    data[where] ^= 1
    (tmp_path / LAST).write_bytes(data)
    accepted = torch.load(tmp_path / LAST, weights_only=True)["model"]["a"]
    assert not torch.equal(accepted, value)
    with pytest.raises(BrokenCheckpoint, match="摘要"):
        checkpoint.read(tmp_path / LAST)


def test_all_broken_is_an_error_not_a_fresh_start(tmp_path):
    """两份都坏时报错并提到 best，而不是悄悄从头训练。"""
    for step in (1, 2):
        checkpoint.save(tmp_path, content(step))
    for name in (LAST, PREVIOUS):
        (tmp_path / name).unlink()
        (tmp_path / name).write_bytes(b"not a checkpoint")
    with pytest.raises(UserError, match="best.pt"):
        checkpoint.newest(tmp_path, lambda _: None)
    assert (tmp_path / LAST).exists()


def test_empty_folder_has_no_checkpoint(tmp_path):
    """没有检查点就是 None。"""
    assert checkpoint.newest(tmp_path) is None


def test_another_version_is_named(tmp_path, monkeypatch):
    """别的版本存下的检查点：说出两个版本，不退回旧的一份，也不当作损坏。"""
    checkpoint.save(tmp_path, content(1))
    monkeypatch.setattr(checkpoint, "FORMAT", 2)
    checkpoint.save(tmp_path, content(2))
    monkeypatch.setattr(checkpoint, "FORMAT", 1)
    with pytest.raises(UserError, match="版本是 2.*只认得 1"):
        checkpoint.newest(tmp_path, lambda _: None)


def test_foreign_file_is_named(tmp_path):
    """别的程序存下的 .pt：说不是我们的检查点。"""
    torch.save({"model": {}}, tmp_path / LAST)
    with pytest.raises(BrokenCheckpoint, match="不是 train_gpu"):
        checkpoint.read(tmp_path / LAST)


def test_numpy_objects_are_refused_when_saving_not_when_resuming(tmp_path):
    """存进了 weights_only 读不回的对象：存的时候就失败，旧的仍在，而不是一周后续训时才发现。"""
    import numpy

    checkpoint.save(tmp_path, content(1))
    bad = {**content(2), "rng": numpy.random.RandomState(0)}
    with pytest.raises(BrokenCheckpoint, match="读不出来"):
        checkpoint.save(tmp_path, bad)
    assert step_of(tmp_path) == 1
    assert [p.name for p in tmp_path.iterdir()] == [LAST]


# ---------------------------------------------------------------- 写不下、不能写


def test_full_disk_keeps_the_old_one(tmp_path):
    """磁盘写满（这里用 RLIMIT_FSIZE 让写入失败）：说出来，旧的一份完好，没有临时文件留下。"""
    resource = pytest.importorskip("resource")  # Windows 没有
    checkpoint.save(tmp_path, content(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(UserError, match="写不下"):
            checkpoint.save(tmp_path, content(2, size=100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert step_of(tmp_path) == 1
    assert [p.name for p in tmp_path.iterdir()] == [LAST]
    checkpoint.save(tmp_path, content(3))
    assert step_of(tmp_path) == 3


@pytest.fixture
def other_user():
    """一个普通用户也看得见的文件夹；以 root 运行时换成 nobody，因为 root 不受权限约束。"""
    folder = Path(tempfile.mkdtemp(prefix="checkpoint_"))
    os.chmod(folder, 0o777)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    yield folder
    if root:
        os.seteuid(0)
    os.chmod(folder, 0o777)
    shutil.rmtree(folder)


def test_read_only_folder_keeps_the_old_one(other_user):
    """文件夹变成只读：保存说没有写权限，旧的一份完好；开工前的试写也说得出来。"""
    folder = other_user / "run"
    folder.mkdir()
    checkpoint.save(folder, content(1))
    os.chmod(folder, 0o555)
    with pytest.raises(UserError, match="没有写权限"):
        checkpoint.save(folder, content(2))
    with pytest.raises(UserError, match="不能在.*写文件"):
        checkpoint.prepare(folder)
    assert step_of(folder) == 1
    os.chmod(folder, 0o755)


# ---------------------------------------------------------------- 在每一个系统调用处死掉


def die_at(monkeypatch, fatal: int) -> list[str]:
    """数 save 里改动文件系统的调用，第 `fatal` 次之前抛出异常，模拟进程此刻死去。"""
    calls: list[str] = []

    class Dead(BaseException):
        pass

    def watch(module, name):
        original = getattr(module, name)

        def call(*args, **kwargs):
            calls.append(name)
            if len(calls) == fatal:
                raise Dead(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    for name in ("link", "replace", "fsync"):
        watch(os, name)
    watch(torch, "save")
    monkeypatch.setattr(Path, "unlink", lambda self, missing_ok=False: None)  # 死人不收拾
    return calls


def test_death_at_any_point_of_a_save(tmp_path, monkeypatch):
    """保存中的每一个 fsync、link、rename 之前死去：last 是完整的旧的或新的，best 不比 last 旧。"""
    outcomes = []
    for fatal in range(1, 30):
        folder = tmp_path / str(fatal)
        folder.mkdir()
        for step in (1, 2):
            checkpoint.save(folder, content(step), best=True)
        with monkeypatch.context() as patched:
            calls = die_at(patched, fatal)
            try:
                checkpoint.save(folder, content(3), best=True)
                finished = True
            except BaseException:
                finished = False
        steps = [step_of(folder, name) for name in (LAST, PREVIOUS, BEST)]
        assert steps[0] in (2, 3) and steps[2] >= steps[0] - 0, (fatal, calls, steps)
        assert steps[1] in (1, 2) and steps[1] <= steps[0], (fatal, calls, steps)
        assert checkpoint.newest(folder, lambda _: None) == folder / LAST
        checkpoint.sweep(folder)
        assert not list(folder.glob("*tmp")) and not list(folder.glob(".*tmp"))
        outcomes.append(steps)
        if finished:
            break
    assert finished and len(outcomes) >= 7, f"{len(outcomes)} 个死法：{outcomes}"


def test_leftovers_of_killed_saves_are_swept(tmp_path):
    """被 SIGKILL 的保存留下的临时文件在下次开工时删掉，检查点不动。"""
    checkpoint.save(tmp_path, content(1))
    for pid in range(3):
        (tmp_path / f".{LAST}.{pid}.tmp").write_bytes(b"torn")
    (tmp_path / f".{BEST}.link.tmp").write_bytes(b"torn")
    assert checkpoint.prepare(tmp_path) == tmp_path / LAST
    assert [p.name for p in tmp_path.iterdir()] == [LAST]


def test_old_run_is_set_aside_not_overwritten(tmp_path):
    """从头训练时旧的一轮移进 old-1、old-2，一个文件也不丢。"""
    assert checkpoint.set_aside(tmp_path) is None
    for step in (1, 2):
        checkpoint.save(tmp_path, content(step), best=True)
        checkpoint.set_aside(tmp_path)
    assert [step_of(tmp_path / f"old-{n}", BEST) for n in (1, 2)] == [1, 2]
    assert not (tmp_path / LAST).exists()


# ---------------------------------------------------------------- 内容


@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module.", "module._orig_mod."])
def test_wrapper_prefixes_come_off(prefix):
    """编译和 DDP 加的前缀都去掉；名字中间的 module 不动。"""
    bare = {"embed.weight": torch.ones(1), "blocks.0.module.x": torch.ones(1)}
    wrapped = {prefix + name: value for name, value in bare.items()}
    assert list(checkpoint.strip_wrappers(wrapped)) == list(bare)


def test_random_state_round_trip(tmp_path):
    """Python 与 torch 的随机数状态存下、恢复之后，接着给出同样的数。"""
    import random

    device = torch.device("cpu")
    checkpoint.save(tmp_path, content(1) | {"rng": [checkpoint.rng_state(device)]})
    expected = random.random(), torch.rand(3)
    checkpoint.set_rng_state(checkpoint.read(tmp_path / LAST)["rng"][0], device)
    assert random.random() == expected[0] and torch.equal(torch.rand(3), expected[1])


def test_a_checkpoint_that_contains_itself_is_broken(tmp_path):
    """改坏的文件可以读成一个装着自己的字典：算它损坏，而不是递归到崩溃。"""
    state: dict = {"format": checkpoint.FORMAT, "digest": "0" * 64}
    state["itself"] = state
    torch.save(state, tmp_path / checkpoint.LAST)
    with pytest.raises(checkpoint.BrokenCheckpoint, match="摘要"):
        checkpoint.read(tmp_path / checkpoint.LAST)
