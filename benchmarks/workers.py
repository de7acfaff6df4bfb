"""同一个训练任务的几种写法，各占一个进程：每走完一步打印一行 `STEP 秒数`。

由 `peers.py` 启动，也可以单独运行：

    python benchmarks/workers.py --peer transformers --d-model 128 --n-layer 4

每个写法都用它自己的模型和它自己惯用的循环；参数量、batch、长度、AdamW 的超参数、裁剪都相同。
进程不会自己结束（`--steps` 之前），由启动它的人暂停、继续和结束。
"""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.lab.results import run_main
from experiments.training.recipe import adamw
from experiments.training.step import StepOptions, best_options, make_step
from model import GPT, GPTConfig
from tokens import load_tokens, sample_batch
from tokens.errors import UserError

HEAD_DIM = 32  # 每个注意力头的维数，各家相同


@dataclass(frozen=True)
class Options:
    """一个写法、一种形状。"""

    peer: str = "ours"
    """哪一种写法：见 `PEERS`"""
    d_model: int = 128
    """模型宽度（维）；注意力头数是它除以 32"""
    n_layer: int = 4
    """层数（层）"""
    batch_size: int = 16
    """每步的序列数（个）"""
    seq_len: int = 128
    """序列长度（token）"""
    steps: int = 1_000_000
    """最多走几步（步）"""
    lr: float = 1e-3
    """学习率"""

    def __post_init__(self) -> None:
        if self.peer not in PEERS:
            raise UserError(f"--peer {self.peer}：只能是 {'、'.join(PEERS)}")
        if self.d_model % HEAD_DIM or self.d_model < HEAD_DIM:
            raise UserError(f"--d-model {self.d_model}：要是 {HEAD_DIM} 的倍数")

    @property
    def config(self) -> GPTConfig:
        """本项目模型的结构；别家的模型按它的参数量对齐。"""
        return GPTConfig(
            d_model=self.d_model, n_head=self.d_model // HEAD_DIM,
            n_layer=self.n_layer, seq_len=self.seq_len,
        )  # fmt: skip


def batches(options: Options) -> Iterator[tuple[Tensor, Tensor]]:
    """没有尽头的训练 batch：x、y 各 (B, T) 的 int64。"""
    data = load_tokens(vocab_size=options.config.vocab_size)["train"]
    generator = torch.Generator().manual_seed(0)
    while True:
        yield sample_batch(data, options.batch_size, options.seq_len, generator)


def loop(step: Callable[[Tensor, Tensor], object], model: nn.Module, options: Options) -> None:
    """报出参数量，然后一步一步走，每步（含取 batch）打印一行用时。"""
    print(f"PARAMS {sum(p.numel() for p in model.parameters())}", flush=True)
    source = batches(options)
    for _ in range(options.steps):
        start = time.perf_counter()
        step(*next(source))
        print(f"STEP {time.perf_counter() - start:.6f}", flush=True)


def ours(options: Options, fast: StepOptions) -> None:
    """本项目的一步。"""
    model = GPT(options.config)
    optimizer = adamw(model, options.lr, fused=True if fast.fused_loss else None)
    loop(make_step(model, optimizer, fast), model, options)


def plain_loop(model: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor], options: Options):
    """教程里最常见的循环：fp32、eager、AdamW、裁剪。"""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1
    )

    def step(x: Tensor, y: Tensor) -> None:
        loss = loss_of(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    loop(step, model, options)


def llama(options: Options) -> nn.Module:
    """`transformers` 的 Llama，结构与本项目的模型逐项相同。"""
    from transformers import LlamaConfig, LlamaForCausalLM

    ours_config = options.config
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=ours_config.vocab_size, hidden_size=ours_config.d_model,
            intermediate_size=ours_config.ffn_dim, num_hidden_layers=ours_config.n_layer,
            num_attention_heads=ours_config.n_head, max_position_embeddings=ours_config.seq_len,
            tie_word_embeddings=True, use_cache=False, bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip


def transformers_loop(options: Options) -> None:
    """`transformers` 的 Llama 放进普通的循环；labels 就是输入，移位由模型来做。"""
    model = llama(options)
    plain_loop(model, lambda x, y: model(input_ids=x, labels=x).loss, options)


class Windows(torch.utils.data.IterableDataset):
    """给 `Trainer` 的数据：一个一个的窗口，与 `batches` 读到的相同。"""

    def __init__(self, options: Options) -> None:
        self.options = options

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for x, _ in batches(self.options):
            for row in x:
                yield {"input_ids": row, "labels": row}


def trainer(options: Options, *, fast: bool) -> None:
    """`transformers.Trainer`；`fast` 时打开它自己的 bf16 与 torch_compile 两个开关。"""
    import tempfile

    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs) -> None:
            now = time.perf_counter()
            if hasattr(self, "last"):  # 一整圈，含取数据和 Trainer 自己的簿记
                print(f"STEP {now - self.last:.6f}", flush=True)
            self.last = now

    model = llama(options)
    print(f"PARAMS {model.num_parameters()}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=options.batch_size,
            max_steps=options.steps, learning_rate=options.lr, adam_beta2=0.95, weight_decay=0.1,
            max_grad_norm=1.0, use_cpu=True, bf16=fast, torch_compile=fast, report_to="none",
            save_strategy="no", logging_strategy="no", disable_tqdm=True,
            dataloader_pin_memory=False,
        )  # fmt: skip
        Trainer(
            model=model, args=arguments, train_dataset=Windows(options), callbacks=[Clock()]
        ).train()


def litgpt_loop(options: Options) -> None:
    """litgpt 的 GPT 放进普通的循环；它默认不共享输出头，这里共享，使参数量相同。"""
    from litgpt import GPT as LitGPT
    from litgpt import Config

    c = options.config
    model = LitGPT(
        Config(
            block_size=c.seq_len, n_layer=c.n_layer, n_head=c.n_head, n_embd=c.d_model,
            vocab_size=c.vocab_size, padded_vocab_size=c.vocab_size, rotary_percentage=1.0,
            parallel_residual=False, bias=False, norm_class_name="RMSNorm",
            mlp_class_name="LLaMAMLP", intermediate_size=c.ffn_dim,
        )
    )  # fmt: skip
    model.lm_head.weight = model.transformer.wte.weight
    plain_loop(
        model, lambda x, y: F.cross_entropy(model(x).flatten(0, 1), y.flatten()), options
    )


PEERS: dict[str, Callable[[Options], None]] = {
    "ours": lambda options: ours(options, best_options()[0]),
    "ours_plain": lambda options: ours(options, StepOptions()),
    "transformers": transformers_loop,
    "trainer": lambda options: trainer(options, fast=False),
    "trainer_fast": lambda options: trainer(options, fast=True),
    "litgpt": litgpt_loop,
}


def main(options: Options) -> None:
    """运行一种写法；它需要的包没有装时说清楚怎么装。"""
    try:
        torch.manual_seed(0)
        PEERS[options.peer](options)
    except ImportError as error:
        raise UserError(
            f"{options.peer} 需要的包没有装（{error}）：见 benchmarks/README.md"
        ) from error
    except BrokenPipeError:
        sys.exit(0)


if __name__ == "__main__":
    run_main(main, Options)
