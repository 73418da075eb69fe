"""A backend process whose worker is `fake_worker.py`: `run_backend.py CONFIG WORKER_ARGUMENT...`."""

from __future__ import annotations

import pathlib
import sys

from headrace_backend.server.lifetime import die_with_parent
from headrace_backend.server.main import main

if __name__ == "__main__":
    die_with_parent()
    fake_worker = str(pathlib.Path(__file__).with_name("fake_worker.py"))
    sys.exit(main(["--config-json", sys.argv[1]], worker_command=(sys.executable, fake_worker, *sys.argv[2:])))
