"""数据：从语料到分词器，再到 tokens.pt 和抽样的 batch。"""
