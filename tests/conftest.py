"""What all tests need of their process."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Ctrl-C as in a terminal. A shell starts background jobs with SIGINT ignored, children inherit that, and tests that press Ctrl-C would wait forever."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
