"""How long this process lives already, its interpreter and imports included.

Owns the reading of the moment at which the kernel made it: the first line of a module runs tenths
of a second later, and those belong to a start too.
"""

from __future__ import annotations

import os
import pathlib
import time
from typing import Final

# Of proc(5): clock ticks from the machine's start to the process's, counted behind its name.
_START_FIELD: Final = 22
_FIELDS_BEFORE: Final = 3


def process_age_s(stat: pathlib.Path = pathlib.Path("/proc/self/stat")) -> float:
    """Returns the seconds since the kernel made this process, to a hundredth.

    A program that replaced another in the same process (`exec`) has that one's time too.

    Args:
        stat: What the kernel says of the process.
    """
    # The name may hold spaces and parentheses.
    fields = stat.read_text().rpartition(")")[2].split()
    begun_s = int(fields[_START_FIELD - _FIELDS_BEFORE]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - begun_s
