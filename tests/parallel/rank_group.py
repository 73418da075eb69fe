"""Real workers of several ranks under one `WorkerGroup`, driven by plans made by hand."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from tests.support.processes import alive

from headrace_backend.config import EngineConfig
from headrace_backend.server.workers.host_ranks import WorkerLaunch
from headrace_backend.server.workers.worker_group import WorkerGroup, WorkersLost
from headrace_backend.server.workers.worker_process import DEFAULT_WORKER_COMMAND
from headrace_backend.step.plan import StepPlan, StepResult

# Of what must come at all.
LIMIT_S = 240.0


class Ranks:
    """A group, and what its rank 0 answered."""

    def __init__(self, model: pathlib.Path, command: tuple[str, ...] = DEFAULT_WORKER_COMMAND, **engine: Any) -> None:
        values = {"device": "cpu", "worker_threads": 1, "dtype": "fp32", "num_blocks": 64, "max_num_seqs": 8, **engine}
        self.results: list[StepResult] = []
        self.closed = False
        launch = WorkerLaunch(EngineConfig(model=model, **values), 256, command)
        self.group = WorkerGroup(launch, self._take)
        self.processes = list(self.group.pids)

    def _take(self, payloads: list[bytes], drafts: list[bytes]) -> None:
        self.results += [StepResult.decode(payload) for payload in payloads]

    async def end(self) -> list[int]:
        """Asks all ranks to end; their exit codes."""
        exits = [worker.exited for worker in self.group._workers]
        self.closed = True
        await self.group.close(grace_s=LIMIT_S)
        return [exited.result() for exited in exits]

    async def answered(self, plans: Sequence[StepPlan]) -> list[StepResult]:
        """Results of plans that are sent together."""
        expected = len(self.results) + len(plans)
        for plan in plans:
            assert self.group.send_plan(plan.encode())
        await self.until(lambda: len(self.results) >= expected)
        return self.results[-len(plans) :]

    async def until(self, condition: Callable[[], Any]) -> None:
        """Waits for a condition; the group must live meanwhile."""
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                if self.group.lost.done():
                    self.group.lost.result()
                await asyncio.sleep(0.005)

    async def loss(self) -> WorkersLost:
        """How the group is lost."""
        async with asyncio.timeout(LIMIT_S):
            await asyncio.wait([self.group.lost])
        error = self.group.lost.exception()
        assert isinstance(error, WorkersLost)
        return error


@contextlib.asynccontextmanager
async def ranks(model: pathlib.Path, tp: int, **options: Any) -> AsyncIterator[Ranks]:
    """A group of so many ranks; nothing of it may be left."""
    started = Ranks(model, tp=tp, **options)
    try:
        yield started
    finally:
        if not started.closed:
            await started.group.close(grace_s=0)
        assert not alive(started.processes)
