"""`model.py` 的断言：参数量、与 Hugging Face Llama 的相等、FLOPs、RoPE、因果性、初始化与报错。"""

import copy
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import model
from model import GPT, IGNORE_INDEX, GPTConfig, explicit_attention, rope_table, rotate

TINY = GPTConfig(vocab_size=160, d_model=64, n_head=4, n_layer=3, seq_len=32)


def tiny_model(seed: int = 0, **changes) -> GPT:
    """同一个种子的小模型；`changes` 改动 TINY 的字段。"""
    torch.manual_seed(seed)
    return GPT(GPTConfig(**{**TINY.__dict__, **changes}))


def tiny_batch(batch: int = 3, length: int = 32, masked: bool = False, seed: int = 1):
    """随机的 (x, y)，形状 (batch, length)；`masked` 时约三分之一的目标是 −100。"""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randint(TINY.vocab_size, (2, batch, length), generator=generator)
    if masked:
        y[torch.rand(y.shape, generator=generator) < 1 / 3] = IGNORE_INDEX
    return x, y


def relative(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """最大的差除以参照值里最大的绝对值。"""
    return ((ours - reference).abs().max() / reference.abs().max()).item()


# ---- 参数量与 FLOPs ----


@pytest.mark.parametrize(
    ("d_model", "n_layer", "expected"),
    [
        (64, 2, 618_816),
        (96, 3, 1_118_880),
        (128, 4, 1_803_392),
        (192, 4, 3_344_064),
        (512, 8, 29_106_688),
    ],
)
def test_parameter_count(d_model, n_layer, expected):
    """五种大小的参数量与手算的 V·d + L·(4d² + 3·d·f + 2d) + d 一个不差，共享的权重只数一次。"""
    config = GPTConfig(d_model=d_model, n_head=d_model // 32, n_layer=n_layer)
    f = int(8 * d_model / 3) // 32 * 32
    by_hand = 8192 * d_model + n_layer * (4 * d_model**2 + 3 * d_model * f + 2 * d_model) + d_model
    with torch.device("meta"):  # 只要形状，不占内存
        counted = GPT(config).num_params()
    assert counted == by_hand == expected, f"数出 {counted:,}，手算 {by_hand:,}，应为 {expected:,}"


@pytest.mark.parametrize(("d_model", "n_layer"), [(64, 2), (128, 4), (192, 4)])
@pytest.mark.parametrize("length", [64, 128])
@pytest.mark.parametrize("attention", ["sdpa", "explicit"])
def test_flops_equal_torch_counter(d_model, n_layer, length, attention):
    """6N + 12LTd 与 PyTorch 逐个算子数出的训练 FLOPs（含注意力）相差不到 0.1 %。"""
    config = GPTConfig(
        d_model=d_model, n_head=d_model // 32, n_layer=n_layer, attention=attention
    )
    x = torch.zeros(2, length, dtype=torch.long)
    # MATH 后端把注意力拆成普通矩阵乘法，计数器才看得见它
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model = GPT(config)
        model(x, x)[1].backward()
    counted, formula = counter.get_total_flops() / x.numel(), model.flops_per_token(length)
    error = formula / counted - 1
    assert abs(error) < 1e-3, f"公式 {formula:,}，数出 {counted:,.0f}，相差 {error:.4%}"


def test_attention_is_in_the_flops():
    """注意力那一项是 12·L·T·d：T 从 64 变成 128，每 token 的 FLOPs 恰好多 12·L·64·d。"""
    model = tiny_model(seq_len=128)
    extra = model.flops_per_token(128) - model.flops_per_token(64)
    assert extra == 12 * TINY.n_layer * 64 * TINY.d_model, f"多出 {extra:,}"
    assert model.flops_per_token() == model.flops_per_token(128), "缺省的长度应是 seq_len"


# ---- 与独立实现相等 ----


def hugging_face_twin(model: GPT):
    """随机初始化的 transformers Llama，装进 `model` 的权重；不下载任何东西。"""
    transformers = pytest.importorskip("transformers")
    c = model.config
    twin = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=c.vocab_size, hidden_size=c.d_model, intermediate_size=c.ffn_dim,
            num_hidden_layers=c.n_layer, num_attention_heads=c.n_head,
            max_position_embeddings=c.seq_len, rms_norm_eps=c.norm_eps, tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
            bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip
    with torch.no_grad():
        for name, tensor in hugging_face_names(dict(model.named_parameters())).items():
            twin.get_parameter(name).copy_(tensor)
    return twin


def hugging_face_names(ours: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """我们的参数（或梯度）换成 Hugging Face 的名字；qkv 按行切成三份，行的次序不变。"""
    renamed = {
        "model.embed_tokens.weight": ours["embed.weight"], "model.norm.weight": ours["norm.weight"]
    }
    parts = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
             "attn.out": "self_attn.o_proj", "mlp.gate": "mlp.gate_proj",
             "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj"}  # fmt: skip
    for layer in range(sum(name.endswith("attn.qkv.weight") for name in ours)):
        old, new = f"blocks.{layer}.", f"model.layers.{layer}."
        for one, part in zip("qkv", ours[f"{old}attn.qkv.weight"].chunk(3), strict=True):
            renamed[f"{new}self_attn.{one}_proj.weight"] = part
        for theirs, name in ((p, ours[f"{old}{o}.weight"]) for o, p in parts.items()):
            renamed[f"{new}{theirs}.weight"] = name
    return renamed


@pytest.mark.parametrize("attention", ["sdpa", "explicit"])
@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
def test_equals_hugging_face_llama(attention, masked):
    """同样的权重放进 Hugging Face 的 Llama：logits、loss 与每个参数的梯度，相对差都小于 1e-4。"""
    model = tiny_model(attention=attention)
    with torch.no_grad():  # 增益不再全是 1，否则漏乘一个归一化的增益也看不出来
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.1 + 1 if p.dim() == 1 else p * 4)
    twin = hugging_face_twin(model)
    x, y = tiny_batch(masked=masked)

    logits, loss = model(x, y)
    loss.backward()
    their_logits = twin(x).logits
    their_loss = F.cross_entropy(their_logits.flatten(0, 1), y.flatten())
    their_loss.backward()

    worst = {"logits": relative(logits, their_logits), "loss": relative(loss, their_loss)}
    ours = hugging_face_names({name: p.grad for name, p in model.named_parameters()})
    theirs = {name: p.grad for name, p in twin.named_parameters() if name != "lm_head.weight"}
    assert ours.keys() == theirs.keys(), f"参数对不上：{ours.keys() ^ theirs.keys()}"
    worst |= {name: relative(ours[name], theirs[name]) for name in theirs}
    name = max(worst, key=worst.get)
    assert worst[name] < 1e-4, f"相差最大的是 {name}：{worst[name]:.2e}"


# ---- 同一件事的几种算法 ----


@pytest.mark.parametrize("length", [1, 7, 32])
def test_attention_variants_agree(length):
    """注意力写开来算、用 SDPA 算、由长度自动选：loss 与每个梯度的相对差都小于 1e-5。"""
    x, y = tiny_batch(length=length)
    results = {}
    for attention in ("explicit", "sdpa", "auto"):
        model = tiny_model(attention=attention)
        loss = model(x, y)[1]
        loss.backward()
        results[attention] = [loss.detach(), *(p.grad for p in model.parameters())]
    for name in ("sdpa", "auto"):
        pairs = zip(results[name], results["explicit"], strict=True)
        # length 为 1 时 Q、K 的梯度恒为 0，比较绝对差
        worst = max((a - b).abs().max().item() / max(b.abs().max().item(), 1e-3) for a, b in pairs)
        assert worst < 1e-5, f"{name} 与 explicit 相差 {worst:.2e}"


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
def test_fused_loss_equals_plain(reduction, masked):
    """输出头与交叉熵合成一步，loss 与每个梯度不变（相对差小于 1e-5），也不留下 logits。"""
    x, y = tiny_batch(masked=masked)
    plain, fused = tiny_model(), tiny_model()
    loss = plain(x, y, reduction=reduction)[1]
    no_logits, fused_loss = fused(x, y, reduction=reduction, fused_loss=True)
    loss.backward()
    fused_loss.backward()
    assert no_logits is None
    pairs = zip(fused.parameters(), plain.parameters(), strict=True)
    worst = max([relative(fused_loss, loss), *(relative(a.grad, b.grad) for a, b in pairs)])
    assert worst < 1e-5, f"最大相对差 {worst:.2e}"


def test_masked_targets_do_not_count():
    """目标为 −100 的位置不计入：mean 是对有效 token 的平均，sum ÷ 有效 token 数与它相等。"""
    model, (x, y) = tiny_model(), tiny_batch(masked=True)
    logits, mean = model(x, y)
    total = model(x, y, reduction="sum")[1]
    keep = y != IGNORE_INDEX
    expected = -logits.log_softmax(-1)[keep].gather(1, y[keep][:, None]).mean()
    assert 0 < keep.sum() < y.numel()
    assert relative(mean, expected) < 1e-6, f"{mean.item()} 与 {expected.item()}"
    assert relative(total / keep.sum(), mean) < 1e-6, f"{total.item()} / {keep.sum().item()}"


# ---- RoPE 与因果性 ----


def test_rope_scores_depend_on_distance_only():
    """同一对 q、k 旋转后的内积只由两者的距离决定：整体平移 5 个位置，分数不变；距离变了就变。"""
    rope = rope_table(TINY)
    q, k = torch.randn(2, 1, 1, 1, 16, generator=torch.Generator().manual_seed(0))
    length = TINY.seq_len
    q, k = rotate(q.expand(1, 1, length, 16), rope), rotate(k.expand(1, 1, length, 16), rope)
    scores = (q @ k.transpose(-2, -1))[0, 0]  # (位置 m, 位置 n)
    moved = (scores[5:, 5:] - scores[:-5, :-5]).abs().max().item()
    assert moved < 1e-5, f"平移后分数变了 {moved:.2e}"
    spread = scores[0].std().item()
    assert spread > 0.1, f"分数几乎不随距离变化（标准差 {spread:.2e}），旋转没有起作用"


def test_rope_keeps_length_and_position_zero():
    """旋转不改变向量的长度，位置 0 的向量不动。"""
    x = torch.randn(2, 4, TINY.seq_len, 16, generator=torch.Generator().manual_seed(0))
    turned = rotate(x, rope_table(TINY))
    drift = (turned.norm(dim=-1) - x.norm(dim=-1)).abs().max().item()
    assert drift < 1e-5, f"长度变了 {drift:.2e}"
    assert torch.equal(turned[:, :, 0], x[:, :, 0])


@pytest.mark.parametrize("attention", ["sdpa", "explicit"])
def test_future_cannot_reach_the_past(attention):
    """改动第 t 个及以后的 token，t 以前的 logits 一个比特都不变；t 以后的确实变了。"""
    model = tiny_model(attention=attention).eval()
    x, _ = tiny_batch()
    changed, t = x.clone(), 20
    changed[:, t:] = (changed[:, t:] + 1) % TINY.vocab_size
    before, after = model(x)[0], model(changed)[0]
    assert torch.equal(before[:, :t], after[:, :t]), "未来的 token 影响了过去的预测"
    # 只改第 t 个：后面每个位置都看得见它
    changed = x.clone()
    changed[:, t] = (changed[:, t] + 1) % TINY.vocab_size
    later = (model(changed)[0][:, t + 1 :] - before[:, t + 1 :]).abs().amax(dim=(0, 2))
    assert later.min() > 0, f"有的位置看不见过去：{later.tolist()}"


def test_short_input_equals_prefix():
    """短输入的 logits 等于长输入的前缀：位置从 0 数起，训练与推理用同一张 RoPE 表。"""
    model = tiny_model()
    x, _ = tiny_batch()
    difference = relative(model(x[:, :9])[0], model(x)[0][:, :9])
    assert difference < 1e-5, f"相差 {difference:.2e}"


def test_explicit_attention_averages_the_past():
    """Q、K 全为 0 时，每个位置得到的是它与它之前的 V 的平均（手算）。"""
    v = torch.tensor([[1.0], [3.0], [8.0]]).view(1, 1, 3, 1)
    zero = torch.zeros_like(v)
    y = explicit_attention(zero, zero, v).flatten().tolist()
    assert y == pytest.approx([1.0, 2.0, 4.0]), f"得到 {y}"


# ---- 权重共享与初始化 ----


def test_head_shares_the_embedding():
    """输出头就是词嵌入：复制模型、读入权重之后仍是同一个张量，它的梯度是两处用途之和。"""
    model, (x, y) = tiny_model(), tiny_batch()
    twin = copy.deepcopy(model)
    twin.load_state_dict(model.state_dict())
    assert twin.head.weight is twin.embed.weight
    model(x, y)[1].backward()

    untied = tiny_model()
    untied.head.weight = torch.nn.Parameter(untied.embed.weight.detach().clone())
    untied(x, y)[1].backward()
    both = untied.embed.weight.grad + untied.head.weight.grad
    assert relative(model.embed.weight.grad, both) < 1e-5
    assert untied.num_params() - model.num_params() == TINY.vocab_size * TINY.d_model


def test_initial_statistics():
    """矩阵的标准差是 0.02，写回残差流的是 0.02/√(2L)，RMSNorm 的增益是 1，没有偏置。"""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=1024, n_layer=8))
    for name, p in model.named_parameters():
        if p.dim() == 1:
            assert name.endswith("norm.weight") and torch.all(p == 1), name
            continue
        residual = name.endswith(("attn.out.weight", "mlp.down.weight"))
        expected = 0.02 / math.sqrt(2 * 8) if residual else 0.02
        ratio = p.std().item() / expected
        assert ratio == pytest.approx(1, abs=0.03), f"{name}：标准差是应有的 {ratio:.3f} 倍"
        assert abs(p.mean().item()) < expected / 20, f"{name}：平均值 {p.mean().item():.2e}"


def test_residual_stream_does_not_grow_with_depth():
    """除以 √(2L) 之后，16 层模型末端的残差流不到 2 层的 1.4 倍；不除则在 3 倍以上。"""
    x, _ = tiny_batch()

    def stream_std(n_layer: int, scaled: bool) -> float:
        model, seen = tiny_model(n_layer=n_layer, d_model=128), {}
        if not scaled:
            for block in model.blocks:
                for matrix in (block.attn.out, block.mlp.down):
                    matrix.weight.data *= math.sqrt(2 * n_layer)
        model.norm.register_forward_pre_hook(lambda _, args: seen.update(x=args[0]))
        model(x)
        return seen["x"].std().item()

    scaled = stream_std(16, True) / stream_std(2, True)
    plain = stream_std(16, False) / stream_std(2, False)
    assert 0.8 < scaled < 1.4, f"除以 √(2L) 后 16 层是 2 层的 {scaled:.2f} 倍"
    assert plain > 3, f"不除时 16 层只是 2 层的 {plain:.2f} 倍"


def test_initial_loss_is_ln_vocab():
    """没有训练过的模型近乎均匀地猜：loss 与 ln V 相差不到 0.1 nat。"""
    torch.manual_seed(0)
    model = GPT(GPTConfig())
    x = torch.randint(8192, (4, 128), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        loss = model(x, x.roll(-1, dims=1))[1].item()
    assert loss == pytest.approx(math.log(8192), abs=0.1), f"loss {loss:.3f}，ln V {math.log(8192)}"


@pytest.mark.parametrize(("d_model", "n_layer"), [(64, 2), (128, 4), (192, 4)])
def test_the_first_loss_tells_an_unshifted_target(monkeypatch, d_model, n_layer):
    """没训练过的模型：目标没有错开一位，loss 就比 ln V 低 1 到 2.5；掩码漏一位，与正确的分不出。"""
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(d_model=d_model, n_head=d_model // 32, n_layer=n_layer))
    x = torch.randint(8192, (4, 128), generator=torch.Generator().manual_seed(1))

    def leaky(q, k, v):
        mask = q.new_full((q.size(-2), q.size(-2)), -math.inf).triu(2)
        return (q @ k.transpose(-2, -1) * q.size(-1) ** -0.5 + mask).softmax(-1) @ v

    with torch.no_grad():
        shifted, same = gpt(x, x.roll(-1, dims=1))[1].item(), gpt(x, x)[1].item()
        monkeypatch.setattr(model, "explicit_attention", leaky)
        leaking = gpt(x, x.roll(-1, dims=1))[1].item()
    shown = f"错开 {shifted:.2f}，没有错开 {same:.2f}，漏掩码 {leaking:.2f}"
    assert abs(shifted - math.log(8192)) < 0.1, shown
    assert 1 < math.log(8192) - same < 2.5, shown
    assert leaking != shifted and abs(leaking - shifted) < 0.05, shown


def test_same_seed_same_model():
    """同一个种子得到逐比特相同的权重，换一个种子就不同。"""
    first, second, other = tiny_model(3), tiny_model(3), tiny_model(4)
    assert all(map(torch.equal, first.state_dict().values(), second.state_dict().values()))
    assert not torch.equal(first.embed.weight, other.embed.weight)


# ---- 报错与约束 ----


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"d_model": 100, "n_head": 3}, "2·n_head"),
        ({"d_model": 96, "n_head": 32}, "2·n_head"),  # 每头 3 维，配不成对
        ({"d_model": 8, "n_head": 2}, "至少要 12"),
        ({"n_layer": 0}, "n_layer=0"),
        ({"seq_len": -1}, "seq_len=-1"),
        ({"vocab_size": 8192.0}, "vocab_size=8192.0"),
        ({"n_head": True}, "n_head=True"),
        ({"attention": "flash"}, "attention='flash'"),
    ],
)
def test_bad_config_is_refused(changes, said):
    """错误的结构在建模型之前就被拒绝，消息里有给出的值和接受的范围。"""
    with pytest.raises(ValueError) as error:
        GPTConfig(**changes)
    assert said in str(error.value), f"消息是：{error.value}"


def test_too_long_input_is_refused():
    """超过 seq_len 的输入得到一句说明，带着两个长度，而不是形状不合的报错。"""
    x = torch.zeros(1, TINY.seq_len + 1, dtype=torch.long)
    with pytest.raises(ValueError, match=r"33 个 token 超过了模型的 seq_len=32"):
        tiny_model()(x)


def test_model_imports_torch_alone():
    """`model.py` 只依赖 torch 与标准库：抄走这一个文件就能用。"""
    lines = Path(__file__).parents[1].joinpath("model.py").read_text(encoding="utf-8").splitlines()
    roots = {line.split()[1].split(".")[0] for line in lines if line.startswith(("import", "from"))}
    assert roots <= {"collections", "dataclasses", "math", "torch"}, f"多余的依赖：{roots}"
