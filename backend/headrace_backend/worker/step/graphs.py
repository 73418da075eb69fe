"""CUDA graphs: a step's kernels launched by one call, for the shapes that were captured at
start-up.

Owns capturing, timing and dropping, the memory pool that all graphs share, and the count of
captures. Does not own what is captured (`gpu_runner`) nor which shapes (`shape`). All captures
share one pool: steps run one after the other, so that what one graph computes in passing may lie
where another's did. Only what a step leaves for the next must lie elsewhere.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import torch

from headrace_backend.worker.step.launch_times import DeviceClock, least_times_ms

Key = TypeVar("Key", bound=Hashable)


class StepGraphs:
    """Captured pieces of steps by key, each with what its function returned: tensors that a replay
    fills again.
    """

    def __init__(self, device: torch.device) -> None:
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self.num_captured = 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def capture(self, key: Hashable, run: Callable[[], Any]) -> None:
        """Captures what `run` launches.

        Runs it once before, so that kernels are compiled and libraries have their workspaces.

        Args:
            key: Name of the piece.
            run: Launches work on tensors that stay where they are; must not wait for the device.
        """
        assert key not in self._graphs
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            run()
            self._stream.synchronize()
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
