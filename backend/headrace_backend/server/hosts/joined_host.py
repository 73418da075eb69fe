"""One host that has joined, from its agent's stream: its ranks of one life after the other.

Owns the queue in front of the stream's writer, its bound, and what the agent's messages mean for
the life that goes on. Does not own the RPC (`ranks_service`).
"""

from __future__ import annotations

import asyncio
import collections
import functools
from collections.abc import Awaitable, Callable

from headrace_backend.server.hosts.routes import address_towards
from headrace_backend.server.hosts.store_relay import StoreRelay, TooManyConnections
from headrace_backend.server.workers.other_hosts import OtherHost, RanksListener, RemoteRank
from headrace_backend.step.meeting import MeetingPoint
from headrace_backend.step.messages import RecordKind
from headrace_protos.ranks.v1 import ranks_pb2

Write = Callable[[ranks_pb2.ToHost], Awaitable[None]]


class Confused(Exception):  # the agent is not to be trusted any more
    """The agent sent what makes no sense; the message says what."""


class JoinedHost(OtherHost):
    """The backend's end of one stream."""

    def __init__(self, name: str, address: str, ranks: range, max_backlog_bytes: int) -> None:
        """Has no life of the workers yet.

        Args:
            name: The host's, for people.
            address: IP address that it connected from.
            ranks: Its ranks.
            max_backlog_bytes: Bytes of records that may wait for it.
        """
        self.name = name
        self.address = address
        self.ranks: list[RemoteRank] = [RemoteRank(rank, name) for rank in ranks]
        self._max_backlog_bytes = max_backlog_bytes
        self._outgoing: collections.deque[ranks_pb2.ToHost] = collections.deque()
        self._backlog_bytes = 0
        # Its ranks' connections to the store of the life that goes on, and where that listens.
        self._relay = StoreRelay(self._send_store, lambda: self.has_room)
        self._store = "", 0
        self._wake = asyncio.Event()
        # None: no life goes on.
        self._listener: RanksListener | None = None
        self._loop = asyncio.get_running_loop()
        self._left_to_exit: set[int] = set()
        self._exited: asyncio.Future[None] = self._loop.create_future()
        self._exited.set_result(None)
        self._ended = self._exited
        # Set with the reason when the stream is to end.
        self.cut_off: asyncio.Future[str] = self._loop.create_future()

    # --- what is sent

    def begin(self, meeting: MeetingPoint, listener: RanksListener) -> None:
        """Implements `OtherHost.begin`."""
        assert self._ended.done(), "the life before has ended"
        if self.cut_off.done():
            listener.on_host_lost(f"{self.described}: {self.cut_off.result()}")
            return
        self._listener = listener
        self.ranks = [RemoteRank(rank.rank, self.name) for rank in self.ranks]
        self._left_to_exit = {rank.rank for rank in self.ranks}
        self._exited, self._ended = self._loop.create_future(), self._loop.create_future()
        self._relay = StoreRelay(self._send_store, lambda: self.has_room)
        self._store = meeting.address, meeting.port
        try:
            start = ranks_pb2.Start(engine_address=address_towards(self.address))
        except OSError as error:
            self.cut(f"there is no way to it: {error.strerror or error}")
            return
        self._queue(ranks_pb2.ToHost(start=start))

    @property
    def described(self) -> str:
        """The host and its ranks, for people."""
        first, last = self.ranks[0].rank, self.ranks[-1].rank
        return f"host {self.name} ({f'ranks {first} to {last}' if last > first else f'rank {first}'})"

    @property
    def has_room(self) -> bool:
        """Implements `OtherHost.has_room`."""
        return self._backlog_bytes < self._max_backlog_bytes

    def send(self, kind: RecordKind, record: bytes) -> None:
        """Implements `OtherHost.send`."""
        self._queue(ranks_pb2.ToHost(record=ranks_pb2.Record(kind=kind, payload=record)))

    def _send_store(self, connection: int, data: bytes) -> None:
        self._queue(ranks_pb2.ToHost(store=ranks_pb2.StoreBytes(connection=connection, data=data)))

    def dump_stacks(self) -> None:
        """Implements `OtherHost.dump_stacks`."""
        self._queue(ranks_pb2.ToHost(dump_stacks=ranks_pb2.DumpStacks()))

    def beat(self) -> None:
        """Has the agent hear that the backend lives."""
        self._queue(ranks_pb2.ToHost(beat=ranks_pb2.Beat()))

    @property
    def exited(self) -> asyncio.Future[None]:
        """Implements `OtherHost.exited`."""
        return self._exited

    async def end(self, reason: str, timeout_s: float) -> None:
        """Implements `OtherHost.end`."""
        # Nobody hears of ranks that end because they were asked to.
        self._listener = None
        if self._ended.done():
            return
        self._queue(ranks_pb2.ToHost(end=ranks_pb2.End(reason=reason)))
        await asyncio.wait([self._ended], timeout=timeout_s)
        if not self._ended.done():
            self.cut(f"its workers were not gone within {timeout_s:g} s")

    def cut(self, reason: str) -> None:
        """Ends the stream, and with it the life that goes on, for a reason."""
        if not self.cut_off.done():
            self.cut_off.set_result(reason)

    async def run_writer(self, write: Write) -> None:
        """Writes what is queued, for ever; ends by cancellation or by an exception of `write`."""
        while True:
            while self._outgoing:
                message = self._outgoing.popleft()
                await write(message)
                self._backlog_bytes -= _weight(message)
            self._wake.clear()
            await self._wake.wait()

    def _queue(self, message: ranks_pb2.ToHost) -> None:
        self._backlog_bytes += _weight(message)
        self._outgoing.append(message)
        self._wake.set()

    # --- what comes

    def take(self, message: ranks_pb2.FromHost) -> None:
        """Takes a message of the agent.

        Raises:
            Confused: It makes no sense now, or of these ranks.
        """
        kind = message.WhichOneof("message")
        if kind == "records":
            self._take_records(message.records)
        elif kind == "marks":
            self._take_marks(message.marks)
        elif kind == "started":
            self._take_started(message.started)
        elif kind == "exited":
            self._take_exited(message.exited)
        elif kind == "ended":
            self._take_ended(message.ended)
        elif kind == "store":
            self._take_store(message.store.connection, message.store.data)
        else:
            raise Confused(f"{kind or 'an empty message'} came where none is expected")

    def lost(self, reason: str) -> None:
        """The stream is over: all ranks of the host are lost."""
        self.cut(reason)
        listener = self._listener
        self._finish()
        if listener is not None:
            listener.on_host_lost(f"{self.described}: {reason}")

    def _take_records(self, records: ranks_pb2.Records) -> None:
        self._own(records.rank)
        if self._listener is not None:
            self._listener.on_records(records.rank, [(record.kind, record.payload) for record in records.records])

    def _take_marks(self, marks: ranks_pb2.Marks) -> None:
        # None before the first life.
        if not marks.ranks:
            return
        if len(marks.ranks) != len(self.ranks):
            raise Confused(f"marks of {len(marks.ranks)} ranks came, and it has {len(self.ranks)}")
        for rank, each in zip(self.ranks, marks.ranks, strict=True):
            rank.is_stopped = each.is_stopped
            if self._listener is not None:
                try:
                    self._listener.on_counters(rank.rank, each.counters)
                except ValueError as error:
                    raise Confused(str(error)) from error

    def _take_started(self, started: ranks_pb2.Started) -> None:
        if len(started.pids) != len(self.ranks):
            raise Confused(f"{len(started.pids)} workers were started, and it has {len(self.ranks)} ranks")
        for rank, pid in zip(self.ranks, started.pids, strict=True):
            rank.pid = pid

    def _take_exited(self, exited: ranks_pb2.Exited) -> None:
        self._own(exited.rank)
        self._left_to_exit.discard(exited.rank)
        if not self._left_to_exit and not self._exited.done():
            self._exited.set_result(None)
        if self._listener is not None:
            self._listener.on_exit(exited.rank, exited.exit_code, exited.cause)

    def _take_ended(self, ended: ranks_pb2.Ended) -> None:
        listener = self._listener
        self._finish()
        if listener is not None:
            listener.on_host_lost(f"{self.described}: {ended.failure or 'it ended its workers unasked'}")

    def _take_store(self, connection: int, data: bytes) -> None:
        # What comes after a life's end is nobody's.
        if data and connection not in self._relay and self._listener is not None:
            try:
                self._relay.open(connection, functools.partial(asyncio.open_connection, *self._store))
            except TooManyConnections as error:
                raise Confused(f"it opened {error}") from error
        self._relay.take(connection, data)

    def _own(self, rank: int) -> None:
        if not self.ranks[0].rank <= rank <= self.ranks[-1].rank:
            raise Confused(f"it reported rank {rank}, which is not its own")

    def _finish(self) -> None:
        self._listener = None
        self._relay.close()
        for future in (self._exited, self._ended):
            if not future.done():
                future.set_result(None)


def _weight(message: ranks_pb2.ToHost) -> int:
    """Returns the bytes of a message that count as waiting; most have none."""
    return len(message.record.payload) + len(message.store.data)
