"""How OpenMP's threads wait for each other on a CPU: briefly, then asleep.

Owns the variable that says so. No torch, since it counts only before torch is loaded.
"""

from __future__ import annotations

import os

_SPIN_COUNT = "1000"


def bound_spinning() -> None:
    """Has OpenMP's threads sleep soon when they wait; must happen before torch loads the library.

    By default they spin for milliseconds. That is the fastest on idle cores (3 threads of 4, demo
    model: 3.2 ms a step against 3.7), but where other processes want the cores too, each spins away
    the time that the one it waits for needs: 184 to 837 ms a step against 11 to 13, and 150 s of
    CPU for a `headrace quantize` of the demo model against 60. Whoever sets the variable decides.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
