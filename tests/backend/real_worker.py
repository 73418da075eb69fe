"""The worker of a server, for a backend of `run_backend`."""

import sys

from headrace_backend.worker.lifetime import end_process
from headrace_backend.worker.main import main

if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
