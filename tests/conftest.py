"""What all tests need of their process."""

from __future__ import annotations

import os
import pathlib
import signal

# Without a card Triton's kernels run in its interpreter. Triton decides when a kernel is defined, so this comes before any import of one.
if not pathlib.Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure() -> None:
    """Ctrl-C as in a terminal. A shell starts background jobs with SIGINT ignored, children inherit that, and tests that press Ctrl-C would wait forever."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
