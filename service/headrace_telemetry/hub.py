"""The socket on which services and backends tell facts.

Connections, frames, and what they are answered.

Owns the connections: a frame is 4 bytes of length (little-endian) and a fact; the first fact is a
Hello; a frame that is none ends its connection and no other. Facts go to the sinks in order, one
after the other: while the sinks are busy the sockets fill, and those who tell drop and count. Knows
nothing of spans and metrics. Answers: TraceSettings at connection and whenever an operator changes
them, TraceFound for a TraceQuery.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

import msgspec
import structlog

from headrace_facts import facts
from headrace_telemetry.counts import ExportCounts

# How often sinks hear the time.
_TICK_S: Final = 0.25
_PART_BYTES: Final = 1 << 20
# A connection that leaves this much of its answers unread is ended.
_MOST_UNREAD_BYTES: Final = 256 << 20

_log = structlog.get_logger(process="telemetry")


class Sink(Protocol):
    """A consumer of facts. Its methods run in the event loop and must not block."""

    def take(self, source: facts.Hello, fact: facts.Fact) -> None:
        """A fact, generations excepted. The first of a connection is `source` itself."""

    def generation(self, source: facts.Hello, generation: facts.Generation, kept: str | None) -> None:
        """Takes the fact that a generation has ended.

        `kept`: why its trace is exported ("head", "ttft" ...); None: it is not.
        """

    def gone(self, source: facts.Hello) -> None:
        """Notes that a connection has ended."""

    def tick(self, now_unix_ns: int) -> None:
        """Time passes, several times a second."""


class Traces(Protocol):
    """A consumer of facts that decides which traces are exported."""

    def decide(self, generation: facts.Generation) -> str | None:
        """Returns why a generation's trace is exported; None: it is not. Called once for each."""

    def find(self, key: str) -> bytes:
        """A recent trace by request id or trace id, as serialized TracesData; empty: unknown."""


class Hub:
    """The server of the telemetry socket.

    Args:
        settings: what those who tell are asked for at first.
        traces: the judge and memory of traces.
        sinks: who gets all facts, in this order.
        counts: of connections that sent no facts.
    """

    def __init__(
        self, settings: facts.TraceSettings, traces: Traces, sinks: Sequence[Sink], counts: ExportCounts
    ) -> None:
        self.settings = settings
        self.counts = counts
        self._traces = traces
        self._sinks = sinks
        self._connections: set[_Connection] = set()

    async def listen(self, path: pathlib.Path) -> asyncio.Server:
        """Opens the socket, for this user alone.

        One that a dead process left is replaced. Raises OSError.
        """
        bound = _private_socket(path)
        return await asyncio.get_running_loop().create_unix_server(lambda: _Connection(self), sock=bound)

    async def keep_time(self) -> None:
        """Tells all sinks the time until cancelled."""
        while True:
            await asyncio.sleep(_TICK_S)
            self.tick(time.time_ns())

    def tick(self, now_unix_ns: int) -> None:
        """Tells all sinks the time."""
        for sink in self._sinks:
            sink.tick(now_unix_ns)

    def is_idle(self) -> bool:
        """Whether nobody is connected, so that no fact can come."""
        return not self._connections

    def close(self) -> None:
        """Ends all connections."""
        for connection in list(self._connections):
            connection.end()

    def joined(self, connection: _Connection, source: facts.Hello) -> None:
        """Notes that a process has said which it is."""
        self._connections.add(connection)
        connection.answer(self.settings)
        for sink in self._sinks:
            sink.take(source, source)

    def left(self, connection: _Connection, source: facts.Hello) -> None:
        """Notes that a connection has ended."""
        self._connections.discard(connection)
        for sink in self._sinks:
            sink.gone(source)

    def take(self, connection: _Connection, source: facts.Hello, fact: facts.Fact) -> None:
        """Deals a fact to the sinks, and does what it asks for."""
        if isinstance(fact, facts.Generation):
            kept = self._traces.decide(fact)
            for sink in self._sinks:
                sink.generation(source, fact, kept)
            return
        for sink in self._sinks:
            sink.take(source, fact)
        if isinstance(fact, facts.TraceQuery):
            for answer in _found(fact.query_id, self._traces.find(fact.key)):
                connection.answer(answer)
        elif isinstance(fact, facts.SetDetail):
            self._set_detail(fact.detail)

    def _set_detail(self, detail: facts.Detail) -> None:
        if detail is facts.Detail.DEFAULT:
            return
        self.settings = msgspec.structs.replace(self.settings, detail=detail)
        for connection in self._connections:
            connection.answer(self.settings)
        _log.info("the detail of traces was changed", detail=detail.name.lower())


class _Connection(asyncio.Protocol):
    """One connection: bytes in, facts out."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._source: facts.Hello | None = None
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]  # uvloop's own class

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            for frame in self._frames():
                self._read(frame)
        except (msgspec.MsgspecError, ValueError, _NoFrame) as error:
            self._hub.counts.bad_frames += 1
            _log.warning("a connection that sent no facts was ended", why=type(error).__name__)
            self.end()

    def connection_lost(self, error: Exception | None) -> None:
        if self._source is not None:
            self._hub.left(self, self._source)
            self._source = None

    def answer(self, answer: facts.Answer) -> None:
        """Sends an answer; ends a connection that does not read them."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if transport.get_write_buffer_size() > _MOST_UNREAD_BYTES:
            self.end()
            return
        data = facts.encode(answer)
        transport.write(len(data).to_bytes(4, "little") + data)

    def end(self) -> None:
        """Ends the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def _frames(self) -> Iterator[bytes]:
        """Takes whole frames from the buffer. Raises _NoFrame."""
        begin, size = 0, len(self._buffer)
        try:
            while size - begin >= 4:
                length = int.from_bytes(self._buffer[begin : begin + 4], "little")
                if length > facts.MAX_FRAME_BYTES:
                    raise _NoFrame(f"a frame of {length} bytes")
                if size - begin - 4 < length:
                    return
                frame = bytes(memoryview(self._buffer)[begin + 4 : begin + 4 + length])
                begin += 4 + length
                yield frame
        finally:
            del self._buffer[:begin]

    def _read(self, frame: bytes) -> None:
        fact = facts.decode_fact(frame)
        if self._source is not None:
            if isinstance(fact, facts.Hello):
                raise _NoFrame("a second hello")
            self._hub.take(self, self._source, fact)
        elif isinstance(fact, facts.Hello):
            self._source = fact
            self._hub.joined(self, fact)
        else:
            raise _NoFrame("no hello")


class _NoFrame(Exception):  # an outcome
    """What came is no frame of a fact, or came out of order."""


def _found(query_id: int, trace: bytes) -> Iterator[facts.TraceFound]:
    """An answer in parts; one, empty, if nothing was found."""
    begins = range(0, max(len(trace), 1), _PART_BYTES)
    for begin in begins:
        yield facts.TraceFound(query_id, trace[begin : begin + _PART_BYTES], last=begin == begins[-1])


def _private_socket(path: pathlib.Path) -> socket.socket:
    """A bound Unix socket that only this user may open.

    Raises OSError: another process listens there, or it can't be made.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        _remove_dead(path)
        with _narrow_umask():
            listener.bind(os.fspath(path))
    except OSError as error:
        listener.close()
        raise OSError(error.errno, error.strerror or str(error), os.fspath(path)) from None
    return listener


def _remove_dead(path: pathlib.Path) -> None:
    """Removes a socket that nobody listens on. Raises OSError if somebody does."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _narrow_umask() -> Iterator[None]:
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)
