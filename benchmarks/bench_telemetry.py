"""What telemetry costs, part by part, with the parts that are not measured left out.

python -m benchmarks.bench_telemetry --part engine --json FILE
"""

from __future__ import annotations

import argparse
import os
import pathlib
from collections.abc import Callable
from typing import Any

from benchmarks import figures, telemetry_engine, telemetry_service

PARTS: dict[str, Callable[[], Any]] = {"engine": telemetry_engine.run, "service": telemetry_service.run}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=sorted(PARTS), action="append", help="what to measure; default: all")
    parser.add_argument("--json", type=pathlib.Path, help="file for the results")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    results = {part: PARTS[part]() for part in arguments.part or sorted(PARTS)}
    figures.report("telemetry", results, arguments.json)


if __name__ == "__main__":
    main()
