"""接着训练需要的一切：收进一个字典，或从字典装回去。怎样安全地写成文件，见 checkpoint.py。

nanoGPT 的文件里有裸模型、优化器、六个结构参数、步数与最低 loss、全部选项；这里多出的是
每个进程的随机数、数据位置、scaler、最近一次评估的步：少了它们，续训就不是接着走，而是另走一条。
"""

import os
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from experiments.loop import checkpoint
from tokens.errors import UserError

if TYPE_CHECKING:
    from experiments.train_gpu import Run


def snapshot(run: "Run") -> dict:
    """接着训练需要的一切，只有张量和普通值；权重是 fp32、没有包装前缀。"""
    return {
        "model": run.raw.state_dict(),
        "model_config": asdict(run.raw.config),
        "optimizer": [optimizer.state_dict() for optimizer in run.optimizers],
        "scaler": run.scaler.state_dict(),
        "step": run.step,
        "best_loss": run.best_loss,
        "evaluated": run.evaluated,
        "rng": run.world.gather(checkpoint.rng_state(run.world.device)),  # 每个进程自己的
        "data": data_position(run),
        "config": asdict(run.options),
        "run_id": os.environ.get("TORCHELASTIC_RUN_ID", "none"),
        "torch": str(torch.__version__),
    }


def data_position(run: "Run") -> dict:
    """数据读到哪里：哪份数据、哪个种子、下一个序列的序号（batch 是它们的纯函数）。"""
    sequences = run.options.global_batch_tokens // run.options.seq_len
    ids = run.data["meta"].get("ids_sha256", f"{len(run.data['train'])} tokens")
    return {"ids": ids, "seed": run.options.seed, "next_sequence": run.step * sequences}


def restore(run: "Run", state: dict) -> None:
    """`snapshot()` 的反面（权重在 build 里已经装好）。"""
    run.step, run.saved, run.evaluated = state["step"], state["step"], state["evaluated"]
    run.best_loss = state["best_loss"]
    if data_position(run)["ids"] != state["data"]["ids"]:
        raise UserError(
            "数据与检查点训练时的不同；请用原来的 --data，或用 --init-from 检查点.pt 只取权重。"
        )
    for optimizer, saved in zip(run.optimizers, state["optimizer"], strict=True):
        wanted = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        optimizer.load_state_dict(saved)
        for group, settings in zip(optimizer.param_groups, wanted, strict=True):
            group.update(settings)  # 动量来自检查点，超参数来自选项
    if run.scaler.is_enabled() and state["scaler"]:
        run.scaler.load_state_dict(state["scaler"])
    if run.world.rank < len(state["rng"]):  # 新增的进程保留 build 给它的种子
        checkpoint.set_rng_state(state["rng"][run.world.rank], run.world.device)
