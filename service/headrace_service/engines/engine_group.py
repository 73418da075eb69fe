"""The engines that a service is started with: which model they serve together, and who does not.

Owns the choice of that model, and why an engine is left out of it: it serves another model or
revision, speaks another version of the protocol, shows a certificate that nobody here trusts, or
refuses this service. The model is the one that most of the engines that answer serve, so that all
services come to it alike and engines can be changed one after the other; the first engine's
decides a draw at the start, and the model that is served a later one. An engine that is left out
is asked again and again by its connection, and taken in once it fits. What runs on an engine when
it is left out goes on there.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Iterator
from typing import Generic, NamedTuple, Protocol, TypeVar

import structlog

from headrace_service.engines.engine_set import EngineSet, Member

# A service waits so long at its start for engines that neither answer nor fail.
_PATIENCE_S = 5.0

_log = structlog.get_logger("headrace.service")


class LeftOut(Exception):
    """An engine that answered is not to be used; the message says why."""


class Identity(NamedTuple):
    """What engines that serve together have in common."""

    name: str
    revision: str

    def __str__(self) -> str:
        return f"{self.name} at revision {self.revision}"


class Candidate(Member, Protocol):
    """One engine of the configuration."""

    # Why it is not used; "" where it is, or was not heard of yet.
    left_out: str

    @property
    def address(self) -> str:
        """The address at which it listens."""


Engine = TypeVar("Engine", bound=Candidate)


class EngineGroup(Generic[Engine]):
    """The engines of a configuration.

    Attributes:
        engines: those that requests may go to, reached or not. One stays there whatever it serves,
            to say what is wrong.
    """

    def __init__(self) -> None:
        self.engines: EngineSet[Engine] = EngineSet()
        # In the order in which they were named, with what each said last while it answers.
        self._answers: dict[Engine, Identity | None] = {}
        self._untried: set[Engine] = set()
        self._chosen: Identity | None = None
        self._decided = asyncio.Event()

    def __iter__(self) -> Iterator[Engine]:
        return iter(list(self._answers))

    def __len__(self) -> int:
        return len(self._answers)

    def join(self, engine: Engine) -> None:
        """Has an engine belong to the group. Raises ValueError: its number is taken."""
        if any(other.number == engine.number for other in self._answers):
            raise ValueError(f"engine {engine.number} is in the group already")
        self._answers[engine] = None
        if not self._decided.is_set():
            self._untried.add(engine)
        self.engines.add(engine)

    def leave(self, engine: Engine) -> None:
        """Has an engine belong to the group no more."""
        self.engines.remove(engine)
        self._tried(engine)
        self._answers.pop(engine, None)
        self._choose()

    async def admit(self, engine: Engine, identity: Identity) -> None:
        """Returns once an engine that answered serves what the others do.

        At the start that is when every engine has answered or failed, or the patience is over.

        Raises:
            LeftOut: it serves something else than the others.
        """
        self._answers[engine] = identity
        self._tried(engine)
        try:
            await asyncio.wait_for(self._decided.wait(), _PATIENCE_S)
        except TimeoutError:
            self._decide()
        self._choose()
        if identity != self._chosen:
            raise LeftOut(self._other_model(identity))

    def take_in(self, engine: Engine) -> None:
        """Has new requests go to an engine that was admitted, and whose model can be served."""
        engine.left_out = ""
        if engine not in self.engines:
            for other in [other for other in self.engines if other.left_out]:
                self.engines.remove(other)
            self.engines.add(engine)
            _log.info("engine.taken_in", engine=engine.address, serves=str(self._answers[engine]))

    def failed(self, engine: Engine, why: str) -> None:
        """Notes an attempt to reach an engine that failed.

        `why` is a reason to leave it out; "": it may come back as it was.
        """
        # One that is left out for what it answered has still said so.
        if engine in self._answers and (not why or engine.left_out != why):
            self._answers[engine] = None
        if why:
            self.leave_out(engine, why)
        self._tried(engine)
        self._choose()

    def leave_out(self, engine: Engine, why: str) -> None:
        """Has no new request go to an engine, and says so once for each reason."""
        if engine.left_out != why:
            _log.warning("engine.left_out", engine=engine.address, why=why)
        engine.left_out = why
        if len(self.engines) > 1:
            self.engines.remove(engine)

    def _tried(self, engine: Engine) -> None:
        self._untried.discard(engine)
        if not self._untried and self._answers:
            self._decide()

    def _decide(self) -> None:
        """Ends the start: what the engines serve that answered so far is found from here on."""
        if self._decided.is_set():
            return
        silent = [engine for engine, identity in self._answers.items() if identity is None and not engine.left_out]
        if 0 < len(silent) < len(self._answers):
            # An address with a mistake in it shows nowhere else.
            _log.warning("service.started_without", engines=[engine.address for engine in silent])
        self._decided.set()

    def _choose(self) -> None:
        """Finds the model again, and leaves out who serves another one."""
        votes = collections.Counter(identity for identity in self._answers.values() if identity is not None)
        if not votes or not self._decided.is_set():
            return
        # The first of equals is the one that was named first.
        self._chosen = max(votes, key=lambda identity: (votes[identity], identity == self._chosen))
        for engine, identity in self._answers.items():
            if identity is not None and identity != self._chosen:
                self.leave_out(engine, self._other_model(identity))

    def _other_model(self, identity: Identity) -> str:
        return f"serves {identity}, the others {self._chosen}"
