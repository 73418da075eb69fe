"""The section of an output in which the model reasons, before it answers.

Owns where the section begins and ends: at the output's very beginning, or not at all. What is
behind it goes to whoever reads the answer.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from headrace_service.output_forms.parts import Part, Reasoning
from headrace_service.output_forms.text_pieces import EdgedText, Expected, MarkerSearch


class _Place(enum.Enum):
    # Where the section may begin.
    BEFORE = enum.auto()
    INSIDE = enum.auto()
    BEHIND = enum.auto()


class ReasoningReader:
    """Tells reasoning from the answer.

    Args:
        parts: where reasoning is appended.
        markers: those that begin and end a section.
        begins_inside: whether the prompt ends within a section.
        answer: takes the text that is no reasoning, and whether a section stood before it.
    """

    def __init__(
        self, parts: list[Part], markers: tuple[str, str], begins_inside: bool, answer: Callable[[str, bool], None]
    ) -> None:
        self._place = _Place.INSIDE if begins_inside else _Place.BEFORE
        self._expected = Expected(markers[0], after_space=True)
        self._search = MarkerSearch(markers[1])
        self._text = EdgedText(lambda text: parts.append(Reasoning(text)), is_after_marker=True)
        self._answer = answer
        self._had_section = begins_inside

    @property
    def holds(self) -> bool:
        """Whether text that came is neither reasoning nor answer yet."""
        return self._expected.holds or self._search.holds or self._text.holds

    @property
    def is_inside(self) -> bool:
        """Whether what comes next is reasoning."""
        return self._place is _Place.INSIDE

    @property
    def is_undecided(self) -> bool:
        """Whether it has not shown yet whether there is a section."""
        return self._place is _Place.BEFORE

    def feed(self, text: str) -> None:
        """Takes more text."""
        if self._place is _Place.BEFORE:
            text = self._look_for_start(text)
        if self._place is _Place.INSIDE:
            text = self._look_for_end(text)
        if text:
            self._answer(text, self._had_section)

    def finish(self) -> None:
        """The output ends here."""
        edge = self._expected.flush()
        if edge:
            self._answer(edge, False)
        self._text.feed(self._search.flush())
        self._text.finish()

    def _look_for_start(self, text: str) -> str:
        decided = self._expected.feed(text)
        if decided is None:
            return ""
        space, start, rest = decided
        self._had_section = bool(start)
        self._place = _Place.INSIDE if start else _Place.BEHIND
        return rest if start else space + rest

    def _look_for_end(self, text: str) -> str:
        text, marker, rest = self._search.feed(text)
        self._text.feed(text)
        if marker:
            self._text.marker()
            self._place = _Place.BEHIND
        return rest
