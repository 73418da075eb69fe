"""A step of the engine as a span: what was in it, what it cost, and whom it links to.

Owns names and values of its attributes. When it is exported is `step_export`'s.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from headrace_facts.step_records import Records, StepFlag
from headrace_telemetry import otlp_bytes, step_ids, step_work
from headrace_telemetry.engine_book import EngineBook, Members, Request
from headrace_telemetry.otlp_bytes import Key, SpanHead

_UNKNOWN: Final = otlp_bytes.text_element("?")
# Attributes that are fields of the record.
_FIELDS: Final = tuple(
    (field, Key(f"headrace.step.{name}"))
    for field, name in (
        ("step_id", "id"),
        ("num_sequences", "sequences"),
        ("num_prefill_tokens", "prefill_tokens"),
        ("num_decodes", "decodes"),
        ("num_samples", "samples"),
        ("free_blocks", "free_blocks"),
        ("num_blocks", "num_blocks"),
        ("waiting_requests", "waiting_requests"),
        ("preemptions", "preemptions"),
        ("draft_tokens", "draft_tokens"),
        ("accepted_tokens", "accepted_tokens"),
    )
)
_ENGINE: Final = Key("headrace.step.engine")
_MODEL: Final = Key("headrace.step.model")
_GRAPH: Final = Key("headrace.step.graph")
_LATE_WORK: Final = Key("headrace.step.late_work")
_ISOLATED: Final = Key("headrace.step.isolated")
_PLANNED: Final = Key("headrace.step.planned_ns")
_SETTLED: Final = Key("headrace.step.settled_ns")
_REQUEST_IDS: Final = Key("headrace.step.request_ids")
_PREFILL_IDS: Final = Key("headrace.step.prefill_request_ids")
_PREFILL_TOKENS: Final = Key("headrace.step.prefill_request_tokens")
_PREEMPTED_IDS: Final = Key("headrace.step.preempted_request_ids")
_FLOPS: Final = Key("headrace.step.flops")
_BYTES: Final = Key("headrace.step.bytes")
_FLOPS_SHARE: Final = Key("headrace.step.flops_share")
_BANDWIDTH_SHARE: Final = Key("headrace.step.bandwidth_share")
_BOUND: Final = Key("headrace.step.bound")
_INCOMPLETE: Final = Key("headrace.trace.incomplete")


def encode(book: EngineBook, step_id: int, links: Iterable[Request]) -> bytes:
    """The span of a known step as a field of ScopeSpans.

    Args:
        book: knows the step.
        step_id: which.
        links: exported requests that were in it.
    """
    record = book.records(np.array([step_id], np.uint64))
    offset_ns = book.unix_offset_ns(step_id)
    start_ns = int(record["started_at_ns"][0] or record["planned_at_ns"][0]) + offset_ns
    end_ns = max(start_ns, int(record["finished_at_ns"][0] or record["settled_at_ns"][0]) + offset_ns)
    head = SpanHead(
        step_ids.trace_id(book.engine, step_id),
        step_ids.span_id(book.engine, step_id),
        b"",
        "engine.step",
        start_ns,
        end_ns,
    )
    members = book.members(step_id)
    parts = [_plain(book, record, offset_ns), _work(book, record)]
    parts.append(_who(book, members) if members is not None else _INCOMPLETE.flag(True))
    return otlp_bytes.span(head, b"".join(parts), b"".join([_link(request) for request in links]))


def _link(request: Request) -> bytes:
    span = request.span
    assert span is not None
    return otlp_bytes.link(bytes.fromhex(span.trace_id), bytes.fromhex(span.span_id), span.tracestate)


def _plain(book: EngineBook, record: Records, offset_ns: int) -> bytes:
    """What the record says."""
    flags = int(record["flags"][0])
    parts = [key.integer(int(record[field][0])) for field, key in _FIELDS]
    parts += (
        _ENGINE.text(book.engine),
        _MODEL.text(book.facts.model) if book.facts is not None else b"",
        _GRAPH.flag(bool(flags & StepFlag.CAPTURED)),
        _LATE_WORK.flag(bool(flags & StepFlag.LATE_WORK)),
        _ISOLATED.flag(True) if flags & StepFlag.ISOLATED else b"",
        _PLANNED.integer(int(record["planned_at_ns"][0]) + offset_ns),
        _SETTLED.integer(int(record["settled_at_ns"][0]) + offset_ns),
    )
    return b"".join(parts)


def _work(book: EngineBook, record: Records) -> bytes:
    """What it computed and moved, and as shares of the device's rates where they were measured."""
    engine = book.facts
    if engine is None:
        return b""
    flops, moved = step_work.flops(engine, record), step_work.moved_bytes(engine, record)
    parts = [_FLOPS.number(float(flops[0])), _BYTES.number(float(moved[0]))]
    flops_share, bandwidth_share = step_work.flops_share(engine, record), step_work.bandwidth_share(engine, record)
    if flops_share is not None:
        parts.append(_FLOPS_SHARE.number(float(flops_share[0])))
    if bandwidth_share is not None:
        parts.append(_BANDWIDTH_SHARE.number(float(bandwidth_share[0])))
    if flops_share is not None and bandwidth_share is not None:
        parts.append(_BOUND.text("memory" if bandwidth_share[0] >= flops_share[0] else "compute"))
    return b"".join(parts)


def _who(book: EngineBook, members: Members) -> bytes:
    """Which requests were in it."""
    numbers, chunks = members.numbers.tolist(), members.chunks
    parts = [_REQUEST_IDS.array(_elements(book, dict.fromkeys(numbers)))]
    if len(chunks):
        parts.append(_PREFILL_IDS.array(_elements(book, chunks[:, 0].tolist())))
        parts.append(_PREFILL_TOKENS.integers(chunks[:, 2].tolist()))
    if len(members.preempted):
        parts.append(_PREEMPTED_IDS.array(_elements(book, members.preempted.tolist())))
    return b"".join(parts)


def _elements(book: EngineBook, numbers: Iterable[int]) -> bytes:
    """Ids of requests; "?" where one is forgotten."""
    requests = [book.request(number) for number in numbers]
    return b"".join([_UNKNOWN if request is None else request.element for request in requests])
