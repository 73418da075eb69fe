"""What the markers and the budget of a reasoning section must be."""

from __future__ import annotations

from headrace_request.reasoning import Reasoning
from headrace_request.rule_kinds import Bounds, Found, Violation, unknown_tokens


class ReasoningSection:
    """Markers of few tokens of the vocabulary, and a budget that the context can hold."""

    def __init__(self, most_marker_tokens: int) -> None:
        """Takes the limit of each marker's tokens."""
        self._most = most_marker_tokens

    def broken(self, field: str, value: Reasoning | None, bounds: Bounds) -> Found:
        """Returns how the value breaks the rule; nothing if it keeps it."""
        if value is None:
            return ()
        least_of_start = 0 if value.begins_inside and not value.repeats else 1
        found = [
            *self._marker(f"{field}.start_ids", value.start_ids, least_of_start, bounds),
            *self._marker(f"{field}.end_ids", value.end_ids, 1, bounds),
            *self._marker(f"{field}.closing_ids", value.closing_ids, 0, bounds),
        ]
        most = bounds.max_context_tokens - 1
        if value.max_tokens is not None and not 0 <= value.max_tokens <= most:
            found.append(Violation(f"{field}.max_tokens", f"must be at least 0 and at most {most}"))
        return found

    def _marker(self, field: str, ids: tuple[int, ...], least: int, bounds: Bounds) -> Found:
        if not least <= len(ids) <= self._most:
            return (Violation(field, f"must have at least {least} and at most {self._most} tokens"),)
        size = bounds.vocabulary_size
        return unknown_tokens(field, [index for index, token in enumerate(ids) if not 0 <= token < size], size)
