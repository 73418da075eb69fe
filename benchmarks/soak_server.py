"""A soak of a whole server as users run it: mixed callers over gRPC.

Meanwhile it watches the memory of each of the server's processes.

Owns the server (`headrace serve` on a private socket), the samples of its processes, and what is
said of both. What callers send is `soak_callers`'. Memory is flat if a process's median of the last
quarter is hardly above that of the second: growth of half a kilobyte a call, which a look at the
largest sample of a few minutes overlooks, is megabytes after half an hour.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import statistics
import time
from collections.abc import Sequence
from typing import Any

import psutil

import headrace
from benchmarks import figures, soak_checks
from benchmarks.soak_callers import Outcomes, call_until
from benchmarks.soak_checks import Check
from headrace.aio import AsyncClient
from headrace.local_server.process import FlagValue

DEMO_MODEL = figures.ROOT / "models" / "demo"
CALLERS = 16
# A cache whose pages are all touched in the first minute, and few logs of ended requests: both are
# kept on purpose.
_SETTINGS: dict[str, FlagValue] = {"num_blocks": 256, "max_logs": 256, "log_level": "warning"}
_INTERVAL_S = 1.0
_MODULES = (
    "headrace_backend.worker",
    "headrace_backend",
    "headrace_telemetry",
    "headrace_service",
    "headrace_supervisor",
)
# Allocators settle within this much from one quarter of an hour to the next; a worker's, whose
# tensors change in size, within more. Telemetry fills what it remembers of 65,536 steps and 16,384
# requests, 28 MiB with 16 rows a step, which takes longer than a soak.
_FLAT_MIB = {"headrace_backend.worker": 48.0, "headrace_telemetry": 28.0}
_USUALLY_FLAT_MIB = 6.0
_CANARY = "The three friends went to the river and"


def _server_processes() -> dict[str, psutil.Process]:
    """Returns the server's processes by the module that each runs.

    A second one of a module has a number behind its name.
    """
    found: dict[str, psutil.Process] = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            command = process.cmdline()
            if module := next((module for module in _MODULES if module in command), ""):
                count = sum(name.partition("#")[0] == module for name in found)
                found[f"{module}#{count + 1}" if count else module] = process
    return found


def _ids(processes: dict[str, psutil.Process]) -> dict[str, int]:
    return {name: process.pid for name, process in processes.items()}


class ServerWatch:
    """Resident memory of the server's processes, sampled once a second until `run` is cancelled."""

    def __init__(self, processes: dict[str, psutil.Process]) -> None:
        self._processes = processes
        self.memory: dict[str, list[int]] = collections.defaultdict(list)

    async def run(self) -> None:
        """Samples; a process that has ended has no sample, and is found by its name at the end."""
        while True:
            for name, process in self._processes.items():
                with contextlib.suppress(psutil.Error):
                    self.memory[name].append(process.memory_info().rss)
            await asyncio.sleep(_INTERVAL_S)


def growth_mib(samples: Sequence[int]) -> float:
    """How far the median of the last quarter is above that of the second, in MiB."""
    quarter = len(samples) // 4
    return (statistics.median(samples[-quarter:]) - statistics.median(samples[quarter : 2 * quarter])) / 2**20


def flat_check(name: str, samples: Sequence[int]) -> Check:
    """Whether a process's memory was flat from the second quarter of the time to the last."""
    if len(samples) < soak_checks.LEAST_SAMPLES:
        return Check(f"{name} memory", False, f"{len(samples)} samples; {soak_checks.LEAST_SAMPLES} are needed to tell")
    allowed = _FLAT_MIB.get(name.partition("#")[0], _USUALLY_FLAT_MIB)
    growth = growth_mib(samples)
    message = (
        f"{max(samples) / 2**20:.1f} MiB at most; last quarter {growth:+.1f} MiB from the second, {allowed:g} allowed"
    )
    return Check(f"{name} memory", growth <= allowed, message)


def outcomes_check(outcomes: Outcomes) -> Check:
    """Whether every call ended as it had to."""
    shown = "; ".join(outcomes.wrong[:5])
    count = sum(outcomes.calls.values())
    return Check("calls", count > 0 and not outcomes.wrong, shown or f"{count} calls, each ended as it had to")


async def _canary(client: AsyncClient) -> str:
    completion = await client.complete(_CANARY, temperature=0.0, max_tokens=32)
    return completion.text


async def _soak(
    client: AsyncClient, callers: int, seconds: float, seed: int
) -> tuple[Outcomes, ServerWatch, list[Check]]:
    before, processes = await _canary(client), _server_processes()
    outcomes, watch = Outcomes(), ServerWatch(processes)
    watching = asyncio.create_task(watch.run())
    end_s = time.monotonic() + seconds
    try:
        await asyncio.gather(*(call_until(client, seed, index, end_s, outcomes) for index in range(callers)))
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
    checks = [
        outcomes_check(outcomes),
        soak_checks.same_check("canary", before, await _canary(client), "the same text"),
        soak_checks.same_check("processes", _ids(processes), _ids(_server_processes()), "the same processes"),
        *(flat_check(name, samples) for name, samples in watch.memory.items()),
    ]
    return outcomes, watch, checks


def _quarters(samples: Sequence[int]) -> list[float]:
    """The median of each quarter of the time, in MiB."""
    ends = [place * len(samples) // 4 for place in range(5)]
    parts = [samples[first:last] for first, last in zip(ends, ends[1:], strict=False) if last > first]
    return [round(statistics.median(part) / 2**20, 1) for part in parts]


def _lines(result: dict[str, Any]) -> list[str]:
    """The result as people read it in a terminal."""
    calls = sum(result["calls"].values())
    lines = [f"soak: {calls:,} calls of {result['callers']} callers in {result['wall_s']:.0f} s, seed {result['seed']}"]
    lines += [f"  {name:<12}{count:>9,}" for name, count in sorted(result["calls"].items())]
    lines += [f"  memory of {name} by quarter, MiB: {medians}" for name, medians in result["memory_mib"].items()]
    return lines + [
        f"  {'ok    ' if check['ok'] else 'FAILED'}  {check['name']}: {check['message']}" for check in result["checks"]
    ]


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """Starts a server, soaks it for `options.seconds`, and prints what came of it.

    Returns the record.
    """
    callers = options.concurrency or CALLERS
    flags: dict[str, FlagValue] = {**_SETTINGS, "device": options.device}
    if options.threads:
        flags["worker_threads"] = options.threads
    model = options.model or DEMO_MODEL
    began_s = time.perf_counter()
    async with headrace.local(str(model), on_line=None, **flags) as client:  # type: ignore[arg-type]
        outcomes, watch, checks = await _soak(client, callers, options.seconds, options.seed)
    result = {
        "name": "soak-server",
        "model": model.name,
        "seed": options.seed,
        "callers": callers,
        "wall_s": round(time.perf_counter() - began_s, 2),
        "calls": dict(outcomes.calls),
        "refused": dict(outcomes.refused),
        "memory_mib": {name: _quarters(samples) for name, samples in watch.memory.items()},
        "checks": [{"name": check.name, "ok": check.ok, "message": check.message} for check in checks],
        "ok": all(check.ok for check in checks),
        **figures.provenance(options.git),
    }
    print("\n".join(_lines(result)), flush=True)
    return result
