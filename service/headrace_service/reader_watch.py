"""Readers that do not read: how far behind they may fall, and for how long.

Owns the two limits and the periodic look at all streams. grpc itself holds a write back once a reader's flow-control window is full, so
that memory per stream is the window, one batch being written, and what is pending here.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterable

from headrace_service import errors
from headrace_service.generation_stream import GenerationStream

_LOOK_EVERY_S = 0.2


@dataclasses.dataclass(frozen=True, slots=True)
class ReaderLimits:
    """How slow a reader may be.

    Attributes:
        cap_bytes: memory that its pending tokens may take.
        timeout_ns: how long it may stay above that.
        stall_timeout_ns: how long it may leave one message untaken.
    """

    cap_bytes: int
    timeout_ns: int
    stall_timeout_ns: int

    def broken_by(self, stream: GenerationStream, now_ns: int) -> errors.ServiceError | None:
        """Returns why the stream must end, if its reader is too slow; notes when it went above the cap."""
        if stream.pending_bytes > self.cap_bytes:
            stream.over_cap_since_ns = stream.over_cap_since_ns or now_ns
            if now_ns - stream.over_cap_since_ns > self.timeout_ns:
                return errors.exhausted(
                    f"client too slow: more than {self.cap_bytes} bytes waited for over {self.timeout_ns / 1e9:g} s"
                )
        if stream.writing_since_ns and now_ns - stream.writing_since_ns > self.stall_timeout_ns:
            return errors.exhausted(f"client too slow: no message taken for {self.stall_timeout_ns / 1e9:g} s")
        return None


async def watch(streams: Callable[[], Iterable[GenerationStream]], limits: ReaderLimits) -> None:
    """Ends the calls of readers beyond the limits, until cancelled."""
    while True:
        await asyncio.sleep(_LOOK_EVERY_S)
        now_ns = time.monotonic_ns()
        for stream in list(streams()):
            failure = limits.broken_by(stream, now_ns) if stream.writer is not None else None
            if failure is not None:
                stream.interrupt(failure)
