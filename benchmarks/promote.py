"""把一份结果提交进书里：results/<名字>.csv → book/measured/<名字>.csv，只收干净工作区里量的。

    python benchmarks/promote.py scaling_seeds
    python benchmarks/promote.py speed_ladder --spread iqr_ms --of ms --limit 0.3

每一行都要有出处（提交、干净与否、机器、日期），都由同一个提交、在没有未提交改动时量出。
给了 --spread 时，`spread ÷ of` 的中位数超过 --limit 就不收：机器太吵，换个安静的时候再量。
这里**不**提交：看过数字之后自己 `git add`。
"""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import tyro

from experiments.lab.results import ROOT, results_folder, run_main
from tokens.errors import UserError
from tokens.files import atomic_write

PROVENANCE = ("commit", "clean", "cpu", "threads", "torch", "date")


@dataclass(frozen=True)
class Options:
    """提升一份结果。"""

    name: tyro.conf.Positional[str]
    """results/ 里的名字，不带 .csv"""
    spread: str = ""
    """表示起伏的列，例如 iqr_ms；不给则不查"""
    of: str = "ms"
    """起伏相对于哪一列"""
    limit: float = 0.3
    """起伏的上限（相对）"""
    to: Path = ROOT / "book" / "measured"
    """放进哪个文件夹"""


def check(table: pd.DataFrame, options: Options) -> None:
    """不该提交的结果抛 `UserError`，说出为什么。"""
    missing = [name for name in PROVENANCE if name not in table]
    if missing:
        raise UserError(f"{options.name} 没有出处的列 {'、'.join(missing)}；请用现在的脚本重新量。")
    commits = sorted(set(table["commit"].astype(str)))
    if not table["clean"].eq("yes").all():
        raise UserError(f"{options.name} 是在有未提交改动的工作区里量的；请先提交，再重新量。")
    if len(commits) > 1 or commits == ["nan"]:
        raise UserError(f"{options.name} 混着几个提交（{'、'.join(commits)}）；请删掉它，重新量。")
    if not options.spread:
        return
    for name in (options.spread, options.of):
        if name not in table:
            raise UserError(f"{options.name} 没有列 {name}；有：{'、'.join(table.columns)}。")
    noise = float((table[options.spread] / table[options.of]).median())
    if not noise <= options.limit:
        raise UserError(
            f"{options.name} 的 {options.spread} ÷ {options.of} 中位数是 {noise:.2f}，超过上限 "
            f"{options.limit}：机器太吵，请在空闲时重新量。"
        )


def main(options: Options) -> None:
    """核对，然后原子地复制。"""
    source = results_folder() / f"{options.name}.csv"
    if not source.exists():
        raise UserError(f"没有 {source}；请先运行写出它的脚本。")
    check(pd.read_csv(source, dtype={"commit": str}), options)
    target = options.to / source.name
    with atomic_write(target) as temporary:
        temporary.write_bytes(source.read_bytes())
    print(f"{source} → {target}；看过数字之后提交它。")


if __name__ == "__main__":
    run_main(main, Options)
