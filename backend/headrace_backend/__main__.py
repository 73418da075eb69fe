"""Entry of the backend process: `python -m headrace_backend`.

It ties the process to its parent, starts as many workers early as the command line says, has
SIGUSR1 write the event loop's stack to stderr, imports the server, waits for its arguments where it
was begun before they were known, then hands over to the server.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys

from headrace_backend.server.early_arguments import known_arguments
from headrace_backend.server.lifetime import ExitCode, die_with_parent
from headrace_backend.server.workers.early_workers import EarlyWorkers, wanted

if __name__ == "__main__":
    # First of all: a parent that dies while the imports below run must take this process along.
    if "--outlive-parent" not in sys.argv[1:]:
        die_with_parent()
    early_workers = EarlyWorkers((sys.executable, "-m", "headrace_backend.worker"), wanted(sys.argv[1:]))
    # Not those of other threads, which may be running: reading frames that change can end a
    # process.
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    # By itself gRPC's core writes a line for each handshake that fails.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    # Nothing that is imported becomes garbage; looking for it took a sixth of the imports' time.
    gc.disable()
    from headrace_backend.server.main import main

    gc.freeze()
    gc.enable()
    arguments = known_arguments(sys.argv[1:])
    if arguments is None:
        early_workers.close()
        sys.exit(ExitCode.OK)
    sys.exit(main(arguments, early_workers=early_workers))
