"""What telemetry costs, part by part, with the parts that are not measured left out.

    python -m benchmarks.bench_telemetry --part engine --json FILE

`engine` and `service` are CPU times of our own code, in minutes. `serving` is whole servers beside each other (`telemetry_serving`), and takes a quarter of an hour.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from benchmarks import figures, telemetry_engine, telemetry_service, telemetry_serving

PARTS = ("engine", "service", "serving")


def _measure(part: str, options: argparse.Namespace) -> Any:
    if part == "serving":
        return telemetry_serving.run(options.loads.split(","), options.rounds, options.seconds)
    with _one_core():
        return telemetry_engine.run() if part == "engine" else telemetry_service.run()


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
    parser.add_argument("--rounds", type=int, default=20, help="of serving: turns of every kind of server")
    parser.add_argument("--seconds", type=float, default=3.0, help="of serving: length of a turn's window")
    parser.add_argument("--json", type=pathlib.Path, help="file for the results")
    options = parser.parse_args()
    if options.rounds < 1 or options.seconds <= 0:
        parser.error("--rounds and --seconds must be more than 0")
    if unknown := set(options.loads.split(",")) - set(telemetry_serving.LOADS):
        parser.error(f"--loads: {', '.join(sorted(unknown))} is none of {loads}")
    results = {part: _measure(part, options) for part in options.part or PARTS[:2]}
    figures.report("telemetry", results, options.json)


if __name__ == "__main__":
    main()
