"""How many random examples a test of properties draws.

A third of them in everyday runs; all where THOROUGH is 1, as in the slow part of CI.
"""

from __future__ import annotations

import os

_THOROUGH = os.environ.get("THOROUGH") == "1"


def examples(count: int) -> int:
    """Returns the number to draw, of `count` in a thorough run; at least 10 of them."""
    return count if _THOROUGH else min(count, max(10, count // 3))
