"""`experiments/expert_parallel.py` 的断言：与单进程相同，通信等于公式，错误写法各错多少。"""

from dataclasses import replace

import pytest
import torch

from experiments import expert_parallel as ep
from experiments.ranks.launch import run_ranks
from experiments.ranks.world import World
from experiments.training.moe import Mixture, active_parameters, moe_gpt, moe_layers
from model import GPTConfig
from tokens import global_batch
from tokens.errors import UserError

TINY = GPTConfig(vocab_size=128, d_model=32, n_head=1, n_layer=2, seq_len=16)
MIXTURE = Mixture(experts=8, top_k=2, width=16)
MIXES = {"手写": ep.dispatch_and_combine, "PyTorch 的": ep.with_library}


def batches(steps: int) -> list:
    data = torch.randint(128, (4000,), generator=torch.Generator().manual_seed(1))
    return [ep.unequal(global_batch(data, s, 8, 16, 0)) for s in range(steps)]


def empty_expert(me: World) -> tuple[float, int]:
    """只有两个位置、8 个专家：必有专家一个 token 也没有；返回梯度的差和最少的 token 数。"""
    x = torch.tensor([[3], [5], [9], [7]][: me.size])
    [row] = ep.equivalence(TINY, MIXTURE, [(x, x)], 1e-3, 0, me,
                           {"手写": ep.dispatch_and_combine}) or [{}]  # fmt: skip
    return row.get("grad_diff", 0.0), row.get("fewest_tokens", 0)


def everything(me: World) -> dict:
    """每个进程里量一遍。"""
    return {
        "equal": ep.equivalence(TINY, MIXTURE, batches(30), 3e-3, 0, me, MIXES),
        "top1": ep.equivalence(TINY, replace(MIXTURE, top_k=1), batches(1), 3e-3, 0, me, MIXES),
        "empty": empty_expert(me),
        "traffic": {how: ep.communication(TINY, MIXTURE, batches(1)[0], 0, me, mix)
                    for how, mix in MIXES.items()},
        "wrong": {r["plan"]: r for r in ep.wrong_ways(TINY, MIXTURE, batches(1)[0], 0, me)},
    }  # fmt: skip


@pytest.fixture(scope="module", params=[2, 4])
def seen(request) -> dict:
    return run_ranks(everything, request.param)[0]


@pytest.mark.slow
def test_experts_on_ranks_equal_all_experts_in_one_process(seen):
    """2、4 个进程，有效 token 不等：梯度差不到最大的 1e-6，30 步参数差不到 1e-4。"""
    for row in seen["equal"]:
        assert row["grad_diff"] < 1e-6 and row["param_diff"] < 1e-4, f"{row}"
        assert row["param_moved"] > 1e-2, f"参数没怎么动，比较没有意义：{row}"
        assert row["most_tokens"] > row["fewest_tokens"], f"各专家恰好一样多：{row}"


@pytest.mark.slow
def test_top_1_is_equal_too(seen):
    """k = 1 的门不归一，梯度同样相等。"""
    assert all(row["grad_diff"] < 1e-6 for row in seen["top1"]), f"{seen['top1']}"


@pytest.mark.slow
def test_an_expert_without_tokens_is_exact(seen):
    """有的专家一个 token 也没有分到：照样相等，它的梯度是 0。"""
    diff, fewest = seen["empty"]
    assert fewest == 0 and diff < 1e-6, f"最少 {fewest} 个 token，梯度差 {diff}"


@pytest.mark.slow
def test_traffic_equals_the_formula(seen):
    """每个 rank 的 all-to-all 与 all-reduce，次数和字节都恰等于公式，手写与库都是。"""
    for how, rows in seen["traffic"].items():
        for row in rows:
            assert row["calls"] == row["calls_formula"], f"{how}：{row}"
            assert row["bytes"] == row["bytes_formula"], f"{how}：{row}"


@pytest.mark.slow
def test_wrong_ways_are_wrong(seen):
    """四种错误写法各错到该有的量级；正确的那一行不到 1e-6；门断了，路由器的梯度恰是 0。"""
    wrong = dict(seen["wrong"])
    assert wrong.pop("正确")["error"] < 1e-6, f"{seen['wrong']}"
    # 下限约是量到的一半：0.81、0.010、0.044、0.00092（这么小的模型，路由器只占梯度的一点）
    least = {"共享参数的梯度没有 all-reduce": 0.4, "专家的梯度又除以 rank 数": 5e-3,
             "合并的次序错了": 2e-2, "门不带梯度": 4e-4}  # fmt: skip
    assert wrong.keys() == least.keys(), f"{wrong}"
    for plan, bound in least.items():
        assert wrong[plan]["error"] > bound, f"{wrong[plan]}"
    assert wrong["门不带梯度"]["router"] == 0.0, f"{wrong}"


def test_indivisible_experts_are_refused():
    """专家数除不尽进程数：一句话，带着两个数。"""
    with pytest.raises(UserError, match="6 个专家不能平分给 4 个进程"):
        ep.held(6, 0, 4)
    with pytest.raises(UserError, match="top_k"):
        Mixture(experts=2, top_k=3)


def test_total_and_active_parameters():
    """8 个专家走 2 个：多出来的恰是每层 6 个专家。"""
    model = moe_gpt(TINY, MIXTURE, 0)
    assert model.num_params() - active_parameters(model) == 2 * 6 * 3 * 32 * 16


def test_renormalised_single_gate_teaches_the_router_nothing():
    """k = 1 时把门归一它恒为 1，路由器的梯度是 0；我们用 p，梯度不是 0。"""
    model = moe_gpt(TINY, Mixture(8, 1, 16, 0.0), 0)
    x, y = batches(1)[0]
    model(x, y)[1].backward()
    assert all(m.router.weight.grad.abs().max() > 0 for m in moe_layers(model))
    moe, flat = next(moe_layers(model)), torch.randn(5, 32)
    moe.router.weight.grad = None
    gates, chosen, _ = moe.route(flat)
    moe.mix(moe, flat, gates / gates.sum(-1, keepdim=True), chosen).square().sum().backward()
    assert moe.router.weight.grad.abs().max() < 1e-9, f"{moe.router.weight.grad.abs().max()}"


def test_without_torchrun_it_names_the_command(run_script):
    """直接用 python 启动：一句话给出正确的命令，退出码 2。"""
    done = run_script("experiments/expert_parallel.py")
    assert done.returncode == 2 and ep.COMMAND in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
