"""budget：参数、FLOPs、显存、时间与价格的算术，与公开记录、真模型和逐张量的跟踪一致。"""

import csv
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from experiments import budget
from experiments.lab.devices import DEVICES, find_device
from experiments.plan import memory, planning, published
from experiments.plan.architecture import (
    PRESETS,
    Architecture,
    BudgetError,
    executed_flops_per_token,
    flops_per_token,
    from_config_json,
    gpt,
    gpt2,
    kv_cache_bytes,
    llama,
)
from experiments.plan.planning import Request, make_plan

ROOT = Path(__file__).resolve().parent.parent
MEASURED = ROOT / "book" / "measured" / "budget_memory.csv"

TABLE = """\
规模    token    FLOPs  GPU  小时  状态 GB  分片后 GB  激活 GB
124M    2.5 B  1.8e+18    1   1.3      2.0       1.98      5.1
1.3B   26.0 B  2.0e+20    8  17.8     20.8       2.60     27.4
  7B  140.0 B  5.9e+21   64  64.5    112.0       1.75     36.5
"""


def run_budget(*args: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    """像读者那样启动脚本。"""
    return subprocess.run(
        [sys.executable, *flags, "experiments/budget.py", *args], cwd=ROOT, text=True,
        capture_output=True, encoding="utf-8", timeout=60,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"},
    )


# --- 入门表 -------------------------------------------------------------------------------

def test_the_table_needs_only_the_standard_library():
    """没有参数时，只有标准库的 Python（-S：看不到任何安装的包）也打印那张表，一字不差。"""
    done = run_budget(flags=("-S",))
    assert done.returncode == 0, done.stderr
    assert done.stdout == TABLE, done.stdout


def test_reading_of_the_table():
    """正文对表的解读成立：1.3B 的 DDP 要 48.2 GB，micro-batch 加倍要 75.6 GB，logits 6.6 GB。"""
    row = budget.table_row(budget.SCALES[1])
    one = row.states + row.activations
    two = row.states + 2 * row.activations
    logits = 16 * 2048 * 50304 * 4 / 1e9
    assert (f"{one:.1f}", f"{two:.1f}", f"{logits:.1f}") == ("48.2", "75.6", "6.6"), (one, two)
    assert two < 80 < two + logits
    flops = planning.training_flops(1e9, 20e9)
    hours = planning.training_hours(flops, 8, 989e12, 0.4)
    assert f"{hours:.1f}" == "10.5", hours


def test_activation_formula_is_already_in_bytes():
    """34·s·b·d·L 已经是字节：Llama-8B 在 s = 1024 时是 4.25 GiB，再乘 2 就错了一倍。"""
    gib = memory.simple_activations(1024, 1, 4096, 32) * 1e9 / 2**30
    assert gib == 4.25, gib


# --- 参数量 -------------------------------------------------------------------------------

COUNTS = {
    "gpt2-124m": 124_439_808, "mpt-125m": 125_311_488, "mpt-350m": 355_985_408,
    "mpt-760m": 760_470_528, "mpt-1b": 1_315_950_592, "mpt-3b": 2_651_837_440,
    "mpt-7b": 6_658_859_008, "mpt-13b": 12_853_954_560, "mpt-30b": 29_975_214_080,
    "124m": 123_587_328, "1.3b": 1_307_936_768, "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496, "tinyllama-1.1b": 1_100_048_384,
}


@pytest.mark.parametrize(("name", "count"), COUNTS.items())
def test_published_parameter_counts(name, count):
    """参数量与公开的数字相等，一个不差。"""
    assert PRESETS[name].params() == count


def test_gpt2_without_biases():
    """没有偏置的 GPT-2 124M 是 124,337,664 个参数。"""
    assert gpt2(768, 12, 12, bias=False).params() == 124_337_664


def test_palm_has_540_billion():
    """PaLM 的形状（多查询注意力、SwiGLU、并行层）数出 540.35 B，与论文相符。"""
    assert round(PRESETS["palm-540b"].params() / 1e9, 2) == pytest.approx(540.35, abs=0.011)


def test_qwen_72b_config_is_not_56b(tmp_path):
    """Qwen1.5-72B 的 config.json 数出 72.29 B（一个公开的计算器曾印成 56.19 B）。"""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({
        "model_type": "qwen2", "hidden_size": 8192, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 64, "intermediate_size": 24576,
        "vocab_size": 152064, "max_position_embeddings": 32768, "tie_word_embeddings": False,
    }))
    assert from_config_json(path).params() == 72_287_920_128


QWEN3 = json.dumps({
    "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 3072,
    "vocab_size": 151936, "max_position_embeddings": 40960, "tie_word_embeddings": True,
})


def test_qwen3_without_head_dim(tmp_path):
    """Qwen3-0.6B 的 config.json 不写 head_dim 也是 128，参数 596,049,920（曾数成 508 M）。"""
    path = tmp_path / "config.json"
    path.write_text(QWEN3)
    assert from_config_json(path).params() == 596_049_920


@pytest.mark.slow
def test_defaults_of_hugging_face_configs():
    """config.json 里可以不写的键，我们的默认值与 transformers 的相同。"""
    import transformers

    from experiments.plan.architecture import HF_DEFAULTS

    kinds = {"llama": "LlamaConfig", "mistral": "MistralConfig", "qwen2": "Qwen2Config",
             "qwen3": "Qwen3Config"}
    for kind, name in kinds.items():
        config = getattr(transformers, name)()
        assert config.tie_word_embeddings is False
        for key, value in HF_DEFAULTS[kind].items():
            assert getattr(config, key) == value, (kind, key, getattr(config, key))
        if "num_key_value_heads" not in HF_DEFAULTS[kind]:
            assert config.num_key_value_heads == config.num_attention_heads


@pytest.mark.parametrize(("text", "said"), [
    ("{", "读不了"), ('{"model_type": "qwen3", "head_dim": null}', "head_dim 是 null"),
    ('{"model_type": "qwen3", "attention_bias": true}', "attention_bias"),
    ('{"model_type": "mixtral"}', "model_type 是 mixtral"),
    ('{"model_type": "llama"}', "缺 hidden_size"), ("[]", "不是一个 JSON 对象"),
])
def test_a_config_it_cannot_count_is_refused(tmp_path, text, said):
    """坏的或不认识的 config.json：一句话说明，不给近似数。"""
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(BudgetError, match=said):
        from_config_json(path)


@given(
    st.integers(1, 16), st.integers(1, 40), st.integers(1, 16), st.integers(100, 60_000),
    st.booleans(),
)
@settings(max_examples=12, deadline=None)
def test_our_gpt_matches_the_model_on_meta(pairs, n_layer, n_head, vocab, more):
    """任意形状下，算出的参数量与 meta 设备上建出来的 GPT 相等。"""
    import torch

    from model import GPT, GPTConfig

    d_model = 2 * pairs * n_head + 2 * n_head * 12 * more
    assume(d_model >= 12)
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab, d_model, n_head, n_layer % 4 + 1, 64))
    arch = gpt(d_model, n_layer % 4 + 1, n_head, 64, vocab)
    assert arch.params() == model.num_params()
    assert flops_per_token(arch, 48) == model.flops_per_token(48)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen2", "qwen3"])
def test_hugging_face_models_on_meta(tmp_path, kind):
    """由 config.json 数出的参数量与 FLOPs，与 transformers 在 meta 设备上的模型相等。"""
    import torch
    import transformers
    from torch.utils.flop_counter import FlopCounterMode

    shape = {"vocab_size": 1009, "n_embd": 96, "n_layer": 3, "n_head": 4, "n_positions": 128}
    if kind == "gpt2":
        config = transformers.GPT2Config(**shape)
    else:
        make = {
            "llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config,
            "qwen3": transformers.Qwen3Config,
        }[kind]
        config = make(
            vocab_size=1009, hidden_size=96, num_hidden_layers=3, num_attention_heads=6,
            num_key_value_heads=2, intermediate_size=200, tie_word_embeddings=kind == "qwen3",
            **({"head_dim": 24} if kind == "qwen3" else {}),
        )
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
        x = torch.zeros(2, 64, dtype=torch.int64)
    arch = from_config_json(tmp_path / "config.json")
    assert arch.params() == sum(p.numel() for p in model.parameters())
    model.set_attn_implementation("eager")  # 注意力写成两次矩阵乘法，计数器才看得见
    with FlopCounterMode(display=False) as counter:
        model(x).logits.sum().backward()
    assert 2 * 64 * executed_flops_per_token(arch, 64) == counter.get_total_flops()


def test_kv_cache_of_gqa():
    """Llama-3-8B 的 KV 缓存：8192 个位置、8 个 KV 头，bf16 恰好 1 GiB，是 32 头时的四分之一。"""
    arch = PRESETS["llama3-8b"]
    assert kv_cache_bytes(arch, 8192) == 2**30
    assert kv_cache_bytes(replace(arch, n_kv_head=32), 8192) == 2**32


# --- FLOPs --------------------------------------------------------------------------------

def test_published_flops_of_gpt2():
    """GPT-2 124M、1024 个 token：PaLM 公式 875,062,886,400，逐个算子 874,944,921,600。"""
    arch = gpt2(768, 12, 12, bias=False)
    assert 1024 * flops_per_token(arch, convention="no_positions") == 875_062_886_400
    assert 1024 * executed_flops_per_token(arch) == 874_944_921_600


def test_tying_does_not_change_the_flops():
    """共享输出头少一份参数，但一次乘法也不少。"""
    tied = gpt(256, 4, 4, 128, 1000)
    untied = replace(tied, tied=False)
    assert untied.params() - tied.params() == 256_000
    assert executed_flops_per_token(untied) == executed_flops_per_token(tied)


def counted_flops(arch: Architecture, batch: int, recompute: bool, stops_early: bool) -> int:
    """FlopCounterMode 在 meta 设备上数出的一步（前向加反向）的 FLOPs。"""
    import torch
    from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
    from torch.utils.flop_counter import FlopCounterMode

    from model import GPT, GPTConfig

    with torch.device("meta"):
        model = GPT(GPTConfig(
            arch.vocab_size, arch.d_model, arch.n_head, arch.n_layer, arch.seq_len,
            attention="sdpa",
        ))
        x = torch.zeros(batch, arch.seq_len, dtype=torch.int64)
    if recompute:
        for block in model.blocks:
            forward = block.forward
            block.forward = lambda h, r, f=forward: checkpoint(f, h, r, use_reentrant=False)
    with FlopCounterMode(display=False) as counter, set_checkpoint_early_stop(stops_early):
        model(x, x)[1].backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(("recompute", "stops_early"), [(0, 1), (1, 1), (1, 0)])
def test_flops_equal_the_counted_operations(recompute, stops_early):
    """算出的 FLOPs 与逐算子计数相差不到 0.1 %，含注意力，重算与否都是。"""
    arch = gpt(192, 3, 6, 256, 1000)
    ours = 2 * 256 * executed_flops_per_token(
        arch, recompute="full" if recompute else "none", stops_early=bool(stops_early)
    )
    counted = counted_flops(arch, 2, bool(recompute), bool(stops_early))
    assert abs(ours / counted - 1) < 1e-3, (ours, counted)


# --- 公开记录 -----------------------------------------------------------------------------

@pytest.mark.parametrize("run", published.MFU_RUNS, ids=lambda run: run.name)
def test_published_mfu(run):
    """重算的 MFU 与发布的相差不超过 0.1 个百分点，再加上发布值与输入的舍入。"""
    gap = abs(run.ours - run.published)
    assert gap <= 0.1 or gap <= run.rounding, f"{run.ours:.2f} 对 {run.published}"


def test_exact_mfu_rows_dominate():
    """至少三分之二的记录吻合到 0.1 个百分点，其余的舍入都写明了。"""
    close = [run for run in published.MFU_RUNS if abs(run.ours - run.published) <= 0.1]
    assert 3 * len(close) >= 2 * len(published.MFU_RUNS), len(close)


def test_how_many_runs_are_compared():
    """对照的是 19 条 MFU 与 9 次完整的训练（正文里的数）。"""
    assert (len(published.MFU_RUNS), len(published.WHOLE_RUNS)) == (19, 9)


def test_megatron_hfu_counts_the_attention_once_more():
    """Megatron 发布的 HFU 相当于把 12·L·T·d 又算了一遍；只重算它的前向，22B 应是 42.4 %。"""
    shapes = {"22B": (6144, 48, 64), "175B": (12288, 96, 96), "530B": (20480, 105, 128),
              "1T": (25600, 128, 160)}
    for name, (d, layers, heads) in shapes.items():
        arch = gpt2(d, layers, heads, 2048, 51200, bias=False)
        run = next(run for run in published.MFU_RUNS if run.name == f"Megatron {name}")
        again = 12 * layers * 2048 * d
        hfu = run.ours * (1 + again / executed_flops_per_token(arch))
        assert abs(hfu - published.MEGATRON_HFU[name]) < 0.2, f"{name} {hfu:.2f}"
        if name == "22B":
            forward = executed_flops_per_token(arch, recompute="selective")
            only = run.ours * forward / executed_flops_per_token(arch)
            assert f"{only:.1f}" == "42.4", only


def test_minimind_in_reverse():
    """minimind 没有发布 token 数：一张 3090、2.31 小时、MFU 40 % 大约能训 6 亿个 token。"""
    tokens = published.MINIMIND.flops / (6 * 64e6)
    assert 5.9e8 < tokens < 6.3e8, tokens
    assert published.MINIMIND.implied_mfu == pytest.approx(0.4)


@pytest.mark.parametrize("run", published.WHOLE_RUNS, ids=lambda run: run.name)
def test_run_times_within_the_mfu_range(run):
    """发布的时间落在 MFU 29 %–60 % 的预测之内；落在常见的 30–50 % 之外的都有解释。"""
    low, high = published.MFU_SEEN
    assert run.predicted(high) <= run.hours <= run.predicted(low), f"{run.implied_mfu:.1%}"
    usual = published.MFU_USUAL[0] <= run.implied_mfu <= published.MFU_USUAL[1]
    assert usual or len(run.why) > 8


def test_implied_mfu_of_whole_runs():
    """反推的 MFU：nanoGPT 29.2，LLaMA 43.4 / 51.4 / 45.8 / 47.7，nanochat 50.0。"""
    implied = {run.name: f"{100 * run.implied_mfu:.1f}" for run in published.WHOLE_RUNS}
    assert implied["nanoGPT 124M，8 张 A100"] == "29.2"
    llama = [value for name, value in implied.items() if name.startswith("LLaMA")]
    assert llama == ["43.4", "51.4", "45.8", "47.7"]
    assert implied["nanochat d24，8 张 H100"] == "50.0"


def test_prices_of_published_runs():
    """发布的花费除以卡时：llm.c 的 A100 约 1.6 美元，1558M 的 H100 3.5，nanochat 3.0。"""
    runs = {run.name: run for run in published.WHOLE_RUNS}
    rate = {n: r.cost / r.hours / r.gpus for n, r in runs.items() if r.cost}
    assert [round(v, 1) for v in rate.values()] == [1.6, 3.5, 3.0], rate


def test_llama3_total_compute():
    """Llama-3 405B：6ND 是 3.80e25，与发布的 3.8e25 相合。"""
    flops = planning.training_flops(
        PRESETS["llama3-405b"].params(), published.LLAMA3_405B_TOKENS
    )
    assert f"{flops:.1e}" == f"{published.LLAMA3_405B_FLOPS:.1e}"


def test_energy_of_llama():
    """LLaMA-65B 的 1,022,362 卡时、400 W、PUE 1.1 是 449 MWh（论文表 15 的数字）。"""
    run = published.WHOLE_RUNS[6]
    cost = planning.cost_of(run.flops, DEVICES["a100"], 2048, run.implied_mfu, None)
    assert cost.gpu_hours == pytest.approx(1_022_362)
    assert 449 <= cost.energy / 1000 < 451, cost.energy


# --- Chinchilla ---------------------------------------------------------------------------

@pytest.mark.parametrize(("params", "flops", "tokens"), published.CHINCHILLA_TABLE)
def test_twenty_tokens_per_parameter_follows_the_table(params, flops, tokens):
    """「每参数 20 个 token」与 Chinchilla 表 3 相差不到 8 %。"""
    n, d = budget.optimal_by_rule(flops)
    assert abs(n / params - 1) < 0.08 and abs(d / tokens - 1) < 0.08, (n, d)


# --- 显存 ---------------------------------------------------------------------------------

def test_published_zero_states():
    """ZeRO 论文：7.5 B 参数、64 张卡，每卡状态 120 → 31.4 → 16.6 → 1.9 GB。"""
    states = [
        f"{memory.zero_bytes_per_param(s, 64, 'paper') * 7.5:.1f}" for s in memory.STAGES
    ]
    assert states == ["120.0", "31.4", "16.6", "1.9"]


def test_two_ledgers_agree_only_at_the_ends():
    """4 + 4 + 8 与 2 + 2 + 12 都是 16 字节；ZeRO-1、2 下每参数差 3.9 与 2.0 字节。"""
    ours, paper = (
        [memory.zero_bytes_per_param(s, 64, ledger) for s in memory.STAGES]
        for ledger in ("book", "paper")
    )
    assert ours[0] == paper[0] == 16 and ours[3] == paper[3] == 0.25, (ours, paper)
    gaps = [round(a - b, 1) for a, b in zip(ours, paper, strict=True)]
    assert gaps == [0, 3.9, 2.0, 0], gaps


def test_no_peak_is_printed_for_what_was_never_tracked():
    """整步的峰值只给跟踪过的 DDP 与 FSDP；ZeRO-1/2 一句话拒绝，不拿两本账混出一个数。"""
    for stage in ("zero1", "zero2"):
        with pytest.raises(BudgetError, match="只会估 ddp、zero3"):
            memory.estimate(PRESETS["1.3b"], micro_batch=8, strategy=stage, gpus=8)
    names = [name for name, _ in budget.memory_rows(PRESETS["1.3b"], 8, 8, "compiled")]
    assert names == ["DDP", "FSDP（ZeRO-3）", "DDP + 重算", "FSDP（ZeRO-3） + 重算"]


def measured_rows() -> list[dict[str, str]]:
    with MEASURED.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_memory_estimate_within_ten_percent_of_tracked():
    """对 124M、1.3B、7B 的 eager、编译、重算与 FSDP，估计与逐张量跟踪的峰值相差不到 10 %。"""
    from benchmarks.track_memory import SHAPES, predict

    rows = measured_rows()
    assert {row["model"] for row in rows} == {"124M", "1.3B", "7B"}
    assert {row["variant"] for row in rows} == {"eager", "compiled", "checkpoint"}
    assert {row["strategy"] for row in rows} == {"ddp", "zero3"}
    for row in rows:
        now = predict(SHAPES[row["model"]], row["variant"], row["strategy"], int(row["gpus"]))
        error = now / float(row["peak_gb"]) - 1
        assert abs(error) < 0.10, f"{row['model']} {row['strategy']} {row['variant']} {error:+.1%}"


def test_what_the_page_says_of_activations():
    """1.3B 的激活：eager 实际近 34·s·b·d·L 的两倍，编译后每层少四分之一；峰值跨在九成两边。"""
    rows = {
        row["variant"]: row for row in measured_rows()
        if (row["model"], row["strategy"]) == ("1.3B", "ddp")
    }
    simple = memory.simple_activations(2048, 8, 2048, 24)
    assert 1.8 < float(rows["eager"]["activations_gb"]) / simple < 2.0
    layer = {e: sum(memory.layer_bytes(PRESETS["1.3b"], e).values()) for e in memory.EXECUTIONS}
    assert 0.70 < layer["compiled"] / layer["eager"] < 0.78, layer
    usable = memory.USABLE * 80
    assert float(rows["compiled"]["peak_gb"]) < usable < float(rows["eager"]["peak_gb"])


def test_what_the_exercises_say():
    """练习里的数：124M 的显存激活过半、logits 近三成；3B 读到 7B 的 loss，总账不到一半。"""
    from experiments.training.law import PUBLISHED

    m = make_plan(Request(
        123_587_328.0, "4090", 1, seq_len=1024, vocab_size=50304, arch=PRESETS["124m"]
    )).memory
    shares = m.activations / m.total, m.peak / m.total, m.states / m.total
    assert 0.5 < shares[0] < 0.6 and 0.26 < shares[1] < 0.3 and 0.15 < shares[2] < 0.18, shares
    law = PUBLISHED["Besiroglu 2024"]
    left = law.loss(7e9, 140e9) - law.E - law.A / 3e9**law.alpha
    tokens = (law.B / left) ** (1 / law.beta)
    train = [6 * 7e9 * 140e9, 6 * 3e9 * tokens]
    total = [train[0] + 2 * 7e9 * 10e12, train[1] + 2 * 3e9 * 10e12]
    assert 1.35 < train[1] / train[0] < 1.5 and total[1] < total[0] / 2, (train, total)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["eager", "compiled", "checkpoint"])
def test_tracked_live(variant):
    """在这台机器上重新跟踪一个小形状，估计的误差仍不到 10 %。"""
    from benchmarks.track_memory import Shape, predict, track

    shape = Shape(512, 2, 8, 512, 8, 16384)
    peak = track(shape, variant)["peak"]
    predicted = predict(shape, variant, "ddp", 1)
    assert abs(predicted / peak - 1) < 0.10, (predicted, peak)


@pytest.mark.slow
def test_tracked_live_fsdp():
    """FSDP2 也是：假的 8 卡进程组，估计的误差不到 10 %。"""
    from benchmarks.track_memory import Shape, predict, track_fsdp

    shape = Shape(512, 4, 8, 512, 8, 16384)
    peak = track_fsdp(shape, "eager", 8)["peak"]
    predicted = predict(shape, "eager", "zero3", 8)
    assert abs(predicted / peak - 1) < 0.10, (predicted, peak)


# --- 计划 ---------------------------------------------------------------------------------

def test_plan_of_one_billion_on_eight_h100():
    """1B 在 8 张 H100 上：20 B token、10.5 小时、DDP 放得下，batch 几百万 token。"""
    plan = make_plan(Request(1e9))
    assert plan.strategy == "ddp" and not plan.checkpoint
    assert plan.tokens == 20e9 and f"{plan.cost.hours:.1f}" == "10.5"
    assert plan.memory.total < memory.USABLE * 80
    assert plan.global_batch == plan.micro_batch * 2048 * 8 * plan.accumulation == 2**21
    assert abs(plan.arch.params() / 1e9 - 1) < 0.03


def test_plan_of_seven_billion_needs_fsdp():
    """7B 的状态 112 GB 放不进一张 H100：计划改用 FSDP，配置里就写着。"""
    plan = make_plan(Request(7e9, gpus=64))
    assert plan.strategy == "zero3" and planning.cannot_launch(plan) is None
    assert planning.config_values(plan, "id")["parallel"] == "fsdp"


def test_plan_prefers_recomputation_to_defeat():
    """一张 24 GB 的卡：1B 不重算放不下，重算后放得下。"""
    plan = make_plan(Request(1e9, "4090", gpus=1, seq_len=1024))
    assert plan.checkpoint and plan.memory.total < memory.USABLE * 24


def test_an_impossible_plan_names_the_nearest():
    """放不下的计划：一句话说差多少，以及加到几张卡、换什么卡、缩到多小就可行；每条都真可行。"""
    request = Request(7e10, gpus=8)
    with pytest.raises(BudgetError) as caught:
        make_plan(request)
    said = str(caught.value)
    gpus = int(said.split("同样的卡用 ")[1].split(" 张")[0])
    assert make_plan(replace(request, gpus=gpus))
    with pytest.raises(BudgetError):
        make_plan(replace(request, gpus=gpus // 2))
    device = said.split("换成 8 张 ")[1].split("（")[0]
    assert make_plan(replace(request, device=device))
    billions = float(said.split("模型缩到约 ")[1].split(" B")[0])
    assert make_plan(replace(request, params=0.99e9 * billions))


def test_the_plan_writes_what_train_gpu_reads(tmp_path, capsys, monkeypatch):
    """plan --out 写出的 TOML，train_gpu 的选项解析原样接受，并得到计划里的累积次数。"""
    from experiments.loop.command_line import parse
    from experiments.loop.options import Options, accumulation

    path = tmp_path / "plan.toml"
    words = ["plan", "--params", "1.3e9", "--gpus", "8", "--out", str(path)]
    monkeypatch.setattr(sys, "argv", ["budget.py", *words])
    budget.command_line()
    said = capsys.readouterr().out
    assert "torchrun --standalone --max-restarts 3 --nproc-per-node 8" in said
    options, _ = parse(
        Options, ["--config", str(path)], presets=ROOT / "experiments" / "presets", description=""
    )
    plan = make_plan(Request(1.3e9))
    assert (options.d_model, options.n_layer, options.seq_len) == (2048, 24, 2048)
    assert accumulation(options, 8) == plan.accumulation
    assert options.steps == plan.steps and options.warmup_steps < options.steps
    assert options.out_dir.startswith("runs/plan-")


# --- 启动 ---------------------------------------------------------------------------------

def said_by(monkeypatch, capsys, *args: str) -> str:
    """`budget.py` 这样启动时打印的全部。"""
    monkeypatch.setattr(sys, "argv", ["budget.py", *args])
    budget.command_line()
    return capsys.readouterr().out


def test_nodes_times_processes_is_the_number_of_gpus():
    """1 到 1024 张卡：印出的机器数 × 进程数恰好是卡数，放不满的被拒绝，给出的办法都真可行。"""
    refused = 0
    for gpus in range(1, 1025):
        try:
            nodes, processes = planning.nodes_of(gpus)
        except BudgetError as error:
            refused += 1
            nearest = str(error).split("请用 ")[1].split(" 张")[0]
            below, above = map(int, nearest.split(" 或 "))
            assert below < gpus < above == below + 8
            assert planning.nodes_of(below) and planning.nodes_of(above)
            if "--gpus-per-node" in str(error):
                even = int(str(error).split("--gpus-per-node ")[1].rstrip("。"))
                assert math.prod(planning.nodes_of(gpus, even)) == gpus
            continue
        assert nodes * processes == gpus and processes <= 8, (gpus, nodes, processes)
        line = planning.launch_command(gpus, "x.toml", "id")
        if nodes > 1:
            assert f"--nnodes {nodes} " in line and f"--nproc-per-node {processes} " in line
    assert refused == 1016 - 127, refused  # 9–1024 里不是 8 的倍数的


def test_a_plan_for_twenty_gpus_is_refused_with_the_nearest(monkeypatch, capsys):
    """`plan --gpus 20` 曾印出 3 × 6 = 18 个进程：现在拒绝，给出 16、24 与每台 5 张。"""
    monkeypatch.setattr(sys, "argv", ["budget.py", "plan", "--params", "1e9", "--gpus", "20"])
    with pytest.raises(SystemExit) as caught:
        budget.command_line()
    said = capsys.readouterr().err
    assert caught.value.code == 2 and "16 或 24 张" in said and "--gpus-per-node 5" in said, said
    five = said_by(monkeypatch, capsys, "plan", "--params", "1e9", "--gpus", "20",
                   "--gpus-per-node", "5")
    assert "--nnodes 4 " in five and "--nproc-per-node 5 " in five, five


def test_every_launch_has_its_own_id(monkeypatch, capsys, tmp_path):
    """两次 plan 印出的 --rdzv-id 与 out_dir 都不同，同一次里两者一致；data 写进配置。"""
    import tomllib

    seen = set()
    for name in ("a.toml", "b.toml"):
        path = tmp_path / name
        said = said_by(monkeypatch, capsys, "plan", "--params", "1e9", "--gpus", "16",
                       "--data", "big/tokens.pt", "--out", str(path))
        launch_id = said.split("--rdzv-id ")[1].split()[0]
        values = tomllib.loads(path.read_text(encoding="utf-8"))
        assert values["out_dir"] == f"runs/{launch_id}" and values["data"] == "big/tokens.pt"
        seen.add(launch_id)
    assert len(seen) == 2, seen


def test_launch_line_is_the_one_that_ranks_would_show():
    """计划印出的单机启动命令与 `ranks.launch.shown` 给出的一字不差。"""
    from experiments.ranks.launch import shown

    flags = ("--standalone", "--max-restarts", "3")
    script = "experiments/train_gpu.py"
    for config in ("runs/plan.toml", "my runs/plan.toml"):
        right = shown(script, "--config", config, nproc=8, flags=flags)
        assert planning.launch_command(8, config, "id") == right
        assert planning.launch_command(1, config, "id") == shown(script, "--config", config)


def test_a_global_batch_is_kept_or_refused():
    """指定的全局 batch 要么一个 token 不差，要么拒绝并给出最近的；绝不悄悄换掉。"""
    with pytest.raises(BudgetError, match="最近的是 16,384"):
        Request(1e9, global_batch=2048)
    for sequences in (1, 3, 5, 96, 100, 511, 512):
        plan = make_plan(Request(1e9, global_batch=sequences * 8 * 2048))
        assert plan.global_batch == sequences * 8 * 2048, (sequences, plan.global_batch)
        assert plan.micro_batch * plan.accumulation == sequences


def test_a_crowd_of_gpus_enlarges_the_batch_aloud():
    """没有指定 batch、卡又太多时，放大后的 batch 与常用的大小一起印出来。"""
    from experiments.plan.report import report

    assert "这个规模常用 524,288" in report(make_plan(Request(1e8, gpus=4096)))["batch"]
    assert "常用" not in report(make_plan(Request(1e9)))["batch"]
    assert "常用" not in report(make_plan(Request(1e9, gpus=6)))["batch"]


@pytest.mark.parametrize("words", [
    ("plan", "--model", "gpt2-124m", "--seq-len", "4096"),
    ("count", "--model", "gpt2-124m", "--seq-len", "1025"),
    ("plan", "--model", "mpt-7b", "--seq-len", "4096"),
])
def test_learned_positions_are_not_exceeded(monkeypatch, capsys, words):
    """可学的位置表有几行，序列就最多几个 token：超出的计划被拒绝，不设长度时取得下的。"""
    monkeypatch.setattr(sys, "argv", ["budget.py", *words])
    with pytest.raises(SystemExit) as caught:
        budget.command_line()
    assert caught.value.code == 2 and "位置表只有" in capsys.readouterr().err


def test_short_models_are_planned_at_their_own_length(monkeypatch, capsys):
    """没有给 --seq-len 时，GPT-2 按它的 1024 个位置计划，而不是 2048。"""
    assert "序列 1024" in said_by(monkeypatch, capsys, "plan", "--model", "gpt2-124m")


def test_tilde_means_home(monkeypatch, capsys, tmp_path):
    """`--out=~/plan.toml` 写到家目录，印出的命令用的是同一个文件；读 config.json 也认 ~。"""
    monkeypatch.setenv("HOME", str(tmp_path))
    said = said_by(monkeypatch, capsys, "plan", "--params", "1e9", "--out=~/a b/plan.toml")
    path = tmp_path / "a b" / "plan.toml"
    assert path.exists() and f"--config '{path}'" in said, said
    (tmp_path / "config.json").write_text(QWEN3)
    said = said_by(monkeypatch, capsys, "count", "--config-json=~/config.json")
    assert "596,049,920" in said


@pytest.mark.parametrize("encoding", ["gbk", "latin-1", "ascii", "cp437", "shift_jis"])
@pytest.mark.parametrize("words", [("--help",), ("plan", "--help"), ("plan", "--params", "1e9"),
                                   ("plan", "--params", "-1"), ()])
def test_narrow_encodings_do_not_kill(monkeypatch, encoding, words):
    """stdout 只会 gbk 或更窄的编码时照样印完；写不出的字换成问号，没有 UnicodeEncodeError。"""
    import io

    streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2)]
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    monkeypatch.setattr(sys, "argv", ["budget.py", *words])
    try:
        budget.command_line()
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    for stream in streams:
        stream.flush()
    printed = [stream.buffer.getvalue() for stream in streams]
    assert code == (2 if "-1" in words else 0) and len(printed[code // 2]) > 40, printed


@pytest.mark.parametrize(("args", "said"), [
    (("plan",), "要给出模型"),
    (("plan", "--params", "-1"), "参数量"),
    (("plan", "--params", "nan"), "参数量"),
    (("plan", "--params", "1e9", "--gpus", "0"), "卡数"),
    (("plan", "--params", "1e9", "--device", "h101"), "没有叫 h101 的设备"),
    (("plan", "--params", "1e9", "--mfu", "1.2"), "不可能超过 1"),
    (("plan", "--params", "1e9", "--out", "/proc/nowhere/x.toml"), "写不了"),
    (("memory", "--model", "9b"), "没有叫 9b 的预设"),
    (("optimal", "--money", "10", "--device", "b200"), "--price"),
    (("optimal",), "要给一个"),
    (("count", "--config-json", "no.json"), "读不了"),
])
def test_nonsense_is_refused_in_one_sentence(capsys, monkeypatch, args, said):
    """不合理的输入：stderr 上一句话，退出码 2，没有 traceback。"""
    monkeypatch.setattr(sys, "argv", ["budget.py", *args])
    with pytest.raises(SystemExit) as caught:
        budget.command_line()
    message = capsys.readouterr().err
    assert caught.value.code == 2 and said in message, message
    assert message.count("\n") == 1 and "Traceback" not in message


# --- 性质 ---------------------------------------------------------------------------------

sizes = st.floats(1e7, 1e12)
shapes = st.builds(
    lambda heads, layers, vocab, kv: llama(
        128 * heads, layers, heads, heads if kv else 1, 352 * heads, vocab, 2048, tied=kv
    ),
    st.integers(1, 64), st.integers(1, 100), st.integers(256, 200_000), st.booleans(),
)


@given(sizes, st.floats(1.01, 10), st.sampled_from(sorted(DEVICES)), st.integers(1, 4096))
@settings(deadline=None)
def test_cost_grows_with_size(params, more, name, gpus):
    """更大的模型要更多算力、时间、钱和电；卡数加倍，时间减半，卡时不变。"""
    device = DEVICES[name]

    def cost(n: float, cards: int) -> planning.Cost:
        return planning.cost_of(planning.training_flops(n, 20 * n), device, cards, 0.4, 2.0)

    small, large = cost(params, gpus), cost(more * params, gpus)
    assert small.hours < large.hours and small.price < large.price
    assert small.energy < large.energy
    twice = cost(params, 2 * gpus)
    assert twice.hours == pytest.approx(small.hours / 2)
    assert twice.gpu_hours == pytest.approx(small.gpu_hours)


@given(
    shapes, st.integers(1, 32), st.integers(1, 1024), st.sampled_from(memory.EXECUTIONS),
    st.booleans(),
)
@settings(deadline=None)
def test_zero_never_needs_more_than_ddp(arch, micro, gpus, execution, checkpoint):
    """每多分摊一样，状态不增；任何 ZeRO 的每卡显存都不超过 DDP。"""
    for ledger in memory.LEDGERS:
        states = [memory.zero_bytes_per_param(s, gpus, ledger) for s in memory.STAGES]
        assert states == sorted(states, reverse=True)
    totals = [
        memory.estimate(
            arch, micro_batch=micro, strategy=s, gpus=gpus, execution=execution,
            checkpoint=checkpoint,
        ).total
        for s in memory.STRATEGIES
    ]
    assert all(total <= totals[0] * (1 + 1e-12) for total in totals), totals


@given(
    shapes, st.integers(1, 32), st.integers(1, 64), st.sampled_from(memory.STRATEGIES),
    st.sampled_from(memory.EXECUTIONS), st.booleans(),
)
@settings(deadline=None)
def test_memory_grows_with_batch_and_depth(arch, micro, gpus, strategy, execution, checkpoint):
    """micro-batch 加一、层数加一，显存都增；重算不增；编译的激活不多于 eager。"""
    def total(a: Architecture, m: int, **kw) -> float:
        options = {"execution": execution, "checkpoint": checkpoint} | kw
        return memory.estimate(a, micro_batch=m, strategy=strategy, gpus=gpus, **options).total

    here = total(arch, micro)
    assert total(arch, micro + 1) >= here
    assert total(replace(arch, n_layer=arch.n_layer + 1), micro) > here
    layer = {e: sum(memory.layer_bytes(arch, e).values()) for e in memory.EXECUTIONS}
    assert layer["compiled"] < layer["eager"]


@given(st.floats(10, 1e7), st.floats(0.05, 20), st.floats(0.05, 1), st.floats(1, 200))
def test_money_survives_a_round_trip(money, price, mfu, ratio):
    """钱 → 算力 → (N, D) → 小时 → 钱：单位转一圈回到原处。"""
    device = DEVICES["h100"]
    flops = budget.flops_for_money(money, price, device.peak_bf16, mfu)
    params, tokens = budget.optimal_by_rule(flops, ratio)
    again = planning.cost_of(planning.training_flops(params, tokens), device, 8, mfu, price)
    assert again.price == pytest.approx(money, rel=1e-9)
    assert tokens / params == pytest.approx(ratio)


@given(sizes, st.integers(1, 2048), st.sampled_from(["a100", "h100", "4090", "b200"]))
@settings(deadline=None, max_examples=30)
def test_every_plan_keeps_its_promises(params, gpus, device):
    """排出的计划：显存在九成以内，batch 恰好由三个整数相乘，步数够看完全部 token。"""
    try:
        plan = make_plan(Request(params, device, gpus))
    except BudgetError as error:
        assert "放不进" in str(error) and "\n" not in str(error)
        return
    assert plan.memory.total <= memory.USABLE * plan.capacity
    assert plan.global_batch == plan.micro_batch * 2048 * gpus * plan.accumulation
    assert (plan.steps - 1) * plan.global_batch < plan.tokens <= plan.steps * plan.global_batch
    assert math.isfinite(plan.cost.hours) and plan.cost.hours > 0
    assert abs(plan.arch.params() / params - 1) < 0.25


# --- 设备表 -------------------------------------------------------------------------------

@pytest.mark.parametrize(("name", "found"), [
    ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 PCIe", "h100-pcie"),
    ("NVIDIA H100 NVL", "h100-nvl"), ("NVIDIA A100-SXM4-40GB", "a100"),
    ("NVIDIA GeForce RTX 4090", "4090"), ("NVIDIA L4", "l4"), ("NVIDIA L40S", "l40s"),
    ("NVIDIA GB200", "gb200"), ("AMD Instinct MI300X", "mi300x"), ("NVIDIA GH200 480GB", None),
    ("NVIDIA RTX A4000", None), ("NVIDIA A10G", None), ("NVIDIA GeForce RTX 4090 D", None),
    ("NVIDIA GeForce RTX 3090 Ti", None), ("NVIDIA H200 NVL", None), ("NVIDIA L40", None),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None), ("AMD Instinct MI250X", None),
    ("GRID A100-10C", None), ("GRID A100D-80C", None), ("NVIDIA A40-48Q", None),
    ("NVIDIA A100-4-20C", None), ("NVIDIA L40S-12C", None), ("NVIDIA A10-24Q", None),
    ("NVIDIA H100XM-80C", None), ("NVIDIA L4-24A", None), ("NVIDIA A30-1-6C", None),
    ("NVIDIA A100-SXM-64GB", None), ("NVIDIA A100 80GB PCIe", "a100"),
])
def test_devices_are_known_or_unknown_never_guessed(name, found):
    """按 torch 报告的名字认卡：认得的给对峰值，名字相近的另一种卡一律不认。"""
    assert find_device(name) == (DEVICES[found] if found else None)
