"""presets/cluster/slurm.sh 在真的 Slurm 上：到时限存好、以 75 重新排队、接着走完；发散的不重来。

这里起的是 Debian 的 slurm-wlm：munged、slurmctld、slurmd 各一个，都在这台机器的回环网卡上，
配置、状态和日志在临时文件夹里，用完按进程号结束。没有装 slurm-wlm 与 munge，或者不是 root，就跳过。
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_training import TINY, difference, state, trace

from experiments.lab.results import ROOT
from experiments.ranks.launch import child_environment, free_port, kill_tree

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "srun")
CONFIG = """ClusterName=book
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
GresTypes=gpu
MpiDefault=none
ReturnToService=2
MailProg=/bin/true
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} Gres=gpu:8 State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """为什么起不了 Slurm；起得了就是空串。"""
    if missing := [name for name in NEEDED if not shutil.which(name)]:
        return f"没有 {'、'.join(missing)}（Debian 的 slurm-wlm 与 munge）"
    return "" if os.geteuid() == 0 else "slurmd 要 root"


class Cluster:
    """一台机器的 Slurm；`sbatch`、`squeue` 一类的命令经 `run` 找到它。"""

    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, []
        (folder / "munge").mkdir(mode=0o755)
        for name in ("state", "spool"):
            (folder / name).mkdir()
        key = folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        config = CONFIG.format(
            host=socket.gethostname().split(".")[0], folder=folder, cpus=os.cpu_count(),
            controller=free_port(), daemon=free_port(),
        )  # fmt: skip
        (folder / "slurm.conf").write_text(config)
        for number in range(8):  # 假的 GPU：slurmd 只看文件在不在
            (folder / f"gpu{number}").touch()
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")
        self.environment = child_environment(threads=1) | {
            "SLURM_CONF": str(folder / "slurm.conf"), "PYTHONPATH": str(ROOT),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }  # fmt: skip

    def start(self) -> None:
        """三个守护进程，等到节点空闲。"""
        munge = self.folder / "munge"
        self._daemon("munged", "--foreground", "--force", f"--socket={munge}/socket",
                     f"--key-file={munge}/key", f"--pid-file={munge}/pid",
                     f"--log-file={munge}/log", f"--seed-file={munge}/seed")  # fmt: skip
        self._until(lambda: (munge / "socket").exists(), 20)
        self._daemon("slurmctld", "-D")
        self._daemon("slurmd", "-D")
        self._until(lambda: "idle" in self.run("sinfo", "-h", "-o", "%t").stdout, 40)

    def _daemon(self, *command: str) -> None:
        with open(self.folder / f"{command[0]}.out", "wb") as output:
            self.started.append(subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=output,
                stderr=output, start_new_session=True,
            ))  # fmt: skip

    def _until(self, ready, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not ready():
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.2)

    def said(self) -> str:
        """守护进程的日志的末尾。"""
        logs = [*self.folder.glob("*.out"), *self.folder.glob("*.log")]
        return "\n".join(f"── {path.name}\n{path.read_text(errors='replace')[-1500:]}"
                         for path in logs)  # fmt: skip

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess:
        """一条 Slurm 的命令，在仓库根。"""
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60,
                              env=self.environment | environment)  # fmt: skip

    def wait(self, job: str, seconds: float) -> str:
        """等作业结束，返回它的最后状态；重新排队之后不等 Slurm 的两分钟冷却，很快放行。

        但要隔两秒：作业的凭证以秒为单位，同一秒里重来会被 slurmd 当作已经取消的那一次。
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            shown = self.run("scontrol", "show", "job", job).stdout
            found = dict(word.partition("=")[::2] for word in shown.split())
            if found.get("JobState") in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"):
                return found["JobState"]
            if found.get("JobState") == "PENDING" and found.get("Reason") == "BeginTime":
                time.sleep(2)
                self.run("scontrol", "update", f"jobid={job}", "starttime=now")
            time.sleep(0.5)
        raise AssertionError(f"{seconds:g} 秒还没有结束：{shown}\n{self.said()}")

    def stop(self) -> None:
        """结束作业和守护进程，按进程号。"""
        self.run("scancel", "--full", "--user=root")
        for process in reversed(self.started):
            process.send_signal(signal.SIGTERM)
        for process in reversed(self.started):
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                kill_tree(process.pid)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    """起一个 Slurm，用完拆掉。"""
    if reason := why_not():
        pytest.skip(reason)
    found = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        found.start()
        yield found
    finally:
        found.stop()


def submit(cluster: Cluster, folder: Path, *words: str, margin: int, **changes) -> str:
    """像读者那样提交 slurm.sh，只是一台机器、不占 GPU；返回作业号。"""
    options = {**TINY, **changes}
    flags = [f"--{'' if options.pop(name) else 'no-'}{name.replace('_', '-')}"
             for name in ("compile", "fused_loss")]  # fmt: skip
    settings = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    done = cluster.run(
        "sbatch", "--parsable", "--nodes=1", "--gpus-per-node=1", "--cpus-per-task=1", *words,
        f"--output={folder}.log", "experiments/presets/cluster/slurm.sh", *flags, *settings,
        OUT=str(folder), PROCS="1", PORT=str(free_port()), MARGIN=str(margin), WAIT="60",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.fault
@pytest.mark.timeout(1300)
def test_a_job_that_meets_its_limit_requeues_itself_and_finishes(cluster, tmp_path):
    """时限比训练短：停下存好、重新排队、接着走完；结果与不停地走完逐位相等。"""
    steps = {"steps": 2000, "decay_steps": 2000, "eval_interval": 2000, "log_interval": 500}
    began = time.monotonic()
    whole = submit(cluster, tmp_path / "whole", "--time=30", margin=1, **steps)
    assert cluster.wait(whole, 600) == "COMPLETED", (tmp_path / "whole.log").read_text()
    # 时限一分钟（Slurm 最短的），留一半起停，给 train_gpu 至多半分钟：快慢的机器都停一两次
    allowed = min(30, max(6, (time.monotonic() - began) / 2))
    job = submit(cluster, tmp_path / "parts", "--time=1", margin=round(60 - allowed), **steps)
    assert cluster.wait(job, 600) == "COMPLETED", (tmp_path / "parts.log").read_text()
    said = (tmp_path / "parts.log").read_text()
    assert "时限已到：停在第" in said and "退出码 75：重新排队" in said, said
    assert "第 2 次运行" in said, said
    status = json.loads((tmp_path / "parts" / "status.json").read_text())
    assert status["state"] == "finished" and status["launch"] == job, status
    assert difference(state(tmp_path / "whole"), state(tmp_path / "parts")) == 0.0, said
    assert trace(tmp_path / "whole").equals(trace(tmp_path / "parts"))


@pytest.mark.fault
@pytest.mark.timeout(700)
def test_a_refused_run_is_not_queued_again(cluster, tmp_path):
    """选项有误：退出码 2，作业失败，不重新排队。"""
    job = submit(cluster, tmp_path / "wrong", "--time=5", margin=1, micro_batch=3)
    assert cluster.wait(job, 600) == "FAILED"
    said = (tmp_path / "wrong.log").read_text()
    assert "不能被" in said and "重新排队" not in said and "Traceback" not in said, said
    shown = cluster.run("scontrol", "show", "job", job).stdout
    assert "ExitCode=2:0" in shown and "Restarts=0" in shown, shown
