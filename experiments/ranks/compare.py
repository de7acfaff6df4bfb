"""与单进程比较：把参数或梯度接成一个向量，说出差多少。"""

import torch
import torch.distributed as dist
from torch import Tensor, nn


def flat_parameters(model: nn.Module) -> Tensor:
    """全部参数接成一个向量（拷贝）；共享的权重只出现一次。"""
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def flat_gradients(model: nn.Module) -> Tensor:
    """全部梯度接成一个向量，次序与 `flat_parameters` 相同；有参数没有梯度时抛 ValueError。"""
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    if missing:
        raise ValueError(f"没有梯度的参数：{'、'.join(missing)}；先反向一次")
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def largest_difference(got: Tensor, right: Tensor) -> float:
    """最大的绝对差。"""
    return (got - right).abs().max().item()


def relative_to_largest(got: Tensor, right: Tensor) -> float:
    """最大的绝对差 ÷ 正确值里最大的绝对值：「逐元素差到最大梯度的百万分之一以内」指的就是它。"""
    return largest_difference(got, right) / right.abs().max().item()


def relative_error(got: Tensor, right: Tensor) -> float:
    """相对误差 ‖g − g*‖/‖g*‖：错用法错多少，用它说。"""
    return ((got - right).norm() / right.norm()).item()


def disagreement(vector: Tensor) -> float:
    """各 rank 的这个向量最多差多少：逐元素取最大减最小；0.0 就是逐位相同。"""
    high, low = vector.clone(), vector.clone()
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    return (high - low).max().item()
