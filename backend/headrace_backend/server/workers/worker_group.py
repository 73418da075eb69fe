"""One life of all workers.

It has the ranks of this host and those of others, start-up, and the first sign that something is
wrong.

Owns what records and ends mean. A worker that is lost loses the group: ranks that wait for a dead
one in a collective would wait forever. So does a host that is lost. Whether there is a next life is
decided in `worker_supervision`. Results of one rank alone go to the engine, since all ranks of the
last pipeline stage sample the same tokens; where there is one stage it is rank 0.
"""

from __future__ import annotations

import asyncio
import functools
import signal
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from headrace_backend.server.logs import get_logger
from headrace_backend.server.workers.host_ranks import HostRanks, RankNotStarted, WorkerLaunch, plan_ring_bytes
from headrace_backend.server.workers.other_hosts import OtherHost
from headrace_backend.server.workers.rank_watch import RankWatch, WatchedRank, state
from headrace_backend.server.workers.start_report import LINE_INTERVAL_S, StartReport
from headrace_backend.server.workers.worker_process import RankDescriptors, Record
from headrace_backend.step.messages import (
    TORCH_PHASE,
    LoadProgress,
    MemoryPlan,
    Notice,
    RecordKind,
    StepRaised,
    WorkerFailed,
    WorkerReady,
    decode_message,
)
from headrace_backend.step.plan import StepPlan
from headrace_backend.step.ring import RingFull
from headrace_facts.oom_kills import RecentOomKills

# How long the end of the rank that is at fault may come after the words of those that noticed it.
_PEER_S = 1.0
# A stack dump of a worker takes milliseconds once it runs again.
_DUMP_S = 0.5
# Signals that no step brings upon its own process. SIGKILL is the kernel's for want of memory too,
# which is planned so that no request can cause it.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# A process that holds much of a card's memory takes seconds to end, and the next life measures what
# is free. Waiting ends with the last of them.
_KILL_S = 30.0


class WorkersLost(Exception):  # what happened, not a mistake of ours
    """The group of workers can't go on; the message says why."""

    def __init__(
        self,
        reason: str,
        *,
        invalid_model: bool = False,
        does_not_fit: bool = False,
        hung: bool = False,
        failed_step_id: int = 0,
        from_outside: bool = False,
    ) -> None:
        """Says why.

        Args:
            reason: For people.
            invalid_model: A restart can't help.
            does_not_fit: Memory is what is wrong.
            hung: The processes still live, and their stacks are worth a look.
            failed_step_id: The step that could not be computed; 0: nobody said which.
            from_outside: What ended or stopped them is no step's doing.
        """
        super().__init__(reason)
        self.from_outside = from_outside
        self.failed_step_id = failed_step_id
        self.invalid_model = invalid_model
        self.does_not_fit = does_not_fit
        self.hung = hung


class WorkerGroup:
    """All ranks of one life.

    `on_results` gets the payloads of the reporting rank's step results, in order, and those of
    drafts of later steps; its ValueError loses the group.
    """

    def __init__(
        self,
        launch: WorkerLaunch,
        on_results: Callable[[list[bytes], list[bytes]], None],
        ranks: RankDescriptors | None = None,
        others: Sequence[OtherHost] = (),
    ) -> None:
        """Creates the ring and spawns every rank; one that could not be started loses the group.

        Args:
            launch: How workers are started.
            on_results: Takes the reporting rank's results.
            ranks: What this host's ranks inherit, owned from now on; None: all ranks are on this
                host, and it is made.
            others: The other hosts, which have joined.

        Raises:
            OSError: There are no descriptors or no memory for what the ranks share.
        """
        self._launch = launch
        self._on_results = on_results
        self._others = others
        self._loop = asyncio.get_running_loop()
        self._log = get_logger()
        # Set when the group can't go on; never set with a result.
        self.lost: asyncio.Future[None] = self._loop.create_future()
        # Set when a step raised and its worker waits for `reset`.
        self.raised: asyncio.Future[StepRaised] = self._loop.create_future()
        self._all_ready = asyncio.Event()
        self._ready: dict[int, WorkerReady] = {}
        self._reports = [StartReport(rank, launch.shows_bars and rank == 0) for rank in range(launch.world_size)]
        # Records of any kind so far: the watchdog's sign of life.
        self.num_records = 0
        self._closing = False
        # Ranks that ended, or will, because another one is lost.
        self._followers: set[int] = set()
        self._rank_watch = RankWatch(launch.world_size, launch.config.tp)
        self._oom_kills = RecentOomKills()
        shared = ranks or RankDescriptors.create(launch.world_size)
        try:
            self._rank_watch.watch(shared)
            self._local = HostRanks(launch, plan_ring_bytes(launch), self.on_records)
            self._start(shared)
        finally:
            shared.close()

    def _start(self, ranks: RankDescriptors) -> None:
        if len(self._launch.early_workers):
            # These may still be in their imports, and say nothing meanwhile.
            for report in self._reports:
                report.on_progress(LoadProgress(TORCH_PHASE, 0, 1, ""))
        try:
            self._local.spawn(ranks)
        except RankNotStarted as error:
            self._lose(WorkersLost(str(error)))
        for worker in self._local.workers:
            worker.exited.add_done_callback(functools.partial(self._on_local_exit, worker.rank))
        if self.lost.done():
            return
        for host in self._others:
            assert ranks.meeting is not None, "ranks of several hosts have a place to meet"
            host.begin(ranks.meeting, self)

    @property
    def _workers(self) -> list[WatchedRank]:
        """All ranks, of all hosts."""
        return [*self._local.workers, *(rank for host in self._others for rank in host.ranks)]

    @property
    def pids(self) -> Sequence[int]:
        """Process ids of this host's workers, by rank."""
        return self._local.pids

    @property
    def max_plan_bytes(self) -> int:
        """Bytes of the largest plan that the engine may make."""
        return self._local.plans.max_payload_at_once

    def _lose(self, lost: WorkersLost) -> None:
        if not self.lost.done() and not self._closing:
            self.lost.set_exception(lost)

    def _on_local_exit(self, rank: int, exited: asyncio.Future[int]) -> None:
        exit_code = exited.result()
        self.on_exit(rank, exit_code, self._oom_kills.after_sigkill() if exit_code == -signal.SIGKILL else "")

    def on_exit(self, rank: int, exit_code: int, cause: str) -> None:
        """Takes the end of a rank's process; `cause` is what its host knows of it besides."""
        if rank not in self._followers:
            ending = f"exit code {exit_code}" if exit_code >= 0 else f"signal {-exit_code}"
            reason = f"worker {rank} ended with {ending}{cause}"
            self._lose(WorkersLost(reason, from_outside=-exit_code in _FROM_OUTSIDE))

    def on_host_lost(self, reason: str) -> None:
        """Takes the loss of another host, which is no step's doing."""
        self._lose(WorkersLost(reason, from_outside=True))

    def on_counters(self, rank: int, counters: Sequence[int]) -> None:
        """Takes how far a rank of another host is."""
        if not self._closing:
            self._rank_watch.put(rank, counters)

    def look_for_oom_kills(self) -> None:
        """Call it every few seconds, so that a rank's end is not taken for a kill of long ago."""
        self._oom_kills.look()

    def _on_peer_lost(self, rank: int, lost: WorkersLost) -> None:
        """A rank noticed that another is gone.

        That one's end tells more, and is awaited; the noticing rank's tells nothing.
        """
        self._followers.add(rank)
        if len(self._followers) == self._launch.world_size:
            self._lose(lost)
        else:
            self._loop.call_later(_PEER_S, self._lose, lost)

    # --- records

    def on_records(self, rank: int, records: list[Record]) -> None:
        """Takes what a rank has written, in order."""
        if self.lost.done() or self._closing:
            return
        self.num_records += len(records)
        try:
            self._take(rank, records)
        except Exception as error:
            # A mistake of ours, in a callback of the event loop: the records are lost, and with
            # them what the engine knows of the workers.
            self._log.exception("records of a worker could not be taken", rank=rank)
            self._lose(WorkersLost(f"worker {rank}: its records could not be taken: {type(error).__name__}"))

    def _take(self, rank: int, records: list[Record]) -> None:
        results: list[bytes] = []
        drafts: list[bytes] = []
        for kind, payload in records:
            if kind == RecordKind.STEP_RESULT:
                results.append(payload)
            elif kind == RecordKind.DRAFTS:
                drafts.append(payload)
            elif kind == RecordKind.MESSAGE:
                self._on_message(rank, payload)
            else:
                self._lose(WorkersLost(f"worker {rank} sent a record of unknown kind {kind}"))
        if (results or drafts) and rank == self._launch.config.reporting_rank:
            try:
                self._on_results(results, drafts)
            except ValueError as error:
                self._lose(WorkersLost(f"worker {rank}: {error}"))

    def _on_message(self, rank: int, payload: bytes) -> None:
        try:
            message = decode_message(payload)
        except msgspec.MsgspecError:
            self._lose(WorkersLost(f"worker {rank} sent a message that can't be read"))
            return
        if isinstance(message, MemoryPlan | LoadProgress):
            self._report(rank, message)
        elif isinstance(message, WorkerReady):
            self._on_ready(rank, message)
        elif isinstance(message, Notice):
            self._log.warning(message.text, rank=rank)
        elif isinstance(message, StepRaised):
            self.raised.set_result(message)
        else:
            assert isinstance(message, WorkerFailed)
            reason = f"worker {rank}: {message.reason}"
            lost = WorkersLost(
                reason,
                invalid_model=message.invalid_model,
                does_not_fit=message.does_not_fit,
                failed_step_id=message.step_id,
                from_outside=message.peer_lost,
            )
            if message.peer_lost:
                self._on_peer_lost(rank, lost)
            else:
                self._lose(lost)

    def _report(self, rank: int, message: MemoryPlan | LoadProgress) -> None:
        """Shows how a start goes.

        A report that fails loses its form only: the message is logged as it came.
        """
        try:
            if isinstance(message, MemoryPlan):
                self._reports[rank].on_memory_plan(message)
            else:
                self._reports[rank].on_progress(message)
        except Exception:
            self._log.exception("start report failed", rank=rank, message=str(message))

    def _on_ready(self, rank: int, message: WorkerReady) -> None:
        if message.block_size != self._launch.config.block_size or message.num_blocks < 1:
            found = f"{message.num_blocks} blocks of {message.block_size} tokens"
            self._lose(
                WorkersLost(f"worker {rank} has {found}; the engine's blocks have {self._launch.config.block_size}")
            )
            return
        self._ready[rank] = message
        self._reports[rank].close()
        if len(self._ready) == self._launch.world_size:
            self._all_ready.set()

    # --- start, steps, end

    async def wait_ready(self) -> list[WorkerReady]:
        """Waits until every rank is ready; its messages by rank.

        Raises:
            WorkersLost: A rank ended, failed, or gave no sign of progress for `start_timeout_s`.
        """
        timeout_s = self._launch.config.start_timeout_s
        ticking = asyncio.ensure_future(self._tick())
        ready = asyncio.ensure_future(self._all_ready.wait())
        either: list[asyncio.Future[Any]] = [ready, self.lost]
        try:
            while not ready.done() and not self.lost.done():
                seen = self.num_records
                await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                if not ready.done() and not self.lost.done() and self.num_records == seen:
                    raise WorkersLost(f"no start-up progress for {timeout_s:g} s{self._start_phases()}", hung=True)
        finally:
            ready.cancel()
            ticking.cancel()
        if self.lost.done():
            self.lost.result()
        return [self._ready[rank] for rank in range(self._launch.world_size)]

    async def _tick(self) -> None:
        """Has the reports say how it goes on while the workers say nothing."""
        while True:
            await asyncio.sleep(LINE_INTERVAL_S)
            for report in self._reports:
                report.on_tick()

    def _start_phases(self) -> str:
        """What each of several ranks does, or waits for."""
        if self._launch.world_size == 1:
            return ""
        return ": " + "; ".join(
            f"worker {worker.rank} ({state(worker)}) {'is ready' if worker.rank in self._ready else report.position}"
            for worker, report in zip(self._workers, self._reports, strict=True)
        )

    def late_ranks(self) -> str:
        """The ranks that are waited for, as the end of a message; empty if there is one rank."""
        return self._rank_watch.described(self._workers)

    def progress(self) -> tuple[int, ...]:
        """All that the ranks have sent and marked.

        Two readings differ if some rank went on in between.
        """
        return (self.num_records, *self._rank_watch.progress())

    @property
    def begun_step_id(self) -> int:
        """The step that any rank began last, as plans count them; 0: none."""
        return self._rank_watch.begun_step_id()

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger holds any of the workers."""
        return any(worker.is_stopped for worker in self._workers)

    def send_plan(self, plan: bytes) -> bool:
        """Appends a plan, as `send` does."""
        return self.send(RecordKind.STEP_PLAN, plan)

    def send(self, kind: RecordKind, record: bytes | memoryview) -> bool:
        """Appends a plan or masks; False if the workers left no space for it yet, or never can.

        A record that is larger than the ring, which the engine does not make, is a step that
        failed: the group is lost with it, and the engine finds the request that is to blame.
        """
        try:
            return self._write(kind, record)
        except ValueError as error:
            # Both begin with the step's number.
            what = "a step plan" if kind == RecordKind.STEP_PLAN else "a step's masks"
            self._lose(WorkersLost(f"{what}: {error}", failed_step_id=StepPlan.step_id_of(record)))
            return False

    def _write(self, kind: RecordKind, record: bytes | memoryview) -> bool:
        """Appends a record for all ranks of all hosts, or for none: then False.

        Raises:
            ValueError: It is larger than the ring.
        """
        if not all(host.has_room for host in self._others):
            return False
        try:
            self._local.plans.write(kind, record, timeout_s=0)
        except RingFull:
            return False
        for host in self._others:
            host.send(kind, bytes(record))
        return True

    def reset(self) -> bool:
        """Has the worker whose step raised begin anew. False: there was no space to say so."""
        self.raised = self._loop.create_future()
        return self._write(RecordKind.RESET, b"")

    def read_results(self) -> None:
        """Reads what this host's workers have written and the event loop has not seen yet."""
        for worker in self._local.workers:
            worker.read_records()

    async def dump_stacks(self) -> None:
        """Has every live worker write its stacks to its host's stderr, stopped ones too."""
        self._local.dump_stacks()
        for host in self._others:
            host.dump_stacks()
        await asyncio.sleep(_DUMP_S)

    async def close(self, grace_s: float) -> None:
        """Ends all ranks: asks, waits `grace_s`, then kills.

        Nothing that they still write is read. May be called once.
        """
        self._closing = True
        for report in self._reports:
            report.close()
        if grace_s > 0 and self._write(RecordKind.SHUTDOWN, b""):
            exits: list[asyncio.Future[Any]] = [worker.exited for worker in self._local.workers]
            exits += [host.exited for host in self._others]
            await asyncio.wait(exits, timeout=grace_s)
        self._local.kill()
        reason = "the backend is ending" if not self.lost.done() else str(self.lost.exception())
        ends = (host.end(reason, _KILL_S) for host in self._others)
        await asyncio.gather(self._local.wait_exited(_KILL_S), *ends)
        for worker in self._local.close():
            self._log.error("worker does not die", rank=worker.rank, pid=worker.pid)
        self._rank_watch.close()
        if not self.lost.cancel():
            self.lost.exception()  # retrieved, so that asyncio does not report it
