"""Keeps workers alive: start, watchdog, replacement with backoff, and giving up.

Owns the decision what a lost worker means: the engine preempts everything and goes on with new workers, unless the model is at fault or
workers die too often. Too little memory is the model's fault only if it never fitted: later, what an earlier life held may not be given back yet. Deaths that bring the engine closer to a request that causes them (`engine.isolation`) are not counted. Does not own the processes of one life (`worker_group`).

The watchdog's sign of progress is a record from any rank, or a plan pushed to idle workers. A single step that takes longer than `watchdog_s` therefore looks
like a hang: where a prefill chunk of `max_num_batched_tokens` takes that long (a large model on a slow CPU), lower the one or raise the other.
Time in which this process itself did not run (stopped, suspended) does not count.
"""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Callable, Sequence

import msgspec

from headrace_backend.engine.answers import LossOutcome
from headrace_backend.server.engine_loop import EngineLoop
from headrace_backend.server.health import Health
from headrace_backend.server.logs import get_logger
from headrace_backend.server.worker_group import WorkerGroup, WorkerLaunch, WorkersLost
from headrace_backend.worker_messages import WorkerReady

_WINDOW_S = 60.0
_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 5.0
_SHUTDOWN_GRACE_S = 3.0


class ModelRefused(Exception):
    """The workers can't use the model folder or the configuration; a restart can't help.

    `does_not_fit`: the memory is what is too small.
    """

    def __init__(self, reason: str, *, does_not_fit: bool = False) -> None:
        super().__init__(reason)
        self.does_not_fit = does_not_fit


class WorkersGivenUp(Exception):
    """Workers died too often within a minute."""


class EngineStuck(Exception):
    """The engine has work, nothing is in flight, and it plans nothing."""


class _Watchdog:
    """How long nothing moved, in time that this process was running."""

    def __init__(self, engine_loop: EngineLoop, group: WorkerGroup, period_s: float) -> None:
        self._engine_loop = engine_loop
        self._group = group
        self._period_s = period_s
        self._seen = self._marks()
        self._checked_s = time.monotonic()
        self.stalled_s = 0.0

    def _marks(self) -> tuple[int, int]:
        return self._group.num_records, self._engine_loop.num_plans

    def check(self) -> float:
        """Seconds without progress although there is work."""
        now = time.monotonic()
        elapsed, self._checked_s = min(now - self._checked_s, 2 * self._period_s), now
        marks = self._marks()
        if marks != self._seen or not self._engine_loop.has_work:
            self.stalled_s = 0.0
        else:
            self.stalled_s += elapsed
        self._seen = marks
        return self.stalled_s


class WorkerSupervision:
    """Runs one worker group after the other."""

    def __init__(
        self,
        launch: WorkerLaunch,
        engine_loop: EngineLoop,
        health: Health,
        on_ready: Callable[[WorkerReady], None],
    ) -> None:
        """`on_ready` gets what rank 0 says when all are ready, with the number of blocks that all ranks have."""
        self._launch = launch
        self._engine_loop = engine_loop
        self._health = health
        self._log = get_logger()
        self._deaths: collections.deque[float] = collections.deque()
        self._on_ready = on_ready
        self._was_ready = False

    async def run(self) -> None:
        """Never returns. Cancel it to end the workers.

        Raises:
            ModelRefused: The workers refuse model or configuration; for too little memory only before they were ever ready.
            WorkersGivenUp: `max_worker_restarts` deaths within a minute (0 gives up at the first, as 1 does).
            EngineStuck: See there.
        """
        while True:
            try:
                await self._one_life()
            except WorkersLost as lost:
                await self._after_death(lost)

    async def _one_life(self) -> None:
        """Raises WorkersLost, EngineStuck, or what cancels it."""
        group = self._new_group()
        grace_s = 0.0
        try:
            await self._start(group)
            grace_s = _SHUTDOWN_GRACE_S
            await self._watch(group)
        except WorkersLost as lost:
            # Streams learn it before the stacks are dumped and the processes are gone.
            self._health.set_not_serving("restarting worker")
            self._note_outcome(self._engine_loop.workers_lost(lost.failed_step_id))
            self._log.error("worker lost", reason=str(lost), pids=group.pids)
            grace_s = 0.0
            if lost.hung:
                await group.dump_stacks()
            raise
        finally:
            await group.close(grace_s)

    def _new_group(self) -> WorkerGroup:
        """Raises WorkersLost: there is nothing to make it of, descriptors for one."""
        try:
            return WorkerGroup(self._launch, self._engine_loop.on_results)
        except OSError as error:
            lost = WorkersLost(f"workers could not be started: {error.strerror}")
            self._log.error("worker lost", reason=str(lost), pids=[])
            raise lost from error

    def _note_outcome(self, outcome: LossOutcome) -> None:
        """Deaths on the way to the request that caused them end with it: they say nothing about the next life."""
        if outcome.closer:
            self._deaths.clear()
        if outcome.guilty_request_id:
            self._log.error("request ended that made steps fail", request_id=outcome.guilty_request_id)

    async def _start(self, group: WorkerGroup) -> None:
        started_s = time.monotonic()
        ready = await group.wait_ready()
        num_blocks = min(message.num_blocks for message in ready)
        self._log.info(
            "workers ready",
            pids=group.pids,
            device=ready[0].device,
            num_blocks=num_blocks,
            start_s=round(time.monotonic() - started_s, 3),
            phases_s={phase: round(seconds, 3) for phase, seconds in ready[0].phases_s.items()},
            load_gb_s=round(ready[0].load_gb_s, 2),
            captured_mixed_sizes=ready[0].captured_mixed_sizes,
        )
        on_gpu = ready[0].device.startswith("cuda")
        captured = ready[0].captured_mixed_sizes
        self._engine_loop.workers_ready(group.send_plan, num_blocks, on_gpu, captured, group.max_plan_bytes)
        self._on_ready(_together(ready, num_blocks))
        self._health.set_serving()
        self._was_ready = True

    async def _watch(self, group: WorkerGroup) -> None:
        """Raises WorkersLost or EngineStuck; returns never."""
        watchdog_s = self._launch.config.watchdog_s
        period_s = min(0.5, watchdog_s / 20)
        watchdog = _Watchdog(self._engine_loop, group, period_s)
        while True:
            await asyncio.wait([group.lost], timeout=period_s)
            if group.lost.done():
                group.lost.result()
            group.look_for_oom_kills()
            if watchdog.check() < watchdog_s:
                continue
            if self._engine_loop.num_in_flight == 0:
                raise EngineStuck(f"the engine has work and planned nothing for {watchdog_s:g} s")
            raise WorkersLost(f"no step result for {watchdog_s:g} s{group.late_ranks()}", hung=True)

    async def _after_death(self, lost: WorkersLost) -> None:
        """Waits before the next life, or raises if there is none."""
        if lost.invalid_model and not (lost.does_not_fit and self._was_ready):
            raise ModelRefused(str(lost), does_not_fit=lost.does_not_fit) from lost
        now = time.monotonic()
        self._deaths.append(now)
        while now - self._deaths[0] > _WINDOW_S:
            self._deaths.popleft()
        count = len(self._deaths)
        if count >= max(self._launch.config.max_worker_restarts, 1):
            raise WorkersGivenUp(f"{count} worker deaths within {_WINDOW_S:g} s; the last: {lost}") from lost
        await asyncio.sleep(min(_FIRST_BACKOFF_S * 2 ** (count - 1), _MAX_BACKOFF_S))


def _together(ready: Sequence[WorkerReady], num_blocks: int) -> WorkerReady:
    """What rank 0 says, with the rates that all ranks have together."""
    copy_bytes_per_s = sum(message.copy_bytes_per_s for message in ready)
    matmul_flops_per_s = sum(message.matmul_flops_per_s for message in ready)
    return msgspec.structs.replace(
        ready[0], num_blocks=num_blocks, copy_bytes_per_s=copy_bytes_per_s, matmul_flops_per_s=matmul_flops_per_s
    )
