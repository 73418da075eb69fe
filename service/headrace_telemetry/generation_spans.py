"""A generation as spans: the inference span, its phases and prompt chunks, and what it has per token.

Owns names, attributes, times and parents. Times come from two clocks (service and engine), so that a child is moved into its parent where they differ. What is missing is left out, and the span says so
(headrace.trace.incomplete). The server span is `call_spans`'s.
"""

from __future__ import annotations

import os
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace_facts import facts
from headrace_telemetry import otlp_bytes, token_columns
from headrace_telemetry.call_spans import SERVER_FAULTS
from headrace_telemetry.engine_book import U64, EngineBook
from headrace_telemetry.otlp_bytes import Key, SpanHead
from headrace_telemetry.token_columns import TokenColumns

PROVIDER: Final = "headrace"
# Offsets of two processes on one machine differ by less; those of two machines by the difference of their boot times.
_SAME_CLOCK_NS: Final = 50_000_000
_PHASE_NAMES: Final = {
    "queued": "queue",
    "prefill": "prefill",
    "decode": "decode",
    "preempted": "preempted",
    "restarting": "engine_restart",
}
_OPERATION: Final = Key("gen_ai.operation.name")
_PROVIDER: Final = Key("gen_ai.provider.name")
_REQUEST_MODEL: Final = Key("gen_ai.request.model")
_STREAM: Final = Key("gen_ai.request.stream")
_RESPONSE_ID: Final = Key("gen_ai.response.id")
_RESPONSE_MODEL: Final = Key("gen_ai.response.model")
_REVISION: Final = Key("headrace.model.revision")
_FINISH_REASONS: Final = Key("gen_ai.response.finish_reasons")
_FIRST_CHUNK: Final = Key("gen_ai.response.time_to_first_chunk")
_INPUT: Final = Key("gen_ai.usage.input_tokens")
_OUTPUT: Final = Key("gen_ai.usage.output_tokens")
_CACHED: Final = Key("gen_ai.usage.cache_read.input_tokens")
_REQUEST_ID: Final = Key("headrace.request.id")
_WIRE: Final = Key("headrace.wire")
_STEP_COUNT: Final = Key("headrace.step_count")
_PREEMPTIONS: Final = Key("headrace.preemptions")
_DRAFTS: Final = Key("headrace.draft_tokens")
_ACCEPTED: Final = Key("headrace.accepted_tokens")
_KEPT: Final = Key("headrace.trace.kept")
_ENGINE: Final = Key("headrace.engine")
_ERROR: Final = Key("error.type")
_INCOMPLETE: Final = Key("headrace.trace.incomplete")
_TRUNCATED: Final = Key("headrace.trace.truncated_tokens")
_FIRST_TOKEN: Final = Key("headrace.chunk.first_token")
_CHUNK_TOKENS: Final = Key("headrace.chunk.tokens")
_STEP_ID: Final = Key("headrace.step.id")
_LEDGER: Final = {
    name: Key(f"headrace.ledger.{name}_ns")
    for name in (
        "queued",
        "prefill",
        "decode",
        "preempted",
        "engine_restart",
        "detokenize_and_send",
        "blocked_on_reader",
        "end_to_end",
    )
}
_INTEGERS: Final = {name: Key(f"gen_ai.request.{name}") for name in ("max_tokens", "seed", "choice.count")}
_NUMBERS: Final = {
    name: Key(f"gen_ai.request.{name}")
    for name in ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty")
}
# The convention has the texts, which are the caller's; here is their number.
_STOP_SEQUENCES: Final = Key("headrace.request.stop_sequences")


class Limits(NamedTuple):
    """How large attributes may become: bytes of a text, and tokens in arrays."""

    text_bytes: int
    array_tokens: int


class SpanBlock(NamedTuple):
    """Spans side by side, as fields of ScopeSpans."""

    spans: bytes
    num_spans: int


class GenerationTrace(NamedTuple):
    """The spans of a generation.

    Attributes:
        blocks: its spans; the first has the inference span.
        steps: ids of the known steps that it was in, each once.
        incomplete: whether something was not known.
    """

    blocks: list[SpanBlock]
    steps: U64
    incomplete: bool


class _Frame(NamedTuple):
    """The inference span that all others lie in, and what takes the engine's clock to UNIX time."""

    trace_id: bytes
    span_id: bytes
    start_ns: int
    end_ns: int
    engine_offset_ns: int

    def clamped(self, time_ns: int) -> int:
        """A UNIX time, moved into the frame."""
        return min(max(time_ns, self.start_ns), self.end_ns)


class _Phase(NamedTuple):
    """A stay in a phase: UNIX times, its span's id."""

    name: str
    start_ns: int
    end_ns: int
    span_id: bytes


def steps_of(trace: facts.EngineTrace | None) -> U64:
    """Ids of the steps that a generation was in, each once, rising. Raises ValueError on columns that are none."""
    if trace is None:
        return _NO_STEPS
    columns = [_chunks(trace)[:, 0], *(np.frombuffer(steps, "<u8") for steps in trace.token_steps)]
    ids = np.concatenate(columns)
    ids.sort()
    # The first of equal ones; 0 is no step.
    first = ids > 0
    first[1:] &= ids[1:] != ids[:-1]
    return ids[first]


def encode(
    generation: facts.Generation,
    kept: str,
    detail: facts.Detail,
    book: EngineBook | None,
    steps: U64,
    limits: Limits,
) -> GenerationTrace:
    """The spans of a generation that has a span context.

    Args:
        generation: the fact.
        kept: why it is exported.
        detail: what it has per token, if it does not say so itself.
        book: knows its steps; None: nobody told of its engine.
        steps: `steps_of` its trace.
        limits: of attributes.

    Raises:
        ValueError: columns that do not fit together.
    """
    frame = _frame(generation)
    trace = generation.trace
    if trace is None:
        incomplete = generation.output_tokens > 0
        return GenerationTrace([_inference(generation, kept, frame, b"", incomplete, limits)], _NO_STEPS, incomplete)
    detail = generation.detail or detail
    known = book.has(steps) if book is not None else np.zeros(len(steps), np.bool_)
    incomplete = not bool(known.all())
    columns = token_columns.read(generation, trace, book, frame.engine_offset_ns) if detail > facts.Detail.OFF else None
    arrays = b""
    if columns is not None and detail is facts.Detail.ARRAY:
        arrays = _arrays(columns, frame, limits)
    blocks = [
        _inference(generation, kept, frame, arrays, incomplete, limits),
        _children(generation, trace, book, frame),
    ]
    if columns is not None and detail is facts.Detail.SPAN:
        blocks += _token_blocks(columns, frame)
    return GenerationTrace(blocks, steps[known], incomplete)


_NO_STEPS: Final = np.zeros(0, np.uint64)


def _frame(generation: facts.Generation) -> _Frame:
    span = generation.span
    assert span is not None
    offset_ns = generation.unix_offset_ns
    start_ns = generation.arrival_ns + offset_ns
    end_ns = max(start_ns, generation.end_ns + offset_ns)
    trace = generation.trace
    # On one machine the clock is the same; two processes that asked for its offset at two moments would move times by what lay between them.
    engine_offset_ns = offset_ns
    if trace is not None and abs(trace.unix_offset_ns - offset_ns) > _SAME_CLOCK_NS:
        engine_offset_ns = trace.unix_offset_ns
    return _Frame(bytes.fromhex(span.trace_id), bytes.fromhex(span.span_id), start_ns, end_ns, engine_offset_ns)


def _inference(
    generation: facts.Generation, kept: str, frame: _Frame, arrays: bytes, incomplete: bool, limits: Limits
) -> SpanBlock:
    span = generation.span
    assert span is not None
    head = SpanHead(
        frame.trace_id,
        frame.span_id,
        bytes.fromhex(span.parent_span_id),
        f"{generation.operation} {otlp_bytes.cut(generation.model, limits.text_bytes).decode()}",
        frame.start_ns,
        frame.end_ns,
        tracestate=span.tracestate,
    )
    parts = [_request_attributes(generation, limits), _response_attributes(generation), _own_attributes(generation)]
    parts += [_KEPT.text(kept), _INCOMPLETE.flag(True) if incomplete else b"", arrays]
    return SpanBlock(otlp_bytes.span(head, b"".join(parts), failed=generation.error_type in SERVER_FAULTS), 1)


def _request_attributes(generation: facts.Generation, limits: Limits) -> bytes:
    parts = [
        _OPERATION.text(generation.operation),
        _PROVIDER.text(PROVIDER),
        _REQUEST_MODEL.text(generation.model, limits.text_bytes),
        _STREAM.flag(True) if generation.streamed else b"",
    ]
    for name, value in generation.parameters.items():
        if name in _INTEGERS:
            parts.append(_INTEGERS[name].integer(int(value)))
        elif name in _NUMBERS:
            parts.append(_NUMBERS[name].number(float(value)))
        elif name == "stop_sequences":
            parts.append(_STOP_SEQUENCES.integer(int(value)))
    return b"".join(parts)


def _response_attributes(generation: facts.Generation) -> bytes:
    parts = [
        _RESPONSE_ID.text(generation.request_id, 256),
        _RESPONSE_MODEL.text(generation.model, 256),
        _FINISH_REASONS.texts(generation.finish_reasons, 64),
        _INPUT.integer(generation.prompt_tokens),
        _OUTPUT.integer(generation.output_tokens),
        _CACHED.integer(generation.cached_tokens),
    ]
    if generation.ttft_ns:
        parts.append(_FIRST_CHUNK.number(generation.ttft_ns / 1e9))
    if generation.error_type:
        parts.append(_ERROR.text(generation.error_type, 64))
    return b"".join(parts)


def _own_attributes(generation: facts.Generation) -> bytes:
    parts = [
        _REQUEST_ID.text(generation.request_id, 256),
        _REVISION.text(generation.model_revision, 256),
        _WIRE.text(generation.wire, 64),
        _STEP_COUNT.integer(generation.step_count),
        _PREEMPTIONS.integer(generation.preemptions),
        _DRAFTS.integer(generation.draft_tokens),
        _ACCEPTED.integer(generation.accepted_tokens),
    ]
    parts += [_LEDGER[name].integer(value) for name, value in generation.ledger.items() if name in _LEDGER]
    if generation.trace is not None:
        parts.append(_ENGINE.text(generation.trace.engine, 64))
    return b"".join(parts)


def _children(
    generation: facts.Generation, trace: facts.EngineTrace, book: EngineBook | None, frame: _Frame
) -> SpanBlock:
    """Phases and prompt chunks."""
    phases = _phases(generation, trace, frame)
    spans = [
        otlp_bytes.span(
            SpanHead(frame.trace_id, phase.span_id, frame.span_id, phase.name, phase.start_ns, phase.end_ns)
        )
        for phase in phases
    ]
    chunks = _chunks(trace)
    if len(chunks):
        spans += _chunk_spans(trace.engine, chunks, book, frame, [phase for phase in phases if phase.name == "prefill"])
    return SpanBlock(b"".join(spans), len(spans))


def _phases(generation: facts.Generation, trace: facts.EngineTrace, frame: _Frame) -> list[_Phase]:
    """Stays in order, their sums those of the ledger. The first wait begins before the engine knew of the request, by what the service had it for; the way between them is in no stay."""
    offset_ns = frame.engine_offset_ns
    stays = [(stay.phase, stay.begin_ns + offset_ns, stay.end_ns + offset_ns) for stay in trace.phases]
    if stays and stays[0][0] != "queued":
        stays.insert(0, ("queued", stays[0][1], stays[0][1]))
    phases = []
    for index, (phase, begin_ns, end_ns) in enumerate(stays):
        if index == 0:
            begin_ns = end_ns - _first_wait_ns(generation, trace, begin_ns, end_ns)
        begin_ns, end_ns = frame.clamped(begin_ns), frame.clamped(end_ns)
        if end_ns > begin_ns:
            phases.append(_Phase(_PHASE_NAMES.get(phase, phase), begin_ns, end_ns, os.urandom(8)))
    return phases


def _first_wait_ns(generation: facts.Generation, trace: facts.EngineTrace, begin_ns: int, end_ns: int) -> int:
    """How long the first wait was: what the ledger has as queued and later waits do not cover."""
    queued_ns = generation.ledger.get("queued")
    if queued_ns is None:
        return end_ns - begin_ns
    later_ns = sum(stay.end_ns - stay.begin_ns for stay in trace.phases[1:] if stay.phase == "queued")
    return max(0, queued_ns - later_ns)


def _chunks(trace: facts.EngineTrace) -> npt.NDArray[np.uint64]:
    """Prompt chunks as (step id, first token, tokens), [n, 3]."""
    return np.frombuffer(trace.chunks, "<u8").reshape(-1, 3)


def _chunk_spans(
    engine: str, chunks: U64, book: EngineBook | None, frame: _Frame, prefills: list[_Phase]
) -> list[bytes]:
    """Spans of prompt chunks, each in the prefill that its step began in."""
    book = book if book is not None else EngineBook(engine, num_steps=1)
    ids = np.ascontiguousarray(chunks[:, 0])
    known, records, link_ids = book.find(ids)
    spans = []
    for row, (step_id, first, tokens) in enumerate(chunks.tolist()):
        start_ns = int(records["started_at_ns"][row]) + frame.engine_offset_ns if known[row] else frame.start_ns
        end_ns = int(records["finished_at_ns"][row]) + frame.engine_offset_ns if known[row] else start_ns
        parent = _parent(prefills, start_ns, end_ns, frame) if known[row] else _whole(frame)
        start_ns = min(max(start_ns, parent.start_ns), parent.end_ns)
        end_ns = min(max(end_ns, start_ns), parent.end_ns)
        attributes = _FIRST_TOKEN.integer(first) + _CHUNK_TOKENS.integer(tokens) + _STEP_ID.integer(step_id)
        if not known[row]:
            attributes += _INCOMPLETE.flag(True)
        link = link_ids[row].tobytes()
        head = SpanHead(frame.trace_id, os.urandom(8), parent.span_id, "prefill.chunk", start_ns, end_ns)
        spans.append(otlp_bytes.span(head, attributes, otlp_bytes.link(link[:16], link[16:]) if step_id else b""))
    return spans


def _parent(prefills: list[_Phase], start_ns: int, end_ns: int, frame: _Frame) -> _Phase:
    """The prefill that overlaps a chunk's step; the whole generation if none does."""
    for phase in prefills:
        if start_ns <= phase.end_ns and end_ns >= phase.start_ns:
            return phase
    return _whole(frame)


def _whole(frame: _Frame) -> _Phase:
    return _Phase("", frame.start_ns, frame.end_ns, frame.span_id)


def _arrays(columns: TokenColumns, frame: _Frame, limits: Limits) -> bytes:
    """Array attributes, and how many tokens they had no room for."""
    kept = columns.first(limits.array_tokens)
    missing = len(columns.indices) - len(kept.indices)
    return token_columns.arrays(kept, frame.start_ns) + (_TRUNCATED.integer(missing) if missing else b"")


def _token_blocks(columns: TokenColumns, frame: _Frame) -> list[SpanBlock]:
    blocks = token_columns.spans(columns, frame.trace_id, frame.span_id, frame.start_ns, frame.end_ns)
    return [SpanBlock(spans, count) for spans, count in blocks]
