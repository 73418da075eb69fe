"""Time of GPU work inside a CUDA graph, and of CPU work by the clock: launches from Python would otherwise be what is measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

REPEATS = 5


def graph_seconds(launches: Sequence[Callable[[], object]], repeats: int = REPEATS) -> list[float]:
    """Seconds per launch of a CUDA graph that holds all of them in order, `repeats` times, after one warm-up of each and of the graph."""
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    torch.cuda.synchronize()
    seconds = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3 / len(launches))
    return seconds


def clock_seconds(launches: Sequence[Callable[[], object]], repeats: int = REPEATS) -> list[float]:
    """The same on a CPU, by the clock."""
    for launch in launches:
        launch()
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for launch in launches:
            launch()
        seconds.append((time.perf_counter() - begin) / len(launches))
    return seconds
