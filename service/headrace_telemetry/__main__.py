"""The entry of `python -m headrace_telemetry`.

Has SIGUSR1 write the event loop's stack to stderr, then hands over to `main`.

It gives way before anything is loaded: where cores are short, tokens go first, at start and later.
Its imports take a second of CPU while the server starts.
"""

import faulthandler
import os
import signal
import sys

faulthandler.register(signal.SIGUSR1, all_threads=False)
os.nice(5)

from headrace_telemetry.main import main  # noqa: E402  # loading is what it gives way with

sys.exit(main())
