"""数据：从语料到分词器，再到 tokens.pt 和抽样的 batch。"""

from tokens.data import load_tokens, sample_batch
from tokens.tokenizer import load_tokenizer

__all__ = ["load_tokenizer", "load_tokens", "sample_batch"]
