"""`python -m headrace_service`: see `main`."""

import sys

from headrace_service.main import main

sys.exit(main())
