"""The processes of `bench_front`, each pinned to a core of its own, started and ended here.

They are a backend or bare server, services, and clients.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence, Set

import grpc

from benchmarks import figures
from benchmarks.front_client import SERVICE, spec
from headrace.v1 import inference_pb2
from headrace_service.config import ServiceConfig

_START_TIMEOUT_S = 30.0


@contextlib.contextmanager
def on_cores(cores: Set[int]) -> Iterator[None]:
    """Starts this thread's processes on some cores.

    They inherit them from this thread. To set them in the new process instead would take a fork
    that runs Python, and beside gRPC's threads such a fork can hang before it becomes the program.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def process(cores: Set[int], *arguments: str, stdin: str | None = None) -> Iterator[subprocess.Popen[str]]:
    """A Python process on some cores, ended at the end."""
    with on_cores(cores):
        started = subprocess.Popen(
            [sys.executable, *arguments],
            env=figures.environment(),
            text=True,
            stdin=subprocess.PIPE if stdin is not None else None,
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
    if stdin is not None and started.stdin is not None:
        started.stdin.write(stdin)
        started.stdin.close()
    try:
        yield started
    finally:
        started.terminate()
        started.wait(10)


@contextlib.contextmanager
def bare_server(cores: Sequence[int], num_bytes: int, rate: float) -> Iterator[tuple[str, list[int]]]:
    """A bare gRPC server on the first core. Yields its address and process ids."""
    address = f"127.0.0.1:{free_port()}"
    command = ("--listen", address, "--bytes", str(num_bytes), "--rate", str(rate))
    with process({cores[0]}, "-m", "benchmarks.bare_server", *command) as server:
        _wait_until_listening(address)
        yield address, [server.pid]


@contextlib.contextmanager
def services(
    cores: Sequence[int], model: pathlib.Path, folder: str, rate: float, num_services: int, *, speak_http: bool = False
) -> Iterator[tuple[str, list[int]]]:
    """Services on the first cores, and a fake backend on the next.

    Yields the address and the services' process ids.

    Args:
        cores: of this machine.
        model: folder with a tokenizer.
        folder: for sockets.
        rate: tokens per second and request; 0 is as fast as they are taken.
        num_services: how many services.
        speak_http: whether they speak OpenAI's HTTP API instead of gRPC.
    """
    engine = f"unix:{folder}/engine.sock"
    backend = ("--model", str(model), "--listen", engine, "--rate", str(rate))
    with contextlib.ExitStack() as stack:
        stack.enter_context(process({cores[num_services]}, "-m", "benchmarks.fake_backend", *backend))
        yield stack.enter_context(fronts(cores[:num_services], engine, speak_http=speak_http))


@contextlib.contextmanager
def fronts(cores: Sequence[int], engine: str, *, speak_http: bool) -> Iterator[tuple[str, list[int]]]:
    """A service on each of these cores, all at one address. Yields it and their process ids."""
    address = f"127.0.0.1:{free_port()}"
    config = ServiceConfig(
        listen=() if speak_http else (address,),
        openai_listen=(address,) if speak_http else (),
        engine=(engine,),
        log_level="error",
        reuse_port=len(cores) > 1,
    ).model_dump_json()
    module = "headrace_service.openai" if speak_http else "headrace_service"
    with contextlib.ExitStack() as stack:
        running = [
            stack.enter_context(process({core}, "-m", module, "--config-json", "-", stdin=config)) for core in cores
        ]
        if speak_http:
            wait_until_well(address)
        else:
            wait_until_answering(address)
        yield address, [service.pid for service in running]


def free_port() -> int:
    """A port that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_listening(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        grpc.channel_ready_future(channel).result(_START_TIMEOUT_S)


def wait_until_well(address: str) -> None:
    """Returns when a service that speaks HTTP says that it serves."""
    end_s = time.monotonic() + _START_TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(f"http://{address}/health", timeout=5):
                return
        except OSError as error:
            if time.monotonic() > end_s:
                raise SystemExit(f"the service does not answer: {error}") from error
            time.sleep(0.1)


def wait_until_answering(address: str) -> None:
    """Returns when the service has generated once."""
    request = inference_pb2.GenerateRequest(spec=spec())
    request.spec.stop.max_tokens = 1
    end_s = time.monotonic() + _START_TIMEOUT_S
    with grpc.insecure_channel(address) as channel:
        generate = channel.unary_stream(SERVICE + "Generate")  # type: ignore[call-arg]
        while True:
            try:
                for _ in generate(request.SerializeToString(), timeout=5, wait_for_ready=True):
                    return
            except grpc.RpcError as error:
                if time.monotonic() > end_s:
                    raise SystemExit(f"the service does not answer: {error}") from error
                time.sleep(0.1)
