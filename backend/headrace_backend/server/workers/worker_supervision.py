"""Keeps workers alive: start, watchdog, replacement with backoff, and giving up.

Owns the decision what a lost worker means: the engine preempts everything and goes on with new
workers, unless the model is at fault or workers are lost too often (`worker_losses`). Too little
memory is the model's fault only if it never fitted: later, what an earlier life held may not be
given back yet. The engine suspects whoever was being computed when a worker failed, hung or died
(`engine.isolation`), unless the end came from outside: by a signal that no step brings upon itself,
or to a process that somebody stopped. A worker whose step raised and that works all the same is
kept. Does not own the processes of one life (`worker_group`).

The watchdog's sign of progress is a record from any rank, a plan pushed to idle workers, or a mark
on the board (`rank_board`), of which a step on a CPU sets one with each layer. A worker may be
without one for `watchdog_s`, and for several times what the time between two marks is expected to
be (`engine.step_time`): a long step is no hang. Time in which this process itself did not run
(stopped, suspended) does not count.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from headrace_backend.engine.answers import LossOutcome
from headrace_backend.server.engine_loop import EngineLoop
from headrace_backend.server.health import Health
from headrace_backend.server.logs import get_logger
from headrace_backend.server.workers.host_ranks import WorkerLaunch
from headrace_backend.server.workers.other_hosts import HostsMissing, OtherHost, OtherHosts
from headrace_backend.server.workers.readiness import phases_by_rank, together
from headrace_backend.server.workers.worker_group import WorkerGroup, WorkersLost
from headrace_backend.server.workers.worker_losses import WorkerLosses
from headrace_backend.step.messages import StepRaised, WorkerReady

# A step may take so many times what it is expected to take, beyond `watchdog_s`.
_PATIENCE = 4.0
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
    """Measures how long nothing moved, in time that this process was running."""

    def __init__(self, engine_loop: EngineLoop, group: WorkerGroup, watchdog_s: float, marks_per_step: int) -> None:
        self._engine_loop = engine_loop
        self._group = group
        self._watchdog_s = watchdog_s
        self._marks_per_step = marks_per_step
        # Between two looks.
        self.period_s = min(0.5, watchdog_s / 20)
        self._seen = self._marks()
        self._checked_s = time.monotonic()
        self.stalled_s = 0.0

    def _marks(self) -> tuple[int, ...]:
        return (self._engine_loop.num_plans, *self._group.progress())

    def is_too_long(self) -> bool:
        """Whether there is work and was no progress for longer than a step may take."""
        expected_s = self._engine_loop.expected_step_s / self._marks_per_step
        return self._stall() >= self._watchdog_s + _PATIENCE * expected_s

    def _stall(self) -> float:
        """Seconds without progress although there is work."""
        now = time.monotonic()
        elapsed, self._checked_s = min(now - self._checked_s, 2 * self.period_s), now
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
        hosts: OtherHosts | None = None,
    ) -> None:
        """Starts to watch over workers.

        Args:
            launch: How workers are started.
            engine_loop: Driver of the engine.
            health: The engine's state.
            on_ready: Gets what the ranks are together when all are ready (`readiness`).
            hosts: The other hosts that have ranks; None: all are on this one.
        """
        self._hosts = hosts
        self._launch = launch
        self._engine_loop = engine_loop
        self._health = health
        self._log = get_logger()
        self._losses = WorkerLosses()
        self._on_ready = on_ready
        self._was_ready = False
        # What the workers of this life said when they were ready; None: they are not.
        self._ready: WorkerReady | None = None
        # Whether the life that ended settled a step, or had none to compute.
        self._fruitful = False

    async def run(self) -> None:
        """Never returns. Cancel it to end the workers.

        Raises:
            ModelRefused: The workers refuse model or configuration; for too little memory only
                before they were ever ready.
            WorkersGivenUp: `max_worker_restarts` deaths within a minute, or in a row without a step
                in between (0 gives up at the first, as 1 does); or hosts are missing for too long.
            EngineStuck: The engine has work, nothing is in flight, and it plans nothing.
        """
        while True:
            try:
                await self._one_life()
            except WorkersLost as lost:
                await self._after_death(lost)

    async def _one_life(self) -> None:
        """Starts a group and watches it; raises WorkersLost, EngineStuck, or what cancels it."""
        self._fruitful = False
        group = self._new_group(await self._gathered())
        grace_s, num_settled = 0.0, self._engine_loop.num_settled_steps
        try:
            await self._start(group)
            grace_s = _SHUTDOWN_GRACE_S
            await self._watch(group)
        except WorkersLost as lost:
            # Streams learn it before the stacks are dumped and the processes are gone.
            self._health.set_not_serving("restarting worker")
            if self._ready is not None:
                is_idle = self._engine_loop.num_in_flight == 0 and not lost.failed_step_id
                self._fruitful = is_idle or self._engine_loop.num_settled_steps != num_settled
            blamed_step_id = None if lost.from_outside else lost.failed_step_id or group.begun_step_id
            self._note_outcome(self._engine_loop.workers_lost(blamed_step_id))
            # What is refused ends the process, which then says why.
            level = logging.DEBUG if self._is_refusal(lost) else logging.ERROR
            self._log.log(level, "worker lost", reason=str(lost), pids=group.pids)
            grace_s, self._ready = 0.0, None
            if lost.hung:
                await group.dump_stacks()
            raise
        finally:
            await group.close(grace_s)

    async def _gathered(self) -> Sequence[OtherHost]:
        """The other hosts, when all are there. Raises WorkersGivenUp if they do not come."""
        if self._hosts is None:
            return ()
        try:
            return await self._hosts.gathered(self._health.set_not_serving)
        except HostsMissing as missing:
            raise WorkersGivenUp(str(missing)) from missing

    def _new_group(self, others: Sequence[OtherHost]) -> WorkerGroup:
        """Raises WorkersLost: there is nothing to make it of, descriptors for one."""
        try:
            ranks = self._hosts.new_meeting() if self._hosts is not None else None
            return WorkerGroup(self._launch, self._engine_loop.on_results, ranks, others)
        except OSError as error:
            lost = WorkersLost(f"workers could not be started: {error.strerror or error}")
            self._log.error("worker lost", reason=str(lost), pids=[])
            raise lost from error

    def _note_outcome(self, outcome: LossOutcome) -> None:
        """Forgets earlier losses when the request that caused them has ended.

        They say nothing about the next life.
        """
        if outcome.closer:
            self._losses.explained()
        if outcome.guilty_request_id:
            self._log.error("request ended that made steps fail", request_id=outcome.guilty_request_id)

    async def _start(self, group: WorkerGroup) -> None:
        started_s = time.monotonic()
        ready = await group.wait_ready()
        self._ready = together(ready, self._launch.config.tp)
        phases = phases_by_rank(ready)
        self._log.info(
            "workers ready",
            pids=group.pids,
            device=ready[0].device,
            num_blocks=self._ready.num_blocks,
            start_s=round(time.monotonic() - started_s, 3),
            phases_s={phase: seconds[0] for phase, seconds in phases.items()},
            **({"phases_s_by_rank": phases} if len(ready) > 1 else {}),
            load_gb_s=round(ready[0].load_gb_s, 2),
            captured_mixed_sizes=ready[0].captured_mixed_sizes,
        )
        self._take_plans(group)
        self._on_ready(self._ready)
        self._health.set_serving()
        self._was_ready = True

    def _take_plans(self, group: WorkerGroup) -> None:
        """Has the workers take plans, from an empty batch on."""
        ready = self._ready
        assert ready is not None, "the workers are ready"
        on_gpu = ready.device.startswith("cuda")
        captured = (ready.captured_mixed_sizes, group.max_plan_bytes, ready.tokens_per_row, ready.drafted_graphs)
        self._engine_loop.workers_ready(group.send, ready.num_blocks, on_gpu, *captured, ready.num_checkpoints)

    async def _watch(self, group: WorkerGroup) -> None:
        """Watches the workers until it raises WorkersLost or EngineStuck."""
        watchdog_s = self._launch.config.watchdog_s
        assert self._ready is not None, "the workers are ready"
        watchdog = _Watchdog(self._engine_loop, group, watchdog_s, self._ready.marks_per_step)
        while True:
            events: list[asyncio.Future[Any]] = [group.lost, group.raised]
            await asyncio.wait(events, timeout=watchdog.period_s, return_when=asyncio.FIRST_COMPLETED)
            if group.lost.done():
                group.lost.result()
            if group.raised.done():
                self._go_on_after(group, group.raised.result())
            group.look_for_oom_kills()
            if not watchdog.is_too_long():
                continue
            if self._engine_loop.num_in_flight == 0:
                raise EngineStuck(f"the engine has work and planned nothing for {watchdog_s:g} s")
            reason = f"no progress in a step for {watchdog_s:g} s{group.late_ranks()}"
            raise WorkersLost(reason, hung=True, from_outside=group.is_stopped)

    def _go_on_after(self, group: WorkerGroup, raised: StepRaised) -> None:
        """Has a worker whose step raised begin anew.

        Raises:
            WorkersLost: It has to be replaced after all: it gave trouble a moment ago, and that has
                not brought isolation closer to a guilty request.
        """
        reason = f"worker 0: {raised.reason}"
        outcome = self._engine_loop.workers_lost(raised.step_id)
        self._log.error("step failed", reason=reason, pids=group.pids)
        self._note_outcome(outcome)
        if not outcome.closer and not self._losses.note_failure(time.monotonic()):
            raise WorkersLost(reason, failed_step_id=raised.step_id)
        if not group.reset():
            raise WorkersLost(f"{reason}; it reads no plans", failed_step_id=raised.step_id)
        self._take_plans(group)

    def _is_refusal(self, lost: WorkersLost) -> bool:
        """Whether no worker will ever take the model; one that fitted before may fit again."""
        return lost.invalid_model and not (lost.does_not_fit and self._was_ready)

    async def _after_death(self, lost: WorkersLost) -> None:
        """Waits before the next life, or raises if there is none."""
        if self._is_refusal(lost):
            raise ModelRefused(str(lost), does_not_fit=lost.does_not_fit) from lost
        self._losses.note_death(time.monotonic(), self._fruitful)
        if self._losses.count >= max(self._launch.config.max_worker_restarts, 1):
            raise WorkersGivenUp(f"{self._losses}; the last: {lost}") from lost
        await asyncio.sleep(min(_FIRST_BACKOFF_S * 2 ** (self._losses.count - 1), _MAX_BACKOFF_S))
