"""Facts become spans.

What the hub passes on comes in here; encoded spans go out to the ring, the trace file and the
collector.

Owns the join of those who tell: engines' books, generations that wait a moment for their steps,
calls that wait for their generations, and what was decided on each trace. All of it is bounded.
What spans say is the business of `generation_spans`, `call_spans` and `step_spans`, whose spans
they are that of `resources`.
"""

from __future__ import annotations

import collections
import re
import time
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from headrace_facts import facts
from headrace_telemetry import keeping
from headrace_telemetry.config import TelemetryConfig
from headrace_telemetry.counts import ExportCounts
from headrace_telemetry.export.trace_ring import RingPart, TraceRing
from headrace_telemetry.newest_table import NewestTable
from headrace_telemetry.otlp import otlp_bytes
from headrace_telemetry.spans import call_spans, generation_spans, step_spans
from headrace_telemetry.spans.engine_book import U64, EngineBook, Request
from headrace_telemetry.spans.generation_spans import GenerationTrace, Kept, Limits, SpanBlock
from headrace_telemetry.spans.resources import Resources
from headrace_telemetry.spans.span_frame import Frame, check_time
from headrace_telemetry.step_export import StepExport

Outlet = Callable[[bytes, SpanBlock], None]

# How long a generation waits for steps that nobody has reported yet.
_STEPS_WAIT_NS: Final = 2_000_000_000
_MOST_WAITING: Final = 4096
_NEVER_NS: Final = 1 << 63
# What is encoded at once: more costs more memory and misses caches, fewer cost what numpy costs per
# call.
_TOKENS_AT_ONCE: Final = 2048
_GENERATIONS_AT_ONCE: Final = 64
# A step in a large batch takes some 50 KB.
_STEPS_PER_BLOCK: Final = 32
_MOST_TRACES: Final = 131_072
_MOST_BOOKS: Final = 16
# How long the steps of a backend that has gone may be asked for.
_GONE_NS: Final = 60_000_000_000
_TRACE_ID = re.compile(r"[0-9a-f]{32}")
_SPAN_ID = re.compile(r"[0-9a-f]{16}")


class _Waiting(NamedTuple):
    """A kept generation, and until when it waits for steps that are not known."""

    until_ns: int
    source: facts.Hello
    kept: Kept


class SpanSink:
    """A sink of the hub, and its judge and memory of traces.

    Args:
        config: what is kept, and the limits of attributes.
        scope: the serialized InstrumentationScope.
        counts: of what could not be reported.
        outlets: who takes spans beside the ring: file and collector.
    """

    def __init__(self, config: TelemetryConfig, scope: bytes, counts: ExportCounts, outlets: list[Outlet]) -> None:
        self._config = config
        self._scope = scope
        self._counts = counts
        self._outlets = outlets
        self._detail = facts.Detail[config.trace_detail.upper()]
        self._limits = Limits(config.trace_max_attribute_bytes, config.trace_max_array_tokens)
        self._ring = TraceRing(int(config.trace_ring), counts)
        self._steps = StepExport(self._emit_steps)
        self._books: collections.OrderedDict[str, EngineBook] = collections.OrderedDict()
        self._gone: dict[str, int] = {}
        self._requests: NewestTable[Request] = NewestTable(_MOST_TRACES)
        self._waiting: collections.deque[_Waiting] = collections.deque()
        # Generations that nothing is missing of: they are encoded many at once.
        self._ready: list[_Waiting] = []
        self._num_ready_tokens = 0
        # By trace id: whether it is kept, and calls that wait to know; by id of the server span:
        # when its generations were.
        self._decided: NewestTable[bool] = NewestTable(_MOST_TRACES)
        self._calls: NewestTable[tuple[facts.Hello, facts.CallEnded]] = NewestTable(_MOST_WAITING)
        self._bounds: NewestTable[tuple[int, int]] = NewestTable(_MOST_WAITING)
        # By id of the server span: calls to export whose generation is still to be reported, and
        # until when they wait.
        self._early: dict[str, tuple[int, facts.Hello, facts.CallEnded]] = {}
        self._resources = Resources(config)

    # What the hub asks.

    def decide(self, generation: facts.Generation) -> str | None:
        """Returns why a generation's trace is exported; None: it is not."""
        span = generation.span
        if span is None:
            return None
        _check(span)
        kept = keeping.reason(generation, self._config)
        self._decided.put(span.trace_id, kept is not None or bool(self._decided.get(span.trace_id)))
        request = self._requests.get(span.span_id)
        if request is not None:
            request.kept = kept is not None
        return kept

    def find(self, key: str) -> bytes:
        """A recent trace as serialized TracesData; empty: it is not known."""
        self._export_ready(time.time_ns())
        found = self._ring.find(key)
        if found is None:
            return b""
        by_resource: dict[bytes, list[bytes]] = {}
        for resource, spans in found.spans:
            by_resource.setdefault(resource, []).append(spans)
        for engine, step_id in found.steps:
            step = self._ring.step((engine, step_id)) or self._step_now(engine, step_id)
            if step is not None:
                by_resource.setdefault(step[0], []).append(step[1])
        return b"".join(
            [otlp_bytes.resource_spans(resource, self._scope, spans) for resource, spans in by_resource.items()]
        )

    # What the hub tells.

    def take(self, source: facts.Hello, fact: facts.Fact) -> None:
        """Takes a fact other than the end of a generation."""
        match fact:
            case facts.Steps():
                self._take_steps(source, fact)
            case facts.RequestBegan():
                if fact.span is not None:
                    _check(fact.span)
                request = self._book(fact.engine).add_request(fact)
                if fact.span is not None:
                    self._requests.put(fact.span.span_id, request)
            case facts.CallEnded():
                self._take_call(source, fact)
            case facts.EngineFacts():
                book = self._book(fact.engine)
                book.facts, book.source = fact, source
                self._gone.pop(fact.engine, None)
            case facts.SetDetail():
                self._detail = fact.detail or self._detail
            case facts.Dropped():
                self._counts.reported_dropped += fact.facts

    def generation(self, source: facts.Hello, generation: facts.Generation, kept: str | None) -> None:
        """Takes the fact that a generation has ended."""
        span = generation.span
        if span is None:
            return
        if kept is not None:
            read = generation_spans.read(generation, kept)
            self._note_bounds(read.frame, generation.wire, span)
            self._ready.append(_Waiting(time.time_ns() + _STEPS_WAIT_NS, source, read))
            self._num_ready_tokens += generation.output_tokens
            if self._num_ready_tokens >= _TOKENS_AT_ONCE or len(self._ready) >= _GENERATIONS_AT_ONCE:
                self._export_ready(time.time_ns())
        held = self._calls.pop(span.trace_id)
        if held is not None and kept is not None:
            self._export_call(*held)
        self._steps.tick(time.time_ns())

    def gone(self, source: facts.Hello) -> None:
        """Notes that a connection has ended."""
        for engine, book in self._books.items():
            if book.source is source:
                book.source = None
                self._gone[engine] = time.time_ns()

    def tick(self, now_unix_ns: int) -> None:
        """Lets go of what has waited long enough."""
        while self._waiting and (self._waiting[0].until_ns <= now_unix_ns or self._has_steps(self._waiting[0])):
            self._ready.append(self._waiting.popleft())
        self._export_ready(now_unix_ns)
        for span_id in [span_id for span_id, (until_ns, *_) in self._early.items() if until_ns <= now_unix_ns]:
            self._export_early(span_id)
        self._steps.tick(now_unix_ns)
        for engine in [engine for engine, since_ns in self._gone.items() if since_ns + _GONE_NS <= now_unix_ns]:
            self._forget(engine)

    def finish(self) -> None:
        """Exports all that waits, because no more facts come."""
        self._ready += self._waiting
        self._waiting.clear()
        self._export_ready(_NEVER_NS)
        for span_id in list(self._early):
            self._export_early(span_id)
        self._steps.finish()

    # Generations.

    def _has_steps(self, waiting: _Waiting) -> bool:
        """Whether all its steps are known, or none ever will be."""
        trace = waiting.kept.generation.trace
        if trace is None:
            return True
        book = self._books.get(trace.engine)
        return book is not None and bool(book.has(waiting.kept.steps).all())

    def _export_ready(self, now_ns: int) -> None:
        """Exports the generations that came, unless they lack steps and may wait."""
        ready, self._ready, self._num_ready_tokens = self._ready, [], 0
        by_engine: dict[str, list[_Waiting]] = {}
        for waiting in ready:
            trace = waiting.kept.generation.trace
            by_engine.setdefault(trace.engine if trace is not None else "", []).append(waiting)
        for engine, some in by_engine.items():
            due = some if self._have_steps(engine, some) else self._due(some, now_ns)
            if due:
                self._export(engine, due)

    def _have_steps(self, engine: str, some: list[_Waiting]) -> bool:
        """Whether all of them have all their steps."""
        book = self._books.get(engine)
        return book is not None and bool(book.has(np.concatenate([waiting.kept.steps for waiting in some])).all())

    def _due(self, some: list[_Waiting], now_ns: int) -> list[_Waiting]:
        """Returns those that have their steps or have waited for them.

        The others wait on, so many at most.
        """
        due = []
        for waiting in some:
            if waiting.until_ns <= now_ns or self._has_steps(waiting):
                due.append(waiting)
            else:
                self._waiting.append(waiting)
        while len(self._waiting) > _MOST_WAITING:
            due.append(self._waiting.popleft())
        return due

    def _export(self, engine: str, some: list[_Waiting]) -> None:
        """Exports generations of one engine."""
        book = self._books.get(engine)
        kept = [waiting.kept for waiting in some]
        traces = generation_spans.encode(kept, self._detail, book or EngineBook(engine, num_steps=1), self._limits)
        steps = []
        for waiting, encoded in zip(some, traces, strict=True):
            span = waiting.kept.generation.span
            assert span is not None
            self._counts.incomplete += encoded.incomplete
            self._send_trace(waiting, span.trace_id, engine, encoded)
            steps.append(encoded.steps)
        if book is not None:
            self._steps.wanted(book, np.unique(np.concatenate(steps)), time.time_ns())

    def _send_trace(self, waiting: _Waiting, trace_id: str, engine: str, encoded: GenerationTrace) -> None:
        resource, request_id = self._resources.of(waiting.source), waiting.kept.generation.request_id
        for index, block in enumerate(encoded.blocks):
            part = RingPart(resource, block.spans, request_id)
            if index == 0 and engine:
                part = RingPart(resource, block.spans, request_id, engine, encoded.steps)
            self._ring.add(trace_id, part)
            self._send(resource, block)

    # Calls.

    def _note_bounds(self, frame: Frame, wire: str, span: facts.SpanContext) -> None:
        """Remembers when a call's generation was, if the call lasts as long as that."""
        if not span.parent_span_id or wire == "submit":
            return
        known = self._bounds.get(span.parent_span_id) or (frame.start_ns, frame.end_ns)
        self._bounds.put(span.parent_span_id, (min(known[0], frame.start_ns), max(known[1], frame.end_ns)))
        if span.parent_span_id in self._early:
            self._export_early(span.parent_span_id)

    def _take_call(self, source: facts.Hello, call: facts.CallEnded) -> None:
        """Exports a call if its generation was exported; waits if that is not decided.

        A call without a generation goes by its flag.
        """
        span = call.span
        if span is None:
            return
        for context in (span, *call.links):
            _check(context)
        check_time(call.start_ns + call.unix_offset_ns)
        check_time(call.end_ns + call.unix_offset_ns)
        if span.sampled or self._decided.get(span.trace_id) or self._kept_links(call):
            self._export_or_wait(source, call, span)
        elif self._config.keeps_at_end and self._decided.get(span.trace_id) is None:
            self._calls.put(span.trace_id, (source, call))

    def _export_or_wait(self, source: facts.Hello, call: facts.CallEnded, span: facts.SpanContext) -> None:
        """Exports a call.

        One whose caller left ends before its generation, which the server span must enclose.
        """
        if not call.request_id or call.status == "OK" or self._bounds.get(span.span_id) is not None:
            self._export_call(source, call)
            return
        self._early[span.span_id] = (time.time_ns() + _STEPS_WAIT_NS, source, call)
        if len(self._early) > _MOST_WAITING:
            self._export_early(next(iter(self._early)))

    def _export_early(self, span_id: str) -> None:
        _, source, call = self._early.pop(span_id)
        self._export_call(source, call)

    def _export_call(self, source: facts.Hello, call: facts.CallEnded) -> None:
        span = call.span
        assert span is not None
        start_ns, end_ns = call.start_ns + call.unix_offset_ns, call.end_ns + call.unix_offset_ns
        bounds = self._bounds.pop(span.span_id)
        if bounds is not None:
            # Clocks were read a moment apart; a parent is as long as what it encloses.
            start_ns, end_ns = min(start_ns, bounds[0]), max(end_ns, bounds[1])
        block = SpanBlock(call_spans.encode(call, start_ns, end_ns, self._kept_links(call)), 1)
        resource = self._resources.of(source)
        self._ring.add(span.trace_id, RingPart(resource, block.spans, call.request_id))
        self._send(resource, block)

    def _kept_links(self, call: facts.CallEnded) -> list[facts.SpanContext]:
        """Returns the links that lead to exported spans."""
        return [link for link in call.links if link.sampled or self._decided.get(link.trace_id)]

    # Steps.

    def _take_steps(self, source: facts.Hello, steps: facts.Steps) -> None:
        book = self._book(steps.engine)
        if source.kind == "backend":
            book.source = source
        with_members = book.add_steps(steps)
        self._steps.arrived(book, with_members, time.time_ns())

    def _emit_steps(self, book: EngineBook, step_ids: U64, links: list[list[Request]]) -> None:
        resource = self._resources.of_engine(book)
        spans = step_spans.encode(book, step_ids, links)
        for step_id, span in zip(step_ids.tolist(), spans, strict=True):
            self._ring.add_step((book.engine, step_id), resource, span)
        for begin in range(0, len(spans), _STEPS_PER_BLOCK):
            part = spans[begin : begin + _STEPS_PER_BLOCK]
            self._send(resource, SpanBlock(b"".join(part), len(part)))

    def _step_now(self, engine: str, step_id: int) -> tuple[bytes, bytes] | None:
        """A step that has not been exported yet."""
        book = self._books.get(engine)
        ids = np.array([step_id], np.uint64)
        if book is None or not book.has(ids)[0]:
            return None
        return self._resources.of_engine(book), step_spans.encode(book, ids, [self._steps.links(book, step_id)])[0]

    def _book(self, engine: str) -> EngineBook:
        """The book of an engine; the oldest is closed when there are too many."""
        book = self._books.get(engine)
        if book is None:
            book = self._books[engine] = EngineBook(engine)
            if len(self._books) > _MOST_BOOKS:
                self._forget(next(iter(self._books)))
        return book

    def _forget(self, engine: str) -> None:
        self._gone.pop(engine, None)
        self._books.pop(engine, None)

    # Outlets.

    def _send(self, resource: bytes, block: SpanBlock) -> None:
        for outlet in self._outlets:
            outlet(resource, block)


def _check(span: facts.SpanContext) -> None:
    """Raises ValueError if ids are not what a trace has."""
    if not _TRACE_ID.fullmatch(span.trace_id) or not _SPAN_ID.fullmatch(span.span_id):
        raise ValueError("a span context without ids")
    if span.parent_span_id and not _SPAN_ID.fullmatch(span.parent_span_id):
        raise ValueError("a span context whose parent is no id")
