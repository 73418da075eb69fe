"""Times the cases of one file of `benchmarks.kernel_cases`: one line of JSON each.

A process of its own, so that a kernel that breaks the device's context costs its own file only.

python -m benchmarks.kernel_timing attention [--match 256x640]
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import itertools
import json
import statistics
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.graph_timing import clock_seconds, graph_seconds

Case = tuple[Callable[[], object], float, float]

# Data of all copies together: several times the largest L2 cache of these GPUs.
_ROTATED_BYTES = 384 << 20
_MAX_COPIES = 16
# A graph is long enough that its own start does not count.
_LEAST_LAUNCHES = 20


def cases(module: types.ModuleType) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Name and maker of each case of a file, in the order in which they stand there."""
    functions = [
        function
        for name, function in vars(module).items()
        if inspect.isfunction(function) and not name.startswith("_") and function.__module__ == module.__name__
    ]
    for function in functions:
        parameters = inspect.signature(function).parameters.values()
        if any(parameter.default is parameter.empty for parameter in parameters):
            continue
        if inspect.isgeneratorfunction(function):
            yield from ((f"{function.__name__}[{label}]", make) for label, make in function())
        else:
            yield function.__name__, function


def copies(make: Callable[[], Case]) -> tuple[list[Callable[[], object]], float, float]:
    """Launches on fresh data each, as many as it takes to find nothing in a cache.

    Returns them with the bytes and operations of one.
    """
    launches: list[Callable[[], object]] = []
    num_bytes = flops = 0.0
    while not launches or (len(launches) < _MAX_COPIES and len(launches) * num_bytes < _ROTATED_BYTES):
        try:
            launch, num_bytes, flops = make()
        except torch.cuda.OutOfMemoryError:
            if not launches:
                raise
            break
        launches.append(launch)
    return launches, num_bytes, flops


def timed(make: Callable[[], Case]) -> dict[str, Any]:
    """Times one case: the median over graph replays, and the spread."""
    launches, num_bytes, flops = copies(make)
    wanted = max(_LEAST_LAUNCHES, len(launches))
    in_order = list(itertools.islice(itertools.cycle(launches), wanted - wanted % len(launches)))
    seconds = (graph_seconds if torch.cuda.is_available() else clock_seconds)(in_order)
    median = statistics.median(seconds)
    return {
        "us": round(median * 1e6, 3),
        "us_range": [round(min(seconds) * 1e6, 3), round(max(seconds) * 1e6, 3)],
        "bytes": int(num_bytes),
        "flops": int(flops),
        "tb_s": round(num_bytes / median / 1e12, 6),
        "tflop_s": round(flops / median / 1e12, 3),
        # Fewer bytes than the caches hold: the bandwidth is not the memory's.
        "rotated_mib": round(len(launches) * num_bytes / 2**20, 1),
    }


def main() -> None:
    """Prints one line of JSON per case; a case that fails says why and the next one goes on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--match", default="", help="only cases whose name holds this")
    parser.add_argument("--list", action="store_true", help="only names")
    options = parser.parse_args()
    torch.manual_seed(0)
    for name, make in cases(importlib.import_module(f"benchmarks.kernel_cases.{options.file}")):
        if options.match not in name:
            continue
        result: dict[str, Any] = {"case": name}
        if not options.list:
            try:
                result |= timed(make)
            except Exception as error:
                result["error"] = f"{type(error).__name__}: {error}"[:500]
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
