"""What every benchmark says of itself: machine, commit, code, date, command; its JSON's path."""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import os
import pathlib
import platform
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
_PRODUCT = ("service", "backend", "both_sides", "kernels")
_PACKAGES = (*_PRODUCT, "protos/python", "clients/python", ".")


def cpu_name() -> str:
    """The processor as it calls itself."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str:
    try:
        return subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def files_digest(paths: Iterable[pathlib.Path]) -> str:
    """Digest of files of this tree, with their names."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(f"{path.relative_to(ROOT)} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def product_digest() -> str:
    """Digest of the code that `environment` has processes import.

    Two runs with the same one measured the same code, whatever commits they name.
    """
    return files_digest(path for folder in _PRODUCT for path in (ROOT / folder).rglob("*.py"))


def provenance(git: str = "") -> dict[str, Any]:
    """Machine, software and command of this run.

    `git` names the commit where the tree has no history.
    """
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "git": git or _commit(),
        "code": product_digest()[:12],
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "command": " ".join([f"python -m benchmarks.{pathlib.Path(sys.argv[0]).stem}", *sys.argv[1:]]),
    }


def environment() -> dict[str, str]:
    """The environment of processes that a benchmark starts.

    It is ours, and our packages can be imported from the tree.
    """
    path = [*(str(ROOT / package) for package in _PACKAGES), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the values lie; nan for none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def write_json(value: object, path: pathlib.Path | None) -> None:
    """Writes a result where it is wanted."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value, indent=2) + "\n")


def report(name: str, figures: dict[str, Any], path: pathlib.Path | None) -> None:
    """Prints one JSON line, and writes it with its provenance to `path` if given."""
    record = {"name": name, **figures, **provenance()}
    print(json.dumps(record), flush=True)
    write_json(record, path)
