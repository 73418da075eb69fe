"""A real server under mixed load tells a real collector, which tells a real Jaeger.

What Jaeger then has must agree with itself and with what the callers saw.

Nothing of ours reads the traces here. Marked slow, and skipped where the programs are missing
(tests/support/real_parts says where they are looked for).
"""

from __future__ import annotations

import itertools
import signal
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.mixed_load import Answer, mixed_load
from tests.support.ports import free_port
from tests.support.processes import wait_until
from tests.support.real_parts import MISSING, Jaeger, Span, real_parts
from tests.support.rpc import idle_load
from tests.support.running_server import running_server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(MISSING), reason=MISSING or "all is there"),
]

_PHASES = {
    "queue": "queued",
    "prefill": "prefill",
    "decode": "decode",
    "preempted": "preempted",
    "engine_restart": "engine_restart",
}
# Span names and kinds of OTLP.
_INTERNAL, _SERVER = 1, 2
# Both are made from the same integers; a microsecond forgives the cut of a conversion.
_SAME_NS = 1_000
# Service and backend each measure the distance between the two clocks of the machine, a few hundred
# nanoseconds apart at their best.
_TWO_PROCESSES_NS = 50_000


@dataclass
class Request:
    """One caller's answer and its spans."""

    answer: Answer
    server: list[Span]
    inference: Span
    phases: list[Span]
    chunks: list[Span]
    tokens: list[Span]


@dataclass
class Run:
    """Everything that one load left behind."""

    requests: list[Request]
    steps: dict[tuple[str, str], Span] = field(default_factory=dict)
    metrics: dict[tuple[str, str], float] = field(default_factory=dict)

    def inference_spans(self) -> set[tuple[str, str]]:
        return {(request.inference.trace_id, request.inference.span_id) for request in self.requests}


@pytest.fixture(scope="module", params=["undisturbed", "a worker dies"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """Runs with a small cache and token budget: prompts come in chunks, sequences are preempted.

    In the second run the worker is killed as well.
    """
    port = free_port()
    with real_parts() as parts:
        options = {
            "--device": "cpu",
            "--num-blocks": "72",
            "--max-num-batched-tokens": "128",
            "--services": "2",
            "--otlp-endpoint": parts.otlp_endpoint,
            "--trace-sample-ratio": "0",
            "--trace-detail": "span",
            "--metrics-listen": f"127.0.0.1:{port}",
            "--trace-export-delay-s": "0.2",
        }
        with running_server(*itertools.chain.from_iterable(options.items())) as server:
            killer = threading.Timer(0.7, lambda: server.worker().send_signal(signal.SIGKILL))
            if request.param == "a worker dies":
                killer.start()
            answers = mixed_load(server.address, rounds=6, threads=24)
            wait_until(lambda: idle_load(server.address), 60, "no request left")
            requests = wait_until(lambda: _arrived(parts.jaeger, answers), 60, "all traces in Jaeger, whole")
            run = Run(requests)
            for trace_id in {
                trace for request in requests for span in [*request.tokens, *request.chunks] for trace, _ in span.links
            }:
                run.steps |= {(span.trace_id, span.span_id): span for span in parts.jaeger.trace(trace_id)}
            run.metrics = _metrics(port)
        yield run


def _arrived(jaeger: Jaeger, answers: list[Answer]) -> list[Request] | None:
    """All requests, once Jaeger has of each what it should have.

    Spans of one trace may come in several messages, steps last.
    """
    found = [_request(answer, jaeger.trace(answer.trace_id)) for answer in answers]
    whole = [
        request
        for request in found
        if request and len(request.tokens) >= request.inference.attributes["gen_ai.usage.output_tokens"]
    ]
    if len(whole) == len(answers):
        # The steps wait for their other members.
        time.sleep(3)
        return whole
    time.sleep(0.5)
    return None


def _request(answer: Answer, spans: list[Span]) -> Request | None:
    inference = [span for span in spans if "gen_ai.operation.name" in span.attributes]
    if len(inference) != 1:
        return None
    return Request(
        answer,
        server=[span for span in spans if span.kind == _SERVER],
        inference=inference[0],
        phases=[span for span in spans if span.name in _PHASES],
        chunks=[span for span in spans if span.name == "prefill.chunk"],
        tokens=[span for span in spans if span.name == "token"],
    )


def _metrics(port: int) -> dict[tuple[str, str], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        sums: dict[tuple[str, str], float] = defaultdict(float)
        for family in families:
            for sample in family.samples:
                sums[sample.name, sample.labels.get("headrace_token_kind", "")] += sample.value
    return sums


def test_nothing_was_dropped(run: Run) -> None:
    """All that follows is promised while drops are 0."""
    for name in (
        "headrace_telemetry_dropped_facts_total",
        "headrace_telemetry_dropped_spans_total",
        "headrace_telemetry_export_failures_total",
    ):
        assert run.metrics[name, ""] == 0
    assert ("headrace_telemetry_dropped_facts_total", "") in run.metrics


def test_the_load_was_mixed(run: Run) -> None:
    """Several outputs, prompts in chunks, preemptions.

    Or the other tests would prove less than they say.
    """
    assert max(len(request.chunks) for request in run.requests) > 3
    assert sum(request.inference.attributes["headrace.preemptions"] for request in run.requests) > 0
    assert {request.answer.kind for request in run.requests} == {
        "generate",
        "chat",
        "complete",
        "submit",
        "leave",
        "session",
        "triton",
    }
    assert any(span.attributes["headrace.step.sequences"] > 4 for span in run.steps.values())


def test_a_token_has_one_span(run: Run) -> None:
    for request in run.requests:
        found: dict[int, list[int]] = defaultdict(list)
        for span in request.tokens:
            found[span.attributes["headrace.output.index"]].append(span.attributes["headrace.token.index"])
        for output, indices in found.items():
            assert sorted(indices) == list(range(len(indices))), (request.answer, output)
        assert len(request.tokens) == request.inference.attributes["gen_ai.usage.output_tokens"], request.answer
        if request.answer.tokens is not None:
            assert [len(found[output]) for output in sorted(found)] == list(request.answer.tokens), request.answer


def test_metrics_count_the_same_tokens(run: Run) -> None:
    assert run.metrics["headrace_tokens_total", "output"] == sum(len(request.tokens) for request in run.requests)
    inputs = sum(request.inference.attributes["gen_ai.usage.input_tokens"] for request in run.requests)
    assert run.metrics["headrace_tokens_total", "input"] == inputs


def test_spans_stand_under_their_caller(run: Run) -> None:
    for request in run.requests:
        inference, known = request.inference, {span.span_id for span in request.server} | {request.answer.span_id}
        assert inference.kind == _INTERNAL
        assert inference.parent_id in known
        assert all(span.parent_id in known for span in request.server)
        prefills = {span.span_id for span in request.phases if span.name == "prefill"}
        assert all(span.parent_id == inference.span_id for span in [*request.phases, *request.tokens])
        assert all(span.parent_id in prefills | {inference.span_id} for span in request.chunks)


def test_times_are_ordered_and_inside_their_parents(run: Run) -> None:
    for request in run.requests:
        spans = {
            span.span_id: span
            for span in [*request.server, request.inference, *request.phases, *request.chunks, *request.tokens]
        }
        for span in spans.values():
            assert span.start_ns <= span.end_ns
            parent = spans.get(span.parent_id)
            if parent is None:
                continue
            assert parent.start_ns <= span.start_ns, (span.name, request.answer.kind)
            # A detached generation goes on after the call that submitted it.
            if not (request.answer.kind == "submit" and parent.kind == _SERVER):
                assert span.end_ns <= parent.end_ns, (span.name, request.answer.kind, span.end_ns - parent.end_ns)


def test_tokens_of_an_output_follow_each_other(run: Run) -> None:
    for request in run.requests:
        outputs: dict[int, list[Span]] = defaultdict(list)
        for span in request.tokens:
            outputs[span.attributes["headrace.output.index"]].append(span)
        for spans in outputs.values():
            spans.sort(key=lambda span: span.attributes["headrace.token.index"])
            for before, after in itertools.pairwise(spans):
                assert before.start_ns <= after.start_ns
                assert before.attributes["headrace.token.sampled_ns"] <= after.attributes["headrace.token.sampled_ns"]
            # What nobody read ends when it was settled, which may be before an earlier token was
            # written.
            read = [span for span in spans if "headrace.token.emitted_ns" in span.attributes]
            assert all(before.end_ns <= after.end_ns for before, after in itertools.pairwise(read)), request.answer
            for span in spans:
                sampled = request.inference.start_ns + span.attributes["headrace.token.sampled_ns"]
                assert span.start_ns <= sampled <= span.end_ns


def test_a_token_links_to_its_step_and_the_step_back(run: Run) -> None:
    for request in run.requests:
        inference = (request.inference.trace_id, request.inference.span_id)
        for span in [*request.tokens, *request.chunks]:
            (link,) = span.links
            assert link in run.steps, (span.name, request.answer.kind, span.attributes)
            step = run.steps[link]
            assert step.name == "engine.step"
            assert step.attributes["headrace.step.id"] == span.attributes["headrace.step.id"]
            assert step.attributes["headrace.step.engine"] == request.inference.attributes["headrace.engine"]
            assert inference in step.links, "the step knows who was in it"
            assert request.inference.attributes["headrace.request.id"] in step.attributes["headrace.step.request_ids"]


def test_a_step_links_to_requests_that_are_there(run: Run) -> None:
    known = run.inference_spans()
    for step in run.steps.values():
        assert step.links and set(step.links) <= known
        assert len(step.links) == len(set(step.links))
        assert step.start_ns <= step.end_ns


def test_a_step_computes_what_its_members_say(run: Run) -> None:
    """All callers were traced, so their chunks are all that the step had of prompts."""
    chunks: dict[tuple[str, str], int] = defaultdict(int)
    for request in run.requests:
        for span in request.chunks:
            chunks[span.links[0]] += span.attributes["headrace.chunk.tokens"]
    for key, step in run.steps.items():
        assert chunks[key] == step.attributes["headrace.step.prefill_tokens"], step.attributes


def test_a_token_was_computed_in_its_step(run: Run) -> None:
    for request in run.requests:
        for span in request.tokens:
            step = run.steps[span.links[0]]
            sampled = request.inference.start_ns + span.attributes["headrace.token.sampled_ns"]
            assert abs(sampled - step.attributes["headrace.step.settled_ns"]) <= _TWO_PROCESSES_NS
            assert (
                abs(max(step.attributes["headrace.step.planned_ns"], request.inference.start_ns) - span.start_ns)
                <= _TWO_PROCESSES_NS
            )


def test_the_ledger_is_the_sum_of_the_spans(run: Run) -> None:
    for request in run.requests:
        attributes = request.inference.attributes
        for phase, part in _PHASES.items():
            spans = sum(span.duration_ns for span in request.phases if span.name == phase)
            assert abs(spans - attributes[f"headrace.ledger.{part}_ns"]) <= _SAME_NS, (phase, request.answer.kind)


def test_the_ledger_of_the_trace_is_the_callers(run: Run) -> None:
    for request in run.requests:
        if (ledger := request.answer.ledger) is None:
            continue
        attributes = request.inference.attributes
        for part in [*_PHASES.values(), "detokenize_and_send", "blocked_on_reader", "end_to_end"]:
            reported = getattr(ledger, f"{part}_ns")
            assert abs(attributes[f"headrace.ledger.{part}_ns"] - reported) <= _SAME_NS, (part, request.answer.kind)
        # The message with the ledger is the last; writing it comes after.
        assert 0 <= request.inference.duration_ns - attributes["headrace.ledger.end_to_end_ns"] <= 50_000_000


def test_phases_of_one_output_leave_no_gap(run: Run) -> None:
    """From the first step to the last token a request is in one phase at any time."""
    for request in run.requests:
        spans = sorted(request.phases, key=lambda span: span.start_ns)
        for before, after in itertools.pairwise(spans):
            assert abs(after.start_ns - before.end_ns) <= _SAME_NS, (before.name, after.name, request.answer.kind)
