"""What this process has open, for tests of what must be closed.

Other tests of the process may have left descriptors that go at any moment, so a test asks whether
there are new ones.
"""

from __future__ import annotations

import gc
import os


def open_descriptors() -> set[str]:
    """Numbers of all descriptors, that of this look included."""
    return set(os.listdir("/proc/self/fd"))


def settled_descriptors() -> set[str]:
    """Returns `descriptors`, once what nobody holds any more is closed."""
    gc.collect()
    return open_descriptors()
