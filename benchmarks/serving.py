"""Service processes in front of a benchmark's backend, and client processes.

Workloads are sent through them as text.

Owns both kinds of processes. What a client does is in `serving_client`; figures are in
`measurements`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import psutil
from tokenizers import Tokenizer

from benchmarks import figures
from benchmarks.measurements import Request
from benchmarks.sending import NotMeasured, Run
from benchmarks.serving_client import Call, CallResult, Job
from benchmarks.synthetic_tokenizer import as_words
from benchmarks.workloads import USERS_DRAIN_SECONDS, Users, Workload
from headrace_service.config import ServiceConfig

_START_TIMEOUT_S = 60.0
# From handing out the jobs to the beginning, for clients to start and connect.
_CLIENT_START_S = 3.0


@dataclasses.dataclass(frozen=True, slots=True)
class Services:
    """Running service processes."""

    addresses: list[str]
    processes: list[psutil.Process]

    def cpu_s(self) -> float:
        """Processor seconds that all of them have used."""
        times = [process.cpu_times() for process in self.processes]
        return float(sum(entry.user + entry.system for entry in times))

    def resident_mib(self) -> float:
        """Resident memory of all of them."""
        return float(sum(process.memory_info().rss for process in self.processes)) / 2**20


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _start(engine: str, address: str, log: pathlib.Path, telemetry_socket: str) -> subprocess.Popen[bytes]:
    config = ServiceConfig(
        listen=(address,), engine=(engine,), log_level="warning", telemetry_socket=telemetry_socket
    ).model_dump_json()
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace_service", "--config-json", "-"],
        stdin=subprocess.PIPE,
        stderr=log.open("wb"),
        stdout=subprocess.DEVNULL,
        env=figures.environment(),
    )
    assert process.stdin is not None
    process.stdin.write(config.encode())
    process.stdin.close()
    return process


@contextlib.contextmanager
def services(engine: str, count: int, telemetry_socket: str = "") -> Iterator[Services]:
    """Starts service processes for the backend at `engine`, and stops them."""
    addresses = [f"127.0.0.1:{_free_port()}" for _ in range(count)]
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        logs = [pathlib.Path(folder) / f"service{index}.log" for index in range(count)]
        started = [_start(engine, address, log, telemetry_socket) for address, log in zip(addresses, logs, strict=True)]
        try:
            for address, process, log in zip(addresses, started, logs, strict=True):
                _wait_until_listening(address, process, log)
            yield Services(addresses, [psutil.Process(process.pid) for process in started])
        finally:
            for process in started:
                process.terminate()
            for process in started:
                process.wait(40)


def _wait_until_listening(address: str, process: subprocess.Popen[bytes], log: pathlib.Path) -> None:
    host, port = address.split(":")
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while True:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
            return
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise NotMeasured(f"a service did not start: {log.read_text(errors='replace')[-1000:]}")
        time.sleep(0.05)


def worded(workload: Workload, vocab_size: int) -> Workload:
    """The workload with ids whose text is encoded to the same ids again."""
    return dataclasses.replace(workload, trace=[(as_words(ids, vocab_size), output) for ids, output in workload.trace])


def jobs(
    workload: Workload, texts: Sequence[str], addresses: list[str], salt: str, clients: int, detail: int = 0
) -> list[Job]:
    """The workload dealt out to client processes; fewer where fewer calls are open at once."""
    concurrency = workload.concurrency or len(texts)
    clients = max(1, min(clients, concurrency))
    begin_s = time.perf_counter() + _CLIENT_START_S
    if workload.users is not None:
        return _users_jobs(
            workload, workload.users, texts, Job(addresses, begin_s, 0, salt, [], detail=detail), clients
        )
    dealt: list[list[Call]] = [[] for _ in range(clients)]
    for index, (text, (_, output)) in enumerate(zip(texts, workload.trace, strict=True)):
        at_s = None if workload.arrivals_s is None else workload.arrivals_s[index]
        dealt[index % clients].append(Call(index, text, output, at_s))
    shares = [concurrency // clients + (number < concurrency % clients) for number in range(clients)]
    return [
        Job(addresses, begin_s, share, salt, calls, detail=detail) for share, calls in zip(shares, dealt, strict=True)
    ]


def _users_jobs(workload: Workload, users: Users, texts: Sequence[str], empty: Job, clients: int) -> list[Job]:
    """Users dealt out to client processes."""
    own = [
        [Call(turn.index, texts[turn.index], workload.trace[turn.index][1], None, turn.think_s) for turn in turns]
        for turns in users.turns
    ]
    clients = min(clients, len(own))
    parts = [own[number::clients] for number in range(clients)]
    timing = {"seconds": users.seconds, "drain_s": USERS_DRAIN_SECONDS}
    return [msgspec.structs.replace(empty, users=part, **timing) for part in parts]


async def _client(job: Job) -> list[CallResult]:
    # Not by the loop: uvloop forks with gRPC's handlers, of which some children died before they
    # began.
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.serving_client"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=figures.environment(),
    )
    try:
        output, _ = await asyncio.to_thread(process.communicate, msgspec.msgpack.encode(job))
    finally:
        # One that nobody waits for any more, because another failed.
        if process.poll() is None:
            process.kill()
    if process.returncode:
        raise NotMeasured(f"a client process ended with exit code {process.returncode}")
    return msgspec.msgpack.decode(output, type=list[CallResult])


async def send_texts(
    workload: Workload, tokenizer: Tokenizer, running: Services, salt: str, clients: int, detail: int = 0
) -> Run:
    """Sends a workload whose ids are whole words (`as_words`) through the services.

    `detail` of its tokens is traced.

    Raises:
        NotMeasured: A call failed, or a prompt or an answer has not the length that was asked for.
    """
    texts = [tokenizer.decode(ids, skip_special_tokens=False) for ids, _ in workload.trace]
    work = jobs(workload, texts, running.addresses, salt, clients, detail)
    running_clients = [asyncio.ensure_future(_client(job)) for job in work]
    try:
        parts = await asyncio.gather(*running_clients)
    finally:
        for client in running_clients:
            client.cancel()
        await asyncio.gather(*running_clients, return_exceptions=True)
    sent = sorted((result for part in parts for result in part), key=lambda result: result.index)
    results = [result for result in sent if not result.unanswered]
    requests = []
    if not results:
        raise NotMeasured(f"{workload.name}: nobody came to ask anything")
    # Of what people might ask only that is sent which there is time for.
    assert workload.users or len(results) == len(workload.trace)
    for result in results:
        ids, output = workload.trace[result.index]
        if result.error:
            raise NotMeasured(f"{workload.name}: a call failed: {result.error}")
        if (result.prompt_tokens, len(result.arrivals_s)) != (len(ids), output):
            raise NotMeasured(
                f"{workload.name}: {result.prompt_tokens} -> {len(result.arrivals_s)} tokens instead of {len(ids)} -> "
                f"{output}"
            )
        requests.append(Request(result.start_s, result.prompt_tokens, np.asarray(result.arrivals_s)))
    begin_s = work[0].begin_s
    late = [request.start_s - begin_s - due for request, due in zip(requests, workload.arrivals_s or (), strict=False)]
    cached = sum(result.cached_tokens for result in results)
    return Run(requests, begin_s, cached, max(late, default=0.0), len(sent) - len(results))
