"""Facts whose times and columns are anything.

Whoever tells nonsense is refused, and what is taken becomes spans that begin before they end,
inside their parents.

Nothing else ever fails, at once or later.
"""

from __future__ import annotations

import contextlib
import random
import time
from typing import Any

import hypothesis
import msgspec
import numpy as np
from hypothesis import strategies as st
from opentelemetry.proto.trace.v1 import trace_pb2
from tests.telemetry.reported import HEAD_ONLY, Listener
from tests.telemetry.story import BACKEND, SERVICE, UNIX_OFFSET_NS, tell

from headrace_facts import facts, step_records
from headrace_facts.token_steps import TokenSteps
from headrace_telemetry.config import TelemetryConfig
from headrace_telemetry.counts import ExportCounts
from headrace_telemetry.metrics import Metrics

_INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
_MS = 1_000_000
# Mostly what a clock that is a little off tells, sometimes anything.
_TIMES = st.one_of(
    st.integers(10**12 - 10 * _MS, 10**12 + 500 * _MS), st.sampled_from((0, 1, (1 << 63) - 1, (1 << 64) - 1))
)
_OFFSETS = st.one_of(st.integers(UNIX_OFFSET_NS - 100 * _MS, UNIX_OFFSET_NS + 100 * _MS), st.just(0), _INT64)
_SMALL = st.integers(0, 12)


def _column(values: list[int], kind: str) -> bytes:
    return np.array(values, np.uint64).astype(kind).tobytes()


@st.composite
def _emissions(draw: st.DrawFn) -> facts.Emission:
    sizes = draw(st.lists(st.sampled_from((0, 1, 1, 2, 3, (1 << 32) - 1)), max_size=12))
    times = [draw(st.lists(_TIMES, min_size=len(sizes), max_size=len(sizes))) for _ in range(2)]
    counts, made, written = _column(sizes, "<u4"), *(_column(column, "<u8") for column in times)
    return facts.Emission(draw(st.sampled_from((counts, counts, b""))), made, draw(st.sampled_from((written, b""))))


@st.composite
def _token_steps(draw: st.DrawFn) -> TokenSteps:
    runs = draw(st.lists(st.tuples(_SMALL, _SMALL | st.integers(0, (1 << 64) - 1)), max_size=4))
    if draw(st.booleans()):
        runs.sort()
    data = _column([number for run in runs for number in run], "<u8") + draw(st.sampled_from((b"", b"", b"", bytes(8))))
    return TokenSteps(draw(st.integers(-1, 12) | st.sampled_from((1 << 40, 12))), data)


@st.composite
def _traces(draw: st.DrawFn, engine: str, number: int) -> facts.EngineTrace:
    phase = st.sampled_from(("queued", "prefill", "decode", "preempted", "restarting", "another"))
    signed = _TIMES.filter(lambda value: value < 1 << 63)
    stays = draw(st.lists(st.builds(facts.PhaseSpan, phase, signed, signed), max_size=5))
    chunks = draw(st.lists(st.tuples(_SMALL, _SMALL, _SMALL), max_size=4))
    steps = draw(st.lists(_token_steps(), max_size=3))
    flat = _column([value for chunk in chunks for value in chunk], "<u8")
    return facts.EngineTrace(engine, number, draw(_OFFSETS), stays, flat, steps)


@st.composite
def _changed(draw: st.DrawFn, fact: facts.Fact) -> facts.Fact:
    """A fact of a story, with some of its fields changed."""
    changes: dict[str, Any] = {}
    if isinstance(fact, facts.Generation):
        assert fact.trace is not None
        offers: dict[str, st.SearchStrategy[Any]] = {
            "arrival_ns": _TIMES.filter(lambda value: value < 1 << 63),
            "end_ns": _TIMES.filter(lambda value: value < 1 << 63),
            "ttft_ns": _INT64,
            "first_chunk_ns": _INT64,
            "unix_offset_ns": _OFFSETS,
            "detail": st.sampled_from(facts.Detail),
            "ledger": st.dictionaries(st.sampled_from(("queued", "decode", "other")), _INT64),
            "output_tokens": st.integers(0, 100),
            "emissions": st.lists(_emissions(), max_size=3),
            "trace": st.none() | _traces(fact.trace.engine, fact.trace.number),
            "finish_reasons": st.lists(st.sampled_from(("stop", "error", "new")), max_size=3),
        }
    elif isinstance(fact, facts.CallEnded):
        signed = _TIMES.filter(lambda value: value < 1 << 63)
        offers = {"start_ns": signed, "end_ns": signed, "unix_offset_ns": _OFFSETS, "status": st.just("CANCELLED")}
    elif isinstance(fact, facts.Steps):
        offers = {"unix_offset_ns": _OFFSETS, "records": _records(fact.records)}
    else:
        return fact
    for name, offer in offers.items():
        if draw(st.integers(0, 3)) == 0:
            changes[name] = draw(offer)
    return msgspec.structs.replace(fact, **changes)


@st.composite
def _records(draw: st.DrawFn, data: bytes) -> bytes:
    records = step_records.decode(data).copy()
    for _ in range(draw(st.integers(1, 4))):
        row = draw(st.integers(0, len(records) - 1))
        field = draw(st.sampled_from(("planned_at_ns", "started_at_ns", "finished_at_ns", "settled_at_ns", "step_id")))
        records[field][row] = draw(_TIMES if field != "step_id" else st.integers(0, 20))
    return records.tobytes()


def _check(spans: list[trace_pb2.Span]) -> None:
    by_id = {span.span_id: span for span in spans}
    for span in spans:
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        parent = by_id.get(span.parent_span_id)
        # Of several generations that a call has, the last may be reported when the call has been
        # exported.
        if parent is not None and parent.kind == trace_pb2.Span.SPAN_KIND_INTERNAL:
            assert parent.start_time_unix_nano <= span.start_time_unix_nano, (parent.name, span.name)
            assert span.end_time_unix_nano <= parent.end_time_unix_nano, (parent.name, span.name)


@hypothesis.given(st.data(), st.integers(0, 1 << 32), st.integers(1, 3), st.booleans())
def test_nonsense_is_refused_or_becomes_valid_spans(
    data: st.DataObject, seed: int, num_requests: int, tail: bool
) -> None:
    settings: dict[str, Any] = {"trace_keep_itl_ms": 0.001, "trace_keep_failed": True} if tail else {}
    listener = Listener(**settings)
    metrics = Metrics(TelemetryConfig(**{**HEAD_ONLY, "metrics_listen": "127.0.0.1:0"}), ExportCounts(), None)
    story = tell(seed, num_requests, sampled=0.5 if tail else 1.0)
    reported = [(source, data.draw(_changed(fact))) for source, fact in story.reported]
    if data.draw(st.booleans()):
        random.Random(seed).shuffle(reported)
    for source, fact in reported:
        # As the hub does: what a connection tells is its own fault.
        with contextlib.suppress(ValueError):
            fact = facts.decode_fact(facts.encode(fact))
            listener.hear([(source, fact)])
            if isinstance(fact, facts.Generation):
                metrics.sink.generation(source, fact, listener.sink.decide(fact))
            else:
                metrics.sink.take(source, fact)
    metrics.sink.tick(time.time_ns())
    listener.wait(3).wait(60).sink.gone(BACKEND)
    listener.sink.gone(SERVICE)
    listener.wait(120).sink.finish()
    _check(listener.spans)
    for each in story.requests:
        listener.sink.find(each.request_id)
