"""The newest load report of this service, kept fresh while somebody reads reports.

Owns when engines are asked: once a second for as long as a stream of reports is open or a report
was wanted within the last minute, so that a service that nobody asks costs its engines nothing.
What the answers come to is `load_window`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from headrace_protos.engine.v1 import engine_pb2
from headrace_service import errors
from headrace_service.engines.served_model import ServedModel
from headrace_service.load_reports.load_window import LoadWindow

EVERY_S: Final = 1.0
_UNWANTED_NS: Final = 60_000_000_000
_ANSWER_TIMEOUT_S: Final = 1.0


class LoadWatch:
    """Asks the engines for their load, and keeps the report.

    Args:
        engines: returns the engines of this service as they are now.
    """

    def __init__(self, engines: Callable[[], Iterable[ServedModel]]) -> None:
        self._engines = engines
        self._report: bytes | None = None
        self._wanted_at_ns = 0
        self._num_streams = 0
        self._wanted = asyncio.Event()
        # Set at each look at the engines, and replaced.
        self._looked = asyncio.Event()

    def newest(self) -> bytes | None:
        """Returns the newest report, an OrcaLoadReport serialized.

        None before the engines were asked, and while none of them answers. Has them asked for the
        next minute.
        """
        self._wanted_at_ns = time.monotonic_ns()
        self._wanted.set()
        return self._report

    @contextlib.contextmanager
    def streaming(self) -> Iterator[None]:
        """Has the engines asked for as long as this lasts, however seldom a report is read."""
        self._num_streams += 1
        try:
            yield
        finally:
            self._num_streams -= 1

    async def first(self) -> bytes | None:
        """Returns the newest report, after the engines were asked if they have not been yet."""
        report = self.newest()
        if report is None:
            await self._looked.wait()
            report = self._report
        return report

    async def run(self) -> None:
        """Asks the engines whenever reports are wanted, until cancelled."""
        while True:
            await self._wanted.wait()
            window = LoadWindow()
            while self._num_streams or time.monotonic_ns() - self._wanted_at_ns < _UNWANTED_NS:
                await self._look(window)
                await asyncio.sleep(EVERY_S)
            self._wanted.clear()
            self._report = None

    async def _look(self, window: LoadWindow) -> None:
        loads = await _loads(self._engines())
        self._report = window.add(time.monotonic_ns(), loads).SerializeToString() if loads else None
        looked, self._looked = self._looked, asyncio.Event()
        looked.set()


async def _loads(engines: Iterable[ServedModel]) -> dict[str, engine_pb2.Load]:
    """Returns the loads of the engines that answer in time, by address."""
    asked = [engine for engine in engines if engine.is_reachable and not engine.left_out]
    answers = await asyncio.gather(*map(_load, asked))
    return {engine.address: answer for engine, answer in zip(asked, answers, strict=True) if answer is not None}


async def _load(engine: ServedModel) -> engine_pb2.Load | None:
    try:
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            return await engine.engine.load()
    except (errors.ServiceError, TimeoutError):
        return None
