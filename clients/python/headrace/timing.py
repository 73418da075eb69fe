"""Times of a stream as its reader sees them: first token, gaps between tokens, rate.

Owns the measuring of one stream. Does not print (cli/ledger_table.py) and knows nothing of the
server's own ledger. Events go in with the clock's reading, figures in seconds come out.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator

from headrace.events import Delta, Event


class StreamTimer:
    """Measures one stream from its creation on.

    Wrap the stream's iteration with observe or observe_async.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._start = clock()
        self._first: float | None = None
        self._last: float | None = None
        self._last_of_output: dict[int, float] = {}
        self._gaps: list[tuple[float, int]] = []
        self.tokens = 0

    def observe(self, events: Iterable[Event]) -> Iterator[Event]:
        """Passes events on and notes when their tokens came."""
        for event in events:
            self.note(event)
            yield event

    async def observe_async(self, events: AsyncIterable[Event]) -> AsyncIterator[Event]:
        """Does what observe does, for an async iterator."""
        async for event in events:
            self.note(event)
            yield event

    def note(self, event: Event) -> None:
        """Takes one event at its arrival; only deltas with tokens count."""
        if not isinstance(event, Delta) or not event.token_ids:
            return
        now = self._clock()
        previous = self._last_of_output.get(event.output_index)
        if previous is not None:
            # Tokens that arrive together share the gap evenly.
            self._gaps.append(((now - previous) / len(event.token_ids), len(event.token_ids)))
        self._first = now if self._first is None else self._first
        self._last = self._last_of_output[event.output_index] = now
        self.tokens += len(event.token_ids)

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token; None where none came."""
        return None if self._first is None else self._first - self._start

    def itl(self, quantile: float) -> float | None:
        """Returns the inter-token latency in seconds at a quantile (0 to 1, nearest rank).

        It is None below two deltas of an output.
        """
        rank = math.ceil(quantile * sum(tokens for _, tokens in self._gaps))
        for gap, tokens in sorted(self._gaps):
            rank -= tokens
            if rank <= 0:
                return gap
        return None

    @property
    def tokens_per_second(self) -> float | None:
        """Output tokens over the time from the start to the last one; None where none came."""
        return None if self._last is None else self.tokens / (self._last - self._start)
