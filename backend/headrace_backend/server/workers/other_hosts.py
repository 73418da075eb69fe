"""The ranks of other hosts, as the group of all workers sees them.

Owns the interface. What connects a host is `server.hosts`.
"""

from __future__ import annotations

import abc
import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

from headrace_backend.server.workers.worker_process import RankDescriptors, Record
from headrace_backend.step.meeting import MeetingPoint
from headrace_backend.step.messages import RecordKind


@dataclasses.dataclass(slots=True)
class RemoteRank:
    """One rank of another host, as far as its agent has reported it."""

    rank: int
    host: str
    # 0: not started yet.
    pid: int = 0
    is_stopped: bool = False

    @property
    def place(self) -> str:
        """Its process, for people."""
        return f"process {self.pid} of {self.host}"


class RanksListener(Protocol):
    """Hears what becomes of the ranks of another host."""

    def on_records(self, rank: int, records: list[Record]) -> None:
        """Takes what a rank has written, in order."""

    def on_counters(self, rank: int, counters: Sequence[int]) -> None:
        """Takes how far a rank is: its line of the board."""

    def on_exit(self, rank: int, exit_code: int, cause: str) -> None:
        """Takes the end of a rank's process; `cause` is what its host knows of it besides."""

    def on_host_lost(self, reason: str) -> None:
        """Takes the end of the connection, and with it of all ranks of the host."""


class OtherHost(abc.ABC):
    """A host that has joined, and its ranks of one life after the other."""

    # Its own ranks of the life that goes on, by rank.
    ranks: Sequence[RemoteRank]

    @abc.abstractmethod
    def begin(self, meeting: MeetingPoint, listener: RanksListener) -> None:
        """Has the host start its ranks, which find the others at the meeting point's address."""

    @property
    @abc.abstractmethod
    def has_room(self) -> bool:
        """Whether it takes another record: what waits for it is bounded."""

    @abc.abstractmethod
    def send(self, kind: RecordKind, record: bytes) -> None:
        """Sends a record for the host's plan ring."""

    @abc.abstractmethod
    def dump_stacks(self) -> None:
        """Has its workers write their stacks."""

    @property
    @abc.abstractmethod
    def exited(self) -> asyncio.Future[None]:
        """Done once every worker of the life has ended, or the host is lost."""

    @abc.abstractmethod
    async def end(self, reason: str, timeout_s: float) -> None:
        """Ends the life: returns when its workers are gone, or the host is lost.

        A host that does not manage it in time is cut off.
        """


class OtherHosts(Protocol):
    """All other hosts of an engine."""

    async def gathered(self, on_missing: Callable[[str], None]) -> Sequence[OtherHost]:
        """Waits until all have joined.

        Args:
            on_missing: Called with who is missing, for people, whenever that changes.

        Raises:
            HostsMissing: Some did not come in time.
        """

    def new_meeting(self) -> RankDescriptors:
        """Makes what this host's ranks are to inherit, by which they meet those of all hosts.

        Raises:
            OSError: There are no descriptors left, or the network is gone.
        """


class HostsMissing(Exception):  # what happened, not a mistake of ours
    """Other hosts of the engine did not join in time."""
