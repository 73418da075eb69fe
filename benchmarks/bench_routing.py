"""What it costs a service to choose an engine, by how many engines it knows.

A router as the service has it, over engines that report a load each, is asked for prompts of mixed
traffic: shared beginnings of several tenants, conversations behind one system prompt, prompts that
nobody shares. Times are CPU time of this process for one choice, keys of the prompt included; what
a service does besides (the question to the engine, the request) is `bench_front`'s. `calm` engines
wait for nothing, so that the first in a prompt's order nearly always takes it; `busy` ones have
random waits, so that engines are compared each time.

    python -m benchmarks.bench_routing --json benchmarks/results/routing.json
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import random
import time

import numpy as np

from benchmarks import figures
from headrace_service.engines.routing.engine_load import EngineLoad, LoadReport
from headrace_service.engines.routing.router import Router, RoutingKey

_COUNTS = (2, 8, 100, 1000, 10_000)
_TENANTS = 20
_RATE = 48_000.0


@dataclasses.dataclass(slots=True)
class _Engine:
    number: int
    load: EngineLoad
    serving: bool = True
    is_reachable: bool = True
    num_open: int = 16


def _keys(rng: np.random.Generator, count: int, prompt_tokens: int) -> list[RoutingKey]:
    """Returns requests: a third each of shared beginnings, of one system prompt, and of neither."""
    half = prompt_tokens // 2
    shared = rng.integers(10, 120_000, (200, half), dtype=np.uint32)
    found = []
    for index in range(count):
        prompt = rng.integers(10, 120_000, prompt_tokens, dtype=np.uint32)
        kind = index % 3
        if kind < 2:
            prompt[:half] = shared[rng.integers(1, 200) if kind == 0 else 0]
        found.append(RoutingKey(prompt, b"", f"tenant {rng.integers(_TENANTS)}" if kind == 0 else ""))
    return found


def measure(num_engines: int, busy: bool, prompt_tokens: int, choices: int) -> float:
    """Returns microseconds of CPU time that one choice takes."""
    rng = random.Random(0)
    engines = [_Engine(number, EngineLoad()) for number in rng.sample(range(1 << 20), num_engines)]
    for engine in engines:
        waiting = rng.randrange(20_000) if busy else 0
        engine.load.reported(LoadReport(waiting, _RATE, 16, 256, 4.0), 16, 0.0)
    # The clock stands: what was reported keeps waiting.
    router: Router[_Engine] = Router(lambda: 0.0)
    router.set_engines(engines)
    keys = _keys(np.random.default_rng(0), 2 * choices, prompt_tokens)
    for key in keys[:choices]:
        router.choose(key)
    # What was sent before would wait for ever.
    for engine in engines:
        waiting = rng.randrange(20_000) if busy else 0
        engine.load.reported(LoadReport(waiting, _RATE if busy else 1e9, 16, 256, 4.0), 16, 0.0)
    began_s = time.process_time()
    for key in keys[choices:]:
        router.choose(key)
    return (time.process_time() - began_s) / choices * 1e6


def main() -> None:
    """Measures, prints a table, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--choices", type=int, default=3000, help="choices that are timed, after as many that are not")
    parser.add_argument("--runs", type=int, default=5, help="runs of each, of which the least counts")
    parser.add_argument("--prompt-tokens", type=int, default=1024, help="length of the prompts")
    parser.add_argument("--json", type=pathlib.Path, help="file for the results")
    arguments = parser.parse_args()
    results = []
    print("engines   calm us   busy us")
    for count in _COUNTS:
        calm, busy = (
            min(measure(count, busy, arguments.prompt_tokens, arguments.choices) for _ in range(arguments.runs))
            for busy in (False, True)
        )
        results.append({"engines": count, "calm_us": calm, "busy_us": busy})
        print(f"{count:7,} {calm:9.1f} {busy:9.1f}", flush=True)
    settings = {key: value for key, value in vars(arguments).items() if key != "json"}
    figures.report("routing", {**settings, "results": results}, arguments.json)


if __name__ == "__main__":
    main()
