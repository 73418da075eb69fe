"""A step of the engine as a span: what was in it, what it cost, and whom it links to.

Owns names and values of its attributes. When it is exported is `step_export`'s.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from headrace_facts.step_records import RECORD, Records, StepFlag
from headrace_telemetry import step_work
from headrace_telemetry.otlp import otlp_bytes
from headrace_telemetry.otlp.otlp_bytes import Key, SpanHead
from headrace_telemetry.spans.engine_book import U64, EngineBook, Members, Request

_CAPTURED, _LATE, _ALONE = int(StepFlag.CAPTURED), int(StepFlag.LATE_WORK), int(StepFlag.ISOLATED)
_NAMES: Final = RECORD.names or ()
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
_BOUND_BY: Final = {True: _BOUND.text("memory"), False: _BOUND.text("compute")}
_INCOMPLETE: Final = Key("headrace.trace.incomplete")


def encode(book: EngineBook, step_ids: U64, links: Iterable[Iterable[Request]]) -> list[bytes]:
    """Spans of known steps, each as a field of ScopeSpans.

    Args:
        book: knows the steps.
        step_ids: which, [n].
        links: for each the exported requests that were in it.
    """
    records = book.records(step_ids)
    ids = [row.tobytes() for row in book.find(step_ids).link_ids]
    work = _work(book, records)
    rows = zip(records.tolist(), ids, book.unix_offsets_ns(step_ids).tolist(), work, links, strict=True)
    return [_encode(book, dict(zip(_NAMES, values, strict=True)), *rest) for values, *rest in rows]


def _encode(
    book: EngineBook, record: dict[str, int], ids: bytes, offset_ns: int, work: bytes, links: Iterable[Request]
) -> bytes:
    step_id = record["step_id"]
    start_ns = max(0, (record["started_at_ns"] or record["planned_at_ns"]) + offset_ns)
    end_ns = max(start_ns, (record["finished_at_ns"] or record["settled_at_ns"]) + offset_ns)
    head = SpanHead(ids[:16], ids[16:], b"", "engine.step", start_ns, end_ns)
    members = book.members(step_id)
    who = _who(book, members) if members is not None else _INCOMPLETE.flag(True)
    attributes = b"".join((_plain(book, record, offset_ns), work, who))
    return otlp_bytes.span(head, attributes, b"".join([request.link for request in links]))


def _plain(book: EngineBook, record: dict[str, int], offset_ns: int) -> bytes:
    """What the record says."""
    flags = record["flags"]
    parts = [key.integer(record[field]) for field, key in _FIELDS]
    parts += (
        _ENGINE.text(book.engine),
        _MODEL.text(book.facts.model) if book.facts is not None else b"",
        _GRAPH.flag(bool(flags & _CAPTURED)),
        _LATE_WORK.flag(bool(flags & _LATE)),
        _ISOLATED.flag(True) if flags & _ALONE else b"",
        _PLANNED.integer(record["planned_at_ns"] + offset_ns),
        _SETTLED.integer(record["settled_at_ns"] + offset_ns),
    )
    return b"".join(parts)


def _work(book: EngineBook, records: Records) -> list[bytes]:
    """What each step computed and moved, and its shares of the device's measured rates."""
    engine = book.facts
    if engine is None:
        return [b""] * len(records)
    columns = [(_FLOPS, step_work.flops(engine, records)), (_BYTES, step_work.moved_bytes(engine, records))]
    flops_share, bandwidth_share = step_work.flops_share(engine, records), step_work.bandwidth_share(engine, records)
    if flops_share is not None:
        columns.append((_FLOPS_SHARE, flops_share))
    if bandwidth_share is not None:
        columns.append((_BANDWIDTH_SHARE, bandwidth_share))
    parts = [[key.number(value) for value in column.tolist()] for key, column in columns]
    if flops_share is not None and bandwidth_share is not None:
        parts.append([_BOUND_BY[bound] for bound in (bandwidth_share >= flops_share).tolist()])
    return [b"".join(row) for row in zip(*parts, strict=True)]


def _who(book: EngineBook, members: Members) -> bytes:
    """Which requests were in it."""
    parts = [_REQUEST_IDS.array(book.people(members.numbers).ids)]
    if len(members.chunks):
        parts.append(_PREFILL_IDS.array(book.ids(map(book.request, members.chunks[:, 0].tolist()))))
        parts.append(_PREFILL_TOKENS.integers(members.chunks[:, 2].tolist()))
    if len(members.preempted):
        parts.append(_PREEMPTED_IDS.array(book.ids(map(book.request, dict.fromkeys(members.preempted.tolist())))))
    return b"".join(parts)
