"""`python -m headrace_telemetry`: see `main`."""

import sys

from headrace_telemetry.main import main

sys.exit(main())
