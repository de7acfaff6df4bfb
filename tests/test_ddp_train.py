"""`experiments/ddp_train.py` 的断言：与单进程相同，通信数得清，错误用法各错在哪里。"""

import socket
import time
from datetime import timedelta

import pandas as pd
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from experiments import ddp_train as dt
from experiments.lab.results import results_folder
from experiments.ranks.launch import run_ranks
from experiments.ranks.world import World, torchrun_world
from model import GPT, GPTConfig
from tokens import global_batch
from tokens.errors import UserError

TINY = GPTConfig(vocab_size=64, d_model=32, n_head=1, n_layer=1, seq_len=16)


# ---------------------------------------------------------------- 不需要进程组的


def test_accumulation_divides_by_the_world_size():
    """累积次数 = 全局 batch ÷（micro × 进程总数）：两台 8 卡的机器除以 16（nanoGPT #283）。"""
    assert dt.accumulation_steps(480, 12, 8) == 5
    assert dt.accumulation_steps(480, 6, 16) == 5
    assert dt.accumulation_steps(16, 8, 2) == 1


@pytest.mark.parametrize(("batch", "micro", "world"), [(100, 12, 8), (8, 8, 2), (0, 1, 1)])
def test_indivisible_batches_are_refused(batch, micro, world):
    """全局 batch 不是 micro × ranks 的整数倍：一句话，带着给了什么、该改成什么。"""
    with pytest.raises(UserError, match=f"全局 batch {batch} .*例如") as error:
        dt.accumulation_steps(batch, micro, world)
    suggested = int(str(error.value).split("例如 ")[1].split("）")[0])
    assert suggested > 0 and suggested % (micro * world) == 0, f"建议的 {suggested} 也不行"


def test_shards_are_disjoint_and_complete():
    """各 rank 的行拼起来正好是全局 batch；token 流的各段互不重叠。"""
    x = torch.arange(24).view(12, 2)
    parts = [dt.shard((x, x + 1), rank, 3) for rank in range(3)]
    assert torch.equal(torch.cat([a for a, _ in parts]), x)
    with pytest.raises(ValueError, match="12 行不能平分给 5 个 rank"):
        dt.shard((x, x), 0, 5)
    stream = torch.arange(10)
    pieces = torch.cat([dt.token_shard(stream, rank, 3) for rank in range(3)])
    assert pieces.tolist() == list(range(9)), f"{pieces.tolist()}"


def test_global_batch_does_not_depend_on_the_rank_count():
    """第 s 步的全局 batch 只由 (seed, s) 决定：2 个 rank 与 4 个 rank 合起来读的是同样的行。"""
    data = torch.arange(1000)
    a, b = (global_batch(data, 3, 8, 16, 0)[0] for _ in range(2))
    two = torch.cat([dt.shard((a, a), r, 2)[0] for r in range(2)])
    four = torch.cat([dt.shard((b, b), r, 4)[0] for r in range(4)])
    assert torch.equal(two, four)
    assert not torch.equal(a, global_batch(data, 4, 8, 16, 0)[0]), "下一步读了同样的数据"


def test_sampler_splits_by_rank_and_needs_set_epoch():
    """DistributedSampler：各 rank 不重叠、合起来是全部；不调 set_epoch 每个 epoch 次序相同。"""
    for set_epoch in (False, True):
        rows = pd.DataFrame(dt.sampler_orders(10, 2, 2, set_epoch))
        for epoch in (0, 1):
            orders = rows[rows.epoch == epoch].order
            seen = sorted(int(i) for order in orders for i in order.split())
            assert seen == list(range(10)), f"第 {epoch} 个 epoch 读了 {seen}"
        first, second = (rows[(rows.epoch == e) & (rows["rank"] == 0)].order.item() for e in (0, 1))
        assert (first != second) is set_epoch, f"set_epoch={set_epoch}：{first} / {second}"


def test_without_torchrun_it_names_the_command(run_script):
    """直接用 python 启动：一句话给出正确的命令，退出码 2，没有 traceback。"""
    done = run_script("experiments/ddp_train.py")
    assert done.returncode == 2, f"退出码 {done.returncode}"
    assert dt.COMMAND in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"per_rank": -1}, {"d_model": 65}, {"lr": -1.0}])
def test_wrong_options_are_refused(wrong):
    """不能用的选项在加入进程组之前就被拒绝，消息里有给的那个值。"""
    with pytest.raises(UserError, match=str(next(iter(wrong.values())))):
        dt.main(dt.Options(**wrong))


def test_a_taken_port_is_one_sentence(monkeypatch):
    """会合的端口被占：一句话说出地址和怎么办，没有 traceback。"""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
        for name, value in names.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
        expected = pytest.raises(UserError, match=f"127.0.0.1:{port}.*端口被占")
        with expected, torchrun_world(dt.COMMAND):
            pass


# ---------------------------------------------------------------- 像读者那样运行一次


@pytest.fixture(scope="module")
def finished(run_script, tokens, tmp_path_factory):
    """`torchrun --standalone --nproc-per-node 2 experiments/ddp_train.py` 的输出。"""
    done = run_script("experiments/ddp_train.py", "--checkpoint",
                      tmp_path_factory.mktemp("ddp") / "model.pt", nproc=2)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def result(name: str) -> pd.DataFrame:
    return pd.read_csv(results_folder() / f"ddp_train_{name}.csv")


@pytest.mark.slow
def test_two_ranks_equal_one_process(finished):
    """2 个 gloo 进程 × 30 步与单进程算 16 个序列：参数最多差不到 1e-4，而参数走了 1e-2 以上。"""
    row = result("equivalence").iloc[0]
    assert (row.ranks, row.steps) == (2, 30)
    assert row.param_diff < 1e-4, f"参数最大差 {row.param_diff}"
    assert row.param_moved > 1e-2, f"参数只动了 {row.param_moved}，比较没有意义"
    assert row.rank_spread == 0.0, f"两个 rank 的参数差 {row.rank_spread}"


@pytest.mark.slow
def test_logged_loss_is_the_mean_over_ranks(finished):
    """记录的 loss 是各 rank 的平均，每一步都与单进程的相差不到 1e-4，并且在下降。"""
    trace = result("loss")
    gap = (trace.ddp - trace.single).abs().max()
    assert len(trace) == 30 and gap < 1e-4, f"{len(trace)} 步，最大差 {gap}"
    assert trace.ddp.iloc[-5:].mean() < trace.ddp.iloc[:5].mean() - 0.3, f"{trace.ddp.tolist()}"


@pytest.mark.slow
def test_initial_weights_are_broadcast(finished):
    """种子不同的两个 rank，套上 DDP 就一样了；关掉广播，训练 3 步之后仍然不一样。"""
    on, off = result("weights").sort_values("broadcast", ascending=False).to_dict("records")
    assert on["before"] > 0.01 and on["after"] == 0.0 and on["after_3_steps"] == 0.0, f"{on}"
    assert off["after"] > 0.01 and off["after_3_steps"] > 0.01, f"{off}"


@pytest.mark.slow
def test_equal_data_makes_the_second_rank_useless(finished):
    """两个 rank 读同样的数据：梯度与一个 rank 单独算的完全相同；读不同的数据才等于整批。"""
    rows = result("data").set_index("data")
    assert rows.error_vs_one_rank["相同"] == 0.0, f"{rows}"
    assert rows.error_vs_all["相同"] > 0.1, f"{rows}"
    assert rows.error_vs_all["不同"] < 1e-5 < rows.error_vs_one_rank["不同"], f"{rows}"


@pytest.mark.slow
def test_no_sync_cuts_communication_to_one_over_k(finished):
    """4 个 micro-batch：no_sync 罩住前向和反向，all-reduce 与字节数降到 1/4，梯度不变。"""
    rows = result("sync").set_index("plan")
    every, quiet = rows.loc["每份都同步"], rows.loc["no_sync 罩住前向和反向"]
    assert every.all_reduces == 4 * quiet.all_reduces and every.bytes == 4 * quiet.bytes, f"{rows}"
    assert quiet.bytes == 4 * result("equivalence").params.item(), "一步该传一份 fp32 梯度"
    assert max(every.error, quiet.error) < 1e-5 and quiet.rank_spread == 0.0, f"{rows}"


@pytest.mark.slow
def test_wrong_uses_of_no_sync(finished):
    """只罩住反向不省通信（accelerate PR #1726）；另两种错法使各 rank 分道扬镳。"""
    rows = result("sync").set_index("plan")
    useless = rows.loc["no_sync 只罩住反向"]
    assert useless.all_reduces == rows.all_reduces["每份都同步"], f"{rows}"
    for plan in ("前向之后才改标志", "第一份同步，其余不同步"):
        assert rows.rank_spread[plan] > 1e-4 and rows.error[plan] > 0.1, f"{plan}：\n{rows}"


@pytest.mark.slow
def test_unequal_ranks_are_weighted_by_the_global_count(finished):
    """两个 rank 的有效 token 差 8 倍：各自平均错 10% 以上，按全局 token 数加权差不到 1e-5。"""
    rows = result("unequal").set_index("weighting")
    assert rows.error["各 rank 自己平均"] > 0.1, f"{rows}"
    assert rows.error["按全局 token 数"] < 1e-5, f"{rows}"


@pytest.mark.slow
def test_buckets_leave_before_backward_ends(finished):
    """小桶时 all-reduce 分几次发出，第一个桶在反向结束之前发出，字节数合计正好一份梯度。"""
    rows = result("buckets")
    assert len(rows) > 2 and rows.bytes.sum() == 4 * result("equivalence").params.item(), f"{rows}"
    assert rows.sent_ms.iloc[0] < rows.backward_ms.iloc[0], f"{rows}"
    assert (rows.sent_ms.diff().dropna() > 0).all(), f"{rows}"


@pytest.mark.slow
def test_checkpoint_has_no_wrapper_prefix(finished):
    """存的是 `.module`：键没有 `module.` 前缀，裸模型读回来完全相同，验证 loss 也相同。"""
    row = result("checkpoint").iloc[0]
    assert row.equal and row.val_loss == row.reload_loss, f"{row}"
    assert row.wrapped_key.startswith("module.") and row.saved_key == row.wrapped_key[7:], f"{row}"


@pytest.mark.slow
def test_only_rank_0_prints(finished):
    """标题只印一次：印的是 rank 0，不是每个 rank。"""
    count = finished.stdout.count("各 rank 的数据\n")
    assert count == 1, f"印了 {count} 次：\n{finished.stdout}"


# ---------------------------------------------------------------- 能手算的小例子，两个进程


class Scalar(nn.Module):
    """loss = w·x 的平均（或总和），梯度就是 x 的平均（或总和）：可以手算。"""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, x, y, reduction="mean"):
        return None, getattr(self.w * x, reduction)()


def synced_gradients(me: World) -> dict:
    """两份：rank 0 的梯度是 1、1，rank 1 的是 5、4；各方案之后各 rank 手里的梯度。"""
    values = ([1.0, 1.0], [5.0, 4.0])[me.rank]
    micros = [(2 * torch.tensor([v]), None) for v in values]  # accumulate 会除以 k = 2
    table = {}
    for plan in dt.PLANS:
        ddp = dt.wrap(Scalar(), me)
        dt.accumulate(ddp, micros, plan)
        both = [torch.zeros(1) for _ in range(me.size)]
        dist.all_gather(both, ddp.module.w.grad)
        table[plan] = [g.item() for g in both]
    return table


def lone_token(me: World) -> dict:
    """rank 0 有 5 个 token（梯度 1），rank 1 只有 1 个（梯度 7）：两种加权的梯度。"""
    x = torch.full(((5, 1)[me.rank],), (1.0, 7.0)[me.rank])
    means, tokens = dt.wrap(Scalar(), me), dt.wrap(Scalar(), me)
    means(x, None)[1].backward()
    dt.backward_by_tokens(tokens, (x, torch.zeros(len(x))), me.size)
    return {"means": means.module.w.grad.item(), "tokens": tokens.module.w.grad.item()}


def rank_0_evaluates(me: World, through_module: bool) -> str:
    """只有 rank 0 前向、别人去屏障等；返回 ok 或异常的类名。

    超时只设在这一组上：整个进程组也设 4 秒，机器忙的时候连会合都来不及。
    """
    group = dist.new_group(timeout=timedelta(seconds=4))
    ddp = DDP(GPT(TINY), process_group=group)  # 默认会在前向时广播缓冲区
    x = torch.zeros(1, 8, dtype=torch.long)
    dist.barrier()
    try:
        if me.master:
            with torch.no_grad():
                (ddp.module if through_module else ddp)(x, x)
        dist.barrier(group=group)
    except RuntimeError as error:
        return type(error).__name__
    return "ok"


def small_examples(me: World) -> dict:
    """在每个进程里量上面的小例子。"""
    seen = {"sync": synced_gradients(me), "lone": lone_token(me),
            "module": rank_0_evaluates(me, True)}  # fmt: skip
    start = time.perf_counter()
    seen["wrapper"] = rank_0_evaluates(me, False)
    return seen | {"waited": time.perf_counter() - start}


@pytest.fixture(scope="module")
def by_hand() -> dict:
    return run_ranks(small_examples, 2)[0]


@pytest.mark.slow
def test_sync_on_the_first_micro_batch_gives_4_and_7(by_hand):
    """手算：对的是 5.5 与 5.5；第一份同步则是 4 与 7（FunASR PR #3472）；标志改晚了也一样。"""
    seen = by_hand["sync"]
    right, wrong = [5.5, 5.5], [4.0, 7.0]
    assert seen["每份都同步"] == seen["no_sync 罩住前向和反向"] == right, f"{seen}"
    assert seen["no_sync 只罩住反向"] == right, f"{seen}"
    assert seen["第一份同步，其余不同步"] == seen["前向之后才改标志"] == wrong, f"{seen}"


@pytest.mark.slow
def test_a_lone_token_weighs_five_times_under_means(by_hand):
    """5 个 token 梯度 1、1 个 token 梯度 7：应得 12/6 = 2，各自平均得 4（prime-rl #1957）。"""
    assert by_hand["lone"] == pytest.approx({"means": 4.0, "tokens": 2.0}), f"{by_hand['lone']}"


@pytest.mark.slow
def test_evaluating_through_the_wrapper_on_rank_0_hangs(by_hand):
    """只在 rank 0 上经 DDP 外壳评估会等到超时（pytorch #54059）；经 `.module` 就不会。"""
    assert by_hand["module"] == "ok", f"{by_hand}"
    assert by_hand["wrapper"] != "ok" and by_hand["waited"] > 3, f"{by_hand}"

