"""`train_gpu --parallel、--tensor-parallel、--recompute`：怎样切都与一个进程训练出同样的模型。"""

import io
import logging
from pathlib import Path

import pytest
import torch
from tiny_training import tiny
from torch.distributed.tensor import DTensor

from experiments import train_gpu
from experiments.loop import parallel, shards
from experiments.loop import start as start_module
from experiments.loop.batches import Feed, evaluation_batches, load_data, step_batches
from experiments.loop.checkpoint import peek
from experiments.loop.command_line import parse
from experiments.loop.options import Options, check, structure_of
from experiments.loop.run import build
from experiments.loop.start import Start, same_everywhere
from experiments.ranks.launch import run_ranks
from experiments.ranks.traffic import Traffic
from experiments.ranks.world import World
from experiments.training.recipe import learning_rate, set_learning_rate
from model import GPT, IGNORE_INDEX, GPTConfig
from tokens.errors import UserError

ONE = World(0, 1, torch.device("cpu"))
STEPS = 30
# 与 fsdp、tensor_parallel 两章同样大小的模型；不用 fused_loss：张量并行不用它
SHAPE = {"vocab_size": 1024, "d_model": 64, "n_head": 4, "n_layer": 2, "seq_len": 64,
         "micro_batch": 2, "global_batch_tokens": 1024, "steps": STEPS, "decay_steps": STEPS,
         "warmup_steps": 10, "fused_loss": False, "eval_tokens": 640}  # fmt: skip
LAYOUTS = {
    "fsdp": {"parallel": "fsdp"},
    "fsdp 不放掉": {"parallel": "fsdp", "reshard": False},
    "tp": {"tensor_parallel": 2},
    "fsdp × tp": {"parallel": "fsdp", "tensor_parallel": 2},
    "ddp + 重算": {"recompute": "blocks"},
    "fsdp + 重算": {"parallel": "fsdp", "recompute": "blocks"},
    "tp 4": {"tensor_parallel": 4},
}


def options_for(**changes) -> Options:
    return tiny(Path("/unused"), **SHAPE | changes)


def assembled(options: Options, world: World):
    """train_gpu 组装好的一次训练。"""
    check(options, world.size)
    return build(Start(options, structure_of(options)), world, load_data(options))


def train_some(world: World, options: Options, steps: int = STEPS) -> dict:
    """走 `steps` 步：第一步的梯度（裁剪之前）、每步的 (loss, 范数)、最后的权重与验证 loss。

    名字与次序都换成单进程的。
    """
    run = assembled(options, world)
    feed, noted, first = Feed(run.data["train"], 0, options, run.layout.readers), [], {}
    original = train_gpu.clip

    def clip(parameters, limit):
        if not first:
            first.update(named(run.raw, lambda p: p.grad))
        return original(parameters, limit)

    train_gpu.clip = clip
    try:
        for step in range(steps):
            rate = learning_rate(step, peak=options.lr, warmup=options.warmup_steps, total=steps)
            set_learning_rate(run.optimizers[0], rate)
            loss, norm = train_gpu.train_step(run, feed)
            noted.append((loss.item(), norm.item()))
    finally:
        train_gpu.clip = original
    losses = train_gpu.evaluate(run)
    return {"gradient": first, "noted": torch.tensor(noted), "val": losses["val_loss"],
            "end": named(run.raw, lambda p: p), "kept": kept_bytes(run.raw)}


def trained(world: World, options: Options, steps: int = STEPS) -> bytes:
    """`train_some`，答案打成字节：张量经过管道时要发送的进程还活着才读得到。"""
    buffer = io.BytesIO()
    torch.save(train_some(world, options, steps), buffer)
    return buffer.getvalue()


def opened(answer: bytes) -> dict:
    return torch.load(io.BytesIO(answer), weights_only=True)


def named(model: GPT, value) -> dict[str, torch.Tensor]:
    """每个参数的 `value(p)` 拼全，名字是单进程的。"""
    # 两个轴切了同一维时，拼全要两次 all-gather，每个进程都会提醒一次；这里只为比较，不要紧
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    found = {name: whole(value(p)).detach().clone() for name, p in model.named_parameters()}
    return shards.join_names(found)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """DTensor 拼全；普通的张量原样返回。"""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def kept_bytes(model: GPT) -> int:
    """这个进程手里的权重，字节。"""
    return sum(parallel.local(p).nbytes for p in model.parameters())


def gap(ours: dict, theirs: dict) -> float:
    assert ours.keys() == theirs.keys()
    return max((ours[name] - theirs[name]).abs().max().item() for name in theirs)


@pytest.fixture(scope="module")
def alone() -> dict:
    """一个进程走 30 步。"""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return train_some(ONE, options_for())
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)


CASES = [("fsdp", 2), ("fsdp 不放掉", 2), ("tp", 2), ("ddp + 重算", 2), ("fsdp", 4),
         ("fsdp × tp", 4), ("fsdp + 重算", 4), ("tp 4", 4)]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "size"), CASES)
def test_every_layout_equals_one_process(alone, layout, size):
    """第一步的梯度差到最大梯度的 10⁻⁶ 之内，30 步 AdamW 之后参数差 < 10⁻⁴，loss、范数也相同。"""
    answers = run_ranks(trained, size, options_for(**LAYOUTS[layout]))
    everyone = [opened(answer) for answer in answers]
    got = everyone[0]
    largest = max(g.abs().max().item() for g in alone["gradient"].values())
    gradient = gap(got["gradient"], alone["gradient"]) / largest
    end = gap(got["end"], alone["end"])
    said = f"梯度 {gradient:.1e}，参数 {end:.1e}"
    assert gradient < 1e-6 and end < 1e-4, said
    assert torch.allclose(got["noted"], alone["noted"], atol=2e-4), got["noted"] - alone["noted"]
    assert abs(got["val"] - alone["val"]) < 1e-4, (got["val"], alone["val"])
    for other in everyone[1:]:
        assert gap(other["end"], got["end"]) == 0.0 and other["val"] == got["val"]


def test_each_rank_keeps_its_share(alone):
    """切成 4 份的 FSDP 与 2 × 2 各留 1/4 的权重（增益除外），重算与否不变；一个进程是全部。"""
    full = alone["kept"]
    gains = 4 * sum(1 for name in alone["end"] if "norm" in name) * SHAPE["d_model"]
    kept = run_ranks(shares, 4)[0]
    assert kept["fsdp"] == full // 4, (kept, full)
    assert kept["fsdp × tp"] == (full - gains) // 4 + gains // 2, (kept, full)


def shares(world: World) -> dict[str, int]:
    return {name: kept_bytes(assembled(options_for(**LAYOUTS[name]), world).raw)
            for name in ("fsdp", "fsdp × tp")}  # fmt: skip


# ---------------------------------------------------------------- 重算、累积、混合精度


def test_recomputation_changes_no_bit_and_keeps_less(alone):
    """--recompute blocks：一个进程的 30 步与不重算逐位相同；前向为反向留下的字节少一半以上。"""
    torch.set_num_threads(1)
    again = train_some(ONE, options_for(recompute="blocks"))
    assert gap(again["end"], alone["end"]) == 0.0 and again["val"] == alone["val"]
    kept = {}
    for how in ("none", "blocks"):
        model = GPT(GPTConfig(64, 64, 4, 6, 64))
        if how == "blocks":
            parallel.recompute_blocks(model)
        sizes = []
        ids = torch.zeros(8, 64, dtype=torch.long)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, sizes=sizes: sizes.append(t.nbytes) or t, lambda t: t
        ):
            model(ids, ids)
        kept[how] = sum(sizes)
    assert kept["blocks"] < kept["none"] / 2, kept


def traffic_of(world: World) -> dict:
    """FSDP 累积 4 次的一步：两种切法各通信几次。"""
    found = {}
    for name in ("fsdp", "fsdp 不放掉"):
        run = assembled(options_for(**LAYOUTS[name]), world)
        feed = Feed(run.data["train"], 0, run.options, run.layout.readers)
        train_gpu.train_step(run, feed)  # 第一次多一些准备
        with Traffic() as traffic:
            train_gpu.train_step(run, feed)
        found[name] = (run.accumulation, traffic.calls("all_gather"),
                       traffic.calls("reduce_scatter"))  # fmt: skip
    return found


def test_zero3_reduces_every_micro_batch_and_zero2_only_the_last():
    """累积 4 次、2 层：ZeRO-3 每份集齐、归约各单元；--no-reshard 整步只集齐一次、归约一次。"""
    found = run_ranks(traffic_of, 2)[0]
    k, gathers, reductions = found["fsdp"]
    assert (k, reductions) == (4, 4 * 3), found  # 两层加根，三个单元
    assert gathers == 4 * (3 + 3), found  # 前向之后放掉，反向再集齐一次
    assert found["fsdp 不放掉"] == (4, 3, 3), found


def dtypes(world: World) -> dict:
    """bf16：主权重、梯度、优化器、激活、loss 各是什么类型。"""
    run = assembled(options_for(parallel="fsdp", dtype="bfloat16"), world)
    seen = {}
    run.raw.blocks[0].register_forward_hook(lambda m, i, out: seen.update(activation=out.dtype))
    feed = Feed(run.data["train"], 0, run.options, run.layout.readers)
    loss, norm = train_gpu.train_step(run, feed)
    parameter = run.raw.blocks[0].mlp.up.weight
    moment = run.optimizers[0].state[parameter]["exp_avg"]
    return {**seen, "master": parameter.dtype, "moment": moment.dtype, "loss": loss.dtype,
            "value": loss.item()}  # fmt: skip


def test_mixed_precision_keeps_the_master_weights():
    """bf16 的 FSDP：激活是 bf16，主权重、两个矩与 loss 是 fp32；第一步的 loss 仍约 ln V。"""
    got = run_ranks(dtypes, 2)[0]
    assert got["activation"] == torch.bfloat16, got
    assert got["master"] == got["moment"] == got["loss"] == torch.float32, got
    assert abs(got["value"] - torch.tensor(1024.0).log().item()) < 0.1, got


# ---------------------------------------------------------------- 评估与数据


def test_the_validation_set_does_not_depend_on_micro_batch(tmp_path):
    """--eval-tokens 定下评估集：micro-batch 1、3、4，1、2、3 份进程，读的都是同样的序列各一次。"""
    tokens = torch.arange(5000) % 251
    wanted = None
    for micro in (1, 3, 4):
        options = tiny(tmp_path, eval_tokens=13 * 32, micro_batch=micro)
        for size in (1, 2, 3):
            rows, counts = [], set()
            for rank in range(size):
                world = World(rank, size, torch.device("cpu"))
                batches = list(evaluation_batches(tokens, "val", options, world))
                counts.add(len(batches))
                assert all(x.shape == (micro, 32) for x, _ in batches), "形状变了，编译过的要重来"
                rows += [tuple(row.tolist()) for x, y in batches
                         for row, target in zip(x, y, strict=True)
                         if (target != IGNORE_INDEX).any()]  # fmt: skip
            assert len(counts) == 1, f"{size} 个进程走的次数不同，切开时会一直等"
            wanted = wanted or sorted(rows)
            assert len(rows) == 13 and sorted(rows) == wanted, (micro, size)


def reads(world: World) -> list:
    """每个进程第一步读到的输入。"""
    run = assembled(options_for(parallel="fsdp", tensor_parallel=2), world)
    feed = Feed(run.data["train"], 0, run.options, run.layout.readers)
    return [feed.take()[0].tolist() for _ in range(run.accumulation)]


def test_partners_in_a_matrix_read_the_same_rows():
    """4 个进程、2 × 2：合切一个矩阵的 0、1 号读同样的序列，2、3 号读另外的，合起来是全局 batch。"""
    zero, one, two, three = run_ranks(reads, 4)
    assert zero == one and two == three and zero != two
    options = options_for()
    tokens = load_data(options)["train"]
    whole_batch = [x.tolist() for x, _ in step_batches(tokens, 0, options, 0, 1)]
    both = [x for pair in zip(zero, two, strict=True) for x in pair]
    assert both == whole_batch


# ---------------------------------------------------------------- 拒绝


@pytest.mark.parametrize(
    ("size", "changes", "needed"),
    [(2, {"tensor_parallel": 3}, "不能平分 2 个进程"),
     (4, {"tensor_parallel": 4, "n_head": 2}, "不能平分 2 个头"),
     (2, {"tensor_parallel": 2, "vocab_size": 1023}, "不能平分 1023 个词"),
     (2, {"tensor_parallel": 2, "fused_loss": True}, "--no-fused-loss"),
     (2, {"parallel": "fsdp", "optimizer": "muon"}, "请用 adamw"),
     (2, {"parallel": "fsdp", "dtype": "float16"}, "bfloat16 或 float32"),
     (2, {"tensor_parallel": 0}, "不小于 1"),
     (4, {"tensor_parallel": 2, "global_batch_tokens": 384}, "2 组进程 = 256 整除")],
)  # fmt: skip
def test_what_cannot_be_cut_is_refused_at_once(size, changes, needed):
    """切不开、不能同用的组合：分配任何东西之前一句话拒绝。"""
    with pytest.raises(UserError, match=needed):
        check(options_for(**changes), size)


def test_tensor_parallel_stays_inside_a_machine(monkeypatch):
    """两台机器、每台一个进程：张量并行 2 会跨机器，拒绝。"""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(UserError, match="一台机器上的"):
        check(options_for(tensor_parallel=2), 2)


def disagree(world: World, what: str) -> str:
    """1 号进程的选项、PyTorch 或代码不同；返回报的错。"""
    options = options_for(lr=2e-3 if what == "选项" and world.rank else 1e-3)
    if what == "代码" and world.rank:
        start_module.code_digest = lambda: "别的"
    if what == "PyTorch" and world.rank:
        torch.__version__ = "2.0.0"
    try:
        same_everywhere(options, world)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("what", ["选项", "代码", "PyTorch", "相同"])
def test_ranks_that_disagree_stop_together(what):
    """两个进程的选项、代码或 PyTorch 不同：每个进程都报同一句，说出是哪个进程、哪一样。"""
    said = run_ranks(disagree, 2, what)
    if what == "相同":
        assert said == ["", ""]
        return
    assert said[0] == said[1] and "1 号进程" in said[0] and what in said[0], said


# ---------------------------------------------------------------- 计划


def test_a_plan_that_needs_fsdp_starts_as_printed(tmp_path, monkeypatch, capsys):
    """`budget.py plan --out` 写的 FSDP 加重算的配置：train_gpu 原样接受，真的切开、重算地训练。"""
    import sys

    from experiments import budget

    path = tmp_path / "plan.toml"
    words = ["plan", "--params", "7e10", "--gpus", "64", "--out", str(path)]
    monkeypatch.setattr(sys, "argv", ["budget.py", *words])
    budget.command_line()
    said = capsys.readouterr().out
    assert f"--nproc-per-node 8 experiments/train_gpu.py --config {path}" in said, said
    options, _ = parse(Options, ["--config", str(path)], presets=train_gpu.PRESETS, description="")
    check(options, 64)
    assert (options.parallel, options.recompute) == ("fsdp", "blocks"), options
    small = ["--config", str(path), "--d-model", "32", "--n-head", "2", "--n-layer", "2",
             "--vocab-size", "256", "--seq-len", "32", "--micro-batch", "4", "--steps", "2",
             "--global-batch-tokens", "512", "--data", "synthetic", "--device", "cpu",
             "--out-dir", str(tmp_path / "run"), "--no-compile", "--dtype", "float32",
             "--eval-tokens", "128"]  # fmt: skip
    assert run_ranks(launched, 2, small) == [0, 0]
    found = peek(tmp_path / "run" / "last.pt")
    assert found["step"] == 2 and found["config"]["parallel"] == "fsdp" and "shards" in found


def launched(world: World, words: list[str]) -> int:
    """在已有的进程组里执行一条 train_gpu 的命令。"""
    options, given = parse(Options, words, presets=train_gpu.PRESETS, description="")
    with train_gpu.status.exclusive(Path(options.out_dir), world):
        return train_gpu.train(options, given, world, 0.0)[0]
