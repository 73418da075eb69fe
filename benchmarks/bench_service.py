"""One service process on one core: how many tokens a second it carries from engine messages to clients, and what it weighs.

Three parties on cores of their own: an instant fake backend, the service, and several client processes (one would be the bottleneck). Two runs:
`instant` gives the service more than it can carry, so that messages/s is its limit and coalescing shows in tokens per message; `paced` offers a
set rate of tokens one by one, and must deliver them one per message. On a machine with other work the wall clock tells little; the service's own
CPU time per message then says what one whole core would carry.

    python -m benchmarks.bench_service --json benchmarks/results/service.json
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import grpc
import psutil
import uvloop

from benchmarks import figures
from headrace.v1 import inference_pb2
from headrace_service.config import ServiceConfig

_GENERATE = "/headrace.v1.InferenceService/Generate"
_START_TIMEOUT_S = 20.0
_WARM_UP_S = 1.0
_CHANNELS = 4


class _Meter:
    """What one client process received within its window, and the time between two messages of a stream."""

    def __init__(self, begin_s: float, end_s: float) -> None:
        self.begin_s, self.end_s = begin_s, end_s
        self.messages = 0
        self.tokens = 0
        self.gaps_ms: list[float] = []

    def count(self, now_s: float, before_s: float, num_tokens: int) -> None:
        if self.begin_s <= now_s < self.end_s:
            self.messages += 1
            self.tokens += num_tokens
            if before_s and self.messages % 16 == 0:
                self.gaps_ms.append((now_s - before_s) * 1e3)


async def _read_stream(generate: Any, request: bytes, meter: _Meter) -> None:
    """Generates again and again until the window is over."""
    while time.monotonic() < meter.end_s:
        before_s = 0.0
        call = generate(request)
        while isinstance(data := await call.read(), bytes):
            event = inference_pb2.GenerateResponse.FromString(data).event
            if event.HasField("delta"):
                now_s = time.monotonic()
                meter.count(now_s, before_s, len(event.delta.token_ids))
                before_s = now_s
                if now_s >= meter.end_s:
                    call.cancel()
                    return


async def _client(address: str, streams: int, seconds: float, start_s: float) -> None:
    """A client process: prints its figures as JSON."""
    request = inference_pb2.GenerateRequest()
    request.spec.text = "The river runs to the sea"
    request.spec.stop.ignore_eos = True
    meter = _Meter(start_s + _WARM_UP_S, start_s + _WARM_UP_S + seconds)
    channels = [
        grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        for _ in range(min(_CHANNELS, streams))
    ]
    data = request.SerializeToString()
    await asyncio.sleep(max(0.0, start_s - time.monotonic()))
    readers = [
        _read_stream(channels[index % len(channels)].unary_stream(_GENERATE), data, meter) for index in range(streams)
    ]
    await asyncio.gather(*readers)
    print(json.dumps({"messages": meter.messages, "tokens": meter.tokens, "gaps_ms": meter.gaps_ms}))


@contextlib.contextmanager
def _process(core: int, *arguments: str, stdin: str | None = None) -> Iterator[subprocess.Popen[str]]:
    """A Python process on one core, ended at the end."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env=figures.environment(),
        text=True,
        stdin=subprocess.PIPE if stdin is not None else None,
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    if stdin is not None and process.stdin is not None:
        process.stdin.write(stdin)
        process.stdin.close()
    try:
        yield process
    finally:
        process.terminate()
        process.wait(10)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_answering(address: str, request: bytes) -> None:
    """Returns when the service has generated once."""
    end_s = time.monotonic() + _START_TIMEOUT_S
    with grpc.insecure_channel(address) as channel:
        while True:
            try:
                for _ in channel.unary_stream(_GENERATE)(request, timeout=5, wait_for_ready=True):
                    return
            except grpc.RpcError as error:
                if time.monotonic() > end_s:
                    raise SystemExit(f"the service does not answer: {error}") from error
                time.sleep(0.1)


def _run(options: argparse.Namespace, cores: list[int], rate: float) -> dict[str, Any]:
    """One run: everything is started anew. `rate` is per stream, 0 for instant."""
    service_core, backend_core, *client_cores = cores
    with tempfile.TemporaryDirectory(prefix="hr-") as folder, contextlib.ExitStack() as stack:
        engine, address = f"unix:{folder}/engine.sock", f"127.0.0.1:{_free_port()}"
        backend = (
            "-m",
            "benchmarks.fake_backend",
            "--model",
            str(options.model),
            "--listen",
            engine,
            "--rate",
            str(rate),
        )
        stack.enter_context(_process(backend_core, *backend))
        config = ServiceConfig(listen=(address,), engine=engine, log_level="error").model_dump_json()
        service = stack.enter_context(
            _process(service_core, "-m", "headrace_service", "--config-json", "-", stdin=config)
        )
        request = inference_pb2.GenerateRequest()
        request.spec.text = "a"
        request.spec.stop.max_tokens = 1
        _wait_until_answering(address, request.SerializeToString())
        return _measure(options, address, psutil.Process(service.pid), client_cores)


def _measure(
    options: argparse.Namespace, address: str, service: psutil.Process, client_cores: list[int]
) -> dict[str, Any]:
    start_s = time.monotonic() + 2.0
    shares = [options.streams // options.clients] * options.clients
    clients = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "benchmarks.bench_service",
                "--client",
                address,
                str(share),
                str(options.seconds),
                str(start_s),
            ],
            env=figures.environment(),
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, set(client_cores)),
        )
        for share in shares
    ]
    time.sleep(max(0.0, start_s + _WARM_UP_S - time.monotonic()))
    before = service.cpu_times()
    time.sleep(options.seconds)
    after = service.cpu_times()
    rss_bytes = service.memory_info().rss
    results = [json.loads(client.communicate(timeout=60)[0]) for client in clients]
    messages, tokens = (sum(result[key] for result in results) for key in ("messages", "tokens"))
    gaps = [gap for result in results for gap in result["gaps_ms"]]
    cpu_s = after.user + after.system - before.user - before.system
    return {
        "tokens_per_s": round(tokens / options.seconds),
        "messages_per_s": round(messages / options.seconds),
        "tokens_per_message": round(tokens / max(messages, 1), 3),
        "tokens_per_cpu_s": round(tokens / cpu_s),
        "cpu_us_per_message": round(cpu_s * 1e6 / max(messages, 1), 1),
        "system_share_of_cpu": round((after.system - before.system) / cpu_s, 2),
        "service_cpu_share": round(cpu_s / options.seconds, 3),
        "message_gap_ms_p50": round(figures.percentile(gaps, 0.5), 2),
        "message_gap_ms_p99": round(figures.percentile(gaps, 0.99), 2),
        "rss_mib": round(rss_bytes / 2**20, 1),
        "load_average": round(os.getloadavg()[0], 1),
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, help="where the figures go")
    parser.add_argument(
        "--model", type=pathlib.Path, default=figures.ROOT / "models" / "demo", help="folder with a tokenizer"
    )
    parser.add_argument("--streams", type=int, default=64, help="concurrent generations")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each measurement")
    parser.add_argument("--clients", type=int, default=2, help="client processes")
    parser.add_argument(
        "--paced", type=float, default=20_000.0, help="tokens a second offered in the paced run, all streams together"
    )
    return parser.parse_args()


def main() -> None:
    """Runs both and reports; with --client, is one of the clients."""
    if sys.argv[1:2] == ["--client"]:
        address, streams, seconds, start_s = sys.argv[2:6]
        uvloop.run(_client(address, int(streams), float(seconds), float(start_s)))
        return
    options = _options()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 4:
        raise SystemExit(f"{len(cores)} cores; this needs 4, so that neither backend nor clients share the service's")
    result = {
        "streams": options.streams,
        "instant": _run(options, cores, 0.0),
        "paced": {"offered_tokens_per_s": options.paced, **_run(options, cores, options.paced / options.streams)},
    }
    figures.report("service", result, options.json)


if __name__ == "__main__":
    main()
