"""Which traces are exported.

Decided at the head by who sampled, or at the end by what became of the generation.

Owns the rules and the order of reasons. Remembering the decisions is `span_sink`'s.
"""

from __future__ import annotations

import numpy as np

from headrace_facts import facts
from headrace_telemetry.config import TelemetryConfig

_FAILED_REASONS = frozenset({"error", "deadline"})


def reason(generation: facts.Generation, config: TelemetryConfig) -> str | None:
    """Returns why a trace is exported: "head", "failed", "ttft", "itl" or "preempted".

    None: it is not.

    Raises:
        ValueError: its columns do not fit together.
    """
    if generation.span is None:
        return None
    if generation.span.sampled:
        return "head"
    if config.trace_keep_failed and _failed(generation):
        return "failed"
    if config.trace_keep_ttft_ms and _late(generation, config.trace_keep_ttft_ms * 1e6):
        return "ttft"
    if config.trace_keep_itl_ms and _longest_gap_ns(generation) > config.trace_keep_itl_ms * 1e6:
        return "itl"
    if config.trace_keep_preempted and generation.preemptions > 0:
        return "preempted"
    return None


def _failed(generation: facts.Generation) -> bool:
    return bool(generation.error_type) or not _FAILED_REASONS.isdisjoint(generation.finish_reasons)


def _late(generation: facts.Generation, limit_ns: float) -> bool:
    """Whether the first token came late.

    Without one, whether the caller waited that long for nothing.
    """
    first_ns = generation.first_chunk_ns or generation.ttft_ns
    return (first_ns or generation.end_ns - generation.arrival_ns) > limit_ns


def _longest_gap_ns(generation: facts.Generation) -> int:
    """The longest time between two messages of an output, as they were made.

    How fast a reader takes them is not the server's merit.
    """
    gaps = [np.diff(np.frombuffer(emission.made_at_ns, "<i8")) for emission in generation.emissions]
    return max((int(gap.max()) for gap in gaps if len(gap)), default=0)
