"""The places of an engine's other hosts: who is there, who is missing, and where all ranks meet.

Owns the order: a host that comes again gets its ranks again, others take places that are free. Says
who is missing, in health and log, until all are there or the time is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
import time
from collections.abc import Callable, Sequence

from headrace_backend.config import EngineConfig
from headrace_backend.server.hosts.joined_host import JoinedHost
from headrace_backend.server.hosts.routes import address_towards, interface_of
from headrace_backend.server.logs import get_logger
from headrace_backend.server.workers.other_hosts import HostsMissing
from headrace_backend.server.workers.worker_process import RankDescriptors
from headrace_backend.step.meeting import MeetingPoint

_LINE_INTERVAL_S = 30.0
LOOPBACK = "127.0.0.1"


@dataclasses.dataclass(slots=True)
class Place:
    """What one of the other hosts is for."""

    ranks: range
    # Who has it, or had it last; empty: nobody came yet.
    name: str = ""
    # How that one left; empty: it is there, or on its way.
    left: str = ""
    # None: it is free, or its host has not joined yet.
    host: JoinedHost | None = None
    is_taken: bool = False

    @property
    def numbers(self) -> str:
        """Its ranks, for people."""
        first, last = self.ranks[0], self.ranks[-1]
        return f"ranks {first} to {last}" if last > first else f"rank {first}"

    @property
    def lack(self) -> str:
        """What it lacks, for people."""
        if self.is_taken:
            return f"{self.numbers}: {self.name} is looking at its model"
        if self.name:
            return f"{self.numbers}: {self.name} is gone ({self.left})"
        return f"{self.numbers}: no host has joined for them"


class HostTable:
    """All places, in the order of their ranks; the engine's own host has none here."""

    def __init__(self, config: EngineConfig, timeout_s: float) -> None:
        """All are free.

        Args:
            config: The engine's configuration.
            timeout_s: Seconds that the engine waits for hosts that are missing.
        """
        self._config = config
        each = config.ranks_per_host
        self.places = [Place(range(first, first + each)) for first in range(each, config.num_ranks, each)]
        self._timeout_s = timeout_s
        self._changed = asyncio.Event()
        # The last host that was not taken, and why.
        self._refused = ""
        self._log = get_logger()

    # --- hosts come and go

    def take(self, name: str) -> Place | None:
        """Keeps a place for a host that is about to join; None if all are taken."""
        free = [place for place in self.places if not place.is_taken]
        # Its own of before, or else one that nobody had.
        free.sort(key=lambda place: 0 if place.name == name else 1 if not place.name else 2)
        if not free:
            return None
        place = free[0]
        place.is_taken, place.name, place.left = True, name, ""
        self._changed.set()
        return place

    @property
    def holders(self) -> str:
        """Who has the places, for people."""
        return ", ".join(f"{place.numbers}: {place.name}" for place in self.places)

    def join(self, place: Place, host: JoinedHost) -> None:
        """The host that a place is kept for is there."""
        place.host, self._refused = host, ""
        self._changed.set()

    def leave(self, place: Place, reason: str) -> None:
        """The host of a place is gone, or did not join after all."""
        place.host, place.is_taken, place.left = None, False, reason
        self._changed.set()

    def note_refusal(self, name: str, reason: str) -> None:
        """A host was not taken, or did not want to be."""
        self._refused = f"{name} was refused: {reason}"
        self._changed.set()

    # --- the workers' lives

    async def gathered(self, on_missing: Callable[[str], None]) -> Sequence[JoinedHost]:
        """Implements `OtherHosts.gathered`."""
        deadline_s = time.monotonic() + self._timeout_s
        said, line_s = "", 0.0
        while lacking := "; ".join(place.lack for place in self.places if place.host is None):
            missing = f"waiting for hosts: {lacking}" + (f" ({self._refused})" if self._refused else "")
            now_s = time.monotonic()
            if now_s >= deadline_s:
                raise HostsMissing(f"hosts were missing for {self._timeout_s:g} s: {lacking}")
            if missing != said or now_s - line_s >= _LINE_INTERVAL_S:
                said, line_s = missing, now_s
                on_missing(missing)
                self._log.warning("waiting for hosts", missing=lacking, refused=self._refused, of=self._config.hosts)
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min(_LINE_INTERVAL_S, deadline_s - now_s))
        if said:
            on_missing("loading")
        return [place.host for place in self.places if place.host is not None]

    def new_meeting(self) -> RankDescriptors:
        """Implements `OtherHosts.new_meeting`.

        The store is served at this machine's loopback address: it asks for no secret, so other
        hosts reach it through their agents' streams.
        """
        host = self.places[0].host
        # A host that left since is noticed by the group, as one that leaves later is.
        network = interface_of(address_towards(host.address if host is not None else LOOPBACK))
        with socket.create_server((LOOPBACK, 0), backlog=self._config.num_ranks) as listener:
            meeting = MeetingPoint(LOOPBACK, listener.getsockname()[1], network)
            ranks = RankDescriptors.create(self._config.num_ranks, meeting)
            try:
                return ranks._replace(store=os.dup(listener.fileno()))
            except OSError:
                ranks.close()
                raise
