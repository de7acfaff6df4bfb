"""前向为反向留下了多少字节：激活值是数出来的，不是估出来的。"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


@contextmanager
def saved_for_backward(resident: Iterable[Tensor]) -> Iterator[dict[int, int]]:
    """其中的前向为反向留下的存储：{地址: 字节}，求和就是激活值的字节数。

    `resident` 是一直都在的张量（参数、RoPE 的表），不算激活值；几个张量共用一块存储只算一次。
    计算图要活到读数的时候，否则存储会被复用，数少了。
    """
    there = {t.untyped_storage().data_ptr() for t in resident}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in there:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved
