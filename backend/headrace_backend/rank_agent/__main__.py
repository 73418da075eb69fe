"""Entry of the agent's process: `python -m headrace_backend.rank_agent`."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys

if __name__ == "__main__":
    # Not the stacks of other threads, which may be running: reading frames that change can end a
    # process.
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    # gRPC's core writes lines about each connection that ends, if it is not asked for errors alone.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    # Nothing that is imported becomes garbage.
    gc.disable()
    from headrace_backend.rank_agent.main import main

    gc.freeze()
    gc.enable()
    sys.exit(main(sys.argv[1:]))
