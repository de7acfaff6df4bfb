"""`experiments/expert_parallel.py` 的断言：与单进程相同，数到的等于公式，错误写法各错多少。"""

import math
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
FEW = ep.Options(lr=3e-3)
DATA = torch.randint(128, (4000,), generator=torch.Generator().manual_seed(1))


def batches(steps: int) -> list:
    return [ep.unequal(global_batch(DATA, s, 8, 16, 0)) for s in range(steps)]


# ---------------------------------------------------------------- 不需要进程组的


def test_indivisible_experts_are_refused():
    """专家数除不尽进程数、k 比专家多：一句话，带着两个数。"""
    with pytest.raises(UserError, match="6 个专家不能平分给 4 个进程"):
        ep.held(6, 0, 4)
    with pytest.raises(UserError, match="top_k"):
        Mixture(experts=2, top_k=3)


@pytest.mark.parametrize("wrong", [{"rows": 6}, {"lr": -1.0}, {"steps": 0}, {"experts": 6}])
def test_wrong_options_are_refused(wrong):
    """不能用的选项被拒绝，消息里有给的那个值。"""
    with pytest.raises(UserError, match=str(next(iter(wrong.values())))):
        ep.checked(replace(ep.Options(), **wrong), 4)


def test_total_and_active_parameters():
    """8 个专家走 2 个：闲着的恰是每层 6 个专家。"""
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


def test_a_tie_is_a_cliff():
    """两个专家的概率几乎相等：路由器动 1e-7，输出就跳；照抄原来的选择，输出只动 1e-7。"""
    moe = next(moe_layers(moe_gpt(TINY, Mixture(8, 1, 16, 0.0), 0)))
    x = torch.nn.functional.normalize(torch.ones(1, 32))
    with torch.no_grad():
        moe.router.weight.zero_()[:2] = x  # 专家 0 与 1 恰好并列，topk 取前一个
        before = moe(x)
        chosen = moe.chosen
        moe.router.weight[1 - chosen.item()] += 1e-7 * x[0]
        jumped = (moe(x) - before).abs().max().item()
        assert not torch.equal(moe.chosen, chosen), "没有换专家"
        moe.replay = chosen
        stayed = (moe(x) - before).abs().max().item()
    scale = before.abs().max().item()
    assert jumped > 0.1 * scale and stayed < 1e-5 * scale, (jumped, stayed, scale)


def test_the_gap_is_between_the_last_chosen_and_the_first_not():
    """概率 0.4、0.3、0.2、0.1，k = 2：差 0.1；全选时没有第 k+1 名，差是无穷。"""
    p = torch.tensor([[0.3, 0.1, 0.4, 0.2]])
    assert ep.runner_up_gap(p, 2).item() == pytest.approx(0.1)
    assert ep.runner_up_gap(p, 4).item() == math.inf


def test_the_queue_is_first_come_first_served():
    """手算：份依次要专家 0、1、0、0、1，排在第 0、0、1、2、1 个。"""
    chosen = torch.tensor([[0], [1], [0], [0], [1]])
    assert ep.place_in_queue(chosen, 3).flatten().tolist() == [0, 0, 1, 2, 1]
    assert ep.slots_per_expert(1.25, 64, Mixture(8, 2, 16), 4) == 5  # 1.25 × 64 × 2 ÷ 32


def test_without_torchrun_it_names_the_command(run_script):
    """直接用 python 启动：一句话给出正确的命令，退出码 2。"""
    done = run_script("experiments/expert_parallel.py")
    assert done.returncode == 2 and ep.COMMAND in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


# ---------------------------------------------------------------- 真的几个进程


def one_step(me: World, mixture: Mixture, batch, way: str = "手写") -> dict:
    """一步 fp32，与单进程比；其余的 rank 得到空字典。"""
    rows = ep.follow(TINY, mixture, [batch], 3e-3, 0, me, "fp32", (way,))
    return rows[0] if rows else {}


def starved(me: World) -> tuple[dict, int]:
    """只有两个位置、8 个专家：必有专家一个 token 也没有；返回那一步与最少的 token 数。"""
    x = torch.tensor([[3], [5], [9], [7]][: me.size])
    model = moe_gpt(TINY, MIXTURE, 0)
    model(x)
    return one_step(me, MIXTURE, (x, x)), min(int(m.counts.min()) for m in moe_layers(model))


def everything(me: World) -> dict:
    """每个进程里量一遍。"""
    batch, uneven = batches(1)[0], global_batch(DATA, 0, 5, 16, 0)  # 5 行：各进程差一行
    ways = ("手写", "手写，照抄路由")
    return {
        "fp64": ep.follow(TINY, MIXTURE, batches(30), 3e-3, 0, me, "fp64", ("手写", "PyTorch 的")),
        "fp32": ep.follow(TINY, MIXTURE, batches(30), 3e-3, 0, me, "fp32", ways),
        "steps": {
            "PyTorch 的": one_step(me, MIXTURE, batch, "PyTorch 的"),
            "k = 1": one_step(me, replace(MIXTURE, top_k=1), batch),
            "k = E": one_step(me, replace(MIXTURE, top_k=8), batch),
            "行数不等": one_step(me, MIXTURE, uneven),
        },
        "starved": starved(me),
        "memory": ep.memory(TINY, MIXTURE, batch, FEW, me),
        "traffic": {how: ep.communication(TINY, MIXTURE, b, 0, me, mix)
                    for how, mix, b in (("手写", ep.dispatch_and_combine, batch),
                                        ("PyTorch 的", ep.with_library, batch),
                                        ("行数不等", ep.dispatch_and_combine, uneven))},
        "capacity": ep.capacity(TINY, MIXTURE, batch, 0, me, (0.5, 1.0, 8.0)),
        "wrong": {r["plan"]: r for r in ep.wrong_ways(TINY, MIXTURE, batch, 0, me)},
        "balance": ep.balancing(TINY, replace(MIXTURE, balance=0.1), DATA,
                                replace(FEW, balance_steps=8, balance_rows=8, seq_len=16), me),
    }  # fmt: skip


@pytest.fixture(scope="module", params=[2, 4])
def seen(request) -> dict:
    return run_ranks(everything, request.param)[0] | {"size": request.param}


@pytest.mark.slow
def test_thirty_steps_equal_one_process(seen):
    """2、4 个进程，有效 token 不等，fp64、30 步 AdamW，手写与库：参数差不到 1e-4，没有换专家。"""
    last = [row for row in seen["fp64"] if row["step"] == 30]
    assert len(last) == 2, f"{last}"
    for row in last:
        assert row["param_diff"] < 1e-8, f"{row}"
        assert row["param_moved"] > 1e-2, f"参数没怎么动，比较没有意义：{row}"
    assert not any(row["flips"] for row in seen["fp64"]), "fp64 里也换了专家"
    assert seen["fp64"][0]["grad_diff"] < 1e-12, f"{seen['fp64'][0]}"


@pytest.mark.slow
def test_fp32_differs_only_by_rounding_until_a_token_changes_expert(seen):
    """fp32：一步的梯度差不到 1e-6；照抄路由走 30 步，差不到 1e-4；不照抄而超过它，必先换了专家。"""
    ways = {way: [r for r in seen["fp32"] if r["way"] == way] for way in ("手写", "手写，照抄路由")}
    for rows in ways.values():
        assert rows[0]["grad_diff"] < 1e-6, f"{rows[0]}"
    replayed = ways["手写，照抄路由"]
    assert replayed[-1]["param_diff"] < 1e-4 < 1e-2 < replayed[-1]["param_moved"], replayed[-1]
    assert not any(r["flips"] for r in replayed), "照抄之后还是换了专家"
    flips = 0
    for row in ways["手写"]:
        flips += row["flips"]
        assert flips or row["param_diff"] < 1e-4, f"没有换专家，差却大了：{row}"
        if row["flips"] and flips == row["flips"]:
            assert row["gap"] < 1e-4, f"第一次换专家的位置，概率并不接近：{row}"


@pytest.mark.slow
def test_one_step_equals_one_process_in_every_odd_case(seen):
    """库的 all-to-all、k = 1、k = E、各进程行数不等：第一步的梯度差不到最大的 1e-6。"""
    for case, row in seen["steps"].items():
        assert row["grad_diff"] < 1e-6, f"{case}：{row}"


@pytest.mark.slow
def test_an_expert_without_tokens_is_exact(seen):
    """有的专家一个 token 也没有分到：照样相等，它的梯度是 0。"""
    row, fewest = seen["starved"]
    assert fewest == 0 and row["grad_diff"] < 1e-6, f"最少 {fewest} 个 token，{row}"


@pytest.mark.slow
def test_traffic_equals_the_formula(seen):
    """每个 rank 的 all-to-all 与 all-reduce，次数和字节都恰等于公式：手写、库、各进程行数不等。"""
    for how, rows in seen["traffic"].items():
        assert len(rows) == 2 * seen["size"], f"{how}：{rows}"
        for row in rows:
            assert row["calls"] == row["calls_formula"], f"{how}：{row}"
            assert row["bytes"] == row["bytes_formula"], f"{how}：{row}"


@pytest.mark.slow
def test_each_rank_keeps_its_share_of_the_state(seen):
    """参数、梯度、AdamW 的两个矩：字节恰等于公式，比单进程的少。"""
    for row in seen["memory"]:
        assert row["bytes"] == row["formula"] < row["alone"], f"{row}"


@pytest.mark.slow
def test_fixed_capacity_equals_one_process_with_the_same_drops(seen):
    """定死容量：与单进程里同样的丢弃相等；少一次 all-to-all，字节等于公式；系数越小丢得越多。"""
    for row in seen["capacity"]:
        assert row["grad_diff"] < 1e-6, f"{row}"
        assert (row["calls"], row["bytes"]) == (row["calls_formula"], row["bytes_formula"]), row
    half, one, all_of_it = (row["dropped"] for row in seen["capacity"])
    assert half > one > all_of_it == 0.0, f"{seen['capacity']}"
    assert half >= 0.5 - 1 / 16, f"位置只有一半，丢的至少一半：{half}"
    assert seen["capacity"][-1]["against_none"] < 1e-6 < seen["capacity"][0]["against_none"]


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


@pytest.mark.slow
def test_shares_add_up_and_drops_fall_with_the_factor(seen):
    """每步各专家的比例合计是 1；容量系数越大丢得越少，单调。"""
    shares, drops = seen["balance"]
    for alpha in (0.0, 0.1):
        for step in range(1, 9):
            now = [r["share"] for r in shares if (r["alpha"], r["step"]) == (alpha, step)]
            assert len(now) == 8 and sum(now) == pytest.approx(1, abs=1e-5), f"{now}"
        falling = [r["dropped"] for r in drops if r["alpha"] == alpha]
        assert falling == sorted(falling, reverse=True) and len(falling) == len(ep.FACTORS)
