"""The rules that a request breaks, collected so that its caller hears of all of them at once.

Owns the collection. The rules are those of
`headrace_request.rules`, `validation` and `conversation`.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace_service import errors


class Violations:
    """The broken rules of one request."""

    def __init__(self) -> None:
        self._found: list[errors.Violation] = []

    def add(self, field: str, description: str) -> None:
        """Notes one."""
        self._found.append(errors.Violation(field, description))

    def require(self, kept: bool, field: str, description: str) -> None:
        """Notes a rule unless it is kept."""
        if not kept:
            self.add(field, description)

    def extend(self, found: Sequence[errors.Violation]) -> None:
        """Notes several."""
        self._found += found

    def raise_if_any(self) -> None:
        """Raises INVALID_ARGUMENT with all of them, if there are any."""
        if self._found:
            raise errors.invalid(self._found)
