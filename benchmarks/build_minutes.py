"""把一次安静的构建里各页的时间，变成书里、方框里、README 里的那些“约几分钟”。

    rm -rf _build && jupyter-book build book
    python benchmarks/build_minutes.py

读 `_build/execution.json`（构建时写下的），写 `book/measured/build_minutes.csv`，
改写 README.md 里的时间。
CSV 的列：`page` 页名；`seconds` 它执行了几秒；其余是出处（机器、版本、提交、日期）。
另有三行不是页：`book` 整次构建，`first` 编译缓存是空的那次构建，`pytest` 全部测试；
后两个它量不了，由选项给出；不给就留着上一次的。

它不运行任何东西，也不判断机器是否安静。工作区不干净，或者各页不是同一次构建里执行的，就拒绝。
"""

import csv
import json
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from experiments.lab.results import ROOT, code_version, provenance, run_main
from tokens.errors import UserError
from tokens.files import atomic_write

sys.path.insert(0, str(ROOT / "book/_ext"))
from minutes import MEASURED, read_minutes, spoken

WHERE = ("cpu", "cores", "isa", "python", "torch", "date", "commit")
ROW = re.compile(r"^\| \[.*?\]\(book/(\w+)\.md\) \|.*$", re.MULTILINE)


@dataclass(frozen=True)
class Options:
    """哪一次构建，另外量到的两个时间。"""

    execution: Path = ROOT / "_build/execution.json"
    """构建写下的记录"""
    first: float | None = None
    """编译缓存是空的时候，建书用了几秒"""
    pytest: float | None = None
    """`pytest` 用了几秒"""


def rows_of(record: dict, where: dict[str, str], extra: dict[str, float]) -> list[dict]:
    """构建的记录 → CSV 的行；各页不是在这一次构建里执行的，就抛出 UserError。"""
    old = [name for name, page in record["pages"].items() if page["when"] < record["started"]]
    if old or not record["pages"]:
        raise UserError(
            f"{'、'.join(old) or '各页'} 不是在这次构建里执行的；"
            "删掉 _build 再 jupyter-book build book"
        )
    seconds = {name: page["seconds"] for name, page in record["pages"].items()}
    seconds |= {"book": record["seconds"], **extra}
    return [{"page": name, "seconds": f"{s:.1f}", **where} for name, s in seconds.items()]


def readme_with(text: str, rows: dict[str, dict[str, str]]) -> str:
    """README 的文字，章节表最后一格和“时间”一行换成 CSV 里的数；没有的行写“–”。"""

    def said(name: str) -> str:
        return spoken(float(rows[name]["seconds"])) if name in rows else "–"

    def last_cell(match: re.Match) -> str:
        return match[0].rstrip("| ").rsplit("|", 1)[0] + f"| {said(match[1])} |"

    text = ROW.sub(last_cell, text)
    line = f"建书 {said('book')}（第一次含编译 {said('first')}），测试 {said('pytest')}；"
    return re.sub(r"建书 [^（]*（第一次含编译 [^）]*），测试 [^；]*；", line, text)


def main(options: Options) -> None:
    if not options.execution.is_file():
        raise UserError(f"没有 {options.execution}：先运行 jupyter-book build book")
    if code_version()["clean"] != "yes":
        raise UserError("工作区有没提交的改动：先提交，再从头建书，量到的才说得清是哪一版")
    book = ROOT / "book"
    given = {"first": options.first, "pytest": options.pytest}
    extra = {name: seconds for name, seconds in given.items() if seconds is not None}
    record = json.loads(options.execution.read_text(encoding="utf-8"))
    built = time.strftime("%Y-%m-%d", time.localtime(record["started"]))
    where = {name: provenance()[name] for name in WHERE} | {"date": built}
    rows = rows_of(record, where, extra)
    kept = [row for name, row in read_minutes(book).items() if name in given.keys() - extra.keys()]
    with atomic_write(book / MEASURED) as temporary:
        with open(temporary, "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, ["page", "seconds", *WHERE], lineterminator="\n")
            writer.writeheader()
            writer.writerows(sorted(rows, key=lambda row: row["page"]) + kept)
    readme = ROOT / "README.md"
    text = readme_with(readme.read_text(encoding="utf-8"), read_minutes(book))
    readme.write_text(text, encoding="utf-8")
    for row in rows:
        print(f"{row['page']:20} {float(row['seconds']):7.1f} 秒  {spoken(float(row['seconds']))}")
    print("写了 book/measured/build_minutes.csv，改了 README.md；看过 git diff 再提交。")


if __name__ == "__main__":
    run_main(main, Options)
