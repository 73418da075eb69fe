"""Calls that begin with a marker and a function's name, in whatever form arguments follow.

Owns where a call begins. What stands behind a marker and names no function is text, and so is the
marker that ends a call, before there was any.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import ClassVar, Final

from headrace_service.output_forms.call_format import CallReader, Spelling
from headrace_service.output_forms.json_call import JsonState
from headrace_service.output_forms.parts import Calls, Part
from headrace_service.output_forms.text_pieces import Expected, Name

# Longer names are none.
MAX_NAME_CHARACTERS: Final = 256


class MarkedCallReader(CallReader):
    """Reads calls up to their names. A format adds the places of a name and of arguments.

    Names stand behind a word, which is text and no marker; a format without one has other places.

    Args:
        parts: where parts are appended.
        calls: takes the calls.
        spelling: of markers.
        is_after_marker: whether whitespace at the beginning belongs to something else.
    """

    # Begins a call, and ends one.
    markers: ClassVar[tuple[str, str]]
    # Stands between the first marker and a name.
    word: ClassVar[str]

    def __init__(self, parts: list[Part], calls: Calls, spelling: Spelling, is_after_marker: bool) -> None:
        super().__init__(parts, calls, spelling, is_after_marker)
        self._begin_head("")

    @abc.abstractmethod
    def _is_of_name(self, char: str) -> bool:
        """Whether a function's name may have a character."""

    @abc.abstractmethod
    def _in_name(self, text: str) -> str:
        """The place within a function's name."""

    def _head_places(self) -> tuple[Callable[[str], str], ...]:
        """Returns the places up to where a call has begun, the first one first."""
        return (self._behind_marker, self._in_name)

    def _expected_in_head(self) -> Expected:
        """Returns what must stand in those places beside the name."""
        return Expected(self.word, after_space=True)

    @property
    def holds(self) -> bool:
        """Whether text that came is in no part yet."""
        return super().holds or self._at in self._head_places()

    def finish(self) -> None:
        """The output ends here."""
        if self._at in self._head_places():
            self._no_call(self._expected.flush())
        super().finish()

    def _begin(self) -> Callable[[str], str]:
        self._look_for(*self.markers)
        return self._in_text

    def _begin_head(self, marker: str) -> None:
        # What came since the marker before the name, and the name.
        self._head, self._name = marker, Name(self._is_of_name, MAX_NAME_CHARACTERS)
        self._expected = self._expected_in_head()

    def _in_text(self, text: str) -> str:
        before, marker, rest = self._find(text)
        self._text.feed(before)
        if marker == self._spelling(self.markers[0]):
            self._begin_head(marker)
            self._search, self._at = None, self._head_places()[0]
        elif marker and self._calls.count:
            # The end of a call, which was reported.
            self._text.marker()
        else:
            self._text.feed(marker)
        return rest

    def _behind_marker(self, text: str) -> str:
        decided = self._expected.feed(text)
        if decided is None:
            return ""
        space, word, rest = decided
        self._head += space + word
        if word:
            self._at = self._in_name
        else:
            self._no_call()
        return rest

    def _no_call(self, behind: str = "") -> None:
        """What came since the marker is no call: it is text, and so is what is behind the name."""
        self._text.feed(self._head + self._name.text + behind)
        self._at = self._begin()

    def _after_call(self, state: JsonState) -> None:
        raise AssertionError("the format has no objects of JSON")
