"""公开的训练记录，以及用我们的公式重算的结果。只用标准库。

每行都注明出处与所用的约定（N 数什么、算不算注意力），因为 MFU 的分歧几乎都出在这里。
记录核对于 2025 年底；数字是各项目自己发布的，我们没有重跑它们。
"""

from __future__ import annotations

from dataclasses import dataclass

from experiments.plan.architecture import (
    PRESETS,
    Architecture,
    executed_flops_per_token,
    flops_per_token,
    gpt2,
)

A100, H100, H100_FOUNDRY, TPU_V4 = 312e12, 989e12, 989.5e12, 275e12
MFU_USUAL = (0.30, 0.50)  # 常见的范围
MFU_SEEN = (0.29, 0.60)  # 下表整次训练里见过的最低与最高


@dataclass(frozen=True)
class MfuRun:
    """一条发布了 MFU 的记录。mfu 是百分数，rounding 是发布值与输入的舍入合计（百分点）。"""

    name: str
    flops_per_token: float
    tokens_per_second: float  # 每卡
    peak: float  # FLOP/s
    published: float
    rounding: float
    convention: str
    source: str

    @property
    def ours(self) -> float:
        """重算的 MFU，百分数。"""
        return 100 * self.flops_per_token * self.tokens_per_second / self.peak


def _foundry(name: str, arch: str, rate: float, peak: float, published: float) -> MfuRun:
    return MfuRun(
        f"llm-foundry {name}", flops_per_token(PRESETS[arch]), rate, peak, published, 0.05,
        "全部 N，含注意力", "llm-foundry scripts/train/benchmarking",
    )


def _titan(name: str, rate: float, published: float) -> MfuRun:
    flops = flops_per_token(PRESETS["llama3-8b"], convention="no_embedding")
    return MfuRun(
        f"torchtitan Llama-3.1-8B {name}", flops, rate, H100, published, 1.0,
        "N 不含词嵌入，含注意力；发布的是整数区间 33–39", "torchtitan docs/performance.md",
    )


def _palm(attention: bool, published: float) -> MfuRun:
    flops = flops_per_token(PRESETS["palm-540b"], attention=attention)
    return MfuRun(
        f"PaLM 540B（{'含' if attention else '不含'}注意力）", flops, 238_300 / 6144, TPU_V4,
        published, 0.1, "全部 N；HFU 57.8 另计重算", "arXiv 2204.02311，4.1 节与附录 B",
    )


def _megatron(
    name: str, d: int, layers: int, heads: int, batch: int, gpus: int, seconds: float,
    published: float,
) -> MfuRun:
    arch = gpt2(d, layers, heads, 2048, 51200, bias=False)
    rounding = 0.05 + published * 0.005 / seconds  # 每步时间只发布到 0.01 s
    return MfuRun(
        f"Megatron {name}", executed_flops_per_token(arch), batch * 2048 / seconds / gpus, A100,
        published, rounding, "逐个矩阵乘法，含输出头与注意力", "arXiv 2205.05198，表 5",
    )


def _llama3(gpus: int, tflops: float, published: float) -> MfuRun:
    return MfuRun(
        f"Llama-3 405B，{gpus:,} 卡", 1.0, tflops * 1e12, H100, published, 1.0,
        "直接由每卡 TFLOP/s 除以峰值；两者都只发布了两位数", "arXiv 2407.21783，表 4",
    )


NANOGPT = flops_per_token(gpt2(768, 12, 12, bias=False), convention="no_positions")
LLMC = flops_per_token(gpt2(768, 12, 12), convention="no_positions")
TINYLLAMA = PRESETS["tinyllama-1.1b"]

MFU_RUNS: tuple[MfuRun, ...] = (
    _foundry("125M，8 张 A100-40GB", "mpt-125m", 136_334, A100, 42.75),
    _foundry("1.3B，A100", "mpt-1b", 19_271, A100, 56.23),
    _foundry("7B，A100", "mpt-7b", 3_679, A100, 50.92),
    _foundry("1.3B，H100", "mpt-1b", 45_455, H100_FOUNDRY, 41.82),
    _foundry("7B，H100", "mpt-7b", 10_643, H100_FOUNDRY, 46.44),
    _titan("FSDP", 5_762, 33),
    _titan("FSDP + compile", 6_667, 39),
    _palm(True, 46.2),
    _palm(False, 45.7),
    _llama3(8_192, 430, 43),
    _llama3(16_384, 400, 41),
    _megatron("22B", 6144, 48, 64, 4, 8, 1.10, 41.5),
    _megatron("175B", 12288, 96, 96, 64, 64, 13.75, 51.4),
    _megatron("530B", 20480, 105, 128, 280, 280, 37.83, 56.0),
    _megatron("1T", 25600, 128, 160, 512, 512, 71.49, 56.3),
    MfuRun(
        "TinyLlama 1.1B，A100-40GB", flops_per_token(TINYLLAMA, convention="no_embedding"),
        24_000, A100, 56, 0.5, "N 不含词嵌入，含注意力；全部 N 得 59.3，只算 6N 得 50.8",
        "TinyLlama README",
    ),
    MfuRun(
        "nanoGPT 124M，一张 A100", NANOGPT, 100 * 1024 / 0.755, A100, 37.14, 0.05,
        "N 不含位置表，含注意力", "nanoGPT scaling_laws.ipynb",
    ),
    MfuRun(
        "llm.c 124M，8 张 A100", LLMC, 524_288 / 0.300 / 8, A100, 60, 0.5,
        "N 不含位置表，含注意力；发布的是「最高 60」", "llm.c discussions #481",
    ),
    MfuRun(
        "nanochat d24，8 张 H100", 4.3308e19, 1 / 10_949 / 8, H100, 50.0, 0.05,
        "总 FLOPs 由项目自己数出", "nanochat 训练日志",
    ),
)


@dataclass(frozen=True)
class WholeRun:
    """一次完整的训练。hours 是墙钟小时（gpus = 1 时就是卡时），cost 是发布的美元花费。"""

    name: str
    flops: float  # 整次训练
    gpus: int
    peak: float
    hours: float
    cost: float | None
    why: str  # 与 40 % 的预测差在哪里
    source: str

    def predicted(self, mfu: float) -> float:
        """给定 MFU 时的预测小时数。"""
        return self.flops / (self.gpus * self.peak * mfu) / 3600

    @property
    def implied_mfu(self) -> float:
        """由发布的时间反推的 MFU（0 到 1）。"""
        return self.flops / (self.gpus * self.peak * self.hours * 3600)


def _llama1(name: str, params: float, tokens: float, gpu_hours: float) -> WholeRun:
    return WholeRun(
        f"LLaMA {name}（卡时）", 6 * params * tokens, 1, A100, gpu_hours, None,
        "只算 6N，没有注意力项，所以真实 MFU 还要略高", "arXiv 2302.13971，表 15",
    )


def _gpt2_xl() -> Architecture:
    return PRESETS["gpt2-1558m"]


WHOLE_RUNS: tuple[WholeRun, ...] = (
    WholeRun(
        "llm.c 124M，8 张 A100", LLMC * 18_865 * 524_288, 8, A100, 94.3 / 60, 20,
        "手写 CUDA、cuDNN 的 FlashAttention、没有框架开销：高于常见范围",
        "llm.c discussions #481",
    ),
    WholeRun(
        "llm.c 1558M，8 张 H100",
        flops_per_token(_gpt2_xl(), convention="no_positions") * 32_000 * 1_048_576,
        8, H100, 24, 672, "同上；H100 更难喂饱，MFU 低于 A100", "llm.c discussions #677",
    ),
    WholeRun(
        "nanoGPT 124M，8 张 A100", NANOGPT * 600_000 * 491_520, 8, A100, 96, None,
        "「约 4 天」含评估与存档，且早于 FlashAttention 进入 PyTorch：低于常见范围",
        "nanoGPT README",
    ),
    _llama1("7B", 6.7e9, 1e12, 82_432),
    _llama1("13B", 13.0e9, 1e12, 135_168),
    _llama1("33B", 32.5e9, 1.4e12, 530_432),
    _llama1("65B", 65.2e9, 1.4e12, 1_022_362),
    WholeRun(
        "TinyLlama 1.1B，16 张 A100", flops_per_token(TINYLLAMA, convention="no_embedding") * 3e12,
        16, A100, 90 * 24, None, "融合的 RMSNorm、SwiGLU、交叉熵与 FlashAttention-2",
        "TinyLlama README",
    ),
    WholeRun(
        "nanochat d24，8 张 H100", 4.3308e19, 8, H100, 10_949 / 3600, 73,
        "编译、大 micro-batch；单价约 24 美元/小时", "nanochat 训练日志",
    ),
)

# 没有发布 token 数的记录只能反着算：2.31 小时在一张 3090 上（¥3.0）买得到多少 FLOPs
MINIMIND = WholeRun(
    "minimind 64M，一张 3090", 0.4 * 71e12 * 2.31 * 3600, 1, 71e12, 2.31, 3.0 / 7.1,
    "没有发布 token 数：按 40 % MFU 反推", "minimind README",
)

# Llama-3 405B 的总算力：6ND 与发布的 3.8e25 相合
LLAMA3_405B_FLOPS, LLAMA3_405B_TOKENS = 3.8e25, 15.6e12

# 论文表 5 发布的 HFU（%），按只重算 QKᵀ 与 PV 的前向会低一些，见 budget 一章
MEGATRON_HFU = {"22B": 43.7, "175B": 52.8, "530B": 57.0, "1T": 57.0}

# Chinchilla（arXiv 2203.15556）表 3，做法一：（参数量, FLOPs, token 数）
CHINCHILLA_TABLE = (
    (400e6, 1.92e19, 8.0e9), (1e9, 1.21e20, 20.2e9), (10e9, 1.23e22, 205.1e9),
    (67e9, 5.76e23, 1.5e12), (175e9, 3.85e24, 3.7e12), (280e9, 9.90e24, 5.9e12),
    (520e9, 3.43e25, 11.0e12), (1e12, 1.27e26, 21.2e12),
)
