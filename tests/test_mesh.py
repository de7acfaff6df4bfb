"""`experiments/mesh.py` 的断言：几个轴合起来仍与单进程相同，字节数等于公式，错误用法各错多少。"""

from dataclasses import replace

import pandas as pd
import pytest
import torch

from experiments import mesh as m
from experiments.lab.results import results_folder
from experiments.plan.architecture import PRESETS
from experiments.plan.step_time import H100, Layout, axis_costs
from experiments.ranks.launch import run_ranks
from model import GPTConfig
from tokens.errors import UserError

TINY = GPTConfig(vocab_size=64, d_model=32, n_head=4, n_layer=3, seq_len=16)
FEW = m.Options(steps=3, rows=8, vocab_size=64, d_model=32, n_layer=3, seq_len=16)
DATA = torch.arange(4000) * 7919 % 61


# ---------------------------------------------------------------- 不需要进程组的


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_cut_and_join_are_inverse(parts):
    """每个权重切成几份再拼回来，一位不差；切开的几种加起来恰好是原来的大小。"""
    model = m.seeded_gpt(TINY, 0)
    for name, weight in model.named_parameters():
        pieces = [m.cut(name, weight, i, parts) for i in range(parts)]
        assert torch.equal(m.join(name, pieces), weight), name
        if "attn." in name or "mlp." in name:
            assert sum(p.numel() for p in pieces) == weight.numel(), name


def test_qkv_is_cut_by_heads_not_by_rows():
    """融合的 qkv 按行等分，第一份里没有 V：那是另一个模型。"""
    weight = torch.arange(3 * 32).float()[:, None].expand(-1, 32).contiguous()
    half = m.cut("attn.qkv.weight", weight, 0, 2)[:, 0]
    rows = weight.chunk(2)[0][:, 0]
    assert (half >= 64).sum() == 16 and (rows >= 64).sum() == 0, (half, rows)


@pytest.mark.parametrize(("change", "said"), [
    ({"rows": 6}, "--rows 6"), ({"n_head": 3}, "--n-head 3"), ({"n_layer": 1}, "--n-layer 1"),
    ({"micro_batches": 0}, "--micro-batches 0"), ({"lr": -1.0}, "--lr"),
    ({"d_model": 30}, "d_model"),
])
def test_what_cannot_be_cut_is_refused(change, said):
    """头数、层数、行数切不开：一句话说给了什么、该是什么。"""
    with pytest.raises(UserError, match=said):
        m.checked(replace(m.Options(), **change), 8)


@pytest.mark.parametrize("nproc", [None, 2])
def test_started_the_wrong_way_names_the_command(run_script, nproc):
    """不用 torchrun，或进程数不对：一句话给出正确的命令，没有 traceback。"""
    done = run_script("experiments/mesh.py", nproc=nproc)
    assert done.returncode == (2 if nproc is None else 1), done.stderr[-500:]
    assert m.COMMAND in done.stderr and "Traceback (most recent" not in done.stdout


def test_tensor_parallel_is_the_axis_that_needs_nvlink():
    """70B、TP 8 × PP 4 × DP 16：TP 每步的字节是另外两个轴之和的 6 倍以上，走网卡要慢几倍。"""
    rows = {row.axis: row for row in axis_costs(
        PRESETS["llama3-70b"], Layout(8, 4, 16, virtual=2, sharding="step"), H100, 2048, 8192
    )}  # fmt: skip
    assert rows["TP"].volume > 6 * (rows["PP"].volume + rows["DP"].volume), rows
    assert rows["TP"].across > 5 * rows["TP"].inside
    assert rows["DP"].across < 0.2 * rows["TP"].inside, rows


# ---------------------------------------------------------------- 几个进程


def train(world, shape: m.Shape, how: str, config: GPTConfig, options: m.Options) -> dict:
    """一个网格上训练几步，与单进程比。"""
    right = m.reference(config, DATA, options)
    got = m.train_on_mesh(config, DATA, options, world, shape, how)
    return {
        "grad": m.gap(got.gradients, right.gradients) / m.largest(right.gradients),
        "param": m.gap(got.parameters, right.parameters),
        "names": set(right.gradients) - set(got.gradients), "traffic": got.traffic,
    }


GRIDS = (
    (m.Shape(2, 1, 2), "手写"), (m.Shape(2, 2, 1), "手写"), (m.Shape(1, 2, 2), "手写"),
    (m.Shape(1, 1, 4), "手写"), (m.Shape(2, 1, 2), "库"), (m.Shape(2, 2, 1), "库"),
)
PLANTED = ("no backward sum", "no forward sum", "no tied sum", "contiguous qkv")


def contiguous(name: str, weight: torch.Tensor, part: int, parts: int) -> torch.Tensor:
    """错误的切法：融合的 qkv 直接按行等分。"""
    return weight.chunk(parts)[part] if "qkv" in name else right_cut(name, weight, part, parts)


right_cut = m.cut


def planted(world, what: str) -> float:
    """种下一个错误，返回梯度的误差；做完还原。"""
    with pytest.MonkeyPatch.context() as patch:
        if what == "no backward sum":
            patch.setattr(m.Enter, "backward", staticmethod(lambda ctx, grad: (grad, None)))
        elif what == "no forward sum":
            patch.setattr(m.Leave, "forward", staticmethod(lambda ctx, x, mesh: x.clone()))
        elif what == "no tied sum":
            patch.setattr(m, "tie", lambda stage, mesh: None)
        elif what == "contiguous qkv":
            patch.setattr(m, "cut", contiguous)
        return train(world, m.Shape(1, 2, 2), "手写", TINY, FEW)["grad"]


def four(world) -> dict:
    """四个进程里做的全部：每种网格、种下的错误、错的轴（起一次进程要好几秒，所以合在一起）。"""
    small, config = replace(FEW, n_layer=2), replace(TINY, n_layer=2)
    return {
        "grids": [train(world, shape, how, TINY, FEW) for shape, how in GRIDS],
        "planted": {what: planted(world, what) for what in PLANTED},
        "mistakes": m.mistakes(config, DATA, small, world),
        "norms": m.norms(config, DATA, small, world),
    }


@pytest.fixture(scope="module")
def answers() -> list[dict]:
    """四个进程各自的答案。"""
    return run_ranks(four, 4, timeout=300)


@pytest.mark.parametrize("number", range(len(GRIDS)), ids=lambda i: f"{GRIDS[i][0]} {GRIDS[i][1]}")
def test_two_axes_equal_one_process(answers, number):
    """四个进程的每种网格（三层分给两段，不整除）：梯度差到最大梯度的 10⁻⁶ 以内，训练后仍相同。"""
    for answer in answers:
        got = answer["grids"][number]
        assert not got["names"], got["names"]
        assert got["grad"] < 1e-6 and got["param"] < 1e-5, got


def test_bytes_of_every_axis_equal_the_formula(answers):
    """第 0 号进程一步里每个轴的次数与字节：数到的就是公式给的，一个不差。"""
    for (shape, how), got in zip(GRIDS, answers[0]["grids"], strict=True):
        if how == "手写":
            assert got["traffic"] == m.expected_traffic(TINY, FEW, shape), (str(shape), got)


@pytest.mark.parametrize("what", PLANTED)
def test_planted_mistakes_are_seen(answers, what):
    """漏掉反向求和、前向求和、词嵌入两份相加，或把 qkv 按行等分：误差都在千分之一以上。"""
    error = answers[0]["planted"][what]
    assert error > 1e-3, f"{what}：{error:.1e}"


def test_the_wrong_axis_is_wrong(answers):
    """按 rank 分数据、在所有进程上平均：都错；梯度范数只有「切开的相加、没切的数一份」对。"""
    right, rows, world = (row["grad_error"] for row in answers[0]["mistakes"])
    assert right < 1e-6 and rows > 0.05 and world > 0.05, answers[0]["mistakes"]
    norms = {row["rule"]: (row["smallest"], row["largest"]) for row in answers[0]["norms"]}
    assert norms[m.NORMS["right"]] == pytest.approx((1, 1), abs=1e-5), norms
    assert norms[m.NORMS["local"]][0] < 0.5 and norms[m.NORMS["sum"]][0] > 1.03, norms


def three_axes(world) -> list[dict]:
    return [train(world, m.Shape(2, 2, 2), how, TINY, FEW) for how in ("手写", "库")]


@pytest.mark.slow
def test_three_axes_equal_one_process():
    """DP 2 × PP 2 × TP 2，八个进程：手写与库都与单进程相同，每个 rank 拼出的是同一个答案。"""
    for pair in run_ranks(three_axes, 8, timeout=300):
        for answer in pair:
            assert answer["grad"] < 1e-6 and answer["param"] < 1e-5, answer


# ---------------------------------------------------------------- 像读者那样


@pytest.fixture(scope="module")
def tables(run_script) -> dict[str, pd.DataFrame]:
    """八个进程、默认选项运行一遍，写下的表。"""
    done = run_script("experiments/mesh.py", nproc=8, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    names = ("places", "equality", "traffic", "mistakes", "norms")
    return {name: pd.read_csv(results_folder() / f"mesh_{name}.csv") for name in names}


@pytest.mark.slow
def test_as_a_reader_it_equals_one_process(tables):
    """默认选项、八个进程、30 步 AdamW：五种网格的梯度差 < 10⁻⁶，参数差 < 10⁻⁴，两份词嵌入相同。"""
    rows = tables["equality"]
    assert len(rows) == 5 and set(rows.how) == {"手写", "库"}
    assert rows.grad_error.max() < 1e-6 and rows.param_diff.max() < 1e-4, rows.to_string()
    assert rows.tied_gap.max() == 0


@pytest.mark.slow
def test_as_a_reader_the_counts_equal_the_formula(tables):
    """表里数到的次数与字节，每一行都等于公式；TP 的次数是 4 × 本段的层数 × micro-batch 数。"""
    rows = tables["traffic"]
    assert (rows.calls == rows.calls_formula).all() and (rows.bytes == rows.bytes_formula).all()
    assert set(rows[rows.axis.str.startswith("TP")].calls) == {8}


@pytest.mark.slow
def test_as_a_reader_tensor_parallel_peers_are_neighbours(tables):
    """TP 的同伴编号相邻，DP 的同伴隔得最远：最里面的轴留在一台机器里。"""
    rows = tables["places"]
    gaps = {axis: {int(b) - int(a) for a, b in rows[f"{axis}_group"].str.split()}
            for axis in m.AXES}  # fmt: skip
    assert gaps == {"tp": {1}, "pp": {2}, "dp": {4}}, gaps
