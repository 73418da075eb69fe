"""What addresses look like, by the form alone. It imports nothing: every configuration knows it."""

from __future__ import annotations

from typing import Final

MAX_PORT: Final = 65535


def is_address(text: str) -> bool:
    """Whether something may listen at a text: unix:PATH, or HOST:PORT, where port 0 is any."""
    if text.startswith("unix:"):
        return text != "unix:"
    return port_of(text) is not None


def port_of(text: str) -> int | None:
    """The port of HOST:PORT; None: it is no such text, or no such port."""
    host, _, port = text.rpartition(":")
    is_port = port.isascii() and port.isdecimal() and len(port) <= len(str(MAX_PORT)) and int(port) <= MAX_PORT
    return int(port) if host and is_port else None


def is_reachable(text: str) -> bool:
    """Whether somebody may be reached at a text: unix:PATH, or HOST:PORT but for port 0."""
    return is_address(text) and (text.startswith("unix:") or port_of(text) != 0)


def probe_address(text: str) -> str:
    """Returns the address of a probe as it is.

    Raises:
        ValueError: Nothing can listen there.
    """
    if not is_address(text):
        raise ValueError(f"must be HOST:PORT with a port of 0 to {MAX_PORT}, or unix:PATH")
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
