"""数据：从语料到分词器，再到 tokens.pt 和抽样的 batch。"""

from tokens.data import load_tokens
from tokens.tokenizer import load_tokenizer
from tokens.windows import Batch, global_batch, held_out_batches, sample_batch, windows

__all__ = [
    "Batch", "global_batch", "held_out_batches", "load_tokenizer", "load_tokens", "sample_batch",
    "windows",
]
