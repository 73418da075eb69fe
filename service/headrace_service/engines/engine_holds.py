"""Which engines of a model this process holds, and the report of that to each of them.

An engine is held while this process reaches it, and after its loss as long as a guardian here keeps
requests of it that are at no other engine yet. As long as any service holds an engine, no other one
takes a request in its place under an idempotency key that belongs to it, because the key may have a
request already. Owns the count and the reports; what engines make of them is
theirs.
"""

from __future__ import annotations

import collections
from typing import Protocol

from headrace_protos.engine.v1 import engine_pb2


class Connected(Protocol):
    """The connection to one engine."""

    def tell(self, to_engine: engine_pb2.ToEngine) -> None:
        """Sends what has no answer."""


class EngineHolds:
    """The engines of one model that this process holds, by number."""

    def __init__(self) -> None:
        self._connected: dict[int, Connected] = {}
        self._num_guarded: collections.Counter[int] = collections.Counter()

    def connected(self, number: int, engine: Connected) -> None:
        """Notes that an engine is connected, and says so before it is asked for anything."""
        self._connected[number] = engine
        self._report()

    def lost(self, number: int, engine: Connected) -> None:
        """Notes that the connection to an engine is lost."""
        if self._connected.get(number) is engine:
            del self._connected[number]
            self._report()

    def guarded(self, number: int) -> None:
        """Counts a request of an engine that a guardian here keeps."""
        self._num_guarded[number] += 1
        if self._num_guarded[number] == 1 and number not in self._connected:
            self._report()

    def unguarded(self, number: int) -> None:
        """Counts off a request that is at another engine, or is guarded no more."""
        self._num_guarded[number] -= 1
        if not self._num_guarded[number]:
            del self._num_guarded[number]
            if number not in self._connected:
                self._report()

    def _report(self) -> None:
        guarded = sorted(self._num_guarded.keys() - self._connected.keys())
        held = engine_pb2.HeldEngines(reached=sorted(self._connected), guarded=guarded)
        for engine in self._connected.values():
            engine.tell(engine_pb2.ToEngine(held_engines=held))
