"""How many random examples a test of properties draws.

A fifth of them in everyday runs; all where THOROUGH is 1, as in the slow part of CI.
"""

from __future__ import annotations

import os

_THOROUGH = os.environ.get("THOROUGH") == "1"


def examples(count: int, least: int = 10) -> int:
    """Returns the number to draw, of `count` in a thorough run; at least `least` of them."""
    return count if _THOROUGH else min(count, max(least, count // 5))
