"""Every way a call can end.

What its caller gets, what metrics count and what spans say is one thing, and what
docs/operations.md tells operators.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

import grpc
import pytest
import pytest_asyncio
import yaml
from google.rpc import code_pb2
from opentelemetry.proto.trace.v1 import trace_pb2
from tests.service.api.test_session import Collected, read_until, submit
from tests.service.auth.credentials_case import bearer, entry, write_keys
from tests.service.fake_engine import queue_full
from tests.service.harness import events_of, running_service
from tests.service.tracing.conftest import SAMPLED, TracedService
from tests.service.tracing.fake_telemetry import FakeTelemetry
from tests.support import reported_facts
from tests.telemetry.reported import Listener, attributes

from headrace.v1 import generation_pb2, inference_pb2
from headrace_facts.facts import CallEnded, Generation
from headrace_service import errors
from headrace_service.auth import api_keys
from headrace_service.streams.generation_stream import GenerationStream
from headrace_telemetry.config import TelemetryConfig
from headrace_telemetry.counts import ExportCounts
from headrace_telemetry.metrics import Metrics, catalogue

Spec = generation_pb2.GenerationSpec
KEY = api_keys.new_key()
_ROOT = pathlib.Path(__file__).parents[3]


class Ending(NamedTuple):
    """One row of the guide's table."""

    what: str
    status: str
    # None of them: no generation is counted.
    reasons: tuple[str, ...]
    # Of the generation's span.
    error_type: str
    failed: bool
    alerts: bool


def guides_endings() -> list[Ending]:
    """The rows of the guide's table of endings."""
    section = (_ROOT / "docs/operations.md").read_text().split("## How calls end\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "|" in line]
    return [
        Ending(
            what,
            status.strip("`"),
            tuple(re.findall(r"`(\w+)`", reasons)),
            error.strip("`"),
            failed == "yes",
            alerts == "yes",
        )
        for what, status, reasons, error, failed, alerts in rows[2:]
    ]


def alerts_on(status: str, reason: str) -> bool:
    """Whether HeadraceFails counts a call or a generation that ended so."""
    groups = yaml.safe_load((_ROOT / "deploy/prometheus/alerts.yml").read_text())["groups"]
    (rule,) = [rule["expr"] for group in groups for rule in group["rules"] if rule["alert"] == "HeadraceFails"]
    (statuses,) = re.findall(r'rpc_response_status_code=~"([^"]*)"', rule)
    (reasons,) = re.findall(r'headrace_finish_reason="([^"]*)"', rule)
    return bool(re.fullmatch(statuses, status) or re.fullmatch(reasons, reason))


def generate(traced: TracedService, **options: Any) -> Any:
    spec = Spec(text="hello", **options.pop("spec", {}))
    options.setdefault("metadata", (*SAMPLED, *bearer(KEY)))
    return traced.stub.Generate(inference_pb2.GenerateRequest(spec=spec), **options)


async def begun(traced: TracedService, **options: Any) -> Any:
    """A call whose first token came, and to which no other comes."""
    traced.engine.running.clear()
    call = generate(traced, **options)
    await call.read()
    traced.engine.step()
    await call.read()
    return call


def request_of(traced: TracedService) -> str:
    (request_id,) = traced.engine.requests
    return str(request_id)


async def whole(traced: TracedService) -> None:
    await events_of(generate(traced))


async def time_limit(traced: TracedService) -> None:
    call = await begun(traced, spec={"time_limit": {"seconds": 100}})
    traced.engine.expire(request_of(traced))
    await events_of(call)


async def call_deadline(traced: TracedService) -> None:
    call = await begun(traced, timeout=100.0)
    traced.engine.expire(request_of(traced))
    await events_of(call)


async def caller_leaves(traced: TracedService) -> None:
    (await begun(traced)).cancel()


async def cancel_rpc(traced: TracedService) -> None:
    call = await begun(traced)
    await traced.stub.Cancel(inference_pb2.CancelRequest(request_id=request_of(traced)), metadata=bearer(KEY))
    await events_of(call)


async def key_withdrawn(traced: TracedService) -> None:
    call = await begun(traced)
    write_keys(traced.running.service.core.config.keys_file)
    await events_of(call)


async def slow_reader(traced: TracedService) -> None:
    await begun(traced)
    for reader in traced.running.service.core.delivering:
        reader.interrupt(errors.exhausted("client too slow"))


async def queue_is_full(traced: TracedService) -> None:
    traced.engine.refusal = queue_full(1)
    await events_of(generate(traced))


async def invalid_field(traced: TracedService) -> None:
    await events_of(generate(traced, spec={"n": 10_000}))


async def no_key(traced: TracedService) -> None:
    await events_of(generate(traced, metadata=(*SAMPLED, *bearer(api_keys.new_key()))))


async def out_of_reach(traced: TracedService) -> None:
    await traced.engine.stop()
    (model,) = traced.running.service.core.models
    await traced.running.until(lambda: not model.engine.is_reachable)
    await events_of(generate(traced))


async def engine_lost(traced: TracedService) -> None:
    await begun(traced)
    await traced.engine.stop()


async def shut_down(traced: TracedService) -> None:
    call = await begun(traced)
    await traced.running.service.stop(0)
    await events_of(call)


async def engine_fails(traced: TracedService) -> None:
    call = await begun(traced)
    traced.engine.end_with_error(request_of(traced), "innards")
    await events_of(call)


async def can_not_be_met(traced: TracedService) -> None:
    call = await begun(traced)
    traced.engine.end_unmet(request_of(traced), "spec.stop.bad_words", "ban all")
    await events_of(call)


async def fits_no_more(traced: TracedService) -> None:
    call = await begun(traced)
    traced.engine.end_with_error(request_of(traced), "spec: needs 9 blocks of 8", code_pb2.RESOURCE_EXHAUSTED)
    await events_of(call)


async def service_fails(traced: TracedService) -> None:
    call = await begun(traced)

    def fail(stream: GenerationStream) -> list[bytes]:
        raise ZeroDivisionError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GenerationStream, "take", fail)
        traced.engine.step()
        await events_of(call)


WAYS: dict[str, Callable[[TracedService], Awaitable[None]]] = {
    "the answer is whole": whole,
    "the request's `time_limit` was over": time_limit,
    "the call's deadline passed": call_deadline,
    "the caller left": caller_leaves,
    "Cancel ended it": cancel_rpc,
    "its key was withdrawn": key_withdrawn,
    "its reader was too slow": slow_reader,
    "the queue was full, or a quota used up": queue_is_full,
    "a field was invalid": invalid_field,
    "there was no valid key": no_key,
    "the engine was out of reach": out_of_reach,
    "the engine was lost": engine_lost,
    "the server shut down": shut_down,
    "it could not be met, as showed while it was generated": can_not_be_met,
    "it fits no more, as the cache or its key's share became smaller": fits_no_more,
    "the engine failed at this request": engine_fails,
    "the service failed": service_fails,
}


@pytest_asyncio.fixture
async def guarded(
    model_path: pathlib.Path, sockets: pathlib.Path, tmp_path: pathlib.Path
) -> AsyncIterator[TracedService]:
    """A service that asks for keys."""
    keys_file = write_keys(tmp_path / "keys.json", entry(KEY, "team"))
    telemetry = FakeTelemetry(sockets / "telemetry.sock")
    await telemetry.start()
    asks = {"keys_file": keys_file, "credentials_reload_s": 0.05}
    async with running_service(model_path, sockets, telemetry_socket=str(telemetry.path), **asks) as running:
        tracer = running.service.core.tracer
        assert tracer is not None
        await running.until(lambda: tracer.connected)
        yield TracedService(running, telemetry)
    await telemetry.stop()


def counted(generations: list[Generation], calls: list[CallEnded], metric: catalogue.Metric, label: str) -> list[str]:
    """The values of a metric's attribute that were counted."""
    metrics = Metrics(TelemetryConfig(telemetry_socket=pathlib.Path("unused")), ExportCounts())
    for generation in generations:
        metrics.sink.generation(reported_facts.SERVICE, generation, None)
    for call in calls:
        metrics.sink.take(reported_facts.SERVICE, call)
    families = [each for scope in metrics.snapshot().resource_metrics[0].scope_metrics for each in scope.metrics]
    points = [point for each in families if each.name == metric.name for point in each.data.data_points]
    return [str((point.attributes or {})[label]) for point in points]


def spans_of(generations: list[Generation], calls: list[CallEnded]) -> tuple[list[trace_pb2.Span], trace_pb2.Span]:
    """The spans of generations, and of the call."""
    listener = Listener().hear([(reported_facts.SERVICE, fact) for fact in (*generations, *calls)])
    listener.sink.finish()
    (server,) = [span for span in listener.spans if span.kind == trace_pb2.Span.SPAN_KIND_SERVER]
    return listener.named("text_completion " + generations[0].model) if generations else [], server


def test_the_guide_names_every_way_that_is_tried() -> None:
    assert [ending.what for ending in guides_endings()] == list(WAYS)


@pytest.mark.parametrize("ending", guides_endings(), ids=lambda ending: ending.what.replace("`", ""))
async def test_an_end_is_the_same_to_callers_metrics_spans_and_the_guide(
    guarded: TracedService, ending: Ending
) -> None:
    try:
        await WAYS[ending.what](guarded)
    except grpc.aio.AioRpcError as refused:
        assert refused.code().name == ending.status
    else:
        assert ending.status in ("OK", "CANCELLED", "RESOURCE_EXHAUSTED", "UNAVAILABLE")
    await guarded.telemetry.until(CallEnded)
    if ending.reasons:
        await guarded.telemetry.until(Generation)
    calls = [call for call in guarded.telemetry.of(CallEnded) if call.method.endswith("/Generate")]
    generations = guarded.telemetry.of(Generation)
    assert counted(generations, calls, catalogue.CALL_DURATION, catalogue.RPC_STATUS) == [ending.status]
    reasons = counted(generations, calls, catalogue.REQUESTS, catalogue.FINISH_REASON)
    assert len(reasons) == bool(ending.reasons) and set(reasons) <= set(ending.reasons)
    inferences, server = spans_of(generations, calls)
    assert attributes(server)["rpc.response.status_code"] == ending.status
    assert attributes(server).get("error.type", "OK") == ending.status
    assert [attributes(span).get("error.type", "") for span in inferences] == [ending.error_type] * len(reasons)
    failed = inferences[0] if inferences else server
    assert (failed.status.code == trace_pb2.Status.STATUS_CODE_ERROR) is ending.failed
    assert alerts_on(ending.status, "".join(reasons)) is ending.alerts
    if reasons and reasons != ["error"]:
        assert attributes(inferences[0])["gen_ai.response.finish_reasons"] == reasons


async def test_generations_of_a_session_that_the_server_ends_have_its_reason(traced: TracedService) -> None:
    traced.engine.running.clear()
    call, collected = traced.stub.Session(metadata=SAMPLED), Collected()
    for stream_id in (1, 2):
        await call.write(submit(stream_id))
    await read_until(call, collected, lambda: len(collected.kinds) == 2)
    for session in traced.running.service.core.delivering:
        session.interrupt(errors.unavailable("the server is shutting down"))
    generations = await traced.telemetry.until(Generation, 2)
    assert [generation.error_type for generation in generations] == ["UNAVAILABLE"] * 2
    assert counted(generations, [], catalogue.REQUESTS, catalogue.FINISH_REASON) == ["error"]
