"""Load reports as callers get them: in the trailers of calls, and on a stream of their own."""

from __future__ import annotations

import asyncio
import pathlib
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from tests.service.auth.credentials_case import bearer, entry, write_keys
from tests.service.harness import Running, running_service
from tests.support.http2 import ALLOW_BINARY, Answer, RawCall, message

from headrace.v1 import generation_pb2, inference_pb2
from headrace_protos.engine.v1 import engine_pb2
from headrace_protos.orca.orca_load_report_pb2 import OrcaLoadReport
from headrace_protos.orca.orca_pb2 import OrcaLoadReportRequest
from headrace_service.auth import api_keys
from headrace_service.load_reports import load_watch

TRAILER = "endpoint-load-metrics-bin"
ASKS = (("endpoint-load-metrics-format", "BIN"),)
Metadata = tuple[tuple[str, str], ...]
KEY, READER = (api_keys.new_key() for _ in range(2))


def stream(running: Running, request: bytes = b"", metadata: Any = None) -> Any:
    method = running.channel.unary_stream("/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics")
    return method(request, metadata=metadata)


def spec(max_tokens: int) -> inference_pb2.GenerateRequest:
    stop = generation_pb2.StopConditions(max_tokens=max_tokens)
    return inference_pb2.GenerateRequest(spec=generation_pb2.GenerationSpec(text="x", stop=stop))


async def raw(running: Running, method: str, request: Message, metadata: Metadata = ()) -> Answer:
    """What a call gets, trailers and all: gRPC keeps load reports from its own applications."""
    return await asyncio.to_thread(_raw, running.address, method, request.SerializeToString(), metadata)


def _raw(address: str, method: str, request: bytes, metadata: Metadata) -> Answer:
    with RawCall(address, f"/headrace.v1.InferenceService/{method}", metadata) as call:
        call.send(ALLOW_BINARY)
        call.send_data(message(request), ends=True)
        return call.answer()


def report_of(answer: Answer) -> OrcaLoadReport | None:
    """The report in a call's trailers, however it ended."""
    data = answer.binary_trailer(TRAILER)
    return None if data is None else OrcaLoadReport.FromString(data)


async def until_known(running: Running) -> OrcaLoadReport:
    """The service's first report, after which calls carry one."""
    call = stream(running)
    report = OrcaLoadReport.FromString(await call.read())
    call.cancel()
    return report


async def test_reports_come_at_the_end_of_calls_that_ask(running: Running) -> None:
    assert (await until_known(running)).named_metrics["num_requests_running"] == 0
    for metadata in ((), ASKS):
        streamed, refused = [await raw(running, "Generate", spec(tokens), metadata) for tokens in (4, 0)]
        answered = await raw(running, "GetLoad", inference_pb2.GetLoadRequest(), metadata)
        assert [answer.status for answer in (streamed, refused, answered)] == [0, 3, 0]
        assert streamed.messages and answered.messages
        for answer in (streamed, refused, answered):
            assert (report_of(answer) is not None) is bool(metadata)
        # What refuses a call stands beside the report.
        assert refused.binary_trailer("grpc-status-details-bin")


async def test_a_report_is_of_the_calls_end(running: Running) -> None:
    await until_known(running)
    running.engine.running.clear()
    call = asyncio.create_task(raw(running, "Generate", spec(4), ASKS))
    async with asyncio.timeout(60):
        while (await until_known(running)).named_metrics["num_requests_running"] != 1:
            await asyncio.sleep(0.1)
    running.engine.running.set()
    report = report_of(await call)
    assert report is not None and report.named_metrics["num_requests_running"] == 1
    assert report.application_utilization > 0 and report.rps_fractional > 0


async def test_all_calls_report_where_the_setting_says_always(model_path: pathlib.Path, sockets: pathlib.Path) -> None:
    async with running_service(model_path, sockets, load_reports="always") as running:
        await until_known(running)
        assert report_of(await raw(running, "Generate", spec(4))) is not None


async def test_nothing_is_reported_where_it_is_off(model_path: pathlib.Path, sockets: pathlib.Path) -> None:
    async with running_service(model_path, sockets, load_reports="off") as running:
        assert report_of(await raw(running, "Generate", spec(4), ASKS)) is None
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stream(running).read()
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_stream_reports_again_and_again_and_falls_silent_without_engine(running: Running) -> None:
    call = stream(running, OrcaLoadReportRequest(report_interval={"seconds": 1}).SerializeToString())
    first, second = [OrcaLoadReport.FromString(await call.read()) for _ in range(2)]
    assert set(first.named_metrics) == set(second.named_metrics)
    await running.engine.stop()
    await running.until(lambda: not running.service.core.serving)
    # What was on its way when the engine was lost may still come, and then nothing does.
    for _ in range(2):
        done, _ = await asyncio.wait([asyncio.ensure_future(call.read())], timeout=2.5)
    assert not done
    call.cancel()


async def test_engines_are_asked_only_while_somebody_reads(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_watch, "EVERY_S", 0.01)
    monkeypatch.setattr(load_watch, "_UNWANTED_NS", 0)
    asked = 0

    def other_load() -> engine_pb2.Load:
        nonlocal asked
        asked += 1
        return engine_pb2.Load()

    running.engine.other_load = other_load
    await asyncio.sleep(0.1)
    assert asked == 0
    # However seldom a stream reports, what it reports is of all the time between.
    call = stream(running, OrcaLoadReportRequest(report_interval={"seconds": 3600}).SerializeToString())
    await call.read()
    await running.until(lambda: asked > 20)
    call.cancel()
    await running.until(lambda: not running.service._load_watch._num_streams)
    await asyncio.sleep(0.1)
    before = asked
    await asyncio.sleep(0.1)
    assert asked == before


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (b"\xff", "request"),
        (b"\x98\x06\x01", "99"),
        (OrcaLoadReportRequest(request_cost_names=["x"]).SerializeToString(), "request_cost_names"),
        (OrcaLoadReportRequest(report_interval={"seconds": -1}).SerializeToString(), "report_interval"),  # type: ignore[arg-type]
        (OrcaLoadReportRequest(report_interval={"seconds": 1 << 60}).SerializeToString(), "report_interval"),  # type: ignore[arg-type]
    ],
)
async def test_requests_for_reports_are_checked(running: Running, request_: bytes, field: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stream(running, request_).read()
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (refused.value.details() or "").startswith(field)


@pytest.mark.parametrize("form", ["JSON", "text" * 20, ""])
async def test_other_formats_of_reports_are_refused(running: Running, form: str) -> None:
    for method, request in (("Generate", spec(4)), ("GetLoad", inference_pb2.GetLoadRequest())):
        answer = await raw(running, method, request, (("endpoint-load-metrics-format", form),))
        assert answer.status == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert "endpoint-load-metrics-format: must be bin" in answer.text
    assert not running.engine.requests


async def test_reports_are_for_keys_that_may_read(
    model_path: pathlib.Path, sockets: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    keys = write_keys(tmp_path / "keys.json", entry(KEY, "writer", ("generate",)), entry(READER, "reader"))
    async with running_service(model_path, sockets, keys_file=keys) as running:
        call = stream(running, metadata=bearer(READER))
        await call.read()
        call.cancel()
        assert report_of(await raw(running, "Generate", spec(4), (*bearer(READER), *ASKS))) is not None
        denied = await raw(running, "Generate", spec(4), (*bearer(KEY), *ASKS))
        assert (denied.status, report_of(denied)) == (grpc.StatusCode.PERMISSION_DENIED.value[0], None)
        for refused, code in (
            (stream(running), grpc.StatusCode.UNAUTHENTICATED),
            (stream(running, metadata=bearer(KEY)), grpc.StatusCode.PERMISSION_DENIED),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await refused.read()
            assert error.value.code() is code
