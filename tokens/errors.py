"""使用者能自己改正的错误：一句话说清给了什么、接受什么、怎么办。"""


class UserError(Exception):
    """消息就是给使用者看的那一句话；入口捕获它，写到 stderr，以退出码 2 结束，不打印 traceback。"""
