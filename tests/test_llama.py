"""`experiments/loop/llama.py` 的断言：从别人的 Llama 文件夹起步，不合适的说清楚为什么。"""

import pytest
import torch
from tiny_training import state, train

from model import GPT
from tokens.errors import UserError


@pytest.mark.slow
def test_starts_from_a_llama_folder(tmp_path, capsys):
    """transformers 存下的 Llama 文件夹：装进来的模型 logits 相等（1e-5），训练从那里开始。"""
    transformers = pytest.importorskip("transformers")
    from experiments.loop.llama import load_llama

    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=160, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=64, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(config)
    theirs.save_pretrained(tmp_path / "llama")
    ours_config, weights = load_llama(tmp_path / "llama", 32)
    ours = GPT(ours_config)
    ours.load_state_dict(weights)
    x = torch.randint(256, (2, 32))
    with torch.no_grad():
        gap = (ours(x)[0] - theirs(x).logits).abs().max().item()
    assert gap < 1e-5 and ours_config.rope_theta == 5000.0, gap
    assert train(tmp_path / "run", steps=2, init_from=str(tmp_path / "llama")) == 0
    assert "分词器" not in capsys.readouterr().err  # synthetic 没有词表，无从比较
    tokens, other = torch.randint(200, (3000,), dtype=torch.int32), tmp_path / "tokens.pt"
    torch.save({"train": tokens, "val": tokens[:500], "meta": {"vocab_size": 200}}, other)
    changes = {"init_from": str(tmp_path / "llama"), "data": str(other)}
    assert train(tmp_path / "other", steps=1, **changes) == 0
    assert "256 个词条，数据的分词器只有 200 个" in capsys.readouterr().err
    saved = state(tmp_path / "run")
    assert saved["config"]["d_model"] == 64 and saved["model_config"]["norm_eps"] == 1e-6
    assert train(tmp_path / "run", steps=3, init_from="resume") == 0


@pytest.mark.slow
def test_folders_that_do_not_fit_say_why(tmp_path):
    """GPT-2、分组注意力、宽度不同、没有权重、坏的 config.json：各说出原因。"""
    import json

    from experiments.loop.llama import load_llama

    llama = {
        "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 160,
        "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    }  # fmt: skip
    cases = [
        ({"model_type": "gpt2"}, "LayerNorm"), ({"model_type": "qwen2"}, "qwen2"),
        (llama | {"num_key_value_heads": 1}, "num_key_value_heads"),
        (llama | {"intermediate_size": 200}, "intermediate_size 是 200、要 160"),
        (llama | {"tie_word_embeddings": False}, "tie_word_embeddings"),
        (llama | {"rope_scaling": {"rope_type": "llama3"}}, "llama3"),
        ({"model_type": "llama"}, "缺少"), (llama, "没有.*safetensors"),
    ]  # fmt: skip
    for number, (config, needed) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match=needed):
            load_llama(folder, 32)
    with pytest.raises(UserError, match="config.json"):
        load_llama(tmp_path / "nowhere", 32)
