"""Ports for servers whose port is known before they start."""

from __future__ import annotations

import pathlib
import random
import socket

_GIVEN = pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range")
# Where the kernel's own range does not say otherwise.
_LOWEST = 12_000
_choose = random.SystemRandom().choice
_returned: set[int] = set()


def free_port() -> int:
    """Returns a port of 127.0.0.1 that nobody has now and that was not returned before.

    The kernel gives it to nobody.

    One that it gave would be within reach of every connection that is made before the server
    listens; and who calls such a port in vain may reach itself.
    """
    lowest, highest = map(int, _GIVEN.read_text().split()) if _GIVEN.exists() else (32_768, 60_999)
    candidates = range(_LOWEST, lowest) if lowest > _LOWEST + 1000 else range(highest + 1, 65_536) or range(0, 1)
    for _ in range(1000):
        port = _choose(candidates)
        if port in _returned:
            continue
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        _returned.add(port)
        return port
    raise AssertionError(f"no free port among {candidates}")


def free_address() -> str:
    """127.0.0.1 with such a port."""
    return f"127.0.0.1:{free_port()}"
