"""What telemetry costs, part by part, with the parts that are not measured left out.

    python -m benchmarks.bench_telemetry --part engine --json FILE

`engine` and `service` are CPU times of our own code, in minutes, `recorded` what of both a recorded
token costs, ten times over, `instructions` the same in a unit that other load does not change
(needs valgrind). `live` is one server that is switched while it runs (`telemetry_live`), `serving`
whole servers beside each other (`telemetry_serving`), which takes a quarter of an hour.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import (
    figures,
    telemetry_engine,
    telemetry_instructions,
    telemetry_live,
    telemetry_recorded,
    telemetry_service,
    telemetry_serving,
)

PARTS = ("engine", "service", "recorded", "instructions", "live", "serving")
_OWN_CODE: dict[str, Callable[[], Any]] = {
    "engine": telemetry_engine.run,
    "service": telemetry_service.run,
    "recorded": telemetry_recorded.run,
    "instructions": telemetry_instructions.run,
}


def _measure(part: str, options: argparse.Namespace) -> Any:
    if part == "live":
        return telemetry_live.run(options.rounds, options.seconds, tuple(options.kinds.split(",")))
    if part == "serving":
        return telemetry_serving.run(options.loads.split(","), options.rounds, options.seconds)
    with _one_core():
        return _OWN_CODE[part]()


@contextlib.contextmanager
def _one_core() -> Iterator[None]:
    """Keeps this process where it is, as long as it is what is measured."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="what to measure; default: engine, service")
    loads = ",".join(telemetry_serving.LOADS)
    parser.add_argument("--loads", default=loads, help=f"of serving: some of {loads}")
    kinds = ",".join(telemetry_live.KINDS)
    parser.add_argument("--kinds", default=kinds, help=f"of live: {telemetry_live.BASE} and some of {kinds}")
    parser.add_argument("--rounds", type=int, default=20, help="of live and serving: turns of every kind")
    parser.add_argument("--seconds", type=float, default=3.0, help="of live and serving: length of a turn's window")
    parser.add_argument("--json", type=pathlib.Path, help="file for the results")
    options = parser.parse_args()
    if options.rounds < 1 or options.seconds <= 0:
        parser.error("--rounds and --seconds must be more than 0")
    if unknown := set(options.loads.split(",")) - set(telemetry_serving.LOADS):
        parser.error(f"--loads: {', '.join(sorted(unknown))} is none of {loads}")
    asked = set(options.kinds.split(","))
    if asked - set(telemetry_live.KINDS) or telemetry_live.BASE not in asked:
        parser.error(f"--kinds: must be {telemetry_live.BASE} and some of {kinds}")
    results = {part: _measure(part, options) for part in options.part or PARTS[:2]}
    figures.report("telemetry", results, options.json)


if __name__ == "__main__":
    main()
