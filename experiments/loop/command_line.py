"""命令行与配置文件：由一个带类型的 dataclass 得到，写错的键和值都在开工之前说清楚。

优先级从低到高：dataclass 的默认值、`--preset`、`--config FILE.toml`、命令行。
`tyro` 由 dataclass 生成 `--help` 并构造对象；这里在它之前多做三件事：
合并 TOML、把「不认识的键」指到最接近的名字、把类型错误说成一句中文。
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
        values = tomllib.loads(path.read_text(encoding="utf-8"))
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
    options_type: type, argv: Sequence[str] | None = None, *, presets: Path, description: str
) -> tuple[Any, set[str]]:
    """返回 (选项, 明确给出的键)；后者让续训知道哪些值是使用者要改的，哪些只是默认值或预设。

    `options_type` 要有 `preset` 和 `config` 两个字符串字段。错误一律抛 `UserError`。
    """
    import tyro

    argv = sys.argv[1:] if argv is None else list(argv)
    kinds = get_type_hints(options_type)
    if {"-h", "--help"} & set(argv):
        tyro.cli(options_type, args=["--help"], description=description)
    line = read_arguments(argv, kinds)
    file = read_toml(Path(line["config"]), kinds) if line.get("config") else {}
    chosen = line.get("preset", file.get("preset"))
    default = {field.name: field.default for field in dataclasses.fields(options_type)}["preset"]
    preset = read_toml(preset_path(presets, chosen or default), kinds)
    base = options_type(**{**preset, **file, "preset": chosen or default})
    options = tyro.cli(options_type, default=base, args=normalise(line), description=description)
    return options, set(file) | set(line)


def normalise(line: Mapping[str, Any]) -> list[str]:
    """把认出来的选项写成 tyro 的规范形式：开关是 --flag/--no-flag，其余是 --key=value。"""
    words = []
    for key, value in line.items():
        dashed = key.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{dashed}" if value else f"--no-{dashed}")
        else:
            words.append(f"--{dashed}={value}")
    return words
