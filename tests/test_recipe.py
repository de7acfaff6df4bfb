"""`training/recipe.py` 的断言：学习率与公开的数值一致，参数按维数分组，有效 token 数得对。"""

import math

import pytest
import torch

from experiments.training.recipe import (
    adamw,
    evaluate,
    learning_rate,
    parameter_groups,
    set_learning_rate,
    valid_tokens,
)
from model import GPT, IGNORE_INDEX, GPTConfig

SMALL = GPTConfig(vocab_size=64, d_model=32, n_head=1, n_layer=2, seq_len=16)

# 斯坦福 CS336 作业一的公开测试向量：预热 7 步，第 21 步到底，峰值 1，底 0.1
CS336 = {
    7: 1.0, 8: 0.98871756, 9: 0.9554360, 10: 0.9018242, 11: 0.8305704, 12: 0.7452476,
    13: 0.6501344, 14: 0.55, 21: 0.1, 22: 0.1, 24: 0.1,
}  # fmt: skip


def small_model(seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT(SMALL)


# ---- 学习率 ----


def test_cosine_equals_cs336_vector():
    """预热之后的学习率与 CS336 的测试向量相同，差小于 1e-6；从总步数起停在底上。"""
    ours = {s: learning_rate(s, peak=1.0, warmup=7, total=21, floor_ratio=0.1) for s in CS336}
    worst = max(abs(ours[s] - CS336[s]) for s in CS336)
    assert worst < 1e-6, f"最大相差 {worst:.2e}：{ours}"


def test_warmup_is_cs336_one_step_earlier():
    """预热的第 s 步是 (s+1)/W，即 CS336 的第 s+1 个数：第一步就在学习，而不是乘以 0。"""
    ours = [learning_rate(s, peak=1.0, warmup=7, total=21) for s in range(7)]
    assert ours == pytest.approx([k / 7 for k in range(1, 8)], abs=1e-12), f"{ours}"
    assert ours[0] > 0, f"第一步的学习率是 {ours[0]}"


def test_torchtitan_vector():
    """torchtitan 的 10 步线性向量 .5 1 1 7/8 … 1/8：预热段逐个相同，之后余弦走在同一进度上。"""
    published = [0.5, 1, 1, *(k / 8 for k in range(7, 0, -1))]
    ours = [learning_rate(s, peak=1.0, warmup=2, total=10, floor_ratio=0.0) for s in range(10)]
    assert ours[:3] == published[:3], f"预热段 {ours[:3]}"
    # 余弦 (1 + cos πp)/2 反解出进度 p，线性衰减的值就是 1 − p
    linear = [1 - math.acos(2 * lr - 1) / math.pi for lr in ours[2:]]
    assert linear == pytest.approx(published[2:], abs=1e-9), f"{linear}"


@pytest.mark.parametrize("warmup", [0, 1, 5, 10, 20])
@pytest.mark.parametrize("total", [0, 1, 10])
def test_every_step_has_a_positive_rate(warmup, total):
    """预热等于、超过总步数，或总步数为 0，都不会除以零；每一步的学习率都在 (0, peak] 之内。"""
    rates = [learning_rate(s, peak=3e-3, warmup=warmup, total=total) for s in range(40)]
    assert all(0 < rate <= 3e-3 for rate in rates), f"{rates}"
    assert rates[-1] == pytest.approx(3e-4), f"最后停在 {rates[-1]}，应为峰值的十分之一"


def test_rate_never_folds_back():
    """进度截断在 1：总步数之后学习率不再变化，余弦不会折回，更不会变成负数。"""
    late = {learning_rate(s, peak=1.0, warmup=5, total=50) for s in (50, 51, 95, 100, 10**9)}
    assert late == {0.1}, f"总步数之后出现了 {late}"
    rates = [learning_rate(s, peak=1.0, warmup=5, total=50) for s in range(5, 60)]
    assert rates == sorted(rates, reverse=True), "衰减段不是单调下降的"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peak": -1e-3}, "peak=-0.001"),
        ({"peak": math.nan}, "peak=nan"),
        ({"step": -1}, "step=-1"),
        ({"warmup": -5}, "warmup=-5"),
        ({"floor_ratio": 1.5}, "floor_ratio=1.5"),
        ({"floor_ratio": -0.1}, "floor_ratio=-0.1"),
    ],
)
def test_meaningless_schedules_are_refused(changes, said):
    """负的学习率、负的步数、不在 0 与 1 之间的底：立刻报错并说出给的是什么。"""
    arguments = {"step": 0, "peak": 1e-3, "warmup": 5, "total": 50, **changes}
    with pytest.raises(ValueError) as error:
        learning_rate(arguments.pop("step"), **arguments)
    assert said in str(error.value), f"消息是：{error.value}"


# ---- 参数分组与优化器 ----


def test_groups_split_by_dimension():
    """二维的参数（含词嵌入）衰减，一维的增益不衰减；每个参数恰好在一组里，共享的只出现一次。"""
    model = small_model()
    decayed, plain = parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert all(p.dim() >= 2 for p in decayed["params"])
    assert all(p.dim() < 2 for p in plain["params"])
    ids = [id(p) for group in (decayed, plain) for p in group["params"]]
    assert sorted(ids) == sorted(id(p) for p in model.parameters())
    assert sum(id(model.embed.weight) == i for i in ids) == 1
    assert len(plain["params"]) == 2 * SMALL.n_layer + 1, f"{len(plain['params'])} 个增益"


def test_groups_ignore_names_and_frozen_parameters():
    """分组只看维数：名字前面多了 `_orig_mod.` 也不变；冻结的参数不进任何一组。"""
    model = small_model()
    sizes = [len(group["params"]) for group in parameter_groups(model, 0.1)]
    wrapped = torch.nn.Module()
    wrapped._orig_mod = model  # torch.compile 包出来的名字
    assert [len(g["params"]) for g in parameter_groups(wrapped, 0.1)] == sizes
    model.embed.weight.requires_grad_(False)
    frozen = [len(group["params"]) for group in parameter_groups(model, 0.1)]
    assert frozen == [sizes[0] - 1, sizes[1]], f"冻结词嵌入后各组大小 {frozen}，之前 {sizes}"


def test_gains_are_not_decayed():
    """梯度为零时走一步：矩阵缩小 lr·wd，RMSNorm 的增益一个比特也不变。"""
    model = small_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = adamw(model, lr=0.5, weight_decay=0.1)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        if p.dim() < 2:
            assert torch.equal(p, before[name]), f"{name} 被衰减了"
        else:
            torch.testing.assert_close(p.detach(), before[name] * (1 - 0.5 * 0.1))


def test_rate_reaches_every_group():
    """`set_learning_rate` 写进每一个参数组，优化器真的按它走。"""
    optimizer = adamw(small_model(), lr=1e-3)
    set_learning_rate(optimizer, 2e-4)
    assert [group["lr"] for group in optimizer.param_groups] == [2e-4, 2e-4]
    assert all(group["betas"] == (0.9, 0.95) for group in optimizer.param_groups)


# ---- 按 token 计数与评估 ----


def test_valid_tokens_counts_only_targets():
    """有效 token 是目标不为 −100 的位置；一组微批的总数是各自之和。"""
    y = torch.tensor([[3, IGNORE_INDEX, 5], [IGNORE_INDEX, IGNORE_INDEX, 0]])
    assert valid_tokens(y) == 3
    assert valid_tokens([y, y[:1]]) == 5


def test_evaluation_weights_by_tokens():
    """评估按有效 token 加权：分成长短不一的 batch 与合成一个 batch，平均 loss 相同。"""
    model, generator = small_model(), torch.Generator().manual_seed(1)
    x, y = torch.randint(64, (2, 6, 16), generator=generator)
    y[0, 2:] = IGNORE_INDEX  # 第一条只有 2 个有效 token
    y[1] = IGNORE_INDEX  # 第二条一个也没有
    whole = evaluate(model, [(x, y)])
    split = evaluate(model, [(x[:1], y[:1]), (x[1:2], y[1:2]), (x[2:], y[2:])])
    expected = model(x, y)[1].item()
    assert split == pytest.approx(whole, rel=1e-6) == pytest.approx(expected, rel=1e-6)
    means = [model(x[i], y[i])[1].item() for i in (slice(0, 1), slice(2, 6))]
    assert abs(sum(means) / 2 - whole) > 1e-4, "平均的平均竟与按 token 加权相同，这个测试测不出差别"


def test_evaluation_leaves_the_model_as_it_was():
    """评估不留下梯度，结束后回到原来的 train/eval 状态；没有一个有效 token 时报错而不是 NaN。"""
    model, x = small_model(), torch.zeros(2, 16, dtype=torch.long)
    for training in (True, False):
        model.train(training)
        evaluate(model, [(x, x)])
        assert model.training is training
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(ValueError, match="没有一个有效 token"):
        evaluate(model, [(x, torch.full_like(x, IGNORE_INDEX))])
