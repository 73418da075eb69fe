"""Random sleeps in each step of a fake worker stand in the spans of the tokens.

A real service, backend and telemetry process between them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import pathlib
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from tests.backend.backend_harness import running_backend, write_model_folder
from tests.support.ports import free_port
from tests.support.processes import wait_until
from tests.support.running_server import environment

import headrace
from headrace.trace_context import new_traceparent, trace_id_of

TOKENS = 60
_MS = 1_000_000


@contextlib.contextmanager
def command(*arguments: object) -> Iterator[None]:
    """A `headrace` command that runs until the end of the block."""
    process = subprocess.Popen([sys.executable, "-m", "headrace_supervisor", *map(str, arguments)], env=environment())
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(240)


def answer(address: str) -> str:
    """Asks for some tokens and returns the trace's id."""
    context = new_traceparent()
    with headrace.Client(address) as client:

        def serves() -> bool:
            with contextlib.suppress(headrace.HeadraceError):
                return bool(client.list_models())
            return False

        wait_until(serves, 60, "the service serves")
        stream = client.generate(
            token_ids=[10, 20, 30],
            traceparent=context,
            timeout=60,
            max_tokens=TOKENS,
            ignore_eos=True,
            trace_detail="span",
        )
        assert stream.result().usage.output_tokens == TOKENS
    return trace_id_of(context)


def token_spans(file: pathlib.Path, trace_id: str) -> list[dict[str, Any]]:
    """Token spans of a trace in a file of OTLP JSON lines, in the order of their tokens."""
    # The last line may be on its way still.
    lines = file.read_text().rpartition("\n")[0].splitlines() if file.exists() else []
    spans = [
        span
        for line in lines
        for resource in json.loads(line)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
        if span["name"] == "token" and span["traceId"] == trace_id
    ]
    return sorted(spans, key=lambda span: attribute(span, "headrace.token.index"))


def attribute(span: dict[str, Any], name: str) -> int:
    (value,) = (entry["value"]["intValue"] for entry in span["attributes"] if entry["key"] == name)
    return int(value)


@pytest.mark.slow  # tests/e2e/test_traces.py follows tokens through a server.
@pytest.mark.timeout(900)
async def test_random_sleeps_of_the_worker_are_the_waits_of_the_tokens(tmp_path: pathlib.Path) -> None:
    model, slept, traces = write_model_folder(tmp_path / "model"), tmp_path / "slept", tmp_path / "traces.jsonl"
    socket, address = tmp_path / "t" / "telemetry.sock", f"127.0.0.1:{free_port()}"
    socket.parent.mkdir(mode=0o700)
    telemetry = ("telemetry", "--telemetry-socket", socket, "--trace-file", traces, "--trace-export-delay-s", "0.1")
    async with running_backend(
        tmp_path, model, "--random-sleeps", str(slept), backend={"telemetry_socket": str(socket)}
    ) as backend:
        backend.wait_listening()
        service = ("service", "--listen", address, "--engine", backend.address, "--telemetry-socket", socket)
        with command(*telemetry), command(*service):
            trace_id = await asyncio.to_thread(answer, address)
            spans = await asyncio.to_thread(
                wait_until,
                lambda: found if len(found := token_spans(traces, trace_id)) == TOKENS else None,
                60,
                "a span per token",
            )
    ended = {int(step): int(end) for step, end in (line.split() for line in slept.read_text().splitlines())}
    steps = [attribute(span, "headrace.step.id") for span in spans]
    sampled = [attribute(span, "headrace.token.sampled_ns") for span in spans]
    waits = [after - before for before, after in itertools.pairwise(sampled)]
    planted = [ended[after] - ended[before] for before, after in itertools.pairwise(steps)]
    assert max(planted) - min(planted) > 10 * _MS
    # Each wait is its own sleep, and not the one before or after it: 0.1 ms beside 7, and on a
    # machine that is busy still less than half.
    error = typical_error(waits, planted)
    others = min(typical_error(waits[1:], planted[:-1]), typical_error(waits[:-1], planted[1:]))
    assert error < others / 2, (error / _MS, others / _MS)


def typical_error(waits: list[int], planted: list[int]) -> float:
    """Median of the differences, in nanoseconds."""
    return statistics.median(abs(wait - slept) for wait, slept in zip(waits, planted, strict=True))
