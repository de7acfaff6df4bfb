"""训练时读分片的断言：一遍里每个窗口恰好一次，续在哪里、几个进程都一样；坏了的说一句，退出码 2。"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from tiny_training import difference, state, tiny, trace, train, train_ranks

from experiments import train_gpu
from experiments.lab.results import ROOT
from experiments.loop import batches
from experiments.loop.batches import load_data, step_batches
from tokens.errors import UserError
from tokens.order import shuffled
from tokens.prepare import Options as Prepare
from tokens.prepare import prepare
from tokens.shards import Shards, is_sharded

SIZES = [1, 2, 3, 4, 5, 63, 64, 65, 1000]


# ---------------------------------------------------------------- 次序


@pytest.mark.parametrize("total", SIZES)
def test_every_window_comes_exactly_once(total):
    """任何大小都是一个排列：每个号恰好一次。"""
    order = shuffled(torch.arange(total), total, "train", 0)
    assert sorted(order.tolist()) == list(range(total)), f"{total}：{order.tolist()}"


def test_the_order_is_mixed_and_changes_with_the_key():
    """次序看不出规律：相邻的差、落在前一半的比例都像随机的；换种子、换一遍就换次序。"""
    total = 10_000
    order = shuffled(torch.arange(total), total, 0, 0)
    assert not torch.equal(order, shuffled(torch.arange(total), total, 0, 1))
    neighbours = (order[1:] - order[:-1]).abs().double().mean() / total
    assert abs(neighbours - 1 / 3) < 0.01, f"相邻两个平均相差 {neighbours:.3f}（随机是 1/3）"
    first = (order[: total // 2] < total // 2).double().mean()
    assert abs(first - 0.5) < 0.03, f"前一半里有 {first:.3f} 来自前一半"
    fixed = (order == torch.arange(total)).sum()
    assert fixed < 10, f"{fixed} 个还在原位（随机排列平均 1 个）"


def test_any_position_can_be_computed_alone():
    """单独算第 i 个位置，与一起算的相同：不必从头走到那里。"""
    total = 777
    whole = shuffled(torch.arange(total), total, "x")
    alone = [shuffled(torch.tensor([i]), total, "x").item() for i in range(total)]
    assert whole.tolist() == alone


# ---------------------------------------------------------------- 一条流


@pytest.fixture
def stream() -> Shards:
    """三个长短不一的分片（有一个是空的），内容就是 0…99。"""
    whole = torch.arange(100).to(torch.uint16)
    return Shards([whole[:7], whole[7:7], whole[7:60], whole[60:]])


def test_chunks_read_across_the_edges(stream):
    """任何起点、任何长度都与一整条相同，跨过分片的边界、跨过不止一个也一样。"""
    whole = torch.arange(100)
    assert len(stream) == 100
    for length in (1, 5, 30, 90):
        starts = torch.arange(100 - length + 1)
        expected = whole[starts[:, None] + torch.arange(length)]
        assert torch.equal(stream.chunks(starts, length), expected), f"长 {length}"


def test_an_epoch_predicts_every_token_once(stream):
    """一遍里每个目标恰好读一次（末尾不够一个窗口的除外），第二遍次序不同。"""
    options = tiny(Path("."), seq_len=8, global_batch_tokens=24, micro_batch=1)
    steps = [step_batches(stream, step, options, 0, 1) for step in range(8)]  # 24 = 2 遍 × 12
    rows = [tuple(y.flatten().tolist()) for step in steps for _, y in step]
    assert len(rows) == 24 and sorted(rows[:12]) == sorted(rows[12:])
    assert sorted(token for row in rows[:12] for token in row) == list(range(1, 97))
    assert rows[:12] != rows[12:], "两遍的次序相同"


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_ranks_share_one_global_order(stream, size):
    """第 5 步的全局 batch 由种子与步数决定：1、2、3、6 个进程合起来是同样的序列，同样的次序。"""
    options = tiny(Path("."), seq_len=8, global_batch_tokens=96, micro_batch=1)  # 12 个序列
    alone = [x for x, _ in step_batches(stream, 5, options, 0, 1)]
    ranks = [step_batches(stream, 5, options, rank, size) for rank in range(size)]
    together = [ranks[k % size][k // size][0] for k in range(12)]
    assert all(map(torch.equal, alone, together)), f"{size} 个进程"
    other = step_batches(stream, 5, replace(options, seed=1), 0, 1)
    assert not all(torch.equal(a, b) for a, (b, _) in zip(alone, other, strict=True))


# ---------------------------------------------------------------- 真的训练


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    """四个小文件做成的分片，词表 300。"""
    folder = tmp_path_factory.mktemp("shards")
    (folder / "text").mkdir()
    for number in range(4):
        lines = [f"第{i}回 {'天地玄黄宇宙洪荒'[(i + number) % 8]}{i * 7919 % 10007}\n"
                 for i in range(400 + 100 * number)]  # fmt: skip
        (folder / "text" / f"{number}.txt").write_text("".join(lines), encoding="utf-8")
    prepare(Prepare(text=(folder / "text",), out=folder / "out", shards=True, workers=1,
                    vocab_size=300))  # fmt: skip
    return folder / "out"


CHANGES = {"vocab_size": 300, "steps": 30, "eval_interval": 10}


def test_folder_and_manifest_both_name_the_shards(shards):
    """--data 可以是文件夹，也可以是其中的 manifest.json；得到的是同样的流。"""
    assert is_sharded(shards) and is_sharded(shards / "manifest.json")
    one, two = (load_data(tiny(Path("."), data=str(path), **CHANGES))
                for path in (shards, shards / "manifest.json"))  # fmt: skip
    assert len(one["train"]) == len(two["train"]) == one["meta"]["train_tokens"]
    assert len(one["val"]) == one["meta"]["val_tokens"] > 32


def test_training_on_shards_resumes_bitwise(shards, tmp_path):
    """一口气走 30 步 = 走 17 步再续：权重、优化器、每步的 loss 逐位相等，落在第二遍里也一样。"""
    changes = {**CHANGES, "data": str(shards)}
    assert train(tmp_path / "whole", **changes) == 0
    assert train(tmp_path / "parts", **{**changes, "steps": 17}) == 0
    assert train(tmp_path / "parts", **changes, init_from="resume") == 0
    assert difference(state(tmp_path / "whole"), state(tmp_path / "parts")) == 0.0
    assert trace(tmp_path / "whole").equals(trace(tmp_path / "parts"))


@pytest.mark.slow
def test_training_on_shards_resumes_with_another_number_of_ranks(shards, tmp_path):
    """一个进程走 10 步，两个进程续到 20：每步的 loss 与一个进程走到底相差不到 1e-5。"""
    changes = {**CHANGES, "data": str(shards), "steps": 20}
    assert train_ranks(1, tmp_path / "whole", **changes) == [0]
    assert train_ranks(1, tmp_path / "parts", **{**changes, "steps": 10}) == [0]
    assert train_ranks(2, tmp_path / "parts", **changes, init_from="resume") == [0, 0]
    worst = (trace(tmp_path / "whole")["loss"] - trace(tmp_path / "parts")["loss"]).abs().max()
    assert worst < 1e-5, f"最大差 {worst:.1e}"


# ---------------------------------------------------------------- 坏了的数据


def cut(folder: Path) -> None:
    """一个分片少了末尾两个字节。"""
    path = shard(folder)
    path.write_bytes(path.read_bytes()[:-2])


def flip(folder: Path) -> None:
    """一个分片里有一个字节被改了，大小不变。"""
    path = shard(folder)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def shard(folder: Path) -> Path:
    """第二个训练分片。"""
    return next(folder.glob("shards-*/00001.train.bin"))


def change_manifest(folder: Path, change) -> None:
    """改一改 manifest.json。"""
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


def mix(folder: Path) -> None:
    """第三个分片的记录来自另一次准备：另一个分词器。"""
    change_manifest(folder, lambda found: found["shards"][2].update(tokenizer_sha256="0" * 64))


def shorten(folder: Path) -> None:
    """manifest 里少了分片的表。"""
    change_manifest(folder, lambda found: found.pop("shards"))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: shard(folder).unlink(), r"缺分片 .*00001\.train\.bin"),
        (cut, r"00001\.train\.bin 应为 \d+ 字节，实为 \d+ 字节"),
        (flip, r"00001\.train\.bin 的哈希与 manifest\.json 里的不符，已经损坏"),
        (mix, r"第 2 个分片（.*2\.txt）是用另一个分词器编的"),
        (shorten, r"manifest\.json 里缺东西"),
        (lambda folder: (folder / "manifest.json").unlink(), r"没有 manifest\.json"),
        (lambda folder: (folder / "tokens.pt").touch(), r"既有 tokens\.pt 又有分片"),
    ],
)
def test_damaged_shards_are_refused_before_training(shards, tmp_path, damage, said, capsys):
    """缺一个、截断、翻了一位、混着两个分词器、manifest 不全：训练之前一句话，退出码 2。"""
    folder = tmp_path / "data"
    shutil.copytree(shards, folder)
    damage(folder)
    with pytest.raises(UserError, match=said):
        load_data(tiny(tmp_path, data=str(folder), **CHANGES))
    words = ["--preset", "tiny_cpu", "--vocab-size", "300", "--data", str(folder), "--device",
             "cpu", "--out-dir", str(tmp_path / "out")]  # fmt: skip
    assert train_gpu.command_line(words) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_shards_of_a_larger_vocabulary_than_the_model_are_refused(shards, tmp_path):
    """模型的词表比分片的小：一句话，带着要多大。"""
    with pytest.raises(UserError, match=r"词表只有 128 个词条：请把模型的 vocab_size 设为至少 \d+"):
        load_data(tiny(tmp_path, data=str(shards), **{**CHANGES, "vocab_size": 128}))


def test_only_one_rank_reads_every_byte(shards, tmp_path, monkeypatch):
    """哈希由 0 号核对；别的进程只映射，不把数据读一遍。"""
    calls = []
    original = batches.load_shards

    def watched(*args, verify=False):
        calls.append(verify)
        return original(*args, verify=verify)

    monkeypatch.setattr(batches, "load_shards", watched)
    for rank, expected in (("0", [False, True]), ("1", [False])):
        monkeypatch.setenv("RANK", rank)
        calls.clear()
        load_data(tiny(tmp_path, data=str(shards), **CHANGES))
        assert calls == expected, f"rank {rank}：{calls}"


def test_no_validation_text_is_a_clear_error(tmp_path):
    """验证部分一个窗口也没有：说出有几个 token、要几个，不让谁空等。"""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("天地玄黄宇宙洪荒\n" * 400, encoding="utf-8")
    prepare(Prepare(text=(tmp_path / "text",), out=tmp_path / "out", shards=True, workers=1,
                    vocab_size=300, val_fraction=0.01))  # fmt: skip
    with pytest.raises(UserError, match=r"val 只有 \d+ 个 token，不够一个窗口"):
        load_data(tiny(tmp_path, data=str(tmp_path / "out"), **CHANGES))



def test_a_file_a_thousand_times_larger_costs_no_memory():
    """提交的测量：2 GB 的分片与 2 MB 的相比，私有的常驻内存差不到 20 MB，batch 的时间不变。"""
    table = pd.read_csv(ROOT / "book" / "measured" / "shards_memory.csv")
    middle = table.groupby("megabytes")[["anonymous_mb", "batch_ms"]].median()
    small, large = middle.loc[middle.index.min()], middle.loc[middle.index.max()]
    assert middle.index.max() >= 500 * middle.index.min() and len(table) >= 6, f"{table}"
    grown = large["anonymous_mb"] - small["anonymous_mb"]
    assert abs(grown) < 20, f"{middle}"
    assert large["batch_ms"] / small["batch_ms"] < 1.5, f"{middle}"
