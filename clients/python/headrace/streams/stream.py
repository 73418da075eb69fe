"""The sync side of a generation's events: how a thread waits for the next one.

Owns EventReader, the reading surface that a call's stream and a session's generation share, and
Stream, a call of its own. What a stream remembers is in stream_state.py; aio_stream.py is the same
for asyncio. Messages of a call come in, typed events and exceptions go out.
"""

from __future__ import annotations

import contextlib
import queue
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Self

import grpc

from headrace.completion import Completion, Transcript
from headrace.connections.call_reader import readable
from headrace.errors import from_rpc_error
from headrace.events import Delta, Event, Ledger, OutputFinished, Reconnecting, Usage
from headrace.streams.stream_state import StreamState, piece_of


class EventReader(ABC):
    """The events of one generation, as an iterator. What has been yielded is kept, for result()."""

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

    def __iter__(self) -> Iterator[Event]:
        return self

    @abstractmethod
    def __next__(self) -> Event:
        """The next event.

        Raises HeadraceError where there will be none because something failed.
        """

    def text(self) -> Iterator[str]:
        """The pieces of text of a single output, as they arrive.

        Raises:
            ValueError: The stream carries more than one output.
            HeadraceError: The output ended with an error.
        """
        for event in self:
            if isinstance(event, Delta | OutputFinished):
                piece = piece_of(event, self._transcript)
                if piece:
                    yield piece

    def result(self) -> Completion:
        """Reads to the end and returns the whole answer, events yielded before included.

        Raises:
            HeadraceError: The call failed, or an output ended with an error.
        """
        for _ in self:
            pass
        return self._transcript.completion()


class Stream(EventReader):
    """The events of one generation, as an iterator and a context manager.

    Leaving the `with` block, close() or dropping the last reference before the end cancels the
    call; a Generate or Chat is then cancelled on the server, a subscription only detached. A
    KeyboardInterrupt while it is read closes it.

    Raises (while iterating):
        HeadraceError: The call failed. Broken connections of subscriptions are yielded as
        Reconnecting events instead.
    """

    def __init__(self, state: StreamState, open_call: Callable[[StreamState], Any]) -> None:
        super().__init__(state.transcript)
        self._state = state
        self._open_call = open_call
        self._call = readable(open_call(state))
        self._pause: float | None = None
        self._closed = False
        # Ends a pause when the stream is closed. An Event would have steps between which a
        # KeyboardInterrupt leaves its lock taken, and the next close() waits for good.
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()

    def __next__(self) -> Event:
        while not self._closed:
            try:
                event = self._next()
            except KeyboardInterrupt:
                # It may have struck between the arrival of a message and here.
                self.close()
                raise
            if event is not None:
                return event
        raise StopIteration

    def close(self) -> None:
        """Ends the stream, and with it the call if it still runs.

        May be called from any thread and more than once.
        """
        self._closed = True
        self._woken.put(None)
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_call"):
            self._call.cancel()

    def _next(self) -> Event | None:
        """Reads one message, or opens the call again first; None if there is nothing to yield."""
        if self._pause is not None:
            with contextlib.suppress(queue.Empty):
                self._woken.get(timeout=self._pause)
                return None
            self._pause, self._call = None, readable(self._open_call(self._state))
        try:
            return self._state.take(next(self._call).event)
        except StopIteration:
            self._state.ended()
            self._closed = True
        except grpc.RpcError as error:
            return self._failed(error)
        return None

    def _failed(self, error: grpc.RpcError) -> Reconnecting | None:
        if self._closed or self._state.transcript.done:
            self._closed = True
            return None
        reconnecting = self._state.failed(from_rpc_error(error, self.request_id))
        self._pause = reconnecting.delay
        return reconnecting
