"""Carries what engines of a model report of quotas from each to the others.

Owns which of them are connected to this process, and tells each of them who the others are. Keeps
nothing of what they report, and looks at nothing in it: several processes that connect the same
engines carry the same. One that does not share quotas is left alone.
"""

from __future__ import annotations

from typing import Protocol

from headrace_protos.engine.v1 import engine_pb2


class Connected(Protocol):
    """The connection to one engine."""

    def tell(self, to_engine: engine_pb2.ToEngine) -> None:
        """Sends what has no answer."""


class QuotaRelay:
    """The engines of one model that are connected and share quotas."""

    def __init__(self) -> None:
        # The names of the engines' lives.
        self._names: dict[Connected, str] = {}

    def connected(self, engine: Connected, name: str) -> None:
        """Takes an engine in, under the name of its life, and tells all of them who there is."""
        self._names[engine] = name
        self._name_peers()

    def lost(self, engine: Connected) -> None:
        """Tells the others that an engine is gone."""
        if self._names.pop(engine, None) is not None:
            self._name_peers()

    def carry(self, engine: Connected, report: engine_pb2.QuotaReport) -> None:
        """Passes an engine's report on to the others."""
        for other in self._names:
            if other is not engine:
                other.tell(engine_pb2.ToEngine(quota_report=report))

    def _name_peers(self) -> None:
        names = sorted(set(self._names.values()))
        for engine in self._names:
            engine.tell(engine_pb2.ToEngine(quota_peers=engine_pb2.QuotaPeers(engines=names)))
