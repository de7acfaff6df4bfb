"""分片检查点的断言：与单个文件一样可靠，怎样切的都能由别的切法接着用。"""

import os
import pickle
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from tiny_training import difference, start, state, tiny, train, train_ranks

from experiments import generate, train_gpu
from experiments.loop import checkpoint, shards
from experiments.loop.checkpoint import BEST, LAST, PREVIOUS, BrokenCheckpoint
from experiments.ranks.launch import run_ranks
from experiments.ranks.world import World

SHORT = {"steps": 8, "decay_steps": 8, "eval_interval": 4, "eval_tokens": 128, "micro_batch": 8,
         "fused_loss": False}  # fmt: skip
FSDP = {**SHORT, "parallel": "fsdp"}
LAYOUTS = {"ddp": {}, "fsdp": {"parallel": "fsdp"}, "tp": {"tensor_parallel": 2}}


def gap(a: Path, b: Path) -> float:
    """两份检查点的权重与两个矩的最大绝对差。"""
    return difference(state(a), state(b))


def folders(where: Path) -> list[str]:
    return sorted(path.name for path in where.glob("*shards-*"))


def pointed(where: Path, name: str = LAST) -> Path:
    """检查点所指的分片文件夹。"""
    return where / checkpoint.peek(where / name)["shards"]["folder"]


# ---------------------------------------------------------------- 续训与互换


def here(world: World, folder: Path, **changes) -> int:
    """在已有的进程组里训练一次，不另起进程；`folder` 里的检查点接着用。"""
    options = tiny(folder, **SHORT | changes)
    given = set(changes) | {"out_dir", "init_from", "steps", "tensor_parallel", "parallel"}
    with train_gpu.status.exclusive(folder, world):
        return train_gpu.train(options, given, world, 0.0)[0]


PAIRS = [("fsdp", "fsdp"), ("tp", "tp"), ("single", "fsdp"), ("single", "tp"), ("ddp", "fsdp"),
         ("fsdp", "ddp"), ("fsdp", "tp"), ("tp", "fsdp")]  # fmt: skip
FOUR = {"2 × 2": {"parallel": "fsdp", "tensor_parallel": 2, "micro_batch": 4},
        "fsdp 4": {"parallel": "fsdp", "micro_batch": 4}}  # fmt: skip


def everything(world: World, base: Path) -> None:
    """每种切法各存一份（4 步），再由别的切法接着走到 8 步；来源里有单进程的。"""
    for name, how in LAYOUTS.items():
        assert here(world, base / name, steps=4, **how) == 0
        if name != "ddp":
            assert here(world, base / f"{name} 不停", **how) == 0
    for source, target in PAIRS:
        resume(world, base, source, target, LAYOUTS[target])


def four(world: World, base: Path) -> None:
    """两个进程存的 FSDP 由四个进程的 FSDP × TP 与 FSDP 接着走。"""
    for target, how in FOUR.items():
        resume(world, base, "fsdp", target, how)


def resume(world: World, base: Path, source: str, target: str, how: dict) -> None:
    """拷一份来源，用另一种切法接着走。"""
    folder = base / f"{source} → {target}"
    world.on_master(lambda: shutil.copytree(base / source, folder) and None)
    assert here(world, folder, init_from="resume", **how) == 0


@pytest.fixture(scope="module")
def crossed(tmp_path_factory) -> Path:
    """一个文件夹，装着所有来源与去向。"""
    base = tmp_path_factory.mktemp("crossed")
    assert train(base / "single 不停", **SHORT) == 0
    assert train(base / "single", **SHORT | {"steps": 4}) == 0
    run_ranks(everything, 2, base, timeout=280)  # 机器忙时也等得起
    run_ranks(four, 4, base, timeout=280)
    for source in ("fsdp", "tp"):
        shutil.copytree(base / source, base / f"{source} → single")
        words = ["--out-dir", str(base / f"{source} → single"), "--init-from", "resume", "--steps",
                 "8", "--tensor-parallel", "1"]  # fmt: skip
        assert train_gpu.command_line(words) == 0
    return base


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp", "tp"])
def test_resume_is_bitwise_at_the_same_layout(crossed, layout):
    """run(8) = run(4) + resume(4)：权重与优化器的两个矩逐位相等，best 也是。"""
    ours, theirs = crossed / f"{layout} → {layout}", crossed / f"{layout} 不停"
    assert state(ours)["step"] == 8 and gap(ours, theirs) == 0.0
    assert difference(state(ours, BEST), state(theirs, BEST)) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "target"),
    [*PAIRS, ("fsdp", "single"), ("tp", "single"), *(("fsdp", target) for target in FOUR)],
)
def test_any_layout_continues_any_other(crossed, source, target):
    """单进程、DDP、FSDP、TP 存下的由另一种接着走：权重与两个矩与单进程不停相差 < 1e-5。"""
    folder = crossed / f"{source} → {target}"
    assert state(folder)["step"] == 8
    worst = gap(folder, crossed / "single 不停")
    assert worst < 1e-5, f"{folder.name}：{worst:.1e}"
    cut = target not in ("single", "ddp")
    assert ("shards" in checkpoint.peek(folder / LAST)) is cut, "切开的才写分片"


@pytest.mark.slow
def test_optimizer_state_survives_the_crossing(crossed, tmp_path):
    """换一种切法读回来，权重与两个矩一个比特也不变：分片拼成的与单个文件相同。"""
    assert gap(crossed / "fsdp", crossed / "tp") < 1e-6
    saved = state(crossed / "fsdp")
    checkpoint.save(tmp_path, {k: v for k, v in saved.items() if k != "shards"})
    assert difference(saved, state(tmp_path)) == 0.0
    assert list(saved["model"]) == list(state(crossed / "single")["model"])


@pytest.mark.slow
def test_generate_and_export_read_shards(crossed, tmp_path):
    """`generate` 与导出读分片的检查点，权重与拼全的逐位相同。"""
    model = generate.load(crossed / "fsdp → tp").model
    saved = state(crossed / "fsdp → tp")["model"]
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    options = generate.Export(crossed / "fsdp → tp", tmp_path / "llama")
    generate.export(options)
    from experiments.loop.llama import load_llama

    again = load_llama(tmp_path / "llama", 1 << 20)[1]
    assert all(torch.equal(again[name], saved[name]) for name in saved)


# ---------------------------------------------------------------- 损坏


@pytest.fixture
def two_saves(crossed, tmp_path) -> Path:
    """一份 FSDP 的检查点，last 与 previous 各指一个文件夹。"""
    shutil.copytree(crossed / "fsdp 不停", tmp_path / "run")
    assert pointed(tmp_path / "run") != pointed(tmp_path / "run", PREVIOUS)
    return tmp_path / "run"


def damage(folder: Path, how: str) -> None:
    """弄坏 last 所指的分片。"""
    victim = pointed(folder)
    file = max(victim.glob("*.distcp"), key=lambda path: path.stat().st_size)
    if how == "flip":
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    elif how == "truncate":
        file.write_bytes(file.read_bytes()[:-100])
    elif how == "file":
        file.unlink()
    elif how == "index":
        (victim / shards.INDEX).write_bytes(b"garbage")
    elif how == "folder":
        shutil.rmtree(victim)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["flip", "truncate", "file", "index", "folder"])
def test_broken_shards_fall_back_aloud(two_saves, how):
    """翻一个比特、截断、少一个文件、索引坏、整个文件夹不见：说出来，用 previous。"""
    damage(two_saves, how)
    said = []
    assert checkpoint.newest(two_saves, said.append) == two_saves / PREVIOUS
    assert "分片坏了" in said[0] and PREVIOUS in said[1], said
    assert checkpoint.read(two_saves / PREVIOUS)["step"] == 4


@pytest.mark.slow
def test_half_written_folder_of_another_layout_is_an_error_not_a_hang(two_saves, capsys):
    """last 与 previous 的分片都不全：一句话，退出码 2，单进程来接也一样。"""
    for name in (LAST, PREVIOUS):
        next(pointed(two_saves, name).glob("*.distcp")).unlink()
    words = ["--out-dir", str(two_saves), "--init-from", "resume", "--device", "cpu"]
    assert train_gpu.command_line(words) == 2
    said = capsys.readouterr().err.strip()
    assert "都坏了" in said and "\n" not in said, said


@pytest.mark.slow
def test_the_index_runs_no_code(two_saves):
    """索引是 pickle：换成一段会执行的代码，读的时候拒绝，什么也没有执行。"""
    target = two_saves / "executed"

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(target),)

    with open(pointed(two_saves) / shards.INDEX, "wb") as file:
        pickle.dump(Evil(), file)
    with pytest.raises(pickle.UnpicklingError, match="不该有的"):
        shards.Reader(pointed(two_saves)).read_metadata()
    with pytest.raises(BrokenCheckpoint):
        checkpoint.read(two_saves / LAST, verify=False)
    assert not target.exists()


# ---------------------------------------------------------------- 文件夹的去留


@pytest.mark.slow
def test_only_folders_in_use_stay(crossed):
    """last、previous、best 指着的文件夹都在，别的一个也没有；没有临时的，索引里没有本机的路径。"""
    folder = crossed / "fsdp 不停"
    used = {pointed(folder, name).name for name in (LAST, PREVIOUS, BEST)}
    assert set(folders(folder)) == used
    for name in used:
        assert str(crossed).encode() not in (folder / name / shards.INDEX).read_bytes()


@pytest.mark.slow
def test_leftovers_are_swept_and_old_runs_keep_their_shards(two_saves):
    """被杀留下的临时文件夹与没有人指的文件夹开工时删掉；移到 old-1 的一轮带着自己的分片。"""
    (two_saves / ".shards-00000009-aa.tmp").mkdir()
    (two_saves / "shards-00000009-bb").mkdir()
    kept = state(two_saves)
    assert checkpoint.prepare(two_saves) == two_saves / LAST
    assert not [name for name in folders(two_saves) if "00000009" in name]
    checkpoint.set_aside(two_saves)
    assert folders(two_saves) == [] and difference(state(two_saves / "old-1"), kept) == 0.0


@pytest.mark.slow
def test_death_between_moving_the_file_and_its_shards(two_saves):
    """移开旧的一轮，文件移了、分片没移就死了：分片不会被当作没人要的删掉，旧的一轮仍读得出。"""
    kept = state(two_saves)
    names = [two_saves / name for name in (LAST, PREVIOUS, BEST)]
    checkpoint.move_aside(two_saves, names)
    assert checkpoint.prepare(two_saves) is None
    assert difference(checkpoint.read(two_saves / "old-1" / LAST), kept) == 0.0


@pytest.mark.slow
def test_one_rank_with_a_full_disk(tmp_path):
    """一个进程写不下：谁也不空等，旧的仍好，训练继续，下次再存；临时文件夹没有留下。"""
    assert train_ranks(2, tmp_path, full_disk, **FSDP) == [0, 0]
    assert state(tmp_path)["step"] == 8 and state(tmp_path, PREVIOUS)["step"] == 0
    assert not list(tmp_path.glob(".shards-*"))


def full_disk(rank: int) -> None:
    """手脚：第 4 步存盘时，1 号进程写完才发现满了（DCP 的集体通信已经做完）。"""
    original = shards.file_digest
    counts = [0]

    def digest(path):
        counts[0] += 1
        if rank == 1 and counts[0] == 2:
            raise OSError(28, "No space left on device")
        return original(path)

    shards.file_digest = digest


# ---------------------------------------------------------------- 杀


def saving(folder: Path) -> bool:
    return any(folder.glob(".shards-*.tmp"))


def kill_once(folder: Path, dice: random.Random, **changes) -> tuple[bool, bool]:
    """两个进程训练，在随机的时刻一起 SIGKILL；一半的时候挑正在写分片的一瞬。"""
    processes = start(2, folder, init_from="resume", **changes)
    alive = processes[0].is_alive
    while alive() and not (folder / LAST).exists():
        time.sleep(0.002)
    moment, in_save = time.monotonic() + dice.uniform(0, 0.5), dice.random() < 0.5
    while alive() and (time.monotonic() < moment or (in_save and not saving(folder))):
        time.sleep(0.0005)
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
    killed = all(process.exitcode == -signal.SIGKILL for process in processes)
    return killed, saving(folder)


def killed_runs(tmp_path: Path, wanted: int, seed: int) -> tuple[int, int]:
    """杀 `wanted` 次，每次续训到底并与没有被杀的比较；返回（杀到几次，几次死在写分片时）。"""
    changes = {**FSDP, "steps": 30, "decay_steps": 30, "save_interval": 1}
    assert train_ranks(2, tmp_path / "unharmed", **changes) == [0, 0]
    dice, kills, torn = random.Random(seed), 0, 0
    for attempt in range(2 * wanted):
        folder = tmp_path / str(attempt)
        killed, in_save = kill_once(folder, dice, **changes)
        if not killed:
            continue
        kills, torn = kills + 1, torn + in_save
        assert train_ranks(2, folder, init_from="resume", **changes) == [0, 0]
        said = f"第 {kills} 次，{torn} 次死在写分片时"
        assert gap(folder, tmp_path / "unharmed") == 0.0, said
        assert difference(state(folder, BEST), state(tmp_path / "unharmed", BEST)) == 0.0, said
        assert not saving(folder), said
        used = {pointed(folder, name).name for name in (LAST, PREVIOUS, BEST)}
        assert set(folders(folder)) == used, said
        shutil.rmtree(folder)
        if kills == wanted:
            break
    return kills, torn


@pytest.mark.slow
def test_two_kills_lose_nothing(tmp_path):
    """FSDP 的两个进程被 SIGKILL 两次、各续训：最后的权重、优化器状态与没有被杀逐位相等。"""
    kills, _ = killed_runs(tmp_path, 2, seed=3)
    assert kills == 2, f"只杀到 {kills} 次"


@pytest.mark.fault
@pytest.mark.timeout(900)
def test_thirty_of_thirty(tmp_path):
    """30 次都与没有被杀逐位相等，至少 5 次死在写分片的途中。"""
    kills, torn = killed_runs(tmp_path, 30, seed=30)
    print(f"杀到 {kills} 次，{torn} 次死在写分片时，全部逐位相等")
    assert kills == 30 and torn >= 5, f"杀到 {kills} 次，{torn} 次死在写分片时"


# ---------------------------------------------------------------- 只算一次摘要


def test_a_checkpoint_is_hashed_once_and_read_back_now_and_then(tmp_path, monkeypatch):
    """每次保存只算一遍摘要；读回来核对只在第一次与每 10 次；续训时再核对一遍。"""
    hashed, read = [], []
    original, unpacked = checkpoint.digest, checkpoint.unpacked
    monkeypatch.setattr(checkpoint, "digest", lambda tree: hashed.append(1) or original(tree))
    monkeypatch.setattr(
        checkpoint, "unpacked", lambda *a, **k: read.append(1) or unpacked(*a, **k)
    )
    assert train(tmp_path, **SHORT | {"save_interval": 1, "steps": 12}) == 0  # 13 次
    assert len(read) == 2 and len(hashed) == 13 + 2, (len(read), len(hashed))
    hashed.clear()
    assert train(tmp_path, **SHORT | {"steps": 12}, init_from="resume") == 0
    assert len(hashed) == 1, f"续训核对了 {len(hashed)} 遍"


def test_a_missing_number_of_updates_is_not_guessed():
    """没有更新过的优化器（第 0 步）只存权重。"""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    assert shards.optimizer_summary(optimizer)["updates"] == 0
    assert set(shards.shard_names(model, optimizer)) == {"model.weight", "model.bias"}
