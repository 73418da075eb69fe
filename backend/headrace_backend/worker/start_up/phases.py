"""How long each phase of a worker's start takes.

Owns the clock. Which phases there are is `start_up`'s and `fitted_runner`'s.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Phases:
    """Seconds of each phase, in order."""

    def __init__(self, seconds: dict[str, float]) -> None:
        """Takes those of phases before, and adds to them."""
        self.seconds = seconds

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Notes the seconds of what runs inside; a phase may come twice."""
        start = time.monotonic()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start
