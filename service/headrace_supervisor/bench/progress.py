"""How far a measurement is, on stderr: a bar for each level on a terminal, lines elsewhere.

Owns what is counted: answers where a level ends with so many requests, else its seconds. Draws
seldom enough that the figures of what is measured in this process do not suffer.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Self

from headrace_progress.phase import SECONDS
from headrace_progress.shown import ShownProgress
from headrace_supervisor.bench.load import Load, Point

_TICK_S = 0.5
# What is left of a level whose seconds are over, until its last answer has come.
_LEFT_S = 0.01


class BenchProgress:
    """Levels of a measurement while it is entered."""

    def __init__(self) -> None:
        """Shows nothing yet."""
        self._shown = ShownProgress()
        self._name, self._total, self._answers = "", 0.0, 0
        self._counts_seconds = False

    def __enter__(self) -> Self:
        self._shown.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shown.__exit__(kind, error, trace)

    def on_answer(self) -> None:
        """One more request has ended."""
        self._answers += 1
        if not self._counts_seconds:
            self._shown.update(self._name, self._answers)

    @contextlib.contextmanager
    def warm_up(self, requests: int) -> Iterator[None]:
        """So many requests that do not count are sent."""
        self._begin("warm-up", requests, "requests")
        yield

    @contextlib.asynccontextmanager
    async def level(self, load: Load, point: Point) -> AsyncIterator[None]:
        """One level of the load is measured."""
        self._counts_seconds = load.seconds > 0 and not load.requests
        total, unit = (load.seconds, SECONDS) if self._counts_seconds else (load.requests, "requests")
        self._begin(point.label, total, unit)
        ticking = asyncio.create_task(self._tick()) if self._counts_seconds else None
        try:
            yield
        finally:
            if ticking is not None:
                ticking.cancel()

    def level_done(self, point: Point, words: str) -> None:
        """A level is measured; `words` say what came out."""
        answers = f"{self._answers:,} requests, {words}"
        self._shown.update(self._name, self._total, answers if self._counts_seconds else words)
        self._shown.milestone(f"{point.label}: {answers}")

    def _begin(self, name: str, total: float, unit: str) -> None:
        self._name, self._total, self._answers = name, total, 0
        self._shown.begin(name, total, unit)

    async def _tick(self) -> None:
        begun_s = time.perf_counter()
        while True:
            passed_s = min(time.perf_counter() - begun_s, self._total - _LEFT_S)
            self._shown.update(self._name, passed_s, f"{self._answers:,} answers")
            await asyncio.sleep(_TICK_S)
