"""The entry of `python -m headrace_service.openai`.

Has SIGUSR1 write the event loop's stack to stderr, gRPC's fork handlers switched off, its core
log errors alone, and no garbage looked for among imports, as the entry of `headrace_service` has.
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
from headrace_service.openai.door import Door  # noqa: E402

gc.freeze()
gc.enable()
sys.exit(main(Door))
