"""What telemetry costs in instructions of the processor, which a busy machine does not change.

The code of `telemetry_service` and `telemetry_engine` runs under valgrind, which counts them.

Each mode runs in two processes of its own, for fewer and for more tokens: their difference is what
tokens take, without the start. Instructions are no time: those that wait for memory take longer.

    python -m benchmarks.bench_telemetry --part instructions
"""

from __future__ import annotations

import asyncio
import gc
import os
import re
import shutil
import subprocess
import sys
from typing import Any

from benchmarks import telemetry_engine, telemetry_service

# Turns of `telemetry_service.generate_turn`, of 2,000 tokens each, and of 40 steps of 64 rows.
_FEW, _MANY = 5, 15
_ROWS = 64
_COUNT = re.compile(r"I\s+refs:\s+([\d,]+)")
_TOKENS = re.compile(r"^tokens (\d+)$", re.MULTILINE)


def run() -> dict[str, Any]:
    """Instructions per token, by way and mode, and what a mode adds to the one before.

    Raises:
        SystemExit: valgrind is not there.
    """
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        raise SystemExit("bench_telemetry: --part instructions needs valgrind, which counts them; it is not in PATH")
    service, engine = telemetry_service.MODES, tuple(mode.name for mode in telemetry_engine.MODES)
    return {
        "service, the writer waits": _steps({mode: _per_token(valgrind, "service", mode, "0") for mode in service}),
        "service, more always waits": _steps({mode: _per_token(valgrind, "service", mode, "1") for mode in service}),
        "engine, 64 rows": _steps({mode: _per_token(valgrind, "engine", mode, "0") for mode in engine}),
    }


def _steps(by_mode: dict[str, float]) -> dict[str, float]:
    modes = list(by_mode)
    added = {f"{b} - {a}": by_mode[b] - by_mode[a] for a, b in zip(modes, modes[1:], strict=False)}
    return {name: round(value, 1) for name, value in (by_mode | added).items()}


def _per_token(valgrind: str, *way: str) -> float:
    few, many = (counted(_output(valgrind, *way, str(turns))) for turns in (_FEW, _MANY))
    return (many[0] - few[0]) / (many[1] - few[1])


def _output(valgrind: str, *arguments: str) -> str:
    command = (valgrind, "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null", sys.executable)
    ended = subprocess.run(
        [*command, "-m", __name__, *arguments],
        env=os.environ | {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return ended.stdout + ended.stderr


def counted(output: str) -> tuple[int, int]:
    """Instructions and tokens that a run reports."""
    instructions, tokens = _COUNT.search(output), _TOKENS.search(output)
    assert instructions is not None and tokens is not None, output[-2000:]
    return int(instructions[1].replace(",", "")), int(tokens[1])


async def _service(mode: str, lags: bool, num_turns: int) -> int:
    """Tokens of so many turns."""
    num_tokens = 2000
    for _ in range(num_turns):
        telemetry_service.generate_turn(mode, 1, lags, num_tokens)
    return num_turns * num_tokens


def _engine(mode: str, num_turns: int) -> int:
    (chosen,) = (each for each in telemetry_engine.MODES if each.name == mode)
    turns = telemetry_engine.Turns(chosen, _ROWS)
    for _ in range(num_turns):
        turns.turn(telemetry_engine.STEPS_PER_TURN)
    return turns.num_tokens


def main(way: str, mode: str, lags: str, num_turns: str) -> None:
    """What valgrind runs."""
    # The writer wants to know its task.
    service = way == "service"
    tokens = asyncio.run(_service(mode, lags == "1", int(num_turns))) if service else _engine(mode, int(num_turns))
    print(f"tokens {tokens}")


if __name__ == "__main__":
    gc.disable()
    main(*sys.argv[1:])
