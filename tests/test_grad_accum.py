"""`experiments/grad_accum.py` 的断言：什么时候等于大 batch，省什么，什么会打破等价。"""

import math

import pandas as pd
import pytest
import torch

from experiments import grad_accum as ga
from experiments.lab.results import results_folder
from experiments.ranks.compare import flat_parameters, largest_difference
from experiments.training.recipe import seeded_gpt, valid_tokens
from model import IGNORE_INDEX, GPTConfig
from tokens import sample_batch
from tokens.errors import UserError

PAGE = GPTConfig(d_model=64, n_head=2, n_layer=2, seq_len=64)  # 书页用的模型
SMALL = GPTConfig(vocab_size=256, d_model=32, n_head=1, n_layer=2, seq_len=16)


def small_batch(rows: int = 16, seed: int = 1) -> ga.Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(256, (rows, 17), generator=generator)
    return ids[:, :-1], ids[:, 1:]


@pytest.fixture(scope="module")
def page_rows(tokens) -> list[dict]:
    batch = sample_batch(tokens["train"], 32, 64, torch.Generator().manual_seed(0))
    return ga.equal_parts(seeded_gpt(PAGE, 0), batch, (2, 4, 8))


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_equal_parts_match_the_big_batch(page_rows, parts):
    """32 个序列拆成 2、4、8 份：梯度与一整批最多差不到 1e-6，而最大的梯度比它大一千倍以上。"""
    for row in page_rows:
        if row["parts"] == parts and row["weighting"] != "none":
            assert row["max_diff"] < 1e-6, f"{row}"
            assert row["max_grad"] > 1e-3, f"梯度本身就小，比较没有意义：{row}"
            assert row["loss"] == pytest.approx(row["full_loss"], abs=1e-5), f"{row}"


def test_forgetting_to_divide_multiplies_the_gradient_by_k(page_rows):
    """忘了除以 k，梯度正好是应有的 k 倍。"""
    for row in page_rows:
        if row["weighting"] == "none":
            assert row["norm_ratio"] == pytest.approx(row["parts"], rel=1e-5), f"{row}"


def test_unequal_rows_need_token_weights():
    """行数不能整除时各份不等大：按 token 加权仍等于大 batch，除以 k 不等。"""
    model, batch = seeded_gpt(SMALL, 0), small_batch(10)
    right, _ = ga.gradients(model, [batch])
    tokens = ga.compare(ga.gradients(model, ga.split(batch, 4))[0], right)
    parts = ga.compare(ga.gradients(model, ga.split(batch, 4), "parts")[0], right)
    assert tokens["max_diff"] < 1e-6, f"{tokens}"
    assert parts["rel_error"] > 1e-2, f"{parts}"


def test_padded_batches_need_token_weights():
    """变长的一批：按 token 加权差不到 1e-6；除以 k 错 10% 以上，1 个一份时错得最多。"""
    rows = ga.padded_parts(
        seeded_gpt(SMALL, 0), small_batch(32), (2, 4, 8), torch.Generator().manual_seed(0)
    )
    for row in rows:
        if row["weighting"] == "tokens":
            assert row["max_diff"] < 1e-6, f"{row}"
    wrong = [r for r in rows if r["weighting"] == "parts" and r["order"] == "按长度排序"]
    errors = [r["rel_error"] for r in wrong]
    assert min(errors) > 0.1, f"除以 k 的相对误差：{errors}"
    assert errors == sorted(errors), f"份数 2、4、8、32 的误差应当递增：{errors}"


def test_one_times_32_equals_32_times_1():
    """变长的 32 个序列，一次 32 个与 32 次各 1 个，梯度与 loss 都相同（transformers #34191）。"""
    model = seeded_gpt(SMALL, 0)
    batch = ga.pad_batch(small_batch(32), ga.short_and_long(32, 16))
    right, loss = ga.gradients(model, [batch])
    got, same_loss = ga.gradients(model, ga.split(batch, 32))
    gap = (got - right).abs().max().item()
    assert gap < 1e-6 and loss == pytest.approx(same_loss, abs=1e-5), f"{gap}，{loss}/{same_loss}"


def test_micro_batch_of_pure_padding_adds_nothing():
    """一份全是填充时按 token 加权不受影响，而它的平均 loss 是 0/0：除以 k 得到 NaN。"""
    model, (x, y) = seeded_gpt(SMALL, 0), small_batch(4)
    y = y.clone()
    y[2:] = IGNORE_INDEX
    right, _ = ga.gradients(model, [(x, y)])
    got, _ = ga.gradients(model, ga.split((x, y), 2))
    _, bad = ga.gradients(model, ga.split((x, y), 2), "parts")
    gap = (got - right).abs().max().item()
    assert gap < 1e-6, f"最大差 {gap}"
    assert math.isnan(bad), f"除以 k 的 loss 是 {bad}"


def test_a_step_without_valid_tokens_is_refused():
    """整步没有一个有效 token：报错，而不是用 NaN 更新参数。"""
    x, y = small_batch(4)
    with pytest.raises(ValueError, match="没有一个有效 token"):
        ga.accumulate(seeded_gpt(SMALL, 0), [(x, torch.full_like(y, IGNORE_INDEX))])


def test_reported_loss_is_the_step_mean():
    """返回的 loss 是整步按 token 加权的平均，不是最后一个 micro-batch 的（nanoGPT #605）。"""
    model = seeded_gpt(SMALL, 0)
    batch = ga.pad_batch(small_batch(8), ga.short_and_long(8, 16))
    micros = ga.split(batch, 4)
    _, loss = ga.gradients(model, micros)
    expected, last = model(*batch)[1].item(), model(*micros[-1])[1].item()
    assert loss == pytest.approx(expected, abs=1e-5), f"{loss}，应为 {expected}"
    assert abs(last - expected) > 1e-3, f"最后一份碰巧也是 {last}，这个测试什么也没证明"


def test_activation_memory_falls_as_one_over_k():
    """激活内存按 1/k 下降；整步的分配峰值也随之下降，8 份时不到一整批的 1/4。"""
    rows = ga.memory(seeded_gpt(SMALL, 0), small_batch(32), (2, 4, 8))
    whole = rows[0]
    for row in rows:
        expected = whole["activations"] / row["parts"]
        assert row["activations"] == pytest.approx(expected, rel=0.05), f"{row}，应约 {expected}"
    peaks = [row["peak"] for row in rows]
    assert peaks == sorted(peaks, reverse=True) and peaks[-1] < peaks[0] / 4, f"{peaks}"


def test_saved_bytes_are_counted_once():
    """激活字节数得对：一层 x·w 的平方只为反向留下 x 与乘积，共享的存储不重复数。"""

    class Tiny(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(1000))

        def forward(self, x, y):
            z = x * self.w  # 留下 x（w 是参数，不数）
            return None, (z * z).sum()  # z 出现两次，只数一次

    got = ga.activation_bytes(Tiny(), (torch.ones(1000), None))
    assert got == 2 * 1000 * 4, f"{got} 字节，应为 8000"


def test_batchnorm_breaks_the_equivalence_and_rmsnorm_does_not():
    """同一个模型，RMSNorm、LayerNorm 时拆开算差不到 1e-6，换成 BatchNorm 相对误差超过 1%。"""
    rows = {r["norm"]: r for r in ga.norms(SMALL, small_batch(), 4, 0)}
    assert rows["RMSNorm"]["max_diff"] < 1e-6, f"{rows['RMSNorm']}"
    assert rows["LayerNorm"]["max_diff"] < 1e-6, f"{rows['LayerNorm']}"
    assert rows["BatchNorm"]["rel_error"] > 1e-2, f"{rows['BatchNorm']}"


def test_dropout_differs_only_by_its_masks():
    """同一个种子，拆开后掩码不同，误差与换一个种子相当；掩码按行固定后又等于大 batch。"""
    other, same, fixed = ga.dropout(SMALL, small_batch(), 4, 0)
    assert same["rel_error"] > 0.3 * other["rel_error"] > 1e-2, f"{same}；{other}"
    assert fixed["max_diff"] < 1e-6, f"{fixed}"


def test_bf16_accumulation_drifts():
    """累加器用 bf16，误差随份数增长，64 份时是只舍入一次的 2 倍以上；fp32 累加没有这个问题。"""
    rows = ga.bf16_drift(seeded_gpt(SMALL, 0), small_batch(64), (2, 64))
    drift = {r["parts"]: r["rel_error"] for r in rows if r["accumulator"] == "bf16"}
    once = {r["parts"]: r["rel_error"] for r in rows if r["accumulator"] != "bf16"}
    assert drift[64] > drift[2] and drift[64] > 2 * once[64], f"bf16：{drift}；一次：{once}"


def test_short_last_group_is_weighted_by_its_own_tokens():
    """10 份、每 4 份更新一次：末组只有 2 份；除以 4 则梯度减半，漏进下个 epoch 则方向也变了。"""
    micros = ga.split(small_batch(10), 10)
    assert [len(group) for group in ga.groups(micros, 4)] == [4, 4, 2]
    own, divided, leaked = ga.short_group(seeded_gpt(SMALL, 0), micros, 4)
    assert own["rel_error"] == 0.0
    assert divided["norm_ratio"] == pytest.approx(0.5, rel=1e-5), f"{divided}"
    assert leaked["micros"] == 6 and leaked["rel_error"] > 0.2, f"{leaked}"


def test_short_group_counts_its_own_tokens():
    """末组按自己的 token 加权，就等于把这几份拼成一个 batch 算。"""
    model, batch = seeded_gpt(SMALL, 0), small_batch(10)
    last = ga.groups(ga.split(batch, 10), 4)[-1]
    got, _ = ga.gradients(model, last)
    right, _ = ga.gradients(model, [tuple(t[8:] for t in batch)])
    gap = (got - right).abs().max().item()
    assert gap < 1e-6, f"最大差 {gap}"


def test_adamw_hides_a_forgotten_division():
    """忘了除以 k：SGD 的一步正好大 k 倍，AdamW 的第一步只差不到 5%。"""
    rows = {r["optimizer"]: r["step_ratio"] for r in
            ga.forgotten_division(SMALL, small_batch(), 4, 0)}  # fmt: skip
    assert rows["SGD"] == pytest.approx(4, rel=1e-3), f"{rows}"
    assert rows["AdamW"] == pytest.approx(1, abs=0.05), f"{rows}"


def test_same_trace_for_1_and_8_micro_batches():
    """步数、学习率、loss 按更新次数走：1 份与 8 份的轨迹相同（minimind #231），参数差不到 1e-4。"""
    batches = [small_batch(16, seed) for seed in range(6)]
    whole, trace = ga.train(SMALL, batches, 1, 0)
    parts, other = ga.train(SMALL, batches, 8, 0)
    assert [r["lr"] for r in trace] == [r["lr"] for r in other]
    assert len(other) == len(batches), f"{len(batches)} 次更新记了 {len(other)} 步"
    losses = [abs(a["loss"] - b["loss"]) for a, b in zip(trace, other, strict=True)]
    norms = [abs(a["grad_norm"] - b["grad_norm"]) for a, b in zip(trace, other, strict=True)]
    gap = largest_difference(flat_parameters(whole), flat_parameters(parts))
    assert max(losses) < 1e-5 and max(norms) < 1e-4, f"loss {losses}，梯度范数 {norms}"
    assert gap < 1e-4, f"参数最大差 {gap}"


def test_split_keeps_every_row_and_refuses_empty_parts():
    """拆分不丢不重；份数超过行数时拒绝。"""
    x, y = small_batch(10)
    micros = ga.split((x, y), 4)
    assert torch.equal(torch.cat([a for a, _ in micros]), x)
    assert valid_tokens(b for _, b in micros) == valid_tokens(y)
    with pytest.raises(ValueError, match="份数要在 1 到 10 之间"):
        ga.split((x, y), 11)


@pytest.mark.slow
def test_script_runs_as_a_reader_would(run_script, tokens):
    """`python experiments/grad_accum.py` 成功，打印各节，结果文件里的差小于 1e-6。"""
    done = run_script("experiments/grad_accum.py", "--sequences", 16, "--repeats", 1)
    assert done.returncode == 0, done.stderr
    for title in ("等长", "变长", "内存", "每步时间", "归一化层", "dropout", "累加器", "末尾"):
        assert title in done.stdout, f"输出里没有「{title}」：\n{done.stdout}"
    equal = pd.read_csv(results_folder() / "grad_accum_equal.csv")
    good = equal[equal.weighting != "none"]
    assert good.max_diff.max() < 1e-6, f"{good.max_diff.tolist()}"


@pytest.mark.parametrize("wrong", [{"parts": (3,)}, {"parts": (32,)}, {"parts": ()},
                                   {"repeats": 0}, {"d_model": 65}, {"seq_len": 0}])  # fmt: skip
def test_wrong_options_are_refused(wrong):
    """不能用的选项在开始计算之前就被拒绝，消息里有给的那个值。"""
    with pytest.raises(UserError) as error:
        ga.main(ga.Options(**wrong))
    value = next(iter(wrong.values()))
    shown = str(value[0]) if value and isinstance(value, tuple) else str(value).strip("()")
    assert shown in str(error.value), f"{error.value}"


@pytest.mark.slow
def test_wrong_parts_are_one_sentence(run_script):
    """不能整除的 --parts：一句话、退出码 2、没有 traceback。"""
    done = run_script("experiments/grad_accum.py", "--parts", 3)
    assert done.returncode == 2 and "--parts 3" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.strip().splitlines()) == 1
