"""Brings facts to the telemetry process over its Unix socket, and its answers back: the one sender
of services and backends.

Owns the connection, the buffer and the count of what was dropped. Does not own what facts mean
(`facts`). A message on the wire is its length (4 bytes, little-endian) and its bytes.

    tell -> buffer -> every 50 ms, or once 64 KiB wait -> socket -> telemetry process
    on_answer <- telemetry process

Whoever tells never waits and never fails: an absent, hung or dying telemetry process costs it no
more than a full buffer. Then the *newest* facts are dropped, not the oldest: what is dropped costs
not even its encoding, and what is kept is one run without gaps, in which a generation finds the
steps that were told before it. Drops are told at the place where they happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Callable

import msgspec

from headrace_facts import facts

FLUSH_S = 0.05
_FLUSH_BYTES = 64 << 10
# Of one write: what is lost at most when the connection is.
_MAX_WRITE_BYTES = 256 << 10
_MAX_ANSWER_BYTES = 64 << 20
_FIRST_RETRY_S = 0.1
# The telemetry process is the last that a server starts, and of low priority; whoever asks for a
# trace meanwhile waits for this too. An attempt costs 30 us.
_MAX_RETRY_S = 1.0
_PREFIX_BYTES = 4


def _frame(fact: facts.Fact) -> bytes:
    data = facts.encode(fact)
    return len(data).to_bytes(_PREFIX_BYTES, "little") + data


class _Count:
    """Facts, and the output tokens that they tell of."""

    __slots__ = ("facts", "tokens")

    def __init__(self) -> None:
        self.facts = 0
        self.tokens = 0

    def add(self, num_facts: int, num_tokens: int) -> None:
        self.facts += num_facts
        self.tokens += num_tokens


class Feed:
    """A connection to the telemetry process that comes and goes, with a bounded buffer before it.

    All calls from the event loop's thread.
    """

    def __init__(
        self,
        address: str,
        hello: facts.Hello,
        on_answer: Callable[[facts.Answer], None] | None = None,
        max_buffered_bytes: int = 8 << 20,
        on_connect: Callable[[], None] | None = None,
    ) -> None:
        """Not started; facts that are told before are buffered.

        Args:
            address: The socket's path, with or without "unix:" before it.
            hello: The first fact of each connection.
            on_answer: Takes what comes back.
            max_buffered_bytes: Bound of what waits, what is being written included.
            on_connect: Called on each connection, after hello and greetings, to tell again what a
                new telemetry process must know.
        """
        self._path = address.removeprefix("unix:")
        self._hello = hello
        self._on_answer = on_answer
        self.on_connect = on_connect
        self._max_buffered_bytes = max_buffered_bytes
        self._greetings: dict[type[facts.Fact], facts.Fact] = {}
        # Messages that wait, with the tokens that each tells of.
        self._waiting: deque[tuple[bytes, int]] = deque()
        # What waits and what is being written.
        self._num_bytes = 0
        self._untold_drops = _Count()
        # Over the feed's whole life.
        self.num_dropped_facts = 0
        self.num_dropped_tokens = 0
        self.connected = False
        self._wake = asyncio.Event()
        self._empty = asyncio.Event()
        self._flush_timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Connects in the background, now and whenever the connection is lost."""
        assert self._task is None, "a feed is started once"
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self, timeout_s: float = 1.0) -> None:
        """Sends what waits, if somebody takes it within `timeout_s`, and ends the connection."""
        if self.connected:
            self._wake.set()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), timeout_s)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._cancel_timer()

    def tell(self, fact: facts.Fact) -> None:
        """Sends a fact soon, or counts it as dropped. Never waits, never raises."""
        num_tokens = fact.output_tokens if type(fact) is facts.Generation else 0
        if self._num_bytes >= self._max_buffered_bytes:
            self._drop(1, num_tokens)
            return
        try:
            frame = _frame(fact)
        except (TypeError, ValueError, OverflowError):
            # It holds what the byte form can't; not worth a server.
            self._drop(1, num_tokens)
            return
        if self._num_bytes + len(frame) > self._max_buffered_bytes:
            self._drop(1, num_tokens)
            return
        self._append(frame, num_tokens)

    def greet(self, fact: facts.Fact) -> None:
        """Sends a fact, now and on each later connection. Of one type the last one holds."""
        self._greetings[type(fact)] = fact
        if self.connected:
            self._append(_frame(fact), 0)

    # --- the buffer
    # -----------------------------------------------------------------------------------------------------------

    def _append(self, frame: bytes, num_tokens: int) -> None:
        self._waiting.append((frame, num_tokens))
        self._num_bytes += len(frame)
        if not self.connected:
            return
        self._empty.clear()
        if self._num_bytes >= _FLUSH_BYTES:
            self._wake.set()
        elif self._flush_timer is None:
            self._flush_timer = asyncio.get_running_loop().call_later(FLUSH_S, self._wake.set)

    def _drop(self, num_facts: int, num_tokens: int) -> None:
        self._untold_drops.add(num_facts, num_tokens)
        self.num_dropped_facts += num_facts
        self.num_dropped_tokens += num_tokens

    def _take(self) -> tuple[list[bytes], _Count]:
        """The oldest messages that make a write, and how much is lost with them."""
        frames: list[bytes] = []
        count, num_bytes = _Count(), 0
        while self._waiting and num_bytes < _MAX_WRITE_BYTES:
            frame, num_tokens = self._waiting.popleft()
            frames.append(frame)
            num_bytes += len(frame)
            count.add(1, num_tokens)
        return frames, count

    # --- the connection
    # -------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        retry_s = _FIRST_RETRY_S
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(self._path)
            except OSError:
                # Not all processes of a server at the same moment.
                await asyncio.sleep(retry_s * random.uniform(0.7, 1.3))
                retry_s = min(2 * retry_s, _MAX_RETRY_S)
                continue
            if await self._use(reader, writer):
                retry_s = _FIRST_RETRY_S
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, _MAX_RETRY_S)

    async def _use(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Sends and receives until the connection is lost. Returns whether it was of any use."""
        loop = asyncio.get_running_loop()
        # So that a write counts as taken only once the kernel has all of it.
        writer.transport.set_write_buffer_limits(high=0)
        writer.write(_frame(self._hello) + b"".join(map(_frame, self._greetings.values())))
        self.connected = True
        if self._waiting:
            self._empty.clear()
        if self.on_connect is not None:
            self.on_connect()
        began_at_s = loop.time()
        tasks = [loop.create_task(self._receive(reader)), loop.create_task(self._send(writer))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.connected = False
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            writer.transport.abort()
            self._cancel_timer()
            self._empty.set()
        return loop.time() - began_at_s > _MAX_RETRY_S

    async def _send(self, writer: asyncio.StreamWriter) -> None:
        """Raises OSError when the connection is lost."""
        await writer.drain()
        while True:
            if not self._waiting and not self._untold_drops.facts:
                self._empty.set()
                await self._wake.wait()
            self._wake.clear()
            self._cancel_timer()
            await self._write_waiting(writer)

    async def _write_waiting(self, writer: asyncio.StreamWriter) -> None:
        """One write.

        Until the kernel has it, nobody can say what of it arrived: all of it counts as dropped
        then, rather than some of it twice.
        """
        frames, count = self._take()
        num_bytes = sum(map(len, frames))
        told = _Count()
        if not self._waiting and self._untold_drops.facts:
            told, self._untold_drops = self._untold_drops, told
            frames.append(_frame(facts.Dropped(told.facts, told.tokens)))
        taken = False
        try:
            writer.write(b"".join(frames))
            await writer.drain()
            taken = True
        finally:
            self._num_bytes -= num_bytes
            if not taken:
                self._drop(count.facts, count.tokens)
                self._untold_drops.add(told.facts, told.tokens)

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        """Raises OSError, IncompleteReadError when the connection is lost; ValueError if what comes
        is no answer.
        """
        loop = asyncio.get_running_loop()
        while True:
            length = int.from_bytes(await reader.readexactly(_PREFIX_BYTES), "little")
            if length > _MAX_ANSWER_BYTES:
                raise ValueError(f"an answer of {length} bytes; at most {_MAX_ANSWER_BYTES} are allowed")
            try:
                answer = facts.decode_answer(await reader.readexactly(length))
            except msgspec.DecodeError as error:
                raise ValueError("not an answer") from error
            if self._on_answer is not None:
                # What fails there is reported by the loop, and the connection lives.
                loop.call_soon(self._on_answer, answer)

    def _cancel_timer(self) -> None:
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
