"""Reads Gemma 4's calls: values are JSON's, but strings stand between the marker <|"|> as they are.

Keys are bare. The arguments that are reported are JSON all the same, translated as they arrive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from headrace_service.output_forms.call_format import Spelling
from headrace_service.output_forms.gemma.grammar import CLOSE, OPEN, QUOTE
from headrace_service.output_forms.json_values import as_json, json_text
from headrace_service.output_forms.marked_call import MarkedCallReader
from headrace_service.output_forms.parts import Calls, Part
from headrace_service.output_forms.text_pieces import SPACE, Expected, MarkerSearch

# What templates write for a value that is none.
_NOTHING: Final = ("None", "none", "nil")


class GemmaReader(MarkedCallReader):
    """Reads the format. What follows arguments that broke off is passed over, up to the marker."""

    markers = (OPEN, CLOSE)
    word = "call:"

    def __init__(self, parts: list[Part], calls: Calls, spelling: Spelling, is_after_marker: bool) -> None:
        super().__init__(parts, calls, spelling, is_after_marker)
        # The brackets that are open, and whether the innermost one has an entry.
        self._open: list[str] = []
        self._has_entries = False
        # Characters of a key, or of a value that is no string.
        self._kept: list[str] = []

    @property
    def holds(self) -> bool:
        """Whether text that came is in no part yet."""
        return super().holds or self._expected.holds or bool(self._kept)

    def _is_of_name(self, char: str) -> bool:
        return char not in "{}<>\n"

    def _in_name(self, text: str) -> str:
        rest = self._name.feed(text)
        if rest.startswith("{") and self._name.text.strip():
            self._text.marker()
            self._calls.start(self._name.text.strip())
            self._open_bracket("{")
            return rest[1:]
        if rest:
            self._no_call()
        return rest

    # -- arguments: one method for each place within them

    def _open_bracket(self, bracket: str) -> None:
        self._calls.add(bracket)
        self._open.append(bracket)
        self._has_entries = False
        self._expect_entry()

    def _expect_entry(self) -> None:
        """Goes to where a key may come, or a value of an array."""
        self._kept, self._expected = [], Expected(self._spelling(QUOTE), after_space=True)
        self._at = self._before_key if self._open[-1] == "{" else self._before_value

    def _before_key(self, text: str) -> str:
        return self._quoted_or(text, self._in_quoted_key, self._in_key)

    def _before_value(self, text: str) -> str:
        return self._quoted_or(text, self._in_string, self._in_bare)

    def _quoted_or(self, text: str, quoted: Callable[[str], str], bare: Callable[[str], str]) -> str:
        """Goes on behind a quote, or without one."""
        decided = self._expected.feed(text)
        if decided is None:
            return ""
        _, quote, rest = decided
        if not quote:
            self._at = bare
            return rest
        if quoted == self._in_string:
            self._begin_value('"')
        self._search, self._at = MarkerSearch(*self._ends_of_strings()), quoted
        return rest

    def _ends_of_strings(self) -> tuple[str, ...]:
        """A quote; and the marker of a call's end where no text can spell it."""
        close = self._spelling(CLOSE)
        return (self._spelling(QUOTE),) if close == CLOSE else (self._spelling(QUOTE), close)

    def _in_quoted_key(self, text: str) -> str:
        key, marker, rest = self._find(text)
        self._kept.append(key)
        if marker:
            self._search = None
            if marker != self._spelling(QUOTE):
                return self._break(marker + rest)
            self._at = self._in_key
        return rest

    def _in_key(self, text: str) -> str:
        for place, char in enumerate(text):
            if char == ":":
                key = "".join(self._kept).strip()
                self._begin_entry()
                self._calls.add(f"{json_text(key)}: ")
                self._kept, self._expected = [], Expected(self._spelling(QUOTE), after_space=True)
                self._at = self._before_value
                return text[place + 1 :]
            if char == "}" and not "".join(self._kept).strip():
                return self._close_bracket("}", text[place + 1 :])
            if char in "{}[]," or char == self._spelling(CLOSE)[0]:
                return self._break(text[place:])
            self._kept.append(char)
        return ""

    def _begin_entry(self) -> None:
        if self._has_entries:
            self._calls.add(", ")
        self._has_entries = True

    def _begin_value(self, text: str) -> None:
        """Reports the beginning of a value, which in an array is that of an entry."""
        if self._open[-1] == "[":
            self._begin_entry()
        self._calls.add(text)

    def _in_string(self, text: str) -> str:
        text, marker, rest = self._find(text)
        if text:
            self._calls.add(json_text(text)[1:-1])
        if marker:
            self._search = None
            if marker != self._spelling(QUOTE):
                return self._break(marker + rest)
            self._calls.add('"')
            self._at = self._behind_value
        return rest

    def _in_bare(self, text: str) -> str:
        for place, char in enumerate(text):
            is_begun = bool("".join(self._kept).strip())
            if char in "{[" and not is_begun:
                self._begin_value("")
                self._open_bracket(char)
                return text[place + 1 :]
            if char in ",}]":
                if is_begun:
                    self._begin_value(_as_json("".join(self._kept).strip()))
                elif char != "]" or self._open[-1] != "[":
                    return self._break(text[place:])
                self._kept, self._at = [], self._behind_value
                return text[place:]
            if char in "{[" or char == self._spelling(CLOSE)[0]:
                return self._break(text[place:])
            self._kept.append(char)
        return ""

    def _behind_value(self, text: str) -> str:
        rest = text.lstrip(SPACE)
        if not rest:
            return ""
        if rest[0] == ",":
            self._expect_entry()
            return rest[1:]
        if rest[0] in "}]":
            return self._close_bracket(rest[0], rest[1:])
        return self._break(rest)

    def _close_bracket(self, bracket: str, rest: str) -> str:
        if self._open[-1] + bracket not in ("{}", "[]"):
            return self._break(bracket + rest)
        self._calls.add(bracket)
        self._open.pop()
        self._kept, self._has_entries = [], True
        if self._open:
            self._at = self._behind_value
        else:
            self._calls.finish(whole=True)
            self._at = self._begin()
        return rest

    def _break(self, rest: str) -> str:
        """The arguments are none any more: what follows is passed over."""
        self._calls.finish(whole=False)
        self._open, self._kept = [], []
        self._look_for(CLOSE)
        self._at = self._past_broken
        return rest

    def _past_broken(self, text: str) -> str:
        _, marker, rest = self._find(text)
        if marker:
            self._at = self._begin()
        return rest


def _as_json(text: str) -> str:
    """Returns a value as JSON: as it is if it is that, else as a string."""
    return "null" if text in _NOTHING else as_json(text)
