"""Whether masks are to look for tokens that must come.

Looking costs the threads that compute masks time in which a step waits for them, and it is of use
if a later step computes what was found side by side. With many rows such a step may take longer
than it is worth (`DraftLengths.forced_pay`): then the rows draw what was found one by one, and all
of the search was for nothing.

Owns the comparison of both, and the pauses after which the search is tried again.
"""

from __future__ import annotations

from typing import Final

# So many tokens must be found before anything is concluded, and of them so many be computed side by
# side for the search to go on.
_EVIDENCE: Final = 64
_LEAST_SHARE: Final = 0.25
# Calls without a search: at first, and after several searches in vain.
_FIRST_PAUSE: Final = 16
_LONGEST_PAUSE: Final = 256


class ForcedSearch:
    """What became of the tokens that masks found to come for sure."""

    __slots__ = ("_computed", "_found", "_latest", "_next_pause", "_paused", "_previous")

    def __init__(self) -> None:
        """The first calls search."""
        self._found = self._computed = 0
        # Found by the last two calls, which no plan may know yet.
        self._latest = self._previous = 0
        # Calls still to pass without a search, and of the next pause.
        self._paused = 0
        self._next_pause = _FIRST_PAUSE

    @property
    def is_paused(self) -> bool:
        """Whether the next call does not search."""
        return self._paused > 0

    def begins(self) -> bool:
        """Whether the call for masks that is made now searches."""
        if not self._paused:
            self._conclude()
        if self._paused:
            self._paused -= 1
            return False
        return True

    def _conclude(self) -> None:
        """Decides about a pause if enough was found that plans could know."""
        self._found += self._previous
        self._previous, self._latest = self._latest, 0
        if self._found < _EVIDENCE:
            return
        is_of_use = self._computed >= _LEAST_SHARE * self._found
        if not is_of_use:
            self._paused = self._next_pause
        self._next_pause = _FIRST_PAUSE if is_of_use else min(2 * self._next_pause, _LONGEST_PAUSE)
        self._found = self._computed = self._previous = 0

    def note_found(self, num_tokens: int) -> None:
        """A call found so many tokens behind its draws that nobody knew."""
        self._latest += num_tokens

    def note_computed(self, num_tokens: int) -> None:
        """A step was planned that computes so many of them beside draws."""
        self._computed += num_tokens
