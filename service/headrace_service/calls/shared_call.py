"""One call that carries many generations both ways.

The frame that sessions and KServe's streams share.

Owns the call's two coroutines (one reads the caller's messages, the handler's own writes), what
becomes of the call when either ends, and its part in the watch over slow readers. What the messages
mean, and what is written, is the subclass's.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import AsyncIterator
from typing import Generic

from headrace_service import errors
from headrace_service.calls import failures
from headrace_service.calls.call import Call
from headrace_service.messages.parsing import Request, Unparsed


class SharedCall(abc.ABC, Generic[Request]):
    """The frame of a call that carries many generations: one reader and one writer.

    Also the `Reader` that is watched for being too slow: see there for `writer` and what follows.

    Args:
        call: the call.
        cap_factor: how many single readers' worth of memory may wait for the caller.
    """

    def __init__(self, call: Call, cap_factor: int) -> None:
        self.writer: asyncio.Task[None] | None = None
        self.cap_factor = cap_factor
        self.over_cap_since_ns = 0
        self.writing_since_ns = 0
        self.call = call
        # Why the call must end; set, then woken for.
        self.failure: errors.ServiceError | None = None
        self.closed_by_caller = False
        self.has_room = asyncio.Event()

    @property
    @abc.abstractmethod
    def pending_bytes(self) -> int:
        """Memory that waits for the caller, in bytes."""

    @abc.abstractmethod
    def take(self, request: Request) -> None:
        """Takes one message of the caller's. Raises ServiceError to end the call."""

    @abc.abstractmethod
    def is_full(self) -> bool:
        """Whether nothing more is to be read before `has_room` is set."""

    @abc.abstractmethod
    async def write_until_over(self) -> None:
        """Writes until the caller has closed its side and all has ended.

        Raises `failure` once that is set.
        """

    @abc.abstractmethod
    def wake(self) -> None:
        """Has the writer look again."""

    @abc.abstractmethod
    def note_failure(self, failure: errors.ServiceError) -> None:
        """Tells the generations that have not ended what the call ends with."""

    @abc.abstractmethod
    def give_up(self) -> list[asyncio.Task[None]]:
        """Gives up what still runs, at the end of the call.

        Returns tasks that are then waited for.
        """

    def interrupt(self, failure: errors.ServiceError) -> None:
        """Ends the call now, though its reader may take nothing."""
        self.failure = failure
        self.wake()
        if self.writer is not None:
            self.writer.cancel()

    async def run(self, requests: AsyncIterator[Unparsed[Request]]) -> None:
        """Reads and writes until the call is over.

        Raises:
            ServiceError: `failure`, or a message was malformed.
        """
        self.writer = asyncio.current_task()
        reading = asyncio.create_task(self._read(requests))
        try:
            await self.write_until_over()
            # Reports a mistake of ours in the reader.
            await reading
        except BaseException as error:
            # An interrupted writer fails with whatever grpc makes of a cancelled write; the reason
            # is the call's.
            if self.failure is None and isinstance(error, Exception):
                self.failure = failures.failure_of(self.call.context, error)
            if self.failure is None:
                raise
            self.note_failure(self.failure)
            raise self.failure from None
        finally:
            self.writer = None
            reading.cancel()
            await asyncio.gather(reading, *self.give_up(), return_exceptions=True)

    async def _read(self, requests: AsyncIterator[Unparsed[Request]]) -> None:
        try:
            async for unparsed in requests:
                self.take(unparsed.parse())
                while self.is_full():
                    self.has_room.clear()
                    await self.has_room.wait()
        except errors.ServiceError as failure:
            self.failure = failure
        finally:
            self.closed_by_caller = True
            self.wake()
