"""The ids of step spans, derived from engine and step.

Both sides of a link know them without a message.

Owns the rule: 256 steps share a trace. The viewer and the tests derive them again.
"""

from __future__ import annotations

import hashlib
from typing import Final

STEPS_PER_TRACE: Final = 256


def trace_id(engine: str, step_id: int) -> bytes:
    """Returns the trace id of a step, 16 bytes."""
    part = (step_id - 1) // STEPS_PER_TRACE
    return hashlib.blake2b(b"step-trace" + engine.encode() + part.to_bytes(8, "little"), digest_size=16).digest()


def span_id(engine: str, step_id: int) -> bytes:
    """Returns the span id of a step, 8 bytes."""
    return hashlib.blake2b(b"step-span" + engine.encode() + step_id.to_bytes(8, "little"), digest_size=8).digest()
