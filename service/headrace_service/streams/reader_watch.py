"""Readers that do not read: how far behind they may fall, and for how long.

Owns the two limits and the periodic look at all streams. grpc itself holds a write back once a
reader's flow-control window is full, so that memory per stream is the window, one batch being
written, and what is pending here.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from headrace_service import errors

_LOOK_EVERY_S = 0.2


class Reader(Protocol):
    """Whoever may be too slow: the reader of one generation, or of a session.

    Attributes:
        writer: the task that writes to it; None while there is none.
        pending_bytes: memory that what waits for it takes.
        cap_factor: how many times the cap it may take.
        over_cap_since_ns: when it went above its cap; 0: it is not.
        writing_since_ns: when the write that it has not taken yet began; 0: none.
    """

    writer: asyncio.Task[None] | None
    cap_factor: int
    over_cap_since_ns: int
    writing_since_ns: int

    @property
    def pending_bytes(self) -> int:
        """Memory that waits for the reader, in bytes."""

    def interrupt(self, failure: errors.ServiceError) -> None:
        """Ends the call now."""


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

    def broken_by(self, reader: Reader, now_ns: int) -> errors.ServiceError | None:
        """Returns why the call must end, if its reader is too slow.

        Notes when it went above the cap.
        """
        cap_bytes = self.cap_bytes * reader.cap_factor
        if reader.pending_bytes > cap_bytes:
            reader.over_cap_since_ns = reader.over_cap_since_ns or now_ns
            if now_ns - reader.over_cap_since_ns > self.timeout_ns:
                return errors.exhausted(
                    f"client too slow: more than {cap_bytes} bytes waited for over {self.timeout_ns / 1e9:g} s"
                )
        if reader.writing_since_ns and now_ns - reader.writing_since_ns > self.stall_timeout_ns:
            return errors.exhausted(f"client too slow: no message taken for {self.stall_timeout_ns / 1e9:g} s")
        return None


async def watch(readers: Callable[[], Iterable[Reader]], limits: ReaderLimits) -> None:
    """Ends the calls of readers beyond the limits, until cancelled."""
    while True:
        await asyncio.sleep(_LOOK_EVERY_S)
        now_ns = time.monotonic_ns()
        for reader in list(readers()):
            failure = limits.broken_by(reader, now_ns) if reader.writer is not None else None
            if failure is not None:
                reader.interrupt(failure)
