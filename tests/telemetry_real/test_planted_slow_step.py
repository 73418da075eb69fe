"""A long prompt is computed beside 32 decoding requests of a real server.

`headrace trace --explain` names it for every token that it delayed.

Which tokens those are is read from the trace file as plain JSON, without the viewer: those whose
step computed a part of the long prompt.
"""

from __future__ import annotations

import concurrent.futures
import json
import pathlib
import re
import statistics
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from click.testing import CliRunner
from tests.support.mixed_load import Answer, traced_as
from tests.support.processes import wait_until
from tests.support.running_server import running_server

import headrace
from headrace.trace_context import new_traceparent
from headrace_trace.command import trace

DECODES, LONG_TOKENS = 32, 1400
# Tokens of each before the long prompt comes, and after it; and more than any gets until then,
# since all leave.
BEGUN, MOST = 12, 640


@dataclass(frozen=True)
class Run:
    """What the server's trace file holds of the load, as plain JSON."""

    file: pathlib.Path
    decodes: list[Answer]
    long: Answer
    spans: list[dict[str, Any]]

    def long_steps(self) -> dict[int, int]:
        """Steps that computed a part of the long prompt beside others' tokens.

        How many of its tokens.
        """
        found: dict[int, int] = {}
        for span in self.spans:
            if span["name"] != "engine.step":
                continue
            reported = attributes(span)
            names, counts = (reported.get(f"headrace.step.prefill_request_{part}", []) for part in ("ids", "tokens"))
            chunks = dict(zip(names, counts, strict=True))
            if self.long.request_id in chunks and reported["headrace.step.decodes"]:
                found[reported["headrace.step.id"]] = chunks[self.long.request_id]
        return found

    def slow_steps(self) -> set[int]:
        """Steps that took three times as long as one of decodes alone usually does, or longer."""
        steps = [(span, attributes(span)) for span in self.spans if span["name"] == "engine.step"]
        took = {
            reported["headrace.step.id"]: int(span["endTimeUnixNano"]) - int(span["startTimeUnixNano"])
            for span, reported in steps
        }
        usual = statistics.median(
            took[reported["headrace.step.id"]]
            for _, reported in steps
            if reported["headrace.step.decodes"] and not reported.get("headrace.step.prefill_request_ids")
        )
        return {step for step, time_ns in took.items() if time_ns >= 3 * usual}

    def delayed(self, answer: Answer, steps: dict[int, int]) -> dict[int, int]:
        """Tokens of an answer that were sampled in one of the steps: index and step."""
        tokens = (attributes(s) for s in self.spans if s["name"] == "token" and s["traceId"] == answer.trace_id)
        return {
            reported["headrace.token.index"]: reported["headrace.step.id"]
            for reported in tokens
            if reported["headrace.step.id"] in steps
        }


def attributes(span: dict[str, Any]) -> dict[str, Any]:
    return {entry["key"]: value(entry["value"]) for entry in span.get("attributes", ())}


def value(reported: dict[str, Any]) -> Any:
    ((kind, held),) = reported.items()
    if kind == "arrayValue":
        return [value(each) for each in held.get("values", ())]
    return int(held) if kind == "intValue" else held


def spans_of(file: pathlib.Path) -> list[dict[str, Any]]:
    # The last line may be on its way still.
    lines = file.read_text().rpartition("\n")[0].splitlines() if file.exists() else []
    return [
        span
        for line in lines
        for resource in json.loads(line)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]


def generate(
    client: headrace.Client, token_ids: list[int], begun: threading.Semaphore, enough: threading.Event
) -> Answer:
    """One caller, who leaves when it is enough.

    Releases `begun` once some of its tokens are there.
    """
    context, seen = new_traceparent(), 0
    stream = client.generate(token_ids=token_ids, traceparent=context, timeout=120, max_tokens=MOST, ignore_eos=True)
    for event in stream:
        before = seen
        # One that is held up has several tokens in a delta.
        seen += len(event.token_ids) if isinstance(event, headrace.Delta) else 0
        if before < BEGUN <= seen:
            begun.release()
        if enough.is_set():
            break
    stream.close()
    return Answer(**traced_as("generate", context), request_id=stream.request_id or "")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    file = tmp_path_factory.mktemp("slow-step") / "traces.jsonl"
    # The whole prompt in one or two steps: a step with it is many times as long as one without.
    options = {
        "--device": "cpu",
        "--num-blocks": "1536",
        "--max-num-batched-tokens": "1024",
        "--trace-file": str(file),
        "--trace-detail": "span",
        "--trace-export-delay-s": "0.2",
    }
    begun, enough = threading.Semaphore(0), threading.Event()
    with (
        running_server(*(part for option in options.items() for part in option)) as server,
        headrace.Client(server.address) as client,
        concurrent.futures.ThreadPoolExecutor(DECODES + 1) as pool,
    ):
        wait_until(lambda: is_heard(client, file), 120, "telemetry hears the service and the backend")
        # A CPU's steps grow with what was measured: after this prompt one may hold the whole token
        # budget.
        client.generate(token_ids=[500 + n % 300 for n in range(LONG_TOKENS)], timeout=120, max_tokens=1).result()
        waiting = [pool.submit(generate, client, [10, 20, 30 + n], begun, enough) for n in range(DECODES)]
        assert all(begun.acquire(timeout=120) for _ in range(DECODES))
        prompt = [40 + n % 400 for n in range(LONG_TOKENS)]
        waiting.append(pool.submit(generate, client, prompt, begun, enough))
        assert begun.acquire(timeout=120)
        enough.set()
        *decodes, long = (each.result() for each in waiting)
        wait_until(lambda: whole(file, [*decodes, long]), 120, "all traces and steps are in the file")
    yield Run(file, decodes, long, spans_of(file))


def is_heard(client: headrace.Client, file: pathlib.Path) -> bool:
    """Whether a short generation's steps say who was in them.

    The telemetry process starts last, and each of the others reaches it when it does.
    """
    context = new_traceparent()
    stream = client.generate(token_ids=[7], traceparent=context, timeout=120, max_tokens=4, ignore_eos=True)
    stream.result()
    wait_until(
        lambda: whole(file, [Answer(**traced_as("generate", context), request_id=stream.request_id or "")]),
        120,
        "a short trace",
    )
    steps = [attributes(span) for span in spans_of(file) if span["name"] == "engine.step"]
    return any(stream.request_id in reported.get("headrace.step.request_ids", []) for reported in steps)


def whole(file: pathlib.Path, answers: list[Answer]) -> bool:
    """Returns whether each generation is there, its tokens in one line, and all its steps.

    Steps come in lines of their own.
    """
    spans = [(span["name"], attributes(span)) for span in spans_of(file)]
    requests = {reported.get("headrace.request.id") for name, reported in spans if name != "engine.step"}
    of_tokens = {reported.get("headrace.step.id") for name, reported in spans if name == "token"}
    steps = {reported["headrace.step.id"] for name, reported in spans if name == "engine.step"}
    return {answer.request_id for answer in answers} <= requests and of_tokens <= steps


def in_words(run: Run, answer: Answer) -> str:
    """What `headrace trace --explain` says."""
    done = CliRunner().invoke(trace, [str(run.file), "--request", answer.request_id, "--explain"])
    assert done.exit_code == 0, done.output
    return done.output


# What delayed a token is said of planted sleeps in test_planted_sleeps, and of made traces in
# tests/trace_viewer.
@pytest.mark.slow
def test_the_long_prompt_is_named_for_each_token_that_it_delayed(run: Run) -> None:
    steps = run.long_steps()
    assert sum(steps.values()) == LONG_TOKENS
    # Only chunks so long that each is a delay beside steps of decodes alone, which take long on a
    # busy machine; what is left for the last one may be short.
    slow = run.slow_steps()
    long_ones = {step: num_tokens for step, num_tokens in steps.items() if num_tokens >= 256 and step in slow}
    assert long_ones, steps
    num_delayed = 0
    for answer in run.decodes:
        words = in_words(run, answer)
        for index, step in run.delayed(answer, long_ones).items():
            num_delayed += 1
            found = re.search(rf"token {index}: .*\n.*", words)
            assert found, (index, words)
            named = f"prefill of request {run.long.request_id} ({long_ones[step]:,} tokens) took the step"
            assert named in found.group(0), words
    # Each of them decoded in each of these steps.
    assert num_delayed == DECODES * len(long_ones)
