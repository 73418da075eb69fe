"""What this process has open, for tests of what must be closed.

Other tests of the process may have left descriptors that go at any moment, so a test asks whether
there are new ones; and threads that open some for a moment, so it asks until they are gone.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time

# Longer than a thread of another test has a file open, on a machine that is busy.
_PATIENCE_S = 10.0


def open_descriptors() -> dict[str, str]:
    """Numbers of all descriptors and what each is of, but for that of this look itself."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found[number] = os.readlink(f"/proc/self/fd/{number}")
    return found


def settled_descriptors() -> dict[str, str]:
    """Returns `open_descriptors`, once what nobody holds any more is closed."""
    gc.collect()
    return open_descriptors()


def stay_open(before: dict[str, str]) -> dict[str, str]:
    """Descriptors whose numbers were free before, and that do not go."""
    end = time.monotonic() + _PATIENCE_S
    while left := {number: of for number, of in open_descriptors().items() if number not in before}:
        if time.monotonic() > end:
            break
        time.sleep(0.01)
    return left
