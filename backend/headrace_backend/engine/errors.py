"""The one exception by which the engine refuses what a caller asks.

Owns codes and the shape of a refusal. How it becomes a gRPC status with details is the server's
business. Messages reach the client, so they name field, rule and limit, and never repeat what the
caller sent beyond a number.
"""

from __future__ import annotations

import enum

from headrace_request.rule_kinds import Violation as Violation


class RefusalCode(enum.Enum):
    """Names of gRPC status codes, without gRPC."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    NOT_FOUND = "NOT_FOUND"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    OUT_OF_RANGE = "OUT_OF_RANGE"
    UNAVAILABLE = "UNAVAILABLE"


class RefusalReason(enum.Enum):
    """The reason of a refusal, for counting."""

    QUEUE_FULL = "queue_full"
    DEADLINE = "deadline"
    QUOTA = "quota"
    INVALID = "invalid"
    OTHER = "other"


_REASONS = {RefusalCode.INVALID_ARGUMENT: RefusalReason.INVALID}


class RequestRefused(Exception):  # a refusal is an answer, not a fault
    """The engine refuses a request.

    Attributes:
        code: What kind of refusal.
        message: For people; safe to send to the client.
        violations: The broken rules, for INVALID_ARGUMENT.
        retry_after_ns: When another attempt may succeed; None if not by waiting.
        reason: Why, for counting.
        asks_others: Whether the engine waits for the word of others, and is to be asked again after
            `retry_after_ns` before the caller is refused.
    """

    def __init__(
        self,
        code: RefusalCode,
        message: str,
        violations: tuple[Violation, ...] = (),
        retry_after_ns: int | None = None,
        reason: RefusalReason | None = None,
        asks_others: bool = False,
    ) -> None:
        """Keeps what the server turns into a status."""
        super().__init__(message)
        self.code = code
        self.message = message
        self.violations = violations
        self.retry_after_ns = retry_after_ns
        self.asks_others = asks_others
        self.reason = reason or _REASONS.get(code, RefusalReason.OTHER)

    @classmethod
    def invalid(cls, violations: list[Violation]) -> RequestRefused:
        """Returns an INVALID_ARGUMENT refusal that names every broken rule."""
        message = "; ".join(f"{v.field}: {v.description}" for v in violations)
        return cls(RefusalCode.INVALID_ARGUMENT, message, tuple(violations))
