"""Asks a process of its own to compile kernels for a card, because Triton decides at import whether it interprets or compiles."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

_ROOT = pathlib.Path(__file__).parents[2]
_ROOMS = ("service", "backend", "kernels", "protos/python", "clients/python", ".")


def compiled(module: str, *arguments: str | int) -> list[dict[str, Any]]:
    """The resources of the kernels that `python -m tests.support.<module>` compiles (see `compiled_kernels.resources`)."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(str(_ROOT / room) for room in _ROOMS)
    environment["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, "-m", f"tests.support.{module}", *map(str, arguments)]
    result = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines()]
