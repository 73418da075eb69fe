"""Spans on their way to collectors that are real gRPC servers.

Good, refusing, hung, gone, and behind TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import pathlib
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import structlog
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from tests.telemetry.collector import Collector, listening
from tests.telemetry.reported import HEAD_ONLY, SCOPE

from headrace_telemetry.config import TelemetryConfig
from headrace_telemetry.counts import ExportCounts
from headrace_telemetry.export.span_exporter import SpanExporter
from headrace_telemetry.otlp import otlp_bytes
from headrace_telemetry.otlp.otlp_bytes import Key, SpanHead
from headrace_telemetry.otlp.otlp_channel import OtlpChannel
from headrace_telemetry.spans.generation_spans import SpanBlock

RESOURCE = otlp_bytes.resource({"service.name": "headrace"})


def block(num_spans: int, text_bytes: int = 0) -> SpanBlock:
    attributes = Key("text").text("x" * text_bytes, 1 << 20)
    span = otlp_bytes.span(SpanHead(b"t" * 16, b"s" * 8, b"", "n", 1, 2), attributes)
    return SpanBlock(span * num_spans, num_spans)


@contextlib.asynccontextmanager
async def exporting(
    port: int, queue_bytes: int = 64 << 20, flush_s: float = 5.0, **settings: Any
) -> AsyncIterator[SpanExporter]:
    """An exporter at work, flushed at the end."""
    scheme = settings.pop("scheme", "http")
    config = TelemetryConfig(**{**HEAD_ONLY, "otlp_endpoint": f"{scheme}://localhost:{port}", **settings})
    channel = OtlpChannel(config)
    exporter = SpanExporter(channel, SCOPE, queue_bytes, 0.05, ExportCounts())
    running = asyncio.create_task(exporter.run())
    try:
        yield exporter
    finally:
        await exporter.flush(running, flush_s)
        await channel.close()


async def until(condition: Any, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "too late"
        await asyncio.sleep(0.01)


async def test_spans_arrive_with_their_resource_scope_and_headers(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "headers"
    file.write_text("# keys\n\nauthorization = Bearer abc\nX-Tenant=7\n")
    collector = Collector()
    async with listening(collector) as port, exporting(port, otlp_headers_file=file) as exporter:
        exporter.put(RESOURCE, block(3))
        exporter.put(otlp_bytes.resource({"service.name": "other"}), block(2))
        exporter.put(RESOURCE, block(4))
        await until(lambda: exporter._counts.exported.get("traces") == 9)
    (request,) = collector.requests
    assert [len(part.scope_spans[0].spans) for part in request.resource_spans] == [7, 2]
    assert request.resource_spans[0].scope_spans[0].scope.name == "headrace"
    assert (collector.headers["authorization"], collector.headers["x-tenant"]) == ("Bearer abc", "7")
    assert exporter._counts.queued_bytes == 0
    assert exporter._counts.dropped == {}


async def test_batches_stay_below_4_mib() -> None:
    collector = Collector()
    async with listening(collector) as port, exporting(port) as exporter:
        for _ in range(30):
            exporter.put(RESOURCE, block(10, text_bytes=40_000))
        await until(lambda: exporter._counts.exported.get("traces") == 300)
    assert len(collector.requests) > 2
    assert max(collector.sizes) < 4 << 20
    assert max(collector.sizes) > 3 << 20


@pytest.mark.parametrize("status", ["UNAVAILABLE", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"])
async def test_what_may_pass_is_tried_again(status: str) -> None:
    collector = Collector()
    collector.answers = [status]
    async with listening(collector) as port, exporting(port) as exporter:
        exporter.put(RESOURCE, block(5))
        await until(lambda: len(collector.spans) == 5)
    assert exporter._counts.failures == {"traces": 1}
    assert exporter._counts.dropped == {}


async def test_a_collector_says_when_it_wants_to_hear_of_it_again() -> None:
    collector = Collector()
    collector.answers, collector.retry_after_s = ["RESOURCE_EXHAUSTED"], 1.5
    async with listening(collector) as port, exporting(port) as exporter:
        began = time.monotonic()
        exporter.put(RESOURCE, block(5))
        await until(lambda: len(collector.spans) == 5)
        assert time.monotonic() - began >= 1.5


async def test_what_will_not_pass_is_dropped_and_counted() -> None:
    collector = Collector()
    collector.answers = ["INVALID_ARGUMENT"]
    async with listening(collector) as port, exporting(port) as exporter:
        exporter.put(RESOURCE, block(5))
        await until(lambda: exporter._counts.dropped.get("traces") == 5)
        exporter.put(RESOURCE, block(2))
        await until(lambda: len(collector.spans) == 2)
    assert collector.calls == 2


async def test_a_partial_success_is_counted() -> None:
    collector = Collector()
    collector.rejected = 2
    async with listening(collector) as port, exporting(port) as exporter:
        exporter.put(RESOURCE, block(5))
        await until(lambda: collector.requests)
    assert exporter._counts.exported == {"traces": 3}
    assert exporter._counts.dropped == {"traces": 2}


@pytest.mark.parametrize("fault", ["refuses", "rejects"])
async def test_what_ails_a_collector_is_logged_once_however_many_batches_it_lasts(fault: str) -> None:
    collector = Collector()
    collector.answers = ["UNIMPLEMENTED"] * 3 if fault == "refuses" else []
    collector.rejected = 1 if fault == "rejects" else 0
    with structlog.testing.capture_logs() as lines:
        async with listening(collector) as port, exporting(port) as exporter:
            for call in range(1, 6):
                collector.rejected = 0 if call > 3 else collector.rejected
                exporter.put(RESOURCE, block(2))
                await until(lambda calls=call: collector.calls == calls and not exporter._counts.queued_bytes)
    said = {"refuses": "the collector does not take spans", "rejects": "the collector rejected spans"}[fault]
    assert [line["event"] for line in lines] == [said, "the collector takes spans again"]


async def test_a_hung_collector_costs_the_queue_and_no_more() -> None:
    collector = Collector()
    collector.answers = ["hang"] * 100
    async with (
        listening(collector) as port,
        exporting(port, queue_bytes=8 << 20, flush_s=0.3, otlp_timeout_s=100.0) as exporter,
    ):
        for _ in range(100):
            exporter.put(RESOURCE, block(10, text_bytes=40_000))
            assert exporter._counts.queued_bytes <= 8 << 20
            await asyncio.sleep(0)
        await until(lambda: collector.calls)
        waiting = exporter._counts.queued_bytes
        assert waiting > 7 << 20
        began = time.monotonic()
    assert time.monotonic() - began < 60
    assert exporter._counts.dropped["traces"] == 1000
    assert exporter._counts.queued_bytes <= waiting


async def test_a_collector_that_comes_back_gets_what_waited() -> None:
    collector = Collector()
    async with listening(Collector()) as port:
        pass
    async with exporting(port) as exporter:
        exporter.put(RESOURCE, block(5))
        await until(lambda: exporter._counts.failures)
        async with listening(collector, port=port):
            await until(lambda: len(collector.spans) == 5, 20)


async def test_tls_with_the_collectors_own_ca(tmp_path: pathlib.Path) -> None:
    key, certificate = _certificate()
    ca = tmp_path / "ca.pem"
    ca.write_bytes(certificate)
    collector = Collector()
    credentials = grpc.ssl_server_credentials([(key, certificate)])
    async with listening(collector, credentials) as port, exporting(port, scheme="https", otlp_tls_ca=ca) as exporter:
        exporter.put(RESOURCE, block(5))
        await until(lambda: len(collector.spans) == 5)


def _certificate() -> tuple[bytes, bytes]:
    """Key and self-signed certificate of localhost, PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private, certificate.public_bytes(serialization.Encoding.PEM)
