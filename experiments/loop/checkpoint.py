"""检查点文件：任何时刻被杀、写满磁盘、坏掉一份，都还有一份好的可用。

一个文件夹里最多三份：`last.pt`（最新）、`previous.pt`（它的前一份）、`best.pt`（验证 loss 最低）。
一次保存的次序是：写临时文件 → fsync 落盘 → 硬链接成 best/previous → 改名为 last；
第一次与此后每 10 次，改名之前先读回来核对摘要。
每一步之间被 SIGKILL，`last.pt` 都是完整的：要么是旧的，要么是新的。

文件就是 `torch.save` 的字典，只有张量和普通值：`torch.load(path, weights_only=True)` 读得出来。
权重切给许多进程时，张量不在文件里，在它所指的 `shards-…/` 文件夹里（见 shards.py）；`read` 把两种
读成同样的字典，所以单进程、DDP、FSDP、张量并行存下的可以互相接着用。
这里**不**决定存什么：内容由训练脚本的 `snapshot()` 给出。
"""

import hashlib
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from experiments.loop import shards
from tokens.errors import UserError
from tokens.files import atomic_write, fsync_path

FORMAT = 1  # 内容的版本；改了含义就加一，旧程序遇到新文件会明说，而不是猜
LAST, PREVIOUS, BEST = "last.pt", "previous.pt", "best.pt"
LAUNCHED = ".launched"  # 在：这次 torchrun 已经把旧的一轮移开，此后的检查点都是它自己的
READ_BACK = 10  # 每几次保存读回来核对一次；摘要每次都算，读的时候总要核对
WRAPPERS = ("_orig_mod.", "module.")  # torch.compile 与 DDP 加在参数名前面的前缀


class BrokenCheckpoint(UserError):
    """文件在，但读不出来，或者内容与摘要不符。消息说明是哪个文件、为什么。"""


def digest(tree: object) -> str:
    """整个字典的摘要：每个键、每个普通值、每个张量的类型、形状和全部字节（BLAKE2b，十六进制）。

    zip 自带的 CRC 在 torch.load 时不检查，所以单个翻转的比特要靠它发现。
    """
    hasher = hashlib.blake2b(digest_size=32)

    def feed(item: object) -> None:
        if isinstance(item, Tensor):
            hasher.update(f"{item.dtype}{tuple(item.shape)}".encode())
            flat = item.detach().cpu().contiguous().flatten()  # 0 维张量不能换类型，先展平
            hasher.update(flat.view(torch.uint8).numpy())
        elif isinstance(item, dict):
            for key, value in item.items():
                feed(key)
                feed(value)
        elif isinstance(item, list | tuple):
            hasher.update(f"{type(item).__name__}{len(item)}".encode())
            for value in item:
                feed(value)
        else:
            hasher.update(f"{type(item).__name__}:{item!r};".encode())

    feed(tree)
    return hasher.hexdigest()


# ---------------------------------------------------------------- 写


def publish(source: Path, target: Path) -> None:
    """让 `target` 成为 `source` 的又一个名字，原子地替换旧的；不占空间（检查点从不就地修改）。"""
    temporary = target.with_name(f".{target.name}.link.tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except (OSError, NotImplementedError):  # 文件系统没有硬链接（FAT、部分网络盘）：复制一份
        shutil.copyfile(source, temporary)
        fsync_path(temporary)
    os.replace(temporary, target)


def save(
    folder: str | os.PathLike, state: dict, *, best: bool = False, read_back: bool = True
) -> Path:
    """把 `state` 存为 `last.pt`，原来的变成 `previous.pt`；`best` 时也存为 `best.pt`。返回路径。

    写不下、没有权限时抛 `UserError`，读回来不对时抛 `BrokenCheckpoint`；旧的检查点都不受影响。
    best 先于 last：反过来的话，在两者之间被杀，续训时会以为 best 已经存过。
    """
    last = Path(folder) / LAST
    with atomic_write(last) as temporary:
        state = {"format": FORMAT, **state}
        with open(temporary, "wb") as file:  # 自己打开，写失败时才有 errno（满了还是没权限）
            torch.save({**state, "digest": digest(state)}, file)
        fsync_path(temporary)
        if read_back:
            read(temporary)
        if best:
            publish(temporary, last.with_name(BEST))
        if last.exists():
            publish(last, last.with_name(PREVIOUS))
    discard_unused(last.parent)
    return last


def discard_unused(folder: Path) -> None:
    """删掉没有一个检查点指着的分片文件夹；有检查点读不出来就什么也不删。"""
    found = list(folder.glob(f"{shards.PREFIX}*"))
    if not found:
        return
    try:
        used = {peek(path).get("shards", {}).get("folder")
                for path in [*folder.glob("*.pt"), *folder.glob("old-*/*.pt")]}  # fmt: skip
    except UserError:
        return
    for path in found:
        if path.name not in used:
            shutil.rmtree(path, ignore_errors=True)


def prepare(folder: Path, say: Callable[[str], None] = print) -> Path | None:
    """建好文件夹、试写、清掉被杀的保存留下的临时文件；返回最新的好检查点（没有则 None）。"""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe.tmp"
        probe.write_bytes(b"")
        probe.unlink()
        sweep(folder)
        if restart_count() == 0:  # 一次新的启动
            (folder / LAUNCHED).unlink(missing_ok=True)
        return newest(folder, say)
    except OSError as error:
        raise UserError(
            f"不能在 {folder} 里写文件（{error.strerror}）；请改权限，或换一个 --out-dir。"
        ) from error


def sweep(folder: str | os.PathLike) -> None:
    """删掉被杀的保存留下的临时文件；不删的话，杀三十次就会多占三十份。"""
    for leftover in Path(folder).glob(".*.pt.*tmp"):
        leftover.unlink(missing_ok=True)
    for leftover in Path(folder).glob(f".{shards.PREFIX}*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    discard_unused(Path(folder))


def set_aside(folder: str | os.PathLike) -> Path | None:
    """从头训练之前，把文件夹里旧的一轮移进 `old-1`、`old-2`……；没有旧的就返回 None。

    移完才留下标记：在那之前死掉，重启的进程就知道文件夹里的检查点还是上一轮的。
    """
    folder = Path(folder)
    old = [path for name in (LAST, PREVIOUS, BEST, "log.csv") if (path := folder / name).exists()]
    old += folder.glob(f"{shards.PREFIX}*")  # 先移指着它们的：反过来被杀，last 就指着没有的东西
    target = move_aside(folder, old) if old else None
    (folder / LAUNCHED).touch()
    return target


def move_aside(folder: Path, old: list[Path]) -> Path:
    """把 `old` 移进第一个还没有的 old-N，返回它。"""
    number = 1
    while (target := folder / f"old-{number}").exists():
        number += 1
    target.mkdir()
    for path in old:
        os.replace(path, target / path.name)
    return target


# ---------------------------------------------------------------- 读


def read(path: str | os.PathLike, *, tensors: bool = True, verify: bool = True) -> dict:
    """读出并核对一个检查点（张量在 CPU 上），不论它是一个文件还是分片的。

    `tensors=False` 只要张量之外的；`verify=False` 不算摘要，给已经由别人核对过的文件。
    坏文件抛 `BrokenCheckpoint`；打不开（没有权限）、版本不对抛 `UserError`。
    """
    path = Path(path)
    state = unpacked(path, mapped=not tensors and not verify)
    expected = state.pop("digest")
    if verify and not intact(state, expected):
        raise BrokenCheckpoint(f"{path} 的内容与摘要不符：文件在写完之后被改动或损坏了")
    if state.get("format") != FORMAT:
        raise UserError(
            f"{path} 的检查点版本是 {state.get('format')}，这个程序只认得 {FORMAT}；"
            "请换用存下它的那一版代码，或从头训练。"
        )
    if "shards" in state:
        return with_shards(path, state, tensors=tensors, verify=verify)
    if not tensors:
        state = {key: value for key, value in state.items() if key not in ("model", "optimizer")}
    return state


def peek(path: str | os.PathLike) -> dict:
    """张量之外的一切，不核对；不把大文件读进来。"""
    return read(path, tensors=False, verify=False)


def unpacked(path: Path, *, mapped: bool) -> dict:
    """文件里的字典，连同 "digest"；`mapped` 时张量只映射、不读进内存。"""
    try:
        path.open("rb").close()
    except OSError as error:
        raise UserError(f"打不开检查点 {path}（{error.strerror}）；请检查路径与权限。") from error
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # 截断或改坏的文件能引出任何异常，OSError 也有；说出来，不吞
        reason = str(error).strip().split("\n")[0][:120]
        raise BrokenCheckpoint(f"{path} 读不出来（{type(error).__name__}：{reason}）") from error
    if not isinstance(state, dict) or "digest" not in state:
        raise BrokenCheckpoint(f"{path} 不是 train_gpu 存下的检查点（没有摘要）")
    return state


def intact(state: dict, expected: object) -> bool:
    """内容与摘要相符。"""
    try:
        return digest(state) == expected
    except Exception:  # 改坏的文件能读成任何东西：装着自己的字典、算不了摘要的张量
        return False


def with_shards(path: Path, state: dict, *, tensors: bool, verify: bool) -> dict:
    """核对 `path` 所指的分片，要时把张量拼进来。"""
    folder = shards.locate(path, state["shards"])
    problem = shards.problem_with(folder, state["shards"]["files"]) if verify else ""
    if not problem and tensors:
        try:
            return state | shards.load_whole(folder, state)
        except Exception as error:  # 没有核对过的分片能引出任何异常；说出来，不吞
            problem = f"{folder} 读不出来（{type(error).__name__}：{str(error)[:120]}）"
    if problem:
        raise BrokenCheckpoint(f"{path} 的分片坏了：{problem}")
    return state


def newest(folder: str | os.PathLike, say: Callable[[str], None] = print) -> Path | None:
    """最新的一个**好**检查点的路径；没有检查点返回 None，全都坏了抛 `UserError`。

    坏的说出来并移到一旁（改名为 broken-*）：留在原地的话，下一次保存会拿它覆盖好的 previous。
    """
    folder = Path(folder)
    found = [path for name in (LAST, PREVIOUS) if (path := folder / name).exists()]
    broken = []
    for path in found:
        try:
            read(path, tensors=False)
        except BrokenCheckpoint as error:
            broken.append(path)
            say(f"检查点损坏：{error}。")
        else:
            for bad in broken:
                os.replace(bad, bad.with_name(f"broken-{bad.name}"))
                say(f"改用前一份 {path.name}；坏的一份留作 broken-{bad.name}。")
            return path
    if broken:
        raise UserError(
            f"{folder} 里的检查点都坏了（{'、'.join(p.name for p in broken)}）；"
            f"可以用 --init-from {folder / BEST} 从最好的权重重新开始，或删掉它们从头训练。"
        )
    return None


def restart_count() -> int:
    """torchrun 已经重启了几次；不在 torchrun 之下是 0。"""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def same_launch(state: dict, folder: str | os.PathLike) -> bool:
    """检查点是否由同一次 torchrun 写下：是，就是它在重启我们（或成员有变动），应当接着走。"""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if run_id == "none":  # 没有给 --rdzv-id，也不是 --standalone：看重启的次数与标记
        return restart_count() > 0 and (Path(folder) / LAUNCHED).exists()
    return run_id == state["run_id"]


# ---------------------------------------------------------------- 内容的两个小问题


def strip_wrappers(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """去掉参数名里的 `_orig_mod.` 与 `module.`：编译与否、几张卡，存下的名字都一样。"""
    bare = {}
    for name, tensor in weights.items():
        while name.startswith(WRAPPERS):
            name = name.split(".", 1)[1]
        bare[name] = tensor
    return bare


def rng_state(device: torch.device) -> dict:
    """这个进程的随机数状态：Python、CPU，以及 CUDA（没有就是 None）；只含张量和普通值。"""
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return {"python": random.getstate(), "cpu": torch.get_rng_state(), "cuda": cuda}


def set_rng_state(state: dict, device: torch.device) -> None:
    """恢复 `rng_state()`；存的时候没有 CUDA 就不动 CUDA 的。"""
    random.setstate(state["python"])
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
