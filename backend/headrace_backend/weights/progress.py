"""How a phase of start-up tells how far it is, whoever listens."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called at the beginning of a phase, now and then within it, and at its end."""

    def __call__(self, phase: str, done: int, total: int, unit: str, detail: str = "", /) -> None:
        """`done` of `total` units of a phase, equal at its end; `detail` says more of it."""
