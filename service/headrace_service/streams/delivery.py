"""A stream's events to its reader: the writer of one call.

Owns the loop between `GenerationStream` and the call's `write`, and the end of the call in all its
ways. One coroutine per call, the handler's own: a task more per stream would cost a wake-up per
token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from headrace_service import errors
from headrace_service.streams.generation_stream import GenerationStream
from headrace_service.tracing.recording import WAITING_CHANGED

# Takes one message to the caller; returns when the transport has room for the next.
Write = Callable[[bytes], Awaitable[None]]


async def deliver(stream: GenerationStream, write: Write) -> None:
    """Writes everything up to the request's end.

    Raises:
        ServiceError: the subscription failed, or its reader is too slow; what had arrived before a
            failure has been written.
        asyncio.CancelledError: the caller left.
    """
    stream.writer = asyncio.current_task()
    try:
        await _write_until_ended(stream, write)
        if stream.failure is not None:
            raise stream.failure
        if stream.hit_deadline and stream.deadline_is_status:
            raise errors.deadline_exceeded()
        last = stream.take_done()
        if last is not None:
            await _write_last(stream, write, last)
    except BaseException:
        # An interrupted writer fails with whatever grpc makes of a cancelled write; the reason is
        # the stream's.
        if stream.failure is not None:
            raise stream.failure from None
        raise
    finally:
        stream.writer = None


async def _write_until_ended(stream: GenerationStream, write: Write) -> None:
    """Flat, because every message passes here."""
    clock_ns, waited, noted_waiting = time.monotonic_ns, True, True
    recorded_ns = stream.recording.began_ns if stream.recording is not None else None
    while True:
        if stream.has_news:
            for message in stream.take():
                began_ns = stream.writing_since_ns = clock_ns()
                await write(message)
                stream.writing_since_ns = 0
                if recorded_ns is not None:
                    if waited is not noted_waiting:
                        noted_waiting = waited
                        recorded_ns.append(WAITING_CHANGED)
                    recorded_ns.append(began_ns)
                    waited = False
                if stream.at_edge:
                    stream.wrote(began_ns, clock_ns())
        elif stream.done is None and stream.failure is None:
            await stream.news()
            waited = True
        else:
            return


async def _write_last(stream: GenerationStream, write: Write, message: bytes) -> None:
    began_ns = stream.writing_since_ns = time.monotonic_ns()
    await write(message)
    stream.writing_since_ns = 0
    stream.clock.wrote(began_ns, time.monotonic_ns())
