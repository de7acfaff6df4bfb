"""`experiments/pipeline_parallel.py` 的断言：三张排程等于单进程，气泡、在途、通信等于公式。"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from experiments import pipeline_parallel as pp
from experiments.ranks.compare import relative_to_largest
from experiments.ranks.launch import run_ranks
from experiments.ranks.world import World
from model import GPTConfig
from tokens import global_batch
from tokens.errors import UserError

TINY = GPTConfig(vocab_size=64, d_model=32, n_head=1, n_layer=8, seq_len=16)
FEW = pp.Options(seq_len=16, n_layer=8, d_model=32, n_head=1)
DATA = torch.randint(64, (4000,), generator=torch.Generator().manual_seed(1))


# ---------------------------------------------------------------- 不需要进程组的


@pytest.mark.parametrize("name", pp.SCHEDULES)
@pytest.mark.parametrize(("p", "m"), [(2, 2), (2, 8), (4, 4), (4, 8), (8, 32)])
def test_every_schedule_does_each_micro_batch_once_and_idles_as_the_formula_says(name, p, m):
    """每段对每个 micro-batch 一次前向、一次反向；理想时间线的空闲恰是 (p−1)/(v·m+p−1)。"""
    v = pp.SCHEDULES[name][1]
    orders = [pp.schedule(name, r, p, m) for r in range(p)]
    wanted = {pp.Action(k, c, i) for k in "FB" for c in range(v) for i in range(m)}
    for order in orders:
        assert len(order) == len(wanted) and set(order) == wanted, f"{order}"
    got, formula = pp.bubble(pp.ideal_timeline(orders)), pp.bubble_formula(p, m, v)
    assert got == pytest.approx(formula, abs=1e-12), f"{name} p={p} m={m}：{got}，公式 {formula}"


def test_1f1b_needs_fewer_micro_batches_in_flight_not_less_time():
    """1F1B 与 GPipe 一样长，交错更短：4 段、8 个 micro-batch 时是 33、33、57/2 格。"""
    spans = {}
    for name, (_, v) in pp.SCHEDULES.items():
        rows = pp.ideal_timeline([pp.schedule(name, r, 4, 8) for r in range(4)], 1 / v, 2 / v)
        spans[name] = max(r["end"] for r in rows)
    assert spans == {"GPipe": 33, "1F1B": 33, "交错 1F1B": 28.5}, f"{spans}"


def test_a_schedule_that_waits_for_itself_is_found_on_paper():
    """两段都先做反向再做前向：纸上就看得出互相等死，消息说出谁在等什么。"""
    backwards = [list(reversed(pp.gpipe(r, 2, 2))) for r in range(2)]
    with pytest.raises(ValueError, match="互相等死：rank 0"):
        pp.ideal_timeline(backwards)


def test_layers_that_do_not_divide_go_to_the_first_stages():
    """7 层 4 段：2、2、2、1；层比段少就拒绝，说出给了什么、该怎么办。"""
    ranges = pp.layer_ranges(7, 4)
    assert ranges == [(0, 2), (2, 4), (4, 6), (6, 7)], f"{ranges}"
    with pytest.raises(UserError, match="3 层不够分成 4 段.*--n-layer 4"):
        pp.layer_ranges(3, 4)


def test_what_cannot_be_split_is_refused():
    """交错要求 micro-batch 数是 rank 数的倍数，行数要能平分：一句话，带着能用的数。"""
    with pytest.raises(UserError, match="6 个 micro-batch 不是 4 个 rank.*--micro-batches 8"):
        pp.schedule("交错 1F1B", 0, 4, 6)
    x = torch.zeros(9, 4, dtype=torch.long)
    with pytest.raises(UserError, match="9 行不能平分成 4 个"):
        pp.split((x, x), 4)


def test_without_torchrun_it_names_the_command(run_script):
    """直接用 python 启动：一句话给出正确的命令，退出码 2，没有 traceback。"""
    done = run_script("experiments/pipeline_parallel.py")
    assert done.returncode == 2, f"退出码 {done.returncode}：{done.stderr}"
    assert pp.COMMAND in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr


@pytest.mark.parametrize("wrong", [{"micro_batches": 0}, {"lr": -1.0}, {"n_layer": 5},
                                   {"micro_batches": 7}, {"slot_ms": 0.0}])  # fmt: skip
def test_wrong_options_are_refused(wrong):
    """不能用的选项被拒绝，消息里有给的那个值。"""
    with pytest.raises(UserError, match=str(next(iter(wrong.values())))):
        pp.checked(replace(pp.Options(), **wrong), 4)


# ---------------------------------------------------------------- 真的几个进程


def everything(me: World) -> dict:
    """在每个进程里把各小节跑一遍（小模型、随机数据）。"""
    ends = dist.new_group([0, me.size - 1])
    batch = global_batch(DATA, 0, FEW.micro_batches * FEW.micro_rows, FEW.seq_len, 0)
    seen = {
        "equal": pp.equivalence(TINY, batch, FEW, me, ends),
        "accounting": pp.accounting(TINY, batch, FEW, me, ends),
        "unequal": pp.unequal_micro_batches(TINY, batch, FEW, me, ends),
        "train": pp.train(TINY, DATA, replace(FEW, micro_batches=4), me, ends, "1F1B"),
        "untied": pp.train(TINY, DATA, FEW, me, ends, "1F1B", tied=False, steps=3),
    }
    chunks = pp.build_chunks(TINY, 0, me)
    pp.pipeline_gradients(chunks, "1F1B", batch, 8, me, ends, tied=False)
    right = pp.single_gradients(TINY, batch, 0)[1]
    got = pp.whole_vector(chunks, TINY, me, "grad")
    seen["untied_gradient"] = relative_to_largest(got, right)
    chunks.zero_grad()
    order = pp.schedule("1F1B", me.rank, me.size, 8)
    record = pp.run_schedule(chunks, order, pp.split(batch, 8), 1.0, me, slot=0.004)
    seen["order"] = [(e["kind"], e["chunk"], e["micro"]) for e in record.events] == [
        (a.kind, a.chunk, a.micro) for a in order]
    seen["events"] = me.gather(record.events)
    seen["exchange"] = [pp.exchange(me, how, 2.0) for how in pp.EXCHANGES]
    return seen


@pytest.fixture(scope="module", params=[2, 4])
def seen(request) -> dict:
    return run_ranks(everything, request.param, timeout=240)[0] | {"p": request.param}


@pytest.mark.slow
def test_one_step_equals_one_process(seen):
    """手写的三张、PyTorch 的两张、层数除不尽的一张：梯度与单进程差不到最大梯度的百万分之一。"""
    assert len(seen["equal"]) == 6, f"{seen['equal']}"
    for row in seen["equal"]:
        assert row["grad_diff"] < 1e-6 and row["loss_diff"] < 1e-5, f"{row}"
    assert sum(map(int, seen["equal"][-1]["layers"].split("+"))) == 7, f"{seen['equal'][-1]}"


@pytest.mark.slow
def test_thirty_steps_equal_one_process(seen):
    """30 步 AdamW：参数与单进程差不到 1e-4（参数走了 1e-2 以上），共享的两份逐位相同。"""
    row = seen["train"]
    assert row["steps"] == 30 and row["param_diff"] < 1e-4 < 1e-2 < row["param_moved"], f"{row}"
    assert row["copies_apart"] == 0.0, f"{row}"


@pytest.mark.slow
def test_without_summing_the_tied_gradient_the_copies_part(seen):
    """首尾两份的梯度不相加：一步的梯度就错了，3 步之后两份已经不同，模型不再是那个模型。"""
    row = seen["untied"]
    assert seen["untied_gradient"] > 1e-2, f"梯度只差 {seen['untied_gradient']}"
    assert row["copies_apart"] > 1e-3 and row["param_diff"] > 1e-3, f"{row}"


@pytest.mark.slow
def test_activations_in_flight_are_m_against_p(seen):
    """在途的份数等于公式：GPipe 每个 rank 都是 m，1F1B 是 p−rank；字节也按份数成比例。"""
    rows = seen["accounting"]
    for row in rows:
        assert row["in_flight"] == row["in_flight_formula"], f"{row}"
    bytes_of = {(r["schedule"], r["rank"]): r["activation_bytes"] for r in rows}
    for rank in range(seen["p"]):
        ratio = bytes_of["GPipe", rank] / bytes_of["1F1B", rank]
        # 首段的 micro-batch 共用一块 token 的存储，所以不是整除
        assert ratio == pytest.approx(8 / (seen["p"] - rank), rel=0.02), f"rank {rank}：{ratio}"


@pytest.mark.slow
def test_traffic_equals_the_formula(seen):
    """每个 rank 一步的收发次数、字节，以及共享矩阵的 all-reduce，都恰好等于公式。"""
    for row in seen["accounting"]:
        for what in ("sends", "recvs", "send_bytes", "tied_bytes"):
            assert row[what] == row[f"{what}_formula"], f"{what}：{row}"
    both = [sum(r[k] for r in seen["accounting"]) for k in ("sends", "recvs")]
    assert both[0] == both[1] > 0, f"发 {both[0]} 次，收 {both[1]} 次"


@pytest.mark.slow
def test_unequal_micro_batches_are_weighted_by_the_step_total(seen):
    """有效 token 差 8 倍：各自平均再平均错 10 % 以上，按整步的总数差不到 1e-5。"""
    right, wrong = (row["error"] for row in seen["unequal"])
    assert right < 1e-5 and wrong > 0.1, f"{seen['unequal']}"


@pytest.mark.slow
def test_the_recorded_order_is_the_schedule(seen):
    """录下的次序就是排程；每一格都在它等的那一格之后开始，前向、反向补足到一格、两格。"""
    assert seen["order"], "录下的次序与排程不同"
    p = seen["p"]
    when = {(e["kind"], e["rank"], e["micro"]): e for part in seen["events"] for e in part}
    assert len(when) == 2 * p * 8, f"{len(when)} 格"
    for (kind, rank, micro), e in when.items():
        before = when.get((kind, rank + (-1 if kind == "F" else 1), micro))
        assert before is None or e["start"] >= before["end"], f"{e} 早于 {before}"
        assert e["end"] - e["start"] >= 0.004 * (1 if kind == "F" else 2), f"{e}"


@pytest.mark.slow
def test_both_sending_first_hangs(seen):
    """两边都发完再收：等到时限；先收一个、或发出去不等，就做得完。"""
    outcomes = [row["outcome"] for row in seen["exchange"]]
    assert outcomes == ["2 秒后超时", "做完", "做完"], f"{seen['exchange']}"
    assert seen["exchange"][0]["seconds"] > 1.9, f"{seen['exchange']}"
