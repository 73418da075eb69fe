"""What telemetry costs a server with a model: workloads as text through services, in turns.

Turns are without telemetry and with everything traced.

Two warm backends of the same settings stand on one device, one that tells telemetry what happens
and one that does not, each with services of its own; they take turns in random order within a
round, and idle otherwise. On a GPU each has 45% of the memory, if the settings give it no share of
its own. Telemetry has the last core, its collector the one before. Differences are of the turns of
one round, with the interval of their median (bootstrap, 95%).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.sharedctypes import Synchronized
from typing import Any

from tokenizers import Tokenizer

from benchmarks import front_parties
from benchmarks.ceilings import Ceilings
from benchmarks.ending import Ending
from benchmarks.engine_options import Plan
from benchmarks.engine_session import EngineSession
from benchmarks.gpu_watch import GpuMemory
from benchmarks.measured_engine import measure_all, measured_engine, record
from benchmarks.measurements import medians, summary
from benchmarks.paired import relative
from benchmarks.sending import NotMeasured, counters, uncached
from benchmarks.serving import Services, send_texts, services, worded
from benchmarks.telemetry_parties import collector_at, telemetry
from benchmarks.workloads import Workload, first_of
from headrace.v1 import generation_pb2

DETAILS = {"array": generation_pb2.TRACE_DETAIL_ARRAY, "span": generation_pb2.TRACE_DETAIL_SPAN}
_REPEATS = 7
_GPU_SHARE = 0.45
_COMPARED = ("output_tok_s", "itl_p50", "itl_p99", "ttft_p50", "service_us_per_token")
_SPANS_WITHIN_S = 10.0


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """One of the two servers.

    Attributes:
        session: its engine's.
        services: before it.
    """

    session: EngineSession
    services: Services


@dataclasses.dataclass(frozen=True, slots=True)
class Sides:
    """Both servers, who sends to them, and what has arrived at the collector."""

    off: Side
    on: Side
    tokenizer: Tokenizer
    clients: int
    spans: Synchronized[int]

    async def turn(self, workload: Workload, mode: str, salt: str) -> dict[str, Any]:
        """One run of a workload. Raises NotMeasured."""
        side, detail = (self.off, 0) if mode == "off" else (self.on, DETAILS[mode])
        before_s, tokens = side.services.cpu_s(), sum(output for _, output in workload.trace)
        run = await send_texts(workload, self.tokenizer, side.services, salt, self.clients, detail)
        run = uncached(run, workload)
        used_s = side.services.cpu_s() - before_s
        return summary(run.requests, run.begin_s) | {"service_us_per_token": round(used_s / tokens * 1e6, 2)}

    def expect_spans(self, at_least: int) -> int:
        """Waits until the collector has so many.

        Raises NotMeasured: telemetry lost some, so that its cost is not all there.
        """
        end_s = time.monotonic() + _SPANS_WITHIN_S
        while self.spans.value < at_least:
            if time.monotonic() > end_s:
                raise NotMeasured(f"{self.spans.value} spans were collected, at least {at_least} were to come")
            time.sleep(0.1)
        return self.spans.value


async def run(
    plan: Plan,
    ceilings: Ceilings,
    modes: Sequence[str],
    num_services: int,
    clients: int,
    path: pathlib.Path | None,
    ending: Ending,
) -> bool:
    """Starts everything, warms it, and measures every workload in all modes.

    `path` holds what there is after each.

    False if one could not be measured, or not on a warm engine.
    """
    if ceilings.device == "cuda":
        plan = _sharing(plan)
    tokenizer = Tokenizer.from_file(str(pathlib.Path(plan.settings["model"]) / "tokenizer.json"))
    async with contextlib.AsyncExitStack() as stack:
        socket, spans = _telemetry(stack)
        off, workloads, started, _ = await stack.enter_async_context(measured_engine(plan, ceilings))
        on, _, on_started, _ = await stack.enter_async_context(measured_engine(plan, ceilings, socket))
        started = dataclasses.replace(started, warm=started.warm and on_started.warm)
        off_side = Side(off, stack.enter_context(services(off.process.address, num_services)))
        on_side = Side(on, stack.enter_context(services(on.process.address, num_services, socket)))
        sides = Sides(off_side, on_side, tokenizer, clients, spans)
        texts = [worded(workload, off.model.vocabulary_size) for workload in workloads]
        for mode in modes:
            await sides.turn(first_of(texts[0], 2 * clients), mode, f"warm-up {mode}")

        async def measure(workload: Workload) -> dict[str, Any]:
            figures = await _measure(sides, workload, modes, plan.repeats or _REPEATS)
            return record(figures, workload, plan, ceilings, started, off.model)

        return await measure_all(texts, measure, lines, path, ending)


def _sharing(plan: Plan) -> Plan:
    """The plan with about half of the GPU, unless it says how much."""
    if {"kv_memory", "memory_budget", "num_blocks"} & set(plan.settings):
        return plan
    memory = GpuMemory()
    total_bytes = memory.total_bytes
    memory.close()
    if total_bytes is None:
        raise SystemExit("two backends must share the GPU, whose size is not known: name a --set memory_budget=...")
    budget = {"memory_budget": int(total_bytes * _GPU_SHARE)}
    return dataclasses.replace(plan, settings=plan.settings | budget)


def _telemetry(stack: contextlib.AsyncExitStack) -> tuple[str, Synchronized[int]]:
    """A telemetry process on the last core and a collector on the one before.

    Where there are few cores both have the last. Everything else keeps off both where it can.

    Returns the telemetry's socket, and the collector's spans.
    """
    cores = os.sched_getaffinity(0)
    *_, collector_core, telemetry_core = min(cores), *sorted(cores)
    last = {telemetry_core}
    own = {collector_core} if len(cores) > 4 else last
    stack.callback(os.sched_setaffinity, 0, cores)
    port, spans = stack.enter_context(collector_at(own, "ok"))
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hr-"))
    socket = f"{folder}/telemetry.sock"
    stack.enter_context(telemetry(folder, socket, port, front_parties.free_port(), last))
    os.sched_setaffinity(0, cores - last - own or cores)
    return socket, spans


async def _measure(sides: Sides, workload: Workload, modes: Sequence[str], repeats: int) -> dict[str, Any]:
    """The figures without telemetry, with those of the other modes under "more".

    What the modes change is there too.
    """
    sessions = sides.off.session, sides.on.session
    late_before = [counters(await session.load()) for session in sessions]
    spans_before = sides.spans.value
    turns: dict[str, list[dict[str, Any]]] = {mode: [] for mode in modes}
    for number in range(repeats):
        for mode in random.sample(modes, len(modes)):
            turns[mode].append(await sides.turn(workload, mode, f"{workload.name} {number} {mode}"))
        # What is left of a run that somebody ends.
        shown = (
            f"{mode} {turns[mode][-1]['output_tok_s']:,.0f} tok/s, ITL p99 {turns[mode][-1]['itl_p99']} ms"
            for mode in modes
        )
        print(f"{workload.name} round {number + 1} of {repeats}: {'; '.join(shown)}", file=sys.stderr, flush=True)
    late = [counters(await session.load()) for session in sessions]
    tokens = repeats * sum(output for _, output in workload.trace)
    spans = sides.expect_spans(spans_before + tokens if "span" in modes else spans_before + 1) - spans_before
    figures, spread = medians(turns["off"])
    more: dict[str, Any] = {
        f"{name}_after_warm_up": sum(
            after[name] - before[name] for before, after in zip(late_before, late, strict=True)
        )
        for name in late[0]
    }
    more |= {
        "through": "grpc",
        "services": len(sides.off.services.addresses),
        "clients": sides.clients,
        "repeats": repeats,
        "cut": workload.cut,
        "spread": spread,
        "spans_collected": spans,
        "telemetry": {mode: _against_off(turns[mode], turns["off"]) for mode in modes if mode != "off"},
        "turns": turns,
    }
    figures["more"] = {"service_us_per_token": figures.pop("service_us_per_token")} | more
    return figures


def _against_off(turns: list[dict[str, Any]], off: list[dict[str, Any]]) -> dict[str, Any]:
    figures, spread = medians(turns)
    changes = {
        name: relative([turn[name] for turn in turns], [turn[name] for turn in off])
        for name in _COMPARED
        # A single token has no gaps, and of a small run the clock may count no CPU time.
        if all(turn[name] for turn in (*turns, *off))
    }
    return {"figures": figures, "spread": spread, "beyond_off": changes}


def lines(result: dict[str, Any]) -> list[str]:
    """Tokens per second and latencies of all modes, with what they change against none."""
    shown = [
        f"{result['name']}: {result['requests']} requests, {result['repeats']} turns of each mode, "
        f"{result['spans_collected']:,} spans; beyond off: median and 95% interval",
        *(f"  {'off':<6}{name:<21}{result[name]:>12,.2f}" for name in _COMPARED if result[name] is not None),
    ]
    for mode, compared in result["telemetry"].items():
        for name, change in compared["beyond_off"].items():
            share = f"{change['median']:+.2%} [{change['low']:+.2%}, {change['high']:+.2%}]"
            shown.append(f"  {mode:<6}{name:<21}{compared['figures'][name]:>12,.2f}  {share}")
    return shown
