"""`python -m headrace_service`: see `main`.

gRPC's fork handlers are switched off before gRPC is loaded: the one program that this process starts (the chat template's helper) execs at
once and never uses gRPC, and with handlers each start writes a warning to stderr.
"""

import os
import sys

os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

from headrace_service.main import main  # noqa: E402  # the variable is read when gRPC is loaded

sys.exit(main())
