"""A timer of the event loop that is precise to a tenth of a millisecond.

Owns a timerfd and its place in the loop. The loop's own timers are no substitute: uvloop counts
them in milliseconds and fires up to one too early, asyncio up to one too late, where a plan held
back has a margin of about one.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import struct
import time
from collections.abc import Callable

_ABSOLUTE = 1
# struct itimerspec: interval (none) and moment, each in seconds and nanoseconds.
_TIMES = struct.Struct("@qqqq")
_NS_PER_S = 1_000_000_000


class PreciseTimer:
    """Calls back in the event loop's thread at a moment of CLOCK_MONOTONIC.

    One moment at a time.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        """Not set.

        Raises:
            OSError: The system has no descriptor left.
        """
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._loop = loop
        self._callback = callback
        self._at_ns: int | None = None
        self._descriptor = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        loop.add_reader(self._descriptor, self._fire)

    def set(self, at_ns: int) -> None:
        """Arranges a call at `at_ns`, or at once if that time has passed.

        It replaces any time that was set before.
        """
        if at_ns != self._at_ns:
            self._at_ns = at_ns
            self._arm(max(at_ns, 1))

    def close(self) -> None:
        """Gives the descriptor back.

        May be called more than once; nothing else may be called afterwards.
        """
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _arm(self, at_ns: int) -> None:
        seconds, rest = divmod(at_ns, _NS_PER_S)
        if self._libc.timerfd_settime(self._descriptor, _ABSOLUTE, _TIMES.pack(0, 0, seconds, rest), None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")

    def _fire(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it was set anew after it had expired
            os.read(self._descriptor, 8)
            self._at_ns = None
            self._callback()
