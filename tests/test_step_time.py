"""步时模型、布局与养护：公开的常数推出公开的数，放不下就拒绝，越大越慢。"""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.plan import failures
from experiments.plan.architecture import PRESETS, BudgetError, gpt2
from experiments.plan.failures import best_interval, lost_share, upkeep
from experiments.plan.layouts import MODELS, best_layout, layout_for, memory_gb, table
from experiments.plan.memory import USABLE
from experiments.plan.planning import Request
from experiments.plan.step_time import (
    A100,
    CONFIGURATIONS,
    H100,
    PARTS,
    TODAY,
    Layout,
    matmul_seconds,
    mean_error,
    micro_batches,
    ring_seconds,
    step_seconds,
    swapped_pairs,
    with_share,
)

MEGATRON, LLAMA3 = CONFIGURATIONS[:10], CONFIGURATIONS[10:]
# 论文表 1 的另外三列，模型没有用到：发布的百分比、总 PFLOP/s、参数量（B）
PUBLISHED = (
    (44, 4.4, 1.7), (44, 8.8, 3.6), (46, 18.2, 7.5), (43, 34.6, 18.4), (44, 70.8, 39.1),
    (45, 143.8, 76.1), (47, 227.1, 145.6), (50, 297.4, 310.1), (52, 410.2, 529.6),
    (52, 502.0, 1008.0),
)


# ---------------------------------------------------------------- 抄下的数自相一致


def test_megatron_rows_agree_with_their_other_columns():
    """表 1 的每一行：卡数 × TFLOP/s 是发布的总量，÷ 312 是发布的百分比，形状数出发布的参数量。"""
    for row, (percent, petaflops, billions) in zip(MEGATRON, PUBLISHED, strict=True):
        aggregate = row.layout.gpus * row.tflops / 1000
        assert abs(aggregate / petaflops - 1) < 0.005, (row.name, aggregate)
        assert abs(row.published - percent) < 0.6, (row.name, row.published)
        table_positions = replace(row.arch, learned_positions=True)
        counted = table_positions.params() / 1e9
        assert abs(counted / billions - 1) < 0.03, (row.name, counted)


def test_llama3_rows_agree_with_their_other_columns():
    """表 4 的每一行：卡数等于四个轴的乘积，每步 16 M token，TFLOP/s ÷ 989 是发布的 MFU。"""
    for row, gpus, mfu in zip(LLAMA3, (8192, 16384, 16384), (43, 41, 38), strict=True):
        assert row.layout.gpus == gpus and row.sequences * row.seq_len == 2**24
        assert abs(row.published - mfu) < 0.7, (row.name, row.published)


def test_counted_flops_are_equation_three():
    """我们数的 FLOPs 就是论文式 3：96·B·s·l·h²·(1 + s/6h + V/16lh)，重算也算在内。"""
    for row in MEGATRON:
        b, s, n, h, v = row.sequences, 2048, row.arch.n_layer, row.arch.d_model, 51200
        equation = 96 * b * s * n * h**2 * (1 + s / (6 * h) + v / (16 * n * h))
        assert row.counted_flops() == pytest.approx(equation, rel=1e-12), row.name


# ---------------------------------------------------------------- 预测


def test_thirteen_published_configurations_within_five_points():
    """十三个公开配置的利用率，平均绝对误差不超过 5 个百分点，没有一个差到 9 个。"""
    gaps = {row.name: row.predicted - row.published for row in CONFIGURATIONS}
    assert len(gaps) == 13 and mean_error() <= 5, (mean_error(), gaps)
    assert max(map(abs, gaps.values())) < 9, gaps


def test_the_model_is_a_ceiling():
    """除了长序列那一行（注意力核的八成不成立），预测都高于发布：没有算的都是损失。"""
    below = [row.name for row in CONFIGURATIONS if row.predicted < row.published]
    assert below == [LLAMA3[2].name], below


def test_order_of_the_megatron_rows():
    """43 对发布值不等的 Megatron 行里，次序相反的 6 对，其中只有一对相差超过 2 个百分点。"""
    pairs = [(a, b) for i, a in enumerate(MEGATRON) for b in MEGATRON[i + 1:]
             if a.published != b.published]  # fmt: skip
    swapped = swapped_pairs(MEGATRON)
    assert (len(pairs), len(swapped)) == (43, 6), (len(pairs), swapped)
    large = [pair for pair in swapped if pair[2] > 2]
    assert [pair[:2] for pair in large] == [("Megatron 76.1B", "Megatron 145.6B")], large


def test_without_interleaving_the_odd_row_joins_its_neighbours():
    """76.1B 若没有交错：气泡从 3 % 到近 10 %，只高出发布值 3 个多点，与 145.6B 的次序也对了。"""
    odd, after = MEGATRON[5], MEGATRON[6]
    plain = replace(odd, layout=replace(odd.layout, virtual=1))
    shares = [100 * row.step.bubble / row.step.total for row in (odd, plain)]
    assert 3 < shares[0] < 4 and 9 < shares[1] < 10.5, shares
    assert plain.predicted - plain.published < 4 and plain.predicted < after.predicted


def test_the_result_leans_on_the_eighty_percent():
    """把八成换成七成半，误差是 2.2；换成 A100 最好形状的 86.9 %，是 8.8：页面上照实说。"""
    errors = [round(mean_error(with_share(share)), 1) for share in (0.75, 0.8, 0.869)]
    assert errors == [2.2, 4.9, 8.8], errors


def test_every_part_of_the_step_is_felt():
    """每一项都真的进了总时间：去掉网卡、NVLink、显存、算力中任何一样的限制，步子都变短。"""
    row = LLAMA3[1]
    for field in ("peak", "hbm", "nvlink", "network"):
        faster = replace(row, chip=replace(row.chip, **{field: 100 * getattr(row.chip, field)}))
        assert faster.step.total < 0.999 * row.step.total, field
    assert sum(getattr(row.step, name) for name in PARTS) == row.step.total


# ---------------------------------------------------------------- 单个公式


def test_one_matmul_is_the_slower_of_compute_and_memory():
    """大方阵受算力限制，恰好是八成峰值；瘦长的乘法受显存限制，等于读写的字节数除以带宽。"""
    side = 256 * 54  # 54 × 108 块，恰好 54 波
    assert matmul_seconds(A100, side, side, side) == pytest.approx(2 * side**3 / (0.8 * 312e12))
    thin = matmul_seconds(A100, 1, 8192, 8192)
    assert thin == pytest.approx(2 * (8192 + 8192**2 + 8192) / (0.8 * 2.039e12))


def test_half_filled_wave_costs_a_whole_wave():
    """109 块分给 108 个 SM 要两波：比 108 块慢近一倍。"""
    one, two = (matmul_seconds(A100, 256, 128 * n, 8192) for n in (108, 109))
    assert two / one == pytest.approx(2, rel=0.01)


def test_ring_bytes():
    """环形 all-reduce 每卡收发 2(n−1)/n 份，再加每一步的延迟；机内走 NVLink，跨机走网卡。"""
    inside = ring_seconds(H100, 8, 1, 8e9)
    assert inside == pytest.approx(2 * 7 * (1e9 / (0.8 * 450e9) + 2e-6))
    across = ring_seconds(H100, 8, 8, 8e9)  # 每台机器一个成员：一块网卡
    assert across == pytest.approx(2 * 7 * (1e9 / (0.8 * 50e9) + 5e-6))
    assert ring_seconds(H100, 1, 1, 8e9) == 0


def test_bubble_is_p_minus_one_over_v_m():
    """气泡与有用时间之比恰好是 (p − 1)/(v·m)（arXiv 2104.04473，2.2 节）。"""
    row = MEGATRON[7]
    busy = sum(getattr(row.step, name) for name in PARTS
               if name not in ("bubble", "data", "optimizer", "head"))  # fmt: skip
    layout = row.layout
    micro = row.sequences // layout.dp
    expected = (layout.pp - 1) / (layout.virtual * micro)
    assert row.step.bubble / busy == pytest.approx(expected)


def test_recomputation_adds_one_forward():
    """整层重算：矩阵乘法恰好多三分之一，TP 通信多一半，通信之外的气泡公式不变。"""
    arch, layout = PRESETS["llama3-70b"], Layout(8, 4, 4, sharding="step")
    plain, again = (
        step_seconds(arch, replace(layout, recompute=r), H100, 64, 8192) for r in (False, True)
    )
    assert again.matmul / plain.matmul == pytest.approx(4 / 3)
    assert again.tensor / plain.tensor == pytest.approx(3 / 2)


@pytest.mark.parametrize(("layout", "sequences", "said"), [
    (Layout(tp=3), 8, "不能切成 TP 3"), (Layout(pp=64, virtual=4), 64, "不够分给 PP 64"),
    (Layout(dp=3), 8, "不能平分给 DP 3"), (Layout(cp=3), 8, "不能切成 CP 3"),
])
def test_a_layout_that_cannot_cut_is_refused(layout, sequences, said):
    """头数、层数、batch、序列切不开的布局：一句话说是哪一条。"""
    with pytest.raises(BudgetError, match=said):
        micro_batches(PRESETS["llama3-70b"], layout, sequences, 8192)


# ---------------------------------------------------------------- 布局


@pytest.fixture(scope="module")
def cells():
    return {(cell.model, cell.gpus): cell for cell in table()}


def test_every_layout_fits_and_uses_the_cards(cells):
    """表里每个布局：显存在九成以内，用上九成以上的卡，batch 与要的相差不到四分之一，MFU 合理。"""
    for (model, gpus), cell in cells.items():
        if cell.choice is None:
            assert "放不下" in cell.refusal or "喂不饱" in cell.refusal, cell
            continue
        choice = cell.choice
        assert choice.memory <= USABLE * H100.memory_gb
        assert 0.9 * gpus <= choice.layout.gpus <= gpus
        assert 0.75 < choice.tokens / MODELS[model][1] <= 1.25, (model, gpus, choice.tokens)
        assert 1 < choice.mfu() < 70, (model, gpus, choice.mfu())


def test_what_does_not_fit_is_refused(cells):
    """8 张卡放不下 70B、405B、1T，64 张放不下 405B、1T；1B 的 batch 喂不饱十万张。"""
    refused = {key for key, cell in cells.items() if cell.choice is None}
    assert refused == {("70B", 8), ("405B", 8), ("1T", 8), ("405B", 64), ("1T", 64),
                       ("1B", 100_000)}, refused  # fmt: skip
    assert "喂不饱" in cells["1B", 100_000].refusal


def test_states_alone_set_the_least_number_of_cards():
    """拒绝是对的：70B 的 16 字节/参数分到 8 张卡，单是状态就超过 72 GB。"""
    assert 16 * PRESETS["llama3-70b"].params() / 8 / 1e9 > 72


def test_more_cards_are_faster_and_use_each_card_less(cells):
    """卡更多，同一个 batch 更快做完，但每张卡的 MFU 不升（容许一成的凑整）。"""
    for model in MODELS:
        row = [c.choice for (name, _), c in cells.items() if name == model and c.choice]
        times = [choice.seconds_per_token for choice in row]
        assert times == sorted(times, reverse=True), (model, times)
        mfu = [choice.mfu() for choice in row]
        assert all(b < 1.2 * a for a, b in zip(mfu, mfu[1:], strict=False)), (model, mfu)


def test_tensor_parallel_never_leaves_the_machine(cells):
    """TP 不超过一台机器的 8 张卡；让它跨机，同样的 TP 通信要多花几倍的时间。"""
    assert all(c.choice.layout.tp <= 8 for c in cells.values() if c.choice)
    inside, across = (ring_seconds(H100, 8, stride, 2**28) for stride in (1, 8))
    assert across / inside > 8, (inside, across)


def test_no_listed_layout_beats_the_chosen_one():
    """挑出的就是最快的：把同一个模型的 DDP、TP 8、PP 8 单独算一遍，没有一个更快又放得下。"""
    arch, tokens = MODELS["7B"]
    best = best_layout(arch, 64, tokens)
    for layout in (Layout(dp=64, sharding="layer"), Layout(8, 1, 8, sharding="step"),
                   Layout(1, 8, 8, sharding="step"), Layout(2, 2, 16)):  # fmt: skip
        sequences = tokens // arch.seq_len
        step = step_seconds(arch, layout, H100, sequences, arch.seq_len)
        micro = sequences // layout.dp
        fits = memory_gb(arch, layout, micro, arch.seq_len) <= USABLE * 80
        assert not fits or step.total / tokens >= best.seconds_per_token, layout


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 8]),
       st.booleans())
@settings(deadline=None, max_examples=40)
def test_cutting_more_never_needs_more_memory(tp, pp, dp, recompute):
    """TP、DP 加倍，每卡显存不增；重算不增；micro-batch 加倍不减。"""
    arch = PRESETS["llama3-8b"]

    def need(**change) -> float:
        layout = replace(Layout(tp, pp, dp, sharding="step", recompute=recompute), **change)
        return memory_gb(arch, layout, 64, 8192)

    assert need(tp=2 * tp) <= need() and need(dp=2 * dp) <= need()
    assert need(recompute=True) <= need(recompute=False)
    assert need(micro_batch=2) >= need()


def test_a_plan_that_needs_cutting_names_its_layout(monkeypatch, capsys):
    """`budget.py plan`：7B 在 64 张 H100 上有「布局」一行；8 张 4090 的规格没有，就说不猜。"""
    import sys

    from experiments import budget

    monkeypatch.setattr(sys, "argv", ["budget.py", "plan", "--params", "7e9", "--gpus", "64"])
    budget.command_line()
    said = capsys.readouterr().out
    assert "布局    FSDP 64，" in said and "train_gpu.py 的选项：--parallel fsdp" in said, said
    assert 'parallel = "fsdp"' in said, said
    with pytest.raises(BudgetError, match="只有 a100、h100 的规格"):
        layout_for(Request(7e9, "4090", 64))


def test_an_impossible_fsdp_plan_tells_what_tensor_parallel_can_do(monkeypatch, capsys):
    """只用 FSDP 放不下的 405B：拒绝的同一句里给出切张量之后放得下的布局。"""
    import sys

    from experiments import budget

    words = ["--params", "405e9", "--gpus", "256", "--seq-len", "8192"]
    monkeypatch.setattr(sys, "argv", ["budget.py", "plan", *words])
    with pytest.raises(SystemExit) as caught:
        budget.command_line()
    said = capsys.readouterr().err
    assert caught.value.code == 2 and said.count("\n") == 1, said
    assert "也切张量与流水线就放得下：TP" in said, said


# ---------------------------------------------------------------- 机器会坏


def test_published_failure_rate():
    """16,384 张卡每 3.1 小时坏一次，每天 7.8 次；有效时间过九成，每次就最多花掉 18.6 分钟。"""
    here = upkeep(PRESETS["llama3-405b"].params(), 16_384)
    assert f"{here.mtbf / 3600:.2f} {here.per_day:.2f}" == "3.09 7.76", here
    assert f"{failures.most_lost_per_interruption() / 60:.1f}" == "18.6"
    assert here.lost < 1 - failures.EFFECTIVE, f"{here.lost:.1%}：比公开的还多"


@given(st.floats(1, 300), st.floats(1e3, 1e7))
def test_young_daly_is_the_minimum(save, mtbf):
    """√(2δM) 处白费得最少：间隔短一成或长一成都更多。"""
    if save >= mtbf / 2:
        return
    best = best_interval(save, mtbf)
    least = lost_share(best, save, mtbf)
    assert least <= lost_share(0.9 * best, save, mtbf)
    assert least <= lost_share(1.1 * best, save, mtbf)


def test_a_save_slower_than_the_failures_is_refused():
    """存一次比坏一次还慢时没有最佳间隔：拒绝，不给一个没有意义的数。"""
    with pytest.raises(BudgetError, match="存盘太慢"):
        best_interval(100, 150)


def test_simulated_failures_agree_with_young_daly():
    """按指数分布真的让机器坏上几千次，白费的比例与一阶公式相差不到两成。"""
    import random

    draw = random.Random(0)
    save, mtbf, restart = 5.0, 11_000.0, 600.0
    interval = best_interval(save, mtbf)
    wall = useful = 0.0
    while useful < 4000 * mtbf:
        alive = draw.expovariate(1 / mtbf)
        kept = int(alive // (interval + save))
        useful += kept * interval
        wall += alive + restart
    lost = 1 - useful / wall
    expected = lost_share(interval, save, mtbf, restart)
    assert abs(lost / expected - 1) < 0.2, (lost, expected)


def test_the_gpt2_shape_has_no_extra_parts():
    """步时模型读的是 Architecture：GPT-2 与 Llama 的形状都行，单卡没有任何通信。"""
    step = step_seconds(gpt2(768, 12, 12), Layout(micro_batch=8, sharding="none"), H100, 64, 1024,
                        TODAY)  # fmt: skip
    assert step.tensor == step.context == step.pipeline == step.bubble == step.data == 0
    assert step.matmul > 0 and step.head > 0
