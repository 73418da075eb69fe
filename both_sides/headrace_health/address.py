"""What addresses look like, by the form alone; it imports nothing of ours.

Owns the rule of HOST:PORT and unix:PATH, its sentences, how such a text is taken apart and put
together, and which texts mean the same. Whether an address is free, and whose it is, is asked where
it is used.
"""

from __future__ import annotations

import os
from typing import Final

MAX_PORT: Final = 65535
# What an address to listen at must be, where port 0 is any free one.
TCP_RULE: Final = f"must be HOST:PORT with a port of 0 to {MAX_PORT}"
LISTEN_RULE: Final = f"{TCP_RULE}, or unix:PATH"
# What an address must be at which somebody else listens.
REACHABLE_RULE: Final = f"must be HOST:PORT with a port of 1 to {MAX_PORT}, or unix:PATH"
# Hosts by which one listens on all interfaces: of IPv4, and of both.
_ANY_IPV4: Final = "0.0.0.0"
_ANY: Final = ("::", "*")
_OWN: Final = ("localhost", "127.0.0.1", "::1")


def host_and_port(text: str) -> tuple[str, int]:
    """Returns the parts of HOST:PORT, the host without the brackets of IPv6.

    Raises:
        ValueError: It is no such text, or no such port.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    is_port = port.isascii() and port.isdecimal() and len(port) <= len(str(MAX_PORT)) and int(port) <= MAX_PORT
    if not host or not is_port:
        raise ValueError(TCP_RULE)
    return host, int(port)


def joined(host: str, port: int) -> str:
    """HOST:PORT of its parts; a host that is IPv6 gets brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def port_of(text: str) -> int | None:
    """The port of HOST:PORT; None: it is no such text, or no such port."""
    try:
        return host_and_port(text)[1]
    except ValueError:
        return None


def is_address(text: str) -> bool:
    """Whether something may listen at a text: unix:PATH, or HOST:PORT, where port 0 is any."""
    return text != "unix:" if text.startswith("unix:") else port_of(text) is not None


def is_reachable(text: str) -> bool:
    """Whether somebody may be reached at a text: unix:PATH, or HOST:PORT but for port 0."""
    return is_address(text) and (text.startswith("unix:") or port_of(text) != 0)


def listen_address(text: str) -> str:
    """Returns an address to listen at, HOST:PORT or unix:PATH, as it is.

    Raises:
        ValueError: Nothing can listen there.
    """
    if not is_address(text):
        raise ValueError(LISTEN_RULE)
    return text


def overlap(one: str, other: str) -> bool:
    """Whether who listens at one address has the other too, as far as their texts tell.

    Port 0 is another one each time. What is no address overlaps with nothing.
    """
    if one.startswith("unix:") or other.startswith("unix:"):
        paths = [os.path.realpath(text.removeprefix("unix:")) for text in (one, other) if text.startswith("unix:")]
        return len(paths) == 2 and paths[0] == paths[1]
    if not port_of(one) or port_of(one) != port_of(other):
        return False
    first, second = sorted(host_and_port(text.lower())[0] for text in (one, other))
    hosts = {first, second}
    if first == second or not hosts.isdisjoint(_ANY):
        return True
    if _ANY_IPV4 in hosts:
        return not any(":" in host for host in hosts)
    return "localhost" in hosts and hosts <= set(_OWN)


def tcp_address(text: str) -> str:
    """Returns an address to listen at by TCP alone, HOST:PORT, as it is.

    Raises:
        ValueError: Nothing can listen there.
    """
    if text.startswith("unix:"):
        raise ValueError(TCP_RULE)
    host_and_port(text)
    return text


def peer_address(text: str) -> str:
    """Returns the HOST:PORT of another machine as it is; a host that is IPv6 stands in brackets.

    Raises:
        ValueError: Nobody can be reached there.
    """
    host = text.rpartition(":")[0]
    is_whole = host.startswith("[") == host.endswith("]") == (":" in host)
    if not port_of(text) or not is_whole or any(letter.isspace() for letter in text) or text.startswith("unix:"):
        raise ValueError(f"must be HOST:PORT with a port of 1 to {MAX_PORT}, [HOST]:PORT if it is IPv6")
    return text
