"""What a recorded token costs in all, in the engine and in a service, measured again and again beside a loop of known work.

The limit is one number for two processes, and this machine's speed changes by half between minutes. So both parts are measured close to each other, and before and after them how long `_ITERATIONS` turns of a loop take; costs are given in
microseconds and in turns of that loop, which are the same on a slow minute.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from typing import Any

from benchmarks import telemetry_engine, telemetry_service
from benchmarks.paired import interval

_ITERATIONS = 100_000
_ROUNDS = 60
_ROWS = 64
_TURNS = 30
_WAYS = {"the writer waits": False, "more always waits": True}


def calibration_us() -> float:
    """Microseconds of CPU time for a turn of a loop that is always the same."""
    total = 0
    began_ns = time.thread_time_ns()
    for number in range(_ITERATIONS):
        total += number * number & 7
    assert total > 0
    return (time.thread_time_ns() - began_ns) / 1e3 / _ITERATIONS


def run(repeats: int = 10) -> dict[str, Any]:
    """Medians over all repeats with their 95% intervals: us per recorded token by part, in all, and in turns of the loop."""
    samples = [asyncio.run(_sample()) for _ in range(repeats)]
    return {name: _summary([sample[name] for sample in samples]) for name in samples[0]} | {"repeats": repeats}


async def _sample() -> dict[str, float]:
    before_us = calibration_us()
    service = {way: _difference(lags) for way, lags in _WAYS.items()}
    told = telemetry_engine.measure(_ROWS, _TURNS)
    loop_us = (before_us + calibration_us()) / 2
    engine_us = told["recorded_beyond_on_us"][0]
    result = {"loop_us": loop_us, "engine_us": engine_us, "telling_steps_us": told["on_beyond_off_us"][0]}
    for way, service_us in service.items():
        total_us = service_us + engine_us
        result |= {f"service_us, {way}": service_us, f"total_us, {way}": total_us}
        result[f"total_in_loops, {way}"] = total_us / loop_us
    return result


def _difference(lags: bool) -> float:
    """Microseconds that recording adds to a token of Generate, one a message."""
    rounds = [
        {mode: telemetry_service.generate_turn(mode, 1, lags) for mode in random.sample(("off", "recorded"), 2)}
        for _ in range(_ROUNDS)
    ]
    return statistics.median(one["recorded"] - one["off"] for one in rounds)


def _summary(values: list[float]) -> dict[str, float]:
    median, low, high = interval(values)
    return {"median": round(median, 4), "low": round(low, 4), "high": round(high, 4), "least": round(min(values), 4)}
