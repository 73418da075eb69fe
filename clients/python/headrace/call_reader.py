"""Reading a sync call such that Ctrl-C cannot strike inside grpc.

grpc's sync streams wait on Python locks. A KeyboardInterrupt that is raised between two steps of such a wait leaves a lock taken, or gives one
back twice: the channel's next call then never gets an answer, or fails with a RuntimeError. Only the main thread is interrupted, so what is read
there is read by a thread of its own, and the main thread waits on a queue that has no such steps. Owns that thread. Calls go in; messages and
exceptions come out as they would of the call.
"""

from __future__ import annotations

import queue
import threading
from typing import Any, Protocol

# Messages that may wait for the reader; enough that the two threads need not take turns, few enough that a slow reader is still felt by the server.
READ_AHEAD = 16


class Readable(Protocol):
    """What a stream needs of its call."""

    def __next__(self) -> Any:
        """The next message. Raises StopIteration at the end, grpc.RpcError where the call fails."""

    def cancel(self) -> Any:
        """Ends the call."""


class _CallReader:
    """A call that is read in a thread of its own."""

    def __init__(self, call: Any) -> None:
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
        self._call.cancel()
        self._wanted.put(False)


def readable(call: Any) -> Readable:
    """The call, to be read by this thread."""
    is_main = threading.current_thread() is threading.main_thread()
    return _CallReader(call) if is_main else call


def _read(call: Any, arrived: queue.SimpleQueue[Any], wanted: queue.SimpleQueue[bool]) -> None:
    while wanted.get():
        try:
            arrived.put(next(call))
        except Exception as end:  # StopIteration and RpcError; what else there may be is for the reader, too
            arrived.put(end)
            return
