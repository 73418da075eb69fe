"""A generation as spans: inference span, phases, prompt chunks, and its tokens.

Owns names, attributes, times and parents. Times come from two clocks (service and engine), so that
a child is moved into its parent where they differ. What is missing is left out, and the span says
so (headrace.trace.incomplete). The server span is `call_spans`'s.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from headrace_facts import facts
from headrace_telemetry.otlp import otlp_bytes
from headrace_telemetry.otlp.otlp_bytes import Key, SpanHead
from headrace_telemetry.outcome import FAILURES
from headrace_telemetry.spans import token_columns
from headrace_telemetry.spans.engine_book import U64, EngineBook
from headrace_telemetry.spans.span_frame import Frame, frame_of
from headrace_telemetry.spans.token_columns import OwnColumns

PROVIDER: Final = "headrace"
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
_ENGINE_FIRST_TOKEN: Final = Key("headrace.engine.time_to_first_token")
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
        steps: ids of the known steps that it was in.
        incomplete: whether something was not known.
    """

    blocks: list[SpanBlock]
    steps: U64
    incomplete: bool


class Kept(NamedTuple):
    """A generation that is exported, its columns read.

    Attributes:
        generation: the fact.
        why: it is exported.
        frame: its inference span.
        tokens: what was reported about its tokens; None: nothing.
        chunks: of its prompt, as (step id, first token, tokens), [n, 3].
        steps: ids of those that it was in.
    """

    generation: facts.Generation
    why: str
    frame: Frame
    tokens: OwnColumns | None
    chunks: U64
    steps: U64


class _ChunkStep(NamedTuple):
    """The step of a prompt chunk: whether it is known, the engine's times, trace id and span id."""

    known: bool
    started_at_ns: int
    finished_at_ns: int
    link_ids: bytes


class _Phase(NamedTuple):
    """A stay in a phase: UNIX times, its span's id."""

    name: str
    start_ns: int
    end_ns: int
    span_id: bytes


def read(generation: facts.Generation, why: str) -> Kept:
    """Reads a generation that has a span context.

    Raises ValueError on columns that do not fit together, and times that are none.
    """
    frame, trace = frame_of(generation), generation.trace
    if trace is None:
        return Kept(generation, why, frame, None, _NO_CHUNKS, _NO_STEPS)
    chunks = np.frombuffer(trace.chunks, "<u8").reshape(-1, 3)
    tokens = token_columns.read(generation, trace)
    steps = np.concatenate((chunks[:, 0], tokens.step_ids))
    return Kept(generation, why, frame, tokens, chunks, steps if steps.all() else steps[steps > 0])


def encode(kept: Sequence[Kept], detail: facts.Detail, book: EngineBook, limits: Limits) -> Iterator[GenerationTrace]:
    """The spans of generations of one engine, one after the other; one at least.

    Args:
        kept: they.
        detail: what they have per token where they do not say so themselves.
        book: knows their steps.
        limits: of attributes.
    """
    known = book.has(np.concatenate([each.steps for each in kept]))
    ends = itertools.accumulate([len(each.steps) for each in kept])
    chunk_steps = _chunk_steps(kept, book)
    arrays, token_blocks = _tokens(kept, detail, book, limits)
    begin = 0
    for index, (each, end) in enumerate(zip(kept, ends, strict=True)):
        its_known, begin = known[begin:end], end
        missing = not its_known.all() if each.tokens is not None else each.generation.output_tokens > 0
        whole = _inference(each, arrays.get(index, b""), bool(missing), limits)
        if each.generation.trace is not None:
            whole = _joined([whole, _children(each, each.generation.trace, chunk_steps)])
        blocks = [whole, *token_blocks.get(index, ())]
        if len(blocks) == 2:
            # As few parts as possible: each of them is queued and remembered by itself.
            blocks = [_joined(blocks)]
        yield GenerationTrace(blocks, each.steps[its_known] if missing else each.steps, bool(missing))


def _joined(blocks: list[SpanBlock]) -> SpanBlock:
    return SpanBlock(b"".join([block.spans for block in blocks]), sum([block.num_spans for block in blocks]))


_NO_STEPS: Final = np.zeros(0, np.uint64)
_NO_CHUNKS: Final = np.zeros((0, 3), np.uint64)


def _tokens(
    kept: Sequence[Kept], detail: facts.Detail, book: EngineBook, limits: Limits
) -> tuple[dict[int, bytes], dict[int, list[SpanBlock]]]:
    """What generations have per token, by their places: as arrays, or as spans."""
    arrays: dict[int, bytes] = {}
    blocks: dict[int, list[SpanBlock]] = {}
    by_detail: dict[facts.Detail, dict[int, OwnColumns]] = {}
    for index, each in enumerate(kept):
        if each.tokens is not None:
            by_detail.setdefault(each.generation.detail or detail, {})[index] = each.tokens
    for chosen, own in by_detail.items():
        if chosen is facts.Detail.OFF:
            continue
        joined = token_columns.join(list(own.values()), [kept[index].frame for index in own], book)
        if chosen is facts.Detail.SPAN:
            for index, spans in zip(own, token_columns.spans(joined), strict=True):
                blocks[index] = [SpanBlock(*block) for block in spans]
        else:
            for index, reported in zip(own, token_columns.arrays(joined, limits.array_tokens), strict=True):
                missing = len(own[index].step_ids) - limits.array_tokens
                arrays[index] = reported + (_TRUNCATED.integer(missing) if missing > 0 else b"")
    return arrays, blocks


def _inference(kept: Kept, arrays: bytes, incomplete: bool, limits: Limits) -> SpanBlock:
    generation, frame = kept.generation, kept.frame
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
    parts = [_often(generation, kept.why, limits.text_bytes), _numbers(generation)]
    parts += [_INCOMPLETE.flag(True) if incomplete else b"", arrays]
    return SpanBlock(otlp_bytes.span(head, b"".join(parts), failed=generation.error_type in FAILURES), 1)


def _often(generation: facts.Generation, why: str, text_bytes: int) -> bytes:
    """What many generations have in common."""
    engine = generation.trace.engine if generation.trace is not None else ""
    texts = (generation.operation, generation.model, generation.model_revision, generation.wire, engine, why)
    return _texts(texts, tuple(generation.finish_reasons), generation.streamed, text_bytes)


@functools.lru_cache(maxsize=256)
def _texts(texts: tuple[str, ...], finish_reasons: tuple[str, ...], streamed: bool, text_bytes: int) -> bytes:
    operation, model, revision, wire, engine, why = texts
    parts = [
        _OPERATION.text(operation),
        _PROVIDER.text(PROVIDER),
        _REQUEST_MODEL.text(model, text_bytes),
        _STREAM.flag(True) if streamed else b"",
        _RESPONSE_MODEL.text(model, 256),
        _FINISH_REASONS.texts(finish_reasons, 64),
        _REVISION.text(revision, 256),
        _WIRE.text(wire, 64),
        _ENGINE.text(engine, 64) if engine else b"",
        _KEPT.text(why),
    ]
    return b"".join(parts)


def _numbers(generation: facts.Generation) -> bytes:
    """What each generation has of its own."""
    parts = [
        _RESPONSE_ID.text(generation.request_id, 256),
        _REQUEST_ID.text(generation.request_id, 256),
        _INPUT.integer(generation.prompt_tokens),
        _OUTPUT.integer(generation.output_tokens),
        _CACHED.integer(generation.cached_tokens),
        _STEP_COUNT.integer(generation.step_count),
        _PREEMPTIONS.integer(generation.preemptions),
        _DRAFTS.integer(generation.draft_tokens),
        _ACCEPTED.integer(generation.accepted_tokens),
    ]
    parts += [_LEDGER[name].integer(value) for name, value in generation.ledger.items() if name in _LEDGER]
    for name, value in generation.parameters.items():
        if name in _INTEGERS:
            parts.append(_INTEGERS[name].integer(int(value)))
        elif name in _NUMBERS:
            parts.append(_NUMBERS[name].number(float(value)))
        elif name == "stop_sequences":
            parts.append(_STOP_SEQUENCES.integer(int(value)))
    if generation.first_chunk_ns:
        parts.append(_FIRST_CHUNK.number(generation.first_chunk_ns / 1e9))
    if generation.ttft_ns:
        parts.append(_ENGINE_FIRST_TOKEN.number(generation.ttft_ns / 1e9))
    if generation.error_type:
        parts.append(_ERROR.text(generation.error_type, 64))
    return b"".join(parts)


def _children(kept: Kept, trace: facts.EngineTrace, steps: Mapping[int, _ChunkStep]) -> SpanBlock:
    """Phases and prompt chunks."""
    frame = kept.frame
    phases = _phases(kept.generation, trace, frame)
    spans = [
        otlp_bytes.span(
            SpanHead(frame.trace_id, phase.span_id, frame.span_id, phase.name, phase.start_ns, phase.end_ns)
        )
        for phase in phases
    ]
    if len(kept.chunks):
        prefills = [phase for phase in phases if phase.name == "prefill"]
        spans += [
            _chunk_span(step_id, first, tokens, steps[step_id], frame, prefills)
            for step_id, first, tokens in kept.chunks.tolist()
        ]
    return SpanBlock(b"".join(spans), len(spans))


def _phases(generation: facts.Generation, trace: facts.EngineTrace, frame: Frame) -> list[_Phase]:
    """Stays in order, their sums those of the ledger.

    The first wait begins before the engine knew of the request, by what the service had it for; the
    way between them is in no stay.
    """
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
            phases.append(_Phase(_PHASE_NAMES.get(phase, phase), begin_ns, end_ns, otlp_bytes.new_span_id()))
    return phases


def _first_wait_ns(generation: facts.Generation, trace: facts.EngineTrace, begin_ns: int, end_ns: int) -> int:
    """How long the first wait was: what the ledger has as queued and later waits do not cover."""
    queued_ns = generation.ledger.get("queued")
    if queued_ns is None:
        return end_ns - begin_ns
    later_ns = sum(stay.end_ns - stay.begin_ns for stay in trace.phases[1:] if stay.phase == "queued")
    return max(0, queued_ns - later_ns)


def _chunk_steps(kept: Sequence[Kept], book: EngineBook) -> dict[int, _ChunkStep]:
    """The steps of all prompt chunks, by id."""
    ids = np.unique(np.concatenate([each.chunks[:, 0] for each in kept]))
    known, records, link_ids = book.find(ids)
    columns = (
        known.tolist(),
        records["started_at_ns"].tolist(),
        records["finished_at_ns"].tolist(),
        map(bytes, link_ids),
    )
    return {step_id: _ChunkStep(*each) for step_id, *each in zip(ids.tolist(), *columns, strict=True)}


def _chunk_span(step_id: int, first: int, tokens: int, step: _ChunkStep, frame: Frame, prefills: list[_Phase]) -> bytes:
    """The span of a prompt chunk, in the prefill that its step began in."""
    start_ns = step.started_at_ns + frame.engine_offset_ns if step.known else frame.start_ns
    end_ns = step.finished_at_ns + frame.engine_offset_ns if step.known else start_ns
    parent = _parent(prefills, start_ns, end_ns, frame) if step.known else _whole(frame)
    start_ns = min(max(start_ns, parent.start_ns), parent.end_ns)
    end_ns = min(max(end_ns, start_ns), parent.end_ns)
    attributes = _FIRST_TOKEN.integer(first) + _CHUNK_TOKENS.integer(tokens) + _STEP_ID.integer(step_id)
    if not step.known:
        attributes += _INCOMPLETE.flag(True)
    head = SpanHead(frame.trace_id, otlp_bytes.new_span_id(), parent.span_id, "prefill.chunk", start_ns, end_ns)
    links = otlp_bytes.link(step.link_ids[:16], step.link_ids[16:]) if step_id else b""
    return otlp_bytes.span(head, attributes, links)


def _parent(prefills: list[_Phase], start_ns: int, end_ns: int, frame: Frame) -> _Phase:
    """The prefill that overlaps a chunk's step; the whole generation if none does."""
    for phase in prefills:
        if start_ns <= phase.end_ns and end_ns >= phase.start_ns:
            return phase
    return _whole(frame)


def _whole(frame: Frame) -> _Phase:
    return _Phase("", frame.start_ns, frame.end_ns, frame.span_id)
