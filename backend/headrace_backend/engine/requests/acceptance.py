"""How often the model agrees with what is drafted for it.

Owns the count of drafts that were tried and of those that were accepted, of which old ones fade,
and what rows of one step say of each other. Does not own what follows from it (`draft_lengths`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

# Drafts of one row in a step.
_MOST_TRIED: Final = 8
# Drafts after which one counts half: of what is believed, and of what warns that it has changed.
_HALF_LIFE: Final = 96
_RECENT_HALF_LIFE: Final = 8
# Deviations by which what happened lately differs from what is believed, so that it is believed
# instead. With fewer, rows would be taken for others by chance.
_CHANGED: Final = 2.5
_LEAST_VARIANCE: Final = 1e-9


class Acceptance:
    """Drafts tried and accepted lately.

    A draft is tried if all before it in its step were accepted: behind the first one that is
    rejected nobody knows. Many drafts are remembered, so that chance does not decide how many come
    next; where the last ones say something else, only these count.
    """

    __slots__ = (
        "_fading",
        "_recent_fading",
        "accepted",
        "drafted_in",
        "is_new",
        "recently_accepted",
        "recently_tried",
        "staked_us",
        "tried",
    )

    def __init__(self, half_life: int = _HALF_LIFE, accepted: float = 0.0, tried: float = 0.0) -> None:
        """Begins with drafts that count as accepted and tried.

        Args:
            half_life: Drafts after which one counts half.
            accepted: Number of drafts accepted.
            tried: Number of drafts tried.
        """
        self._fading = [0.5 ** (count / half_life) for count in range(_MOST_TRIED + 1)]
        recent_half_life = min(half_life, _RECENT_HALF_LIFE)
        self._recent_fading = [0.5 ** (count / recent_half_life) for count in range(_MOST_TRIED + 1)]
        self.accepted = self.recently_accepted = accepted
        self.tried = self.recently_tried = tried
        # Number of the choice (`draft_lengths`) that last gave it drafts.
        self.drafted_in = 0
        # Whether no result is known, and what drafts cost until then (`draft_lengths`).
        self.is_new, self.staked_us = not tried, 0.0

    def note(self, num_drafts: int, num_settled: int) -> None:
        """Notes that a step settled `num_settled` tokens, at least 1, with so many drafts."""
        self.is_new = False
        tried = min(num_drafts, num_settled)
        place = min(tried, _MOST_TRIED)
        fading, recent_fading = self._fading[place], self._recent_fading[place]
        self.tried = fading * self.tried + tried
        self.accepted = fading * self.accepted + num_settled - 1
        self.recently_tried = recent_fading * self.recently_tried + tried
        self.recently_accepted = recent_fading * self.recently_accepted + num_settled - 1
        if self._has_changed():
            self.tried, self.accepted = self.recently_tried, self.recently_accepted

    def _has_changed(self) -> bool:
        tried, recently_tried = self.tried, self.recently_tried
        # As if one more draft had been accepted and one more not: a share of 1 may be chance too.
        believed = (self.accepted + 1) / (tried + 2)
        error = self.recently_accepted / recently_tried - self.accepted / tried
        return error * error * recently_tried > _CHANGED * _CHANGED * believed * (1 - believed)

    def expect(self, share: float, weight: float) -> None:
        """Before anything was tried: `share` counts as much as `weight` drafts of its own."""
        self.accepted = self.recently_accepted = share * weight
        self.tried = self.recently_tried = weight

    def doubt(self) -> None:
        """What is known is old, and counts half from now on."""
        self.tried *= 0.5
        self.accepted *= 0.5
        self.recently_tried *= 0.5
        self.recently_accepted *= 0.5

    @property
    def share(self) -> float:
        """Share of drafts that is accepted; something was tried or is expected."""
        return self.accepted / self.tried


def pooled_shares(rows: Sequence[Acceptance]) -> npt.NDArray[np.float64]:
    """Shares of accepted drafts, float64 [num_rows], each with what the other rows say of it.

    Where rows differ no more than chance lets them, each is taken for what they are together: the
    row that was lucky lately would have the most drafts otherwise, and would be lucky no more.
    Where they differ, each is what it was itself. What lies between is weighed by the share of the
    shares' variance that is not chance (an intraclass correlation; DerSimonian and Laird's estimate
    of the variance between groups).

    Args:
        rows: Rows of one step, at least one; something was tried or is expected of each.
    """
    tried = np.array([row.tried for row in rows])
    accepted = np.array([row.accepted for row in rows])
    total = float(tried.sum())
    mean = float(accepted.sum()) / total
    spread = mean * (1 - mean)
    room = total - float((tried * tried).sum()) / total
    own: npt.NDArray[np.float64] = accepted / tried
    if len(rows) == 1 or spread < _LEAST_VARIANCE or room < _LEAST_VARIANCE:
        return own
    deviations = float((tried * (own - mean) ** 2).sum()) / spread
    differing = min(max((deviations - (len(rows) - 1)) / room, 0.0), 1.0)
    if not differing:
        return np.full(len(rows), mean)
    weight = 1 / differing - 1
    pooled: npt.NDArray[np.float64] = (accepted + weight * mean) / (tried + weight)
    return pooled
