"""HTTP/2 by hand, for calls that no gRPC client would make.

Frames go out, and what a server answers comes in, over a plain socket.

Knows as much of header compression as it needs: it writes literals, and reads blocks whose strings
are not Huffman-coded, as gRPC's are not.
"""

from __future__ import annotations

import dataclasses
import socket
import struct
from collections.abc import Iterable
from typing import Self

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS = 0, 1, 3, 4
END_STREAM, END_HEADERS, ACKNOWLEDGED = 1, 4, 1
CANCEL = 8
# Of what must come at all.
_LIMIT_S = 240.0


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """An HTTP/2 frame."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream_id) + payload


# A setting of gRPC's own: the peer takes binary metadata as it is.
ALLOW_BINARY = frame(SETTINGS, 0, 0, struct.pack(">HI", 0xFE03, 1))


def headers(path: str, extra: Iterable[tuple[str, str]] = ()) -> bytes:
    """A header block of literals without indexing, none longer than 126 bytes."""
    fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "localhost"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
        *extra,
    ]
    return b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode() for name, value in fields
    )


def message(data: bytes, *, compressed: bool = False) -> bytes:
    """A gRPC message as it lies in DATA frames."""
    return bytes([compressed]) + struct.pack(">I", len(data)) + data


@dataclasses.dataclass
class Answer:
    """What came back. `status` is -1 where the stream was reset without one."""

    messages: list[bytes]
    status: int
    text: str
    trailers: bytes = b""

    def binary_trailer(self, name: str) -> bytes | None:
        """A trailer whose name ends with -bin; None if it did not come.

        The call must have sent ALLOW_BINARY: else such values are Huffman-coded.
        """
        if name.encode() not in self.trailers:
            return None
        value = _bytes(self.trailers, name.encode())
        assert value.startswith(b"\0"), "base64"
        return value[1:]


class RawCall:
    """A connection with one call on it, whose headers are sent."""

    def __init__(self, address: str, path: str, extra: Iterable[tuple[str, str]] = ()) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=_LIMIT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = b""
        self.send(PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, END_HEADERS, 1, headers(path, extra)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, data: bytes) -> None:
        """Sends bytes as they are."""
        self._socket.sendall(data)

    def send_data(self, data: bytes, *, ends: bool) -> None:
        """Sends a DATA frame, the call's last one or not."""
        self.send(frame(DATA, END_STREAM if ends else 0, 1, data))

    def answer(self) -> Answer:
        """Reads until the call has ended."""
        body, trailers = b"", b""
        while True:
            kind, flags, stream_id, payload = self._frame()
            if kind == SETTINGS and not flags & ACKNOWLEDGED:
                self.send(frame(SETTINGS, ACKNOWLEDGED, 0))
            if stream_id != 1:
                continue
            if kind == DATA:
                body += payload
            if kind == HEADERS:
                trailers = payload
            if kind == RST_STREAM:
                return Answer(_messages(body), -1, "")
            if flags & END_STREAM and kind in (DATA, HEADERS):
                text = _value(trailers, b"grpc-message") if b"grpc-message" in trailers else ""
                return Answer(_messages(body), int(_value(trailers, b"grpc-status")), text, trailers)

    def _frame(self) -> tuple[int, int, int, bytes]:
        size = int.from_bytes(self._taken(3), "big")
        kind, flags = self._taken(2)
        return kind, flags, int.from_bytes(self._taken(4), "big") & 0x7FFFFFFF, self._taken(size)

    def _taken(self, count: int) -> bytes:
        while len(self._received) < count:
            received = self._socket.recv(1 << 16)
            assert received, "the server closed the connection"
            self._received += received
        taken, self._received = self._received[:count], self._received[count:]
        return taken


def _messages(body: bytes) -> list[bytes]:
    found = []
    while body:
        size = int.from_bytes(body[1:5], "big")
        found.append(body[5 : 5 + size])
        body = body[5 + size :]
    return found


def _value(block: bytes, name: bytes) -> str:
    return _bytes(block, name).decode()


def _bytes(block: bytes, name: bytes) -> bytes:
    """A header's value, where name and value are literals.

    Lengths below 127 are one byte; of longer ones the rest follows in seven bits each.
    """
    place = block.index(name) + len(name)
    size = block[place]
    assert size < 128, "Huffman-coded"
    place += 1
    if size == 127:
        shift = 0
        while True:
            more = block[place]
            size += (more & 127) << shift
            place, shift = place + 1, shift + 7
            if more < 128:
                break
    return block[place : place + size]
