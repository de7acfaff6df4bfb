"""从 HF 格式的 Llama 文件夹（config.json 加 safetensors）取权重，换成 `model.GPT` 的名字。

只接受结构相同的模型：RoPE 不缩放、RMSNorm、SwiGLU、无偏置、K/V 与 Q 的头数相等、输出头共享词嵌入。
两边的 RoPE 都是半分布局，所以 q、k、v 直接接成 qkv，不必重排。
"""

import json
from pathlib import Path

import torch
from torch import Tensor

from model import GPTConfig
from tokens.errors import UserError

# 一层里，HF 的名字 → 我们的名字（qkv 另外处理）。
LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.o_proj.weight": "attn.out.weight",
    "post_attention_layernorm.weight": "mlp_norm.weight",
    "mlp.gate_proj.weight": "mlp.gate.weight",
    "mlp.up_proj.weight": "mlp.up.weight",
    "mlp.down_proj.weight": "mlp.down.weight",
}


def read_config(folder: Path) -> dict:
    """读 config.json；不是 Llama 就说明为什么放不进来。"""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"读不了 {path}（{error}）；--init-from 要一个 Llama 文件夹"
            "（config.json 与 *.safetensors）、一个 .pt 检查点、scratch 或 resume。"
        ) from error
    kind = config.get("model_type")
    if kind == "gpt2":
        raise UserError(
            f"{folder} 是 GPT-2：它用可学习的位置向量、LayerNorm、GELU 和偏置，"
            "这里的模型用 RoPE、RMSNorm、SwiGLU、没有偏置，权重无处可放；请换一个 Llama 文件夹。"
        )
    if kind != "llama":
        raise UserError(f"{folder} 的 model_type 是 {kind}；只能从 llama 开始。")
    return config


def rope_of(config: dict) -> tuple[float, str]:
    """(θ, 种类)；新旧两种写法：`rope_parameters`，或 `rope_theta` 加 `rope_scaling`。"""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    return float(theta), rope.get("rope_type", rope.get("type", "default"))


def gpt_config(config: dict, seq_len: int, folder: Path) -> GPTConfig:
    """HF 的 config.json → GPTConfig；结构不同的地方逐条说出来。"""
    heads, width = config["num_attention_heads"], config["hidden_size"]
    theta, rope_kind = rope_of(config)
    structure = {"vocab_size": config["vocab_size"], "d_model": width, "n_head": heads}
    ours = GPTConfig(
        **structure, n_layer=config["num_hidden_layers"], rope_theta=theta,
        seq_len=min(seq_len, config["max_position_embeddings"]), norm_eps=config["rms_norm_eps"],
    )  # fmt: skip
    wanted = {
        "num_key_value_heads": (config.get("num_key_value_heads", heads), heads),
        "head_dim": (config.get("head_dim") or width // heads, width // heads),
        "intermediate_size": (config["intermediate_size"], ours.ffn_dim),
        "tie_word_embeddings": (config.get("tie_word_embeddings", False), True),
        "attention_bias": (config.get("attention_bias", False), False),
        "mlp_bias": (config.get("mlp_bias", False), False),
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "rope_type": (rope_kind, "default"),
    }
    different = [f"{k} 是 {got}、要 {want}" for k, (got, want) in wanted.items() if got != want]
    if different:
        raise UserError(f"{folder} 的结构与这里的模型不同：{'；'.join(different)}。")
    return ours


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """文件夹里全部 safetensors 的张量，换成 fp32（主权重）。"""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            tensors |= load_file(path)
        except (OSError, SafetensorError) as error:
            raise UserError(f"读不了 {path}（{error}）；请重新下载这个文件。") from error
    if not tensors:
        raise UserError(f"{folder} 里没有 *.safetensors；旧的 .bin 文件请先转换成 safetensors。")
    return {name.removeprefix("model."): t.float() for name, t in tensors.items()}


def load_llama(folder: Path, seq_len: int) -> tuple[GPTConfig, dict[str, Tensor]]:
    """返回 (GPTConfig, 权重字典)，字典可以直接交给 `GPT.load_state_dict`。

    `seq_len` 是训练用的长度（token），不超过原模型的 max_position_embeddings。
    结构不同、文件缺失或损坏时抛 `UserError`。
    """
    config = read_config(folder)
    try:
        ours = gpt_config(config, seq_len, folder)
    except KeyError as error:
        raise UserError(f"{folder}/config.json 缺少 {error}；请用完整的 Llama 文件夹。") from error
    except ValueError as error:
        raise UserError(f"{folder}/config.json 的结构不能用（{error}）。") from error
    theirs = read_tensors(folder)
    try:
        embed = theirs["embed_tokens.weight"]
        weights = {"embed.weight": embed, "head.weight": embed}
        weights["norm.weight"] = theirs["norm.weight"]
        for i in range(ours.n_layer):
            qkv = [theirs[f"layers.{i}.self_attn.{x}_proj.weight"] for x in "qkv"]
            weights[f"blocks.{i}.attn.qkv.weight"] = torch.cat(qkv)
            for name, our_name in LAYER_NAMES.items():
                weights[f"blocks.{i}.{our_name}"] = theirs[f"layers.{i}.{name}"]
    except KeyError as error:
        raise UserError(f"{folder} 缺少权重 {error}；请检查是否少了一个分片。") from error
    return ours, weights
