"""The entry of `python -m headrace_telemetry`.

Has SIGUSR1 write the event loop's stack to stderr, then hands over to `main`.

It gives way before anything is loaded: where cores are short, tokens go first, at start and later.
Its imports take half a second of CPU while the server starts, and a sixth more where garbage is
looked for among them, of which there is none.
"""

import faulthandler
import gc
import os
import signal
import sys

faulthandler.register(signal.SIGUSR1, all_threads=False)
# By itself gRPC's core writes a line for each handshake that fails; the log says why, once.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
os.nice(5)
gc.disable()

from headrace_telemetry.main import main  # noqa: E402  # loading is what it gives way with

gc.freeze()
gc.enable()
sys.exit(main())
