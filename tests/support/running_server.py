"""A real `headrace serve` for end-to-end and fault tests.

The supervisor, its backend, worker and services are processes.

Owns starting, finding the processes by their place in the tree, and proving that nothing is left.
Knows no RPC.
"""

from __future__ import annotations

import functools
import os
import pathlib
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psutil
from tests.support.processes import alive, wait_until
from tests.support.warm_python import Ended, WarmPython

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEMO = ROOT / "models" / "demo"
_PYTHONPATH = os.pathsep.join(
    str(ROOT / part) for part in ("service", "backend", "both_sides", "kernels", "protos/python", "clients/python", ".")
)

# How settings of telemetry begin. A server that is given none of them is started without that
# process: 0.7 of its 5 s of CPU.
_OF_TELEMETRY = ("--telemetry", "--trace-", "--metrics-", "--otlp-", "--export-", "--price-")


def configuration_of(process: psutil.Process) -> pathlib.Path:
    """The file that a process of a server was started with.

    A backend that was begun early got the first one of a backend in the folder of them all.
    """
    command = process.cmdline()
    if "--early" not in command:
        return pathlib.Path(command[command.index("--config-json") + 1])
    supervisor = psutil.Process(process.ppid())
    service = next(child for child in supervisor.children() if "headrace_service" in child.cmdline())
    return configuration_of(service).with_name("backend-0.json")


class RunningServer:
    """One supervisor and everything below it."""

    def __init__(self, process: subprocess.Popen[str], address: str, lines: list[str]) -> None:
        self.process = process
        self.address = address
        self.lines = lines

    def descendants(self, module: str) -> list[psutil.Process]:
        """Live processes below the supervisor that run `python -m module`."""
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                command = child.cmdline()
                if module in command and child.status() != psutil.STATUS_ZOMBIE:
                    found.append(child)
            except psutil.NoSuchProcess:
                continue
        return found

    def worker(self) -> psutil.Process:
        """The worker process."""
        return self.descendants("headrace_backend.worker")[0]

    def backend(self) -> psutil.Process:
        """The backend process."""
        return self.descendants("headrace_backend")[0]

    def services(self) -> list[psutil.Process]:
        """The service processes."""
        return self.descendants("headrace_service")

    def all_pids(self) -> list[int]:
        """The supervisor and all below it."""
        return [self.process.pid, *(c.pid for c in psutil.Process(self.process.pid).children(recursive=True))]

    def stop(self, sig: int = signal.SIGTERM, timeout_s: float = 120.0) -> int:
        """Sends a signal and waits; returns the exit code."""
        self.process.send_signal(sig)
        return self.process.wait(timeout_s)


def _collect(process: subprocess.Popen[str], lines: list[str], seen: queue.Queue[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        seen.put(line)


def _address(process: subprocess.Popen[str], seen: queue.Queue[str], lines: list[str], timeout_s: float) -> str:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            line = seen.get(timeout=0.1)
        except queue.Empty:
            if process.poll() is not None:
                break
            continue
        match = re.search(r"listening on (\S+)", line)
        if match:
            return match.group(1)
    raise AssertionError(f"server did not start (exit code {process.poll()}):\n{''.join(lines[-30:])}")


def environment() -> dict[str, str]:
    """Returns this environment without settings of Headrace, with our packages in reach."""
    python_path = os.pathsep.join(filter(None, (_PYTHONPATH, os.environ.get("PYTHONPATH"))))
    return {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")} | {"PYTHONPATH": python_path}


def serve_command(model: pathlib.Path, listen: str, options: Sequence[str]) -> list[str]:
    """Returns the command line of `headrace serve`.

    It has one thread for the worker, because tests share the machine, and patience, because the
    machine may be a slow one.
    """
    patient = ("--watchdog-s", "60", "--template-timeout-s", "30")
    fixed = ("--model", str(model), "--listen", listen, "--worker-threads", "1", *patient)
    return [sys.executable, "-m", "headrace_supervisor", "serve", *fixed, *options]


@contextmanager
def running_server(
    *options: str, model: pathlib.Path = DEMO, listen: str = "127.0.0.1:0", timeout_s: float = 240.0
) -> Iterator[RunningServer]:
    """Starts `headrace serve`, by default on a free loopback port, and stops it.

    It has telemetry where one of the options asks for it. Fails if a process outlives it.
    """
    if not any(option.startswith(_OF_TELEMETRY) for option in options):
        options = (*options, "--telemetry", "off")
    process = subprocess.Popen(
        serve_command(model, listen, options),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
    )
    lines: list[str] = []
    seen: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_collect, args=(process, lines, seen), daemon=True).start()
    pids: list[int] = [process.pid]
    try:
        server = RunningServer(process, _address(process, seen, lines, timeout_s), lines)
        pids = server.all_pids()
        yield server
        if process.poll() is None:
            pids = sorted({*pids, *server.all_pids()})
            assert server.stop() == 0, "".join(lines[-30:])
        wait_until(lambda: not alive(pids), 30.0, f"processes left behind: {alive(pids)}")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@functools.cache
def _warm_commands() -> WarmPython:
    """A Python that has imported the commands, 0.7 s of a core, and forks for each that is run."""
    modules = ("bench.command", "commands", "doctor_command", "quantize_command")
    return WarmPython([f"headrace_supervisor.{module}" for module in modules], environment())


def run_command(*arguments: object, **variables: str) -> Ended:
    """Runs a `headrace` command of a server until it has ended.

    What it starts is started as it always is. Variables are added to its environment.
    """
    program = ("headrace_supervisor", [*map(str, arguments)])
    (ended,) = _warm_commands().run([program], 600.0, environment() | variables)
    return ended


def refused(*options: str, model: pathlib.Path = DEMO, listen: str = "127.0.0.1:0") -> tuple[Ended, float]:
    """Runs a `headrace serve` that is expected to end by itself.

    Returns how it ended and after how many seconds.
    """
    begun = time.monotonic()
    _, _, _, *arguments = serve_command(model, listen, options)
    ended = run_command(*arguments)
    return ended, time.monotonic() - begun
