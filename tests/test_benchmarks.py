"""与别家比的断言：比的是一样大的模型，计时在暂停之间是干净的，提交的结果自洽。"""

import signal
import subprocess
import sys

import pandas as pd
import pytest

from experiments.lab.results import ROOT
from tokens.errors import UserError

sys.path.insert(0, str(ROOT / "benchmarks"))
import peers
import workers

SHAPES = ("64x2x16x128", "128x4x16x128", "128x4x2x1024", "512x8x4x128")


@pytest.mark.parametrize("text", SHAPES)
def test_nanogpt_is_given_the_same_number_of_parameters(text):
    """nanoGPT 的词表缩到使参数量与我们相差不到 1 %，而且只缩小、不放大。"""
    shape = peers.parse_shape(text)
    d, layers, vocab = shape.d_model, shape.n_layer, peers.nano_vocab(shape)
    params = layers * (12 * d * d + 2 * d) + d + (shape.seq_len + vocab) * d
    ours = peers.GPT(shape.config).num_params()
    assert vocab <= shape.config.vocab_size, f"词表 {vocab}"
    assert abs(params / ours - 1) < 0.01, f"{text}：nanoGPT {params:,}，我们 {ours:,}"


def test_transformers_llama_has_exactly_our_parameters():
    """transformers 的 Llama 与我们的模型参数量相同，一个不差。"""
    options = workers.Options(d_model=64, n_layer=2)
    theirs, ours = workers.llama(options).num_parameters(), peers.GPT(options.config).num_params()
    assert theirs == ours, f"{theirs:,} 与 {ours:,}"


def test_bad_shapes_and_peers_are_refused():
    """写错的形状、不存在的写法、不是 nanoGPT 的文件夹：一句话说清楚。"""
    for text in ("128x4", "100x4x16x128", "128x4x0x128", "axbxcxd"):
        with pytest.raises(UserError, match="--shapes"):
            peers.parse_shape(text)
    with pytest.raises(UserError, match="--peer"):
        workers.Options(peer="nobody")
    with pytest.raises(UserError, match="train.py"):
        peers.Options(nanogpt=ROOT / "tests")


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="这个系统没有 SIGSTOP")
def test_only_the_peer_whose_turn_it_is_runs():
    """停住的一家一步也不走；轮到它时接着走，一步不少。"""
    code = "import time\nfor i in range(10**6):\n print('STEP', i, flush=True); time.sleep(.01)"
    with peers.started("假的", [sys.executable, "-c", code], ROOT, {}) as peer:
        first = peer.walk(3)
        while _state(peer.process) != "T":  # 信号送到之前它还可能多走一步
            pass
        second = peer.walk(3)
    assert first == [0, 1, 2] and second == [3, 4, 5], f"{first} 之后是 {second}"


def _state(process: subprocess.Popen) -> str:
    """进程的状态，T 是停住。"""
    command = ["ps", "-o", "state=", "-p", str(process.pid)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()[0]


def test_a_peer_that_dies_is_named():
    """某一家中途退出：报出它的名字和标准错误的最后一行。"""
    command = [sys.executable, "-c", "raise SystemExit('缺少某个包')"]
    with peers.started("某家", command, ROOT, {"PYTHONUTF8": "1"}) as peer:
        with pytest.raises(UserError, match="某家.*缺少某个包"):
            peer.walk(1)


def test_committed_result_is_consistent():
    """提交的比较：每种形状里参数量相差不到 1 %，每秒 token 数由每步时间算得出来。"""
    table = pd.read_csv(ROOT / "book" / "measured" / "peers.csv")
    for shape, rows in table.groupby(["d_model", "n_layer", "batch", "seq_len"]):
        ours = rows.set_index("peer").loc["ours"]
        spread = (rows["params"] / ours["params"] - 1).abs().max()
        assert spread < 0.01, f"{shape}：参数量相差 {spread:.2%}"
        computed = rows["batch"] * rows["seq_len"] / (rows["ms"] / 1e3)
        assert (computed / rows["tokens_per_s"] - 1).abs().max() < 1e-6, f"{shape}\n{rows}"
        assert (rows["timed_steps"] >= 12).all(), f"{shape}：计时的步数太少"
        times = rows["ms"] / ours["ms"]
        assert (times / rows["times_ours"] - 1).abs().max() < 1e-6, f"{shape}\n{rows}"
    assert {64, 128, 256, 512} <= set(table["d_model"]), "宽度要从 64 到 512"
    assert {64, 1024} <= set(table["seq_len"]), "长度要从 64 到 1024"


def test_committed_result_is_three_times_nanogpt():
    """默认形状上，nanoGPT 的一步要我们三倍以上的时间，朴素的写法要两倍半以上。"""
    table = pd.read_csv(ROOT / "book" / "measured" / "peers.csv")
    default = table.query("d_model == 128 and batch == 16 and seq_len == 128").set_index("peer")
    times = default["ms"] / default.loc["ours", "ms"]
    assert times["nanogpt"] >= 3 and times["ours_plain"] >= 2.5, times.to_dict()


PROMOTABLE = {"commit": "abc1234", "clean": "yes", "cpu": "x", "threads": 2, "torch": "2",
              "date": "2026-01-01", "ms": 10.0, "iqr_ms": 1.0}  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "limit", "said"),
    [
        ([{"clean": "no"}], 0.3, "未提交的改动|未提交改动"),
        ([{}, {"commit": "def5678"}], 0.3, "混着几个提交"),
        ([{"iqr_ms": 6.0}], 0.3, "机器太吵"),
        ([{}], 0.3, ""),
    ],
)
def test_only_clean_and_quiet_results_enter_the_book(tmp_path, monkeypatch, rows, limit, said):
    """有未提交的改动、混着几个提交、起伏太大：拒绝并说为什么，书里的旧文件不动；好的才复制。"""
    from benchmarks import promote

    monkeypatch.setenv("BOOK_RESULTS", str(tmp_path))
    pd.DataFrame([PROMOTABLE | row for row in rows]).to_csv(tmp_path / "x.csv", index=False)
    target = tmp_path / "measured"
    options = promote.Options("x", spread="iqr_ms", limit=limit, to=target)
    if said:
        with pytest.raises(UserError, match=said):
            promote.main(options)
        assert not (target / "x.csv").exists()
    else:
        promote.main(options)
        assert (target / "x.csv").read_bytes() == (tmp_path / "x.csv").read_bytes()
