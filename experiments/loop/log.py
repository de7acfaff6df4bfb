"""训练日志：每行落到 `log.csv`（可选地也给 TensorBoard），续训时接得上，不重不漏。"""

import csv
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from experiments.lab import hardware
from tokens.errors import UserError
from tokens.files import atomic_write

if TYPE_CHECKING:
    from experiments.train_gpu import Run

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
        self.file = open(path, "a", newline="", encoding="utf-8")
        self.writer = csv.DictWriter(self.file, COLUMNS)
        self.board = _summary_writer(folder, step) if tensorboard else None

    def write(self, **values: float) -> None:
        """写一行并立即交给操作系统；键都在 COLUMNS 里。"""
        self.writer.writerow({  # 整数原样写：10 亿以上的 token 数不止 9 位
            key: str(value) if isinstance(value, int) else f"{value:.9g}"
            for key, value in values.items()
        })  # fmt: skip
        self.file.flush()
        if self.board:
            for key, value in values.items():
                self.board.add_scalar(key, value, int(values["step"]))

    def close(self) -> None:
        """关闭文件（与 TensorBoard）。"""
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


def announce(run: "Run") -> None:
    """开头打印全部选项和由它们推出来的量：日志要能单独看懂。"""
    options, world = run.options, run.world
    for name, value in asdict(options).items():
        world.say(f"{name} = {value}")
    supported, reason = hardware.bf16_support(world.device.type)
    if run.dtype == torch.bfloat16 and not supported:
        world.say(f"注意：{reason}，bf16 只会更慢；可以用 --dtype float32。")
    if options.steps > options.decay_steps:
        world.say(f"注意：学习率在第 {options.decay_steps} 步降到最低，此后不变（--decay-steps）。")
    sequences = options.global_batch_tokens // options.seq_len
    world.say(
        f"模型 {run.raw.num_params():,} 个参数；{world.device}，{str(run.dtype)[6:]}，"
        f"{'编译' if run.forward is not run.raw else 'eager'}，{world.size} 个进程。\n"
        f"全局 batch：{sequences} 个序列 × {options.seq_len} = {options.global_batch_tokens:,} 个 "
        f"token = micro {options.micro_batch} × {world.size} 个进程 × 累积 "
        f"{run.accumulation} 次；训练集有 {len(run.data['train']):,} 个 token。"
    )
