"""What the seconds of a start are spent on: `headrace serve` as users run it, by phase and by rank.

Each run starts a whole server, waits for its ready line and for one token, and ends it. The first
run fills the page cache and compiles kernels, and is told apart; the others' medians are the table.

    python -m benchmarks.bench_start_up --shape llama-3.1-8b --dtype bf16 --load folder --json FILE

A row is a stretch of time, one after the other from top to bottom: `serve` until the backend's
process is made, `backend` until the workers' are, then the phases of each rank (`process` is its
interpreter and its own imports, `waiting` for the backend to say what it is to do, `other` what no
phase has), then what is left until the ready line.
Beside them stands the processor time that each process had taken by then, which other programs on
the machine change little.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import pathlib
import queue
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import psutil

from benchmarks.ending import CutShort, Ending
from benchmarks.engine_options import START_TIMEOUT_S, checked_config, engine_settings, model_folder, which_engine
from benchmarks.figures import provenance, write_json
from headrace import Client
from headrace.local_server.process import FlagValue, ServerProcess, serve_command
from headrace_facts.process_age import process_age_s

_READY_LINE = "listening on "
_STOP_S = 30.0
_MODULES = {
    "headrace_supervisor": "serve",
    "headrace_backend": "backend",
    "headrace_backend.worker": "worker",
    "headrace_service": "service",
}


class NotStarted(Exception):
    """The server did not start; the message says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """Seconds of one start."""

    # From the server's first process to the backend's, and from there to the first worker's.
    serve_s: float
    backend_s: float
    # Phase -> seconds of each rank, from its process on.
    phases_s: Mapping[str, list[float]]
    # From the server's first process to its ready line, and to one token.
    ready_s: float
    first_token_s: float
    # Process -> its processor time until the ready line.
    cpu_s: Mapping[str, float]

    def rows(self) -> dict[str, list[float]]:
        """The seconds of each stretch, of ranks one for each."""
        before_s = self.serve_s + self.backend_s
        slowest_s = max(map(sum, zip(*self.phases_s.values(), strict=True)))
        return {
            "serve": [self.serve_s],
            "backend": [self.backend_s],
            **self.phases_s,
            "ready line": [self.ready_s - before_s - slowest_s],
            "in all": [self.ready_s],
            "with one token": [self.first_token_s],
        }


def _processes(server: psutil.Process) -> dict[str, psutil.Process]:
    """The server's processes by what they are, workers by their rank."""
    found = {"serve": server}
    for process in server.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            command = process.cmdline()
            kind = next((_MODULES[module] for module in command if module in _MODULES), "")
            if kind == "worker":
                kind = f"worker {command[command.index('--rank') + 1]}"
            if kind:
                found[kind] = process
    return found


def _age_s(process: psutil.Process) -> float:
    """How long a process lives already.

    psutil's `create_time` is no such figure beside a clock: it counts from the machine's start in
    whole seconds.
    """
    return process_age_s(pathlib.Path(f"/proc/{process.pid}/stat"))


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _ready_workers(process: ServerProcess, lines: queue.Queue[str]) -> dict[str, Any]:
    """Waits for the ready line; returns the record of the workers that were ready before it.

    Raises:
        NotStarted: The server ended instead, or says nothing for a long time.
    """
    workers: dict[str, Any] = {}
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        try:
            line = lines.get(timeout=0.2)
        except queue.Empty:
            if message := process.exit_message():
                raise NotStarted(message) from None
            continue
        if line.startswith(_READY_LINE):
            return workers
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and "phases_s" in record:
                workers = record
    raise NotStarted(f"it was not ready after {START_TIMEOUT_S:g} s")


def start_once(folder: pathlib.Path, flags: Mapping[str, FlagValue]) -> Start:
    """Starts a server, has it answer one token, and ends it.

    Raises:
        NotStarted: It did not start.
    """
    lines: queue.Queue[str] = queue.Queue()
    process = ServerProcess(lambda private: serve_command(str(folder), private, flags), lines.put)
    try:
        workers = _ready_workers(process, lines)
        ready_at_s = time.monotonic()
        [server] = [each for each in psutil.Process().children() if "headrace_supervisor" in each.cmdline()]
        found = _processes(server)
        ages_s = {name: _age_s(each) for name, each in found.items()}
        looked_s = time.monotonic() - ready_at_s
        cpu_s = {name: _cpu_s(each) for name, each in found.items()}
        with Client(process.target) as client:
            client.complete("The", max_tokens=1)
        answered_s = time.monotonic() - ready_at_s
    finally:
        process.stop(_STOP_S)
    phases = workers.get("phases_s_by_rank") or {name: [seconds] for name, seconds in workers["phases_s"].items()}
    ready_s = ages_s["serve"] - looked_s
    return Start(
        ages_s["serve"] - ages_s["backend"],
        ages_s["backend"] - ages_s["worker 0"],
        phases,
        ready_s,
        ready_s + answered_s,
        cpu_s,
    )


def medians(starts: Sequence[Start]) -> Start:
    """The medians of all that several starts of the same server have."""

    def median(values: Sequence[float]) -> float:
        return statistics.median(values)

    phases = {
        name: [median(of_rank) for of_rank in zip(*(start.phases_s[name] for start in starts), strict=True)]
        for name in starts[0].phases_s
    }
    single = ("serve_s", "backend_s", "ready_s", "first_token_s")
    figures = {name: median([getattr(start, name) for start in starts]) for name in single}
    cpu_s = {name: median([start.cpu_s[name] for start in starts]) for name in starts[0].cpu_s}
    return Start(phases_s=phases, cpu_s=cpu_s, **figures)


def table(start: Start) -> Iterator[str]:
    """The stretches of a start and its processes, as lines."""
    ranks = len(next(iter(start.phases_s.values())))
    yield f"{'seconds':<16}" + "".join(f"{f'rank {rank}':>10}" for rank in range(ranks))
    for name, seconds in start.rows().items():
        yield f"{name:<16}" + "".join(f"{each:>10.3f}" for each in seconds)
    yield "processor time: " + ", ".join(f"{name} {seconds:.2f}" for name, seconds in start.cpu_s.items())


def _flags(settings: Mapping[str, Any]) -> dict[str, FlagValue]:
    """The engine's settings as flags of `headrace serve`, which finds the model by itself."""
    given = {name: value for name, value in settings.items() if name != "model"}
    return {**given, "log_format": "json"}


def _runs(folder: pathlib.Path, settings: Mapping[str, Any], runs: int) -> Iterator[Start]:
    for number in range(1, runs + 1):
        start = start_once(folder, _flags(settings))
        print(f"run {number} of {runs}: ready after {start.ready_s:.2f} s, a token after {start.first_token_s:.2f} s")
        yield start


def main() -> int:
    """Command line; 1 if a server did not start, or the time was over first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which_engine(parser)
    parser.add_argument("--runs", type=int, default=4, help="starts, of which the first is told apart (default 4)")
    options = parser.parse_args()
    if options.runs < 1:
        parser.error(f"--runs must be at least 1, is {options.runs}")
    starts: list[Start] = []
    why = ""
    with Ending(options.limit_s), tempfile.TemporaryDirectory(prefix="headrace-shape-") as parent:
        try:
            folder = model_folder(options, pathlib.Path(parent), tokenizer=True)
            settings = engine_settings(options, folder.resolve())
            checked_config(parser, settings)
            for start in _runs(folder, settings, options.runs):
                starts.append(start)
        except (NotStarted, CutShort) as error:
            why = str(error)
            print(f"NOT MEASURED: {why}", file=sys.stderr)
    counted = starts[1:] or starts
    if counted:
        print("\n".join(table(medians(counted))))
    name = options.model.name if options.model else options.shape
    result = {"name": "start_up", "model": name, "runs": [dataclasses.asdict(start) for start in starts]}
    result |= {"median": dataclasses.asdict(medians(counted)) if counted else None, "incomplete": why}
    engine = {key: value for key, value in settings.items() if key != "model"} if starts else {}
    write_json(result | {"engine": engine} | provenance(options.git), options.json)
    return 1 if why else 0


if __name__ == "__main__":
    sys.exit(main())
