"""torchrun，但是出错时只说一句话，退出码传得出来：几台机器上的每一台各运行一个。

    python -m experiments.ranks.agent --nnodes 2 … experiments/train_gpu.py …

参数与 torchrun 完全相同，做事的也是它。多出的只有两样：会合不成、连不上、对方没了，不是四十行
traceback，而是一句「怎么了，查什么」；工作进程的退出码 2、3、75 原样传给调度器，torchrun 一律是 1。
"""

import signal
import sys

from torch.distributed import DistError, run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousTimeoutError,
)

EXIT_UNAVAILABLE = 69  # sysexits.h 的 EX_UNAVAILABLE：别的机器不在，稍后再试
EXIT_INTERRUPTED = 75
MEANT = (2, 3, EXIT_INTERRUPTED)  # train_gpu 有意的退出码：输入有误、发散、被打断而已经存好


def explain(error: Exception, wanted: str) -> tuple[str, int]:
    """torchrun 抛出的异常 →（一句话，退出码）；`wanted` 是「2 台，在 10.0.0.1:29500」。"""
    if isinstance(error, RendezvousTimeoutError):
        return (f"等到了时限，机器还没有来齐（要 {wanted}）；请看别的机器起来了没有，"
                "HOST、PORT、JOB 是否相同，防火墙放行了没有。", EXIT_UNAVAILABLE)  # fmt: skip
    if isinstance(error, RendezvousClosedError):
        return (f"这次会合已经结束（{wanted}）；要再训练一次，请换一个 JOB。", EXIT_UNAVAILABLE)
    if isinstance(error, RendezvousError | DistError):
        return (f"连不上会合的机器，或者与它断了（要 {wanted}）；它若在重启，稍后再试。",
                EXIT_UNAVAILABLE)  # fmt: skip
    if isinstance(error, SignalException):
        return f"收到 {error.sigval.name}，工作进程已经停下。", EXIT_INTERRUPTED
    if isinstance(error, ChildFailedError):
        return failed(error)
    raise error


def failed(error: ChildFailedError) -> tuple[str, int]:
    """这台机器上最先失败的工作进程：有意的退出码原样传出，别的算 1。"""
    codes = {failure.exitcode for failure in error.failures.values()}
    for code in MEANT:
        if code in codes:
            return "", code  # 工作进程自己已经说过一句
    rank, first = error.get_first_failure()
    code = first.exitcode
    how = signal.Signals(-code).name if code < 0 else f"退出码 {code}"
    return f"rank {rank} 没有走完（{how}），重启的次数也用完了；原因见它自己的输出。", 1


def main(argv: list[str]) -> int:
    """像 torchrun 那样启动；返回退出码。"""
    options = run.get_args_parser().parse_args(argv)
    where = options.rdzv_endpoint or f"{options.master_addr}:{options.master_port}"
    try:
        run.main(argv)
    except Exception as error:
        said, code = explain(error, f"{options.nnodes} 台，在 {where}")
        if said:
            print(f"错误：{said}", file=sys.stderr, flush=True)
        return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
