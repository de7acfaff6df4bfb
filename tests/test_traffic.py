"""`experiments/ranks/traffic.py` 的断言：手写的与库发的通信都数得到，次数与字节等于手算。"""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from experiments.ranks.launch import run_ranks
from experiments.ranks.traffic import KINDS, Traffic
from experiments.ranks.world import World

N = 24  # 每个张量的元素数；fp32，所以 96 字节


def every_kind(me: World) -> dict[str, list[dict]]:
    """每种通信各做一次：手写的、函数式的、FSDP2 发的。"""
    x, part = torch.ones(N), torch.ones(N // me.size)
    right, left = (me.rank + 1) % me.size, (me.rank - 1) % me.size
    with Traffic() as native:
        dist.all_reduce(x)
        dist.all_gather_into_tensor(torch.empty(N), part)
        dist.all_gather([torch.empty_like(part) for _ in range(me.size)], part)
        dist.reduce_scatter_tensor(part, x)
        dist.all_to_all_single(torch.empty(N), x)
        dist.broadcast(x, src=0)
        exchange = [dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, x.clone(), left)]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
    with Traffic() as functional:
        funcol.all_reduce(x, "sum", dist.group.WORLD).wait()
        funcol.all_gather_tensor(part, 0, dist.group.WORLD).wait()
        funcol.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD).wait()
        funcol.all_to_all_single(x, None, None, dist.group.WORLD).wait()
    layer = fully_shard(nn.Linear(8, 8, bias=False), mesh=init_device_mesh("cpu", (me.size,)))
    with Traffic() as library:
        layer(torch.ones(2, 8)).sum().backward()
    pair = dist.new_group([0, 1])
    with Traffic() as half:
        if me.rank < 2:
            dist.all_reduce(torch.ones(N), group=pair)
    logs = {"native": native, "functional": functional, "library": library, "half": half}
    seen = {name: t.table() for name, t in logs.items()}
    return seen | {"ranks": half.log[-1].ranks if half.log else None}


@pytest.fixture(scope="module")
def counted() -> dict:
    return run_ranks(every_kind, 4)[1]


def test_hand_written_collectives_are_counted(counted):
    """4 个 rank：每种的次数、完整字节数、环形算法发出的字节数都等于手算。"""
    got = {r["kind"]: (r["calls"], r["payload"], r["sent"]) for r in counted["native"]}
    assert got == {
        "all_reduce": (1, 96, 144), "all_gather": (2, 192, 144), "reduce_scatter": (1, 96, 72),
        "all_to_all": (1, 96, 72), "broadcast": (1, 96, 72), "send": (1, 96, 96),
        "recv": (1, 96, 0),
    }, f"{got}"  # fmt: skip


def test_functional_collectives_are_counted_alike(counted):
    """DTensor 用的函数式通信：同样的约定，同样的数。"""
    got = {r["kind"]: (r["calls"], r["payload"], r["sent"]) for r in counted["functional"]}
    assert got == {
        "all_reduce": (1, 96, 144), "all_gather": (1, 96, 72), "reduce_scatter": (1, 96, 72),
        "all_to_all": (1, 96, 72),
    }, f"{got}"  # fmt: skip


def test_what_fsdp2_sends_is_counted(counted):
    """一层 8×8 的 `fully_shard`：前向收集一次（根模块不放掉），反向归约一次，各 256 字节。"""
    got = {r["kind"]: (r["calls"], r["payload"]) for r in counted["library"]}
    assert got == {"all_gather": (1, 256), "reduce_scatter": (1, 256)}, f"{got}"


def test_the_group_decides_the_bytes(counted):
    """两个 rank 的组：记下是谁，发出的字节按 W = 2 算。"""
    last = counted["half"][-1]
    assert counted["ranks"] == (0, 1) and last["sent"] == 96, f"{counted['half']}"


def test_unknown_kinds_are_refused():
    """问一个不存在的种类：说清有哪些，不悄悄答 0。"""
    with pytest.raises(ValueError, match="allreduce.*all_reduce"):
        Traffic().calls("allreduce")
    assert Traffic().calls(KINDS[0]) == 0
