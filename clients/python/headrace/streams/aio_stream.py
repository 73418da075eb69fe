"""The asyncio side of a generation's events: how a task waits for the next one.

As stream.py, which documents the surface.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from typing import Any, Self

import grpc
import grpc.aio

from headrace.completion import Completion, Transcript
from headrace.errors import from_rpc_error
from headrace.events import Delta, Event, Ledger, OutputFinished, Reconnecting, Usage
from headrace.streams.stream_state import StreamState, piece_of

# What read() returns at the end of a stream; the published type stubs leave it out.
END: Any = grpc.aio.EOF  # type: ignore[attr-defined]


class AsyncEventReader(ABC):
    """The events of one generation, as an async iterator.

    What has been yielded is kept, for result().
    """

    def __init__(self, transcript: Transcript) -> None:
        self._transcript = transcript

    @property
    def request_id(self) -> str | None:
        """The request's name; None before the accepted event."""
        return self._transcript.request_id

    @property
    def usage(self) -> Usage | None:
        """Tokens counted; None before the end."""
        return self._transcript.done.usage if self._transcript.done else None

    @property
    def ledger(self) -> Ledger | None:
        """The parts of the time that the request took; None before the end."""
        return self._transcript.done.ledger if self._transcript.done else None

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    @abstractmethod
    async def __anext__(self) -> Event:
        """The next event.

        Raises HeadraceError where there will be none because something failed.
        """

    async def text(self) -> AsyncIterator[str]:
        """The pieces of text of a single output, as they arrive.

        Raises:
            ValueError: The stream carries more than one output.
            HeadraceError: The output ended with an error.
        """
        async for event in self:
            if isinstance(event, Delta | OutputFinished):
                piece = piece_of(event, self._transcript)
                if piece:
                    yield piece

    async def result(self) -> Completion:
        """Reads to the end and returns the whole answer, events yielded before included.

        Raises:
            HeadraceError: The call failed, or an output ended with an error.
        """
        async for _ in self:
            pass
        return self._transcript.completion()


class AsyncStream(AsyncEventReader):
    """The events of one generation, as an async iterator and an async context manager.

    Leaving the `async with` block, aclose() or cancelling the task that reads cancels the call; a
    Generate or Chat is then cancelled on the server, a subscription only detached. A stream is read
    by one task at a time.

    Raises (while iterating):
        HeadraceError: The call failed. Broken connections of subscriptions are yielded as
        Reconnecting events instead.
    """

    def __init__(self, state: StreamState, open_call: Callable[[StreamState], Any]) -> None:
        super().__init__(state.transcript)
        self._state = state
        self._open_call = open_call
        self._call: Any = open_call(state)
        self._pause: float | None = None
        self._closed = asyncio.Event()

    async def __anext__(self) -> Event:
        while not self._closed.is_set():
            event = await self._next()
            if event is not None:
                return event
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Ends the stream, and with it the call if it still runs. May be called more than once."""
        self._closed.set()
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _next(self) -> Event | None:
        """Reads one message, or opens the call again first; None if there is nothing to yield."""
        if self._pause is not None:
            await self._wait(self._pause)
            if self._closed.is_set():
                return None
            self._pause, self._call = None, self._open_call(self._state)
        try:
            response = await self._call.read()
        except grpc.RpcError as error:
            return self._failed(error)
        except asyncio.CancelledError:
            if not self._cancelled_by_aclose():
                self._call.cancel()
                raise
            return None
        if response is not END:
            return self._state.take(response.event)
        self._state.ended()
        self._closed.set()
        return None

    async def _wait(self, delay: float) -> None:
        """Sleeps, unless the stream is closed meanwhile."""
        try:
            await asyncio.wait_for(self._closed.wait(), delay)
        except TimeoutError:
            pass

    def _cancelled_by_aclose(self) -> bool:
        """Tells aclose() from a cancelled task: grpc.aio raises CancelledError for both."""
        task = asyncio.current_task()
        return self._closed.is_set() and (task is None or not task.cancelling())

    def _failed(self, error: grpc.RpcError) -> Reconnecting | None:
        if self._closed.is_set() or self._state.transcript.done:
            self._closed.set()
            return None
        reconnecting = self._state.failed(from_rpc_error(error, self.request_id))
        self._pause = reconnecting.delay
        return reconnecting
