"""What stands in for graphs where there is no card."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping
from typing import Any


class RecordedGraphs:
    """Graphs without a card: a replay runs what was captured.

    Notes replays, and calls of the ranks' collectives inside of each piece. A key is a tuple that
    begins with the piece's name, or with a piece that has one.
    """

    def __init__(self, num_calls: Callable[[], int] = lambda: 0) -> None:
        self._runs: dict[Hashable, Callable[[], Any]] = {}
        self._num_calls = num_calls
        self.num_captured = 0
        self.replayed: list[str] = []
        self.is_replaying = False
        # Calls inside of captured pieces, by their names.
        self.calls = {"FORWARD": 0, "DRAW": 0, "SHARE_DRAW": 0}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._runs

    def prepare(self, run: Callable[[], Any]) -> None:
        run()

    def capture(self, key: tuple[Any, Any], run: Callable[[], Any]) -> None:
        self._runs[key] = run
        self.num_captured += 1
        self._run(key)

    def replay(self, key: tuple[Any, Any]) -> Any:
        self.replayed.append(_name(key))
        return self._run(key)

    def times_ms(self, launches: Mapping[Any, Callable[[], None]]) -> dict[Any, float]:
        """Each takes longer than the one before."""
        return dict(zip(launches, itertools.count(1.0), strict=False))

    def _run(self, key: tuple[Any, Any]) -> Any:
        before, self.is_replaying = self._num_calls(), True
        try:
            return self._runs[key]()
        finally:
            self.is_replaying = False
            name = _name(key)
            self.calls[name] = self.calls.get(name, 0) + self._num_calls() - before


def _name(key: tuple[Any, Any]) -> str:
    name: str = getattr(key[0], "name", key[0])
    return name
