"""What telemetry costs a whole server with 64 streams.

It measures output tokens per second and inter-token latency with everything traced, beside the same
server without telemetry; and with a collector that is of no use.

Servers stand side by side and take turns of some seconds, in random order within a round;
differences are of the turns of one round, with the interval of their median (bootstrap, 95%). The
backend is the real one, whose worker computes nothing, so that the engine's recording counts too:
either as fast as everything takes it (`instant`), where tokens per second tell, or in steps of a
set length (`paced`), where latency tells. The telemetry process and the collector have a core of
their own. "off again" is a second server without telemetry, in the same turns: no difference that
it shows is telemetry's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import figures
from benchmarks.paired import relative
from benchmarks.telemetry_client import Seen
from benchmarks.telemetry_parties import Clients, Cores, Server, collector_at, server
from headrace.v1 import generation_pb2

_WARM_UP_S = 0.7
_LEAD_S = 0.1
# Spans wait so long for others to go with them, and leave the telemetry process's own core.
_DRAIN_S = 1.5
_DETAILS = {"array": generation_pb2.TRACE_DETAIL_ARRAY, "span": generation_pb2.TRACE_DETAIL_SPAN}
BAD_COLLECTORS = ("down", "hung", "UNAVAILABLE")
_MAX_CLIENTS = 4
_PACED_MS = 10.0
# Milliseconds of a backend's step, by what is measured.
LOADS = {"instant": 0.0, "paced": _PACED_MS, "bad_collector": _PACED_MS}
_COMPARED = (
    "tokens_per_s",
    "itl_p99_ms",
    "server_cpu_us_per_token",
    "service_cpu_us_per_token",
    "backend_cpu_us_per_token",
)
_MIB = 1 << 20


class NoTokens(RuntimeError):
    """A window ended before a token arrived, so that there is nothing to divide by."""


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """What is asked of a server, and how often.

    Attributes:
        step_ms: length of the backend's steps; 0: none.
        streams: generations open at once.
        seconds: of a turn's window.
        rounds: turns of every kind.
        clients: processes.
        model: folder with a tokenizer.
    """

    step_ms: float
    streams: int = 64
    seconds: float = 3.0
    rounds: int = 20
    clients: int = 2
    model: pathlib.Path = figures.ROOT / "models" / "demo"


@dataclasses.dataclass(frozen=True, slots=True)
class _Kind:
    """One kind of turn."""

    server: Server
    detail: int


def run(loads: Sequence[str], rounds: int, seconds: float) -> dict[str, Any]:
    """Some of `LOADS`, each with turns of so many seconds."""
    # They must not be what limits a service; more than cores would only wake each other up.
    clients = min(_MAX_CLIENTS, max(2, len(os.sched_getaffinity(0)) // 4))
    return {name: _MEASURES[name](Load(LOADS[name], rounds=rounds, seconds=seconds, clients=clients)) for name in loads}


def good_collector(load: Load) -> dict[str, Any]:
    """Arrays and spans of everything, beside no telemetry.

    A second server without it tells what two servers of one kind differ by.
    """
    cores = Cores.dealt()
    with (
        collector_at(cores.collector, "ok") as (port, spans),
        server(load.model, cores, load.step_ms, None) as off,
        server(load.model, cores, load.step_ms, None) as again,
        server(load.model, cores, load.step_ms, port) as on,
    ):
        kinds = {"off": _Kind(off, 0), "off again": _Kind(again, 0)} | {
            name: _Kind(on, detail) for name, detail in _DETAILS.items()
        }
        result = _compared(kinds, load, cores)
        time.sleep(_DRAIN_S)
        lost = {name: on.metric(f"headrace_telemetry_{name}_total") for name in ("dropped_facts", "dropped_spans")}
    return result | {"spans_collected": spans.value, **lost}


def bad_collectors(load: Load) -> dict[str, Any]:
    """One server for each way in which a collector can be of no use; spans for all tokens."""
    cores = Cores.dealt()
    with contextlib.ExitStack() as stack:
        kinds = {"off": _Kind(stack.enter_context(server(load.model, cores, load.step_ms, None)), 0)}
        for answer in BAD_COLLECTORS:
            port, _ = stack.enter_context(collector_at(cores.collector, answer))
            running = stack.enter_context(server(load.model, cores, load.step_ms, port))
            kinds[answer] = _Kind(running, _DETAILS["span"])
        result = _compared(kinds, load, cores)
        for answer in BAD_COLLECTORS:
            on = kinds[answer].server
            result[answer] |= {"dropped_spans": on.metric("headrace_telemetry_dropped_spans_total")}
    return result


def _compared(kinds: dict[str, _Kind], load: Load, cores: Cores) -> dict[str, Any]:
    """Medians of all kinds, and what each changes against "off", as a share."""
    clients = Clients([("benchmarks.telemetry_client",)] * load.clients, cores)
    rounds: list[dict[str, dict[str, Any]]] = []
    try:
        for kind in kinds.values():
            _turn(kind, load, clients, 0)
        for number in range(1, load.rounds + 1):
            order = random.sample(sorted(kinds), len(kinds))
            rounds.append({name: _turn(kinds[name], load, clients, number) for name in order})
            print(f"round {number}: {_line(rounds[-1])}", file=sys.stderr, flush=True)
    finally:
        clients.close()
    result: dict[str, Any] = {name: _medians([one[name] for one in rounds]) for name in kinds}
    for name in kinds:
        if name != "off":
            result[f"{name} / off - 1"] = _changes([one[name] for one in rounds], [one["off"] for one in rounds])
    about = {"step_ms": load.step_ms, "streams": load.streams, "rounds": load.rounds, "seconds": load.seconds}
    return result | about | {"load_average": round(os.getloadavg()[0], 1)}


def _line(turns: dict[str, dict[str, Any]]) -> str:
    return ", ".join(f"{name} {turn['tokens_per_s']:,} tok/s {turn['itl_p99_ms']} ms" for name, turn in turns.items())


def _turn(kind: _Kind, load: Load, clients: Clients, seed: int) -> dict[str, Any]:
    """One window on one server."""
    begin_s = time.monotonic() + _LEAD_S
    job = {
        "address": kind.server.address,
        "begin_s": begin_s,
        "warm_up_s": _WARM_UP_S,
        "seconds": load.seconds,
        "seed": seed,
        "detail": kind.detail,
    }
    clients.hand_out(job, load.streams)
    time.sleep(max(0.0, begin_s + _WARM_UP_S - time.monotonic()))
    before = kind.server.cpu_ns()
    time.sleep(max(0.0, begin_s + _WARM_UP_S + load.seconds - time.monotonic()))
    used_ns = {name: after - before[name] for name, after in kind.server.cpu_ns().items()}
    seen = clients.answers()
    return figures_of(seen, load.seconds, used_ns, kind.server.resident_bytes())


def figures_of(
    seen: list[Seen], seconds: float, used_ns: dict[str, int], resident_bytes: dict[str, int]
) -> dict[str, Any]:
    """The figures of a turn of so many seconds.

    Args:
        seen: what the clients saw.
        seconds: length of the window.
        used_ns: CPU time by process, of service and backend at least.
        resident_bytes: memory by process.

    Raises:
        NoTokens: nothing arrived in the window.
    """
    tokens, messages = sum(one.tokens for one in seen), sum(one.messages for one in seen)
    if tokens == 0:
        raise NoTokens(f"no token arrived within {seconds:g} s: the machine is busy, or --seconds too few")
    # Tokens that came with another came at once.
    gaps_us: list[float] = [gap for one in seen for gap in one.gaps_us] + [0.0] * (tokens - messages)
    cpu = {f"{name}_cpu_us_per_token": round(used / 1e3 / tokens, 3) for name, used in used_ns.items()}
    return {
        "tokens_per_s": round(tokens / seconds),
        "tokens_per_message": round(tokens / messages, 3),
        "itl_p50_ms": round(figures.percentile(gaps_us, 0.5) / 1e3, 3),
        "itl_p99_ms": round(figures.percentile(gaps_us, 0.99) / 1e3, 3),
        **cpu,
        # What shares cores with tokens on their way.
        "server_cpu_us_per_token": round((used_ns["service"] + used_ns["backend"]) / 1e3 / tokens, 3),
        **{f"{name}_mib": round(size / _MIB, 1) for name, size in resident_bytes.items()},
    }


def _medians(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    middle = {name: round(statistics.median(turn[name] for turn in turns), 3) for name in turns[0]}
    return middle | {f"{name}_most": max(turn[name] for turn in turns) for name in turns[0] if name.endswith("_mib")}


def _changes(turns: Sequence[dict[str, Any]], off: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    return {name: relative([one[name] for one in turns], [one[name] for one in off]) for name in _COMPARED}


_MEASURES = {"instant": good_collector, "paced": good_collector, "bad_collector": bad_collectors}
