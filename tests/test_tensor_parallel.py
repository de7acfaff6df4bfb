"""`experiments/tensor_parallel.py` 的断言：与一个进程相同，通信与内存等于公式，错法各错多少。"""

import inspect

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from experiments import tensor_parallel as tp
from experiments.lab.results import results_folder
from experiments.ranks.compare import flat_gradients, relative_to_largest
from experiments.ranks.launch import run_ranks
from experiments.ranks.world import World
from experiments.training.recipe import seeded_gpt
from model import IGNORE_INDEX, GPTConfig
from tokens.errors import UserError

SMALL = GPTConfig(vocab_size=512, d_model=64, n_head=4, n_layer=2, seq_len=32)
OPTIONS = tp.Options(batch=4, seq_len=32)


def random_batches(steps: int, config: GPTConfig = SMALL, rows: int = 4) -> list:
    """随机的 token；各序列的有效长度不同，其余目标是 −100。"""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(steps):
        x = torch.randint(config.vocab_size, (rows, config.seq_len), generator=generator)
        y = x.roll(-1, 1)
        for row, length in enumerate(torch.randint(1, config.seq_len, (rows,),
                                                   generator=generator)):  # fmt: skip
            y[row, length:] = IGNORE_INDEX
        batches.append((x, y))
    return batches


def gap(model: nn.Module, config: GPTConfig, batch: tuple, me: World) -> float:
    """切好的模型的梯度与一个进程的最多差多少（相对于最大的梯度）。"""
    one = seeded_gpt(config, 0)
    tp.backward(one, batch)
    tp.backward(model, batch)
    return relative_to_largest(tp.whole_vector(model, me, "grad"), flat_gradients(one))


# ---------------------------------------------------------------- 每个进程里做的


def everything(me: World) -> dict:
    """脚本的各个小节，用小词表和有效 token 数不同的数据。"""
    batches = random_batches(OPTIONS.steps)
    rows, trained = tp.equivalence(SMALL, batches, OPTIONS, me)
    return {
        "equal": rows, "traffic": tp.traffic_rows(SMALL, batches[0], OPTIONS, me),
        "memory": tp.memory_rows(SMALL, batches[0], OPTIONS, me),
        "mistakes": tp.mistake_rows(SMALL, trained, batches[0], me),
    }  # fmt: skip


def odd_cases(me: World) -> dict:
    """除不尽的：3 个头、257 个词分给 2 个 rank；分不了的，以及植入的错误。"""
    seen = {}
    uneven = GPTConfig(vocab_size=257, d_model=96, n_head=3, n_layer=1, seq_len=16)
    batch = random_batches(1, uneven)[0]
    for name, edges in (("tensor", tp.TENSOR), ("sequence", tp.SEQUENCE)):
        seen[name] = gap(tp.ParallelGPT(seeded_gpt(uneven, 0), me, edges), uneven, batch, me)
    one_head = GPTConfig(vocab_size=64, d_model=32, n_head=1, n_layer=1, seq_len=15)
    for name, work in (
        ("library", lambda: tp.by_library(seeded_gpt(uneven, 0), me)),
        ("heads", lambda: tp.ParallelGPT(seeded_gpt(one_head, 0), me)),
        ("length", lambda: tp.ParallelGPT(seeded_gpt(uneven, 0), me, tp.SEQUENCE)(
            *(t[:, :15] for t in batch))),
    ):  # fmt: skip
        try:
            seen[name] = str(work())
        except UserError as error:
            seen[name] = f"拒绝：{error}"
    seen["loss"] = vocabulary_loss(me)
    seen["planted"] = planted(me)
    return seen


def vocabulary_loss(me: World) -> dict:
    """切开词表的交叉熵与 `F.cross_entropy` 比：大到会溢出的 logits、−100 的行。"""
    torch.manual_seed(0)
    whole = (torch.randn(6, 10) * torch.tensor([1, 1, 1, 1, 1e3, 1e4])[:, None]).requires_grad_()
    target = torch.tensor([0, 4, 5, IGNORE_INDEX, 9, 3])
    right = F.cross_entropy(whole, target, reduction="none", ignore_index=IGNORE_INDEX)
    valid = target != IGNORE_INDEX
    slope = torch.autograd.grad(right[valid].sum(), whole)[0]
    part = whole.detach().tensor_split(me.size, dim=1)[me.rank].clone().requires_grad_()
    losses = tp.VocabParallelLoss.apply(part, target, (0, 5)[me.rank])
    losses[valid].sum().backward()
    mine = slope.tensor_split(me.size, dim=1)[me.rank]
    return {"loss": (losses - right)[valid].abs().max().item(), "largest": right.max().item(),
            "gradient": (part.grad - mine).abs().max().item(),
            "ignored": part.grad[~valid].abs().max().item()}  # fmt: skip


def planted(me: World) -> dict:
    """去掉一个算子里的通信，梯度还对不对；只影响这个进程，量完就还原。"""
    batch, found = random_batches(1)[0], {}
    for operator, method, replacement, edges in (
        (tp.CopyIn, "backward", lambda ctx, grad: grad, tp.TENSOR),
        (tp.SumOut, "forward", lambda ctx, part: part.clone(), tp.TENSOR),
        (tp.GatherSequence, "backward", lambda ctx, grad: me.size * grad.chunk(me.size, 1)[me.rank],
         tp.SEQUENCE),
    ):  # fmt: skip
        original = inspect.getattr_static(operator, method)
        setattr(operator, method, staticmethod(replacement))
        model = tp.ParallelGPT(seeded_gpt(SMALL, 0), me, edges)
        found[f"{operator.__name__}.{method}"] = gap(model, SMALL, batch, me)
        setattr(operator, method, original)
    model = tp.ParallelGPT(seeded_gpt(SMALL, 0), me)
    return found | {"还原之后": gap(model, SMALL, batch, me)}


@pytest.fixture(scope="module", params=[2, 4])
def seen(request) -> dict:
    """2 个、4 个 rank 各做一遍，rank 0 的结果。"""
    return run_ranks(everything, request.param, timeout=400)[0] | {"ranks": request.param}


@pytest.fixture(scope="module")
def odd() -> dict:
    return run_ranks(odd_cases, 2, timeout=400)[0]


# ---------------------------------------------------------------- 与一个进程相同


def test_gradients_equal_one_process(seen):
    """一步的梯度：手写的与库的四种写法，各与一个进程差不到最大梯度的百万分之一。"""
    for row in seen["equal"]:
        assert row["gradient"] < 1e-6, f"{seen['ranks']} 个 rank，{row}"


def test_thirty_steps_equal_one_process(seen):
    """30 步 AdamW 之后，参数最多差不到 1e-4，而参数走了 1e-2 以上；loss 也处处相同。"""
    assert len(seen["equal"]) == 1 + len(tp.METHODS)
    for row in seen["equal"]:
        assert row["param_diff"] < 1e-4 and row["loss_diff"] < 1e-4, f"{row}"
        assert row["param_moved"] > 1e-2 and row["steps"] == 30, f"比较没有意义：{row}"


def test_heads_that_do_not_divide_are_exact_or_refused(odd):
    """3 个头、257 个词给 2 个 rank：手写的一样精确；库、头不够、T 除不尽：一句话拒绝。"""
    assert max(odd["tensor"], odd["sequence"]) < 1e-6, f"{odd}"
    assert "3 个头不能平分给 2 个 rank" in odd["library"], odd["library"]
    assert "1 个头分不给 2 个 rank" in odd["heads"], odd["heads"]
    assert "15 个位置不能平分给 2 个 rank" in odd["length"], odd["length"]


def test_the_loss_never_gathers_the_logits(odd):
    """切开词表的交叉熵等于 `F.cross_entropy`，logits 大到 1e4 也不溢出，−100 的行梯度是 0。"""
    got = odd["loss"]
    assert got["largest"] > 1e3, "例子里没有会溢出的行"
    assert got["loss"] < 1e-3 and got["gradient"] < 1e-6 and got["ignored"] == 0, f"{got}"


# ---------------------------------------------------------------- 错的写法


def test_removing_a_communication_breaks_the_gradient(odd):
    """去掉 f 反向的、g 前向的、f̄ 反向的求和：梯度错到 1e-2 以上，正是上面的断言会红的错误。"""
    found = odd["planted"]
    assert found.pop("还原之后") < 1e-6, f"{found}"
    assert len(found) == 3 and min(found.values()) > 1e-2, f"{found}"


def test_wrong_ways_are_wrong(seen):
    """没有 f、g 反向也求和：loss 一点不差，梯度错 5 % 以上；忘了范数的，错在各 rank 不一致。"""
    rows = {row["what"]: row for row in seen["mistakes"]}
    assert rows["对的"]["gradient_error"] < 1e-5, f"{rows['对的']}"
    for name, least in (("进去时没有 f", 0.05), ("g 的反向也求和", 0.05),
                        ("序列并行忘了范数的梯度", 1e-3)):  # fmt: skip
        row = rows[name]
        assert row["loss_diff"] < 1e-4 and row["gradient_error"] > least, f"{row}"
    for name in ("进去时没有 f", "序列并行忘了范数的梯度"):
        assert rows[name]["norms_disagree"] > 1e-4, f"副本应当不一致：{rows[name]}"
    assert rows["对的"]["norms_disagree"] == 0.0, f"{rows['对的']}"


def test_a_contiguous_cut_of_qkv_is_another_model(seen):
    """融合的 qkv 连着切：不报错，但 loss 与梯度都变了，是另一个模型。"""
    row = next(r for r in seen["mistakes"] if r["what"] == "qkv 连着切")
    assert row["loss_diff"] > 1e-4 and row["gradient_error"] > 0.1, f"{row}"


def test_cut_takes_the_same_heads_from_q_k_and_v():
    """2 个头、2 个 rank：rank 0 拿 q0 k0 v0；连着切拿到的是 q0 q1 k0。拼回来都是原样。"""
    rows = torch.arange(6)[:, None]  # 次序 q0 q1 k0 k1 v0 v1，每个头一行
    by_heads = tp.cut(rows, 0, 2, parts=3, units=2)
    assert [piece.flatten().tolist() for piece in by_heads] == [[0, 2, 4], [1, 3, 5]]
    contiguous = tp.cut(rows, 0, 2, units=2)
    assert contiguous[0].flatten().tolist() == [0, 1, 2], f"{contiguous}"
    assert torch.equal(tp.join(by_heads, 0, parts=3), rows)
    uneven = tp.cut(torch.arange(30).view(2, 15), 1, 2, parts=3, units=5)
    assert [piece.size(1) for piece in uneven] == [9, 6]
    assert torch.equal(tp.join(uneven, 1, parts=3), torch.arange(30).view(2, 15))


# ---------------------------------------------------------------- 数得清


def test_communication_equals_the_formula(seen):
    """每种写法的每种通信：次数与字节等于公式；序列并行发出的字节只多出范数的梯度。"""
    for row in seen["traffic"]:
        assert row["calls"] == row["calls_formula"], f"{row}"
        assert row["payload"] == row["payload_formula"], f"{row}"
    rows = [row for row in seen["traffic"] if row["method"].startswith("手写")]
    assert len(rows) == 4, f"{rows}"
    sent = {sequence: sum(r["sent"] for r in rows if ("序列" in r["method"]) is sequence)
            for sequence in (False, True)}  # fmt: skip
    gains = 4 * (2 * SMALL.n_layer + 1) * SMALL.d_model
    extra = 2 * (seen["ranks"] - 1) * gains // seen["ranks"]
    assert sent[True] - sent[False] == extra, f"{sent}，应多 {extra}"


def test_one_all_reduce_forward_and_one_backward(seen):
    """每个区域前向一次、反向一次：2 层是 2·2 + 1 个区域，加交叉熵的 2 次，共 12 次。"""
    got = {r["method"]: r["calls"] for r in seen["traffic"] if r["kind"] == "all_reduce"}
    assert got["手写：张量并行"] == 2 * (2 * 2 + 1) + 2 == 12, f"{got}"
    assert got["parallelize_module"] == 13, f"库的交叉熵分三次求和：{got}"
    assert got["parallelize_module：只写矩阵"] == 15, f"gate 与 up 反向各求和一次：{got}"


def test_memory_equals_the_formula(seen):
    """参数的字节等于公式；张量并行不省范数的激活，序列并行正好省成 1/W。"""
    one, tensor, sequence = seen["memory"]
    for row in seen["memory"]:
        assert row["params"] == row["params_formula"], f"{row}"
    assert tensor["norms_kept"] == one["norms_kept"], f"{tensor}"
    assert sequence["norms_kept"] * seen["ranks"] == one["norms_kept"], f"{sequence}"
    assert sequence["total_kept"] < tensor["total_kept"] < one["total_kept"], f"{seen['memory']}"


def test_the_mechanism_fits_in_sixty_lines():
    """四个共轭算子连同区域，一共不超过 60 行代码（空行与文档不算）。"""
    source = "".join(inspect.getsource(part) for part in (
        tp.CopyIn, tp.SumOut, tp.GatherSequence, tp.ScatterSequence, tp.all_gather,
        tp.reduce_scatter, tp.Edges, tp.Region))  # fmt: skip
    lines = [line for line in source.splitlines() if line.strip() and '"""' not in line]
    assert len(lines) <= 60, f"{len(lines)} 行"


# ---------------------------------------------------------------- 像读者那样


def test_without_torchrun_it_names_the_command(run_script):
    """直接用 python 启动：一句话给出正确的命令，退出码 2，没有 traceback。"""
    done = run_script("experiments/tensor_parallel.py")
    assert done.returncode == 2, f"退出码 {done.returncode}"
    assert tp.COMMAND in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"batch": -1}, {"d_model": 65}, {"lr": -1.0}])
def test_wrong_options_are_refused(wrong):
    """不能用的选项在加入进程组之前就被拒绝，消息里有给的那个值。"""
    with pytest.raises(UserError, match=str(next(iter(wrong.values())))):
        tp.main(tp.Options(**wrong))


@pytest.mark.slow
def test_the_script_ends_in_the_largest_difference(run_script, tokens):
    """读者的命令：最后一张表的最后一列是与一个进程的最大差，每一行都小于 1e-4。"""
    done = run_script("experiments/tensor_parallel.py", nproc=4, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    table = pd.read_csv(results_folder() / "tensor_parallel_equivalence.csv")
    assert (table.param_diff < 1e-4).all() and (table.gradient < 1e-6).all(), f"{table}"
    header, last = done.stdout.splitlines()[-6], done.stdout.splitlines()[-1]
    assert header.split()[-1] == "param_diff" and float(last.split()[-1]) < 1e-4, done.stdout
