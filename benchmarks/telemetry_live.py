"""What telemetry costs one server that is switched while it runs.

It measures tokens per second, inter-token latency and CPU time per token of 64 streams that never
stop, with everything traced and with nothing reported.

One service, one backend whose worker computes nothing, one telemetry process, the same connections
throughout: two servers differ by more than telemetry costs. Kinds take turns in random order within
a round. After a switch come `_SETTLE_S` that nobody counts, in which the generations end that began
before it. Differences are of the turns of one round, with the interval of their median (bootstrap,
95%).

"silent" is telemetry off as far as a running server can be: the backend tells nobody of its steps
(`instant_backend`), and callers say that they record nothing. What is left of telemetry is a fact
per call and per generation, without columns. "silent again" is the same once more: no difference
that it shows is telemetry's. "unsampled" tells steps, and records nothing; the others record
everything, as AdminService.SetTraceDetail says.
"""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import statistics
import sys
import time
from typing import Any

from benchmarks.paired import relative
from benchmarks.telemetry_parties import Clients, Cores, Server, collector_at, server, shares
from benchmarks.telemetry_serving import Load, figures_of
from benchmarks.telemetry_steady_client import Window
from headrace.admin import AdminClient
from headrace.spec import TraceDetailName

# A generation of 320 tokens takes 0.7 s at 30,000 tokens/s.
_SETTLE_S = 0.9
_DRAIN_S = 1.5
_SAMPLED, _UNSAMPLED = (f"00-{'ab' * 16}-{'cd' * 8}-{flag}" for flag in ("01", "00"))
COMPARED = (
    "tokens_per_s",
    "itl_p99_ms",
    "service_cpu_us_per_token",
    "backend_cpu_us_per_token",
    "tokens_per_message",
)
BASE = "silent"


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """What is reported of a turn.

    Attributes:
        detail: of generations.
        traceparent: that callers send.
        steps: whether the backend reports its steps.
    """

    detail: TraceDetailName
    traceparent: str
    steps: bool


KINDS = {
    "silent": Kind("off", _UNSAMPLED, False),
    "silent again": Kind("off", _UNSAMPLED, False),
    "unsampled": Kind("off", _UNSAMPLED, True),
    "off": Kind("off", _SAMPLED, True),
    "array": Kind("array", _SAMPLED, True),
    "span": Kind("span", _SAMPLED, True),
}


class _Live:
    """A server at work."""

    def __init__(self, running: Server, admin: AdminClient, clients: Clients, seconds: float) -> None:
        self._server = running
        self._admin = admin
        self._clients = clients
        self._seconds = seconds

    def turn(self, kind: Kind) -> dict[str, Any]:
        """Switches, waits, and counts."""
        os.kill(self._server.pids["backend"], signal.SIGUSR2 if kind.steps else signal.SIGUSR1)
        self._admin.set_trace_detail(kind.detail)
        begin_s = time.monotonic() + _SETTLE_S
        end_s = begin_s + self._seconds
        self._clients.tell(Window(begin_s, end_s, kind.traceparent))
        time.sleep(begin_s - time.monotonic())
        before = self._server.cpu_ns()
        time.sleep(end_s - time.monotonic())
        used_ns = {name: after - before[name] for name, after in self._server.cpu_ns().items()}
        return figures_of(self._clients.answers(), self._seconds, used_ns, self._server.resident_bytes())


def run(rounds: int, seconds: float, names: tuple[str, ...] = tuple(KINDS), load: Load | None = None) -> dict[str, Any]:
    """Medians of all kinds, and what each changes against `BASE`, as a share.

    Args:
        rounds: turns of every kind.
        seconds: of a turn's window.
        names: kinds; `BASE` must be among them.
        load: streams, clients, steps and model.
    """
    load = load or Load(0.0)
    cores = Cores.dealt()
    with (
        collector_at(cores.collector, "ok") as (port, spans),
        server(load.model, cores, load.step_ms, port) as running,
        AdminClient(running.address) as admin,
    ):
        commands = [
            ("benchmarks.telemetry_steady_client", running.address, str(share), str(number))
            for number, share in enumerate(shares(load.streams, load.clients))
        ]
        clients = Clients(commands, cores)
        try:
            turns = _turns(_Live(running, admin, clients, seconds), names, rounds)
        finally:
            clients.close()
        time.sleep(_DRAIN_S)
        lost = {name: running.metric(f"headrace_telemetry_{name}_total") for name in ("dropped_facts", "dropped_spans")}
    about = {"step_ms": load.step_ms, "streams": load.streams, "rounds": rounds, "seconds": seconds}
    return compared(turns) | about | lost | {"spans_collected": spans.value, "load_average": os.getloadavg()[0]}


def _turns(live: _Live, names: tuple[str, ...], rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Figures of each kind's turns, by round."""
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for name in names:
        live.turn(KINDS[name])
    for number in range(1, rounds + 1):
        for name in random.sample(names, len(names)):
            turns[name].append(live.turn(KINDS[name]))
        line = ", ".join(f"{name} {of[-1]['tokens_per_s']:,} {of[-1]['itl_p99_ms']} ms" for name, of in turns.items())
        print(f"round {number}: {line}", file=sys.stderr, flush=True)
    return turns


def compared(turns: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians by kind, and the changes of each kind against `BASE`, turn by turn.

    Returns the turns themselves too.
    """
    result: dict[str, Any] = {
        name: {figure: round(statistics.median(one[figure] for one in of), 3) for figure in of[0]}
        for name, of in turns.items()
    }
    base = turns[BASE]
    for name, of in turns.items():
        if name != BASE:
            result[f"{name} / {BASE} - 1"] = {
                figure: relative([one[figure] for one in of], [one[figure] for one in base]) for figure in COMPARED
            }
    result["turns"] = {name: {figure: [one[figure] for one in of] for figure in COMPARED} for name, of in turns.items()}
    return result
