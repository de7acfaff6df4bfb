"""训练日志：每行落到 `log.csv`（可选地也给 TensorBoard），续训时接得上，不重不漏；速度表。"""

import contextlib
import csv
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from experiments.lab import hardware
from experiments.loop.run import Run
from tokens.errors import UserError
from tokens.files import atomic_write, describe_write_error

MANY_EPOCHS = 4  # 超过它就说一声
COLUMNS = (
    "step", "tokens", "loss", "grad_norm", "lr", "step_ms", "tokens_per_s", "mfu", "peak_gb",
    "train_loss", "val_loss",
)  # fmt: skip


def _kept(row: dict[str, str], step: int, evaluated: int) -> bool:
    """检查点之前写下的、完整的一行：之后的行会重新走一遍，被杀时写了一半的行作废。"""
    if None in row or None in row.values() or not row["step"].isdigit():
        return False
    return int(row["step"]) <= (evaluated if row["val_loss"] else step)


class RunLog:
    """`log.csv` 的一行是一次日志（loss、速度）或一次评估（train_loss、val_loss），空格表示没有。

    `step` 是检查点里已完成的更新次数，`evaluated` 是最近一次评估所在的步；
    文件里更靠后的行来自被打断的那一段，会先删掉。
    """

    def __init__(
        self, folder: Path, *, step: int = 0, evaluated: int = -1, tensorboard: bool = False
    ) -> None:
        path = folder / "log.csv"
        rows: list[dict[str, str]] = []
        if path.exists():
            with open(path, newline="", encoding="utf-8") as file:
                rows = [row for row in csv.DictReader(file) if _kept(row, step, evaluated)]
        with atomic_write(path) as temporary, open(temporary, "w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
        self.path, self.lost = path, False  # lost：写不下过，说过一次了
        self.file = open(path, "a", newline="", encoding="utf-8")
        self.writer = csv.DictWriter(self.file, COLUMNS)
        self.board = _summary_writer(folder, step) if tensorboard else None

    def write(self, **values: float) -> None:
        """写一行并立即交给操作系统；键都在 COLUMNS 里。"""
        try:
            self.writer.writerow({  # 整数原样写：10 亿以上的 token 数不止 9 位
                key: str(value) if isinstance(value, int) else f"{value:.9g}"
                for key, value in values.items()
            })  # fmt: skip
            self.file.flush()
        except OSError as error:  # 日志写不下不该毁掉训练；检查点写不下另有话说
            if not self.lost:
                problem = describe_write_error(error, self.path) or str(error)
                print(f"警告：{problem}训练继续，日志从这里起不全。", file=sys.stderr, flush=True)
            self.lost = True
        if self.board:
            for key, value in values.items():
                self.board.add_scalar(key, value, int(values["step"]))

    def close(self) -> None:
        """关闭文件（与 TensorBoard）。"""
        with contextlib.suppress(OSError):  # 还有没写下的缓冲：磁盘满时关也会报错
            self.file.close()
        if self.board:
            self.board.close()


def _summary_writer(folder: Path, step: int):
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError(
            "没有装 TensorBoard；请 pip install tensorboard，或去掉 --tensorboard。"
        ) from None
    return SummaryWriter(folder / "tensorboard", purge_step=step)


def announce(run: Run) -> None:
    """开头打印全部选项和由它们推出来的量：日志要能单独看懂。"""
    options, world = run.options, run.world
    for name, value in asdict(options).items():
        world.say(f"{name} = {value}")
    supported, reason = hardware.bf16_support(world.device.type)
    if run.dtype == torch.bfloat16 and not supported:
        world.say(f"注意：{reason}，bf16 只会更慢；可以用 --dtype float32。")
    if options.steps < options.warmup_steps:
        world.say(f"注意：只走 {options.steps} 步，预热却要 {options.warmup_steps} 步，"
                  "学习率到不了峰值（--warmup-steps）。")  # fmt: skip
    elif options.steps < options.decay_steps:
        world.say(f"注意：只走 {options.steps} 步，学习率要到第 {options.decay_steps} 步才降到最低"
                  "（--decay-steps）。")  # fmt: skip
    if options.steps > options.decay_steps:
        world.say(f"注意：学习率在第 {options.decay_steps} 步降到最低，此后不变（--decay-steps）。")
    if note := hardware.busy_note():
        world.say(f"注意：{note}")
    epochs = options.steps * options.global_batch_tokens / len(run.data["train"])
    if epochs > MANY_EPOCHS and options.data != "synthetic":
        world.say(f"注意：{options.steps} 步要把训练集读 {epochs:.1f} 遍。")
    sequences, groups = options.global_batch_tokens // options.seq_len, run.layout.readers.size
    who = f"{groups} 个进程" if groups == world.size else f"{groups} 组进程"
    if cut := run.layout.describe():
        world.say(f"并行：{cut}。")
    world.say(
        f"模型 {run.raw.num_params():,} 个参数；{world.device}，{str(run.dtype)[6:]}，"
        f"{'编译' if run.compiled else 'eager'}，{world.size} 个进程。\n"
        f"全局 batch：{sequences} 个序列 × {options.seq_len} = {options.global_batch_tokens:,} 个 "
        f"token = micro {options.micro_batch} × {who} × 累积 "
        f"{run.accumulation} 次；训练集有 {len(run.data['train']):,} 个 token。"
    )


# ---------------------------------------------------------------- 速度表：评估和存盘不算在内


def peak_memory_gb(device: torch.device) -> float:
    """到现在为止的峰值，10⁹ 字节：GPU 上是张量占的显存，CPU 上是常驻内存（查不到为 NaN）。"""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    try:
        import resource
    except ImportError:  # Windows
        return float("nan")
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss 的单位：macOS 字节，Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


class Meter:
    """`go()` 开始计时，`stop()` 暂停，`read()` 给出上次以来的速度并清零。

    MFU = 每 token 的 FLOPs（PaLM 附录 B：6N + 12·L·d·T）× token/s ÷（一张卡的峰值 × 卡数），
    显示滑动平均 0.9·旧 + 0.1·新。它是数量级的量规：不知道峰值就没有 MFU，超过 100% 就说明峰值
    给错了，都拒绝显示，而不是给一个错的数。
    """

    def __init__(
        self, flops_per_token: int, tokens_per_step: int, device: torch.device, cards: int,
        peak_flops: float = 0.0,
    ) -> None:  # fmt: skip
        self.flops_per_token, self.tokens_per_step = flops_per_token, tokens_per_step
        known = peak_flops or hardware.peak_flops(str(device))
        self.peak = known * cards if known else None
        self.mfu: float | None = None
        self.refusal = "" if known else "设备表里没有这个设备的峰值，用 --peak-flops 给出"
        self.seconds, self.steps, self.started = 0.0, 0, None

    def go(self) -> None:
        """开始或继续计时；已经在走就不动。"""
        if self.started is None:
            self.started = time.perf_counter()

    def stop(self) -> None:
        """在同步点之后调用：GPU 上的计算是异步的，没等它做完的时间不算数。"""
        if self.started is not None:
            self.seconds += time.perf_counter() - self.started
            self.started = None

    def discard(self) -> None:
        """丢掉上次以来的时间与步数：编译、预热不算速度，也不能成为滑动平均的起点。"""
        self.seconds, self.steps, self.started = 0.0, 0, None

    def read(self) -> dict[str, float]:
        """{"step_ms", "tokens_per_s"}，可信时还有 "mfu"；然后清零。"""
        tokens_per_s = self.steps * self.tokens_per_step / self.seconds
        row = {"step_ms": 1e3 * self.seconds / self.steps, "tokens_per_s": tokens_per_s}
        self.seconds, self.steps = 0.0, 0
        if self.peak:
            now = self.flops_per_token * tokens_per_s / self.peak
            if now > 1:
                self.refusal = f"算出 {now:.0%}，不可能：峰值给小了（或者拿错了设备）"
                self.peak = self.mfu = None
            else:
                self.mfu = now if self.mfu is None else 0.9 * self.mfu + 0.1 * now
                row["mfu"] = self.mfu
        return row


def log_line(
    run: Run, log: RunLog | None, meter: Meter, loss: float, norm: float, rate: float, first: bool
) -> None:
    """一行日志，到屏幕也到 log.csv；这个进程的第一步含编译与预热，不计入吞吐。"""
    if first:
        run.world.say(f"第一步 {meter.seconds:.1f} 秒（含编译与预热），不计入吞吐。")
        meter.discard()
    speed = {} if first else meter.read()
    if run.step % run.options.log_interval:
        return
    memory = peak_memory_gb(run.world.device)
    shown = {"step_ms": "{:.1f} ms/步", "tokens_per_s": "{:,.0f} token/s", "mfu": "MFU {:.1%}"}
    fast = "".join(f" | {shown[name].format(value)}" for name, value in speed.items())
    run.world.say(
        f"步 {run.step:>6} | loss {loss:.4f} | 梯度范数 {norm:.3f} | 学习率 {rate:.2e}{fast}"
        f" | 峰值内存 {memory:.2f} GB"
    )
    if meter.refusal:
        run.world.say(f"MFU 不显示：{meter.refusal}。")
        meter.refusal = ""
    if log:
        tokens = run.step * run.options.global_batch_tokens
        log.write(step=run.step, tokens=tokens, loss=loss, grad_norm=norm, lr=rate,
                  peak_gb=memory, **speed)  # fmt: skip
