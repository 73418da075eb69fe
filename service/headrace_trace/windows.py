"""What happened between two tokens.

The time that a reader waited, cut into parts that do not overlap and leave nothing out.

Owns the cutting. What a part costs more than usual, and which of them is to blame, is decided in
causes.py. A Trace and two moments come in; parts, in the order in which they happened, go out.

The way of a token is followed backwards: the transport took its message (reader), the service made
it (service), its value had been read (host), the device had computed its step (step). What lies
before that is a stay in a phase that computes nothing (queue, preempted, restart), other steps, or
a device that had nothing to do.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from headrace_trace.trace_model import ENGINE_RESTART, PREEMPTED, QUEUE, Phase, Step, Token, Trace


class Where(enum.StrEnum):
    """How the time of a waiting reader was spent."""

    # From the call until it stood in the engine's queue.
    ARRIVAL = "arrival"
    QUEUE = "queue"
    PREEMPTED = "preempted"
    ENGINE_RESTART = "engine_restart"
    # A step that the token was not made in; the trace may lack it (step is None then).
    OTHER_STEP = "other_step"
    # Between two steps that follow one another.
    IDLE = "idle"
    # The token's own step, from its beginning to its end on the device.
    STEP = "step"
    # From the end of the step on the device until its values had been read.
    SETTLE = "settle"
    # Until the message was made.
    SERVICE = "service"
    # Until the transport had taken it.
    WRITE = "write"
    # The trace lacks what would tell.
    UNKNOWN = "unknown"


_PHASES = {QUEUE: Where.QUEUE, PREEMPTED: Where.PREEMPTED, ENGINE_RESTART: Where.ENGINE_RESTART}


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of time, UNIX ns, with the step that it belongs to, if the trace has it."""

    where: Where
    start_ns: int
    end_ns: int
    step: Step | None = None

    @property
    def ns(self) -> int:
        """Length of the window, in nanoseconds."""
        return self.end_ns - self.start_ns


def parts_between(trace: Trace, start_ns: int, token: Token) -> tuple[Part, ...]:
    """The parts of the time from `start_ns` to a token's arrival.

    Empty if it came at once, or is not known.
    """
    end_ns = token.arrived_ns
    if end_ns is None or end_ns <= start_ns:
        return ()
    return tuple(part for part in _parts(trace, start_ns, end_ns, token) if part.ns > 0)


def _parts(trace: Trace, start_ns: int, end_ns: int, token: Token) -> Iterator[Part]:
    step = trace.steps.get(token.step_id) if token.step_id is not None else None
    sampled = _clamp(token.sampled_ns, start_ns, end_ns, default=end_ns)
    emitted = _clamp(token.emitted_ns, sampled, end_ns, default=sampled)
    if step is None:
        yield from _before(trace, start_ns, sampled, token.step_id)
    else:
        began = _clamp(step.start_ns, start_ns, sampled, default=sampled)
        ended = _clamp(step.end_ns, began, sampled, default=sampled)
        yield from _before(trace, start_ns, began, step.step_id)
        yield Part(Where.STEP, began, ended, step)
        yield Part(Where.SETTLE, ended, sampled, step)
    yield Part(Where.SERVICE, sampled, emitted, step)
    yield Part(Where.WRITE, emitted, end_ns, step)


def _clamp(time: int | None, low: int, high: int, *, default: int) -> int:
    return default if time is None else min(max(time, low), high)


def _before(trace: Trace, start_ns: int, end_ns: int, own: int | None) -> Iterator[Part]:
    """What lies before the token's step: phases without computing first, the rest by steps."""
    at = min(max(start_ns, trace.phases[0].start_ns), end_ns) if trace.phases else start_ns
    yield Part(Where.ARRIVAL, start_ns, at)
    for phase in _waits(trace, start_ns, end_ns):
        yield from _computing(trace, at, phase.start_ns, own)
        begin = max(at, phase.start_ns)
        # Clocks of two processes can put a phase's end before its beginning: it took no time then.
        at = max(begin, min(phase.end_ns, end_ns))
        yield Part(_PHASES[phase.name], begin, at)
    yield from _computing(trace, at, end_ns, own)


def _waits(trace: Trace, start_ns: int, end_ns: int) -> list[Phase]:
    found = [p for p in trace.waits if p.start_ns < end_ns and p.end_ns > start_ns]
    return sorted(found, key=lambda phase: phase.start_ns)


def _computing(trace: Trace, start_ns: int, end_ns: int, own: int | None) -> Iterator[Part]:
    """Steps before the token's own, and what lies between them.

    Without a gap in their numbers the device was idle, with one there were steps that the trace
    lacks.
    """
    if end_ns <= start_ns:
        return
    at = start_ns
    for step in trace.steps_between(start_ns, end_ns):
        if own is not None and step.step_id >= own:
            break
        yield Part(_between(trace, step.step_id), at, max(at, step.start_ns))
        begin = max(at, step.start_ns)
        at = max(begin, min(step.end_ns, end_ns))
        yield Part(Where.OTHER_STEP, begin, at, step)
    yield Part(_between(trace, own), at, end_ns)


def _between(trace: Trace, following: int | None) -> Where:
    """What the time before a step was, that no step of the trace fills."""
    if following is None or following not in trace.steps:
        return Where.UNKNOWN
    return Where.IDLE if following - 1 in trace.steps or following == 1 else Where.OTHER_STEP
