"""An output's sections of reasoning, found by their tokens alone.

Owns the search for the markers and the count of the sections' tokens. What follows from that for a
draw is `reasoning_place`.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Sequence

from headrace_request.reasoning import Reasoning


class Stage(enum.Enum):
    """Which part of the output the next token belongs to."""

    # No start marker was drawn so far.
    BEFORE = enum.auto()
    INSIDE = enum.auto()
    # The section was ended, and the beginning of the answer is forced.
    CLOSING = enum.auto()
    # The section has ended, or can't begin any more.
    BEHIND = enum.auto()


class _MarkerSearch:
    """Looks for a sequence of tokens in a growing one, with Knuth, Morris and Pratt."""

    def __init__(self, marker: Sequence[int]) -> None:
        """Nothing is seen. `marker` has at least one token, or is never asked for."""
        self.marker = marker
        # Tokens of the marker that the tokens seen so far end with.
        self.num_matched = 0
        # Of each prefix of the marker, the longest shorter prefix that it ends with.
        self._borders = [0] * len(marker)
        for index in range(1, len(marker)):
            self._borders[index] = self._longest(self._borders[index - 1], marker[index])

    def copy(self) -> _MarkerSearch:
        """A search that may see other tokens."""
        return copy.copy(self)

    def feed(self, token: int) -> bool:
        """Sees one more token; returns whether the marker is complete with it."""
        self.num_matched = self._longest(self.num_matched, token)
        return self.num_matched == len(self.marker)

    def _longest(self, length: int, token: int) -> int:
        while length and self.marker[length] != token:
            length = self._borders[length - 1]
        return length + (self.marker[length] == token)


class ReasoningSection:
    """One output's section, or its sections where they repeat, token by token."""

    def __init__(self, reasoning: Reasoning, at_beginning: bool) -> None:
        """No token was drawn.

        Args:
            reasoning: Markers and budget.
            at_beginning: Whether a section begins with the output's first token or never.
        """
        self._reasoning = reasoning
        self._start = _MarkerSearch(reasoning.start_ids)
        self._end = _MarkerSearch(reasoning.end_ids)
        self._max_tokens = reasoning.max_tokens
        self._repeats = reasoning.repeats and not at_beginning
        self._num_closing = 0
        self._at_beginning = at_beginning
        self.stage = Stage.INSIDE if reasoning.begins_inside else Stage.BEFORE
        self.num_tokens = 0
        # Tokens of sections, those of end markers among them.
        self._num_inside = 0
        # Position behind the section; 0 where there was none.
        self.answer_begins = 0

    def copy(self) -> ReasoningSection:
        """A section that may go on in another way."""
        copied = copy.copy(self)
        copied._start, copied._end = self._start.copy(), self._end.copy()
        return copied

    def feed(self, token: int) -> None:
        """Sees the output's next token."""
        self.num_tokens += 1
        if self.stage is Stage.BEFORE:
            if self._start.feed(token):
                self.stage = Stage.INSIDE
            elif self._at_beginning and self._start.num_matched < self.num_tokens:
                self.stage = Stage.BEHIND
        elif self.stage is Stage.INSIDE:
            is_forced = self.forced is not None
            self._num_inside += 1
            if self._end.feed(token):
                self._end_section(is_forced)
        elif self.stage is Stage.CLOSING:
            self._num_closing += 1
            self._close()

    def _end_section(self, is_forced: bool) -> None:
        """The end marker is complete; `is_forced`: the budget is spent."""
        self.answer_begins = self.num_tokens
        if is_forced:
            self._close()
        elif self._repeats:
            self.stage = Stage.BEFORE
            self._num_inside -= len(self._end.marker)
            self._start = _MarkerSearch(self._reasoning.start_ids)
            self._end = _MarkerSearch(self._reasoning.end_ids)
        else:
            self.stage = Stage.BEHIND

    def _close(self) -> None:
        """Goes on with the closing tokens, or behind them."""
        is_over = self._num_closing == len(self._reasoning.closing_ids)
        self.stage = Stage.BEHIND if is_over else Stage.CLOSING
        self.answer_begins = self.num_tokens

    @property
    def has_begun(self) -> bool:
        """Whether the output has, or had, a section."""
        return self.stage is Stage.INSIDE or self.answer_begins > 0

    @property
    def next_of_start(self) -> int:
        """The token that would go on with the start marker, before a section."""
        return self._start.marker[self._start.num_matched]

    @property
    def forced(self) -> int | None:
        """The token that must come next, once the budget is spent; None: it is not."""
        if self.stage is Stage.CLOSING:
            return self._reasoning.closing_ids[self._num_closing]
        if self.stage is not Stage.INSIDE or self._max_tokens is None or self._num_inside < self._max_tokens:
            return None
        return self._end.marker[self._end.num_matched]

    @property
    def next_forced(self) -> int | None:
        """Position of the first token that may have to be forced; None: none will be."""
        if self.stage is Stage.BEHIND or self._max_tokens is None:
            return None
        if self.stage is Stage.CLOSING:
            return self.num_tokens
        num_left = max(0, self._max_tokens - self._num_inside)
        if self.stage is Stage.INSIDE:
            return self.num_tokens + num_left
        return self.num_tokens + len(self._start.marker) - self._start.num_matched + num_left
