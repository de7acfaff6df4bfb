"""GPU 检查：一条命令、至多八分钟：要 GPU 的测试全部跑一遍，再量 gpt_124m 的速度与显存。

    python benchmarks/gpu_check.py                  # 一张 GPU
    python benchmarks/gpu_check.py --tiny           # 没有 GPU：极小的形状，只把流程走一遍

先跑 `pytest -m gpu`（nccl 的 DDP 与 FSDP、GradScaler、锁页内存、显存），再训练：真实的与随机的
token、编译与 eager，四次各是一个 `train_gpu.py` 进程，最要紧的先做；每次的时限按剩下的时间分，
到时限就停，已经走的步照样算数。速度与 50 % 的 MFU 比较，峰值显存与 budget 的估算比较（一成以内）。
结果是一个 JSON，打印出来，也写进 `--out`，文件名带设备名，可以提交。
这里**不**比较 loss：每次只走几十步。
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch

from experiments.lab.hardware import describe, peak_flops
from experiments.lab.results import ROOT, results_folder, run_main
from experiments.plan.architecture import gpt
from experiments.plan.memory import estimate
from model import GPT, GPTConfig
from tokens.errors import UserError
from tokens.files import atomic_write

TARGET_MFU = 0.5
TOLERANCE = 0.1  # 峰值显存与估算至多差这么多（相对）
MEASURED = ROOT / "book" / "measured"  # 别处量好、提交进来的结果，书里引用它们
SHAPE = {"vocab_size": 50_304, "d_model": 768, "n_head": 12, "n_layer": 12, "seq_len": 1024}
TINY = {"vocab_size": 8192, "d_model": 32, "n_head": 1, "n_layer": 1, "seq_len": 32}
RUNS = (("", True), ("synthetic", True), ("", False), ("synthetic", False))  # (数据, 编译)


@dataclass(frozen=True)
class Options:
    """一张 GPU 上的速度检查。"""

    out: str = ""
    """结果文件；空是 book/measured/gpu_check_<设备名>.json（--tiny 时在 results/）"""
    seconds: float = 290.0
    """四次训练合计的上限（秒）；编译的每次占两份，eager 的每次占一份"""
    test_seconds: float = 180.0
    """要 GPU 的测试合计的上限（秒）；0 表示不跑"""
    micro_batch: int = 16
    """一次前向的序列数（个）；显存不够时减半"""
    accumulation: int = 8
    """一步累积几次（次）"""
    peak_flops: float = 0.0
    """这张卡的稠密 bf16 峰值（FLOP/s）；0 表示查设备表"""
    tiny: bool = False
    """在 CPU 上用极小的形状把流程走一遍，数字没有意义"""


def device_name(options: Options) -> str:
    """要量的设备；没有 GPU 又没有说 --tiny 就不量。"""
    if options.tiny:
        return "cpu-tiny"
    if not torch.cuda.is_available():
        raise UserError(
            "这台机器没有可用的 CUDA GPU，所以什么都没有量；"
            "请在有 GPU 的机器上运行，或用 --tiny 在 CPU 上只把流程走一遍。"
        )
    return torch.cuda.get_device_name()


def train_command(options: Options, data: str, compiled: bool, folder: str) -> list[str]:
    """一次训练的命令：评估只占一个 micro-batch，每步一行日志，步数多到走不完。"""
    shape = TINY if options.tiny else SHAPE
    tokens = options.micro_batch * options.accumulation * shape["seq_len"]
    settings = {
        **shape, "micro_batch": options.micro_batch, "global_batch_tokens": tokens,
        "data": data or str(ROOT / "tokens" / "tokens.pt"),  # 写明：本来就要把小说读许多遍
        "out_dir": folder, "steps": 30 if options.tiny else 100_000,
        "decay_steps": 100_000, "lr": 6e-4, "eval_interval": 100_000,
        "eval_tokens": options.micro_batch * shape["seq_len"],
        "log_interval": 1, "peak_flops": options.peak_flops,
        "device": "cpu" if options.tiny else "cuda",
    }  # fmt: skip
    words = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    words.append("--compile" if compiled else "--no-compile")
    return [sys.executable, str(ROOT / "experiments" / "train_gpu.py"), *words]


def measure(options: Options, data: str, compiled: bool, limit: float) -> dict:
    """跑一次，至多 `limit` 秒，返回这种配置的一行；没有量成时 "error" 说明原因。

    到时限就杀：每步的速度已经在 log.csv 里，不必等它再存一份 1.5 GB 的检查点。
    """
    row: dict = {"data": data or "novel", "compiled": compiled}
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as folder:
        said, problem = run_for(train_command(options, data, compiled, folder), limit)
        if fallback := re.search("不编译，用 eager：(.*)。", said):
            return row | {"error": f"没有编译：{fallback[1]}"}  # 不能把 eager 的数记在编译名下
        path = Path(folder) / "log.csv"
        speed = summarize(pd.read_csv(path), options) if path.exists() else None
    first = re.search(r"第一步 ([\d.]+) 秒", said)
    row["first_step_s"] = float(first[1]) if first else None
    if speed is None:
        slow = f"{limit:.0f} 秒内没有走完第二步；请增大 --seconds 或减小 --accumulation"
        return row | {"error": problem or slow}
    return row | speed | fit(speed, options, compiled) | ({"note": problem} if problem else {})


def fit(speed: dict, options: Options, compiled: bool) -> dict:
    """峰值显存与 budget 的估算：{"estimate_gb", "over"}，over 是超出估算的几成；--tiny 时没有。"""
    if options.tiny:
        return {}
    shape = {name: SHAPE[name] for name in ("d_model", "n_layer", "n_head", "seq_len")}
    guess = estimate(gpt(**shape, vocab=SHAPE["vocab_size"]), micro_batch=options.micro_batch,
                     execution="compiled" if compiled else "eager").total  # fmt: skip
    return {"estimate_gb": round(guess, 2), "over": round(speed["peak_gb"] / guess - 1, 3)}


def run_tests(limit: float) -> dict:
    """`pytest -m gpu`，至多 `limit` 秒：各有几个通过、失败、跳过，失败与跳过的原因。"""
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider",
                   f"--junitxml={report}", str(ROOT / "tests" / "test_gpu.py")]  # fmt: skip
        try:
            subprocess.run(command, cwd=ROOT, capture_output=True, timeout=limit)
        except subprocess.TimeoutExpired:
            return {"error": f"{limit:.0f} 秒之内没有跑完"}
        if not report.exists():
            return {"error": "pytest 没有留下报告"}
        return counts(ElementTree.parse(report))


def counts(report: ElementTree.ElementTree) -> dict:
    """JUnit 的报告 → 个数，和没有通过的各自的原因。"""
    found: dict = {"passed": 0, "failed": 0, "skipped": 0, "reasons": {}}
    for case in report.iter("testcase"):
        problems = [child for child in case if child.tag in ("failure", "error", "skipped")]
        kind = problems[0].tag if problems else "passed"
        found[{"failure": "failed", "error": "failed"}.get(kind, kind)] += 1
        if problems:
            found["reasons"][case.get("name")] = problems[0].get("message", "").split("\n")[0]
    return found


def run_for(command: list[str], limit: float) -> tuple[str, str]:
    """运行至多 `limit` 秒；返回它的 stdout，以及出了什么错（空串：正常，或到时限被我们停下）。"""
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=limit, env=os.environ | {"PYTHONUTF8": "1"}
        )
    except subprocess.TimeoutExpired as late:
        return (late.stdout or b"").decode("utf-8", "replace"), ""
    said, errors = (part.decode("utf-8", "replace") for part in (done.stdout, done.stderr))
    if done.returncode == 0:
        return said, ""
    message = (errors.strip() or said.strip()).split("\n")[-1]
    return said, f"退出码 {done.returncode}：{message}"


def summarize(log: pd.DataFrame, options: Options) -> dict | None:
    """日志 → 中位数的 token/s、由它算的 MFU、峰值内存（10⁹ 字节）；没走完第二步是 None。"""
    speed = log["tokens_per_s"].dropna()
    if speed.empty:
        return None
    with torch.device("meta"):
        flops = GPT(GPTConfig(**(TINY if options.tiny else SHAPE))).flops_per_token()
    peak = options.peak_flops or (None if options.tiny else peak_flops("cuda"))
    tokens_per_s = float(speed.median())
    mfu = tokens_per_s * flops / peak if peak else None
    return {
        "steps": int(log["step"].max()),
        "tokens_per_s": round(tokens_per_s, 1),
        "mfu": round(mfu, 4) if mfu and mfu <= 1 else None,  # 超过 100 % 说明峰值给错了
        "peak_gb": round(float(log["peak_gb"].max()), 2),
    }


def verdict(runs: list[dict]) -> str:
    """与 50 % 的 MFU、与估算的显存比较的一句话。"""
    known = [run["mfu"] for run in runs if run.get("mfu") is not None]
    if not known:
        return "没有 MFU：设备不在表里（用 --peak-flops 给出峰值），或者没有一种配置量成。"
    reached = "达到" if max(known) >= TARGET_MFU else "没有达到"
    said = f"最好的 MFU 是 {max(known):.1%}，{reached} {TARGET_MFU:.0%}。"
    worst = max((run["over"] for run in runs if "over" in run), key=abs, default=None)
    if worst is not None:
        within = "在一成以内" if abs(worst) <= TOLERANCE else "超出一成"
        said += f"峰值显存与估算最多差 {worst:+.1%}，{within}。"
    return said


def main(options: Options) -> None:
    """四种配置依次量，打印并保存 JSON。"""
    name, runs = device_name(options), []
    tests = run_tests(options.test_seconds) if options.test_seconds else {}
    deadline = time.monotonic() + options.seconds
    for i, (data, compiled) in enumerate(RUNS):
        shares = sum(1 + later for _, later in RUNS[i:])  # 前面省下的，后面分
        limit = (deadline - time.monotonic()) * (1 + compiled) / shares
        print(f"{data or 'novel'}，{'编译' if compiled else 'eager'}，至多 {limit:.0f} 秒……",
              file=sys.stderr)  # fmt: skip
        runs.append(measure(options, data, compiled, max(limit, 1.0)))
    result = {
        "device": name, "model": "tiny" if options.tiny else "gpt_124m", "target_mfu": TARGET_MFU,
        "verdict": verdict(runs), "tests": tests, "runs": runs,
        "machine": describe("cpu" if options.tiny else "cuda"),
    }  # fmt: skip
    text = json.dumps(result, ensure_ascii=False, indent=2)
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    folder = results_folder() if options.tiny else MEASURED
    path = Path(options.out) if options.out else folder / f"gpu_check_{slug}.json"
    with atomic_write(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
    print(text)
    print(f"{result['verdict']}结果写在 {path}。", file=sys.stderr)
    if all("error" in run for run in runs):
        raise UserError(f"四种配置都没有量成；第一种的原因：{runs[0]['error']}。")


if __name__ == "__main__":
    run_main(main, Options)
