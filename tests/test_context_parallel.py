"""`experiments/context_parallel.py` 的断言：切开的注意力等于单进程，工作量、通信、陷阱各如所说。"""

import math
from dataclasses import replace

import pytest
import torch

from experiments import context_parallel as cp
from experiments.ranks.compare import flat_gradients, relative_to_largest
from experiments.ranks.launch import run_ranks
from experiments.ranks.world import World
from experiments.training.recipe import seeded_gpt
from experiments.training.saved import saved_for_backward
from model import GPTConfig, explicit_attention
from tokens import global_batch
from tokens.errors import UserError

TINY = GPTConfig(vocab_size=64, d_model=32, n_head=4, n_layer=2, seq_len=64, attention="explicit")
FEW = cp.Options(seq_len=64, d_model=32)
DATA = torch.randint(64, (4000,), generator=torch.Generator().manual_seed(1))
ALONE = World(0, 1, torch.device("cpu"))


# ---------------------------------------------------------------- 不需要进程组的


@pytest.mark.parametrize("size", [2, 4, 8])
def test_zigzag_gives_every_rank_the_same_work(size):
    """真正需要的（q, k）对：zigzag 各 rank 相等，连续切时最后一个 rank 是第一个的近 2W−1 倍。"""
    rows = cp.work(size, 64)
    needed = {layout: [sum(r["needed"] for r in rows if (r["layout"], r["rank"]) == (layout, k))
                       for k in range(size)] for layout in ("contiguous", "zigzag")}  # fmt: skip
    assert len(set(needed["zigzag"])) == 1, f"{needed}"
    t = 64 // size
    wanted = [t * t * r + t * (t + 1) // 2 for r in range(size)]
    assert needed["contiguous"] == wanted, f"{needed['contiguous']}，手算 {wanted}"
    assert sum(needed["zigzag"]) == sum(wanted) == 64 * 65 // 2, f"{needed}"


def test_zigzag_halves_what_the_slowest_rank_computes():
    """每一圈都要等最慢的：连续切每圈都有人算整块，zigzag 除第一圈外人人半块。"""
    rows, t = cp.work(4, 64), 16
    slowest = {layout: [max(r["computed"] for r in rows if (r["layout"], r["step"]) == (layout, s))
                        for s in range(4)] for layout in ("contiguous", "zigzag")}  # fmt: skip
    assert slowest["contiguous"] == [t * t] * 4, f"{slowest}"
    assert slowest["zigzag"] == [3 * t * t // 4] + [t * t // 2] * 3, f"{slowest}"


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_every_position_has_one_owner(layout):
    """各 rank 的位置合起来是全部，互不重叠，各自升序；不能平分时拒绝。"""
    parts = [cp.positions_of(layout, r, 4, 64) for r in range(4)]
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(64)), f"{parts}"
    assert all((p.diff() > 0).all() for p in parts), f"{parts}"
    with pytest.raises(ValueError, match="30 个位置不能平分"):
        cp.positions_of(layout, 0, 4, 30)


def test_the_ring_of_one_is_attention():
    """一个 rank 的环就是注意力：结果与 q、k、v 的梯度都等于 softmax(QKᵀ)V，也过得了 gradcheck。"""
    q, k, v = torch.randn(3, 1, 2, 6, 4, dtype=torch.float64).unbind()
    how = {"me": ALONE, "places": [torch.arange(6)], "halves": 2}
    for t in (q, k, v):
        t.requires_grad_()
    ours, right = cp.ring(q, k, v, **how), explicit_attention(q, k, v)
    assert torch.allclose(ours, right, atol=1e-12), f"差 {(ours - right).abs().max()}"
    assert torch.autograd.gradcheck(lambda *a: cp.ring(*a, **how), (q, k, v))


def test_online_softmax_survives_large_scores():
    """分数大到 exp 会溢出（e⁹⁰⁰）：减去跑动的最大值之后，结果仍与 softmax 相同。"""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (30 * torch.randn(1, 1, 16, 8, generator=generator).double() for _ in range(3))
    assert (q @ k.mT).max() / math.sqrt(8) > 100, "分数不够大，看不出溢出"
    ours = cp.ring(q, k, v, me=ALONE, places=[torch.arange(16)], halves=4)
    assert torch.allclose(ours, explicit_attention(q, k, v), atol=1e-4), "溢出或跑动最大值错了"


def test_the_ring_keeps_no_matrix_of_probabilities():
    """环只为反向留 q、k、v、结果与每行一个数；写出 softmax(QKᵀ) 的要留 T² 个。"""
    T, sizes = 64, {}
    for name, core in (("环", lambda *a: cp.ring(*a, me=ALONE, places=[torch.arange(T)], halves=1)),
                       ("显式", explicit_attention)):  # fmt: skip
        q, k, v = (torch.randn(1, 2, T, 8, requires_grad=True) for _ in range(3))
        with saved_for_backward([q, k, v]) as saved:
            out = core(q, k, v)
        sizes[name] = sum(saved.values())
        del out
    assert sizes["环"] == 4 * 2 * T * (8 + 1), f"{sizes}"
    assert sizes["显式"] >= 4 * 2 * T * T, f"{sizes}"


def test_heads_that_do_not_divide_are_refused():
    """3 个头 2 个 rank：Ulysses 拒绝，说出能用的头数；环不在乎。"""
    with pytest.raises(UserError, match="3 个头不能平分给 2 个 rank.*--n-head 4"):
        cp.check_heads(3, 2)


@pytest.mark.parametrize("wrong", [{"rows": 0}, {"lr": -1.0}, {"seq_len": 16}, {"n_head": 2}])
def test_wrong_options_are_refused(wrong):
    """不能用的选项被拒绝，消息里有给的那个值。"""
    with pytest.raises(UserError, match=str(next(iter(wrong.values())))):
        cp.checked(replace(cp.Options(), **wrong), 4)


def test_without_torchrun_it_names_the_command(run_script):
    """直接用 python 启动：一句话给出正确的命令，退出码 2，没有 traceback。"""
    done = run_script("experiments/context_parallel.py")
    assert done.returncode == 2, f"退出码 {done.returncode}：{done.stderr}"
    assert cp.COMMAND in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr


# ---------------------------------------------------------------- 真的几个进程


def everything(me: World) -> dict:
    """在每个进程里把各小节跑一遍（小模型、随机数据）。"""
    batch = global_batch(DATA, 0, 2, TINY.seq_len, 0)
    seen = {
        "equal": cp.equivalence(TINY, batch, FEW, me),
        "accounting": cp.accounting(TINY, batch, FEW, me),
        "traps": cp.traps(TINY, batch, FEW, me),
        "train": cp.train(replace(TINY, n_layer=1), DATA, FEW, me, "环，zigzag"),
        "pytorch": cp.refused_by_pytorch(me),
    }
    model = cp.sharpened(TINY, 0)  # 尖锐的注意力、中间一段填充：比初始化的模型更难
    batch[1][:, 20:31] = -100
    right = cp.single(cp.sharpened(TINY, 0), batch)[1]
    split = cp.Split(model, "环，zigzag", me, TINY.seq_len)
    split.backward(batch)
    return seen | {"sharp": relative_to_largest(flat_gradients(split.model), right)}


@pytest.fixture(scope="module", params=[2, 4])
def seen(request) -> dict:
    return run_ranks(everything, request.param, timeout=240)[0] | {"p": request.param}


@pytest.mark.slow
def test_one_step_equals_one_process(seen):
    """五种切法，以及 T 除不尽的：梯度与单进程差不到最大梯度的百万分之一。"""
    assert [row["T"] for row in seen["equal"]] == [64] * 5 + [61], f"{seen['equal']}"
    for row in seen["equal"]:
        assert row["grad_diff"] < 1e-6 and row["loss_diff"] < 1e-5, f"{row}"
    assert seen["sharp"] < 3e-6, f"尖锐的注意力：{seen['sharp']}"


@pytest.mark.slow
def test_thirty_steps_equal_one_process(seen):
    """30 步 AdamW：参数与单进程差不到 1e-4，而参数走了 1e-2 以上。"""
    row = seen["train"]
    assert row["steps"] == 30 and row["param_diff"] < 1e-4 < 1e-2 < row["param_moved"], f"{row}"


@pytest.mark.slow
def test_traffic_equals_the_formula(seen):
    """每种切法一步的通信次数与字节恰好等于公式，梯度相加的恰好是一份梯度。"""
    for row in seen["accounting"]:
        for what in ("calls", "sent", "gradient"):
            assert row[what] == row[f"{what}_formula"], f"{what}：{row}"


@pytest.mark.slow
def test_the_ring_divides_the_activations_by_the_ranks(seen):
    """环的激活：各 rank 相同，正好是一个进程（同样的环）的 1/W。"""
    split = cp.Split(seeded_gpt(TINY, 0), "环，连续", ALONE, TINY.seq_len)
    batch = global_batch(DATA, 0, 2, TINY.seq_len, 0)
    with saved_for_backward([*split.model.parameters(), *split.model.buffers(), *batch]) as saved:
        loss = split.loss(batch)
    whole = sum(saved.values())
    del loss
    got = [r["activation"] for r in seen["accounting"] if r["way"].startswith("环")]
    assert len(set(got)) == 1, f"{got}"
    # 与位置无关的只有几个标量（有效 token 数之类）
    assert got[0] == pytest.approx(whole / seen["p"], abs=64), f"{got[0]} × {seen['p']}，{whole}"


@pytest.mark.slow
def test_every_trap_is_wrong_and_the_right_way_is_not(seen):
    """位置重数、切开之后才取目标、先平均再平均：梯度都错 3 % 以上；对的差不到 1e-5。"""
    for row in seen["traps"]:
        if row["case"].startswith("正确"):
            assert row["error"] < 1e-5, f"{row}"
        else:
            assert row["error"] > 0.03, f"{row}"


@pytest.mark.slow
def test_pytorchs_context_parallel_refuses_cpu_tensors_that_want_gradients(seen):
    """PyTorch 的 context_parallel 在 CPU 上不收要梯度的张量；哪天收了，这一页就该改。"""
    assert "require" in seen["pytorch"], f"它说：{seen['pytorch']!r}"
