"""CUDA graphs: one call launches a step's kernels, for the shapes captured at start-up.

Owns capturing, timing and dropping, the memory pool that all graphs share, and the count of
captures. Does not own what is captured (`gpu_runner`) nor which shapes (`shape`). All captures
share one pool: steps run one after the other, so that what one graph computes in passing may lie
where another's did. Only what a step leaves for the next must lie elsewhere.

Graphs are timed in a few rounds over all launches, and the least time of each counts. Nothing is
waited for between two launches, so that the host's part is hidden behind the device's:

    mark  launch A  mark  launch B  mark ... mark  launch A  mark ...  ->  times between marks
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Protocol, TypeVar

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


class StepGraphs:
    """Captured pieces of steps by key, each with what its function returned.

    Tensors that a replay fills again.
    """

    def __init__(self, device: torch.device) -> None:
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self.num_captured = 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def prepare(self, run: Callable[[], Any]) -> None:
        """Runs what is captured later, or all that is in it once, where it will be captured.

        Kernels are loaded then, and libraries have their workspaces, neither of which can be
        captured. `run` is as for `capture`.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            run()
            self._stream.synchronize()

    def capture(self, key: Hashable, run: Callable[[], Any]) -> None:
        """Captures what `run` launches, none of which runs.

        Args:
            key: Name of the piece.
            run: Launches work on tensors that stay where they are; must not wait for the device.
                It has been prepared.
        """
        assert key not in self._graphs
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            graph = torch.cuda.CUDAGraph()
            # A collection in the middle would free tensors of graphs, which is no operation that
            # can be captured.
            gc.disable()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = run()
            finally:
                graph.capture_end()
                gc.enable()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._graphs[key] = graph, outputs
        self.num_captured += 1

    def replay(self, key: Hashable) -> Any:
        """Launches a captured piece; gives what its function returned."""
        graph, outputs = self._graphs[key]
        graph.replay()
        return outputs

    def times_ms(self, launches: Mapping[Key, Callable[[], None]]) -> dict[Key, float]:
        """How long the device takes for each of the launches, of replays and what they need."""
        return least_times_ms(launches, DeviceClock(self._device))

    def drop(self, key: Hashable) -> None:
        """Forgets a piece. Its own memory goes back to the driver, its tensors' to the pool."""
        graph, _ = self._graphs.pop(key)
        graph.reset()
