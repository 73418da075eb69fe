"""An answer without calls: text, and nothing else."""

from __future__ import annotations

from typing import Protocol

from headrace_service.output_forms.parts import Part, Text


class AnswerReader(Protocol):
    """Reads an answer while its text arrives."""

    @property
    def holds(self) -> bool:
        """Whether text that came is in no part yet."""

    def feed(self, text: str) -> None:
        """Takes more text."""

    def finish(self) -> None:
        """The output ends here."""


class PlainReader:
    """Passes text on.

    Args:
        parts: where it is appended.
        is_after_marker: whether whitespace at the beginning belongs to something else.
    """

    def __init__(self, parts: list[Part], is_after_marker: bool) -> None:
        self._parts = parts
        self._skips = is_after_marker
        self.holds = False

    def feed(self, text: str) -> None:
        """Takes more text."""
        if self._skips:
            text = text.lstrip()
        if text:
            self._skips = False
            self._parts.append(Text(text))

    def finish(self) -> None:
        """The output ends here."""
