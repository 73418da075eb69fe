"""The rules that a request breaks, collected so that its caller hears of all of them at once.

Owns the collection. The rules are `validation`'s and `conversation`'s.
"""

from __future__ import annotations

import math
import struct

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

    def in_range(self, value: float, low: float, high: float, field: str, low_is_open: bool = False) -> None:
        """Notes a number that is not finite or not in the range; bounds count as rounded to
        float32, as the wire has them.
        """
        above = value > low if low_is_open else value >= float32(low)
        if not (math.isfinite(value) and above and value <= float32(high)):
            self.add(field, f"must be {'above' if low_is_open else 'at least'} {low:g} and at most {high:g}")

    def raise_if_any(self) -> None:
        """Raises INVALID_ARGUMENT with all of them, if there are any."""
        if self._found:
            raise errors.invalid(self._found)


def float32(value: float) -> float:
    """A number as the wire has it."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded
