"""A request's trace as the viewer thinks of it.

Phases, prompt chunks, tokens, and the steps of the engine under them.

Owns the values; how spans become them is in reading.py. All times are UNIX nanoseconds. Whatever a
trace may lack (a step that nobody exported, a token that nobody read) is None here, never 0.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from functools import cached_property

# Phases of a request as its spans name them.
QUEUE, PREFILL, DECODE, PREEMPTED, ENGINE_RESTART = PHASES = (
    "queue",
    "prefill",
    "decode",
    "preempted",
    "engine_restart",
)


@dataclass(frozen=True, slots=True)
class Phase:
    """One stay in a phase of PHASES."""

    name: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of the request's own prompt (or of what it computes again) in one step."""

    step_id: int | None
    first_token: int
    tokens: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Token:
    """One output token, by the moments at which things happened to it.

    They are when its step was planned, its value read, its message made, and taken by the
    transport.
    """

    output: int
    index: int
    step_id: int | None
    scheduled_ns: int | None
    sampled_ns: int | None
    emitted_ns: int | None
    written_ns: int | None

    @property
    def arrived_ns(self) -> int | None:
        """When the reader could have it: the last that is known of its way."""
        for time in (self.written_ns, self.emitted_ns, self.sampled_ns):
            if time is not None:
                return time
        return None


@dataclass(frozen=True, slots=True)
class Prefill:
    """What a step computed of a request's prompt."""

    request_id: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Member:
    """A traced request of a step, as a link to its inference span."""

    trace_id: str
    span_id: str


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass of the whole batch. start_ns to end_ns is its time on the device.

    Shares are of measured ceilings, 0 to 1.
    """

    step_id: int
    engine: str
    start_ns: int
    end_ns: int
    planned_ns: int | None = None
    settled_ns: int | None = None
    sequences: int = 0
    prefill_tokens: int = 0
    decodes: int = 0
    samples: int = 0
    free_blocks: int | None = None
    num_blocks: int | None = None
    waiting_requests: int | None = None
    preemptions: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    graph: bool | None = None
    late_work: bool = False
    prefills: tuple[Prefill, ...] = ()
    request_ids: tuple[str, ...] = ()
    preempted_request_ids: tuple[str, ...] = ()
    flops_share: float | None = None
    bandwidth_share: float | None = None
    bound: str | None = None
    members: tuple[Member, ...] = ()

    @property
    def duration_ns(self) -> int:
        """Nanoseconds that the step took on the device."""
        return self.end_ns - self.start_ns

    @property
    def only_decodes(self) -> bool:
        """Whether the step computed no part of any prompt."""
        return self.prefill_tokens == 0 and self.decodes > 0


@dataclass(frozen=True)
class Trace:
    """The trace of one request, as the viewer thinks of it.

    Attributes:
        ttft_ns: From the arrival until the first message with a token had left; None where nothing
            was streamed.
        engine_ttft_ns: From the arrival until the engine had the first token.
        call_status: What its call ended with, a gRPC status; empty where the trace lacks the call,
            or the call carried many requests.
        failed: Whether its span says that it failed.
        left_out_tokens: Tokens that it generated besides, too many for the trace.
        draft_tokens: Drafted tokens that its steps verified.
        accepted_tokens: Drafted tokens that it settled.
        ledger: How its time was spent, in ns by part, as the server's ledger has it; without
            end_to_end.
        steps: By id; those of the request's engine that the trace holds, not only the request's
            own.
        requests_by_span: Request ids of the inference spans that came with it, by (trace id, span
            id).
    """

    request_id: str
    trace_id: str
    span_id: str
    model: str
    engine: str
    operation: str
    wire: str
    start_ns: int
    end_ns: int
    prompt_tokens: int | None
    cached_tokens: int | None
    ttft_ns: int | None
    engine_ttft_ns: int | None
    finish_reasons: tuple[str, ...]
    error_type: str
    call_status: str
    failed: bool
    kept: str
    preemptions: int
    step_count: int
    left_out_tokens: int
    ledger: dict[str, int]
    phases: tuple[Phase, ...]
    chunks: tuple[Chunk, ...]
    tokens: tuple[Token, ...]
    steps: dict[int, Step]
    draft_tokens: int = 0
    accepted_tokens: int = 0
    requests_by_span: dict[tuple[str, str], str] = field(default_factory=dict)

    @cached_property
    def outputs(self) -> dict[int, tuple[Token, ...]]:
        """The tokens of each output, in order."""
        outputs: dict[int, list[Token]] = {}
        for token in self.tokens:
            outputs.setdefault(token.output, []).append(token)
        return {
            index: tuple(sorted(tokens, key=lambda token: token.index)) for index, tokens in sorted(outputs.items())
        }

    @cached_property
    def steps_in_order(self) -> tuple[Step, ...]:
        """The steps by their beginning on the device."""
        return tuple(sorted(self.steps.values(), key=lambda step: (step.start_ns, step.step_id)))

    @cached_property
    def waits(self) -> tuple[Phase, ...]:
        """Stays in phases in which nothing of it was computed, in order."""
        return tuple(phase for phase in self.phases if phase.name in (QUEUE, PREEMPTED, ENGINE_RESTART))

    @cached_property
    def own_step_ids(self) -> frozenset[int]:
        """Steps that the request was in."""
        sampled = {token.step_id for token in self.tokens} | {chunk.step_id for chunk in self.chunks}
        named = {step.step_id for step in self.steps.values() if self.request_id in step.request_ids}
        return frozenset(named | {step_id for step_id in sampled if step_id is not None})

    def steps_between(self, start_ns: int, end_ns: int) -> tuple[Step, ...]:
        """Steps whose time on the device overlaps an interval, in order."""
        steps = self.steps_in_order
        last = bisect.bisect_left(steps, end_ns, key=lambda step: step.start_ns)
        first = last
        # Steps of one device follow one another, so their ends are in order too; a backend
        # restarted under another clock would be the exception, and is cut off.
        while first > 0 and steps[first - 1].end_ns > start_ns:
            first -= 1
        return steps[first:last]
