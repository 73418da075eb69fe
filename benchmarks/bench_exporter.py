"""How many token spans a second one core of telemetry makes, and what a bad collector costs.

It counts from facts on its socket to bytes at a collector.

Usage: python -m benchmarks.bench_exporter [--spans 1000000] [--json FILE]

Three processes: this one, which tells facts that were encoded before the clock starts; the
telemetry process as it is served; and a collector that counts spans. Rates are per second of CPU
time of the telemetry process, so that a busy machine does not change them much. A bad collector is
down, hangs, or answers errors; then what counts is its memory, and that no span is lost uncounted.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import multiprocessing
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from multiprocessing.sharedctypes import Synchronized
from typing import Any

import grpc
import numpy as np
import psutil
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from headrace_facts import facts, step_records, token_steps

ENGINE = "0123456789abcdef"
OFFSET_NS = 1_700_000_000 * 10**9
STEP_NS = 10_000_000
STREAMS = 64
# Per generation. What is made once for each of them weighs on short ones.
LENGTHS = (64, 256, 1024)
QUEUE_BYTES = 64 << 20
# A forked process could not use gRPC.
_SPAWN = multiprocessing.get_context("spawn")


def frame(fact: facts.Fact) -> bytes:
    """A fact as it stands on the socket."""
    data = facts.encode(fact)
    return len(data).to_bytes(4, "little") + data


def greeting(kind: str, instance: str) -> bytes:
    """The first fact of a connection."""
    return frame(facts.Hello(kind, f"{kind}-0", instance, "0", 1, OFFSET_NS))


def rounds(num_spans: int, length: int, detail: facts.Detail) -> Iterator[list[bytes]]:
    """Facts of `STREAMS` generations of `length` tokens that run together.

    They come again and again, until they have `num_spans` tokens.
    """
    yield [frame(facts.EngineFacts(ENGINE, "m", "cpu", 10**9, 2e9, 1e5, 1e6, 10**5, 1e10, 1e11))]
    for index in range(max(1, num_spans // (STREAMS * length))):
        yield _round(index, length, detail)


def _round(index: int, length: int, detail: facts.Detail) -> list[bytes]:
    first = index * length + 1
    ids = np.arange(first, first + length, dtype=np.uint64)
    began_ns = 10**12 + ids * np.uint64(STEP_NS)
    records = np.zeros(length, step_records.RECORD)
    records["step_id"], records["num_sequences"], records["num_decodes"], records["num_samples"] = (
        ids,
        STREAMS,
        STREAMS,
        STREAMS,
    )
    for field, after_ns in (
        ("planned_at_ns", 0),
        ("started_at_ns", 10**6),
        ("finished_at_ns", 9 * 10**6),
        ("settled_at_ns", 9_500_000),
    ):
        records[field] = began_ns + np.uint64(after_ns)
    numbers = np.arange(index * STREAMS, (index + 1) * STREAMS, dtype="<u4")
    counts = np.full(length, STREAMS, "<u4")
    steps = facts.Steps(ENGINE, OFFSET_NS, records.tobytes(), counts.tobytes(), np.tile(numbers, length).tobytes())
    frames = [frame(facts.RequestBegan(ENGINE, number, f"req-{number}", _span(number))) for number in numbers.tolist()]
    frames.append(frame(steps))
    made, written = began_ns + np.uint64(9_600_000), began_ns + np.uint64(9_700_000)
    emission = facts.Emission(np.ones(length, "<u4").tobytes(), made.tobytes(), written.tobytes())
    for number in numbers.tolist():
        frames.append(frame(_generation(number, ids, emission, int(began_ns[0]), int(written[-1]), detail)))
    return frames


def _span(number: int) -> facts.SpanContext:
    return facts.SpanContext(f"{number + 1:032x}", f"{number + 1:016x}", "", "", True)


def _generation(
    number: int, ids: np.ndarray[Any, Any], emission: facts.Emission, begin_ns: int, end_ns: int, detail: facts.Detail
) -> facts.Generation:
    phases = [
        facts.PhaseSpan("prefill", begin_ns, begin_ns + STEP_NS),
        facts.PhaseSpan("decode", begin_ns + STEP_NS, end_ns),
    ]
    trace = facts.EngineTrace(
        ENGINE,
        number,
        OFFSET_NS,
        phases,
        np.array([(ids[0], 0, 64)], "<u8").tobytes(),
        [token_steps.of_runs([(0, int(ids[0]))], len(ids))],
    )
    return facts.Generation(
        request_id=f"req-{number}",
        model="m",
        model_revision="r",
        operation="chat",
        wire="chat",
        unix_offset_ns=OFFSET_NS,
        arrival_ns=begin_ns,
        end_ns=end_ns,
        ttft_ns=10**7,
        prompt_tokens=64,
        output_tokens=len(ids),
        cached_tokens=0,
        finish_reasons=["length"],
        span=_span(number),
        detail=detail,
        trace=trace,
        emissions=[emission],
    )


def collect(answer: str, port: Synchronized[int], spans: Synchronized[int]) -> None:
    """A collector: "ok" counts spans, "hung" never answers.

    Anything else is the status that it answers with.
    """

    def export(request: bytes, context: grpc.ServicerContext) -> bytes:
        if answer == "hung":
            time.sleep(3600)
        if answer != "ok":
            context.set_trailing_metadata((("grpc-status-details-bin", _retry_info()),))
            context.abort(grpc.StatusCode[answer], "no")
        parsed = trace_service_pb2.ExportTraceServiceRequest.FromString(request)
        with spans.get_lock():
            spans.value += sum(len(part.spans) for each in parsed.resource_spans for part in each.scope_spans)
        return b""

    server = grpc.server(
        concurrent.futures.ThreadPoolExecutor(8), options=[("grpc.max_receive_message_length", 4 << 20)]
    )
    handlers = {"Export": grpc.unary_unary_rpc_method_handler(export)}
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("opentelemetry.proto.collector.trace.v1.TraceService", handlers),)
    )
    port.value = server.add_insecure_port("127.0.0.1:0")
    server.start()
    signal.pause()


def _retry_info() -> bytes:
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=1)))
    return bytes(status_pb2.Status(code=8, message="no", details=[detail]).SerializeToString())


@contextlib.contextmanager
def collector(answer: str) -> Iterator[tuple[int, Synchronized[int]]]:
    """A running collector's port, and the spans that it has counted.

    "down": a port that nobody listens on.
    """
    spans: Synchronized[int] = _SPAWN.Value("q", 0)
    if answer == "down":
        yield _free_port(), spans
        return
    port: Synchronized[int] = _SPAWN.Value("i", 0)
    process = _SPAWN.Process(target=collect, args=(answer, port, spans), daemon=True)
    process.start()
    while not port.value:
        time.sleep(0.01)
    try:
        yield port.value, spans
    finally:
        process.kill()
        process.join()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def telemetry(port: int, queue_bytes: int) -> Iterator[tuple[psutil.Process, pathlib.Path, int]]:
    """A telemetry process, its socket, and the port of its metrics."""
    with tempfile.TemporaryDirectory() as folder:
        path, metrics = pathlib.Path(folder, "telemetry.sock"), _free_port()
        settings = {
            "telemetry_socket": str(path),
            "otlp_endpoint": f"http://127.0.0.1:{port}",
            "otlp_queue": queue_bytes,
            "metrics_listen": f"127.0.0.1:{metrics}",
            "export_interval_s": 3600,
            "telemetry_flush_s": 0,
            "log_level": "error",
        }
        config = pathlib.Path(folder, "config.json")
        config.write_text(json.dumps(settings))
        command = [sys.executable, "-m", "headrace_telemetry", "--config-json", str(config)]
        process = subprocess.Popen(command)
        while not path.exists():
            time.sleep(0.02)
        try:
            yield psutil.Process(process.pid), path, metrics
        finally:
            process.terminate()
            process.wait()


def cpu_s(process: psutil.Process) -> float:
    """CPU time that a process has used."""
    times = process.cpu_times()
    return float(times.user + times.system)


def tell(path: pathlib.Path, frames: list[list[bytes]], pace_s: float) -> int:
    """Tells facts as a backend and a service, a round every `pace_s` seconds. Returns the bytes."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.sendall(greeting("backend", ENGINE))
        due, num_bytes = time.monotonic(), 0
        for part in frames:
            due += pace_s
            data = b"".join(part)
            connection.sendall(data)
            num_bytes += len(data)
            time.sleep(max(0.0, due - time.monotonic()))
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1 << 20)
    return num_bytes


def measure_rate(num_spans: int, length: int, detail: facts.Detail) -> dict[str, float]:
    """Spans, or tokens in arrays, per second of CPU time."""
    frames = list(rounds(num_spans, length, detail))
    tokens = (len(frames) - 1) * STREAMS * length
    num_expected = (tokens if detail is facts.Detail.SPAN else 0) + (len(frames) - 1) * (STREAMS * 4 + length)
    with collector("ok") as (port, spans), telemetry(port, 1 << 30) as (process, path, _):
        before_s, began_s = cpu_s(process), time.monotonic()
        tell(path, frames, 0.0)
        while spans.value < num_expected and time.monotonic() - began_s < 120:
            time.sleep(0.02)
        used_s, wall_s = cpu_s(process) - before_s, time.monotonic() - began_s
        if spans.value != num_expected:
            raise SystemExit(f"{num_expected} spans were sent and {spans.value} collected")
    return {
        "tokens": tokens,
        "per_cpu_s": tokens / used_s,
        "per_wall_s": tokens / wall_s,
        "us_per_token": used_s / tokens * 1e6,
    }


def measure_bad_collector(answer: str, num_spans: int) -> dict[str, float]:
    """Memory and drops with a collector that takes nothing."""
    length = LENGTHS[1]
    frames = list(rounds(num_spans, length, facts.Detail.SPAN))
    with collector(answer) as (port, _), telemetry(port, QUEUE_BYTES) as (process, path, metrics):
        before = process.memory_info().rss
        # 300,000 tokens a second.
        tell(path, frames, STREAMS * length / 300_000)
        time.sleep(1.0)
        peak = int(re.findall(r"VmHWM:\s+(\d+) kB", pathlib.Path(f"/proc/{process.pid}/status").read_text())[0]) << 10
        dropped = _metric(metrics, "headrace_telemetry_dropped_spans_total")
        failures = _metric(metrics, "headrace_telemetry_export_failures_total")
    num_expected = (len(frames) - 1) * (STREAMS * (length + 4) + length)
    return {
        "spans": num_expected,
        "dropped": dropped,
        "failures": failures,
        "mib_before": before / 2**20,
        "mib_peak": peak / 2**20,
    }


def _metric(port: int, name: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as reply:
        text = reply.read().decode()
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)", text, re.MULTILINE))


def main() -> None:
    """Measures all, prints lines, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spans", type=int, default=1_000_000, help="token spans per measurement")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for detail in (facts.Detail.SPAN, facts.Detail.ARRAY):
        for length in LENGTHS:
            result = results[f"{detail.name.lower()} {length}"] = measure_rate(options.spans, length, detail)
            print(
                f"{detail.name.lower():5} {length:5} tokens each: {result['per_cpu_s']:10,.0f} tokens per CPU second "
                f"({result['us_per_token']:.2f} us), {result['per_wall_s']:10,.0f} per second",
                flush=True,
            )
    for answer in ("down", "hung", "UNAVAILABLE", "RESOURCE_EXHAUSTED", "INTERNAL"):
        result = results[answer] = measure_bad_collector(answer, options.spans)
        print(
            f"{answer:18}: {result['spans']:10,.0f} spans, {result['dropped']:10,.0f} dropped, "
            f"{result['failures']:3,.0f} failures, "
            f"{result['mib_before']:.0f} -> at most {result['mib_peak']:.0f} MiB",
            flush=True,
        )
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
