"""What the page's script draws from: a trace and its explanation as columns, names as numbers.

Owns the shape that page/*.js reads. Times are ns since the call's arrival; a name or a set of
members that comes again and again (steps of one batch) is stored once. Does not escape anything:
page.py does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from headrace_trace.explanation import Explanation, Gap, Kind
from headrace_trace.trace_model import Step, Trace
from headrace_trace.words import cause_words, plain

_STEP_NUMBERS = (
    "sequences",
    "prefill_tokens",
    "decodes",
    "samples",
    "free_blocks",
    "num_blocks",
    "waiting_requests",
    "draft_tokens",
    "accepted_tokens",
    "flops_share",
    "bandwidth_share",
)


class _Table:
    """Values by number, each once."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[Any, int] = {}

    def number(self, value: Any) -> int:
        """Returns the number by which the page's data names a value."""
        number = self._numbers.setdefault(value, len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number


def page_data(trace: Trace, explanation: Explanation) -> dict[str, Any]:
    """Returns the whole trace as JSON types."""
    names, sets = _Table(), _Table()
    own = names.number(plain(trace.request_id))
    return {
        "request": {"id": plain(trace.request_id), "name": own, "end": trace.end_ns - trace.start_ns},
        "usual": {"step": explanation.usual_step_ms, "gap": explanation.itl_p50_ms or 0},
        "phases": [[p.name, p.start_ns - trace.start_ns, p.end_ns - trace.start_ns] for p in trace.phases],
        "chunks": [
            [c.step_id, c.first_token, c.tokens, c.start_ns - trace.start_ns, c.end_ns - trace.start_ns]
            for c in trace.chunks
        ],
        "tokens": _tokens(trace, explanation),
        "steps": _steps(trace, names, sets),
        "traces": _traces(trace, names),
        "slowest": [[gap.output, gap.index] for gap in explanation.slowest()],
        "sets": sets.values,
        "names": names.values,
    }


def _tokens(trace: Trace, explanation: Explanation) -> dict[str, list[Any]]:
    gaps = {(gap.output, gap.index): gap for gap in explanation.gaps}
    columns: dict[str, list[Any]] = {
        name: []
        for name in ("output", "index", "step", "scheduled", "sampled", "emitted", "written", "wait", "kind", "why")
    }
    for token in (token for tokens in trace.outputs.values() for token in tokens):
        gap = gaps.get((token.output, token.index))
        times = (token.scheduled_ns, token.sampled_ns, token.emitted_ns, token.written_ns)
        row: list[Any] = [token.output, token.index, token.step_id, *(_since(trace, time) for time in times)]
        row += [round(gap.ms, 4) if gap else None, gap.cause.kind if gap else Kind.UNKNOWN, _why(gap, explanation)]
        for column, value in zip(columns.values(), row, strict=True):
            column.append(value)
    return columns


def _why(gap: Gap | None, explanation: Explanation) -> str:
    """The cause in words where it is worth the space.

    Ten thousand times "nothing unusual" is not.
    """
    return "" if gap is None or gap.cause.kind is Kind.USUAL else cause_words(gap, explanation)


def _steps(trace: Trace, names: _Table, sets: _Table) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {
        name: []
        for name in ("id", "start", "end", "planned", "settled", "own", "graph", "late", "bound", "prefills", "members")
        + ("lost", "links", *_STEP_NUMBERS)
    }
    for step in trace.steps_in_order:
        row = [
            step.step_id,
            step.start_ns - trace.start_ns,
            step.end_ns - trace.start_ns,
            _since(trace, step.planned_ns),
            _since(trace, step.settled_ns),
            step.step_id in trace.own_step_ids,
            step.graph,
            step.late_work,
            step.bound,
            [[names.number(plain(p.request_id)), p.tokens] for p in step.prefills],
            sets.number(_numbers(names, step.request_ids)),
            _numbers(names, step.preempted_request_ids),
            _unnamed(trace, step),
            *(getattr(step, name) for name in _STEP_NUMBERS),
        ]
        for column, value in zip(columns.values(), row, strict=True):
            column.append(value)
    return columns


def _numbers(names: _Table, request_ids: Iterable[str]) -> tuple[int, ...]:
    return tuple(names.number(plain(request_id)) for request_id in request_ids)


def _unnamed(trace: Trace, step: Step) -> list[str]:
    """Traces of members whose request ids are not reported.

    Their spans did not come with this one.
    """
    known = trace.requests_by_span
    return sorted(
        {m.trace_id for m in step.members if m.trace_id != trace.trace_id and (m.trace_id, m.span_id) not in known}
    )


def _traces(trace: Trace, names: _Table) -> dict[int, str]:
    """Trace ids of other requests, by the number of their name."""
    members = {(m.trace_id, m.span_id) for step in trace.steps.values() for m in step.members}
    known = trace.requests_by_span
    return {names.number(plain(known[key])): key[0] for key in sorted(members & known.keys())}


def _since(trace: Trace, time: int | None) -> int | None:
    return None if time is None else time - trace.start_ns
