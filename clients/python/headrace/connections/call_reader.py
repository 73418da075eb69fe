"""Reading a sync call such that Ctrl-C cannot strike inside grpc.

grpc's sync streams wait on Python locks, and take them to cancel. A KeyboardInterrupt that is
raised between two steps of that leaves a lock taken, or gives one back twice: the channel's next
call then never gets an answer, or fails with a RuntimeError. Only the main thread is interrupted,
so what is read there is read by a thread of its own and cancelled by another, and the main thread
puts into queues and waits on queues, which have no such steps. Owns these threads. Calls go in;
messages and exceptions come out as they would of the call.
"""

from __future__ import annotations

import os
import queue
import threading
from typing import Any, Protocol

# Messages that may wait for the reader; enough that the two threads need not take turns, few enough
# that a slow reader is still felt by the server.
READ_AHEAD = 16


class Readable(Protocol):
    """What a stream needs of its call."""

    def __next__(self) -> Any:
        """The next message. Raises StopIteration at the end, grpc.RpcError where the call fails."""

    def cancel(self) -> Any:
        """Ends the call."""


class _Canceller:
    """Cancels calls in a thread of its own, which begins with the first.

    It may be asked from anywhere, destructors and their interruptions included.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._begun_in = 0

    def begin(self) -> None:
        """Starts the thread, once in each process; only the main thread asks."""
        if self._begun_in != os.getpid():
            threading.Thread(target=_cancel, args=(self._calls,), name="headrace-canceller", daemon=True).start()
            self._begun_in = os.getpid()

    def cancel(self, call: Any) -> None:
        """Has a call cancelled, soon."""
        self._calls.put(call)


_canceller = _Canceller()


class _CallReader:
    """A call that is read in a thread of its own."""

    def __init__(self, call: Any) -> None:
        _canceller.begin()
        self._call = call
        self._arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # One entry per message that may be read; False ends the thread.
        self._wanted: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._end: Exception | None = None
        for _ in range(READ_AHEAD):
            self._wanted.put(True)
        arguments = (call, self._arrived, self._wanted)
        threading.Thread(target=_read, args=arguments, name="headrace-call-reader", daemon=True).start()

    def __next__(self) -> Any:
        if self._end is not None:
            raise self._end
        message = self._arrived.get()
        if isinstance(message, Exception):
            self._end = message
            raise message
        self._wanted.put(True)
        return message

    def cancel(self) -> None:
        self._wanted.put(False)
        if self._end is None:
            _canceller.cancel(self._call)


def readable(call: Any) -> Readable:
    """The call, to be read by this thread."""
    is_main = threading.current_thread() is threading.main_thread()
    return _CallReader(call) if is_main else call


def _cancel(calls: queue.SimpleQueue[Any]) -> None:
    while True:
        calls.get().cancel()


def _read(call: Any, arrived: queue.SimpleQueue[Any], wanted: queue.SimpleQueue[bool]) -> None:
    while wanted.get():
        try:
            arrived.put(next(call))
        # StopIteration and RpcError; what else there may be is for the reader, too
        except Exception as end:
            arrived.put(end)
            return
