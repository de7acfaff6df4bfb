"""各测试模块共用的 fixture：真实数据、一份随机小数据、以及像读者那样启动一个脚本。"""

import atexit
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from experiments.ranks.launch import child_environment, kill_tree, torchrun_command
from tokens import load_tokens
from tokens.data import id_dtype
from tokens.files import atomic_write

ROOT = Path(__file__).resolve().parent.parent
# 测试不碰读者的 results/；子进程继承它
os.environ["BOOK_RESULTS"] = _results = tempfile.mkdtemp(prefix="book-results-")
atexit.register(shutil.rmtree, _results, ignore_errors=True)

if "PYTEST_XDIST_WORKER" in os.environ:  # 几个测试进程同时跑：各用一个线程，否则 OpenMP 互相空等
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)

# 子进程在公共的环境之外：输出不缓冲，transformers 不联网
CHILD_ENV = {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """fault 一律也是 slow：命令行的 -m "not slow" 会顶掉 pyproject.toml 里的 -m "not fault"。"""
    for item in items:
        if item.get_closest_marker("fault"):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def tokens() -> dict:
    """真实数据 {train, val, meta}；这台机器上还没有时先准备（第一次要下载语料）。"""
    return load_tokens(vocab_size=8192)


@pytest.fixture(scope="session")
def tiny_tokens(tmp_path_factory) -> Path:
    """一份随机小数据的 `tokens.pt` 路径：词表 256，训练 4096、验证 1024 个 id，没有分词器。"""
    path = tmp_path_factory.mktemp("tiny") / "tokens.pt"
    generator = torch.Generator().manual_seed(0)
    sizes = {"train": 4096, "val": 1024}
    data = {
        name: torch.randint(256, (size,), generator=generator).to(id_dtype(256))
        for name, size in sizes.items()
    }
    with atomic_write(path) as temporary:
        torch.save({**data, "meta": {"corpus": "随机", "vocab_size": 256}}, temporary)
    return path


@pytest.fixture(autouse=True)
def clean_process():
    """训练会改全局的开关与随机数；每个测试之后恢复。"""
    kept = torch.get_rng_state(), random.getstate()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_rng_state(kept[0])
    random.setstate(kept[1])


@pytest.fixture(scope="session")
def straight(tmp_path_factory) -> Path:
    """不间断的 40 步，别的运行都与它比较。"""
    folder = tmp_path_factory.mktemp("straight")
    from tiny_training import train

    assert train(folder) == 0
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator:
    """无界面的 Chromium（selenium），断了外网：除本机之外的任何主机名都解析不了。"""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("没有 chromium 或 chromedriver")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (
        "--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1200,1000",
        "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
    ):  # fmt: skip
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield started
    started.quit()


@pytest.fixture(scope="session")
def run_script() -> Callable[..., subprocess.CompletedProcess]:
    """像读者那样从仓库根启动脚本：`run_script(path, *args, nproc=None, env=None, timeout=120)`。

    `nproc` 给出时用 torchrun 启动这么多个进程。返回 CompletedProcess（stdout、stderr 是文本），
    退出码由测试自己检查；超时则杀掉它和它的全部后代，并以已有的输出报告失败。
    """
    return _run_script


def _run_script(
    path: str | Path,
    *args: object,
    nproc: int | None = None,
    env: dict[str, str] | None = None,
    timeout: float = 120,
) -> subprocess.CompletedProcess:
    command = [sys.executable, str(path), *map(str, args)]
    if nproc:
        command = torchrun_command(str(path), *args, nproc=nproc)
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=child_environment(threads=1) | CHILD_ENV | (env or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException as error:
            kill_tree(process.pid)
            stdout, stderr = process.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                shown = f"stdout：\n{stdout[-3000:]}\nstderr：\n{stderr[-3000:]}"
                pytest.fail(f"{timeout} s 内没有结束：{' '.join(command)}\n{shown}")
            raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)
