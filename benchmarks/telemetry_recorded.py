"""What a recorded token costs in all, in the engine and in a service.

It is measured again and again beside a loop of known work.

The limit is one number for two processes, and this machine's speed changes by half between minutes.
So both parts are measured close to each other, and before and after them how long a turn of a loop
takes that is always the same; costs are given in microseconds and in turns of that loop.

Neighbours on a machine only ever add to a CPU time. Of many turns of each mode, shorter than a time
slice, the quickest tenth therefore says what the code costs; differences are of these.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import telemetry_engine, telemetry_service
from benchmarks.paired import interval

_ITERATIONS = 10_000
_LOOPS = 100
_ROUNDS = 1000
_OUTPUT_TOKENS = 256
_ROWS = 64
_TURNS = 300
# In eight steps of 64 rows two requests of 256 tokens end.
_STEPS = 8
_QUICKEST = 0.1
_WAYS = {"the writer waits": False, "more always waits": True}


def run(repeats: int = 10) -> dict[str, Any]:
    """Medians over all repeats with their 95% intervals.

    They are us per recorded token by part, in all, and in turns of the loop.
    """
    samples = [asyncio.run(_sample()) for _ in range(repeats)]
    return {name: _summary([sample[name] for sample in samples]) for name in samples[0]} | {"repeats": repeats}


async def _sample() -> dict[str, float]:
    loops_us = [_loop_us() for _ in range(_LOOPS)]
    ways = {way: _service_us(lags) for way, lags in _WAYS.items()}
    times, _ = telemetry_engine.turns_us(_ROWS, _TURNS, _STEPS)
    off_us, on_us, recorded_us = (_quickest(times[name]) for name in ("off", "on", "recorded"))
    loop_us = _quickest(loops_us + [_loop_us() for _ in range(_LOOPS)])
    engine_us = recorded_us - on_us
    result = {"loop_us": loop_us, "engine_off_us": off_us, "engine_us": engine_us, "telling_steps_us": on_us - off_us}
    for way, (service_off_us, service_us) in ways.items():
        result |= {f"service_off_us, {way}": service_off_us, f"service_us, {way}": service_us}
        result |= {f"total_us, {way}": service_us + engine_us}
        result |= {f"total_in_loops, {way}": (service_us + engine_us) / loop_us}
    return result


def _loop_us() -> float:
    """Microseconds of CPU time for a turn of a loop that is always the same."""
    total = 0
    began_ns = time.thread_time_ns()
    for number in range(_ITERATIONS):
        total += number * number & 7
    used_ns = time.thread_time_ns() - began_ns
    assert total > 0
    return used_ns / 1e3 / _ITERATIONS


def _service_us(lags: bool) -> tuple[float, float]:
    """Microseconds of a token of Generate, one a message, without recording, and what that adds."""
    times: dict[str, list[float]] = {"off": [], "recorded": []}
    for _ in range(_ROUNDS):
        for mode in random.sample(sorted(times), 2):
            times[mode].append(telemetry_service.generate_turn(mode, 1, lags, _OUTPUT_TOKENS))
    off_us = _quickest(times["off"])
    return off_us, _quickest(times["recorded"]) - off_us


def _quickest(values: Sequence[float]) -> float:
    return float(np.quantile(values, _QUICKEST))


def _summary(values: list[float]) -> dict[str, float]:
    median, low, high = interval(values)
    return {"median": round(median, 4), "low": round(low, 4), "high": round(high, 4)}
