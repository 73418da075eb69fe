"""Metrics over OTLP: what a collector receives, and what happens without one."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
import structlog
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2
from opentelemetry.proto.metrics.v1 import metrics_pb2
from tests.support import reported_facts as reported
from tests.support.ports import free_port

from headrace_facts.version import server_version
from headrace_telemetry.config import TelemetryConfig
from headrace_telemetry.counts import ExportCounts
from headrace_telemetry.metrics import Metrics
from headrace_telemetry.otlp.otlp_bytes import SCHEMA_URL
from headrace_telemetry.otlp.otlp_channel import OtlpChannel


class _Collector:
    """Keeps what it is sent; may refuse it, or say nothing at all."""

    def __init__(self) -> None:
        self.requests: list[metrics_service_pb2.ExportMetricsServiceRequest] = []
        self.headers: list[dict[str, Any]] = []
        self.status: grpc.StatusCode | None = None
        self.hangs = False
        self.rejected = 0
        # What it answers in place of a message.
        self.nonsense = b""

    async def Export(self, request: Any, context: Any) -> Any:
        self.headers.append(dict(context.invocation_metadata()))
        if self.hangs:
            await asyncio.sleep(60)
        if self.status is not None:
            await context.abort(self.status, "not now")
        self.requests.append(request)
        partial = metrics_service_pb2.ExportMetricsPartialSuccess(rejected_data_points=self.rejected)
        reply = metrics_service_pb2.ExportMetricsServiceResponse(partial_success=partial)
        return self.nonsense or reply.SerializeToString()

    def metric(self, name: str, request: int = -1) -> metrics_pb2.Metric:
        scopes = self.requests[request].resource_metrics[0].scope_metrics
        (found,) = [metric for scope in scopes for metric in scope.metrics if metric.name == name]
        return found


@contextlib.asynccontextmanager
async def _collecting() -> AsyncIterator[tuple[_Collector, int]]:
    collector, server = _Collector(), grpc.aio.server()
    export = grpc.unary_unary_rpc_method_handler(
        collector.Export, metrics_service_pb2.ExportMetricsServiceRequest.FromString
    )
    service = "opentelemetry.proto.collector.metrics.v1.MetricsService"
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Export": export}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield collector, port
    finally:
        await server.stop(None)


@contextlib.asynccontextmanager
async def _pushing(port: int, close_s: float = 0.0, **settings: Any) -> AsyncIterator[tuple[Metrics, ExportCounts]]:
    config = TelemetryConfig(
        telemetry_socket=pathlib.Path("unused"),
        **{"otlp_endpoint": f"http://127.0.0.1:{port}", "export_interval_s": 0.5, "otlp_timeout_s": 1.0, **settings},
    )
    channel, counts = OtlpChannel(config), ExportCounts()
    metrics = Metrics(config, counts, channel)
    assert await metrics.start() is None
    try:
        yield metrics, counts
    finally:
        await metrics.close(close_s)
        await channel.close()


async def _until(condition: Any, timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.02)


async def test_a_collector_receives_figures_bounds_headers_and_exemplars(tmp_path: pathlib.Path) -> None:
    headers = tmp_path / "headers"
    headers.write_text("x-api-key=secret\n")
    settings = {
        "otlp_headers_file": headers,
        "metrics_ttft_buckets": (0.01, 0.1, 1.0),
        "service_namespace": "there",
        "telemetry_attributes": ("deployment.environment.name=test",),
    }
    async with _collecting() as (collector, port), _pushing(port, **settings) as (metrics, counts):
        metrics.sink.generation(reported.SERVICE, reported.generation(7), "head")
        metrics.sink.take(reported.BACKEND, reported.steps(reported.records(1, 10)))
        await _until(lambda: collector.requests)
        first_token = collector.metric("gen_ai.server.time_to_first_token", 0)
        (point,) = first_token.histogram.data_points
        assert (first_token.unit, list(point.explicit_bounds)) == ("s", [0.01, 0.1, 1.0])
        assert (point.count, list(point.bucket_counts)) == (1, [0, 1, 0, 0])
        (exemplar,) = point.exemplars
        assert exemplar.trace_id.hex() == f"{7:032x}" and exemplar.span_id.hex() == f"{7:016x}"
        (steps,) = collector.metric("headrace.step.duration", 0).histogram.data_points
        assert steps.count == 10
        (reported_by,) = collector.requests[0].resource_metrics
        (scope,) = reported_by.scope_metrics
        assert (reported_by.schema_url, scope.schema_url) == (SCHEMA_URL, SCHEMA_URL)
        assert (scope.scope.name, scope.scope.version) == ("headrace", server_version())
        resource = reported_by.resource
        attributes = {pair.key: pair.value.string_value for pair in resource.attributes}
        assert attributes["service.name"] == "headrace"
        assert attributes["service.namespace"] == "there"
        assert attributes["deployment.environment.name"] == "test"
        assert collector.headers[0]["x-api-key"] == "secret"
        await _until(lambda: len(collector.requests) > 1)
        # Reported once; cumulative figures are reported again.
        (again,) = collector.metric("gen_ai.server.time_to_first_token", 1).histogram.data_points
        assert again.count == 1 and not again.exemplars
        await _until(lambda: counts.exported.get("metrics", 0) > 0)
        assert not counts.failures


async def test_what_is_left_is_sent_at_the_end() -> None:
    async with _collecting() as (collector, port):
        async with _pushing(port, close_s=5.0, export_interval_s=3600) as (metrics, _):
            metrics.sink.generation(reported.SERVICE, reported.generation(), None)
        (point,) = collector.metric("gen_ai.server.request.duration").histogram.data_points
        assert point.count == 1


async def test_an_outage_is_counted_every_time_and_logged_once() -> None:
    async with _collecting() as (collector, port), _pushing(port) as (metrics, counts):
        with structlog.testing.capture_logs() as logs:
            collector.status = grpc.StatusCode.UNAVAILABLE
            await _until(lambda: counts.failures.get("metrics", 0) >= 3)
            collector.status = None
            await _until(lambda: collector.requests)
            await _until(lambda: len(logs) >= 2)
        assert [log["event"] for log in logs] == [
            "the collector does not take metrics",
            "the collector takes metrics again",
        ]
        await _until(lambda: len(collector.requests) > 1)
        failures = collector.metric("headrace.telemetry.export_failures").sum.data_points
        assert {pair.attributes[0].value.string_value: pair.as_int for pair in failures} == {"traces": 0, "metrics": 3}


async def test_points_that_the_collector_rejects_are_counted() -> None:
    async with _collecting() as (collector, port), _pushing(port) as (metrics, counts):
        collector.rejected = 2
        await _until(lambda: counts.dropped.get("metrics", 0) >= 2)


@pytest.mark.parametrize("rejected", [-7, 1 << 60])
async def test_no_more_points_are_rejected_than_were_sent(rejected: int) -> None:
    async with _collecting() as (collector, port), _pushing(port) as (metrics, counts):
        collector.rejected = rejected
        await _until(lambda: len(collector.requests) > 1)
        assert counts.exported["metrics"] >= 0 and 0 <= counts.dropped["metrics"] < 10_000


async def test_an_answer_that_is_no_message_ends_nothing() -> None:
    async with _collecting() as (collector, port), _pushing(port, close_s=5.0) as (metrics, counts):
        collector.nonsense = b"\xff\xfe\xff"
        await _until(lambda: len(collector.requests) > 1)
        assert counts.exported["metrics"] > 0


@pytest.mark.parametrize("kind", ["nobody listens", "never answers"])
async def test_an_end_without_a_collector_takes_no_longer_than_it_may(kind: str) -> None:
    async with _collecting() as (collector, port):
        collector.hangs = True
        if kind == "nobody listens":
            port = free_port()
        began = time.monotonic()
        async with _pushing(port, close_s=1.0, otlp_timeout_s=100.0) as (metrics, counts):
            await asyncio.sleep(0.7)
            metrics.render("text/plain")
        assert time.monotonic() - began < 60
