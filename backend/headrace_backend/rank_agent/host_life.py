"""This host's workers of one life: what crosses between the engine's stream and their rings.

Owns the order in both directions. What waits for a ring with no space is bounded by the engine,
which plans no further than its steps in flight.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import signal
from collections.abc import Callable

from headrace_backend.rank_agent.store_entrance import ADDRESS, StoreEntrance
from headrace_backend.server.hosts.routes import address_towards, interface_of
from headrace_backend.server.logs import get_logger
from headrace_backend.server.workers.host_ranks import HostRanks, WorkerLaunch, plan_ring_bytes
from headrace_backend.server.workers.worker_process import RankDescriptors, Record
from headrace_backend.step.meeting import MeetingPoint
from headrace_backend.step.rank_board import RankBoard
from headrace_backend.step.ring import RingFull
from headrace_facts.oom_kills import RecentOomKills
from headrace_protos.ranks.v1 import ranks_pb2

_KILL_S = 25.0
# Between two tries to write to a ring that is full; workers take a record in far less.
_RETRY_S = 0.001


def _drop(_: ranks_pb2.FromHost) -> None:
    """Takes what nobody waits for any more."""


class HostLife:
    """From the workers' start to the end of the last of them."""

    def __init__(
        self,
        launch: WorkerLaunch,
        first_rank: int,
        engine_address: str,
        send: Callable[[ranks_pb2.FromHost], None],
        has_room: Callable[[], bool],
    ) -> None:
        """Makes what the workers inherit, and the port at which they find the store.

        Args:
            launch: How workers are started.
            first_rank: This host's first rank.
            engine_address: IP address of the engine's host.
            send: Takes what the engine is to hear, in order.
            has_room: Whether the engine takes more of what can wait.

        Raises:
            OSError: There are no descriptors, no memory, or no way to the engine's store.
            RankNotStarted: A process could not be started; `end` it all the same.
        """
        self._first_rank = first_rank
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._log = get_logger("ranks")
        self._oom_kills = RecentOomKills()
        self._unwritten: collections.deque[tuple[int, bytes]] = collections.deque()
        self._retry: asyncio.TimerHandle | None = None
        self._sent_marks = ranks_pb2.Marks()
        network = interface_of(address_towards(engine_address))
        self._store = StoreEntrance(self._tell_store, has_room)
        shared: RankDescriptors | None = None
        try:
            meeting = MeetingPoint(ADDRESS, self._store.port, network)
            shared = RankDescriptors.create(launch.world_size, meeting, first_rank)
            self._board = RankBoard(shared.board, launch.world_size)
            self._ranks = HostRanks(launch, plan_ring_bytes(launch), self._on_records)
            self._shared = shared
        except BaseException:
            if shared is not None:
                shared.close()
            self._store.close()
            raise

    async def start(self) -> None:
        """Starts the processes. Raises RankNotStarted; `end` it all the same."""
        await self._store.start()
        try:
            self._ranks.spawn(self._shared)
        finally:
            self._shared.close()
            for worker in self._ranks.workers:
                worker.exited.add_done_callback(functools.partial(self._on_exit, worker.rank))
        self._log.info("workers started", first_rank=self._first_rank, pids=list(self._ranks.pids))
        self._send(ranks_pb2.FromHost(started=ranks_pb2.Started(pids=self._ranks.pids)))

    # --- to the workers

    def write(self, kind: int, payload: bytes) -> None:
        """Appends a record to the ring that all workers read, now or when it has space.

        Raises:
            ValueError: It can never have.
        """
        if len(payload) > self._ranks.plans.max_payload_bytes:
            raise ValueError(f"a record of {len(payload)} bytes; the ring takes {self._ranks.plans.max_payload_bytes}")
        self._unwritten.append((kind, payload))
        if self._retry is None:
            self._write_all()

    def _write_all(self) -> None:
        self._retry = None
        while self._unwritten:
            try:
                self._ranks.plans.write(*self._unwritten[0], timeout_s=0)
            except RingFull:
                self._retry = self._loop.call_later(_RETRY_S, self._write_all)
                return
            self._unwritten.popleft()

    def take_store(self, message: ranks_pb2.StoreBytes) -> None:
        """Hands on what the store says to one of the workers."""
        self._store.take(message.connection, message.data)

    def dump_stacks(self) -> None:
        """Has the workers write their stacks to this host's stderr."""
        self._ranks.dump_stacks()

    # --- from the workers

    def _on_records(self, rank: int, records: list[Record]) -> None:
        written = [ranks_pb2.Record(kind=kind, payload=payload) for kind, payload in records]
        self._send(ranks_pb2.FromHost(records=ranks_pb2.Records(rank=rank, records=written)))

    def _tell_store(self, connection: int, data: bytes) -> None:
        self._send(ranks_pb2.FromHost(store=ranks_pb2.StoreBytes(connection=connection, data=data)))

    def _on_exit(self, rank: int, exited: asyncio.Future[int]) -> None:
        exit_code = exited.result()
        cause = self._oom_kills.after_sigkill() if exit_code == -signal.SIGKILL else ""
        # The step that it began last counts.
        self.tell_marks()
        self._send(ranks_pb2.FromHost(exited=ranks_pb2.Exited(rank=rank, exit_code=exit_code, cause=cause)))

    def tell_marks(self, also_unchanged: bool = False) -> None:
        """Tells how far the ranks are, if that has changed."""
        self._oom_kills.look()
        marks = ranks_pb2.Marks()
        for worker in self._ranks.workers:
            marks.ranks.add(counters=self._board.counters(worker.rank), is_stopped=worker.is_stopped)
        if also_unchanged or marks != self._sent_marks:
            self._sent_marks = marks
            self._send(ranks_pb2.FromHost(marks=marks))

    async def end(self) -> None:
        """Kills what still runs, silently; returns when all is gone. May be called once."""
        self._send = _drop
        self._store.close()
        if self._retry is not None:
            self._retry.cancel()
        self._ranks.kill()
        await self._ranks.wait_exited(_KILL_S)
        for worker in self._ranks.close():
            self._log.error("worker does not die", rank=worker.rank, pid=worker.pid)
        self._board.close()
