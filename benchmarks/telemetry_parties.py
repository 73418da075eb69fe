"""The processes of `bench_telemetry --part serving`: whole servers, and clients.

Servers are with telemetry and without; clients take turns on them.

Owns starting, pinning and ending them, and what they use. A server is one service, the real backend
with a worker that computes nothing, and a telemetry process where it has one. Servers of all kinds
stand side by side, idle but for the one that is measured, so that turns can be short.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from multiprocessing.sharedctypes import Synchronized
from typing import Any

import msgspec
import psutil

from benchmarks import figures, front_parties
from benchmarks.bench_exporter import collector
from benchmarks.telemetry_client import Job, Seen
from headrace_service.config import ServiceConfig

_START_TIMEOUT_S = 30.0
_MAX_SEQS = 64
_NUM_BLOCKS = 4096
# Little enough to be full within the run, so that what is measured includes dropping.
_KEPT_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Cores:
    """Who runs where. A backend and its worker share what they have."""

    service: set[int]
    telemetry: set[int]
    backend: set[int]
    collector: set[int]
    clients: set[int]

    @classmethod
    def dealt(cls) -> Cores:
        """A core each for the service, telemetry and the backend, one for the collector.

        The collector has one where clients have two more, which get the others; cores are shared
        where there are fewer.

        Of a core with two threads, one is used by the first two, and the other by nobody.
        """
        own = set(os.sched_getaffinity(0))
        by_core = [_threads_of_core(core) & own for core in sorted({min(_threads_of_core(cpu) & own) for cpu in own})]
        service, telemetry_core = min(by_core[0]), min(by_core[1 % len(by_core)])
        backend, *left = by_core[2:] or [by_core[-1]]
        collector = left.pop(0) if len(left) > 2 else {telemetry_core}
        return cls({service}, {telemetry_core}, backend, collector, set().union(*left) or backend)


@dataclasses.dataclass(frozen=True, slots=True)
class Server:
    """One that runs.

    Attributes:
        address: its service's.
        pids: its processes, by what they are.
        metrics_port: of /metrics; 0: it has no telemetry.
    """

    address: str
    pids: dict[str, int]
    metrics_port: int

    def cpu_ns(self) -> dict[str, int]:
        """CPU time that its processes have used."""
        # The clock of another process, as clock_getcpuclockid(3) makes it on Linux.
        return {name: time.clock_gettime_ns(~pid << 3 | 2) for name, pid in self.pids.items()}

    def resident_bytes(self) -> dict[str, int]:
        """Resident memory of its processes."""
        return {name: psutil.Process(pid).memory_info().rss for name, pid in self.pids.items()}

    def metric(self, name: str) -> float:
        """A metric's sum over all its labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics") as reply:
            text = reply.read().decode()
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)", text, re.MULTILINE))


def _threads_of_core(cpu: int) -> set[int]:
    """The CPUs that share a core with this one, itself included; the machine may not say."""
    file = pathlib.Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    if not file.exists():
        return {cpu}
    threads: set[int] = set()
    for part in file.read_text().strip().split(","):
        first, _, last = part.partition("-")
        threads.update(range(int(first), int(last or first) + 1))
    return threads


@contextlib.contextmanager
def server(model: pathlib.Path, cores: Cores, step_ms: float, collector_port: int | None) -> Iterator[Server]:
    """A running server.

    Args:
        model: folder with a tokenizer.
        cores: who runs where.
        step_ms: length of a step; 0: none.
        collector_port: where its telemetry process exports to; None: telemetry is off.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hr-"))
        pids: dict[str, int] = {}
        socket, metrics_port = "", 0
        if collector_port is not None:
            socket, metrics_port = f"{folder}/telemetry.sock", front_parties.free_port()
            running = telemetry(folder, socket, collector_port, metrics_port, cores.telemetry)
            pids["telemetry"] = stack.enter_context(running)
        engine, address = f"unix:{folder}/engine.sock", f"127.0.0.1:{front_parties.free_port()}"
        backend = stack.enter_context(_backend(folder, engine, socket, model, step_ms, cores))
        config = ServiceConfig(
            listen=(address,), engine=(engine,), log_level="error", telemetry_socket=socket, exit_with_parent=True
        )
        arguments = ("-m", "headrace_service", "--config-json", "-")
        service = stack.enter_context(front_parties.process(cores.service, *arguments, stdin=config.model_dump_json()))
        front_parties.wait_until_answering(address)
        (worker,) = psutil.Process(backend.pid).children()
        pids |= {"service": service.pid, "backend": backend.pid, "worker": worker.pid}
        yield Server(address, pids, metrics_port)


@contextlib.contextmanager
def telemetry(folder: str, socket: str, collector_port: int, metrics_port: int, cores: set[int]) -> Iterator[int]:
    """A telemetry process that traces everything, on some cores; yields its process id.

    `folder` takes its configuration.
    """
    settings = {
        "telemetry_socket": socket,
        "otlp_endpoint": f"http://127.0.0.1:{collector_port}",
        "trace_sample_ratio": 1.0,
        "metrics_listen": f"127.0.0.1:{metrics_port}",
        "telemetry_flush_s": 0,
        "otlp_queue": _KEPT_BYTES,
        "trace_ring": _KEPT_BYTES,
        "log_level": "error",
    }
    config = pathlib.Path(folder, "telemetry.json")
    config.write_text(json.dumps(settings))
    with front_parties.process(cores, "-m", "headrace_telemetry", "--config-json", str(config)) as process:
        end_s = time.monotonic() + _START_TIMEOUT_S
        while not pathlib.Path(socket).exists():
            if process.poll() is not None or time.monotonic() > end_s:
                raise SystemExit("the telemetry process did not start")
            time.sleep(0.02)
        yield process.pid


@contextlib.contextmanager
def collector_at(cores: set[int], answer: str) -> Iterator[tuple[int, Synchronized[int]]]:
    """A collector on some cores, which it inherits; see `bench_exporter.collector`."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        with collector(answer) as running:
            os.sched_setaffinity(0, before)
            yield running
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def _backend(
    folder: str, listen: str, socket: str, model: pathlib.Path, step_ms: float, cores: Cores
) -> Iterator[subprocess.Popen[str]]:
    engine = {
        "model": str(model),
        "device": "cpu",
        "load": "dummy",
        "max_num_seqs": _MAX_SEQS,
        "num_blocks": _NUM_BLOCKS,
    }
    config = pathlib.Path(folder, "backend.json")
    settings = {"engine": engine, "listen": listen, "telemetry_socket": socket, "log_level": "error"}
    config.write_text(json.dumps(settings))
    command = ("-m", "benchmarks.instant_backend", str(step_ms), "--config-json", str(config))
    with front_parties.process(cores.backend, *command) as process:
        yield process


def shares(streams: int, processes: int) -> list[int]:
    """Streams of each of some processes, as even as can be."""
    return [streams // processes + (number < streams % processes) for number in range(processes)]


class Clients:
    """Client processes that live as long as the benchmark: lines of JSON in, what they saw out."""

    def __init__(self, commands: Sequence[Sequence[str]], cores: Cores) -> None:
        """Starts one for each command, what follows `python -m`."""
        with front_parties.on_cores(cores.clients):
            self._processes = [
                subprocess.Popen(
                    [sys.executable, "-m", *command],
                    env=figures.environment(),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                for command in commands
            ]

    def hand_out(self, job: dict[str, Any], streams: int) -> None:
        """Gives each its share of a job's streams, with lengths of its own."""
        count = len(self._processes)
        for number, share in enumerate(shares(streams, count)):
            self._tell(number, Job(**(job | {"streams": share, "seed": job["seed"] * count + number})))

    def tell(self, what: msgspec.Struct) -> None:
        """Gives all the same."""
        for number in range(len(self._processes)):
            self._tell(number, what)

    def _tell(self, number: int, what: msgspec.Struct) -> None:
        pipe = self._processes[number].stdin
        assert pipe is not None
        pipe.write(msgspec.json.encode(what).decode() + "\n")
        pipe.flush()

    def answers(self) -> list[Seen]:
        """What they saw."""
        seen = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise SystemExit("a client process has ended")
            seen.append(msgspec.json.decode(line, type=Seen))
        return seen

    def close(self) -> None:
        """Ends them."""
        for process in self._processes:
            process.kill()
            process.wait()
