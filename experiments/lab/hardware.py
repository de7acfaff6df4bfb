"""这台机器能做什么：CPU 指令集、能否编译、实测的矩阵乘法峰值；GPU 的峰值查设备表。

设备表本身在 `experiments/lab/devices.py`（只用标准库，`budget` 也读它）。
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from experiments.lab.devices import find_device
from experiments.lab.timing import best_seconds


def cpu_name() -> str:
    """CPU 的商品名；查不到时给出架构名。"""
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@cache
def instruction_sets() -> tuple[str, ...]:
    """与矩阵乘法有关的指令集，从弱到强；查不到（macOS、Windows）时退回 PyTorch 的判断。"""
    names = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith(("flags", "Features")):
                flags = line.split(":", 1)[1].split()
                return tuple(name for name in names if name in flags)
    return (torch.backends.cpu.get_cpu_capability().lower(),)


def bf16_support(device: str = "cpu") -> tuple[bool, str]:
    """这个设备是否有 bf16 矩阵指令，以及理由；没有时 autocast 只会变慢，不会变快。"""
    if torch.device(device).type == "cuda":
        if torch.cuda.get_device_capability() >= (8, 0):
            return True, "GPU 的 Tensor Core 支持 bf16（Ampere 及以后）"
        return False, "这块 GPU 早于 Ampere，没有 bf16 的 Tensor Core"
    found = [name for name in ("amx_bf16", "avx512_bf16", "bf16") if name in instruction_sets()]
    if found:
        return True, f"CPU 有 bf16 指令（{found[0]}）"
    return False, "CPU 没有 bf16 指令（AVX512-BF16、AMX 或 ARM 的 bf16）"


def compile_support(device: str = "cpu") -> tuple[bool, str]:
    """torch.compile 能否用，以及理由；CPU 后端要一个 C++ 编译器，CUDA 后端要 Triton。"""
    if torch.device(device).type == "cuda":
        if find_spec("triton") is None:
            return False, "没有装 Triton；torch.compile 在 GPU 上用它生成内核"
        if torch.cuda.get_device_capability() < (7, 0):
            return False, "这块 GPU 早于 Volta（计算能力不到 7.0），Triton 不支持"
        return True, "torch.compile 用 Triton 编译"
    if sys.platform == "win32":
        return False, "Windows 上 torch.compile 需要 MSVC，这里不依赖它"
    if problem := cache_problem():
        return False, problem
    # 与 torch.compile 自己的找法相同：它不会去试别的名字
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if " " in compiler and shutil.which(compiler) is None:  # 例如 "ccache g++"
        return False, f"CXX={compiler}：torch.compile 只认一个程序名，不认带参数的；请改 CXX"
    if shutil.which(compiler) is None:
        return False, f"找不到 C++ 编译器 {compiler}；装上它，或用环境变量 CXX 指定别的，即可编译"
    problem = compiler_problem(compiler)
    if problem:
        return False, f"{compiler} 编不了 PyTorch 生成的代码：{problem}"
    return True, f"torch.compile 用 {compiler} 编译"


@cache
def compiler_problem(compiler: str) -> str | None:
    """编译一个只包含 Python.h 的程序（PyTorch 生成的代码都包含它）；不成时返回第一句错误。

    有编译器而没有头文件（Debian 上是 python3-dev 包）、macOS 上只有占位的 clang++，都在这里看出来。
    """
    include = f"-I{sysconfig.get_path('include')}"
    command = [compiler, "-x", "c++", "-fsyntax-only", include, "-"]
    try:
        done = subprocess.run(
            command, input="#include <Python.h>\n", capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    said = done.stderr.strip().splitlines() or [f"退出码 {done.returncode}"]
    return next((x for x in said if "error" in x), said[0]) if done.returncode else None


def describe(device: str = "cpu", threads: int | None = None) -> dict[str, str]:
    """写进每个结果文件的机器与版本，让数字知道自己是在哪里量的；`device` 是这次运行用的设备。"""
    return {
        "cpu": cpu_name(),
        "cores": str(os.cpu_count()),
        "threads": str(threads or torch.get_num_threads()),
        "isa": " ".join(instruction_sets()),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def busy_note() -> str:
    """机器已经很忙时的一句提醒；不忙或问不出（Windows）时是空串。

    OpenMP 的线程用空转等彼此：两个训练抢同样的核，一步能慢上百倍，而不是两倍。
    """
    load, cores = getattr(os, "getloadavg", lambda: (0.0,))()[0], os.cpu_count() or 1
    if load < cores + 0.5:
        return ""
    return (f"这台机器正忙（{cores} 个核上平均有 {load:.1f} 个进程在抢），时间不可信，也会慢得多；"
            "等它闲下来，或用 OMP_NUM_THREADS=1 让每个程序只用一个线程。")  # fmt: skip


def cache_problem() -> str | None:
    """编译缓存的文件夹能不能用：路径里有空白时，PyTorch 2.13 拼出的编译命令会断开（#191010）。"""
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir()
    if not re.search(r"\s", folder):
        return None
    return (f"编译的缓存放在「{folder}」，路径里有空白，编译命令会断开；"
            "请用环境变量 TORCHINDUCTOR_CACHE_DIR 换一个没有空白的文件夹")  # fmt: skip


def matmul_peak(
    dtype: torch.dtype = torch.float32, *, size: int = 2048, seconds: float = 0.5
) -> float:
    """实测的矩阵乘法峰值，FLOP/s：`size`³ 的乘法重复约 `seconds` 秒，取最快的一次。

    MFU 的分母。取最快而不取平均：峰值问的是硬件能做到多少，别的进程只会让它变慢。
    """
    a, b = torch.randn(2, size, size).to(dtype)
    out = torch.empty(size, size, dtype=dtype)
    return 2 * size**3 / best_seconds(lambda: torch.mm(a, b, out=out), seconds)


def peak_flops(device: str = "cpu") -> float | None:
    """设备的稠密 bf16 峰值，FLOP/s；GPU 查表，不认识返回 None（宁可没有 MFU，也不给错的）。

    CPU 没有可查的表：用 `matmul_peak()` 当场测。
    """
    if torch.device(device).type != "cuda":
        return None
    found = find_device(torch.cuda.get_device_name(device))
    return found.peak_bf16 if found else None
