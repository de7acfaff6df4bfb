"""`multi_node` 与 presets/cluster/ 的断言：机器坏了又回来，结果一位不差；等不到就说一句。"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
import yaml
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)

from experiments import multi_node as mn
from experiments.lab.results import ROOT, results_folder
from experiments.ranks import agent, nodes
from experiments.ranks.address import my_address
from experiments.ranks.launch import free_port
from experiments.ranks.world import LOOPBACK, attempt_store
from tokens.errors import UserError

CLUSTER = ROOT / "experiments" / "presets" / "cluster"
OPTIONS = mn.Options(steps=36, strike=16, save_every=10, down=0.5, frozen=2.0, wait=60)


# ---------------------------------------------------------------- 不启动训练的


def test_my_address_is_the_one_the_others_see():
    """去 HOST 的路决定自己的地址与网卡；HOST 就是自己时说得出来。"""
    assert my_address("127.0.0.1") == ("127.0.0.1", LOOPBACK, True)
    with pytest.raises(UserError, match="HOST=no.such.host.invalid 解析不了"):
        my_address("no.such.host.invalid")


def failure(code: int) -> ProcessFailure:
    """一个以 `code` 结束的工作进程。"""
    return ProcessFailure(local_rank=0, pid=1, exitcode=code, error_file="<N/A>")


@pytest.mark.parametrize(
    ("error", "said", "code"),
    [
        (RendezvousTimeoutError(), "还没有来齐（要 2 台", 69),
        (RendezvousConnectionError("x"), "连不上会合的机器", 69),
        (dist.DistNetworkError("x"), "连不上会合的机器", 69),
        (RendezvousClosedError(), "请换一个 JOB", 69),
        (SignalException("x", signal.SIGTERM), "收到 SIGTERM", 75),
        (ChildFailedError("x", {0: failure(75)}), "", 75),
        (ChildFailedError("x", {0: failure(-9), 1: failure(3)}), "", 3),
        (ChildFailedError("x", {4: failure(-9)}), "rank 4 没有走完（SIGKILL）", 1),
        (ChildFailedError("x", {0: failure(1)}), "rank 0 没有走完（退出码 1）", 1),
    ],
)
def test_every_end_of_torchrun_is_one_sentence_and_a_code(error, said, code):
    """torchrun 的每种结局是一句话和一个退出码；工作进程有意的 2、3、75 原样传出。"""
    sentence, got = agent.explain(error, "2 台，在 10.0.0.1:29500")
    assert got == code and said in sentence, f"{got}：{sentence}"
    assert "\n" not in sentence


def test_an_unknown_error_is_not_swallowed():
    """不认识的异常照样抛出：那是缺陷，要看见 traceback。"""
    with pytest.raises(ZeroDivisionError):
        agent.explain(ZeroDivisionError(), "")


@pytest.mark.parametrize(("shared", "meet"), [("False", True), ("True", False)])
def test_a_node_that_comes_back_meets_the_others(monkeypatch, shared, meet):
    """各开各的 store 时，重启过一次的机器与新开机的（重启 0 次）读得到同样的键。

    torchrun 沿用 store 时前缀按重启次数，两台就各写各的：所以 torchrun.sh 不许沿用。
    """
    port = free_port()
    agent_store = dist.TCPStore("127.0.0.1", port, 1, is_master=True) if not meet else None
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", shared)
    stores = []
    for rank, restarts in ((0, 1), (1, 0)):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        stores.append(attempt_store(1))
    stores[0].set("address", "A")
    assert stores[0].get("address") == b"A"  # set 不等回音：同一条连接上读到了，才算写进去
    assert stores[1].check(["address"]) == meet
    del agent_store


def launch(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess:
    """运行 torchrun.sh，只给这些变量。"""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", str(CLUSTER / "torchrun.sh"), "--steps", "1"], capture_output=True, text=True,
        env={"PATH": path, "PYTHONPATH": str(ROOT), **environment}, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize("missing", ["HOST", "NODES", "JOB", "OUT"])
def test_torchrun_sh_names_what_is_missing(tmp_path, missing):
    """少一个变量：一句话，说出是哪一个，退出码 2，什么都没启动。"""
    given = {"HOST": "127.0.0.1", "NODES": "2", "JOB": "j", "OUT": str(tmp_path)}
    del given[missing]
    done = launch(tmp_path, **given)
    assert done.returncode == 2 and f"没有设 {missing}" in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


def test_torchrun_sh_refuses_a_host_nobody_knows(tmp_path):
    """HOST 解析不了：一句话，退出码 2，不去等十分钟。"""
    done = launch(tmp_path, HOST="no.such.host.invalid", NODES="2", JOB="j", OUT=str(tmp_path))
    assert done.returncode == 2 and "解析不了" in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


@pytest.mark.parametrize("script", sorted(CLUSTER.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_pass_shellcheck(script):
    """两个脚本在 shellcheck 之下没有一句警告。"""
    if not shutil.which("shellcheck"):
        pytest.skip("没有 shellcheck")
    done = subprocess.run(["shellcheck", str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_recovery_counts_from_the_blow_to_new_ground():
    """恢复的秒数数到走过坏之前的最远处，不算动手时正在走完的那一步；退回的步数也从最远处数。"""
    progress = [(1.0, 24), (2.0, 25), (2.1, 26), (9.0, 20), (9.5, 26), (9.6, 27)]
    outcome = mn.Outcome("node", progress=progress, struck=2.05, back=3.0)
    assert outcome.recovery() == pytest.approx(7.55) and outcome.redone() == 6
    calm = mn.Outcome("calm", progress=progress[:3])
    assert calm.recovery() != calm.recovery() and calm.redone() == 0


# ---------------------------------------------------------------- Kubernetes


def documents() -> dict[str, dict]:
    """trainjob.yaml 的两份文档，按 kind。"""
    found = yaml.safe_load_all((CLUSTER / "trainjob.yaml").read_text(encoding="utf-8"))
    return {document["kind"]: document for document in found}


def keys(tree: object, path: str = "") -> set[str]:
    """全部字段的路径，列表的下标写成 []。"""
    if isinstance(tree, dict):
        here = {f"{path}{name}" for name in tree}
        return here.union(*(keys(value, f"{path}{name}.") for name, value in tree.items()))
    if isinstance(tree, list):
        return set().union(*(keys(item, f"{path[:-1]}[].") for item in tree))
    return set()


# 我们用到的字段，对照 Kubeflow Trainer 的 CRD（Apache-2.0，kubeflow/trainer 8c0f505，v2.3）：
# manifests/base/crds/trainer.kubeflow.org_{trainjobs,trainingruntimes}.yaml
JOB_SPEC = "spec.template.spec.replicatedJobs[].template.spec"
FIELDS = {
    "TrainJob": {
        "spec.runtimeRef", "spec.runtimeRef.apiGroup", "spec.runtimeRef.kind",
        "spec.runtimeRef.name", "spec.trainer", "spec.trainer.image", "spec.trainer.numNodes",
        "spec.trainer.numProcPerNode", "spec.trainer.command", "spec.trainer.args",
        "spec.trainer.resourcesPerNode", "spec.trainer.resourcesPerNode.limits",
        "spec.trainer.resourcesPerNode.requests",
    },
    "TrainingRuntime": {
        "spec.mlPolicy", "spec.mlPolicy.numNodes", "spec.mlPolicy.torch", "spec.template",
        "spec.template.spec", "spec.template.spec.failurePolicy",
        "spec.template.spec.failurePolicy.maxRestarts", "spec.template.spec.failurePolicy.rules",
        "spec.template.spec.failurePolicy.rules[].name",
        "spec.template.spec.failurePolicy.rules[].action",
        "spec.template.spec.failurePolicy.rules[].onJobFailureReasons",
        "spec.template.spec.replicatedJobs", "spec.template.spec.replicatedJobs[].name",
        "spec.template.spec.replicatedJobs[].template",
        "spec.template.spec.replicatedJobs[].template.metadata",
        "spec.template.spec.replicatedJobs[].template.metadata.labels", JOB_SPEC,
        *(f"{JOB_SPEC}.{name}" for name in (
            "backoffLimit", "podFailurePolicy", "podFailurePolicy.rules",
            "podFailurePolicy.rules[].action", "podFailurePolicy.rules[].onExitCodes",
            "podFailurePolicy.rules[].onExitCodes.containerName",
            "podFailurePolicy.rules[].onExitCodes.operator",
            "podFailurePolicy.rules[].onExitCodes.values", "template", "template.spec",
            "template.spec.restartPolicy", "template.spec.terminationGracePeriodSeconds",
            "template.spec.containers", "template.spec.containers[].name",
            "template.spec.containers[].image", "template.spec.containers[].workingDir",
            "template.spec.containers[].volumeMounts",
            "template.spec.containers[].volumeMounts[].name",
            "template.spec.containers[].volumeMounts[].mountPath", "template.spec.volumes",
            "template.spec.volumes[].name", "template.spec.volumes[].persistentVolumeClaim",
            "template.spec.volumes[].persistentVolumeClaim.claimName",
            "template.spec.volumes[].emptyDir", "template.spec.volumes[].emptyDir.medium",
        )),
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(FIELDS))
def test_kubernetes_file_uses_only_fields_the_operator_has(kind):
    """两份文档的每个字段都在操作器的 CRD 里：拼错的字段 Kubernetes 只会悄悄丢掉。"""
    document = documents()[kind]
    assert document["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    labels = {f"{JOB_SPEC.removesuffix('.spec')}.metadata.labels."
              "trainer.kubeflow.org/trainjob-ancestor-step",
              "spec.trainer.resourcesPerNode.limits.nvidia.com/gpu",
              "spec.trainer.resourcesPerNode.requests.cpu",
              "spec.trainer.resourcesPerNode.requests.memory"}  # fmt: skip
    used = {key for key in keys(document) if key.startswith("spec.")} - labels
    assert used == FIELDS[kind], f"多出 {used - FIELDS[kind]}，没用 {FIELDS[kind] - used}"


def test_kubernetes_file_fits_together():
    """TrainJob 指的运行时就是这一份；容器叫 node；重来也一样的退出码立即失败。"""
    job, runtime = documents()["TrainJob"]["spec"], documents()["TrainingRuntime"]
    assert job["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert job["runtimeRef"]["kind"] == "TrainingRuntime"
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    step = replicated["template"]["metadata"]["labels"]
    assert step == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    spec = replicated["template"]["spec"]
    pod = spec["template"]["spec"]
    names = {replicated["name"], *(container["name"] for container in pod["containers"])}
    assert names == {"node"}, f"操作器按 node 这个名字找容器：{names}"
    assert pod["restartPolicy"] == "Never", "podFailurePolicy 只许 Never"
    codes = spec["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"]
    assert codes == [code for code in agent.MEANT if code != agent.EXIT_INTERRUPTED]
    mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    trainer = job["trainer"]
    assert trainer["command"][:3] == ["python", "-m", "experiments.ranks.agent"]
    assert (ROOT / trainer["command"][3]).is_file()
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == trainer["numProcPerNode"]
    assert "env" not in trainer, "PET_ 开头的变量由操作器给，自己设会被拒绝"


def test_kubernetes_arguments_are_ones_train_gpu_takes():
    """TrainJob 里 train_gpu 的参数解析得了。"""
    from experiments.loop.command_line import parse
    from experiments.loop.options import Options

    options, _ = parse(Options, documents()["TrainJob"]["spec"]["trainer"]["args"],
                       presets=ROOT / "experiments" / "presets", description="")  # fmt: skip
    assert options.preset == "gpt_1b" and options.init_from == "resume"


@pytest.mark.parametrize("kind", sorted(FIELDS))
def test_kubernetes_file_is_valid_under_the_published_schema(kind):
    """给出操作器 CRD 的文件夹（TRAINER_CRDS）时，用它发布的模式校验，不认识的字段也算错。"""
    folder = os.environ.get("TRAINER_CRDS")
    if not folder:
        pytest.skip("没有设 TRAINER_CRDS（Kubeflow Trainer 的 manifests/base/crds）")
    import jsonschema

    crd = Path(folder) / f"trainer.kubeflow.org_{kind.lower()}s.yaml"
    version = yaml.safe_load(crd.read_text(encoding="utf-8"))["spec"]["versions"][0]
    schema = strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    problems = [f"{error.json_path}：{error.message}" for error in
                jsonschema.Draft7Validator(schema).iter_errors(documents()[kind])]  # fmt: skip
    assert not problems, "\n".join(problems)


def strict(schema: dict) -> dict:
    """Kubernetes 悄悄丢掉不认识的字段；这里算错。"""
    if schema.get("x-kubernetes-int-or-string"):
        schema.pop("type", None)
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        schema.setdefault("additionalProperties", False)
    for child in (*schema.get("properties", {}).values(), schema.get("items"),
                  schema.get("additionalProperties")):  # fmt: skip
        if isinstance(child, dict):
            strict(child)
    return schema


# ---------------------------------------------------------------- 两台机器


@pytest.fixture(scope="module")
def namespaces():
    """能建网络命名空间；不能就跳过，说明原因。"""
    if reason := nodes.why_not():
        pytest.skip(reason)


def spaces() -> set[str]:
    """此刻有哪些我们的命名空间。"""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    return {line.split()[0] for line in listed.splitlines() if line.startswith("bk")}


def test_machines_are_taken_down_even_after_an_error(namespaces, tmp_path):
    """with 里出了错：进程一个不留，命名空间和网卡都删掉了。"""
    before = spaces()
    with pytest.raises(ZeroDivisionError), nodes.two_nodes() as (a, _):
        started = a.start(["bash", "-c", "sleep 300 & sleep 300"], os.environ, tmp_path / "log")
        deadline = time.monotonic() + 10
        while len(a.processes()) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(a.processes()) == 3 and spaces() - before
        family = a.processes()
        raise ZeroDivisionError
    assert started.poll() is not None and not any(member.is_running() for member in family)
    assert spaces() == before


def test_machines_are_taken_down_when_the_script_is_terminated(namespaces, tmp_path):
    """脚本被 SIGTERM：机器照样拆掉，进程和命名空间一个不留。"""
    code = ("import sys, os, time\nfrom pathlib import Path\nfrom experiments.ranks import nodes\n"
            "with nodes.two_nodes() as (a, _):\n"
            "    a.start(['sleep', '300'], os.environ, Path(sys.argv[1]))\n"
            "    print(a.space, a.processes()[0].pid, flush=True)\n    time.sleep(300)")
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "log")], text=True,
                          stdout=subprocess.PIPE, cwd=ROOT) as script:  # fmt: skip
        space, pid = script.stdout.readline().split()
        assert space in spaces() and psutil.pid_exists(int(pid))
        script.terminate()
        assert script.wait(timeout=60) == 128 + signal.SIGTERM
    assert space not in spaces() and not psutil.pid_exists(int(pid))


def test_two_machines_see_each_other_only_through_the_wire(namespaces, tmp_path):
    """B 认得 A 的地址和自己的网卡，HOST 不是它；A 认得自己就是 HOST。"""
    with nodes.two_nodes() as (a, b):
        for node, host in ((a, 1), (b, 0)):
            log = tmp_path / node.name
            command = [sys.executable, "-m", "experiments.ranks.address", a.address]
            node.start(command, {**os.environ, "PYTHONPATH": str(ROOT)}, log).wait()
            expected = [node.address, node.interface, str(host)]
            assert log.read_text().split() == expected, log.read_text()


@pytest.fixture(scope="module")
def calm(namespaces, tokens, tmp_path_factory) -> Path:
    """没有被打扰的一次：两台都以 0 退出。"""
    folder = tmp_path_factory.mktemp("nodes") / "calm"
    with nodes.two_nodes() as both:
        outcome = mn.happen("calm", OPTIONS, both, folder)
    assert outcome.codes == (0, 0), outcome.said
    assert "2 个进程" in outcome.said, outcome.said
    return folder


def survives(event: str, calm: Path) -> mn.Outcome:
    """途中发生 `event`，仍然两台都走完，与没发生过逐位相等。"""
    folder = calm.parent / event
    with nodes.two_nodes() as both:
        outcome = mn.happen(event, OPTIONS, both, folder)
    assert outcome.codes == (0, 0), outcome.said
    assert mn.same_as(calm, folder), outcome.said
    return outcome


@pytest.mark.slow
def test_a_killed_node_that_comes_back_changes_nothing(calm):
    """杀掉 B（整台）再开机：A 等它，从检查点接着走，最后的权重、优化器、每步 loss 逐位相等。"""
    outcome = survives("node", calm)
    assert outcome.redone() <= OPTIONS.save_every + 1, f"退回了 {outcome.redone()} 步"
    assert "从 " in outcome.said and "继续" in outcome.said, outcome.said


@pytest.mark.fault
@pytest.mark.timeout(300)
def test_a_killed_master_that_comes_back_changes_nothing(calm):
    """杀掉 A（会合处，也是 rank 0）再开机：B 的 torchrun 重试，结果逐位相等。"""
    outcome = survives("master", calm)
    assert "5 秒之后再试" in outcome.said, outcome.said


@pytest.mark.fault
@pytest.mark.timeout(300)
def test_a_slow_node_changes_nothing(calm):
    """B 冻住两秒：A 等着，没有一次重启，结果逐位相等。"""
    outcome = survives("slow", calm)
    assert outcome.redone() == 0, f"退回了 {outcome.redone()} 步"
    stood = [at for at, _ in outcome.progress if
             outcome.struck + 0.2 < at < outcome.struck + OPTIONS.frozen]  # fmt: skip
    assert len(stood) <= 1, f"冻住时日志还在走：{stood}"


@pytest.mark.fault
@pytest.mark.timeout(300)
def test_a_rendezvous_that_nobody_joins_ends_in_one_sentence(namespaces, tokens, tmp_path):
    """只来了 A：到了时限说一句，退出码 69，没有 traceback，不会永远等下去。"""
    with nodes.two_nodes() as both:
        outcome = mn.happen("nobody", OPTIONS, both, tmp_path / "nobody")
    assert outcome.codes == (69, None), outcome.said
    (line,) = [line for line in outcome.said.splitlines() if not line.startswith("──")]
    assert line == mn.last_sentence(outcome.said) and "还没有来齐（要 2 台" in line, outcome.said


@pytest.mark.fault
@pytest.mark.timeout(300)
def test_two_addresses_on_loopback_do_as_well(tokens, tmp_path):
    """没有 root 的机器上，两台都在回环网卡上：照样训练得完。"""
    if not sys.platform.startswith("linux"):
        pytest.skip("127.0.0.2 只有 Linux 默认就有")
    with nodes.two_nodes(loopback=True) as both:
        outcome = mn.happen("calm", OPTIONS, both, tmp_path / "calm")
    assert outcome.codes == (0, 0), outcome.said


@pytest.mark.fault
@pytest.mark.timeout(300)
def test_the_script_prints_and_saves_every_event(run_script, tokens):
    """脚本：表里每件事一行，两份 CSV 写下；表里没有「不同」。"""
    done = run_script("experiments/multi_node.py", "--events", "calm", "nobody", "--steps", "40",
                      "--strike", "20", "--loopback")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "还没有来齐" in done.stdout and "不同" not in done.stdout, done.stdout
    assert {path.name for path in results_folder().glob("multi_node*.csv")} == {
        "multi_node.csv", "multi_node_progress.csv"
    }


def test_an_impossible_strike_is_refused():
    """动手的那一步走不到：一句话。"""
    with pytest.raises(UserError, match="--strike 90"):
        mn.Options(steps=50, strike=90)
