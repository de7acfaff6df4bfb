"""这个 rank 发起了几次通信、多少字节：站在 PyTorch 调度集体通信的必经之路上数。

    with Traffic() as traffic:
        loss.backward()
    traffic.calls("all_reduce"), traffic.payload(), traffic.sent()

手写的 `dist.all_reduce(...)` 与 DTensor、FSDP2、pipelining 自己发的都数得到。
约定（每个 rank，字节；W 是那个组的大小）：

- **payload** 是完整张量的大小 n：all_reduce 的张量、all_gather 的输出、reduce_scatter 与
  all_to_all 的输入、一次 send、recv 或 broadcast 的张量；
- **sent** 是环形算法里这个 rank 真正发出去的：all_reduce 2(W−1)/W·n，all_gather、
  reduce_scatter、all_to_all（均分时）、broadcast（各 rank 平均）(W−1)/W·n，send n，recv 0。

这里**没有**：DDP（它的 reducer 在 C++ 里直接通信，用通信钩子数，见 ddp_train 一章）、屏障。
"""

from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# 手写的 dist.* 走的算子 -> (种类, 第几个参数是完整张量)；DTensor 等走函数式的算子 -> 种类
NATIVE = {
    "allreduce_": ("all_reduce", 0), "allreduce_coalesced_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 0), "allgather_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1), "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 1), "alltoall_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0), "send": ("send", 0), "recv_": ("recv", 0),
}  # fmt: skip
FUNCTIONAL = {
    "all_reduce": "all_reduce", "all_reduce_": "all_reduce", "all_reduce_coalesced": "all_reduce",
    "all_gather_into_tensor": "all_gather", "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_to_all_single": "all_to_all", "broadcast": "broadcast",
}  # fmt: skip
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "recv")


@dataclass(frozen=True)
class Call:
    """一次通信：种类、完整张量的形状与字节数、参与的 rank（全局编号）。"""

    kind: str
    shape: tuple[int, ...]
    payload: int
    ranks: tuple[int, ...]

    @property
    def sent(self) -> int:
        """环形算法里这个 rank 发出的字节（约定见模块的说明）；除不尽时向下取整。"""
        if self.kind in ("send", "recv"):
            return self.payload * (self.kind == "send")
        rounds = 2 if self.kind == "all_reduce" else 1
        return rounds * (len(self.ranks) - 1) * self.payload // len(self.ranks)


class Traffic(TorchDispatchMode):
    """上下文管理器：记下这个 rank 在其中发起的每一次通信，`log` 按先后排列。"""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Call] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # 让 DTensor 先拆成普通算子和通信，再来数
        out = func(*args, **(kwargs or {}))
        if isinstance(func, torch._ops.OpOverload):
            name = func._overloadpacket.__name__
            if func.namespace == "c10d" and name in NATIVE:
                kind, position = NATIVE[name]
                group = next(dist.ProcessGroup.unbox(a) for a in args
                             if isinstance(a, torch.ScriptObject))  # fmt: skip
                self._note(kind, args[position], group)
            elif func.namespace == "_c10d_functional" and name in FUNCTIONAL:
                kind = FUNCTIONAL[name]
                named = [a for a in (*args, *(kwargs or {}).values())
                         if isinstance(a, str | dist.ProcessGroup)]  # fmt: skip
                group = named[-1]
                if isinstance(group, str):
                    group = dist.distributed_c10d._resolve_process_group(group)
                self._note(kind, out if kind == "all_gather" else args[0], group)
        return out

    def _note(self, kind: str, whole: object, group: dist.ProcessGroup) -> None:
        tensors = [t for t in tree_leaves(whole) if isinstance(t, Tensor)]
        shape = tuple(tensors[0].shape) if len(tensors) == 1 else (sum(t.numel() for t in tensors),)
        payload = sum(prod(t.shape) * t.element_size() for t in tensors)
        ranks = tuple(dist.get_process_group_ranks(group))
        self.log.append(Call(kind, shape, payload, ranks))

    def select(self, kind: str | None = None, ranks: tuple[int, ...] | None = None) -> list[Call]:
        """某一种、某一组 rank 的通信；None 是全部。种类不认识时抛 ValueError。"""
        if kind is not None and kind not in KINDS:
            raise ValueError(f"通信的种类 {kind!r}：只有 {'、'.join(KINDS)}")
        return [c for c in self.log if kind in (None, c.kind) and ranks in (None, c.ranks)]

    def calls(self, kind: str | None = None, ranks: tuple[int, ...] | None = None) -> int:
        """几次。"""
        return len(self.select(kind, ranks))

    def payload(self, kind: str | None = None, ranks: tuple[int, ...] | None = None) -> int:
        """完整张量合计多少字节。"""
        return sum(c.payload for c in self.select(kind, ranks))

    def sent(self, kind: str | None = None, ranks: tuple[int, ...] | None = None) -> int:
        """这个 rank 按环形算法合计发出多少字节。"""
        return sum(c.sent for c in self.select(kind, ranks))

    def table(self) -> list[dict]:
        """每种一行：{kind, calls, payload, sent}，没有发生的种类不列。"""
        return [{"kind": k, "calls": self.calls(k), "payload": self.payload(k),
                 "sent": self.sent(k)} for k in KINDS if self.calls(k)]  # fmt: skip
