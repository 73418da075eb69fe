"""Floods of HTTP/2 frames that need no key.

They are header blocks without an end, and frames beside flow control.

Owns the bytes of each flood and a connection that sends one until the peer closes or a total is
reached. Frames are `http2`'s.
"""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from tests.support.http2 import ACKNOWLEDGED, HEADERS, PREFACE, SETTINGS, frame, headers

PRIORITY, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION, UNKNOWN = 2, 6, 7, 8, 9, 0xBE
PADDED = 8
_PATH = "/headrace.v1.InferenceService/GetModel"
# The largest frame that a peer takes before it has said otherwise.
_FRAME_BYTES = 16_384
_BATCH_BYTES = 1 << 18
_LIMIT_S = 240.0
# A server that takes nothing for so long is done with the connection.
_STALL_S = 5.0
_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


@dataclass(frozen=True)
class Flood:
    """A flood: frames that are sent once, then one frame again and again.

    Attributes:
        first: frames that open it, as bytes.
        repeated: frame that follows without limit, as bytes.
    """

    first: bytes
    repeated: bytes


def _integer(value: int, bits: int, flags: int = 0) -> bytes:
    """An integer as header compression writes it: in a byte's low `bits`, and further bytes."""
    most = (1 << bits) - 1
    if value < most:
        return bytes([flags | value])
    written, value = bytearray([flags | most]), value - most
    while value > 127:
        written.append(value & 127 | 128)
        value >>= 7
    return bytes([*written, value])


def _field(name: bytes, value: bytes, kind: int = 0) -> bytes:
    """A literal field; `kind` 0x40 asks for a place in the table of fields."""
    return bytes([kind]) + _integer(len(name), 7) + name + _integer(len(value), 7) + value


def _block(begin: bytes, more: bytes) -> Flood:
    """A header block of `begin` and then `more` without limit."""
    return Flood(frame(HEADERS, 0, 1, headers(_PATH) + begin), frame(CONTINUATION, 0, 1, more))


def _filled(field: bytes) -> bytes:
    """Repeats a field as often as a frame holds it."""
    return field * (_FRAME_BYTES // len(field))


def _value_without_end(*, huffman: bool) -> Flood:
    """A field whose value is said to have 2 GiB."""
    length = _integer((1 << 31) - 1, 7, 0x80 if huffman else 0)
    return _block(b"\0" + _integer(1, 7) + b"x" + length, (b"\x1f" if huffman else b"a") * _FRAME_BYTES)


# Header blocks that never end, by what they consist of.
BLOCKS: dict[str, Flood] = {
    "a value without end": _value_without_end(huffman=False),
    "a compressed value without end": _value_without_end(huffman=True),
    "a name without end": _block(b"\0" + _integer((1 << 31) - 1, 7), b"a" * _FRAME_BYTES),
    "large fields": _block(b"", _field(b"x-a", b"y" * 8_000) * 2),
    "fields for the table": _block(b"", _field(b"x", b"z" * 3_000, 0x40) * 5),
    "a large field of the table": _block(_field(b"x", b"z" * 4_000, 0x40), bytes([0x80 | 62]) * _FRAME_BYTES),
    "small fields": _block(b"", _filled(_field(b"x", b"y"))),
    "single bytes": _block(b"", b"\x88"),
    "empty frames": _block(b"", b""),
}
# Frames outside of any header block.
FRAMES: dict[str, Flood] = {
    "unknown frames": Flood(b"", frame(UNKNOWN, 0, 0, b"x" * _FRAME_BYTES)),
    "padding": Flood(b"", frame(HEADERS, PADDED, 1, bytes([255]) + b"\x88" + bytes(255))),
    "settings": Flood(b"", frame(SETTINGS, 0, 0, bytes.fromhex("000400010000") * 100)),
    "pings": Flood(b"", frame(PING, 0, 0, bytes(8))),
    "priorities": Flood(b"", frame(PRIORITY, 0, 1, bytes.fromhex("0000000310"))),
    "windows": Flood(b"", frame(WINDOW_UPDATE, 0, 1, (1).to_bytes(4, "big"))),
}


class FloodingPeer:
    """A connection that opens as a client does, and then floods; it reads while it sends.

    Args:
        address: HOST:PORT.
        acknowledges: whether it acknowledges the server's settings, and waits until the server
            knows.
        tls: context of a TLS connection; None: plain.
    """

    def __init__(self, address: str, *, acknowledges: bool = True, tls: ssl.SSLContext | None = None) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=_LIMIT_S)
        if tls is not None:
            self._socket = tls.wrap_socket(self._socket, server_hostname="localhost")
        self._socket.setblocking(False)
        self.received = bytearray()
        self.is_closed = False
        self.send(PREFACE + frame(SETTINGS, 0, 0))
        if acknowledges:
            # The server's answer to the ping follows what it made of the acknowledgement.
            self._wait_for(frame(SETTINGS, ACKNOWLEDGED, 0))
            self.send(frame(SETTINGS, ACKNOWLEDGED, 0))
            self.ping(b"flooding")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, data: bytes) -> int:
        """Sends bytes until the server closes or takes no more; returns how many went."""
        rest = memoryview(data)
        while rest and not self.is_closed and self._is_ready(writes=True):
            try:
                rest = rest[self._socket.send(rest) :]
            except _NOT_NOW:
                pass
            except OSError:
                self.is_closed = True
            self._read()
        return len(data) - len(rest)

    def ping(self, data: bytes) -> None:
        """Sends a ping of 8 bytes and waits for the server's answer."""
        self.send(frame(PING, 0, 0, data))
        self._wait_for(data)

    def flood(self, flood: Flood, total_bytes: int) -> int:
        """Sends a flood of `total_bytes`, or what the server takes of it; returns how much."""
        batch = flood.repeated * max(1, _BATCH_BYTES // len(flood.repeated))
        total = self.send(flood.first)
        while total < total_bytes:
            sent = self.send(batch)
            total += sent
            if sent < len(batch):
                break
        return total

    def wait_closed(self) -> None:
        """Waits until the server has closed the connection."""
        self._wait(lambda: self.is_closed, "the server closes the connection")

    def _wait_for(self, data: bytes) -> None:
        self._wait(lambda: data in self.received, f"the server sends {data!r}")

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _LIMIT_S
        while not condition() and not self.is_closed:
            assert time.monotonic() < deadline, f"not within {_LIMIT_S} s: {what}"
            self._is_ready(writes=False)
            self._read()
        assert condition(), f"the connection is closed before {what}"

    def _is_ready(self, *, writes: bool) -> bool:
        """Waits until the socket can be read, or with `writes` written; False: it could not."""
        return any(select.select([self._socket], [self._socket] if writes else [], [], _STALL_S))

    def _read(self) -> None:
        try:
            while data := self._socket.recv(1 << 16):
                self.received += data
            self.is_closed = True
        except _NOT_NOW:
            pass
        except OSError:
            self.is_closed = True
