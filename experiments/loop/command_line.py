"""命令行与配置文件：由一个带类型的 dataclass 得到，写错的键和值都在开工之前说清楚。

优先级从低到高：dataclass 的默认值、`--preset`、`--config FILE.toml`、命令行。
`tyro` 由 dataclass 生成 `--help`。解析由这里做，因为还要它不给的三样：合并 TOML、
哪些键是明确给出的（续训要知道）、把不认识的键和类型错误说成一句中文。
"""

import dataclasses
import difflib
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from tokens.errors import UserError

KINDS = {int: "整数", float: "数", str: "字符串", bool: "true 或 false"}


def unknown_key(key: str, known: Sequence[str], where: str) -> UserError:
    """不认识的键：说出最接近的名字。"""
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"是不是想写 {near[0]}？" if near else "用 --help 看全部选项。"
    return UserError(f"{where}里没有 {key} 这个选项；{hint}")


def coerce(kind: Any, value: object, name: str) -> Any:
    """把 TOML 的值或命令行的字符串变成 `kind` 类型；整数可以当小数用（0 就是 0.0）。"""
    if get_origin(kind) is Literal:
        if value in get_args(kind):
            return value
        raise UserError(f"{name} = {value}：只能是 {'、'.join(map(str, get_args(kind)))} 之一。")
    if kind is bool and isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if type(value) is kind or (kind is float and type(value) is int):
        return kind(value)
    try:
        if isinstance(value, str) and kind in (int, float):
            return kind(value)
    except ValueError:
        pass
    raise UserError(f"{name} = {value}：要一个{KINDS[kind]}。")


def read_toml(path: Path, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """读一个配置文件：键都要认识，值的类型都要对。"""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # 记事本会加 BOM
    except FileNotFoundError:
        raise UserError(f"找不到配置文件 {path}；请检查路径。") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"读不了配置文件 {path}（{error}）；它要是一个 UTF-8 的 TOML。") from error
    for key in values:
        if key not in kinds:
            raise unknown_key(key, list(kinds), f"配置文件 {path} ")
    return {key: coerce(kinds[key], value, f"{path} 的 {key}") for key, value in values.items()}


def read_arguments(argv: Sequence[str], kinds: Mapping[str, Any]) -> dict[str, Any]:
    """命令行里明确写出的选项；`--key value`、`--key=value`、`--flag`、`--no-flag` 都认得。"""
    given: dict[str, Any] = {}
    flags = {"--" + key.replace("_", "-"): key for key in kinds}
    queue = list(argv)
    while queue:
        word = queue.pop(0)
        flag, equals, value = word.partition("=")  # 只在第一个 = 处分开：值里可以有 =
        flag = flag.replace("_", "-")
        negated = "--" + flag.removeprefix("--no-")
        if flag in flags and kinds[flags[flag]] is bool and not equals:
            given[flags[flag]] = True
        elif flag not in flags and kinds.get(flags.get(negated, "")) is bool and not equals:
            given[flags[negated]] = False
        elif flag in flags:
            if not equals and (not queue or queue[0].startswith("--")):
                raise UserError(f"{flag} 后面缺一个值。")
            value = value if equals else queue.pop(0)
            given[flags[flag]] = coerce(kinds[flags[flag]], value, flag)
        else:
            raise unknown_key(word.partition("=")[0], list(flags), "命令行")
    return given


def preset_path(folder: Path, name: str) -> Path:
    """预设的文件；没有这个名字时列出全部。"""
    names = sorted(path.stem for path in folder.glob("*.toml"))
    if name not in names:
        raise UserError(f"没有预设 {name}；可选：{'、'.join(names)}。")
    return folder / f"{name}.toml"


def parse(
    options_type: type, argv: Sequence[str] | None = None, *, presets: Path, description: str,
    paths: Sequence[str] = (),
) -> tuple[Any, set[str]]:
    """返回 (选项, 明确给出的键)；后者让续训知道哪些值是使用者要改的，哪些只是默认值或预设。

    `options_type` 要有 `preset` 和 `config` 两个字符串字段；`paths` 里的字段是路径，开头的 ~ 展开。
    错误一律抛 `UserError`。
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    kinds = get_type_hints(options_type)
    if {"-h", "--help"} & set(argv):
        import tyro

        tyro.cli(options_type, args=["--help"], description=description)
    line = expand_home(read_arguments(argv, kinds), paths)
    file = read_toml(Path(line["config"]), kinds) if line.get("config") else {}
    file = expand_home(file, paths)
    chosen = line.get("preset", file.get("preset"))
    default = {field.name: field.default for field in dataclasses.fields(options_type)}["preset"]
    preset = read_toml(preset_path(presets, chosen or default), kinds)
    options = options_type(**{**preset, **file, **line, "preset": chosen or default})
    return options, set(file) | set(line)


def expand_home(values: Mapping[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """`paths` 里的值把开头的 ~ 换成主目录：写成 --out-dir=~/x 时 shell 不会替我们换。"""
    return {key: str(Path(value).expanduser()) if key in paths and str(value).startswith("~")
            else value for key, value in values.items()}  # fmt: skip
