"""What operators set and find: the detail, for all processes, and recent traces."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from tests.kserve.wire import Wire
from tests.service.harness import events_of
from tests.service.tracing.conftest import SAMPLED, TracedService

from headrace.v1 import admin_pb2, admin_pb2_grpc, generation_pb2, inference_pb2
from headrace_facts.facts import Detail, Generation, TraceQuery
from headrace_protos.inference import grpc_service_pb2 as pb

SPAN = generation_pb2.TRACE_DETAIL_SPAN


def admin(traced: TracedService) -> Any:
    return admin_pb2_grpc.AdminServiceStub(traced.running.channel)


async def code_of(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await (call.read() if hasattr(call, "read") else call)
    return error.value.code(), error.value.details() or ""


async def trace_of(call: Any) -> bytes:
    return b"".join([response.traces_data async for response in call])


async def test_a_detail_that_is_set_holds_for_the_next_generation(traced: TracedService) -> None:
    await admin(traced).SetTraceDetail(admin_pb2.SetTraceDetailRequest(detail=SPAN))
    request = inference_pb2.GenerateRequest(spec=generation_pb2.GenerationSpec(text="hello"))
    await events_of(traced.stub.Generate(request, metadata=SAMPLED))
    (generation,) = await traced.telemetry.until(Generation)
    assert generation.detail is Detail.SPAN
    (known,) = traced.engine.requests.values()
    assert known.add.recording.detail == SPAN


@pytest.mark.parametrize("detail", [0, 99])
async def test_a_detail_that_there_is_not_is_refused(traced: TracedService, detail: int) -> None:
    code, text = await code_of(admin(traced).SetTraceDetail(admin_pb2.SetTraceDetailRequest(detail=detail)))  # type: ignore[arg-type]
    assert code is grpc.StatusCode.INVALID_ARGUMENT and text.startswith("detail: ")


async def test_without_its_telemetry_process_nothing_is_set_or_found(traced: TracedService) -> None:
    await traced.telemetry.stop()
    tracer = traced.running.service.core.tracer
    await traced.running.until(lambda: not tracer.connected)  # type: ignore[union-attr]
    for call in (
        admin(traced).SetTraceDetail(admin_pb2.SetTraceDetailRequest(detail=SPAN)),
        admin(traced).GetTrace(admin_pb2.GetTraceRequest(request_id="x")),
    ):
        code, text = await code_of(call)
        assert code is grpc.StatusCode.UNAVAILABLE and "telemetry process" in text
    traced.telemetry = type(traced.telemetry)(traced.telemetry.path)
    await traced.telemetry.start()


async def test_a_trace_comes_in_parts_that_fit_any_client(traced: TracedService) -> None:
    parts = [bytes([number]) * size for number, size in enumerate((5 << 20, 10, 1 << 20))]
    traced.telemetry.parts = parts
    assert await trace_of(admin(traced).GetTrace(admin_pb2.GetTraceRequest(trace_id="a" * 32))) == b"".join(parts)
    assert await trace_of(admin(traced).GetTrace(admin_pb2.GetTraceRequest(request_id="one"))) == b"".join(parts)
    assert [query.key for query in traced.telemetry.of(TraceQuery)] == ["a" * 32, "one"]


async def test_a_trace_that_nobody_knows_is_not_found(traced: TracedService) -> None:
    code, text = await code_of(admin(traced).GetTrace(admin_pb2.GetTraceRequest(request_id="one")))
    assert code is grpc.StatusCode.NOT_FOUND and "not known" in text


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (admin_pb2.GetTraceRequest(), "key"),
        (admin_pb2.GetTraceRequest(trace_id="A" * 32), "trace_id"),
        (admin_pb2.GetTraceRequest(request_id=""), "request_id"),
    ],
)
async def test_what_cannot_name_a_trace_is_refused(traced: TracedService, request_: Any, field: str) -> None:
    code, text = await code_of(admin(traced).GetTrace(request_))
    assert code is grpc.StatusCode.INVALID_ARGUMENT and text.startswith(field)


async def test_an_answer_that_does_not_come_or_never_ends_is_bounded(
    traced: TracedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace_service.tracing.trace_queries._ANSWER_TIMEOUT_S", 0.3)
    monkeypatch.setattr("headrace_service.tracing.trace_queries._MAX_WAITING_BYTES", 1000)
    traced.telemetry.parts = None
    request = admin_pb2.GetTraceRequest(request_id="one")
    assert (await code_of(admin(traced).GetTrace(request)))[0] is grpc.StatusCode.UNAVAILABLE
    traced.telemetry.parts = [b"x" * 2000]
    assert (await code_of(admin(traced).GetTrace(request)))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    traced.telemetry.parts = None
    monkeypatch.setattr("headrace_service.tracing.trace_queries._MAX_OPEN", 2)
    codes = await asyncio.gather(*(code_of(admin(traced).GetTrace(request)) for _ in range(3)))
    assert sorted(code.name for code, _ in codes) == ["RESOURCE_EXHAUSTED", "UNAVAILABLE", "UNAVAILABLE"]
    queries = traced.running.service.core.tracer.queries  # type: ignore[union-attr]
    assert not queries._open


async def test_kserve_says_what_is_traced_and_sets_the_level(traced: TracedService) -> None:
    wire = Wire(traced.running.channel)
    traced.telemetry.set(sample_ratio=0.01)
    await traced.running.until(lambda: traced.running.service.core.tracer.policy.sample_ratio)  # type: ignore[union-attr]
    settings = (await wire.TraceSetting(pb.TraceSettingRequest())).settings
    assert {name: list(setting.value) for name, setting in settings.items()} == {
        "trace_level": ["TIMESTAMPS"],
        "trace_rate": ["100"],
        "trace_count": ["-1"],
        "log_frequency": ["0"],
        "trace_file": [""],
        "trace_mode": ["opentelemetry"],
    }
    for level, detail in (("OFF", Detail.OFF), ("TIMESTAMPS", Detail.ARRAY)):
        request = pb.TraceSettingRequest()
        request.settings["trace_level"].value.append(level)
        assert list((await wire.TraceSetting(request)).settings["trace_level"].value) == [level]
        assert traced.telemetry.settings.detail is detail


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("trace_level", ["TENSORS"]),
        ("trace_level", ["TIMESTAMPS", "TENSORS"]),
        ("trace_rate", ["1"]),
        ("trace_file", ["/tmp/x"]),
        ("trace_mode", ["triton"]),
    ],
)
async def test_kserve_settings_that_mean_nothing_here_are_refused(
    traced: TracedService, name: str, values: list[str]
) -> None:
    request = pb.TraceSettingRequest()
    request.settings[name].value.extend(values)
    code, text = await code_of(Wire(traced.running.channel).TraceSetting(request))
    assert code is grpc.StatusCode.UNIMPLEMENTED and name in text
