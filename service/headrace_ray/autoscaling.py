"""How many engines a deployment should have, by what waits for them.

Owns the policy, and no clock: callers say what time it is. More engines are wanted when prompt
tokens wait, fewer when those that would be left could do the work with room to spare. Hysteresis
has three parts: a state must last before it counts, growth and shrinkage have thresholds that are
far apart, and each change begins all waits anew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

# Engines that would be left after one is given up may have this share of the tokens waiting that
# ask for another engine, and of their rows in use.
_CALM_WAITING_SHARE = 0.25
_CALM_ROWS_SHARE = 0.75
# Growth at once. What waits may be gone before the engines have started.
_MOST_GROWTH = 2


class Load(NamedTuple):
    """What one serving engine said last.

    Attributes:
        waiting_tokens: prompt tokens of its requests that wait to be scheduled.
        running: sequences in its batch.
        rows: most sequences that its batch holds.
    """

    waiting_tokens: int
    running: int
    rows: int


class Policy(NamedTuple):
    """When the number of engines changes.

    Attributes:
        least: fewest engines.
        most: most engines.
        waiting_tokens: waiting prompt tokens for each engine beyond which more are wanted.
        up_after_s: seconds that they must wait, all the time.
        down_after_s: seconds that all engines must have too little to do, all the time.
    """

    least: int
    most: int
    waiting_tokens: int
    up_after_s: float
    down_after_s: float


class Autoscaler:
    """The number of engines that is wanted now.

    Attributes:
        wanted: that number, between the policy's bounds.
    """

    def __init__(self, policy: Policy, wanted: int = 0) -> None:
        self._policy = policy
        self.wanted = _within(policy, wanted)
        self._crowded_since_s: float | None = None
        self._calm_since_s: float | None = None
        # Fewest tokens that waited since then.
        self._fewest_waiting = 0

    def change(self, policy: Policy) -> None:
        """Follows another policy from now on."""
        self._policy = policy
        self._want(_within(policy, self.wanted))

    def decide(self, now_s: float, loads: Sequence[Load]) -> int:
        """Returns how many engines are wanted.

        Nothing changes while an engine that is wanted does not serve: what it will take over is
        not known yet.

        Args:
            now_s: a clock that only goes forward, seconds.
            loads: of the engines that serve now.
        """
        if len(loads) < self.wanted:
            self._crowded_since_s = self._calm_since_s = None
            return self.wanted
        waiting = sum(load.waiting_tokens for load in loads)
        self._look_for_crowd(now_s, waiting)
        self._look_for_calm(now_s, waiting, loads)
        return self.wanted

    def _look_for_crowd(self, now_s: float, waiting: int) -> None:
        policy = self._policy
        if waiting <= policy.waiting_tokens * self.wanted:
            self._crowded_since_s = None
            return
        if self._crowded_since_s is None:
            self._crowded_since_s, self._fewest_waiting = now_s, waiting
        self._fewest_waiting = min(self._fewest_waiting, waiting)
        if now_s - self._crowded_since_s >= policy.up_after_s:
            enough = math.ceil(self._fewest_waiting / policy.waiting_tokens)
            self._want(_within(policy, min(enough, _MOST_GROWTH * self.wanted)))

    def _look_for_calm(self, now_s: float, waiting: int, loads: Sequence[Load]) -> None:
        left = self.wanted - 1
        rows = sum(load.rows for load in loads) / len(loads) if loads else 0
        calm = (
            left >= self._policy.least
            and waiting <= _CALM_WAITING_SHARE * self._policy.waiting_tokens * left
            and sum(load.running for load in loads) <= _CALM_ROWS_SHARE * rows * left
        )
        if not calm:
            self._calm_since_s = None
            return
        if self._calm_since_s is None:
            self._calm_since_s = now_s
        if now_s - self._calm_since_s >= self._policy.down_after_s:
            self._want(left)

    def _want(self, number: int) -> None:
        self.wanted = number
        self._crowded_since_s = self._calm_since_s = None


def _within(policy: Policy, number: int) -> int:
    return max(policy.least, min(policy.most, number))
