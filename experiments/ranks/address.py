"""这台机器对别的机器叫什么：约好的 HOST 是不是自己，自己用哪个地址、哪块网卡去连它。

    python -m experiments.ranks.address 10.0.0.1      # → 10.0.0.2 eth0 0

torchrun 与 gloo 都去问主机名，而许多机器的主机名解析成回环地址，别的机器自然连不上；
问内核「去 HOST 走哪条路」，得到的就是对方看得见的那个地址。这里**不**导入 torch。
"""

import socket
import sys

import psutil

from tokens.errors import UserError


def my_address(host: str) -> tuple[str, str, bool]:
    """（自己的地址，它所在的网卡，HOST 是不是这台机器）；只查路由，一个包也不发。

    HOST 解析不了、到不了时抛 `UserError`。
    """
    try:
        family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # UDP 的 connect 只是选路
            mine = probe.getsockname()[0]
    except OSError as error:
        raise UserError(
            f"HOST={host} 解析不了，或没有路可到（{error.strerror}）；请写各台都认得的名字或地址。"
        ) from error
    interfaces = {item.address.partition("%")[0]: name
                  for name, items in psutil.net_if_addrs().items() for item in items}  # fmt: skip
    return mine, interfaces.get(mine, ""), target[0] in interfaces


if __name__ == "__main__":
    try:
        address, interface, is_host = my_address(sys.argv[1])
    except UserError as problem:
        sys.exit(f"错误：{problem}")
    print(address, interface, int(is_host))
