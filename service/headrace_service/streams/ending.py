"""The end of each attached generation: reported once, whoever ended it.

Owns when the fact is reported. A generation whose reader left is reported when the engine has said
how it ended, which takes a step or two: its subscription is kept so long, without anybody's waiting
for it. How many are kept, and for how long, is bounded; one beyond the bounds is given up, and its
backend reports it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from headrace_service import logs
from headrace_service.streams import generation_fact
from headrace_service.streams.generation_stream import GenerationStream
from headrace_service.tracing.generation_trace import GenerationTrace
from headrace_service.tracing.tracer import Tracer

_log = structlog.get_logger("headrace.service")
_MAX_KEPT = 1024
_KEEP_S = 2.0


class Endings:
    """The generations of one engine on their way out.

    Args:
        tracer: Reports them to the telemetry process.
        leave: gives a subscription up.
    """

    def __init__(self, tracer: Tracer, leave: Callable[[GenerationStream], None]) -> None:
        self._tracer = tracer
        self._leave = leave
        self._kept: dict[GenerationStream, asyncio.TimerHandle] = {}
        self._none_kept = asyncio.Event()
        self._none_kept.set()

    def keeps(self, stream: GenerationStream) -> bool:
        """Whether a stream has no reader any more, and is here to hear how it ended."""
        return stream in self._kept

    async def all_reported(self) -> None:
        """Returns when no generation is kept any more.

        That takes at most the time for which one may be kept.
        """
        await self._none_kept.wait()

    def ended(self, stream: GenerationStream) -> None:
        """Reports a generation that expects nothing more of the engine."""
        trace = stream.trace
        if trace is None:
            return
        # Once; and one that the engine never took was none.
        stream.trace = None
        if trace.accepted or stream.done is not None:
            self._tell(stream, trace)

    def keep(self, stream: GenerationStream) -> bool:
        """Keeps the subscription of a reader who left; returns False if it is not kept.

        It stays until the engine has said how its generation ended.
        """
        if stream.trace is None or len(self._kept) >= _MAX_KEPT:
            return False
        # The caller's failure is not the subscription's.
        stream.trace.failure, stream.failure = stream.failure or stream.trace.failure, None
        self._kept[stream] = asyncio.get_running_loop().call_later(_KEEP_S, self._give_up, stream)
        self._none_kept.clear()
        stream.listener = self._look
        if stream.trace.call is not None:
            stream.trace.call.generation_kept()
        return True

    def _look(self, stream: GenerationStream) -> None:
        if stream.done is not None or stream.failure is not None:
            self._kept[stream].cancel()
            trace = stream.trace
            self.ended(stream)
            self._forget(stream, trace)

    def _give_up(self, stream: GenerationStream) -> None:
        self._leave(stream)
        self._forget(stream, stream.trace)

    def _forget(self, stream: GenerationStream, trace: GenerationTrace | None) -> None:
        del self._kept[stream]
        if not self._kept:
            self._none_kept.set()
        stream.listener = None
        if trace is not None and trace.call is not None:
            trace.call.generation_reported()

    def _tell(self, stream: GenerationStream, trace: GenerationTrace) -> None:
        tracer = self._tracer
        try:
            fact = generation_fact.of(stream, trace, time.monotonic_ns(), tracer.unix_offset_ns)
        except Exception as error:
            # This runs in the midst of calls, and where the engine's messages are dealt out: a
            # mistake of ours here must end neither.
            _log.error("telemetry.not_reported", exception_type=type(error).__name__, places=logs.places(error))
            return
        tracer.tell(fact)
