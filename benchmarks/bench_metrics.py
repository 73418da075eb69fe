"""What figures cost the telemetry process.

It measures microseconds for each generation, call and step, and milliseconds for each scrape.

Usage: python -m benchmarks.bench_metrics [--repeats 5] [--json FILE]

Drives the sink of metrics with facts that lie ready, in one process, without sockets; the smallest
of several repeats is reported, as others share the machine. Steps come as a backend
reports them: some dozens between two ticks.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import time
from collections.abc import Callable

import numpy as np
from opentelemetry.sdk.metrics.export import MetricsData

from headrace_facts import facts, step_records
from headrace_telemetry.config import TelemetryConfig
from headrace_telemetry.counts import ExportCounts
from headrace_telemetry.metrics import Metrics, exposition

ENGINE = "0123456789abcdef"
SERVICE = facts.Hello("service", "service-0", "s", "0", 1, 0)
BACKEND = facts.Hello("backend", "backend-0", ENGINE, "0", 2, 0)
GENERATIONS = 20_000
STEPS = 50_000


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    runs = [measure() for _ in range(options.repeats)]
    best = {name: round(min(run[name] for run in runs), 3) for name in runs[0]}
    for name, value in best.items():
        print(f"{name:32} {value:9.3f}")
    if options.json:
        options.json.write_text(json.dumps(best, indent=1) + "\n")


def measure() -> dict[str, float]:
    """One run over fresh figures."""
    metrics = Metrics(TelemetryConfig(telemetry_socket=pathlib.Path("unused")), ExportCounts())
    sink = metrics.sink
    sink.take(BACKEND, facts.EngineFacts(ENGINE, "m", "cpu", 10**9, 1e9, 1e4, 1e8, 1000, 1e12, 1e14))
    generations = [_generation(number) for number in range(GENERATIONS)]
    calls = [_call(generation) for generation in generations]
    result = {
        "us_per_generation": _us(lambda: [sink.generation(SERVICE, one, None) for one in generations], GENERATIONS),
        "us_per_exported_generation": _us(
            lambda: [sink.generation(SERVICE, one, "head") for one in generations], GENERATIONS
        ),
        "us_per_call": _us(lambda: [sink.take(SERVICE, call) for call in calls], GENERATIONS),
    }
    for number, between in enumerate((1, 25, 250)):
        parts = [facts.Steps(f"{ENGINE}-{number}", 0, part) for part in _step_parts(between)]
        result[f"us_per_step_{between}_a_tick"] = _us(functools.partial(_tell, metrics, parts), STEPS)
    snapshot: list[MetricsData] = []
    result["ms_per_snapshot"] = _us(lambda: snapshot.append(metrics.snapshot()), 1000)
    result["ms_per_scrape"] = _us(lambda: metrics.render(exposition.OPENMETRICS), 1000)
    return result


def _tell(metrics: Metrics, parts: list[facts.Steps]) -> None:
    for steps in parts:
        metrics.sink.take(BACKEND, steps)
        metrics.sink.tick(0)


def _us(work: Callable[[], object], count: int) -> float:
    """Microseconds of CPU time per unit."""
    began_ns = time.process_time_ns()
    work()
    return (time.process_time_ns() - began_ns) / count / 1000


def _generation(number: int) -> facts.Generation:
    span = facts.SpanContext(f"{number + 1:032x}", f"{number + 1:016x}", sampled=True)
    return facts.Generation(
        f"r{number}",
        "m",
        "1",
        "chat",
        "generate",
        0,
        0,
        2_000_000_000 + number * 1000,
        50_000_000,
        100,
        64,
        20,
        ["stop"],
        ledger={"queued": 1_000_000},
        span=span,
    )


def _call(generation: facts.Generation) -> facts.CallEnded:
    return facts.CallEnded(
        "headrace.v1.InferenceService/Generate", "OK", 0, 0, generation.end_ns, generation.request_id, generation.span
    )


def _step_parts(between: int) -> list[bytes]:
    records = np.zeros(STEPS, step_records.RECORD)
    records["step_id"] = np.arange(1, STEPS + 1)
    records["started_at_ns"] = np.arange(STEPS) * 5_000_000
    records["finished_at_ns"] = records["started_at_ns"] + 4_000_000
    records["settled_at_ns"] = records["finished_at_ns"]
    records["num_decodes"] = records["num_sequences"] = records["num_samples"] = 64
    records["num_prefill_tokens"][::10] = 256
    return [records[begin : begin + between].tobytes() for begin in range(0, STEPS, between)]


if __name__ == "__main__":
    main()
