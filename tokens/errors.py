"""使用者能自己改正的错误：一句话说清给了什么、接受什么、怎么办。"""

import sys


class UserError(Exception):
    """消息就是给使用者看的那一句话；入口捕获它，写到 stderr，以退出码 2 结束，不打印 traceback。"""


def tolerate_narrow_output() -> None:
    """终端的编码装不下的字（gbk 没有「⁻」，latin-1 没有汉字）印成「?」，而不是中断。"""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
