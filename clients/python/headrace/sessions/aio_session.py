"""The asyncio session. As session.py, which documents the surface.

Owns how tasks share the call: whoever waits starts one task that reads the next message for all.
The waiting can be cancelled, the reading goes on: grpc.aio would otherwise end the call of all
generations with the task that waits for one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Self

import grpc
import grpc.aio

from headrace.events import Event, Failed
from headrace.sessions.session_base import Inbox, SessionBase
from headrace.sessions.session_state import SessionStep, step_from_proto
from headrace.streams.aio_stream import END, AsyncEventReader
from headrace.v1 import inference_pb2 as pb


class AsyncSessionGeneration(AsyncEventReader):
    """One generation of a session, read as an AsyncStream.

    In the session's steps it is known by its `stream_id`.

    Raises (while iterating):
        HeadraceError: The generation cannot start or go on, or the session's call failed.
    """

    def __init__(self, session: AsyncSession, inbox: Inbox) -> None:
        super().__init__(inbox.transcript)
        self.stream_id = inbox.stream_id
        self._session = session
        self._inbox = inbox

    async def __anext__(self) -> Event:
        event = await self._session._next_event(self._inbox)
        if event is None:
            raise StopAsyncIteration
        if isinstance(event, Failed):
            raise event.error
        return event

    def cancel(self) -> None:
        """Ends the generation; its end comes as events. Nothing happens where it has ended."""
        self._session._cancel(self.stream_id)

    def detach(self) -> None:
        """Gives up reading: nothing more comes of the generation here.

        It goes on if it outlives its readers (submitted detached), and is cancelled otherwise.
        """
        self._session._detach(self.stream_id)


class AsyncSession(SessionBase[AsyncSessionGeneration]):
    """Many generations over one stream.

    The session is an async context manager that ends it, and with it what was submitted and not
    detached.

    It is read in one of three ways, not mixed: `steps()`, `events()`, or its generations, each as
    an AsyncStream and by any task. A broken connection ends a session. What was detached or
    attached goes on and can be attached again in another one.
    """

    def __init__(self, open_call: Callable[[AsyncIterator[Any]], Any]) -> None:
        super().__init__(contextlib.nullcontext())
        self._reading: asyncio.Task[SessionStep | None] | None = None
        self._requests: asyncio.Queue[pb.SessionRequest | None] = asyncio.Queue()
        requests = self._requests
        self._call: Any = open_call(_until_none(requests))
        # Ends the task with which grpc.aio waits for requests.
        self._call.add_done_callback(lambda _: requests.put_nowait(None))

    async def steps(self) -> AsyncIterator[SessionStep]:
        """Yields one batch per message of the server, which is one per engine step.

        Gateways forward these.

        Ends when the session does: once finish() was called and all generations have ended.

        Raises:
            HeadraceError: The session's call failed.
        """
        self._claim("steps()")
        while (step := await self._shared(self._read)) is not None:
            yield self._noted(step)
        self._check(None)

    async def events(self) -> AsyncIterator[tuple[AsyncSessionGeneration, Event]]:
        """Yields all generations' events in the order of their arrival.

        An event is Failed where a generation cannot start or go on.

        Ends as steps() does.
        """
        self._claim("events()")
        while (step := await self._shared(self._read)) is not None:
            for generation, event in self._pairs(step):
                yield generation, generation._inbox.hand_out(event)
        self._check(None)

    async def aclose(self) -> None:
        """Ends the session's call; what was submitted and not detached is cancelled.

        May be called more than once.
        """
        self._closed = self._ended = True
        self._call.cancel()
        if self._reading is not None:
            await asyncio.wait({self._reading})

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _generation(self, inbox: Inbox) -> AsyncSessionGeneration:
        return AsyncSessionGeneration(self, inbox)

    def _send(self, request: pb.SessionRequest | None) -> None:
        self._requests.put_nowait(request)

    async def _next_event(self, inbox: Inbox) -> Event | None:
        """The next event of one generation; None after its last."""
        while True:
            event = self._arrived(inbox)
            if event is not None or self._is_over(inbox):
                return event
            self._claim("its generations")
            await self._shared(self._read_for_all)

    async def _shared(self, read: Callable[[], Any]) -> SessionStep | None:
        """Waits for the reading that is under way, or for a new one.

        A reading whose waiter is cancelled is found by the next one.
        """
        if self._reading is None:
            self._reading = asyncio.ensure_future(read())
        reading = self._reading
        await asyncio.wait({reading})
        if self._reading is reading:
            self._reading = None
        return None if reading.cancelled() else reading.result()

    async def _read_for_all(self) -> SessionStep | None:
        """Reads one message and deals it out."""
        step = await self._read()
        if step is not None:
            self._deal_out(step)
        return step

    async def _read(self) -> SessionStep | None:
        """The next message; None at the end, after which `_check` says whether it was good."""
        if self._ended:
            return None
        try:
            response = await self._call.read()
        except grpc.RpcError as error:
            self._call_failed(error)
            return None
        except asyncio.CancelledError:
            # By aclose(), or with the loop: the call is gone.
            self._ended = True
            raise
        if response is END:
            self._call_ended()
            return None
        return step_from_proto(response)


async def _until_none(requests: asyncio.Queue[pb.SessionRequest | None]) -> AsyncIterator[pb.SessionRequest]:
    while (request := await requests.get()) is not None:
        yield request
