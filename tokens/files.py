"""写文件的唯一办法（和路径、哈希两件小事）：先写临时文件，落盘，再改名，所以别人看到的文件总是完整的。

    with atomic_write(path) as temporary:
        torch.save(state, temporary)

这里**不**校验内容，也不加锁：改名之后文件完整，但内容对不对由读的人核对。
"""

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokens.errors import UserError


def sha256(path: Path) -> str:
    """文件的 sha256，十六进制。"""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync_path(path: Path) -> None:
    """把文件（或目录项）真正写到盘上；不支持对目录 fsync 的系统（Windows）跳过目录。"""
    flags = os.O_RDONLY if os.name == "posix" else os.O_RDWR
    if os.name != "posix" and path.is_dir():
        return
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def expanded(path: str | os.PathLike) -> Path:
    """开头的 `~` 换成家目录：`--out=~/数据` 里的 `~` 不在词首，shell 不会替我们换。

    `~某人` 而没有这个用户时抛 `UserError`。
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(
            f"{path} 里的 {Path(path).parts[0]} 不是这台机器上的用户：请写出完整的路径，"
            f"或在前面加 ./ 表示就叫这个名字。"
        ) from error


@contextmanager
def atomic_write(path: str | os.PathLike) -> Iterator[Path]:
    """给出同一文件夹里的临时路径；with 块正常结束才 fsync 并改名为 `path`，否则删掉临时文件。

    临时文件必须与目标在同一文件夹：跨文件系统的改名不是原子的。
    磁盘已满、没有写权限时抛 `UserError`；其他异常原样抛出。被 SIGKILL 时留下的 `*.tmp` 没有人读。
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        fsync_path(temporary)
        os.replace(temporary, path)
        fsync_path(path.parent)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if (problem := describe_write_error(error, path)) is not None:
            raise UserError(problem) from error
        raise


def describe_write_error(error: BaseException, path: Path) -> str | None:
    """写 `path` 时的系统错误换成一句话；不是写盘问题就返回 None。"""
    number = getattr(error, "errno", None)
    # torch.save 把写失败报成 RuntimeError，消息里只有 "file write failed" 一类的话，没有 errno。
    torch_write = isinstance(error, RuntimeError) and any(
        sign in str(error) for sign in ("PytorchStreamWriter", "unexpected pos")
    )
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or torch_write:
        return f"写不下 {path}：磁盘已满或配额用尽；请腾出空间，或换一个输出位置，然后重新运行。"
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"不能写 {path}：没有写权限；请改权限，或换一个输出位置。"
    return None
