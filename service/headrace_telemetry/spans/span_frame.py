"""The inference span that everything of a generation lies in.

Its ids, its times, and the clocks that its parts were reported by.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from headrace_facts import facts

# Offsets of two processes on one machine differ by less; those of two machines by the difference of
# their boot times.
_SAME_CLOCK_NS: Final = 50_000_000
_LATEST_NS: Final = (1 << 63) - 1


class Frame(NamedTuple):
    """The place of a generation in its trace.

    Attributes:
        trace_id: 16 bytes.
        span_id: 8 bytes, of the inference span.
        start_ns: UNIX time of its begin.
        end_ns: UNIX time of its end, not before `start_ns`.
        service_offset_ns: added to a time of the reporting service to get UNIX time.
        engine_offset_ns: takes the engine's times to UNIX time.
    """

    trace_id: bytes
    span_id: bytes
    start_ns: int
    end_ns: int
    service_offset_ns: int
    engine_offset_ns: int

    def clamped(self, time_ns: int) -> int:
        """A UNIX time, moved into the frame."""
        return min(max(time_ns, self.start_ns), self.end_ns)


def check_time(time_ns: int) -> None:
    """Raises ValueError if a UNIX time is none that a span can have."""
    if not 0 <= time_ns <= _LATEST_NS:
        raise ValueError("a time that is none")


def frame_of(generation: facts.Generation) -> Frame:
    """Returns the frame of a generation that has a span context.

    Raises ValueError if its times are none.
    """
    span, trace = generation.span, generation.trace
    assert span is not None
    offset_ns = generation.unix_offset_ns
    start_ns = generation.arrival_ns + offset_ns
    end_ns = max(start_ns, generation.end_ns + offset_ns)
    check_time(start_ns)
    check_time(end_ns)
    # On one machine the clock is the same; two processes that asked for its offset at two moments
    # would move times by what lay between them.
    engine_offset_ns = offset_ns
    if trace is not None and abs(trace.unix_offset_ns - offset_ns) > _SAME_CLOCK_NS:
        engine_offset_ns = trace.unix_offset_ns
    trace_id, span_id = bytes.fromhex(span.trace_id), bytes.fromhex(span.span_id)
    return Frame(trace_id, span_id, start_ns, end_ns, offset_ns, engine_offset_ns)
