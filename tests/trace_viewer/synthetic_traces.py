"""Realistic traces without a server.

A small engine in simulated time, with trouble planted where a test wants it, reported in the spans
of Headrace's telemetry.

Owns the simulation (steps one ahead, decodes first, prompts in chunks within a token budget) and
its spans as a serialized TracesData or OTLP JSON. Deterministic: the same plan, the same bytes.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.trace.v1 import trace_pb2

MS = 1_000_000
EPOCH_NS = 1_900_000_000_000_000_000
ENGINE = "7f3a9c01d2e4b586"
MODEL = "llama-3.1-8b"
BLOCK = 16


@dataclasses.dataclass(frozen=True)
class Request:
    """A request of the plan. Times in ms from the beginning of the simulation."""

    request_id: str
    arrival_ms: float
    prompt: int
    tokens: int
    n: int = 1
    cached: int = 0
    trace_id: str = ""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What happens. Trouble is planted by step number, or by (request id, token)."""

    requests: tuple[Request, ...]
    epoch_ns: int = EPOCH_NS
    budget: int = 2048
    rows: int = 64
    base_ms: float = 7.0
    decode_ms: float = 0.03
    prompt_ms: float = 0.02
    # Step -> ms that the device takes longer, that it idles before, that its results are read late.
    slow_steps: dict[int, float] = dataclasses.field(default_factory=dict)
    idle_before: dict[int, float] = dataclasses.field(default_factory=dict)
    late_reads: dict[int, float] = dataclasses.field(default_factory=dict)
    # Step -> ms of a restart before it.
    restarts: dict[int, float] = dataclasses.field(default_factory=dict)
    # Request -> (step from which it is out, steps that it stays out).
    preemptions: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    late_service: dict[tuple[str, int], float] = dataclasses.field(default_factory=dict)
    blocked: dict[tuple[str, int], float] = dataclasses.field(default_factory=dict)
    # Requests that nobody reads.
    unread: frozenset[str] = frozenset()
    # Steps that the trace loses.
    lost_steps: frozenset[int] = frozenset()


@dataclasses.dataclass
class Life:
    """A request in the simulation. Times are UNIX ns."""

    request: Request
    arrival: int
    computed: int
    needed: int
    decoding: bool = False
    out_until: int = 0
    phases: list[tuple[str, int, int]] = dataclasses.field(default_factory=list)
    phase: str = "queue"
    since: int = 0
    chunks: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    # Per token of every output alike: step.
    steps: list[int] = dataclasses.field(default_factory=list)

    def enter(self, phase: str, now: int) -> None:
        """Ends the phase it is in."""
        if phase != self.phase:
            self.phases.append((self.phase, self.since, now))
            self.phase, self.since = phase, now

    @property
    def ended(self) -> bool:
        """Whether all its tokens are made."""
        return len(self.steps) == self.request.tokens


@dataclasses.dataclass
class Ran:
    """A step that ran. Times are UNIX ns."""

    step_id: int
    planned: int
    started: int
    finished: int
    settled: int
    decodes: list[str]
    prefills: list[tuple[str, int]]
    preempted: list[str]
    waiting: int
    samples: int


class World:
    """A plan that was carried out."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.steps: list[Ran] = []
        self.lives = [
            Life(r, at := plan.epoch_ns + round(r.arrival_ms * MS), r.cached, r.prompt, since=at)
            for r in sorted(plan.requests, key=lambda r: r.arrival_ms)
        ]
        self._run()

    def _run(self) -> None:
        planned = ready = self.plan.epoch_ns
        while not all(life.ended for life in self.lives):
            step_id = len(self.steps) + 1
            ready += self._restart(step_id, ready)
            planned = self._wait_for_work(step_id, planned, ready)
            started = max(ready, planned + 60_000) + round(self.plan.idle_before.get(step_id, 0) * MS)
            step = self._compose(step_id, planned, started)
            self.steps.append(step)
            self._settle(step)
            planned, ready = step.started, step.finished

    def _restart(self, step_id: int, now: int) -> int:
        length = round(self.plan.restarts.get(step_id, 0) * MS)
        if length:
            for life in self._running():
                life.enter("engine_restart", now)
                life.computed, life.needed, life.decoding = 0, life.needed, False
        return length

    def _running(self) -> list[Life]:
        return [life for life in self.lives if life.phase != "queue" and not life.ended]

    def _wait_for_work(self, step_id: int, planned: int, ready: int) -> int:
        planned = max(planned, ready - 6 * MS if self.steps else ready)
        arrivals = [life.arrival for life in self.lives if not life.ended and life.out_until <= step_id]
        return planned if any(at <= planned for at in arrivals) else max(planned, min(arrivals, default=planned))

    def _compose(self, step_id: int, planned: int, started: int) -> Ran:
        preempted = self._preempt(step_id, planned)
        here = [life for life in self.lives if not life.ended and life.arrival <= planned and life.out_until <= step_id]
        decodes = [life for life in here if life.decoding]
        left, rows, prefills = self.plan.budget - len(decodes), self.plan.rows - len(decodes), []
        for life in here:
            if life.decoding or left <= 0 or rows <= 0:
                continue
            count = min(left, life.needed - life.computed)
            left, rows = left - count, rows - 1
            life.enter("prefill", planned)
            life.chunks.append((step_id, life.computed, count))
            prefills.append((life, count))
        took = self.plan.base_ms + len(decodes) * self.plan.decode_ms
        took += sum(count for _, count in prefills) * self.plan.prompt_ms + self.plan.slow_steps.get(step_id, 0)
        finished = started + round(took * MS)
        settled = finished + 120_000 + round(self.plan.late_reads.get(step_id, 0) * MS)
        done = [life for life, count in prefills if life.computed + count == life.needed]
        return Ran(
            step_id,
            planned,
            started,
            finished,
            settled,
            [life.request.request_id for life in decodes],
            [(life.request.request_id, count) for life, count in prefills],
            preempted,
            sum(life.phase == "queue" and life.arrival <= planned for life in self.lives),
            len(decodes) + len(done),
        )

    def _preempt(self, step_id: int, planned: int) -> list[str]:
        lost = []
        for life in self._running():
            at, length = self.plan.preemptions.get(life.request.request_id, (0, 0))
            if at == step_id:
                life.enter("preempted", planned)
                life.computed, life.decoding, life.out_until = 0, False, step_id + length
                lost.append(life.request.request_id)
        return lost

    def _settle(self, step: Ran) -> None:
        by_id = {life.request.request_id: life for life in self.lives}
        for request_id, count in step.prefills:
            life = by_id[request_id]
            life.computed += count
            if life.computed == life.needed:
                life.decoding = True
                self._sampled(life, step)
        for request_id in step.decodes:
            self._sampled(by_id[request_id], step)

    def _sampled(self, life: Life, step: Ran) -> None:
        life.steps.append(step.step_id)
        life.needed += 1
        life.computed = life.needed
        life.enter("decode", step.settled)
        if life.ended:
            life.phases.append((life.phase, life.since, step.settled))

    def ran(self, step_id: int) -> Ran:
        """The step of that number."""
        return self.steps[step_id - 1]

    def times(self, life: Life) -> list[tuple[int, int, int, int, int]]:
        """Per token: step, planned, settled, made, taken."""
        rows, free = [], 0
        for index, step_id in enumerate(life.steps):
            step, key = self.ran(step_id), (life.request.request_id, index)
            made = max(step.settled + 80_000 + round(self.plan.late_service.get(key, 0) * MS), free)
            free = made + 40_000 + round(self.plan.blocked.get(key, 0) * MS)
            rows.append((step_id, max(step.planned, life.arrival), step.settled, made, free))
        return rows

    def life(self, request_id: str) -> Life:
        """A request's life."""
        return next(life for life in self.lives if life.request.request_id == request_id)

    def traces(self, detail: str = "array", only: Iterable[str] | None = None) -> trace_pb2.TracesData:
        """The spans of requests and steps, as the telemetry process exports them."""
        traces = trace_pb2.TracesData()
        resource = traces.resource_spans.add()
        put(resource.resource, "service.name", "headrace")
        scope = resource.scope_spans.add()
        scope.scope.name = "headrace"
        names = {life.request.request_id for life in self.lives} if only is None else set(only)
        for life in self.lives:
            if life.request.request_id in names:
                _Teller(self, life, scope.spans, detail).tell()
        for step in self.steps:
            members = {name for name, _ in step.prefills} | set(step.decodes)
            if members & names and step.step_id not in self.plan.lost_steps:
                self._tell_step(step, scope.spans.add(), names)
        return traces

    def _tell_step(self, step: Ran, span: trace_pb2.Span, traced: set[str]) -> None:
        span.name = "engine.step"
        span.trace_id, span.span_id = step_trace_id(step.step_id), step_span_id(step.step_id)
        span.start_time_unix_nano, span.end_time_unix_nano = step.started, step.finished
        everyone = list(dict.fromkeys([*step.decodes, *(name for name, _ in step.prefills)]))
        prompts = sum(count for _, count in step.prefills)
        busy_ms = (step.finished - step.started) / MS
        values: dict[str, Any] = {
            "id": step.step_id,
            "engine": ENGINE,
            "model": MODEL,
            "sequences": len(everyone),
            "prefill_tokens": prompts,
            "decodes": len(step.decodes),
            "samples": step.samples,
            "free_blocks": max(0, 4096 - 60 * len(everyone)),
            "num_blocks": 4096,
            "waiting_requests": step.waiting,
            "preemptions": len(step.preempted),
            "draft_tokens": 0,
            "accepted_tokens": 0,
            "graph": not prompts,
            "late_work": False,
            "planned_ns": step.planned,
            "settled_ns": step.settled,
            "prefill_request_ids": [name for name, _ in step.prefills],
            "prefill_request_tokens": [count for _, count in step.prefills],
            "request_ids": everyone,
            "preempted_request_ids": step.preempted,
            "flops_share": min(1.0, (len(step.decodes) + prompts) * 0.018 / busy_ms),
            "bandwidth_share": min(1.0, 5.2 / busy_ms),
            "bound": "compute" if prompts > 400 else "memory",
        }
        for key, value in values.items():
            put(span, "headrace.step." + key, value)
        for life in self.lives:
            if life.request.request_id in traced.intersection(everyone):
                span.links.add(trace_id=trace_id(life.request), span_id=span_id(life.request, "inference"))


class _Teller:
    """Makes the spans of one request."""

    def __init__(self, world: World, life: Life, spans: Any, detail: str) -> None:
        self._world, self._life, self._spans, self._detail = world, life, spans, detail
        self._request = life.request
        self._rows = world.times(life)
        self._read = life.request.request_id not in world.plan.unread
        self._end = self._rows[-1][4 if self._read else 2]

    def tell(self) -> None:
        """Appends all of them."""
        method = "headrace.v1.InferenceService/Generate"
        call = self._span(method, "server", "", self._life.arrival, self._end)
        put(call, "rpc.method", method)
        put(call, "rpc.response.status_code", "OK")
        self._inference()
        for place, (name, begin, end) in enumerate(self._life.phases):
            phase = f"{name}{place}"
            self._span(name, phase, "inference", begin, end)
            if name == "prefill":
                self._chunks(phase, begin, end)
        if self._detail == "span":
            self._tokens()

    def _span(self, name: str, key: str, parent: str, begin: int, end: int) -> trace_pb2.Span:
        span: trace_pb2.Span = self._spans.add(
            name=name,
            trace_id=trace_id(self._request),
            span_id=span_id(self._request, key),
            start_time_unix_nano=begin,
            end_time_unix_nano=end,
        )
        if parent:
            span.parent_span_id = span_id(self._request, parent)
        return span

    def _inference(self) -> None:
        span = self._span(f"text_completion {MODEL}", "inference", "server", self._life.arrival, self._end)
        ledger: dict[str, int] = {}
        for name, begin, end in self._life.phases:
            part = {"queue": "queued"}.get(name, name)
            ledger[part] = ledger.get(part, 0) + end - begin
        ledger["detokenize_and_send"] = self._end - self._life.arrival - sum(ledger.values())
        values = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "headrace",
            "gen_ai.request.model": MODEL,
            "gen_ai.response.model": MODEL,
            "gen_ai.response.finish_reasons": ["length"] * self._request.n,
            "gen_ai.response.time_to_first_chunk": (self._rows[0][4] - self._life.arrival) / 1e9,
            "headrace.engine.time_to_first_token": (self._rows[0][2] - self._life.arrival) / 1e9,
            "gen_ai.usage.input_tokens": self._request.prompt,
            "gen_ai.usage.output_tokens": self._request.tokens * self._request.n,
            "gen_ai.usage.cache_read.input_tokens": self._request.cached,
            "headrace.request.id": self._request.request_id,
            "headrace.wire": "generate",
            "headrace.engine": ENGINE,
            "headrace.step_count": len(set(self._life.steps)),
            "headrace.preemptions": sum(name == "preempted" for name, _, _ in self._life.phases),
            "headrace.trace.kept": "head",
            **{f"headrace.ledger.{part}_ns": value for part, value in ledger.items()},
        }
        if self._detail == "array":
            values |= self._arrays()
        for key, value in values.items():
            put(span, key, value)

    def _arrays(self) -> dict[str, list[int]]:
        rows = self._rows * self._request.n
        names = ("step_id", "scheduled_ns", "sampled_ns", "emitted_ns", "written_ns")
        columns = {name: [row[at] for row in rows] for at, name in enumerate(names)}
        arrays = {name: [time - self._life.arrival for time in columns[name]] for name in names[1:]}
        if not self._read:
            del arrays["emitted_ns"], arrays["written_ns"]
        each = range(self._request.n)
        arrays |= {
            "step_id": columns["step_id"],
            "output_index": [output for output in each for _ in self._rows],
            "index": [index for _ in each for index in range(len(self._rows))],
        }
        return {f"headrace.token.{name}": values for name, values in arrays.items()}

    def _tokens(self) -> None:
        for output in range(self._request.n):
            for index, (step_id, planned, settled, made, taken) in enumerate(self._rows):
                end = taken if self._read else settled
                span = self._span("token", f"token{output}.{index}", "inference", planned, end)
                put(span, "headrace.token.index", index)
                put(span, "headrace.output.index", output)
                put(span, "headrace.step.id", step_id)
                put(span, "headrace.token.sampled_ns", settled - self._life.arrival)
                if self._read:
                    put(span, "headrace.token.emitted_ns", made - self._life.arrival)
                span.links.add(trace_id=step_trace_id(step_id), span_id=step_span_id(step_id))

    def _chunks(self, phase: str, begin: int, end: int) -> None:
        for step_id, first, count in self._life.chunks:
            step = self._world.ran(step_id)
            if begin <= step.planned < end:
                span = self._span(
                    "prefill.chunk",
                    f"chunk{step_id}",
                    phase,
                    min(max(step.started, begin), end),
                    min(max(step.finished, begin), end),
                )
                put(span, "headrace.chunk.first_token", first)
                put(span, "headrace.chunk.tokens", count)
                put(span, "headrace.step.id", step_id)
                span.links.add(trace_id=step_trace_id(step_id), span_id=step_span_id(step_id))


def put(span: Any, key: str, value: Any) -> None:
    """Adds an attribute of any kind that spans of Headrace have."""
    target = span.attributes.add(key=key).value
    if isinstance(value, list):
        target.array_value.SetInParent()
        for item in value:
            added = target.array_value.values.add()
            if isinstance(item, str):
                added.string_value = item
            else:
                added.int_value = item
    elif isinstance(value, bool):
        target.bool_value = value
    elif isinstance(value, int):
        target.int_value = value
    elif isinstance(value, float):
        target.double_value = value
    else:
        target.string_value = value


def trace_id(request: Request) -> bytes:
    """The trace of a request: the one planned, else its own."""
    if request.trace_id:
        return bytes.fromhex(request.trace_id)
    return hashlib.blake2b(request.request_id.encode(), digest_size=16).digest()


def span_id(request: Request, key: str) -> bytes:
    """A span of a request."""
    return hashlib.blake2b(f"{request.request_id}/{key}".encode(), digest_size=8).digest()


def step_trace_id(step_id: int) -> bytes:
    """The trace of a step, as the contract derives it."""
    group = ((step_id - 1) // 256).to_bytes(8, "little")
    return hashlib.blake2b(b"step-trace" + ENGINE.encode() + group, digest_size=16).digest()


def step_span_id(step_id: int) -> bytes:
    """The span of a step, as the contract derives it."""
    return hashlib.blake2b(b"step-span" + ENGINE.encode() + step_id.to_bytes(8, "little"), digest_size=8).digest()


def as_document(traces: trace_pb2.TracesData) -> dict[str, Any]:
    """OTLP JSON: as protobuf's, but ids in hex."""
    document: dict[str, Any] = MessageToDict(traces)
    for span in _spans(document):
        for part in (span, *span.get("links", ())):
            for key in ("traceId", "spanId", "parentSpanId"):
                if key in part:
                    part[key] = _hex(part[key])
    return document


def as_lines(traces: trace_pb2.TracesData, per_line: int = 100) -> str:
    """OTLP JSON lines, as a collector's file exporter writes them: some spans each."""
    spans = list(_spans(as_document(traces)))
    groups = (spans[at : at + per_line] for at in range(0, len(spans), per_line))
    return "".join(json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": group}]}]}) + "\n" for group in groups)


def _hex(value: str) -> str:
    return base64.b64decode(value).hex()


def _spans(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for group in document.get("resourceSpans", ()):
        for scope in group["scopeSpans"]:
            yield from scope.get("spans", ())


def beside_a_long_prefill(decodes: int = 32, tokens: int = 120, prompt: int = 8192) -> Plan:
    """Short requests that all decode when one with a long prompt comes."""
    short = tuple(Request(f"01JDECODE{number:04}-7qm2", number * 0.2, 64 + number, tokens) for number in range(decodes))
    return Plan((*short, Request("01JLONGPROMPT-7qm2", 420.0, prompt, 24)))
