"""The telemetry process as it is served: facts in over its socket; file, ring and collector out.

An end within a bound.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.proto.trace.v1 import trace_pb2
from tests.support.warm_python import WarmPython
from tests.telemetry.collector import Collector, listening
from tests.telemetry.story import SERVICE, Story, tell

from headrace_facts import facts
from headrace_telemetry import process
from headrace_telemetry.config import TelemetryConfig
from headrace_telemetry.counts import ExportCounts
from headrace_telemetry.export.trace_file import TraceFile
from headrace_telemetry.hub import Hub
from headrace_telemetry.otlp import otlp_json
from headrace_telemetry.spans.generation_spans import SpanBlock


def written_config(folder: pathlib.Path, settings: dict[str, Any]) -> pathlib.Path:
    """The file of a configuration whose socket is in the folder, and which waits with spans."""
    config = folder / "config.json"
    values = {"telemetry_socket": str(folder / "t.sock"), "trace_export_delay_s": 60, **settings}
    config.write_text(json.dumps(values, default=str))
    return config


@functools.cache
def _warm_telemetry() -> WarmPython:
    """A Python that has imported telemetry, and forks for each that is refused."""
    return WarmPython(["headrace_telemetry.main"], os.environ)


def start(folder: pathlib.Path, **settings: Any) -> subprocess.Popen[bytes]:
    """Starts the process; returns when its socket is there."""
    config = written_config(folder, settings)
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace_telemetry", "--config-json", str(config)], stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 240
    while not (folder / "t.sock").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return process


@contextlib.asynccontextmanager
async def running(folder: pathlib.Path, **settings: Any) -> AsyncIterator[subprocess.Popen[bytes]]:
    process = start(folder, **settings)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


async def connected(folder: pathlib.Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to the process, whose socket is there a moment before it listens."""
    async with asyncio.timeout(120):
        while True:
            try:
                return await asyncio.open_unix_connection(folder / "t.sock")
            except ConnectionRefusedError:
                await asyncio.sleep(0.01)


async def hear(folder: pathlib.Path, story: Story) -> None:
    """Tells a story over two connections, as a backend and a service; the backend first."""
    for kind in ("backend", "service"):
        reader, writer = await connected(folder)
        sources = [source for source, _ in story.reported if source.kind == kind]
        for message in [sources[0], *(fact for source, fact in story.reported if source.kind == kind)]:
            writer.write(framed(message))
        await writer.drain()
        await reader.readexactly(4)
        writer.close()


def framed(message: facts.Fact) -> bytes:
    data = facts.encode(message)
    return len(data).to_bytes(4, "little") + data


def lines_of(path: pathlib.Path) -> list[trace_service_pb2.ExportTraceServiceRequest]:
    """Returns lines of a trace file, read by protobuf's own reader of JSON.

    Its ids are made base64 first, which that reader wants.
    """
    return [read_line(line) for line in path.read_bytes().splitlines()]


def read_line(line: bytes) -> trace_service_pb2.ExportTraceServiceRequest:
    value = json.loads(line)
    for part in value["resourceSpans"]:
        for scope in part["scopeSpans"]:
            for span in scope["spans"]:
                for holder in (span, *span.get("links", [])):
                    for name in ("traceId", "spanId", "parentSpanId"):
                        if holder.get(name):
                            assert holder[name] == holder[name].lower()
                            holder[name] = base64.b64encode(bytes.fromhex(holder[name])).decode()
                assert isinstance(span["startTimeUnixNano"], str) and isinstance(span["kind"], int)
    return json_format.ParseDict(value, trace_service_pb2.ExportTraceServiceRequest())


def all_spans(requests: Iterable[Any]) -> list[trace_pb2.Span]:
    return [
        span
        for request in requests
        for part in request.resource_spans
        for scope in part.scope_spans
        for span in scope.spans
    ]


def ordered(spans: Iterable[trace_pb2.Span]) -> list[bytes]:
    return sorted(span.SerializeToString(deterministic=True) for span in spans)


async def test_what_is_left_goes_out_on_sigterm_and_file_equals_collector(tmp_path: pathlib.Path) -> None:
    collector, story, file = Collector(), tell(11, 4), tmp_path / "traces.jsonl"
    async with listening(collector) as port:
        async with running(tmp_path, otlp_endpoint=f"http://127.0.0.1:{port}", trace_file=file) as process:
            await hear(tmp_path, story)
            # Spans wait a minute for others, so that only the end sends them.
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, 240) == 0
    tokens = [span for span in collector.spans if span.name == "token"]
    assert len(tokens) == sum(generation.output_tokens for generation in story.generations.values())
    assert ordered(all_spans(lines_of(file))) == ordered(collector.spans)
    assert os.stat(file).st_mode & 0o777 == 0o600
    kinds = set()
    for request in collector.requests:
        for part in request.resource_spans:
            names = {attribute.key: attribute.value for attribute in part.resource.attributes}
            kinds.add(names["headrace.process.kind"].string_value)
            assert names["service.name"].string_value == "headrace"
            assert names["process.pid"].int_value in (11, 12)
    assert kinds == {"service", "backend"}


@pytest.mark.parametrize("collector_is", ["hung", "down"])
async def test_a_bad_collector_does_not_hold_up_the_end(tmp_path: pathlib.Path, collector_is: str) -> None:
    collector = Collector()
    collector.answers = ["hang"] * 9
    async with listening(collector) as port:
        target = port if collector_is == "hung" else 1
        patient = {"otlp_endpoint": f"http://127.0.0.1:{target}", "otlp_timeout_s": 100.0, "telemetry_flush_s": 1}
        async with running(tmp_path, **patient) as process:
            await hear(tmp_path, tell(12, 2))
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, 60) == 0
            # Spans and metrics have a second, and connections half a one; what they ask the
            # collector for may take 100.
            assert time.monotonic() - began < 60


async def test_why_a_collector_cannot_be_reached_is_logged_once_in_lines_of_ours(tmp_path: pathlib.Path) -> None:
    collector = Collector()
    # It speaks no TLS.
    async with listening(collector) as port:
        settings = {"otlp_endpoint": f"https://127.0.0.1:{port}", "telemetry_flush_s": 5}
        async with running(tmp_path, **settings) as process:
            await hear(tmp_path, tell(12, 2))
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, 240) == 0
            assert process.stderr is not None
            log = process.stderr.read().decode()
    assert log.count("WRONG_VERSION_NUMBER") == log.count("the collector does not take") == 2
    assert "ssl_transport_security" not in log


async def test_spans_and_metrics_leave_side_by_side_in_the_end(tmp_path: pathlib.Path) -> None:
    asked = {"trace": asyncio.Event(), "metrics": asyncio.Event()}

    def handler(signal_name: str, other: str) -> grpc.RpcMethodHandler:
        async def export(request: bytes, context: object) -> bytes:
            asked[signal_name].set()
            await asked[other].wait()
            answered.add(signal_name)
            return b""

        return grpc.unary_unary_rpc_method_handler(export)

    answered: set[str] = set()
    server = grpc.aio.server()
    for name, other in (("trace", "metrics"), ("metrics", "trace")):
        service = f"opentelemetry.proto.collector.{name}.v1.{name.capitalize()}Service"
        methods = {"Export": handler(name, other)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    settings = {"otlp_endpoint": f"http://127.0.0.1:{port}", "telemetry_flush_s": 10, "export_interval_s": 3600}
    async with running(tmp_path, **settings) as process:
        await hear(tmp_path, tell(12, 2))
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 240) == 0
    await server.stop(None)
    assert answered == {"trace", "metrics"}


async def test_a_recent_trace_is_asked_for_over_the_socket(tmp_path: pathlib.Path) -> None:
    story = tell(13, 3)
    async with running(tmp_path):
        await hear(tmp_path, story)
        reader, writer = await connected(tmp_path)
        writer.write(framed(SERVICE))
        for query, key in enumerate(("req_0001", story.requests[1].span.trace_id, "unknown")):  # type: ignore[union-attr]
            writer.write(framed(facts.TraceQuery(query, key)))
        answers = []
        while len(answers) < 4:
            size = int.from_bytes(await asyncio.wait_for(reader.readexactly(4), 120), "little")
            answers.append(facts.decode_answer(await reader.readexactly(size)))
        by_request, by_trace, unknown = answers[1:]
        assert isinstance(by_request, facts.TraceFound) and isinstance(by_trace, facts.TraceFound)
        assert by_request.part == by_trace.part
        names = [span.name for span in all_spans([trace_pb2.TracesData.FromString(by_request.part)])]
        assert names.count("token") == story.generations[1].output_tokens
        assert "engine.step" in names
        assert unknown == facts.TraceFound(2, b"", last=True)
        writer.close()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"trace_file": "/nowhere/at/all.jsonl"}, "there is no folder /nowhere/at"),
        ({"otlp_endpoint": "http://127.0.0.1:1", "otlp_headers_file": "/nowhere/headers"}, "No such file"),
        ({"telemetry_socket": "/nowhere/t.sock"}, "/nowhere/t.sock"),
        ({"trace_sample_ratio": 1.5}, "trace_sample_ratio"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_what_can_never_run_ends_with_2_and_one_line(
    tmp_path: pathlib.Path, settings: dict[str, Any], reason: str
) -> None:
    config = written_config(tmp_path, settings)
    (ended,) = _warm_telemetry().run([("headrace_telemetry", ["--config-json", str(config)])], 240.0)
    assert ended.returncode == 2
    assert reason in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1


async def test_a_part_that_fails_ends_the_process(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(_: Hub) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(Hub, "keep_time", fail)
    with pytest.raises(RuntimeError, match="planted"):
        await asyncio.wait_for(process.run(TelemetryConfig(telemetry_socket=tmp_path / "t.sock")), 120)


def test_a_trace_file_of_full_size_gives_way_once(tmp_path: pathlib.Path) -> None:
    path, counts = tmp_path / "traces.jsonl", ExportCounts()
    file = TraceFile(path, 20_000, b"", counts)
    span = trace_pb2.ScopeSpans(spans=[trace_pb2.Span(name="x" * 3000)]).SerializeToString()
    for _ in range(30):
        file.put(b"", SpanBlock(span, 1))
    file.close()
    for each in (path, tmp_path / "traces.jsonl.1"):
        assert 0 < each.stat().st_size <= 20_000
        assert all(len(request.resource_spans[0].scope_spans[0].spans) == 1 for request in lines_of(each))
    assert len(list(tmp_path.iterdir())) == 2
    assert counts.file_dropped == 0
    again = TraceFile(path, 20_000, b"", counts)
    before = path.stat().st_size
    again.close()
    assert path.stat().st_size == before


@pytest.mark.slow  # Collectors that are too slow are dropped alike, beside this.
async def test_a_trace_file_that_is_too_slow_drops_and_counts(tmp_path: pathlib.Path) -> None:
    counts = ExportCounts()
    file = TraceFile(tmp_path / "traces.jsonl", 1 << 30, b"", counts)
    span = trace_pb2.ScopeSpans(spans=[trace_pb2.Span(name="x" * (1 << 20))]).SerializeToString()
    for _ in range(100):
        file.put(b"", SpanBlock(span, 1))
    assert counts.file_dropped == 100 - 63
    file.close()
    assert len(lines_of(tmp_path / "traces.jsonl")) == 63


def test_a_full_disk_leaves_no_half_line(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, path = ExportCounts(), tmp_path / "traces.jsonl"
    file = TraceFile(path, 1 << 30, b"", counts)
    span = trace_pb2.ScopeSpans(spans=[trace_pb2.Span(name="n")]).SerializeToString()
    real, failing = os.write, [False]

    def write(descriptor: int, data: Any) -> int:
        if failing[0] and len(data) < 100:
            raise OSError(28, "No space left on device")
        return real(descriptor, data[:100] if failing[0] else data)

    for failing[0] in (False, True, False):
        file.put(b"", SpanBlock(span, 1))
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", write)
            file._write_next()
    file.close()
    assert len(lines_of(path)) == 2
    assert counts.file_dropped == 1


def test_every_kind_of_value_is_read_back() -> None:
    span = trace_pb2.Span(trace_id=b"\xab" * 16, span_id=b"\xcd" * 8, name="n", kind=2, flags=0x301, trace_state="a=b")
    span.status.code = trace_pb2.Status.STATUS_CODE_ERROR
    for index, (kind, value) in enumerate(
        {"int_value": -(2**62), "string_value": "ü\n", "double_value": 1e-300, "bool_value": False}.items()
    ):
        attribute = span.attributes.add(key=f"k{index}")
        setattr(attribute.value, kind, value)
    span.attributes.add(key="array").value.array_value.values.add().int_value = 2**53 + 1
    span.links.add(trace_id=b"\1" * 16, span_id=b"\2" * 8, trace_state="c=d")
    line = otlp_json.line(b"", b"", trace_pb2.ScopeSpans(spans=[span]).SerializeToString())
    assert all_spans([read_line(line)]) == [span]
