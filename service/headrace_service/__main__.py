"""The entry of `python -m headrace_service`.

Has SIGUSR1 write the event loop's stack to stderr, then hands over to `main`.

Nothing that is imported becomes garbage: looking for it among modules took a sixth of the imports'
time, and is left out then and later.

gRPC's fork handlers are switched off before gRPC is loaded: the one program that this process
starts (the chat template's helper) execs at once and never uses gRPC, and with handlers each start
writes a warning to stderr. gRPC's core logs errors alone: by itself it writes a line for each
handshake that fails, so that whoever reaches the port could fill a disk.
"""

import faulthandler
import gc
import os
import signal
import sys

os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
faulthandler.register(signal.SIGUSR1, all_threads=False)
gc.disable()

from headrace_service.main import main  # noqa: E402  # the variables are read when gRPC is loaded
from headrace_service.server import Service  # noqa: E402

gc.freeze()
gc.enable()
sys.exit(main(Service))
