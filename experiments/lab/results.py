"""怎样记、怎样说、怎样报错：每个实验脚本的外壳。

结果写成 `results/<名字>.csv`，每行都带着出处：机器、版本、代码的提交、工作区干净与否、
这次运行的全部选项（`recipe`，JSON）、线程数与设备。
环境变量 `BOOK_RESULTS` 换一个文件夹（测试用它）。
"""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import pandas as pd

from experiments.lab.hardware import describe
from tokens.errors import UserError, tolerate_narrow_output
from tokens.files import atomic_write

ROOT = Path(__file__).resolve().parents[2]


def results_folder() -> Path:
    """结果写到哪里：`BOOK_RESULTS` 指的文件夹，没有设就是仓库根的 results/。"""
    return Path(os.environ.get("BOOK_RESULTS") or ROOT / "results")


@cache
def code_version() -> dict[str, str]:
    """{"commit": 短哈希, "clean": yes、no}；不是 git 克隆时 commit 是空串，clean 是 no。"""

    def git(*words: str) -> str | None:
        command = ["git", "-C", str(ROOT), *words]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    status = git("status", "--porcelain")
    return {"commit": git("rev-parse", "--short=10", "HEAD") or "",
            "clean": "yes" if status == "" else "no"}  # fmt: skip


def as_recipe(options: object) -> str:
    """一次运行的全部选项，一行 JSON；`options` 是 dataclass、字典或 None（空串）。"""
    if options is None:
        return ""
    values = dataclasses.asdict(options) if dataclasses.is_dataclass(options) else dict(options)
    return json.dumps(values, ensure_ascii=False, default=str)


def provenance(
    options: object = None, *, device: str = "cpu", threads: int | None = None
) -> dict[str, str]:
    """每行结果附上的出处；`device`、`threads` 是**这次运行**用的，不是机器上有的。"""
    where = describe(device=device, threads=threads)
    return {"recipe": as_recipe(options), **where, **code_version()}


def save_csv(
    rows: pd.DataFrame | list[dict], name: str, options: object = None, *,
    device: str = "cpu", threads: int | None = None,
) -> Path:  # fmt: skip
    """把结果写成 `results/<name>.csv`（原子地），每行附上出处；返回路径。

    表里已有的列（例如自己记了线程数）不覆盖。
    """
    table = pd.DataFrame(rows)
    where = provenance(options, device=device, threads=threads)
    table = table.assign(**{key: value for key, value in where.items() if key not in table})
    path = results_folder() / f"{name}.csv"
    with atomic_write(path) as temporary:
        table.to_csv(temporary, index=False)
    return path


def print_table(rows: pd.DataFrame | list[dict], formats: Mapping[str, str] | None = None) -> None:
    """把表打印到 stdout，列对齐；`formats` 例如 {"loss": "{:.4f}"}，多出的列名不要紧。"""
    table = pd.DataFrame(rows)
    formatters = {name: spec.format for name, spec in (formats or {}).items() if name in table}
    with pd.option_context("display.unicode.east_asian_width", True):  # 汉字占两格
        print(table.to_string(index=False, formatters=formatters, na_rep=""))


def publish(
    name: str, title: str, rows: list[dict], options: object = None, *,
    formats: Mapping[str, str] | None = None, hide: tuple[str, ...] = (), every: int = 1,
    device: str = "cpu",
) -> None:  # fmt: skip
    """一小节的结果：印标题和表（不印 `hide` 里的列，每 `every` 行印一行，末行总在），写成 CSV。

    多进程的脚本只在 0 号进程调用它。
    """
    print(f"\n{title}", flush=True)
    shown = [
        {key: value for key, value in row.items() if key not in hide}
        for i, row in enumerate(rows) if i % every == 0 or i == len(rows) - 1
    ]  # fmt: skip
    print_table(shown, formats)
    save_csv(rows, name, options, device=device)


def run_main(main: Callable, options_type: type) -> None:
    """脚本的入口：由 dataclass 生成命令行并运行；使用者的错误只报一句，退出码 2。"""
    import tyro

    tolerate_narrow_output()
    try:  # Options 的 __post_init__ 也可以抛 UserError
        options = tyro.cli(options_type, description=sys.modules[main.__module__].__doc__)
        main(options)
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":  # 几个进程报同一句，印一次就够
            print(f"错误：{error}", file=sys.stderr)
        sys.exit(2)
