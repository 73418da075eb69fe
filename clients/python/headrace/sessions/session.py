"""The sync session: many generations over one call.

It is read as steps, as one row of events, or generation by generation.

Owns how threads share the call: whoever waits for an event of its generation and finds none reads
the next message for all, so that there is no thread in the background and nothing is read that
nobody waits for. Everything but waiting is in session_base.py; aio_session.py is the same surface
for asyncio.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, Self

import grpc

from headrace.connections.call_reader import readable
from headrace.events import Event, Failed
from headrace.sessions.session_base import Inbox, SessionBase
from headrace.sessions.session_state import SessionStep, step_from_proto
from headrace.streams.stream import EventReader
from headrace.v1 import inference_pb2 as pb


class SessionGeneration(EventReader):
    """One generation of a session, read as a Stream.

    In the session's steps it is known by its `stream_id`.

    Raises (while iterating):
        HeadraceError: The generation cannot start or go on, or the session's call failed.
    """

    def __init__(self, session: Session, inbox: Inbox) -> None:
        super().__init__(inbox.transcript)
        self.stream_id = inbox.stream_id
        self._session = session
        self._inbox = inbox

    def __next__(self) -> Event:
        event = self._session._next_event(self._inbox)
        if event is None:
            raise StopIteration
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


class Session(SessionBase[SessionGeneration]):
    """Many generations over one stream.

    The session is a context manager that ends it, and with it what was submitted and not detached.

    It is read in one of three ways, not mixed: `steps()`, `events()`, or its generations, each as a
    Stream and from any thread. A broken connection ends a session, and so does a KeyboardInterrupt
    while it is read. What was detached or attached goes on and can be attached again in another
    one.
    """

    def __init__(self, open_call: Callable[[Iterator[Any]], Any]) -> None:
        # Taken as it is and not through the condition, whose __enter__ has steps between which a
        # KeyboardInterrupt leaves it taken.
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        super().__init__(lock)
        self._is_reading = False
        self._requests: queue.SimpleQueue[pb.SessionRequest | None] = queue.SimpleQueue()
        requests = self._requests
        call = open_call(iter(requests.get, None))
        # Ends the thread with which gRPC waits for requests. The callback must not hold the
        # session, which cancels the call when dropped.
        if not call.add_callback(lambda: requests.put(None)):
            requests.put(None)
        self._call = readable(call)

    def steps(self) -> Iterator[SessionStep]:
        """Yields one batch per message of the server, which is one per engine step.

        Gateways forward these.

        Ends when the session does: once finish() was called and all generations have ended.

        Raises:
            HeadraceError: The session's call failed.
        """
        self._claim("steps()")
        while (step := self._read()) is not None:
            with self._lock:
                step = self._noted(step)
            yield step
        self._check(None)

    def events(self) -> Iterator[tuple[SessionGeneration, Event]]:
        """Yields all generations' events in the order of their arrival.

        An event is Failed where a generation cannot start or go on.

        Ends as steps() does.
        """
        self._claim("events()")
        while (step := self._read()) is not None:
            with self._lock:
                pairs = self._pairs(step)
            for generation, event in pairs:
                yield generation, generation._inbox.hand_out(event)
        self._check(None)

    def close(self) -> None:
        """Ends the session's call; what was submitted and not detached is cancelled.

        May be called from any thread and more than once.
        """
        with self._lock:
            self._closed = self._ended = True
            self._changed.notify_all()
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_call"):
            self._call.cancel()

    def _generation(self, inbox: Inbox) -> SessionGeneration:
        return SessionGeneration(self, inbox)

    def _send(self, request: pb.SessionRequest | None) -> None:
        self._requests.put(request)

    def _next_event(self, inbox: Inbox) -> Event | None:
        """The next event of one generation; None after its last."""
        try:
            return self._awaited_event(inbox)
        except KeyboardInterrupt:
            # Wherever it struck: others may be waiting for what this thread was about to read.
            self.close()
            raise

    def _awaited_event(self, inbox: Inbox) -> Event | None:
        while True:
            with self._lock:
                event = self._arrived(inbox)
                if event is not None or self._is_over(inbox):
                    return event
                self._claim("its generations")
                if self._is_reading:
                    self._changed.wait()
                    continue
                self._is_reading = True
            self._read_for_all()

    def _read_for_all(self) -> None:
        """Reads one message and deals it out; other threads wait meanwhile."""
        step = None
        try:
            step = self._read()
        finally:
            with self._lock:
                if step is not None:
                    self._deal_out(step)
                self._is_reading = False
                self._changed.notify_all()

    def _read(self) -> SessionStep | None:
        """The next message; None at the end, after which `_check` says whether it was good."""
        if self._ended:
            return None
        try:
            return step_from_proto(next(self._call))
        except StopIteration:
            self._call_ended()
        except grpc.RpcError as error:
            self._call_failed(error)
        except KeyboardInterrupt:
            # It may have struck between the arrival of a message and here.
            self.close()
            raise
        return None
