"""怎样记、怎样报错：每个实验脚本的外壳。

结果写成 `results/<名字>.csv`，每行都带着机器与版本。
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pandas as pd

from tokens.errors import UserError
from tokens.files import atomic_write

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"


def save_csv(rows: pd.DataFrame | list[dict], name: str, *, folder: Path | None = None) -> Path:
    """把结果写成 `results/<name>.csv`（原子地），每行附上机器与版本；返回路径。"""
    from experiments.lab.hardware import describe

    table = pd.DataFrame(rows).assign(**describe())
    path = (folder or RESULTS) / f"{name}.csv"
    with atomic_write(path) as temporary:
        table.to_csv(temporary, index=False)
    return path


def print_table(rows: pd.DataFrame | list[dict], formats: Mapping[str, str] | None = None) -> None:
    """把表打印到 stdout，列对齐；`formats` 例如 {"loss": "{:.4f}"}。"""
    formatters = {name: spec.format for name, spec in (formats or {}).items()}
    with pd.option_context("display.unicode.east_asian_width", True):  # 汉字占两格
        print(pd.DataFrame(rows).to_string(index=False, formatters=formatters))


def run_main(main: Callable, options_type: type) -> None:
    """脚本的入口：由 dataclass 生成命令行并运行；使用者的错误只报一句，退出码 2。"""
    import tyro

    try:  # Options 的 __post_init__ 也可以抛 UserError
        options = tyro.cli(options_type, description=sys.modules[main.__module__].__doc__)
        main(options)
    except UserError as error:
        print(f"错误：{error}", file=sys.stderr)
        sys.exit(2)
