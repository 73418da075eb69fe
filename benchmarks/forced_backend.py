"""The real backend with a worker whose drafts are right with a set probability (`forced_worker`).

python -m benchmarks.forced_backend free|own --config-json FILE
"""

from __future__ import annotations

import sys

from headrace_backend.server import main as backend
from headrace_backend.server.lifetime import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    command = (sys.executable, "-m", "benchmarks.forced_worker", sys.argv[1])
    sys.exit(backend.main(sys.argv[2:], worker_command=command))
