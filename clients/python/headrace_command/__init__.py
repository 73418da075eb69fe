"""The `headrace` script's first module: Ctrl-C ends it in one line from the first moment on.

What the commands import takes 0.3 s of CPU, on a busy machine seconds, and a KeyboardInterrupt in
the midst of it would be a traceback. It is a package of its own because `headrace` itself imports
gRPC. Commands get Python's own handler back before one runs.
"""

from __future__ import annotations

import os
import signal
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

# After the handler, which is for these imports.
from headrace.cli import main as _run  # noqa: E402


def main() -> None:
    """Runs the command line."""
    signal.signal(signal.SIGINT, _before)
    _run()
