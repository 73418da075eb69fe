"""How calls and generations ended, in the same words for metrics and spans.

Owns which ends are faults of the server, and the one reason that stands for a whole generation.
"""

from __future__ import annotations

from typing import Final

from headrace_facts import facts

# The status of a call whose time was over.
DEADLINE: Final = "DEADLINE_EXCEEDED"
# Statuses that make a span failed, as OpenTelemetry's conventions for RPC servers have it; the
# others are the caller's business. "engine_error" is a generation's.
FAILURES: Final = frozenset(
    {"UNKNOWN", DEADLINE, "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "engine_error"}
)
_OTHER: Final = "_OTHER"
# The gravest of several outputs' ends stands for the generation.
_GRAVITY: Final = ("error", "invalid", "deadline", "cancelled", "length", "stop")


def finish_reason(generation: facts.Generation) -> str:
    """Returns why a generation ended.

    It is "error" by a fault of the server, "invalid" where the request turned out to ask for what
    can't be, "deadline" by its time, else the gravest reason of its outputs.

    An error that is the caller's (a reader too slow) leaves the outputs their own reasons.
    """
    if generation.error_type == DEADLINE:
        return "deadline"
    if generation.error_type in FAILURES:
        return "error"
    return next((reason for reason in _GRAVITY if reason in generation.finish_reasons), _OTHER)
