"""What every benchmark says about itself: machine, commit, date, command; and where its JSON goes."""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import platform
import subprocess
import sys
from typing import Any


def _cpu_name() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str:
    try:
        return subprocess.run(
            ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def provenance() -> dict[str, Any]:
    """Machine, software and command of this run."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "git": _commit(),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "command": " ".join([f"python -m benchmarks.{pathlib.Path(sys.argv[0]).stem}", *sys.argv[1:]]),
    }


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the values lie; nan for none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def report(name: str, figures: dict[str, Any], path: pathlib.Path | None) -> None:
    """Prints one JSON line, and writes it with its provenance to `path` if given."""
    record = {"name": name, **figures, **provenance()}
    print(json.dumps(record), flush=True)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=2) + "\n")
