"""完整的训练循环：一个文件，CPU 和 GPU、一张卡和许多张卡都是它；什么时候被打断都不丢东西。

    python experiments/train_gpu.py --data runs/mine                           # 一张 GPU，29M
    torchrun --standalone --nproc-per-node 8 experiments/train_gpu.py --data runs/mine    # 八张
    python experiments/train_gpu.py --preset tiny_cpu                          # 2 核 CPU，半分钟
    python experiments/train_gpu.py --preset tiny_cpu --init-from resume       # 接着上次继续
    torchrun … experiments/train_gpu.py --parallel fsdp --recompute blocks     # 一张卡放不下

让 torchrun 在一个进程被杀之后自己重启并续训，至多三次：

    torchrun --standalone --nproc-per-node 8 --max-restarts 3 experiments/train_gpu.py …

默认一步读 52 万个 token，内置的小说只有 36 万：不给 --data（由 tokens/prepare.py 准备）就拒绝。
结局写在 --out-dir 的 status.json 里；同一个文件夹同时只许一个训练。

优先级：命令行 > --config FILE.toml > --preset > 默认值。退出码：0 走完；2 输入有误或存不下；
3 loss 不是有限数；75 收到 SIGTERM/SIGINT 或到了 --time-limit，已存好，可以 --init-from resume。
"""

import os
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from experiments.loop import checkpoint, status
from experiments.loop.batches import Feed, evaluation_batches, load_data, to_device, to_host
from experiments.loop.command_line import parse
from experiments.loop.health import (
    Diverged,
    require_finite,
    require_finite_weights,
    require_scale,
)
from experiments.loop.log import Meter, RunLog, announce, log_line
from experiments.loop.options import Options, check
from experiments.loop.parallel import clip
from experiments.loop.run import Run, build, set_numerics, store
from experiments.loop.start import choose_start, compare_vocabulary, same_everywhere
from experiments.ranks.world import Interruption, World, leave_world, start_world
from experiments.training.recipe import learning_rate, set_learning_rate, valid_tokens
from tokens.errors import UserError, tolerate_narrow_output

PRESETS = Path(__file__).parent / "presets"
PATHS = ("config", "out_dir", "init_from", "data")  # 开头的 ~ 展开成主目录
EXIT_DIVERGED, EXIT_INTERRUPTED = 3, 75  # 75 是 sysexits.h 的 EX_TEMPFAIL：稍后再试


# ---------------------------------------------------------------- 全程：这两个函数就是目录


def main(options: Options, given: set[str] | None = None) -> int:
    """训练，返回退出码。`given` 是明确给出的选项（续训时只有它们能改检查点里的值），默认全部。"""
    if options.init_from == "scratch":  # 否则结构还要换成检查点的：换好再查，同样在分配之前
        check(options, int(os.environ.get("WORLD_SIZE", 1)))
    world = start_world(options.device)
    try:
        same_everywhere(options, world)
        with status.exclusive(Path(options.out_dir), world):
            code = attempt(options, set(asdict(options)) if given is None else given, world)
    except UserError:
        leave_world(world)
        raise
    leave_world(world)
    return code


def attempt(options: Options, given: set[str], world: World) -> int:
    """独占文件夹之后：训练，并把结局记进 status.json。"""
    folder = Path(options.out_dir)
    spent, hopeless = status.begin(folder, world)
    if hopeless is not None:
        world.say(f"这次启动已经以退出码 {hopeless} 结束（见 {folder / status.STATUS}），"
                  "重启也一样：不再训练。", error=True)  # fmt: skip
        return hopeless
    try:
        code, step, reason = train(options, given, world, spent)
    except UserError as problem:
        status.end(folder, world, 2, reason=str(problem))
        raise
    status.end(folder, world, code, step=step, reason=reason)
    return code


def train(options: Options, given: set[str], world: World, spent: float) -> tuple[int, int, str]:
    """一次训练，从数据到（退出码，停在第几步，原因）；`spent` 是这次启动已经用掉的秒数。"""
    start = choose_start(options, given, world)
    options, out_dir = start.options, Path(start.options.out_dir)
    set_numerics(options, world.device)
    data = world.together(lambda: load_data(options))
    compare_vocabulary(start, data, world)
    fresh, run = start.state is None, world.together(lambda: build(start, world, data))
    start.state = start.weights = None  # 已经装好；留着就是整个训练都多占一份检查点的内存
    if fresh and (old := world.on_master(lambda: checkpoint.set_aside(out_dir))):
        world.say(f"{out_dir} 里上一次的结果移到了 {old}（想接着它训练，用 --init-from resume）。")
    announce(run)
    log = world.together(
        lambda: RunLog(out_dir, step=run.step, evaluated=run.evaluated,
                       tensorboard=options.tensorboard) if world.master else None
    )  # fmt: skip
    try:
        with Interruption(world, options.time_limit, spent=spent) as interruption:
            return loop(run, log, interruption), run.step, interruption.reason
    except Diverged as problem:
        world.say(f"错误：{problem}", error=True)
        return EXIT_DIVERGED, run.step, str(problem)
    finally:
        if log:
            log.close()


# ---------------------------------------------------------------- 循环


def loop(run: Run, log: RunLog | None, interruption: Interruption) -> int:
    """设学习率；评估与存盘；micro-steps；裁剪与更新。返回退出码。"""
    options, tokens = run.options, run.options.global_batch_tokens
    meter = Meter(run.raw.flops_per_token(), tokens, run.world.device, run.world.size,
                  options.peak_flops)  # fmt: skip
    feed = Feed(run.data["train"], run.step, options, run.layout.readers)
    pending, begun = None, run.step
    while True:
        rate = learning_rate(
            run.step, peak=options.lr, warmup=options.warmup_steps, total=options.decay_steps,
            floor_ratio=options.min_lr_ratio,
        )  # fmt: skip
        for optimizer in run.optimizers:
            set_learning_rate(optimizer, rate)
        stop, done = interruption.agreed(), run.step >= options.steps
        if stop or done or is_due(run.step, options):
            if pending:
                require_finite(run, *pending)  # 存盘之前一定先查
                pending = None
            meter.stop()
            evaluate_and_save(run, log, stopping=bool(stop))
        if stop or done:
            return finish(run, stop)
        meter.go()
        loss, norm = train_step(run, feed)
        if pending:
            require_finite(run, *pending)  # 查上一步的：这一步已经排进队列，等待不让 GPU 空转
        pending = run.step, *to_host(loss, norm)
        run.step, meter.steps = run.step + 1, meter.steps + 1
        if run.step == begun + 1 or run.step % options.log_interval == 0:
            require_finite(run, *pending)
            require_scale(run)
            pending = None
            meter.stop()
            log_line(run, log, meter, loss.item(), norm.item(), rate, first=run.step == begun + 1)


def is_due(step: int, options: Options) -> bool:
    """第 `step` 步要不要评估或存盘。"""
    saving = options.save_interval and step % options.save_interval == 0
    return bool(saving) or step % options.eval_interval == 0


# ---------------------------------------------------------------- 一步


def train_step(run: Run, feed: Feed) -> tuple[Tensor, Tensor]:
    """k 个 micro-batch 的前向与反向，裁剪，更新一次。

    返回全局的 loss（按有效 token 加权）与梯度范数；都留在设备上，不强迫同步。
    """
    total, readers = torch.zeros((), device=run.world.device), run.layout.readers
    for k in range(run.accumulation):
        last = k == run.accumulation - 1
        x, y, weight = feed.take()
        with run.syncing(last):  # 除最后一份外，梯度都只在本地累加
            with run.autocast():
                _, loss = run.model(x, y, reduction="sum", fused_loss=run.fused_loss)
            feed.prefetch()  # 前向已经发出：GPU 在算，CPU 读下一份（拷贝仍排在计算之后）
            run.scaler.scale(loss * weight).backward()
        total += loss.detach() * weight / readers.size
    for optimizer in run.optimizers:
        run.scaler.unscale_(optimizer)  # 先还原，再裁剪：缩放过的范数没有意义
    norm = clip(run.raw.parameters(), run.options.grad_clip)
    for optimizer in run.optimizers:
        run.scaler.step(optimizer)  # fp16 溢出时跳过；梯度已经全归约，所有进程一起跳
    run.scaler.update()
    for optimizer in run.optimizers:
        optimizer.zero_grad(set_to_none=True)
    return readers.sum(total), norm


# ---------------------------------------------------------------- 评估与检查点


@torch.no_grad()
def evaluate(run: Run) -> dict[str, float]:
    """两份数据各 `eval_tokens` 个固定的 token 的平均 loss，由所有进程分摊，按 token 加权。

    用 `forward` 而不是 DDP 的外壳：只有一部分进程进 DDP 的前向，会一直等别人。
    """
    device, readers, losses = run.world.device, run.layout.readers, {}
    run.forward.eval()
    for split in ("train", "val"):
        sums = torch.zeros(2, dtype=torch.float64)
        for x, y in evaluation_batches(run.data[split], split, run.options, readers):
            with run.syncing(True), run.autocast():
                _, loss = run.forward(
                    to_device(x, device), to_device(y, device),
                    reduction="sum", fused_loss=run.fused_loss,
                )  # fmt: skip
            sums += torch.tensor((loss.item(), valid_tokens(y)), dtype=torch.float64)
        total, count = readers.sum(sums).tolist()
        if not count:
            reason = "没有一个有效的目标（都等于 --ignore-token）"
            raise UserError(f"{split} 的评估里{reason}；请检查数据或 --ignore-token。")
        losses[f"{split}_loss"] = total / count
    run.forward.train()
    return losses


def save(run: Run, *, best: bool = False) -> None:
    """存一份；存不下就大声说，旧的仍在，训练继续，下次再试。"""
    require_finite_weights(run)
    if not (problem := store(run, best=best)):
        run.saved = run.step
    else:
        run.world.say(f"警告：第 {run.step} 步没有存成（{problem}）；旧的仍完好。", error=True)


def evaluate_and_save(run: Run, log: RunLog | None, *, stopping: bool) -> None:
    """到了评估的步就评估并存盘，验证 loss 创新低时也存为 best；要停时只存盘，越快越好。"""
    options, improved = run.options, False
    due = run.step % options.eval_interval == 0 or run.step == options.steps
    if due and not stopping and run.evaluated != run.step:
        losses = evaluate(run)
        improved, run.evaluated = losses["val_loss"] < run.best_loss, run.step
        previous, run.best_loss = run.best_loss, min(run.best_loss, losses["val_loss"])
        text = "，".join(f"{name} {value:.4f}" for name, value in losses.items())
        run.world.say(f"步 {run.step:>6} | 评估 {text}{'（新的最好）' if improved else ''}")
        if log:
            log.write(step=run.step, **losses)
        save(run, best=improved)
        if run.saved != run.step:
            run.best_loss = previous  # best 没有写成，就还不是「最好的」
    elif run.saved != run.step:
        save(run)


# ---------------------------------------------------------------- 结束


def finish(run: Run, stop: str) -> int:
    """最后一句话与退出码。"""
    last = Path(run.options.out_dir) / checkpoint.LAST
    if run.saved != run.step:
        lost = f"第 {run.step} 步没有存成，最后存下的是第 {run.saved} 步：{last}。"
        run.world.say(lost, error=True)
        return 2
    if run.step >= run.options.steps and not stop:  # 正好在最后一步被打断：评估还没做，不算走完
        run.world.say(f"完成：{run.step} 步，验证 loss 最低 {run.best_loss:.4f}，检查点 {last}。")
        return 0
    run.world.say(f"{stop}：停在第 {run.step} 步，已存到 {last}；用 --init-from resume 继续。")
    return EXIT_INTERRUPTED


def command_line(argv: list[str] | None = None) -> int:
    """解析命令行并训练；使用者的错误只报一句，退出码 2。"""
    tolerate_narrow_output()
    try:
        return main(*parse(Options, argv, presets=PRESETS, description=__doc__, paths=PATHS))
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"错误：{error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # 循环开始之前按了 Ctrl-C：还没有什么可存的
        return 130


if __name__ == "__main__":
    sys.exit(command_line())
