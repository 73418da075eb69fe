"""`python -m headrace_backend.worker`: see `main`."""

import sys

from headrace_backend.worker.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
