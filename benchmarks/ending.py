"""How a benchmark ends before it is through: by its own clock, or by SIGTERM or SIGINT.

Either way what was measured is written. Owns the three signals and the reason. A process has one
set of handlers, so it has one `Ending`. Only the first end counts: what follows it, at most the 30
s in which a backend stops, is not cut short again.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import types
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Self, TypeVar

T = TypeVar("T")

_SIGNALS = {
    signal.SIGALRM: "the time of --limit-s is over",
    signal.SIGTERM: "ended by SIGTERM",
    signal.SIGINT: "ended by SIGINT",
}


class CutShort(Exception):
    """The benchmark ends now; the message says why."""


class Ending:
    """Has the block end by CutShort: wherever it is, or in `during` by cancellation.

    Args:
        limit_s: seconds of wall time for the block.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._why = ""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._raise) for number in _SIGNALS}
        signal.setitimer(signal.ITIMER_REAL, self._limit_s)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _raise(self, number: int, _: types.FrameType | None) -> None:
        if self._is_first(number):
            raise CutShort(self._why)

    def _is_first(self, number: int) -> bool:
        is_first = not self._why
        self._why = self._why or _SIGNALS[signal.Signals(number)]
        return is_first

    async def during(self, work: Callable[[Ending], Coroutine[Any, Any, T]]) -> T:
        """Awaits work in the running event loop.

        There the end cancels this task, and raises nothing.
        """
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def cancel(number: int) -> None:
            if self._is_first(number):
                task.cancel()

        for number in _SIGNALS:
            loop.add_signal_handler(number, cancel, number)
        try:
            with self.told_apart():
                return await work(self)
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)
                signal.signal(number, self._raise)

    @contextlib.contextmanager
    def told_apart(self) -> Iterator[None]:
        """Has a cancellation by the end leave the block as CutShort; the task may then go on.

        Any other cancellation stays what it is.
        """
        try:
            yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._why or task is None or not task.cancelling():
                raise
            task.uncancel()
            raise CutShort(self._why) from None
