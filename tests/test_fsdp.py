"""`experiments/fsdp.py` 的断言：三级都与一个进程相同，字节与通信等于公式，记错的范数错多少。"""

import inspect
import math

import pandas as pd
import pytest
import torch

from experiments import fsdp as fs
from experiments.lab.results import results_folder
from experiments.plan.memory import zero_bytes_per_param
from experiments.ranks.compare import flat_gradients, relative_to_largest
from experiments.ranks.launch import run_ranks
from experiments.ranks.world import World
from experiments.training.recipe import seeded_gpt, valid_tokens
from model import GPTConfig
from tokens.errors import UserError

SMALL = GPTConfig(vocab_size=512, d_model=64, n_head=2, n_layer=2, seq_len=32)
ODD = GPTConfig(vocab_size=257, d_model=66, n_head=1, n_layer=1, seq_len=16)
OPTIONS = fs.Options(seq_len=32)


def random_batches(steps: int, config: GPTConfig = SMALL, rows: int = 8) -> list:
    """随机的 token；各行的有效 token 数不同，所以各 rank 的也不同。"""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(steps):
        x = torch.randint(config.vocab_size, (rows, config.seq_len), generator=generator)
        batches.append(fs.uneven((x, x.roll(-1, 1))))
    return batches


def first_gradient(engine, batch: tuple, me: World) -> float:
    """一步的梯度与一个进程的最多差多少（相对于最大的梯度）。"""
    one = seeded_gpt(ODD if batch[0].size(1) == ODD.seq_len else SMALL, 0)
    one(*batch)[1].backward()
    engine.backward(fs.mine(batch, me), valid_tokens(batch[1]))
    return relative_to_largest(engine.whole("grad"), flat_gradients(one))


def everything(me: World) -> dict:
    """脚本的各个小节，用小词表和有效 token 数不同的数据。"""
    batches = random_batches(OPTIONS.steps)
    return {
        "equal": fs.equivalence(SMALL, batches, OPTIONS, me),
        "memory": fs.memory_rows(SMALL, batches, me),
        "traffic": fs.traffic_rows(SMALL, batches[0], me),
        "clip": fs.clip_rows(SMALL, batches[0], OPTIONS, me),
        "planted": planted(batches[0], me),
    }  # fmt: skip


class OnlyMine(fs.Unit):
    """错的：归约时不通信，只留下自己算出的梯度里自己的那一段。"""

    def reduce(self, note) -> None:
        for p, shard in zip(self.params, self.shards, strict=True):
            shard.grad = self.mine(p.grad).clone()
            p.grad = None


def planted(batch: tuple, me: World) -> dict:
    """两种错：归约时只取自己的梯度；除以各 rank 自己的 token 数再平均。"""
    original, fs.Unit = fs.Unit, OnlyMine
    try:
        local = first_gradient(fs.Zero(seeded_gpt(SMALL, 0), me, 2), batch, me)
    finally:
        fs.Unit = original
    engine = fs.Zero(seeded_gpt(SMALL, 0), me, 2)
    part = fs.mine(batch, me)
    engine.backward(part, valid_tokens(part[1]) * me.size)
    one = seeded_gpt(SMALL, 0)
    one(*batch)[1].backward()
    means = relative_to_largest(engine.whole("grad"), flat_gradients(one))
    right = first_gradient(fs.Zero(seeded_gpt(SMALL, 0), me, 2), batch, me)
    return {"local": local, "means": means, "right": right}


def three_ranks(me: World) -> dict:
    """257 个词、66 维给 3 个 rank：手写的拒绝，fully_shard 补零，仍然精确。"""
    batch = random_batches(1, ODD, rows=6)[0]
    try:
        refused = str(fs.Zero(seeded_gpt(ODD, 0), me, 3))
    except UserError as error:
        refused = str(error)
    engine = fs.Library(seeded_gpt(ODD, 0), me)
    return {"refused": refused, "library": first_gradient(engine, batch, me)}


@pytest.fixture(scope="module", params=[2, 4])
def seen(request) -> dict:
    """2 个、4 个 rank 各做一遍，rank 0 的结果。"""
    return run_ranks(everything, request.param, timeout=400)[0] | {"ranks": request.param}


# ---------------------------------------------------------------- 与一个进程相同


def test_gradients_equal_one_process(seen):
    """一步的梯度：六种切法各与一个进程差不到最大梯度的百万分之一；各 rank 的有效 token 不同。"""
    assert [row["method"] for row in seen["equal"]] == list(fs.METHODS)
    for row in seen["equal"]:
        assert row["gradient"] < 1e-6, f"{seen['ranks']} 个 rank，{row}"


def test_thirty_steps_equal_one_process(seen):
    """30 步 AdamW 之后，参数最多差不到 1e-4，而参数走了 1e-2 以上；loss 也处处相同。"""
    for row in seen["equal"]:
        assert row["param_diff"] < 1e-4 and row["loss_diff"] < 1e-4, f"{row}"
        assert row["param_moved"] > 1e-2 and row["steps"] == 30, f"比较没有意义：{row}"


def test_rows_that_do_not_divide_are_exact_or_refused():
    """257 行给 3 个 rank：手写的一句话拒绝，fully_shard 补零，梯度仍然精确。"""
    got = run_ranks(three_ranks, 3, timeout=400)[0]
    assert "(257, 66)" in got["refused"] and "3 个 rank" in got["refused"], got["refused"]
    assert got["library"] < 1e-6, f"{got}"


def test_planted_mistakes_are_seen(seen):
    """归约时只取自己的梯度，或按各 rank 自己的 token 数平均：错 5 % 以上，上面的断言会红。"""
    found = seen["planted"]
    assert found["right"] < 1e-6 < 0.05 < min(found["local"], found["means"]), f"{found}"


# ---------------------------------------------------------------- 数得清


def test_bytes_equal_the_formula(seen):
    """参数、梯度、优化器状态、缓冲区：静止与峰值都等于公式，一个字节不差。"""
    assert len(seen["memory"]) == 4 * 4 + 3
    for row in seen["memory"]:
        assert row["rest"] == row["rest_formula"], f"{row}"
        assert row["peak"] == row["peak_formula"], f"{row}"


def test_the_two_ledgers():
    """fp32 的账 4 + 4 + 8 与论文的 2 + 2 + 12 都是 16；7.5B、64 张卡得论文的四个数。"""
    psi = 7_500_000_000
    paper = [round(zero_bytes_per_param(s, 64, "paper") * psi / 1e9, 1)
             for s in ("ddp", "zero1", "zero2", "zero3")]  # fmt: skip
    assert paper == [120.0, 31.4, 16.6, 1.9], f"{paper}"
    ours = [sum(fs.at_rest(psi, 64, stage).values()) / psi for stage in range(4)]
    assert ours == [16, 8 + 8 / 64, 4 + 12 / 64, 16 / 64], f"{ours}"


def test_communication_is_two_or_three_psi(seen):
    """不切、ZeRO-1、2 是 2Ψ，ZeRO-3 是 3Ψ；每种通信的次数与字节等于公式。"""
    for row in seen["traffic"]:
        assert row["calls"] == row["calls_formula"], f"{row}"
        assert row["payload"] == row["payload_formula"], f"{row}"
    volume = {row["method"]: row["volume"] for row in seen["traffic"]}
    assert [volume[m] for m in list(fs.METHODS)[:4]] == [2, 2, 2, 3], f"{volume}"
    assert 2 < volume["fully_shard"] < 3, f"根单元少收集一次：{volume}"


def test_recomputation_keeps_only_the_inputs():
    """整层重算只留每层的输入，4·L·B·T·d 字节；多花的计算等于公式，不到三分之一。"""
    kept, again = fs.recompute_rows(layers=3, rows=2, length=32)
    assert again["kept"] == again["kept_formula"] < kept["kept"] / 5, f"{kept}\n{again}"
    for row in (kept, again):
        assert row["flops"] == row["flops_formula"], f"{row}"
    assert 1.2 < again["flops"] / kept["flops"] < 4 / 3, f"{again['flops'] / kept['flops']}"
    assert again["peak"] < kept["peak"], f"{kept}\n{again}"


def test_hidden_tokens_do_not_depend_on_the_model():
    """门槛是达到的算力 ÷ 带宽：400 Gb/s、H100 半个峰值约 9,890 个 token；此时两个时间相等。"""
    tokens = fs.hidden_tokens(0.5 * 989e12, 50e9)
    assert round(tokens) == 9890, f"{tokens}"
    for psi in (1e9, 7e10):
        assert math.isclose(6 * psi * tokens / (0.5 * 989e12), 6 * psi / 50e9)


# ---------------------------------------------------------------- 裁剪


def test_item_of_a_sharded_norm_is_too_small(seen):
    """梯度的 `.norm().item()` 只是分片的：平方和才对，方均根是 1/√W（pytorch #170862）。"""
    rows, ranks = seen["clip"], seen["ranks"]
    whole = rows[0]["embed_full"]
    assert math.isclose(math.sqrt(sum(r["embed_item"] ** 2 for r in rows)), whole, rel_tol=1e-5)
    for row in rows:
        assert 0.7 < row["ratio"] / math.sqrt(ranks) < 1.4, f"{row}"


def test_fsdp_clips_like_one_process(seen):
    """`full_tensor()` 的全局范数与一个进程的相同，裁剪之后的梯度也相同（pytorch #88621）。"""
    for row in seen["clip"]:
        assert math.isclose(row["clip_full"], row["one_process"], rel_tol=1e-4), f"{row}"
        assert row["clipped_diff"] < 1e-4, f"{row}"


def test_the_mechanism_fits_in_sixty_lines():
    """三级 ZeRO 的机制（`Unit`）不超过 60 行代码（空行与文档不算）。"""
    source = inspect.getsource(fs.Unit).split('"""')
    lines = [line for line in "".join(source[::2]).splitlines() if line.strip()]
    assert len(lines) <= 60, f"{len(lines)} 行"


# ---------------------------------------------------------------- 像读者那样


def test_without_torchrun_it_names_the_command(run_script):
    """直接用 python 启动：一句话给出正确的命令，退出码 2，没有 traceback。"""
    done = run_script("experiments/fsdp.py")
    assert done.returncode == 2, f"退出码 {done.returncode}"
    assert fs.COMMAND in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"per_rank": -1}, {"d_model": 65}, {"lr": -1.0}])
def test_wrong_options_are_refused(wrong):
    """不能用的选项在加入进程组之前就被拒绝，消息里有给的那个值。"""
    with pytest.raises(UserError, match=str(next(iter(wrong.values())))):
        fs.main(fs.Options(**wrong))


@pytest.mark.slow
def test_the_script_ends_in_the_largest_difference(run_script, tokens):
    """读者的命令：最后一张表的最后一列是与一个进程的最大差，每一行都小于 1e-4。"""
    done = run_script("experiments/fsdp.py", nproc=4, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    table = pd.read_csv(results_folder() / "fsdp_equivalence.csv")
    assert (table.param_diff < 1e-4).all() and (table.gradient < 1e-6).all(), f"{table}"
    assert float(done.stdout.splitlines()[-1].split()[-1]) < 1e-4, done.stdout
