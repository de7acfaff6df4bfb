"""`experiments/loop/options.py` 与 `command_line.py` 的断言：谁优先，坏输入一句话。"""

import dataclasses
import tomllib
from pathlib import Path

import pytest
import torch

from experiments import train_gpu
from experiments.loop.command_line import parse
from experiments.loop.options import STRUCTURE, Options, accumulation, check
from model import GPT, GPTConfig

ROOT = Path(__file__).resolve().parent.parent
PRESETS = ROOT / "experiments" / "presets"


def parsed(*argv: str) -> Options:
    return parse(Options, list(argv), presets=PRESETS, description="")[0]


@pytest.mark.parametrize(
    ("preset", "count"),
    [("tiny_cpu", 618_816), ("gpt_29m", 29_106_688), ("gpt_124m", 123_587_328),
     ("gpt_1b", 1_307_936_768)],
)  # fmt: skip
def test_presets_have_the_stated_parameter_counts(preset, count):
    """四个预设的参数个数一个不差，而且 1、2、4、8 个进程都除得尽（tiny_cpu 到 2 个）。"""
    options = parsed("--preset", preset)
    with torch.device("meta"):
        model = GPT(GPTConfig(**{name: getattr(options, name) for name in STRUCTURE}))
    assert model.num_params() == count
    sizes = (1, 2) if preset == "tiny_cpu" else (1, 2, 4, 8)
    for size in sizes:
        check(options, size)
    assert all(accumulation(options, size) >= 1 for size in sizes)


def test_default_preset_is_the_defaults():
    """gpt_29m.toml 就是 dataclass 的默认值；八张卡时每卡累积 4 次，一步 524,288 个 token。"""
    assert parsed() == parsed("--preset", "gpt_29m") == Options()
    assert (Options().global_batch_tokens, accumulation(Options(), 8)) == (524_288, 4)


def test_command_line_over_config_over_preset(tmp_path):
    """优先级：命令行 > --config > --preset > 默认值；整数可以当小数，值里可以有等号。"""
    config = tmp_path / "mine.toml"
    config.write_text("lr = 1\nsteps = 7\nweight_decay = 0\n")
    options = parsed(
        "--preset", "tiny_cpu", "--config", str(config), "--steps=9", "--grad-clip", "2",
        "--out-dir=a=b", "--no-compile", "--beta1=0",
    )  # fmt: skip
    assert (options.d_model, options.lr, options.steps) == (64, 1.0, 9)
    assert isinstance(options.lr, float) and isinstance(options.weight_decay, float)
    assert (options.grad_clip, options.out_dir, options.compile) == (2.0, "a=b", False)
    assert (options.beta1, options.beta2) == (0.0, 0.95)


def test_presets_hold_only_known_keys_of_the_right_type():
    """每个预设的每个键都认识、类型都对（parse 会检查），键都是 dataclass 的字段。"""
    names = {field.name for field in dataclasses.fields(Options)}
    assert parsed("--preset", "tiny_cpu").device == "cpu"
    for path in PRESETS.glob("*.toml"):
        assert set(tomllib.loads(path.read_text())) <= names, path
        parsed("--preset", path.stem)


@pytest.mark.parametrize(
    ("argv", "needed"),
    [
        (["--learning-rat", "1"], "--min-lr-ratio|--lr"),
        (["--step", "3"], "--steps"),
        (["--seqlen=3"], "--seq-len"),
        (["--lr", "abc"], "--lr = abc"),
        (["--lr"], "--lr 后面缺一个值"),
        (["--steps", "1.5"], "整数"),
        (["--dtype", "bf16"], "bfloat16"),
        (["--preset", "huge"], "gpt_124m"),
        (["--config", "/nowhere.toml"], "/nowhere.toml"),
        (["train"], "train"),
        (["--lr", "-1"], "--lr -1"),
        (["--lr", "nan"], "--lr nan"),
        (["--lr", "inf"], "--lr inf"),
        (["--lr", "0"], "--lr"),
        (["--steps", "0"], "--steps 0"),
        (["--decay-steps", "0"], "--decay-steps 0"),
        (["--warmup-steps", "-1"], "--warmup-steps -1"),
        (["--beta2", "1"], "--beta2"),
        (["--seed", str(2**64)], "--seed 18446744073709551616"),
        (["--d-model", "65"], "d_model"),
        (["--micro-batch", "48"], "整除"),
        (["--global-batch-tokens", "1000"], "micro-batch"),
        (["--optimizer", "muon", "--dtype", "float16", "--data", "synthetic"], "muon"),
        (["--device", "tpu"], "tpu"),
        (["--init-from", "/nowhere"], "/nowhere"),
        (["--data", "/nowhere/tokens.pt"], "/nowhere/tokens.pt"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(argv, needed, tmp_path, capsys):
    """坏输入：一句话（给了什么、接受什么），退出码 2，没有 traceback，什么也没有写。"""
    import re

    out = ["--out-dir", str(tmp_path / "run"), "--device", "cpu"]
    if "--device" in argv:
        out = out[:2]
    assert train_gpu.command_line([*out, *argv]) == 2
    message = capsys.readouterr().err.strip()
    assert message.startswith("错误：") and "\n" not in message and "Traceback" not in message
    assert re.search(needed, message), message
    assert not list(tmp_path.rglob("*.pt"))


def test_bad_config_file_names_the_nearest_key(tmp_path, capsys):
    """配置文件里写错的键、写错的类型、坏的 TOML：各是一句话，指出文件与键。"""
    for text, needed in (
        ("leaning_rate = 1", "没有 leaning_rate"),
        ("step = 3", "steps"),
        ("lr = 'big'", "lr = big"),
        ("compile = 1", "true 或 false"),
        ("steps = 2.0", "整数"),
        ("lr = ", "TOML"),
    ):
        path = tmp_path / "c.toml"
        path.write_text(text)
        assert train_gpu.command_line(["--config", str(path)]) == 2
        message = capsys.readouterr().err
        assert needed in message and "c.toml" in message and message.count("\n") == 1, message


def test_help_lists_every_option_with_an_explanation(capsys):
    """--help 里每个选项都有中文说明。"""
    with pytest.raises(SystemExit) as left:
        train_gpu.command_line(["--help"])
    text = capsys.readouterr().out
    assert left.value.code == 0
    for field in dataclasses.fields(Options):
        assert f"--{field.name.replace('_', '-')}" in text, field.name
    assert "（步）" in text and "（FLOP/s）" in text and "（分钟）" in text
