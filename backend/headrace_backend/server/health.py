"""Whether the engine makes progress: one state, reported to everybody who listens.

Owns the state and its order of precedence. Who finds out that progress stopped is
`worker_supervision`; who tells the services is `engine_service`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

# A service that has heard nothing for this long must treat the engine as stuck; three heartbeats.
STALE_AFTER_NS = 3_000_000_000
HEARTBEAT_S = 1.0


class HealthState(NamedTuple):
    """The state that `EngineState` reports; `reason` is for people."""

    serving: bool
    reason: str


class Health:
    """The engine's state, and its listeners; draining is final."""

    def __init__(self) -> None:
        self._state = HealthState(False, "loading")
        self._draining = False
        self._listeners: list[Callable[[], None]] = []

    @property
    def state(self) -> HealthState:
        """The newest state."""
        return self._state

    def listen(self, listener: Callable[[], None]) -> None:
        """Calls `listener` after every change."""
        self._listeners.append(listener)

    def set_serving(self) -> None:
        """Sets the state to serving: steps are computed, or would be."""
        self._set(HealthState(True, "serving"))

    def set_not_serving(self, reason: str) -> None:
        """Sets the state to not serving: no steps are computed for now."""
        self._set(HealthState(False, reason))

    def drain(self) -> None:
        """The process is about to end; nothing changes the state after this."""
        self._set(HealthState(False, "draining"))
        self._draining = True

    def _set(self, state: HealthState) -> None:
        if self._draining or state == self._state:
            return
        self._state = state
        for listener in self._listeners:
            listener()
