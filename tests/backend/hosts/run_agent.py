"""An agent of another host whose workers are a script of tests.

Its command line is `run_agent.py CONFIG WORKER WORKER_ARGUMENT...`.
"""

from __future__ import annotations

import pathlib
import sys

from headrace_backend.rank_agent.main import main
from headrace_backend.server.lifetime import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    worker = str(pathlib.Path(__file__).parents[1] / sys.argv[2])
    sys.exit(main(["--config-json", sys.argv[1]], worker_command=(sys.executable, worker, *sys.argv[3:])))
