"""Which address and which network of this machine lead to another one.

Owns the questions to the kernel; no packet is sent for them.
"""

from __future__ import annotations

import socket
import urllib.parse

import psutil

# Any port: a datagram socket that is connected sends nothing.
_SOME_PORT = 9


def address_towards(host: str) -> str:
    """Returns this machine's IP address on the way to another one, given by name or address.

    Raises:
        OSError: There is no way, or no such name.
    """
    found = socket.getaddrinfo(host, _SOME_PORT, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """Returns the name of the network interface that has an address, as in eth0.

    Raises:
        OSError: None has it.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return str(name)
    # All of 127.0.0.0/8 is the loopback interface's, which names one address of it.
    if address.startswith("127."):
        return "lo"
    raise OSError(f"no network interface has the address {address}")


def peer_address(peer: str) -> str:
    """Returns the IP address in what gRPC calls a peer, as in ipv4:10.0.0.2:41234."""
    address = urllib.parse.unquote(peer).partition(":")[2].rpartition(":")[0]
    return address.removeprefix("[").removesuffix("]")
