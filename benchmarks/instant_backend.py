"""The real backend with a worker that computes nothing (`instant_worker`).

    python -m benchmarks.instant_backend STEP_MS --config-json FILE

SIGUSR1 has it tell nobody of its steps, as if it had no telemetry, and SIGUSR2 as before: so that
one process can be measured both ways.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType

from headrace_backend.engine.step_log import StepLog
from headrace_backend.server import main as backend
from headrace_backend.server.lifetime import die_with_parent
from headrace_backend.server.telemetry import new_step_log


def switched_step_log(clock: Callable[[], int]) -> StepLog:
    """The log of a backend, silenced and woken by signals to this process.

    `clock` is the engine's.
    """
    steps = new_step_log(clock)
    before = (False, False)

    def silence(number: int, frame: FrameType | None) -> None:
        nonlocal before
        before = (steps.tells or before[0], steps.keeps_records or before[1])
        steps.tells = steps.keeps_records = False

    def tell(number: int, frame: FrameType | None) -> None:
        steps.tells, steps.keeps_records = before

    signal.signal(signal.SIGUSR1, silence)
    signal.signal(signal.SIGUSR2, tell)
    return steps


if __name__ == "__main__":
    die_with_parent()
    # The backend's own program, but for who may silence its steps.
    backend.new_step_log = switched_step_log  # type: ignore[attr-defined]
    worker = (sys.executable, "-m", "benchmarks.instant_worker", "--step-ms", sys.argv[1])
    sys.exit(backend.main(sys.argv[2:], worker_command=worker))
