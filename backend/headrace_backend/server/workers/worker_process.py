"""One worker process: its command line, its end of the rings, its exit.

Owns the process from spawn to reaping, and the reading end of its result ring. Does not own what a
record means for the engine nor whether a dead worker is replaced (`worker_group`,
`worker_supervision`).

The worker inherits the ring descriptors it needs and nothing else, has its own process group (a
Ctrl-C at the terminal must not end it before the backend has drained) and ends with this process
(its own PDEATHSIG).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

from headrace_backend.server.logs import get_logger
from headrace_backend.server.workers.early_workers import EarlyWorkers
from headrace_backend.step.meeting import MeetingPoint
from headrace_backend.step.rank_board import create_board
from headrace_backend.step.ring import RingCorrupt, RingDescriptors, RingReader, create_ring

DEFAULT_WORKER_COMMAND: tuple[str, ...] = (sys.executable, "-m", "headrace_backend.worker")

# Records read per wake-up, so that a worker that floods its ring can't hold the event loop.
_MAX_RECORDS_PER_WAKEUP = 64

Record = tuple[int, bytes]

# Of /proc/<pid>/stat: by a signal, by a debugger.
_STOPPED_STATES = ("T", "t")


class RankDescriptors(NamedTuple):
    """The descriptors that the ranks of one life share besides the plan ring."""

    # Of `rank_board`.
    board: int
    # An anonymous file in which several ranks of one host find each other, or the listening socket
    # at which rank 0 lets those of several; None: neither.
    store: int | None
    # Where the ranks of several hosts find each other; None: all are on this one.
    meeting: MeetingPoint | None = None
    # This host's first rank.
    first_rank: int = 0

    @classmethod
    def create(cls, world_size: int, meeting: MeetingPoint | None = None, first_rank: int = 0) -> RankDescriptors:
        """New ones, close-on-exec, without a socket to listen at.

        Raises:
            OSError: There are no descriptors left, or no memory.
        """
        board = create_board(world_size)
        if world_size == 1 or meeting is not None:
            return cls(board, None, meeting, first_rank)
        try:
            return cls(board, os.memfd_create("headrace-store", os.MFD_CLOEXEC))
        except OSError:
            os.close(board)
            raise

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """Returns the descriptors that a rank inherits: only rank 0 a socket to listen at."""
        has_store = self.store is not None and (self.meeting is None or rank == 0)
        return (self.board, self.store) if has_store and self.store is not None else (self.board,)

    def arguments(self, rank: int) -> tuple[str, ...]:
        """A rank's command line arguments that name its descriptors and where ranks meet."""
        named = zip(("--board", "--store"), map(str, self.of_rank(rank)), strict=False)
        meeting = () if self.meeting is None else ("--meeting", str(self.meeting))
        return (*(text for pair in named for text in pair), *meeting)

    def close(self) -> None:
        """Closes all."""
        for descriptor in (self.board, self.store):
            if descriptor is not None:
                os.close(descriptor)


class WorkerProcess:
    """The process of one rank. Callbacks run in the event loop that started it."""

    def __init__(
        self,
        rank: int,
        reports: bool,
        command: tuple[str, ...],
        config_json: str,
        plan_ring: RingDescriptors,
        result_ring_bytes: int,
        on_records: Callable[[int, list[Record]], None],
        ranks: RankDescriptors,
        early_workers: EarlyWorkers,
    ) -> None:
        """Spawns the worker, or takes one that waits.

        Args:
            rank: Its rank, which is also its reader index on the plan ring.
            reports: Whether its step results count; several ranks have the same ones, or none.
            command: Program and first arguments; the worker's own arguments are appended.
            config_json: `EngineConfig` as JSON.
            plan_ring: The ring that all ranks read.
            result_ring_bytes: Capacity of the ring that only this worker writes.
            on_records: Called with the rank and one or more records in order.
            ranks: What the ranks share.
            early_workers: Workers of the same command that wait for their arguments.

        Raises:
            OSError: The process could not be started.
        """
        self.rank = rank
        self._reports = reports
        self._on_records = on_records
        self._loop = asyncio.get_running_loop()
        self._log = get_logger()
        result_ring = create_ring(result_ring_bytes, num_readers=1)
        try:
            self._reader = RingReader(result_ring.memory, result_ring.data_events[0], result_ring.space_event, 0)
            self._process = self._spawn(command, config_json, plan_ring, result_ring, ranks, early_workers)
        finally:
            result_ring.close()
        try:
            self._pidfd = os.pidfd_open(self._process.pid)
        except OSError:
            # Nobody would see its end, nor bring it about.
            self._process.kill()
            self._process.wait()
            self._reader.close()
            raise
        self.exited: asyncio.Future[int] = self._loop.create_future()
        self._loop.add_reader(self._pidfd, self._reap)
        self._loop.add_reader(self._reader.fileno(), self.read_records)

    def _spawn(
        self,
        command: tuple[str, ...],
        config_json: str,
        plans: RingDescriptors,
        results: RingDescriptors,
        ranks: RankDescriptors,
        early_workers: EarlyWorkers,
    ) -> subprocess.Popen[bytes]:
        reader = self.rank - ranks.first_rank
        plan_fds = (plans.memory, plans.data_events[reader], plans.space_event)
        result_fds = (results.memory, results.data_events[0], results.space_event)
        arguments = [
            *("--config-json", config_json),
            *("--plan-ring", ",".join(map(str, (*plan_fds, reader)))),
            *("--result-ring", ",".join(map(str, result_fds))),
            *("--rank", str(self.rank)),
            *("--parent-pid", str(os.getpid())),
            *(() if self._reports else ("--follows",)),
            *ranks.arguments(self.rank),
        ]
        descriptors = (*plan_fds, *result_fds, *ranks.of_rank(self.rank))
        return early_workers.taken(self.rank, arguments, descriptors) or subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            pass_fds=descriptors,
            process_group=0,
        )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def place(self) -> str:
        """Its process, for people."""
        return f"process {self.pid}"

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger holds the worker."""
        try:
            status = pathlib.Path(f"/proc/{self._process.pid}/stat").read_text()
        except OSError:
            return False
        return status.rpartition(")")[2].split()[0] in _STOPPED_STATES

    def read_records(self) -> None:
        """Hands on what lies in the result ring."""
        records: list[Record] = []
        try:
            while len(records) < _MAX_RECORDS_PER_WAKEUP and (record := self._reader.try_read()) is not None:
                records.append(record)
        except RingCorrupt:
            # Its memory can't be trusted; the exit tells the owner.
            self._log.exception("result ring is corrupt", rank=self.rank)
            self._loop.remove_reader(self._reader.fileno())
            self.send_signal(signal.SIGKILL)
        if records:
            self._on_records(self.rank, records)

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        # What it wrote before it ended counts: the reason of its failure, for one.
        self.read_records()
        self.exited.set_result(self._process.wait())

    def send_signal(self, number: signal.Signals) -> None:
        """Signals the worker and whatever it started, if it still lives."""
        if not self.exited.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def close(self) -> None:
        """Gives descriptors back. The process must have ended, or is left to the kernel."""
        self._loop.remove_reader(self._reader.fileno())
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._reader.close()
