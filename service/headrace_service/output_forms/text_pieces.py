"""Text that arrives in pieces: markers found in it, and the whitespace around them.

Owns what is held back until it is decided, never more than the beginning of a marker or a run of
whitespace, and all of it the same however the text is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

# Whitespace of formats, as JSON has it.
SPACE: Final = " \t\r\n"
# Whitespace that is looked past; before what has more, nothing is expected any more.
_MAX_SPACE: Final = 256


class MarkerSearch:
    """Finds the first of several markers.

    Args:
        markers: none of them within another, so that which one comes first does not depend on how
            much of the text is there.
    """

    def __init__(self, *markers: str) -> None:
        assert not any(one is not other and one in other for one in markers for other in markers)
        self._markers = markers
        self._held = ""

    @property
    def holds(self) -> bool:
        """Whether the text so far ends with the beginning of a marker."""
        return bool(self._held)

    def feed(self, text: str) -> tuple[str, str, str]:
        """Takes more text.

        Returns:
            Text without a marker, the marker that follows ("": none does so far), and what is
            behind the marker.
        """
        text, self._held = self._held + text, ""
        places = [(text.find(marker), marker) for marker in self._markers]
        found = min([place for place in places if place[0] >= 0], default=None)
        if found is not None:
            at, marker = found
            return text[:at], marker, text[at + len(marker) :]
        num_held = max(_overlap(text, marker) for marker in self._markers)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], "", ""

    def flush(self) -> str:
        """Returns what was held back, which has become no marker."""
        text, self._held = self._held, ""
        return text


class EdgedText:
    """Text whose whitespace before a marker, and after one, belongs to the marker.

    Args:
        emit: takes what is text.
        is_after_marker: whether whitespace at the beginning is left out.
    """

    def __init__(self, emit: Callable[[str], None], is_after_marker: bool = False) -> None:
        self._emit = emit
        self._skips = is_after_marker
        # Whitespace that may stand before a marker.
        self._held: list[str] = []

    @property
    def holds(self) -> bool:
        """Whether whitespace waits for what follows it."""
        return bool(self._held)

    def feed(self, text: str) -> None:
        """Takes more text."""
        if self._skips:
            text = text.lstrip()
        if not text:
            return
        self._skips = False
        kept = text.rstrip()
        if kept:
            self._emit("".join([*self._held, kept]))
            self._held = []
        if len(kept) < len(text):
            self._held.append(text[len(kept) :])

    def marker(self) -> None:
        """A marker follows, and perhaps more text behind it."""
        self._held = []
        self._skips = True

    def finish(self) -> None:
        """Nothing follows."""
        if self._held:
            self._emit("".join(self._held))
            self._held = []


class Name:
    """A name: the characters up to the first one that no name has.

    Args:
        has: whether a name may have a character.
        most: characters that a name may have.
    """

    def __init__(self, has: Callable[[str], bool], most: int) -> None:
        self._has = has
        self._most = most
        self._characters: list[str] = []

    @property
    def text(self) -> str:
        """The name so far."""
        return "".join(self._characters)

    def feed(self, text: str) -> str:
        """Takes more text; returns what is behind the name: nothing while it may go on."""
        for place, char in enumerate(text):
            if len(self._characters) == self._most or not self._has(char):
                return text[place:]
            self._characters.append(char)
        return ""


class Expected:
    """One of several texts, of which one must come next.

    Args:
        texts: none of them the beginning of another.
        after_space: whether whitespace may stand before it.
    """

    def __init__(self, *texts: str, after_space: bool = False) -> None:
        self._texts = texts
        self._after_space = after_space
        self._held = ""

    @property
    def holds(self) -> bool:
        """Whether nothing is decided yet, though something came."""
        return bool(self._held)

    def feed(self, text: str) -> tuple[str, str, str] | None:
        """Takes more text.

        Returns:
            The whitespace, the text that came ("": none of them), and what is behind both; None
            while that is not decided.
        """
        whole, self._held = self._held + text, ""
        rest = whole.lstrip(SPACE) if self._after_space else whole
        space = whole[: len(whole) - len(rest)]
        found = next((text for text in self._texts if rest.startswith(text)), "")
        if not found and len(space) <= _MAX_SPACE and any(text.startswith(rest) for text in self._texts):
            self._held = whole
            return None
        return (space, found, rest[len(found) :]) if len(space) <= _MAX_SPACE else ("", "", whole)

    def flush(self) -> str:
        """Returns what was held back, which has become none of the texts."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, marker: str) -> int:
    """Returns how many characters at the end of a text begin the marker, not all of it."""
    lengths: Sequence[int] = range(min(len(marker) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(marker[:length])), 0)
