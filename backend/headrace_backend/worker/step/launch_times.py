"""How long the device takes for what is launched: a few rounds over all launches, the least of
each.

Owns the rounds and the device's clock. Knows neither graphs nor shapes (`graphs`,
`gpu_runner`). Nothing is waited for between two launches, so that the host's part is hidden behind
the device's.

    mark  launch A  mark  launch B  mark ... mark  launch A  mark ...  ->  times between marks
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping
from typing import Protocol, TypeVar

import torch

# A first replay brings its graph to the card; a second need not.
_ROUNDS = 2

Key = TypeVar("Key", bound=Hashable)


class Clock(Protocol):
    """Marks between launches."""

    def mark(self) -> None:
        """Notes when the device is done with what was launched so far."""

    def intervals_ms(self) -> list[float]:
        """Waits for the device; the times between marks that follow each other."""


class DeviceClock:
    """A GPU's own clock, on its current stream."""

    def __init__(self, device: torch.device) -> None:
        """No mark yet."""
        self._stream = torch.cuda.current_stream(device)
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        """Notes when the device is done with what was launched so far."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        self._events.append(event)

    def intervals_ms(self) -> list[float]:
        """Waits for the device; the times between marks that follow each other."""
        self._stream.synchronize()
        return [before.elapsed_time(after) for before, after in itertools.pairwise(self._events)]


def least_times_ms(launches: Mapping[Key, Callable[[], object]], clock: Clock) -> dict[Key, float]:
    """The least time of each launch over the rounds.

    Args:
        launches: Each puts work on the clock's stream and waits for nothing.
        clock: Without marks.
    """
    order = list(launches) * _ROUNDS
    clock.mark()
    for key in order:
        launches[key]()
        clock.mark()
    times: dict[Key, float] = {}
    for key, time_ms in zip(order, clock.intervals_ms(), strict=True):
        times[key] = min(time_ms, times.get(key, time_ms))
    return times
