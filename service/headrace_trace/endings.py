"""How a request ended: what its caller got, why, and where it was then.

Owns the judgement; the words are words.py's. A Trace comes in, an Ending goes out.
"""

from __future__ import annotations

from headrace_trace.explanation import Ending
from headrace_trace.trace_model import Trace

_WHOLE = frozenset({"stop", "length"})
# The type of a failure that is no gRPC status: its call ends OK, and its output with an error.
_ENGINE_ERROR = "engine_error"


def ending_of(trace: Trace) -> Ending:
    """Says how a request ended."""
    return Ending(
        status=trace.call_status or _own_status(trace),
        failed=trace.failed,
        reasons=tuple(dict.fromkeys(trace.finish_reasons)),
        error_type=trace.error_type,
        where=_where(trace),
    )


def _is_whole(trace: Trace) -> bool:
    return bool(trace.finish_reasons) and _WHOLE.issuperset(trace.finish_reasons)


def _own_status(trace: Trace) -> str:
    """The status as far as the request's own span tells it.

    A caller who left and one who called Cancel look alike.
    """
    if trace.error_type == _ENGINE_ERROR or (not trace.error_type and _is_whole(trace)):
        return "OK"
    return trace.error_type


def _where(trace: Trace) -> str:
    """The phase that it ended in."""
    if _is_whole(trace):
        return "delivery"
    last = max(trace.phases, key=lambda phase: (phase.end_ns, phase.start_ns), default=None)
    return last.name if last is not None else ""
