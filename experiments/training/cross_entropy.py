"""输出头与交叉熵合成一步：不留 logits，exp 只算一遍。

与 `F.linear_cross_entropy` 相同的 loss 与梯度（`tests/test_step.py` 逐个比较）。
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from model import IGNORE_INDEX

CHUNK_LOGITS = 1 << 23  # 一段 logits 的元素数（bf16 时 16 MiB）：再大就总在等内存，再小矩阵太窄



def one_exp_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, *,
    ignore_index: int = IGNORE_INDEX, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """与 `F.linear_cross_entropy(x, weight, target)` 相同的 loss 与梯度，逐元素的工作只剩一遍。

    x：(n, d)，weight：(V, d)，target：(n,) 的 int64。`reduction` 是 mean 或 sum。

    记 logits z = x·Wᵀ，m 是每行最大值，E = exp(z − m)，s 是 E 的行和。那么 softmax = E / s，

        loss = log s + m − z[y]
        ∂loss/∂x = (E·W) / s − W[y]          # 除以 s 放在乘法之后，作用在 (n, d) 上
        ∂loss/∂W = Eᵀ·(x / s) − 散加(x 到第 y 行)

    softmax 从不写出来：(n, V) 的矩阵只被读两遍（求最大值、求 exp），E 直接进矩阵乘法。
    标准的反向要再算一遍 exp、除以 s、减去 one-hot，多出两遍对 (n, V) 的读写。
    梯度在前向里就算好（loss 是标量，反向只剩乘一个数），所以也不必留下 logits。
    """
    dtype = x.dtype
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    if not torch.is_grad_enabled():
        how = {"ignore_index": ignore_index, "reduction": reduction}
        return F.linear_cross_entropy(x, weight, target, **how)
    return _OneExp.apply(x, weight, target, ignore_index, reduction == "mean", dtype)


class _OneExp(torch.autograd.Function):
    """前向顺便算好两个梯度；一段一段地算，任何时候只有一段 logits。"""

    @staticmethod
    def forward(ctx, x, weight, target, ignore_index, mean, dtype):
        valid = target != ignore_index
        y = torch.where(valid, target, 0)
        scale = valid.float()
        if mean:
            scale = scale / scale.sum()  # 一个有效 token 也没有时是 nan，与 PyTorch 一致
        low_w, low_x = weight.to(dtype), x.to(dtype)
        rows = max(1, CHUNK_LOGITS // weight.size(0))
        loss, grad_w, grad_x = 0.0, None, []
        for xs, ys, ss in zip(
            low_x.split(rows), y.split(rows), scale.unsqueeze(1).split(rows), strict=True
        ):
            part, dx, dw = _one_chunk(xs, low_w, ys, ss)
            loss = loss + part
            grad_x.append(dx)
            grad_w = dw if grad_w is None else grad_w + dw
        grad_w = grad_w.index_add(0, y, x.float() * -scale.unsqueeze(1))
        ctx.save_for_backward(torch.cat(grad_x).to(x.dtype), grad_w.to(weight.dtype))
        return loss

    @staticmethod
    def backward(ctx, grad):
        grad_x, grad_w = ctx.saved_tensors
        return grad_x * grad, grad_w * grad, None, None, None, None


def _one_chunk(
    x: Tensor, weight: Tensor, y: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """一段：x (n, d)、weight (V, d)、y (n,)、scale (n, 1) → loss、∂x、∂W 的 softmax 部分。"""
    logits = x @ weight.t()  # (n, V)
    top = logits.amax(1, keepdim=True).float()
    e = (logits.float() - top).exp()
    total = e.sum(1, keepdim=True)  # (n, 1)
    e = e.to(x.dtype)
    picked = logits.gather(1, y.unsqueeze(1)).float()
    loss = ((total.log() + top - picked) * scale).sum()
    ratio = scale / total
    grad_x = (e @ weight).float() * ratio - weight[y].float() * scale
    grad_w = (e.t() @ (x.float() * ratio).to(x.dtype)).float()
    return loss, grad_x, grad_w
