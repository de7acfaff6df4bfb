"""梯度累积：把一个大 batch 拆成 k 份依次算，梯度加起来再更新一次。

    python experiments/grad_accum.py          # 2 核 CPU 上约 20 秒

依次证明：权重给对时，k 份与一整批的梯度相同；有填充时「除以 k」是错的，按 token 加权才对；
省下了多少激活内存；没有省下时间；以及哪些东西会打破等价（BatchNorm、dropout、bf16 累加、
一个 epoch 末尾不满的那一组）。每个小节是一个可以单独调用的函数，结果写进 results/grad_accum_*.csv。
全程 fp32 eager。这里**没有**多卡：多卡怎样分摊这 k 份，见 ddp_train。
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._tools.mem_tracker import MemTracker

from experiments.lab.results import publish, run_main, save_csv
from experiments.lab.timing import interleaved, medians
from experiments.ranks.compare import flat_gradients, flat_parameters, largest_difference
from experiments.training.recipe import (
    adamw,
    learning_rate,
    seeded_gpt,
    set_learning_rate,
    valid_tokens,
)
from model import GPT, IGNORE_INDEX, GPTConfig
from tokens import Batch, load_tokens, sample_batch
from tokens.errors import UserError

Weighting = Literal["tokens", "parts", "none"]
STEPS = 6  # 完整训练的对照走几次更新


@dataclass(frozen=True)
class Options:
    """梯度累积与大 batch 的等价：证明、代价与边界。"""

    sequences: int = 32
    """一次更新用多少个序列（个）"""
    parts: tuple[int, ...] = (2, 4, 8)
    """把一批拆成几份（份），可以给多个"""
    d_model: int = 64
    """模型宽度（维）"""
    n_head: int = 2
    """注意力头数（个）"""
    n_layer: int = 2
    """层数（层）"""
    seq_len: int = 64
    """序列长度（token）"""
    repeats: int = 3
    """计时重复几轮（次）"""
    seed: int = 0
    """随机种子"""


# ---------------------------------------------------------------- 核心：拆开、加权、累积


def split(batch: Batch, parts: int) -> list[Batch]:
    """把 (B, T) 的一批按行拆成 `parts` 个 micro-batch；B 不能整除时前几份各多一行。

    份数超过行数时抛 ValueError：空的 micro-batch 没有意义。
    """
    rows = len(batch[0])
    if not 1 <= parts <= rows:
        raise ValueError(f"{rows} 个序列不能拆成 {parts} 份：份数要在 1 到 {rows} 之间")
    xs, ys = (torch.tensor_split(t, parts) for t in batch)
    return list(zip(xs, ys, strict=True))


def accumulate(model: nn.Module, micros: list[Batch], weighting: Weighting = "tokens") -> float:
    """依次前向、反向，把梯度累加进 `.grad`；返回这一步的 loss（单位 nat）。不更新，也不清零。

    `tokens`：Σ loss ÷ 整步的有效 token 数，任何拆法都等于大 batch。
    `parts`：各份的平均 loss ÷ k，只在各份有效 token 一样多时才对。
    `none`：忘了除，梯度是应有的 k 倍。
    整步没有一个有效 token 时抛 ValueError。
    """
    total = sum(valid_tokens(y) for _, y in micros)
    if total == 0:
        raise ValueError("这一步没有一个有效 token：目标全是 −100，请检查数据")
    step_loss = 0.0
    for x, y in micros:
        if weighting == "tokens":
            loss = model(x, y, reduction="sum")[1] / total
        else:
            loss = model(x, y)[1] / (len(micros) if weighting == "parts" else 1)
        loss.backward()  # .grad += 这一份的贡献；激活随即释放
        step_loss += loss.item()
    return step_loss


def gradients(
    model: nn.Module, micros: list[Batch], weighting: Weighting = "tokens"
) -> tuple[Tensor, float]:
    """清零、累积，返回 (梯度向量, loss)。"""
    model.zero_grad(set_to_none=True)
    loss = accumulate(model, micros, weighting)
    return flat_gradients(model), loss


def compare(got: Tensor, right: Tensor) -> dict[str, float]:
    """与正确梯度的最大绝对差、正确梯度的最大值、相对误差 ‖g − g*‖/‖g*‖、范数之比。"""
    return {
        "max_diff": (got - right).abs().max().item(),
        "max_grad": right.abs().max().item(),
        "rel_error": ((got - right).norm() / right.norm()).item(),
        "norm_ratio": (got.norm() / right.norm()).item(),
    }


# ---------------------------------------------------------------- 等长：除以 k 就对


def equal_parts(model: nn.Module, batch: Batch, parts: Iterable[int]) -> list[dict]:
    """各份一样大时，除以 k 与按 token 加权都等于大 batch；忘了除则正好是 k 倍。"""
    right, full_loss = gradients(model, [batch])
    rows = []
    for k in parts:
        for weighting in ("parts", "tokens", "none"):
            got, loss = gradients(model, split(batch, k), weighting)
            row = {"parts": k, "weighting": weighting, "loss": loss, "full_loss": full_loss}
            rows.append(row | compare(got, right))
    return rows


# ---------------------------------------------------------------- 不等长：必须按 token 加权


def pad_batch(batch: Batch, lengths: Tensor) -> Batch:
    """第 i 行只留前 lengths[i] 个目标，其余改成 −100：变长样本填充到同一长度后的样子。"""
    x, y = batch
    padding = torch.arange(y.size(1)) >= lengths[:, None]  # (B, T)
    return x, y.masked_fill(padding, IGNORE_INDEX)


def short_and_long(rows: int, seq_len: int) -> Tensor:
    """`rows` 个长度：从 seq_len/16 到 seq_len 等距，短的在前——按长度分桶的数据就是这样。"""
    return torch.linspace(max(1, seq_len // 16), seq_len, rows).long()


def padded_parts(
    model: nn.Module, batch: Batch, parts: Iterable[int], generator: torch.Generator
) -> list[dict]:
    """变长的一批：除以 k 错多少，按 token 加权又差多少；按长度排好序与打乱各一次。"""
    lengths = short_and_long(len(batch[0]), batch[0].size(1))
    shuffled = lengths[torch.randperm(len(lengths), generator=generator)]
    rows = []
    for order, some in (("按长度排序", lengths), ("打乱", shuffled)):
        padded = pad_batch(batch, some)
        right, full_loss = gradients(model, [padded])
        for k in (*parts, len(some)):
            micros = split(padded, k)
            counts = [valid_tokens(y) for _, y in micros]
            for weighting in ("parts", "tokens"):
                got, loss = gradients(model, micros, weighting)
                row = {"order": order, "parts": k, "weighting": weighting, "loss": loss,
                       "full_loss": full_loss, "tokens_min": min(counts),
                       "tokens_max": max(counts)}  # fmt: skip
                rows.append(row | compare(got, right))
    return rows


# ---------------------------------------------------------------- 省下的内存


def activation_bytes(model: nn.Module, batch: Batch) -> int:
    """一次前向为反向留下的张量共多少字节：每块存储只数一次，参数与缓冲区不算。"""
    resident = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in resident:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(*batch)[1]  # 计算图活着，留下的存储就不会被复用
    del loss
    return sum(saved.values())


def allocated_peak(model: nn.Module, micros: list[Batch]) -> int:
    """整步（前向、反向、梯度）里参数以外的张量最多同时占多少字节，由 PyTorch 的 MemTracker 数。"""
    model.zero_grad(set_to_none=True)
    total = sum(valid_tokens(y) for _, y in micros)
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        for x, y in micros:
            tracker.reset_mod_stats()  # 它按一次前向统计，每个 micro-batch 前要重来
            (model(x, y, reduction="sum")[1] / total).backward()
    at_peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    return at_peak["Total"] - sum(p.nbytes for p in model.parameters())


def memory(model: nn.Module, batch: Batch, parts: Iterable[int]) -> list[dict]:
    """各种拆法下的激活字节与分配峰值；参数、梯度、AdamW 状态（每参数 16 字节）不随 k 变。"""
    states = 16 * sum(p.numel() for p in model.parameters())  # fp32：4 + 4 + 8
    rows = []
    for k in (1, *parts):
        micros = split(batch, k)
        biggest = max(activation_bytes(model, micro) for micro in micros)
        peak = allocated_peak(model, micros)
        rows.append({"parts": k, "activations": biggest, "peak": peak, "states": states})
    return rows


# ---------------------------------------------------------------- 没有省下的时间


def step_times(model: nn.Module, batch: Batch, parts: Iterable[int], repeats: int) -> list[dict]:
    """同样的数据、不同拆法，交错计时：前向加反向每步的毫秒数（中位数）与吞吐（token/s）。"""

    def once(micros: list[Batch]) -> None:
        model.zero_grad(set_to_none=True)
        accumulate(model, micros)

    variants = {str(k): partial(once, split(batch, k)) for k in (1, *parts)}
    seconds = medians(interleaved(variants, repeats=repeats, warmup=1))
    tokens = valid_tokens(batch[1])
    return [
        {"parts": int(k), "ms": 1e3 * value, "tokens_per_s": tokens / value}
        for k, value in seconds.items()
    ]


# ---------------------------------------------------------------- 打破等价的东西


class TokenBatchNorm(nn.Module):
    """把 (B, T, C) 的每个通道按这一批的全部 token 归一化：统计量跨样本，所以依赖怎么拆。"""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(0, -2)).view_as(x)


NORMS = {"RMSNorm": nn.RMSNorm, "LayerNorm": nn.LayerNorm, "BatchNorm": TokenBatchNorm}


def replace_norms(model: nn.Module, kind: str) -> nn.Module:
    """把模型里每个 RMSNorm 换成 `NORMS[kind]`，其余不动；原地修改并返回模型。"""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.RMSNorm):
                setattr(module, name, NORMS[kind](child.normalized_shape[0]))
    return model


def norms(config: GPTConfig, batch: Batch, k: int, seed: int) -> list[dict]:
    """同一个模型只换归一化层：RMSNorm、LayerNorm 不破坏等价，BatchNorm 破坏。"""
    rows = []
    for kind in NORMS:
        model = replace_norms(seeded_gpt(config, seed), kind)
        right, _ = gradients(model, [batch])
        got, _ = gradients(model, split(batch, k))
        rows.append({"norm": kind, "parts": k} | compare(got, right))
    return rows


class DropoutHook:
    """挂在一层的输出上的 dropout。给了 `mask`（B, T, C）就每次取接下来的 B 行，否则现抽。"""

    def __init__(self, p: float, mask: Tensor | None = None) -> None:
        self.p, self.mask, self.row = p, mask, 0

    def __call__(self, module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
        if self.mask is None:
            return F.dropout(output, self.p)
        rows = self.mask[self.row : self.row + len(output)]
        self.row = (self.row + len(output)) % len(self.mask)
        return output * rows / (1 - self.p)


def dropout(config: GPTConfig, batch: Batch, k: int, seed: int, p: float = 0.1) -> list[dict]:
    """dropout：同一个种子、不同拆法抽到的掩码不同；把掩码按行固定下来，等价就回来了。"""

    def run(parts: int, run_seed: int, mask: Tensor | None = None) -> Tensor:
        model = seeded_gpt(config, seed)
        for layer in (model.embed, *model.blocks):
            layer.register_forward_hook(DropoutHook(p, mask))
        torch.manual_seed(run_seed)
        return gradients(model, split(batch, parts))[0]

    shape = (*batch[0].shape, config.d_model)
    mask = (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) >= p).float()
    right, fixed = run(1, 1), run(1, 1, mask)
    return [
        {"parts": 1, "masks": "另一个种子"} | compare(run(1, 2), right),
        {"parts": k, "masks": "同一个种子"} | compare(run(k, 1), right),
        {"parts": k, "masks": "按行固定"} | compare(run(k, 1, mask), fixed),
    ]


def accumulate_in(model: nn.Module, micros: list[Batch], dtype: torch.dtype) -> Tensor:
    """每份的梯度都用 fp32 算，只有累加器是 `dtype`：参数是 bf16 时 `.grad` 就是这样加的。"""
    tokens = sum(valid_tokens(y) for _, y in micros)
    total = None
    for x, y in micros:
        model.zero_grad(set_to_none=True)
        (model(x, y, reduction="sum")[1] / tokens).backward()
        part = flat_gradients(model).to(dtype)
        total = part if total is None else total + part
    return total.float()


def bf16_drift(model: nn.Module, batch: Batch, parts: Iterable[int]) -> list[dict]:
    """累加器换成 bf16，误差随份数增长；对照：fp32 累加到底，最后只舍入一次。"""
    rows = []
    for k in parts:
        micros = split(batch, k)
        right = accumulate_in(model, micros, torch.float32)
        drifted = accumulate_in(model, micros, torch.bfloat16)
        once = right.bfloat16().float()
        rows.append({"parts": k, "accumulator": "bf16"} | compare(drifted, right))
        rows.append({"parts": k, "accumulator": "fp32，最后舍入一次"} | compare(once, right))
    return rows


def groups(micros: list[Batch], k: int) -> list[list[Batch]]:
    """每 k 个 micro-batch 一组，一组一次更新；最后一组可能不满。"""
    return [micros[i : i + k] for i in range(0, len(micros), k)]


def short_group(model: nn.Module, micros: list[Batch], k: int) -> list[dict]:
    """一个 epoch 末尾不满 k 的那一组：按自己的 token 加权、仍除以 k、漏进下一个 epoch。"""
    first, *_, last = groups(micros, k)
    right, _ = gradients(model, last)
    divided = gradients(model, last, "none")[0] / k
    next_right, _ = gradients(model, first)
    leaked = gradients(model, last + first, "none")[0] / k  # 上个 epoch 的梯度没有清零
    both = len(last) + len(first)
    return [
        {"micros": len(last), "treatment": "按自己的 token 加权"} | compare(right, right),
        {"micros": len(last), "treatment": "仍除以 k"} | compare(divided, right),
        {"micros": both, "treatment": "漏进下一个 epoch"} | compare(leaked, next_right),
    ]


def forgotten_division(config: GPTConfig, batch: Batch, k: int, seed: int) -> list[dict]:
    """忘了除以 k 时，一次更新走了应有的几倍：SGD 是 k 倍，AdamW 几乎看不出来。"""
    rows = []
    for name in ("SGD", "AdamW"):
        moves = []
        for scale in (1, k):
            model = seeded_gpt(config, seed)
            before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
            optimizer = adamw(model, lr=1e-3, weight_decay=0.0)
            if name == "SGD":
                optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            accumulate(model, [batch])
            for p in model.parameters():
                p.grad *= scale
            optimizer.step()
            after = nn.utils.parameters_to_vector(model.parameters()).detach()
            moves.append((after - before).norm().item())
        rows.append({"optimizer": name, "parts": k, "step_ratio": moves[1] / moves[0]})
    return rows


# ---------------------------------------------------------------- 整个训练：更新次数才是步数


def train(
    config: GPTConfig, batches: list[Batch], parts: int, seed: int, weighting: Weighting = "tokens"
) -> tuple[GPT, list[dict]]:
    """每个大 batch 拆成 `parts` 份、更新一次；学习率、日志都按更新次数走，与 `parts` 无关。"""
    model = seeded_gpt(config, seed)
    optimizer = adamw(model, lr=3e-3)
    trace = []
    for step, batch in enumerate(batches):  # step 数的是更新，不是 micro-batch
        lr = learning_rate(step, peak=3e-3, warmup=3, total=len(batches))
        set_learning_rate(optimizer, lr)
        optimizer.zero_grad(set_to_none=True)
        loss = accumulate(model, split(batch, parts), weighting)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # 累积完才裁剪
        optimizer.step()
        trace.append({"step": step, "parts": parts, "weighting": weighting, "lr": lr,
                      "loss": loss, "grad_norm": norm.item()})  # fmt: skip
    return model, trace


# ---------------------------------------------------------------- 入口


def checked(options: Options) -> GPTConfig:
    """选项不对就抛 UserError，一句话说清给了什么、接受什么；对就返回模型的结构。"""
    bad = [k for k in options.parts if not 1 < k < options.sequences or options.sequences % k]
    if bad or not options.parts:
        raise UserError(
            f"--parts {' '.join(map(str, options.parts))}：每个数都要大于 1、"
            f"小于并整除 --sequences {options.sequences}，例如 --parts 2 4 8"
        )
    if options.repeats < 1:
        raise UserError(f"--repeats {options.repeats}：至少计时 1 轮")
    try:
        return GPTConfig(d_model=options.d_model, n_head=options.n_head,
                         n_layer=options.n_layer, seq_len=options.seq_len)  # fmt: skip
    except ValueError as error:
        raise UserError(str(error)) from None


def main(options: Options) -> None:
    """依次运行每个小节，打印表格，写 results/grad_accum_*.csv。"""
    o, config = options, checked(options)
    data = load_tokens(vocab_size=config.vocab_size)["train"]
    generator = torch.Generator().manual_seed(o.seed)

    def draw(rows: int, seq_len: int = o.seq_len) -> Batch:
        return sample_batch(data, rows, seq_len, generator)

    def say(name: str, title: str, rows: list[dict], hide: tuple[str, ...] = ()) -> None:
        publish(f"grad_accum_{name}", title, rows, o, formats=FORMATS, hide=hide)

    batch, model, k = draw(o.sequences), seeded_gpt(config, o.seed), o.parts[len(o.parts) // 2]
    say("equal", "等长：与一整批的梯度相差多少", equal_parts(model, batch, o.parts))
    padded = padded_parts(model, batch, o.parts, generator)
    say("padded", "变长：两种权重", padded, hide=("full_loss", "max_grad", "norm_ratio"))
    say("memory", "内存（字节）", memory(model, batch, o.parts))
    say("time", "每步时间（毫秒）", step_times(
        model, batch, (*o.parts, o.sequences), o.repeats))  # fmt: skip
    half = split(batch, 2)[0]  # 下面几节不必用整批
    say("norms", "归一化层", norms(config, half, k, o.seed))
    say("dropout", "dropout 与随机数", dropout(config, half, k, o.seed))
    many = draw(4 * o.sequences, max(1, o.seq_len // 4))
    powers = (2, o.sequences // 4, o.sequences, 4 * o.sequences)
    say("bf16", "累加器的精度", bf16_drift(model, many, powers))
    say("tail", "末尾不满的一组：10 份，每 4 份更新一次", short_group(
        model, split(draw(10), 10), 4))  # fmt: skip
    say("forgot", "忘了除以 k：一次更新走的距离", forgotten_division(config, half, k, o.seed))
    report_training(config, [draw(o.sequences) for _ in range(STEPS)], max(o.parts), o.seed)


def report_training(config: GPTConfig, batches: list[Batch], k: int, seed: int) -> None:
    """同样的大 batch，1 份与 k 份各训练一遍：轨迹写进 results/grad_accum_train.csv。"""
    whole, trace = train(config, batches, 1, seed)
    parts, other = train(config, batches, k, seed)
    save_csv(trace + other, "grad_accum_train")
    loss = max(abs(a["loss"] - b["loss"]) for a, b in zip(trace, other, strict=True))
    gap = largest_difference(flat_parameters(whole), flat_parameters(parts))
    print(f"\n训练 {len(batches)} 步，1 份对 {k} 份：loss 最多差 {loss:.1e}，参数最多差 {gap:.1e}")


FORMATS = {
    "loss": "{:.4f}", "full_loss": "{:.4f}", "max_diff": "{:.1e}", "max_grad": "{:.4f}",
    "rel_error": "{:.1e}", "norm_ratio": "{:.3f}", "ms": "{:.1f}",
    "tokens_per_s": "{:,.0f}", "step_ratio": "{:.3f}",
}  # fmt: skip


if __name__ == "__main__":
    run_main(main, Options)
