"""Why each token came when it did.

Every wait between two tokens with its causes, decided by numbers.

Owns the judgement. Each wait is cut into parts (windows.py); what is usual is the median over this
trace (for steps: over those that compute decodes only), and what a part took beyond that is charged
to a cause. The wait for the first token has no usual: all of it is charged. A Trace comes in, an
Explanation (explanation.py) goes out.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from headrace_trace.endings import ending_of
from headrace_trace.explanation import Cause, Explanation, Gap, Kind
from headrace_trace.trace_model import Prefill, Step, Token, Trace
from headrace_trace.windows import Part, Where, parts_between

# A wait is worth a cause from this much beyond the usual on: the larger of a share of it and an
# absolute time that clocks and schedulers have anyhow.
_WORTH_SHARE, _WORTH_NS = 0.1, 20_000
# Causes that explain less than this share of a wait's excess are left out.
_MINOR = 0.05
# A prefill is no excuse where this many steps with at least as many tokens of prompts ...
_COMPARED = 3
# ... exceeded the usual step by less than this share of what the step in question did.
_EXCUSED = 1 / 3
_MS = 1e6


@dataclass(frozen=True, slots=True)
class Usual:
    """Medians of a trace, in ns. step_ns is of steps that compute decodes only.

    Steps counts them (0: there are none, and step_ns is the shortest step's).
    """

    gap_ns: float
    step_ns: float
    steps: int
    parts_ns: dict[Where, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Wait:
    """A wait before it is judged."""

    token: Token
    first: bool
    parts: tuple[Part, ...]
    ns: int


def explain(trace: Trace) -> Explanation:
    """Finds the causes of every wait of a trace."""
    waits = list(_waits(trace))
    usual = _usual(trace, waits)
    judge = _Judge(trace, usual)
    between = sorted(wait.ns / _MS for wait in waits if not wait.first and wait.ns > 0)
    first = min((wait.ns for wait in waits if wait.first), default=None)
    # A server that tells neither, as those of others, leaves what the trace shows.
    ttft = first if trace.ttft_ns is None and trace.engine_ttft_ns is None else trace.ttft_ns
    return Explanation(
        request_id=trace.request_id,
        trace_id=trace.trace_id,
        model=trace.model,
        duration_ms=(trace.end_ns - trace.start_ns) / _MS,
        ending=ending_of(trace),
        ttft_ms=_milliseconds(ttft),
        computed_ms=_milliseconds(_computed_ns(trace)),
        itl_p50_ms=_percentile(between, 0.5),
        itl_p99_ms=_percentile(between, 0.99),
        usual_step_ms=usual.step_ns / _MS,
        usual_steps=usual.steps,
        tokens=len(trace.tokens),
        left_out_tokens=trace.left_out_tokens,
        draft_tokens=trace.draft_tokens,
        accepted_tokens=trace.accepted_tokens,
        ledger_ms={part: ns / _MS for part, ns in trace.ledger.items()} or _ledger_of_phases(trace),
        gaps=tuple(judge.gap(wait) for wait in waits),
    )


def _computed_ns(trace: Trace) -> int | None:
    """Returns how long after the arrival the first token had been computed and read.

    That is the time of the token itself, on the clock of all other times of the trace; the engine's
    own figure, which leaves out the way from the service to it, stands in where that is not known.
    """
    sampled = min((token.sampled_ns for token in trace.tokens if token.sampled_ns is not None), default=None)
    return trace.engine_ttft_ns if sampled is None else max(0, sampled - trace.start_ns)


def _milliseconds(ns: int | None) -> float | None:
    return None if ns is None else ns / _MS


def _waits(trace: Trace) -> Iterator[_Wait]:
    for tokens in trace.outputs.values():
        before: int | None = None
        for token in tokens:
            arrived = token.arrived_ns
            if arrived is None:
                continue
            start = trace.start_ns if before is None else before
            yield _Wait(token, before is None, parts_between(trace, start, token), max(0, arrived - start))
            before = max(arrived, start)


def _usual(trace: Trace, waits: Sequence[_Wait]) -> Usual:
    gaps = [wait for wait in waits if not wait.first and wait.ns > 0]
    own = [trace.steps[step_id] for step_id in trace.own_step_ids if step_id in trace.steps]
    decodes = [step.duration_ns for step in own if step.only_decodes]
    shortest = min((step.duration_ns for step in own), default=0)
    return Usual(
        gap_ns=_median(wait.ns for wait in gaps),
        step_ns=statistics.median(decodes) if decodes else shortest,
        steps=len(decodes),
        parts_ns={where: _median(_sum(wait.parts, where) for wait in gaps) for where in Where},
    )


def _sum(parts: Iterable[Part], where: Where) -> int:
    return sum(part.ns for part in parts if part.where is where)


def _median(values: Iterable[float]) -> float:
    listed = list(values)
    return statistics.median(listed) if listed else 0.0


def _percentile(ordered: Sequence[float], share: float) -> float | None:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def _ledger_of_phases(trace: Trace) -> dict[str, float]:
    """Returns how the time was spent by the spans of phases, for a trace without a ledger."""
    ledger: dict[str, float] = {}
    for phase in trace.phases:
        ledger[phase.name] = ledger.get(phase.name, 0.0) + (phase.end_ns - phase.start_ns) / _MS
    return ledger


@dataclass(slots=True)
class _Charge:
    """What one kind of cause cost, and the steps it was seen in."""

    ns: float = 0.0
    steps: list[Step] = field(default_factory=list)


class _Judge:
    """Charges the parts of waits to causes."""

    def __init__(self, trace: Trace, usual: Usual) -> None:
        self._trace = trace
        self._usual = usual
        self._own_tokens = _own_tokens(trace)
        # What steps with prompts took beyond the usual, by the number of tokens.
        self._mixed = sorted(
            (step.prefill_tokens, step.duration_ns - usual.step_ns)
            for step in trace.steps.values()
            if step.prefill_tokens and step.decodes
        )

    def gap(self, wait: _Wait) -> Gap:
        """Returns the wait with its causes."""
        usual_ns = 0.0 if wait.first else self._usual.gap_ns
        token = wait.token
        return Gap(
            output=token.output,
            index=token.index,
            step_id=token.step_id,
            first=wait.first,
            at_ms=((token.arrived_ns or 0) - self._trace.start_ns) / _MS,
            ms=wait.ns / _MS,
            usual_ms=usual_ns / _MS,
            causes=self._causes(wait, wait.ns - usual_ns),
            parts_ms=_merged(wait.parts),
        )

    def _causes(self, wait: _Wait, excess_ns: float) -> tuple[Cause, ...]:
        if not wait.first and excess_ns < max(_WORTH_SHARE * self._usual.gap_ns, _WORTH_NS):
            return (self._usual_cause(wait),)
        charges = self._charges(wait)
        least = _MINOR * excess_ns
        kept = sorted((item for item in charges.items() if item[1].ns > least), key=lambda item: -item[1].ns)
        return tuple(self._cause(kind, charge) for kind, charge in kept) or (self._usual_cause(wait),)

    def _usual_cause(self, wait: _Wait) -> Cause:
        step = self._trace.steps.get(wait.token.step_id or 0)
        return self._cause(Kind.USUAL, _Charge(0.0, [step] if step else []))

    def _charges(self, wait: _Wait) -> dict[Kind, _Charge]:
        charges: dict[Kind, _Charge] = {}
        again = _reason_to_compute_again(wait)
        # What is usual is granted once per kind of part, not once per part.
        granted = {} if wait.first else dict(self._usual.parts_ns)
        for part in wait.parts:
            for kind, ns in self._charged(part, wait.first, granted):
                if kind is Kind.OWN_PREFILL or (kind is Kind.OTHER_STEPS and again is not Kind.OWN_PREFILL):
                    kind = again
                charge = charges.setdefault(kind, _Charge())
                charge.ns += max(0.0, ns)
                if part.step is not None and ns > 0:
                    charge.steps.append(part.step)
        return charges

    def _charged(self, part: Part, first: bool, granted: dict[Where, float]) -> Iterator[tuple[Kind, float]]:
        """What a part is charged with, by kind, in ns."""
        if part.where is Where.STEP and part.step is not None:
            yield from self._own_step(part, part.step, first)
        elif part.where is Where.OTHER_STEP:
            yield from self._other_step(part)
        elif part.where is Where.UNKNOWN:
            usual = 0.0 if first else self._usual.step_ns or self._usual.parts_ns[Where.UNKNOWN]
            yield Kind.UNKNOWN, part.ns - usual
        elif part.where in _IN_FULL:
            yield _IN_FULL[part.where], part.ns
        else:
            usual = granted.pop(part.where, 0.0)
            yield _BEYOND_USUAL[part.where], part.ns - usual

    def _own_step(self, part: Part, step: Step, first: bool) -> Iterator[tuple[Kind, float]]:
        if first:
            yield from self._by_prompts(step, part.ns) if step.prefill_tokens else [(Kind.DEVICE, part.ns)]
            return
        over = min(max(0.0, step.duration_ns - self._usual.step_ns), part.ns)
        excused = over if step.prefill_tokens and self._is_excuse(step) else 0.0
        yield from self._by_prompts(step, excused)
        yield Kind.DEVICE, over - excused

    def _other_step(self, part: Part) -> Iterator[tuple[Kind, float]]:
        if part.step is not None and part.step.prefill_tokens:
            yield from self._by_prompts(part.step, part.ns)
        else:
            yield Kind.OTHER_STEPS, part.ns

    def _by_prompts(self, step: Step, ns: float) -> Iterator[tuple[Kind, float]]:
        """Time of a step that computed prompts, divided by whose tokens they were."""
        if ns <= 0:
            return
        own = min(self._own_tokens.get(step.step_id, 0), step.prefill_tokens) / step.prefill_tokens
        if own > 0:
            yield Kind.OWN_PREFILL, ns * own
        if own < 1:
            yield Kind.PREFILL, ns * (1 - own)

    def _is_excuse(self, step: Step) -> bool:
        """Whether the prompts in a step can have made it as long as it was.

        Steps with as many tokens or more were not much shorter.
        """
        over = step.duration_ns - self._usual.step_ns
        like = [beyond for tokens, beyond in self._mixed if tokens >= step.prefill_tokens]
        return len(like) <= _COMPARED or statistics.median(like) >= _EXCUSED * over

    def _cause(self, kind: Kind, charge: _Charge) -> Cause:
        steps = sorted({step.step_id: step for step in charge.steps}.values(), key=lambda step: step.step_id)
        longest = max(steps, key=lambda step: step.duration_ns, default=None)
        return Cause(
            kind=kind,
            excess_ms=charge.ns / _MS,
            step_ids=tuple(step.step_id for step in steps),
            step_ms=longest.duration_ns / _MS if longest else None,
            prefills=self._prefills(kind, steps),
            bound=longest.bound if longest else None,
            bandwidth_share=longest.bandwidth_share if longest else None,
            flops_share=longest.flops_share if longest else None,
            late_work=any(step.late_work for step in steps),
        )

    def _prefills(self, kind: Kind, steps: Iterable[Step]) -> tuple[Prefill, ...]:
        if kind not in (Kind.PREFILL, Kind.OWN_PREFILL):
            return ()
        own = self._trace.request_id
        tokens: dict[str, int] = {}
        for step in steps:
            for prefill in step.prefills:
                if (prefill.request_id == own) == (kind is Kind.OWN_PREFILL):
                    tokens[prefill.request_id] = tokens.get(prefill.request_id, 0) + prefill.tokens
        return tuple(Prefill(name, count) for name, count in sorted(tokens.items(), key=lambda item: -item[1]))


_IN_FULL = {
    Where.ARRIVAL: Kind.ARRIVAL,
    Where.QUEUE: Kind.QUEUE,
    Where.PREEMPTED: Kind.PREEMPTION,
    Where.ENGINE_RESTART: Kind.ENGINE_RESTART,
}
_BEYOND_USUAL = {
    Where.IDLE: Kind.HOST_IDLE,
    Where.SETTLE: Kind.HOST_READ,
    Where.SERVICE: Kind.SERVICE,
    Where.WRITE: Kind.READER,
}


def _reason_to_compute_again(wait: _Wait) -> Kind:
    """What a request's own tokens in a step are charged to.

    Its prompt, or what made it compute them again, for which it had to wait for its turn, too.
    """
    places = {part.where for part in wait.parts}
    if Where.PREEMPTED in places:
        return Kind.PREEMPTION if not wait.first else Kind.OWN_PREFILL
    if Where.ENGINE_RESTART in places:
        return Kind.ENGINE_RESTART if not wait.first else Kind.OWN_PREFILL
    return Kind.OWN_PREFILL


def _own_tokens(trace: Trace) -> dict[int, int]:
    """Returns the tokens of the request's own prompt by step.

    They come from its chunks or, where the trace lacks those, from the steps.
    """
    tokens: dict[int, int] = {}
    for step in trace.steps.values():
        own = sum(prefill.tokens for prefill in step.prefills if prefill.request_id == trace.request_id)
        if own:
            tokens[step.step_id] = own
    for chunk in trace.chunks:
        if chunk.step_id is not None:
            tokens.setdefault(chunk.step_id, chunk.tokens)
    return tokens


def _merged(parts: Iterable[Part]) -> tuple[tuple[Where, float], ...]:
    """Lengths of parts in order, in ms, neighbours of one kind as one."""
    merged: list[tuple[Where, float]] = []
    for part in parts:
        if merged and merged[-1][0] is part.where:
            merged[-1] = (part.where, merged[-1][1] + part.ns / _MS)
        else:
            merged.append((part.where, part.ns / _MS))
    return tuple(merged)
