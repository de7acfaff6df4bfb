"""train_gpu 的全部选项，以及开工之前的检查：不合理的值在分配任何东西之前就被拒绝。

命令行和配置文件怎样变成这个 dataclass，见 command_line.py。
"""

import math
import os
from dataclasses import dataclass
from typing import Literal

from model import GPTConfig
from tokens.errors import UserError

STRUCTURE = ("vocab_size", "d_model", "n_head", "n_layer", "seq_len")  # 决定权重形状的五个


@dataclass(frozen=True)
class Options:
    """默认值就是预设 gpt_29m；每个字段自动成为一个命令行选项。"""

    preset: str = "gpt_29m"  # 预设：tiny_cpu、gpt_29m、gpt_124m、gpt_1b
    config: str = ""  # TOML 配置文件的路径；命令行覆盖它，它覆盖预设
    out_dir: str = "runs/train_gpu"  # 放 last.pt、previous.pt、best.pt 与 log.csv 的文件夹
    init_from: str = "scratch"  # scratch、resume、Llama 文件夹，或一个 .pt 检查点（只取权重）
    data: str = ""  # tokens.pt 或分片的文件夹；空是内置的小说；synthetic 是随机 token
    ignore_token: int = -1  # 目标等于这个 id 的位置不计入 loss（例如填充符）；-1 表示没有
    vocab_size: int = 8192  # 词表（个）
    d_model: int = 512  # 宽度（维）
    n_head: int = 8  # 注意力头（个）
    n_layer: int = 8  # 层数（层）
    seq_len: int = 512  # 序列长度（token）
    micro_batch: int = 32  # 一个进程一次前向的序列数（个）
    global_batch_tokens: int = 524_288  # 一次更新的 token 数，与卡数无关；累积次数由它推出
    steps: int = 2000  # 走到第几次更新为止（步）
    warmup_steps: int = 100  # 线性预热（步）；0 表示不预热
    decay_steps: int = 2000  # 余弦衰减到第几步为止（步），之后保持最低；通常等于 steps
    lr: float = 1e-3  # 学习率的峰值
    min_lr_ratio: float = 0.1  # 最低学习率与峰值之比
    parallel: Literal["ddp", "fsdp"] = "ddp"  # 数据并行：每个进程一份完整的权重，或切开分着放
    reshard: bool = True  # fsdp：权重用完就放（ZeRO-3）；否则整步留着，少通信，多占显存（ZeRO-2）
    tensor_parallel: int = 1  # 几个进程合切一个矩阵（个）；在一台机器之内
    recompute: Literal["none", "blocks"] = "none"  # blocks：每层只留输入，反向时整层重算
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon 只管层内的矩阵，其余仍用 AdamW
    beta1: float = 0.9  # AdamW 一阶矩的衰减系数
    beta2: float = 0.95  # AdamW 二阶矩的衰减系数
    weight_decay: float = 0.1  # 权重衰减，只用在矩阵与词嵌入上
    grad_clip: float = 1.0  # 梯度总范数的上限；0 表示不裁剪
    eval_interval: int = 200  # 每隔几步评估并保存（步）
    eval_tokens: int = 327_680  # 一次评估读几个 token，训练集与验证集各这么多；与 micro_batch 无关
    save_interval: int = 0  # 评估之外每隔几步再存一次 last（步）；0 表示不另存
    log_interval: int = 50  # 每隔几步打印一行（步）
    time_limit: float = 0.0  # 跑满这么久就存好退出（分钟）；0 表示不限
    device: str = "auto"  # auto、cpu、cuda 或 cuda:N
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # 矩阵乘法的精度
    compile: bool = True  # 用 torch.compile；没有编译器时退回 eager 并说明
    fused_loss: bool = False  # 输出头与交叉熵合成一步，不留 logits，省显存
    deterministic: bool = False  # CUDA 上也用确定性算法（较慢）；CPU 上总是用
    peak_flops: float = 0.0  # 一张卡的峰值（FLOP/s），MFU 的分母；0：查表，稠密 bf16，与 dtype 无关
    tensorboard: bool = False  # 另写一份 TensorBoard 日志
    seed: int = 0  # 初始权重与数据次序的随机种子


def structure_of(options: Options) -> GPTConfig:
    """选项里的模型结构；五个数不能合成一个模型时抛 `UserError`。"""
    try:
        return GPTConfig(**{name: getattr(options, name) for name in STRUCTURE})
    except ValueError as error:
        raise UserError(f"{error}。") from error


def readers(options: Options, world_size: int) -> int:
    """有几份进程读不同的数据：合切一个矩阵的几个进程读的是同样的。"""
    return world_size // options.tensor_parallel


def is_cut(options: Options, world_size: int) -> bool:
    """权重要不要切开放：只有一个进程时没有可切的，fsdp 与 ddp 一样。"""
    return options.tensor_parallel > 1 or (options.parallel == "fsdp" and world_size > 1)


def accumulation(options: Options, world_size: int) -> int:
    """一步里，一个进程的 micro-batch 个数；`check` 已经保证除得尽。"""
    micro = options.micro_batch * options.seq_len
    return options.global_batch_tokens // (micro * readers(options, world_size))


def check(options: Options, world_size: int) -> None:
    """检查每个选项，不合理的抛 `UserError`。此时还什么都没分配。"""
    at_least = dict.fromkeys(STRUCTURE, 1) | dict.fromkeys(
        ("micro_batch", "global_batch_tokens", "steps", "decay_steps", "eval_interval",
         "eval_tokens", "log_interval", "tensor_parallel"), 1
    ) | dict.fromkeys(
        ("warmup_steps", "save_interval", "seed", "weight_decay", "grad_clip", "peak_flops",
         "time_limit", "min_lr_ratio", "beta1", "beta2", "lr"), 0
    )  # fmt: skip
    for name, low in at_least.items():
        if not (math.isfinite(value := getattr(options, name)) and value >= low):
            raise UserError(f"--{name.replace('_', '-')} {value}：要一个不小于 {low} 的有限数。")
    if options.lr == 0 or options.min_lr_ratio > 1 or max(options.beta1, options.beta2) >= 1:
        raise UserError("--lr 要大于 0，--min-lr-ratio 不超过 1，--beta1、--beta2 小于 1。")
    if options.seed >= 1 << 63:
        raise UserError(f"--seed {options.seed}：要小于 2⁶³。")
    structure_of(options)
    check_cuts(options, world_size)
    groups = readers(options, world_size)
    tokens, micro = options.global_batch_tokens, options.micro_batch * options.seq_len
    if tokens < micro:
        raise UserError(
            f"全局 batch 是 {tokens} 个 token，小于一个 micro-batch（{options.micro_batch} 个序列"
            f" × {options.seq_len} = {micro}）；请减小 --micro-batch 或增大 --global-batch-tokens。"
        )
    if tokens % (micro * groups):
        who = f"{groups} 个进程" if groups == world_size else f"{groups} 组进程"
        raise UserError(
            f"--global-batch-tokens {tokens} 不能被 {options.micro_batch} 个序列 × "
            f"{options.seq_len} × {who} = {micro * groups} 整除；"
            "请改其中一个，使累积次数是整数。"
        )


def check_cuts(options: Options, world_size: int) -> None:
    """权重切得开吗：张量并行的份数要整除进程数、每台机器的进程数、头数、SwiGLU 的宽度与词表。"""
    parts, shape = options.tensor_parallel, structure_of(options)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    for count, what in (
        (world_size, "个进程"), (local, "个进程（一台机器上的；它每层都要通信，不出机器）"),
        (shape.n_head, "个头"), (shape.ffn_dim, "（SwiGLU 的宽度）"),
        (shape.vocab_size, "个词（词表）"),
    ):  # fmt: skip
        if count % parts:
            refusal = f"--tensor-parallel {parts}：不能平分 {count} {what}"
            raise UserError(f"{refusal}；请换一个除得尽的数。")
    if not is_cut(options, world_size):
        return
    if options.optimizer == "muon":
        raise UserError("--optimizer muon 要看整个矩阵，不能与切开的权重同用；请用 adamw。")
    if options.dtype == "float16":
        raise UserError("--dtype float16 不能与切开的权重同用（梯度的溢出要所有分片一起跳过，"
                        "GradScaler 不管）；请用 bfloat16 或 float32。")  # fmt: skip
    if parts > 1 and options.fused_loss:
        raise UserError("--fused-loss 不能与 --tensor-parallel 同用：词表已经切开，logits 只有 "
                        f"1/{parts}；请去掉它（--no-fused-loss）。")  # fmt: skip
