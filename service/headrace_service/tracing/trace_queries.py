"""Questions about recent traces, answered by the telemetry process in parts.

Owns the questions that are open and their bounds. A question whose asker has left takes nothing
more in; one whose answer does not come ends UNAVAILABLE.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterator

from headrace_facts import facts
from headrace_service import errors

_MAX_OPEN = 16
_MAX_WAITING_BYTES = 64 << 20
_ANSWER_TIMEOUT_S = 10.0


class _Query:
    """One open question."""

    __slots__ = ("num_bytes", "parts")

    def __init__(self) -> None:
        self.parts: asyncio.Queue[facts.TraceFound | None] = asyncio.Queue()
        self.num_bytes = 0


class TraceQueries:
    """The open questions of one service.

    Args:
        tell: sends a question.
    """

    def __init__(self, tell: Callable[[facts.Fact], None]) -> None:
        self._tell = tell
        self._ids = itertools.count(1)
        self._open: dict[int, _Query] = {}

    async def find(self, key: str) -> AsyncIterator[bytes]:
        """Yields the parts of a trace's TracesData, by request id or trace id.

        None if it is not known.

        Raises:
            ServiceError: RESOURCE_EXHAUSTED, too many questions are open or the trace is too large;
                UNAVAILABLE, no answer came.
        """
        with self._asked(key) as query:
            while True:
                found = await self._next(query)
                if found.part:
                    yield found.part
                if found.last:
                    return

    def answered(self, found: facts.TraceFound) -> None:
        """Takes a part of an answer."""
        query = self._open.get(found.query_id)
        if query is None:
            return
        query.num_bytes += len(found.part)
        if query.num_bytes > _MAX_WAITING_BYTES:
            # The rest is not wanted any more.
            self._open.pop(found.query_id)
            query.parts.put_nowait(None)
        else:
            query.parts.put_nowait(found)

    @contextlib.contextmanager
    def _asked(self, key: str) -> Iterator[_Query]:
        if len(self._open) >= _MAX_OPEN:
            raise errors.exhausted(f"{_MAX_OPEN} questions for traces are open, the most this server allows", 1.0)
        query_id, query = next(self._ids), _Query()
        self._open[query_id] = query
        self._tell(facts.TraceQuery(query_id, key))
        try:
            yield query
        finally:
            self._open.pop(query_id, None)

    async def _next(self, query: _Query) -> facts.TraceFound:
        try:
            found = await asyncio.wait_for(query.parts.get(), _ANSWER_TIMEOUT_S)
        except TimeoutError:
            raise errors.unavailable("the telemetry process does not answer") from None
        if found is None:
            raise errors.exhausted(f"the trace has more than {_MAX_WAITING_BYTES} bytes")
        query.num_bytes -= len(found.part)
        return found
