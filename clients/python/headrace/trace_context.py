"""W3C trace contexts, as far as a caller needs them: making one, and what is sent of it.

Owns the form of `traceparent`. A server ignores a malformed one without a word, so that it is
refused here. Strings come in, metadata goes out.
"""

from __future__ import annotations

import re
import secrets

from headrace.errors import invalid

# Version ff and ids of zeros only are invalid; versions to come may add parts, as the server takes
# them.
_TRACEPARENT = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[\x20-\x7e]*)?"
)
_MOST_CHARS = 256


def new_traceparent() -> str:
    """A context that begins a trace, with the flag that asks servers to record it."""
    return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"


def trace_id_of(traceparent: str) -> str:
    """The trace of a context: 32 hex digits. Raises InvalidRequest."""
    return _match(traceparent)[2]


def checked(traceparent: str) -> str:
    """The context itself. Raises InvalidRequest: It is malformed."""
    return _match(traceparent)[0]


def metadata_of(traceparent: str | None) -> tuple[tuple[str, str], ...]:
    """What a call sends of a context, if it has one. Raises InvalidRequest: It is malformed."""
    return () if traceparent is None else (("traceparent", checked(traceparent)),)


def _match(traceparent: str) -> re.Match[str]:
    match = _TRACEPARENT.fullmatch(traceparent) if len(traceparent) <= _MOST_CHARS else None
    if match is None or (match[1] == "00" and match[3] is not None):
        raise invalid(
            "traceparent", f"must be a W3C trace context, as 00-<32 hex digits>-<16>-<2> (given: {traceparent!r:.80})"
        )
    return match
