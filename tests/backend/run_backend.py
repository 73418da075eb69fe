"""A backend process whose worker is a script beside this one, and which can be broken.

Its command line is `run_backend.py CONFIG FAULT_FOLDER WORKER WORKER_ARGUMENT...`.

A file `raise` in FAULT_FOLDER makes the engine's planning fail, a file `stuck` makes it plan
nothing. A file `small-ring` that is there at the start has plans cross a ring of so many bytes as
are its text, of which the engine does not know.
"""

from __future__ import annotations

import pathlib
import sys

from headrace_backend.engine.engine import Engine
from headrace_backend.server.lifetime import die_with_parent
from headrace_backend.server.main import main
from headrace_backend.server.workers import worker_group
from headrace_backend.step.plan import StepPlan


def break_engine(folder: pathlib.Path) -> None:
    own_plan = Engine.plan

    def plan(engine: Engine) -> StepPlan | None:
        if (folder / "raise").exists():
            raise RuntimeError("planted")
        return None if (folder / "stuck").exists() else own_plan(engine)

    Engine.plan = plan  # type: ignore[method-assign]


def shrink_ring(folder: pathlib.Path) -> None:
    if (folder / "small-ring").exists():
        size = int((folder / "small-ring").read_text())
        worker_group.plan_ring_bytes = lambda launch: size
        worker_group.WorkerGroup.max_plan_bytes = 1 << 30  # type: ignore[assignment,method-assign]


if __name__ == "__main__":
    die_with_parent()
    break_engine(pathlib.Path(sys.argv[2]))
    shrink_ring(pathlib.Path(sys.argv[2]))
    worker = str(pathlib.Path(__file__).with_name(sys.argv[3]))
    sys.exit(main(["--config-json", sys.argv[1]], worker_command=(sys.executable, worker, *sys.argv[4:])))
