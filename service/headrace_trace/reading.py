"""Makes a Trace of spans.

It finds the request asked for, and joins what its spans and those of its steps say.

Owns the names of spans and attributes that the server writes. Tolerant of what is missing: steps,
messages, whole attributes; strict about nothing but that there is a request. Spans come in
(spans.py), a Trace goes out. With detail=array the tokens come from arrays on the inference span,
with detail=span from spans of their own.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from headrace_trace.spans import Span, TraceError
from headrace_trace.trace_model import PHASES, Chunk, Member, Phase, Prefill, Step, Token, Trace

STEP = "engine.step"
TOKEN = "token"
CHUNK = "prefill.chunk"
REQUEST_ID = "headrace.request.id"
_OPERATION = "gen_ai.operation.name"
_STATUS, _METHOD = "rpc.response.status_code", "rpc.method"
# Calls that carry many requests, whose status is none of theirs.
_SHARED = ("/Session", "/ModelStreamInfer")
_LEDGER, _NS = "headrace.ledger.", "_ns"
_WHOLE = "end_to_end"
# Steps per trace of steps.
_STEPS_PER_TRACE = 256
_NAMED = 5


def inference_spans(spans: Iterable[Span]) -> list[Span]:
    """Returns the inference spans: those of requests."""
    return [span for span in spans if REQUEST_ID in span.attributes and _OPERATION in span.attributes]


def read_trace(spans: Sequence[Span], *, request_id: str | None = None, trace_id: str | None = None) -> Trace:
    """Returns the trace of one request.

    Args:
        spans: All there are; those of other requests may be among them.
        request_id: Which request. Default: the only one.
        trace_id: Which trace. Default: the only one.

    Raises:
        TraceError: There is no such request, or several and none was chosen.
    """
    requests = inference_spans(spans)
    if not requests:
        raise TraceError(_no_request(spans, trace_id))
    chosen = [
        span
        for span in requests
        if request_id in (None, span.attributes[REQUEST_ID]) and trace_id in (None, span.trace_id)
    ]
    if not chosen:
        named = f"request {request_id}" if request_id is not None else f"trace {trace_id}"
        raise TraceError(f"holds no {named}")
    if len({span.attributes[REQUEST_ID] for span in chosen}) > 1:
        raise SeveralRequests(_several([str(span.attributes[REQUEST_ID]) for span in chosen]))
    return _trace(chosen[0], spans, requests)


def _no_request(spans: Sequence[Span], trace_id: str | None) -> str:
    """Why there is nothing to show: most calls without a request were refused."""
    calls = [
        f"{span.attributes[_METHOD]} ended {span.attributes[_STATUS]}"
        for span in spans
        if _STATUS in span.attributes and _METHOD in span.attributes and trace_id in (None, span.trace_id)
    ]
    refused = f": {', '.join(calls[:_NAMED])}" if calls else ""
    return f"holds {len(spans):,} spans, but none of a Headrace request{refused}"


class SeveralRequests(TraceError):
    """The spans are of several requests, and the caller must name one."""


def _several(request_ids: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(request_ids))
    shown = ", ".join(distinct[:_NAMED]) + (" ..." if len(distinct) > _NAMED else "")
    return f"holds {len(distinct):,} requests ({shown}): choose one with --request"


def step_traces(span: Span) -> set[str]:
    """Trace ids under which the steps of a request are found.

    They follow from the engine and the steps' ids.

    Args:
        span: An inference span.
    """
    engine = str(span.attributes.get("headrace.engine", ""))
    groups = {(step_id - 1) // _STEPS_PER_TRACE for step_id in _integers(span, "headrace.token.step_id") if step_id > 0}
    return {
        hashlib.blake2b(b"step-trace" + engine.encode() + group.to_bytes(8, "little"), digest_size=16).hexdigest()
        for group in groups
    }


def _trace(root: Span, spans: Sequence[Span], requests: Sequence[Span]) -> Trace:
    attributes = root.attributes
    engine = str(attributes.get("headrace.engine", ""))
    family = _descendants(root, spans)
    ledger = {
        key.removeprefix(_LEDGER).removesuffix(_NS): int(value)
        for key, value in attributes.items()
        if key.startswith(_LEDGER) and isinstance(value, int | float)
    }
    ttft_ns = _seconds_ns(attributes, "gen_ai.response.time_to_first_chunk")
    tokens = _token_spans(root, family) or _token_arrays(root)
    return Trace(
        request_id=str(attributes[REQUEST_ID]),
        trace_id=root.trace_id,
        span_id=root.span_id,
        model=str(attributes.get("gen_ai.response.model") or attributes.get("gen_ai.request.model") or ""),
        engine=engine,
        operation=str(attributes[_OPERATION]),
        wire=str(attributes.get("headrace.wire", "")),
        start_ns=root.start_ns,
        end_ns=max(root.end_ns, root.start_ns),
        prompt_tokens=_integer(attributes, "gen_ai.usage.input_tokens"),
        cached_tokens=_integer(attributes, "gen_ai.usage.cache_read.input_tokens"),
        ttft_ns=ttft_ns,
        engine_ttft_ns=_seconds_ns(attributes, "headrace.engine.time_to_first_token"),
        finish_reasons=_strings(attributes, "gen_ai.response.finish_reasons"),
        error_type=str(attributes.get("error.type", "")),
        call_status=_call_status(root, spans),
        failed=root.failed,
        kept=str(attributes.get("headrace.trace.kept", "")),
        preemptions=_integer(attributes, "headrace.preemptions") or 0,
        step_count=_integer(attributes, "headrace.step_count") or 0,
        draft_tokens=_integer(attributes, "headrace.draft_tokens") or 0,
        accepted_tokens=_integer(attributes, "headrace.accepted_tokens") or 0,
        left_out_tokens=_integer(attributes, "headrace.trace.truncated_tokens") or 0,
        ledger={part: ns for part, ns in ledger.items() if part != _WHOLE},
        phases=_phases(family),
        chunks=_chunks(family),
        tokens=tokens if ttft_ns is None else _with_first_left(tokens, root.start_ns + ttft_ns),
        steps=_steps(spans, engine),
        requests_by_span={
            (span.trace_id, span.span_id): str(span.attributes[REQUEST_ID]) for span in requests if span is not root
        },
    )


def _with_first_left(tokens: tuple[Token, ...], left_ns: int) -> tuple[Token, ...]:
    """The tokens, those of the first message having left when the server says that it had.

    Each token's own times end where its message was handed to the transport, if the reader kept up.
    Of the first message it is known when it had left, and that is the TTFT: the page names one
    figure for the first token, and no part of the wait for it is left out.
    """
    made = min((token.emitted_ns for token in tokens if token.emitted_ns is not None), default=None)
    if made is None:
        return tokens
    left_ns = max(left_ns, made)
    return tuple(replace(token, written_ns=left_ns) if token.emitted_ns == made else token for token in tokens)


def _call_status(root: Span, spans: Sequence[Span]) -> str:
    """What the call of a request ended with.

    Empty if its span did not come, or is of many requests.
    """
    for span in spans:
        if (span.trace_id, span.span_id) == (root.trace_id, root.parent_id):
            shared = str(span.attributes.get(_METHOD, "")).endswith(_SHARED)
            return "" if shared else str(span.attributes.get(_STATUS, ""))
    return ""


def _seconds_ns(attributes: dict[str, Any], name: str) -> int | None:
    """An attribute in seconds, as ns; None if it is not there or none."""
    value = _number(attributes, name)
    return round(value * 1e9) if value is not None and 0 < value < math.inf else None


def _descendants(root: Span, spans: Sequence[Span]) -> list[Span]:
    """Spans below the root, in the order of their beginnings."""
    children: dict[str, list[Span]] = {}
    for span in spans:
        if span.trace_id == root.trace_id and span.parent_id:
            children.setdefault(span.parent_id, []).append(span)
    found: list[Span] = []
    above = [root.span_id]
    while above:
        below = children.pop(above.pop(), [])
        found += below
        above += [span.span_id for span in below]
    return sorted(found, key=lambda span: (span.start_ns, span.end_ns))


def _phases(family: Sequence[Span]) -> tuple[Phase, ...]:
    return tuple(Phase(span.name, span.start_ns, span.end_ns) for span in family if span.name in PHASES)


def _chunks(family: Sequence[Span]) -> tuple[Chunk, ...]:
    return tuple(
        Chunk(
            _integer(span.attributes, "headrace.step.id"),
            _integer(span.attributes, "headrace.chunk.first_token") or 0,
            _integer(span.attributes, "headrace.chunk.tokens") or 0,
            span.start_ns,
            span.end_ns,
        )
        for span in family
        if span.name == CHUNK
    )


def _token_arrays(root: Span) -> tuple[Token, ...]:
    """Tokens of detail=array.

    Columns that are missing or of another length are as if nothing were known.
    """
    indices = _integers(root, "headrace.token.index")
    unknown = [-1] * len(indices)

    def column(name: str) -> list[int]:
        values = _integers(root, "headrace.token." + name)
        return values if len(values) == len(indices) else unknown

    def times(name: str) -> list[int | None]:
        return [root.start_ns + offset if offset >= 0 else None for offset in column(name)]

    outputs = column("output_index")
    rows = zip(
        outputs,
        indices,
        column("step_id"),
        times("scheduled_ns"),
        times("sampled_ns"),
        times("emitted_ns"),
        times("written_ns"),
        strict=True,
    )
    return tuple(
        Token(
            max(output, 0),
            index,
            step if step > 0 else None,
            scheduled,
            sampled,
            _reported(emitted, root),
            _reported(written, root),
        )
        for output, index, step, scheduled, sampled, emitted, written in rows
    )


def _reported(time: int | None, root: Span) -> int | None:
    """A time of the way out.

    Nothing left at the very moment of the arrival: that is how one says that nobody read it.
    """
    return time if time is not None and time > root.start_ns else None


def _token_spans(root: Span, family: Sequence[Span]) -> tuple[Token, ...]:
    """Tokens of detail=span, in order."""
    tokens = [_token_span(root, span) for span in family if span.name == TOKEN]
    return tuple(sorted(tokens, key=lambda token: (token.output, token.index)))


def _token_span(root: Span, span: Span) -> Token:
    def time(name: str) -> int | None:
        offset = _integer(span.attributes, name)
        return root.start_ns + offset if offset is not None and offset >= 0 else None

    sampled, emitted = time("headrace.token.sampled_ns"), _reported(time("headrace.token.emitted_ns"), root)
    return Token(
        output=_integer(span.attributes, "headrace.output.index") or 0,
        index=_integer(span.attributes, "headrace.token.index") or 0,
        # 0: an attempt before this one made it.
        step_id=_integer(span.attributes, "headrace.step.id") or None,
        # Where the step is not known the span begins with what is.
        scheduled_ns=span.start_ns if sampled is not None else None,
        sampled_ns=sampled,
        emitted_ns=emitted,
        # The end of a token that nobody read is its sampling.
        written_ns=span.end_ns if emitted is not None else None,
    )


def _steps(spans: Sequence[Span], engine: str) -> dict[int, Step]:
    """Steps of the request's engine by id. A trace that names no engine takes all."""
    steps = (_step(span) for span in spans if span.name == STEP and "headrace.step.id" in span.attributes)
    return {step.step_id: step for step in steps if not engine or not step.engine or step.engine == engine}


def _step(span: Span) -> Step:
    attributes = {
        key.removeprefix("headrace.step."): value
        for key, value in span.attributes.items()
        if key.startswith("headrace.step.")
    }
    ids = _strings(attributes, "prefill_request_ids")
    tokens = _list(attributes.get("prefill_request_tokens")) or [0] * len(ids)
    graph = attributes.get("graph")
    return Step(
        step_id=int(attributes["id"]),
        engine=str(attributes.get("engine") or span.attributes.get("headrace.engine") or ""),
        start_ns=span.start_ns,
        end_ns=max(span.end_ns, span.start_ns),
        planned_ns=_integer(attributes, "planned_ns"),
        settled_ns=_integer(attributes, "settled_ns"),
        sequences=_integer(attributes, "sequences") or 0,
        prefill_tokens=_integer(attributes, "prefill_tokens") or 0,
        decodes=_integer(attributes, "decodes") or 0,
        samples=_integer(attributes, "samples") or 0,
        free_blocks=_integer(attributes, "free_blocks"),
        num_blocks=_integer(attributes, "num_blocks"),
        waiting_requests=_integer(attributes, "waiting_requests"),
        preemptions=_integer(attributes, "preemptions") or 0,
        draft_tokens=_integer(attributes, "draft_tokens") or 0,
        accepted_tokens=_integer(attributes, "accepted_tokens") or 0,
        graph=bool(graph) if graph is not None else None,
        late_work=bool(attributes.get("late_work")),
        prefills=tuple(Prefill(name, int(count)) for name, count in zip(ids, tokens, strict=False)),
        request_ids=_strings(attributes, "request_ids"),
        preempted_request_ids=_strings(attributes, "preempted_request_ids"),
        flops_share=_number(attributes, "flops_share"),
        bandwidth_share=_number(attributes, "bandwidth_share"),
        bound=str(attributes["bound"]) if attributes.get("bound") else None,
        members=tuple(Member(link.trace_id, link.span_id) for link in span.links),
    )


def _integer(attributes: dict[str, Any], name: str) -> int | None:
    value = attributes.get(name)
    return int(value) if isinstance(value, int | float) else None


def _number(attributes: dict[str, Any], name: str) -> float | None:
    value = attributes.get(name)
    return float(value) if isinstance(value, int | float) else None


def _integers(span: Span, name: str) -> list[int]:
    return [int(item) for item in _list(span.attributes.get(name)) if isinstance(item, int | float)]


def _strings(attributes: dict[str, Any], name: str) -> tuple[str, ...]:
    return tuple(str(item) for item in _list(attributes.get(name)))


def _list(value: Any) -> list[Any]:
    """An array; Jaeger hands some out as text."""
    if isinstance(value, str) and value.startswith("["):
        try:
            value = json.loads(value)
        except ValueError:
            return []
    return value if isinstance(value, list) else []
