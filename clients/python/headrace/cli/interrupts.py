"""Ctrl-C while a stream is read.

Owns the handler of SIGINT for that time. grpc's sync streams wait on Python locks, and a KeyboardInterrupt that is raised between two of
their steps leaves a lock taken or gives one back twice: the next call of that channel then never gets an answer, or fails. So Ctrl-C closes
the stream, which ends by itself, and KeyboardInterrupt is raised after that.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

from headrace.stream import Stream


@contextlib.contextmanager
def interruptible(open_stream: Callable[[], Stream]) -> Iterator[Stream]:
    """Opens a stream for the length of the block.

    Raises:
        KeyboardInterrupt: After the block, if Ctrl-C was pressed in it, which ends the stream; at once, if it is pressed again.
    """
    if threading.current_thread() is not threading.main_thread():
        with open_stream() as stream:
            yield stream
        return
    opened: list[Stream] = []
    presses = 0

    def close(*_: object) -> None:
        nonlocal presses
        presses += 1
        for stream in opened:
            stream.close()
        if presses > 1:
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, close)
    try:
        with open_stream() as stream:
            opened.append(stream)
            if presses:
                stream.close()
            yield stream
    finally:
        signal.signal(signal.SIGINT, previous)
    if presses:
        raise KeyboardInterrupt
