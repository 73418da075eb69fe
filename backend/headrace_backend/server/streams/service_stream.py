"""What waits to be sent on one service's stream.

Owns the queue in front of the stream's writer: answers and outboxes in the order they arose,
neighbouring outboxes merged while the writer is busy, the newest state, and the bound on all of it.
Does not own the RPC (`engine_service`).

A service that does not read (stopped, dead network) fills gRPC's window, then this queue, and is
cut off at `max_backlog_bytes`. Its attached requests end with the stream; its detached ones go on.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Awaitable, Callable, Iterator

import grpc

from headrace_backend.engine.events import RequestDone
from headrace_backend.engine.requests.outbox import Outbox
from headrace_backend.engine.step_log import StepReader
from headrace_backend.server.streams.outgoing import merge_outbox, outbox_bytes, split_outbox, write_outbox
from headrace_backend.server.streams.statuses import StreamEnded, ended
from headrace_protos.engine.v1 import engine_pb2

Write = Callable[[engine_pb2.FromEngine], Awaitable[None]]

# An answer, tokens and events, or the messages of a replay or of a step that is too large for one.
_Item = engine_pb2.FromEngine | Outbox | Iterator[engine_pb2.FromEngine]


class ServiceStream:
    """One stream: its subscriptions' handles, and its queue."""

    def __init__(
        self,
        stream_id: int,
        max_message_bytes: int,
        max_backlog_bytes: int,
        clock: Callable[[], int],
        steps: StepReader | None = None,
        guards: bool = False,
    ) -> None:
        """An empty queue.

        Args:
            stream_id: Names the stream to the engine.
            max_message_bytes: Outboxes merge up to half of it.
            max_backlog_bytes: Bound of what waits.
            clock: The engine's.
            steps: Records of settled steps that go along now and then; None: the service did not
                ask for them.
            guards: Whether the service guards detached requests that nobody else does.
        """
        self.guards = guards
        self._steps = steps
        self.stream_id = stream_id
        # Handles of live subscriptions.
        self.handles: set[int] = set()
        # Set with StreamEnded when the stream is to end.
        self.ending: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.num_merged = 0
        self._max_merged_bytes = max_message_bytes // 2
        self._max_backlog_bytes = max_backlog_bytes
        self._clock = clock
        self._queue: collections.deque[_Item] = collections.deque()
        self._sizes: collections.deque[int] = collections.deque()
        self._backlog_bytes = 0
        self._state: engine_pb2.EngineState | None = None
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()

    def send(self, answer: engine_pb2.FromEngine) -> None:
        """Queues an answer."""
        self._append(answer, answer.ByteSize())

    def send_replay(self, answers: Iterator[engine_pb2.FromEngine], size: int) -> None:
        """Queues the replay of a log of about `size` bytes.

        Messages are encoded one by one as the service reads.
        """
        self._append(answers, size)

    def send_outbox(self, outbox: Outbox) -> None:
        """Queues an outbox, or merges it into the last one that still waits."""
        for handle, event in outbox.events:
            if isinstance(event, RequestDone):
                self.handles.discard(handle)
        size = outbox_bytes(outbox)
        tail = self._queue[-1] if self._queue else None
        if isinstance(tail, Outbox) and self._sizes[-1] + size <= self._max_merged_bytes:
            merge_outbox(tail, outbox)
            self.num_merged += 1
            self._sizes[-1] += size
            self._count(size)
        elif size > self._max_merged_bytes:
            # Many readers of one step.
            self._append(map(self._written, split_outbox(outbox, self._max_merged_bytes)), size)
        else:
            self._append(outbox, size)

    def send_state(self, state: engine_pb2.EngineState) -> None:
        """Sends the state as soon as the writer is free. Only the newest waits."""
        self._state = state
        self._notify()

    def end(self, reason: StreamEnded) -> None:
        """Ends the stream with a status, after what is queued where the service still reads."""
        if not self.ending.done():
            self.ending.set_exception(reason)
            # A service that is just gone waits for it no more, and what nobody looks at would be
            # written to standard error with a traceback.
            self.ending.exception()

    def _append(self, item: _Item, size: int) -> None:
        self._count(size)
        self._queue.append(item)
        self._sizes.append(size)
        self._notify()

    def _notify(self) -> None:
        self._idle.clear()
        self._wake.set()

    def _count(self, size: int) -> None:
        """Makes room for `size` more bytes, or ends the stream.

        One item always fits: a log may be longer than the bound.
        """
        if self._backlog_bytes > self._max_backlog_bytes:
            self._queue.clear()
            self._sizes.clear()
            self._backlog_bytes = 0
            text = f"the service reads too slowly: more than {self._max_backlog_bytes} bytes wait for it"
            self.end(ended(grpc.StatusCode.RESOURCE_EXHAUSTED, text))
        self._backlog_bytes += size

    def _next(self) -> engine_pb2.FromEngine | None:
        while self._queue:
            item = self._queue[0]
            if isinstance(item, Outbox | engine_pb2.FromEngine):
                self._pop()
                return self._written(item) if isinstance(item, Outbox) else item
            # What has several messages stays in front until the last.
            if (part := next(item, None)) is not None:
                return part
            self._pop()
        if self._state is not None:
            if self._steps is not None and (records := self._steps.take()):
                # Those of the last steps before a pause.
                return engine_pb2.FromEngine(step=engine_pb2.StepOutputs(step_records=records))
            state, self._state = self._state, None
            return engine_pb2.FromEngine(state=state)
        return None

    def _written(self, outbox: Outbox) -> engine_pb2.FromEngine:
        now_ns, steps = self._clock(), self._steps
        if steps is None:
            return write_outbox(outbox, now_ns)
        # The end of a recorded request is reported with the steps that it was in.
        ends = any(isinstance(event, RequestDone) and event.engine_trace for _, event in outbox.events)
        return write_outbox(outbox, now_ns, steps.take() if ends else steps.take_due(now_ns))

    def _pop(self) -> None:
        self._queue.popleft()
        self._backlog_bytes -= self._sizes.popleft()

    async def run_writer(self, write: Write) -> None:
        """Writes what is queued, for ever.

        Ends only by cancellation or by an exception of `write`.
        """
        while True:
            while (message := self._next()) is not None:
                await write(message)
            self._idle.set()
            self._wake.clear()
            await self._wake.wait()

    async def wait_idle(self, timeout_s: float) -> None:
        """Waits until the queue is written, but no longer than `timeout_s`."""
        waiter = asyncio.ensure_future(self._idle.wait())
        await asyncio.wait([waiter], timeout=timeout_s)
        waiter.cancel()
