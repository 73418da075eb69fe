"""The `headrace` script's first module: Ctrl-C ends it in one line from the first moment on.

What the commands import takes 0.3 s of CPU, on a busy machine seconds, and a KeyboardInterrupt in
the midst of it would be a traceback. It is a package of its own because `headrace` itself imports
gRPC. Commands get Python's own handler back before one runs.

Where the server is installed beside the client, `headrace serve` has its first backend begin before
those imports too, which takes seconds.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
from types import FrameType

_EXIT_INTERRUPTED = 130


def _end(_signal: int, _frame: FrameType | None) -> None:
    """Ends a process that has begun nothing yet."""
    os.write(2, b"interrupted\n")
    os._exit(_EXIT_INTERRUPTED)


_before = signal.getsignal(signal.SIGINT)
# Who starts a command in the background may have had it ignore Ctrl-C.
if _before is signal.default_int_handler:
    signal.signal(signal.SIGINT, _end)

if sys.argv[1:2] == ["serve"]:
    # The command itself says what is wrong with an installation.
    with contextlib.suppress(Exception):
        importlib.import_module("headrace_supervisor.processes.early_backend").begin(sys.argv[1:])

# After the handler, which is for these imports.
from headrace.cli import main as _run  # noqa: E402


def main() -> None:
    """Runs the command line."""
    signal.signal(signal.SIGINT, _before)
    _run()
