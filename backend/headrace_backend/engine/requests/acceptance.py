"""How often the model agrees with what is drafted for it.

Owns the count of drafts that were tried and of those that were accepted, of which old ones fade.
Does not own what follows from it (`draft_lengths`).
"""

from __future__ import annotations

from typing import Final

# Drafts of one row in a step.
_MOST_TRIED: Final = 8


class Acceptance:
    """Drafts tried and accepted lately.

    A draft is tried if all before it in its step were accepted: behind the first one that is
    rejected nobody knows.
    """

    __slots__ = ("_fading", "accepted", "drafted_in", "tried")

    def __init__(self, half_life: int = 16, accepted: float = 0.0, tried: float = 0.0) -> None:
        """Begins with drafts that count as accepted and tried.

        Args:
            half_life: Drafts after which one counts half.
            accepted: Number of drafts accepted.
            tried: Number of drafts tried.
        """
        self._fading = [0.5 ** (count / half_life) for count in range(_MOST_TRIED + 1)]
        self.accepted = accepted
        self.tried = tried
        # Number of the choice (`draft_lengths`) that last gave it drafts.
        self.drafted_in = 0

    def note(self, num_drafts: int, num_settled: int) -> None:
        """Notes that a step settled `num_settled` tokens, at least 1, with so many drafts."""
        tried = min(num_drafts, num_settled)
        fading = self._fading[min(tried, _MOST_TRIED)]
        self.tried = fading * self.tried + tried
        self.accepted = fading * self.accepted + num_settled - 1

    def expect(self, share: float, weight: float) -> None:
        """Before anything was tried: `share` counts as much as `weight` drafts of its own."""
        self.accepted, self.tried = share * weight, weight

    def doubt(self) -> None:
        """What is known is old, and counts half from now on."""
        self.tried *= 0.5
        self.accepted *= 0.5

    @property
    def share(self) -> float:
        """Share of drafts that is accepted; something was tried or is expected."""
        return self.accepted / self.tried
