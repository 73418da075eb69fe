"""What all tests need of their process."""

from __future__ import annotations

import os
import pathlib
import signal

import hypothesis

# Without a card Triton's kernels run in its interpreter. Triton decides when a kernel is defined, so this comes before any import of one.
if not pathlib.Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# How long an example or its data takes says something about the machine only.
hypothesis.settings.register_profile("headrace", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("headrace")


def pytest_configure() -> None:
    """Ctrl-C as in a terminal. A shell starts background jobs with SIGINT ignored, children inherit that, and tests that press Ctrl-C would wait forever."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
