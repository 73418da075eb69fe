"""The real backend with a worker that computes nothing (`instant_worker`): `python -m benchmarks.instant_backend STEP_MS --config-json FILE`."""

from __future__ import annotations

import sys

from headrace_backend.server.lifetime import die_with_parent
from headrace_backend.server.main import main

if __name__ == "__main__":
    die_with_parent()
    worker = (sys.executable, "-m", "benchmarks.instant_worker", "--step-ms", sys.argv[1])
    sys.exit(main(sys.argv[2:], worker_command=worker))
