"""Memory and load of a backend while it works, sampled at a steady pace.

Owns the samples. What they must look like is in `soak_checks`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict

import psutil

from benchmarks.engine_session import EngineSession
from benchmarks.gpu_watch import GpuMemory

_INTERVAL_S = 0.2


class Watch:
    """Samples from `run` until it is cancelled."""

    def __init__(self, session: EngineSession, gpu: GpuMemory | None) -> None:
        """Watches the session's backend, its workers and, unless None, a card."""
        self._session = session
        self._gpu = gpu
        self._begin_s = time.perf_counter()
        # Bytes, by whose they are.
        self.memory: dict[str, list[int]] = defaultdict(list)
        if gpu is not None:
            # Without NVML it stays empty, which is no proof of anything.
            self.memory["gpu"] = []
        self.most_running = 0
        self.most_waiting = 0
        # Seconds from the beginning, and the count, whenever late work was found to have grown.
        self.late_work: list[tuple[float, int]] = []

    async def run(self) -> None:
        """Samples; one that is late, because the event loop was busy, is not made up for."""
        while True:
            # A worker that dies between being seen and being looked at has no memory; that it died
            # is found by its id.
            with contextlib.suppress(psutil.Error):
                self._sample_memory()
            await self._sample_load()
            await asyncio.sleep(_INTERVAL_S)

    def _sample_memory(self) -> None:
        for name, resident in self._session.process.resident_bytes().items():
            self.memory[name].append(resident)
        used = self._gpu.used_bytes if self._gpu else None
        if used is not None:
            self.memory["gpu"].append(used)

    async def _sample_load(self) -> None:
        load = await self._session.load()
        self.most_running = max(self.most_running, load.running_sequences)
        self.most_waiting = max(self.most_waiting, load.waiting_requests)
        if load.late_work != (self.late_work[-1][1] if self.late_work else 0):
            self.late_work.append((round(time.perf_counter() - self._begin_s, 2), int(load.late_work)))
