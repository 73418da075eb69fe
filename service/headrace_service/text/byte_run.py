"""A run of byte-fallback tokens (<0x41> and its like) on its way to text.

Owns when such a run is decided. The rule is the tokenizers library's ByteFallback decoder's:
consecutive byte tokens become text if all their bytes together are UTF-8, and one U+FFFD for each
token if they are not. Whether they are shows at the run's end, or with the first byte that no
character has in that place, from which on nothing waits.
"""

from __future__ import annotations

import codecs

_REPLACEMENT = "\ufffd"


class ByteRun:
    """One run while its tokens arrive.

    Args:
        limit: tokens that wait at most for the run's end: what is whole characters by then counts
            as a run of its own. A character's last three bytes may come on top.

    Attributes:
        is_open: whether the last token was a byte token, so that a next one continues the run.
    """

    __slots__ = ("_is_broken", "_limit", "_num_undecided", "_tail", "_text", "is_open")

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self.is_open = False
        self._is_broken = False
        self._num_undecided = 0
        self._text = ""
        self._tail = b""

    def add(self, byte: bytes) -> str | None:
        """Takes the next token's byte.

        Returns:
            The text of all tokens that were undecided, this one among them; None while they stay
            so.
        """
        self.is_open = True
        if self._is_broken:
            return _REPLACEMENT
        self._num_undecided += 1
        try:
            text, consumed = codecs.utf_8_decode(self._tail + byte, "strict", False)
        except UnicodeDecodeError:
            self._is_broken = True
            return self._decide(is_text=False)
        self._text += text
        self._tail = (self._tail + byte)[consumed:]
        if self._num_undecided >= self._limit and not self._tail:
            return self._decide(is_text=True)
        return None

    def end(self) -> str:
        """Ends the run, if there is one, and returns the text of the tokens that were undecided."""
        self.is_open = self._is_broken = False
        return self._decide(is_text=not self._tail)

    def again(self) -> None:
        """Forgets the tokens that are undecided, if there are some: they will be added anew."""
        if self._num_undecided:
            self.end()

    def _decide(self, is_text: bool) -> str:
        text = self._text if is_text else _REPLACEMENT * self._num_undecided
        self._num_undecided, self._text, self._tail = 0, "", b""
        return text
