"""What a real backend process reports to telemetry and to services.

The telemetry process listens, hangs, dies or never was; services get what they asked for.
"""

from __future__ import annotations

import os
import pathlib
import signal
import time
import types
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import structlog
from tests.backend.backend_harness import (
    BackendProcess,
    EngineClient,
    Subscription,
    add_message,
    connected,
    details,
    running_backend,
    settled,
    until,
)
from tests.support.telemetry_peer import Peer

from headrace_backend.server.telemetry import Teller
from headrace_facts import facts, step_records, token_steps
from headrace_protos.engine.v1 import engine_pb2

PROMPT = [10, 20, 30, 40, 50]
TRACEPARENT = f"00-{'ab' * 16}-{'cd' * 8}-01"
SPAN = facts.SpanContext("ab" * 16, "cd" * 8, "ef" * 8, "vendor=1", sampled=True)


def recorded(**changes: Any) -> dict[str, Any]:
    recording = engine_pb2.Recording(
        parent_span_id="ef" * 8, tracestate="vendor=1", detail=2, operation="chat", wire="submit"
    )
    return {"traceparent": TRACEPARENT, "recording": recording, **changes}


@pytest_asyncio.fixture
async def peer(tmp_path: pathlib.Path) -> AsyncIterator[Peer]:
    peer = Peer(tmp_path / "telemetry.sock")
    await peer.listen()
    yield peer
    await peer.die()


@pytest_asyncio.fixture
async def backend(tmp_path: pathlib.Path, model: pathlib.Path, peer: Peer) -> AsyncIterator[BackendProcess]:
    telemetry = {"telemetry_socket": str(peer.path)}
    async with running_backend(tmp_path, model, "--step-ms", "2", backend=telemetry) as started:
        started.wait_listening()
        yield started


@pytest_asyncio.fixture
async def client(backend: BackendProcess) -> AsyncIterator[EngineClient]:
    async with connected(backend.address, wants_step_records=True) as connection:
        await connection.wait_serving()
        yield connection


def of(peer: Peer, kind: type[Any]) -> list[Any]:
    return [fact for fact in peer.taken if type(fact) is kind]


def reported_records(peer: Peer) -> step_records.Records:
    return step_records.decode(b"".join(steps.records for steps in of(peer, facts.Steps)))


async def reported_until(peer: Peer, subscription: Subscription) -> facts.EngineTrace:
    """The trace of a request, once its steps have been reported too."""
    assert subscription.done is not None
    trace = facts.decode_trace(subscription.done.engine_trace)
    last = max(int(token_steps.step_ids(steps)[-1]) for steps in trace.token_steps)
    await until(lambda: last in reported_records(peer)["step_id"])
    return trace


async def test_a_recorded_request_its_steps_and_the_engine_fit_together(client: EngineClient, peer: Peer) -> None:
    first = await client.add(PROMPT, 30, **recorded())
    other = await client.add(PROMPT, 30)
    await settled(first), await settled(other)
    trace = await reported_until(peer, first)
    assert other.done is not None and not other.done.engine_trace
    welcome = client.welcomes[-1]
    assert len(welcome.engine) == 16 and int(welcome.engine, 16) >= 0
    assert abs(time.time_ns() - time.monotonic_ns() - welcome.unix_offset_ns) < 1e9
    hello, engine = peer.taken[0], of(peer, facts.EngineFacts)[0]
    assert isinstance(hello, facts.Hello)
    assert (hello.kind, hello.name, hello.instance) == ("backend", "backend-tiny", welcome.engine)
    assert engine.engine == trace.engine == welcome.engine
    # One layer of width 8 with 2 heads of 4, 16 inside, 300 tokens, fp32.
    assert engine.flops_per_token == 2 * (4 * 8 * 8 + 3 * 8 * 16)
    assert (engine.flops_per_pair, engine.flops_per_sample, engine.kv_bytes_per_token) == (32, 4800, 64)
    began = {fact.number: fact for fact in of(peer, facts.RequestBegan)}
    assert began[trace.number] == facts.RequestBegan(trace.engine, trace.number, first.request_id, SPAN)
    assert {fact.request_id: fact.span for fact in began.values()}[other.request_id] is None
    records = {int(record["step_id"]): record for record in reported_records(peer)}
    steps = token_steps.step_ids(trace.token_steps[0]).tolist()
    assert len(steps) == 30 and steps == sorted(set(steps))
    for step in steps:
        record = records[step]
        assert record["planned_at_ns"] <= record["finished_at_ns"] <= record["settled_at_ns"]
        assert record["started_at_ns"] <= record["finished_at_ns"]
        assert trace.phases[0].begin_ns <= record["settled_at_ns"] <= trace.phases[-1].end_ns
    assert np.frombuffer(trace.chunks, "<u8").reshape(-1, 3)[:, 1:].tolist() == [[0, len(PROMPT)]]


async def test_services_that_asked_get_every_step_once(
    client: EngineClient, backend: BackendProcess, peer: Peer
) -> None:
    async with connected(backend.address) as silent:
        requests = [await client.add(PROMPT, 40, **recorded()), await silent.add(PROMPT, 40)]
        for request in requests:
            await settled(request)
        assert not any(silent.step_records)
    await reported_until(peer, requests[0])
    records = b"".join(client.step_records)
    ids = step_records.decode(records)["step_id"].tolist()
    assert ids == list(range(1, len(ids) + 1))
    reported = b"".join(steps.records for steps in of(peer, facts.Steps))
    assert reported[: len(records)] == records


async def test_a_detached_request_is_reported_by_the_backend(client: EngineClient, peer: Peer) -> None:
    for fields in (recorded(), {}):
        add = add_message(PROMPT, 12, detached=True, query_id=1, service_ns=5_000_000, **fields)
        await client.ask("add", add)
    await until(lambda: len(of(peer, facts.Generation)) == 2)
    first, second = of(peer, facts.Generation)
    assert (first.span, first.detail, first.operation, first.wire) == (SPAN, facts.Detail.ARRAY, "chat", "submit")
    assert (first.model, first.output_tokens, first.finish_reasons) == ("tiny", 12, ["length"])
    assert first.trace is not None and first.trace.token_steps[0].num_tokens == 12
    parts = sum(value for name, value in first.ledger.items() if name != "end_to_end")
    assert parts == first.ledger["end_to_end"] == first.end_ns - first.arrival_ns
    assert first.ledger["queued"] >= 5_000_000
    assert first.parameters["max_tokens"] == 12
    assert (second.span, second.trace, second.output_tokens) == (None, None, 12)


async def test_a_subscription_that_was_given_up_is_reported_by_the_backend(client: EngineClient, peer: Peer) -> None:
    request = await client.add(PROMPT, 2000, **recorded())
    await until(lambda: len(request.tokens) >= 3)
    await client.send(detach=engine_pb2.DetachRequest(handle=request.handle))
    await until(lambda: of(peer, facts.Generation))
    (generation,) = of(peer, facts.Generation)
    assert (generation.request_id, generation.finish_reasons) == (request.request_id, ["cancelled"])
    assert generation.trace is not None
    assert generation.trace.token_steps[0].num_tokens == generation.output_tokens >= 3


async def test_load_comes_every_second_with_refusals_and_restarts(
    client: EngineClient, backend: BackendProcess, peer: Peer
) -> None:
    refused = await settled(await client.add([], 5))
    assert refused.refused is not None
    request = await client.add(PROMPT, 400, **recorded())
    await until(lambda: len(request.tokens) >= 3)
    (worker,) = backend.worker_pids()
    os.kill(worker, signal.SIGKILL)
    await settled(request)
    await until(lambda: of(peer, facts.EngineLoad) and of(peer, facts.EngineLoad)[-1].restarts == 1)
    load = of(peer, facts.EngineLoad)[-1]
    assert load.refusals == {"invalid": 1} and load.num_blocks == 256
    trace = await reported_until(peer, request)
    stays = [stay.phase for stay in trace.phases]
    assert "restarting" in stays
    steps = token_steps.step_ids(trace.token_steps[0]).tolist()
    assert len(steps) == 400 == len(set(steps)), "what was lost is sampled again by another step, and appears once"


@pytest.mark.slow  # tests/e2e/test_metrics.py has it come again.
async def test_a_telemetry_process_that_comes_again_hears_of_engine_and_requests(
    client: EngineClient, peer: Peer
) -> None:
    request = await client.add(PROMPT, 1500, **recorded())
    await until(lambda: of(peer, facts.RequestBegan))
    await peer.die()
    await until(lambda: len(request.tokens) >= 50)
    await peer.listen()
    await until(lambda: peer.num_connections == 2 and of(peer, facts.RequestBegan) and of(peer, facts.Steps))
    assert [type(fact) for fact in peer.taken[:2]] == [facts.Hello, facts.EngineFacts]
    assert of(peer, facts.RequestBegan)[0].request_id == request.request_id
    await settled(request)


async def test_a_telemetry_process_that_hangs_holds_nothing_up(client: EngineClient, peer: Peer) -> None:
    peer.reads.clear()
    requests = [await client.add(PROMPT, 100, **recorded()) for _ in range(5)]
    for request in requests:
        assert len((await settled(request)).tokens) == 100
    peer.reads.set()


async def test_a_telemetry_process_that_never_was_holds_nothing_up(tmp_path: pathlib.Path, model: pathlib.Path) -> None:
    telemetry = {"telemetry_socket": str(tmp_path / "nobody.sock")}
    async with running_backend(tmp_path, model, backend=telemetry) as started:
        started.wait_listening()
        async with connected(started.address) as client:
            await client.wait_serving()
            request = await settled(await client.add(PROMPT, 10, **recorded()))
            assert len(request.tokens) == 10 and request.done is not None and request.done.engine_trace


async def test_a_trace_context_that_is_none_is_no_error(client: EngineClient) -> None:
    for traceparent in (
        "nonsense",
        f"00-{'0' * 32}-{'cd' * 8}-01",
        f"00-{'ab' * 16}-{'0' * 16}-01",
        f"ff-{'ab' * 16}-{'cd' * 8}-01",
        f"00-{'AB' * 16}-{'cd' * 8}-01",
        TRACEPARENT + "-more",
    ):
        request = await settled(await client.add(PROMPT, 3, **recorded(traceparent=traceparent)))
        assert request.refused is None and request.done is not None and not request.done.engine_trace, traceparent


async def test_a_recording_that_breaks_rules_is_refused_by_field(client: EngineClient) -> None:
    recording = engine_pb2.Recording(
        parent_span_id="short", tracestate="x" * 600, detail=9, operation="o" * 65, wire="w" * 65
    )
    request = await settled(await client.add(PROMPT, 3, traceparent=TRACEPARENT, recording=recording))
    assert request.refused is not None
    fields = {violation.field for violation in details(request.refused)["BadRequest"].field_violations}
    assert fields == {f"recording.{name}" for name in ("parent_span_id", "tracestate", "detail", "operation", "wire")}


async def test_a_telling_that_fails_is_logged_once_and_the_next_one_is_made() -> None:
    reported: list[object] = []
    outcomes = iter([RuntimeError("planted"), RuntimeError("planted"), None, RuntimeError("planted"), "steps"])

    def take_steps() -> object:
        outcome = next(outcomes, None)
        if isinstance(outcome, RuntimeError):
            raise outcome
        return outcome

    async def stop() -> None:
        return None

    steps = types.SimpleNamespace(take_steps=take_steps, take_ended=list, engine="ab" * 8)
    model = types.SimpleNamespace(describe=lambda: types.SimpleNamespace(name="m", revision="r"))
    engine = types.SimpleNamespace(steps=steps)
    feed = types.SimpleNamespace(tell=reported.append, start=lambda: None, stop=stop)
    with structlog.testing.capture_logs() as lines:
        teller = Teller(feed, engine, model)  # type: ignore[arg-type]  # what it asks of them
        teller._tell_load = lambda: None  # type: ignore[method-assign]
        teller.start()
        await until(lambda: "steps" in reported)
        await teller.stop()
    failed = [line for line in lines if line["event"] == "telemetry not reported"]
    assert [(line["what"], line["log_level"]) for line in failed] == [("flush", "error")] * 2
