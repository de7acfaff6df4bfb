"""`isoflop` 一章的证据：每次训练恰好用掉这一档算力、不读两遍；页面用的函数读随书提交的表。"""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

from experiments import isoflop
from experiments.isoflop import LADDER, QUICK, VOCAB, Options, all_valleys, check_fresh, runs
from experiments.training.recipe import seeded_gpt
from experiments.training.small_run import batches
from tokens.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
CSV = ROOT / "book" / "measured" / "isoflop.csv"


@pytest.mark.parametrize("quick", [False, True])
def test_every_run_spends_its_budget(quick):
    """每次训练的 6ND 离这一档的算力不到 1 %；N 数全部参数；学习率在自己的最后一步到底。"""
    planned = runs(Options(quick=quick), "")
    assert len(planned) == (8 if quick else 72)
    for budget, run in planned:
        N = seeded_gpt(run.config(VOCAB), 0).num_params()
        used = 6 * N * run.steps * run.batch_size * run.seq_len
        assert used == pytest.approx(budget, rel=0.01), f"{run.size}：{used:.3g} 与 {budget:.3g}"
        assert run.steps >= 100 or quick, f"{run.size} 只有 {run.steps} 步"
        assert 0 < run.warmup <= 0.11 * run.steps + 1


def test_no_token_is_read_twice():
    """一次训练的全部目标里没有一个位置出现两次；数据少一点就拒绝，说出要多少。"""
    data, (_, run) = torch.arange(20_000), runs(Options(quick=True), "")[0]
    run = replace(run, steps=20_000 // (run.batch_size * run.seq_len) - 2)
    source = batches(data, run.batch_size, run.seq_len, run.order, run.seed)
    seen = Counter(i for _ in range(run.steps) for i in next(source)[1].flatten().tolist())
    assert max(seen.values()) == 1
    most = run.steps * run.batch_size * run.seq_len + run.seq_len
    check_fresh([(1.0, run)], most)
    with pytest.raises(UserError, match=f"{most:,}"):
        check_fresh([(1.0, run)], most - 1)


def test_budgets_are_a_factor_four_ladder():
    """四档，每档是上一档的 4 倍，各六种大小；每档的 batch 是上一档的 2 倍。"""
    budgets = list(LADDER)
    assert [b / a for a, b in zip(budgets, budgets[1:], strict=False)] == pytest.approx([4] * 3)
    assert all(len(sizes) == 6 for sizes in LADDER.values()) and len(QUICK) == 2
    widths = {budget: run.batch_size for budget, run in runs(Options(), "")}
    assert list(widths.values()) == [2, 4, 8, 16]


def test_unknown_budget_is_refused(run_script):
    """没有的一档：一句话，列出有的，退出码 2。"""
    done = run_script("experiments/isoflop.py", "--budgets", "1e9")
    assert done.returncode == 2 and "只有 2e+10 8e+10" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_is_one_row_with_both_counts(tmp_path, monkeypatch):
    """一次训练一行：两种 N、名义的与数出来的 FLOPs、每字节的 loss；再来一遍不重做。"""
    data = {"train": torch.randint(VOCAB, (4096,)), "val": torch.randint(VOCAB, (1024,)),
            "meta": {"corpus": "随机", "vocab_size": VOCAB, "val_tokens": 1024,
                     "val_bytes": 2048}}  # fmt: skip
    monkeypatch.setenv("BOOK_RESULTS", str(tmp_path))
    monkeypatch.setattr(isoflop, "load", lambda options: data)
    monkeypatch.setattr(isoflop, "QUICK", {1e8: ("12x1",)})
    options = Options(quick=True, eval_batches=1)
    row = isoflop.measure(options, "one").iloc[0]
    assert row["inner"] == row["params"] - 12 * VOCAB
    assert row["flops"] == pytest.approx(1e8, rel=0.02)
    assert row["flops_counted"] == pytest.approx(
        row["flops"] + 12 * 32 * 12 * row["tokens"])  # fmt: skip
    assert row["val_bits_per_byte"] == pytest.approx(row["val_loss"] / 0.693147 / 2, rel=1e-4)
    before = (tmp_path / "one.csv").read_bytes()
    isoflop.measure(options, "one")
    assert (tmp_path / "one.csv").read_bytes() == before


# ---- 随书提交的表 ----


@pytest.fixture(scope="module")
def committed() -> pd.DataFrame:
    return pd.read_csv(CSV)


def test_committed_table_is_complete(committed):
    """四档 × 六种大小 × 三个种子，一次不缺，由同一个提交量出。"""
    counts = committed.groupby(["budget", "d_model", "n_layer"])["seed"].nunique()
    assert len(counts) == 24 and (counts == 3).all(), f"{counts}"
    assert committed["commit"].nunique() == 1 and (committed["order"] == "epoch").all()


def test_committed_valleys_are_inside_and_grow(committed):
    """每一档都有谷底；算力大的 N_opt 与 D_opt 都大，指数的区间不含 0（比种子的起伏大）。"""
    found = all_valleys(committed)
    both = found.exponents()
    assert both.a_low > 0.1 and both.b_low > 0.1, f"{both}"
    assert (found.N[1:] > found.N[:-1]).all(), f"{found.N}"


def test_leaving_the_embedding_out_raises_the_measured_exponent(committed):
    """不含词嵌入的 N 长得更快：N_opt 的指数高出一截，比两者区间里较窄的一半还多。"""
    whole = all_valleys(committed).exponents()
    inner = all_valleys(committed, "inner").exponents()
    margin = min(whole.a_high - whole.a, inner.a_high - inner.a)
    assert inner.a - whole.a > margin, f"{inner.a:.3f} 与 {whole.a:.3f}，余地 {margin:.3f}"
