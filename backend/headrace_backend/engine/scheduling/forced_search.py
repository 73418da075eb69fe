"""Whether masks are to look for tokens that must come.

Looking costs the threads that compute masks time, and it is of use if a later step computes what
was found side by side. With many rows such a step may take longer than it is worth
(`DraftLengths.forced_pay`), or few forms have such tokens: then the search was for nothing.

Owns the comparison of draws and of tokens that needed none, and the pauses after which the search
is tried again.
"""

from __future__ import annotations

from typing import Final

# Calls of fewer draws always search: that takes little, and with few rows it is of the most use.
_FEW_DRAWS: Final = 8
# So many calls and draws are looked at before anything is concluded, and so many tokens for each
# draw must need none for the search to go on.
_CALLS: Final = 16
_DRAWS: Final = 1024
_LEAST_SHARE: Final = 0.02
# Calls without a search: at first, and after several searches in vain.
_FIRST_PAUSE: Final = 16
_LONGEST_PAUSE: Final = 256


class ForcedSearch:
    """What the search for tokens that must come has brought of late."""

    __slots__ = ("_next_pause", "_num_calls", "_num_computed", "_num_draws", "_paused")

    def __init__(self) -> None:
        """The first calls search."""
        self._num_calls = self._num_draws = self._num_computed = 0
        # Calls still to pass without a search, and those of the next pause.
        self._paused = 0
        self._next_pause = _FIRST_PAUSE

    def is_paused(self, num_draws: int) -> bool:
        """Whether the next call does not search, if so many of its draws ask for it."""
        return self._paused > 0 and num_draws >= _FEW_DRAWS

    def begins(self, num_draws: int) -> bool:
        """Whether the call that is made now searches, which so many of its draws ask for."""
        if num_draws < _FEW_DRAWS:
            return True
        if not self._paused:
            self._conclude()
        if self._paused:
            self._paused -= 1
            return False
        self._num_calls += 1
        self._num_draws += num_draws
        return True

    def note_computed(self, num_tokens: int) -> None:
        """A step was planned that computes so many tokens that must come beside its draws."""
        self._num_computed += num_tokens

    def _conclude(self) -> None:
        if self._num_calls < _CALLS or self._num_draws < _DRAWS:
            return
        is_of_use = self._num_computed >= _LEAST_SHARE * self._num_draws
        if not is_of_use:
            self._paused = self._next_pause
        self._next_pause = _FIRST_PAUSE if is_of_use else min(2 * self._next_pause, _LONGEST_PAUSE)
        self._num_calls = self._num_draws = self._num_computed = 0
