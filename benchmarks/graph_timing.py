"""Time of GPU work inside a CUDA graph, and of CPU work by the clock.

Launches from Python would otherwise be what is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

REPEATS = 5
# Before the first reading, for the clocks to rise; and of each reading, for the events' resolution.
_WARM_S = 0.02
_READING_S = 0.003


def _replays_seconds(graph: torch.cuda.CUDAGraph, count: int) -> float:
    """Seconds of `count` replays in a row."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def graph_seconds(launches: Sequence[Callable[[], object]], repeats: int = REPEATS) -> list[float]:
    """Seconds per launch of a CUDA graph that holds all of them in order, `repeats` readings.

    Each launch and the graph are warmed up before.
    """
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    once_s = max(_replays_seconds(graph, 1), 1e-6)
    _replays_seconds(graph, max(1, int(_WARM_S / once_s)))
    count = max(1, int(_READING_S / once_s))
    return [_replays_seconds(graph, count) / count / len(launches) for _ in range(repeats)]


def clock_seconds(launches: Sequence[Callable[[], object]], repeats: int = REPEATS) -> list[float]:
    """Seconds per launch on a CPU, by the clock."""
    for launch in launches:
        launch()
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for launch in launches:
            launch()
        seconds.append((time.perf_counter() - begin) / len(launches))
    return seconds
