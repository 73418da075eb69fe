"""`python -m headrace_telemetry`: see `main`.

It gives way before anything is loaded: where cores are short, tokens go first, at start and later. Its imports take a second of CPU while the server starts.
"""

import os
import sys

os.nice(5)

from headrace_telemetry.main import main  # noqa: E402  # loading is what it gives way with

sys.exit(main())
