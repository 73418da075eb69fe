"""Becomes another program that the kernel ends when its parent dies.

Run as a file: `python launch.py PARENT_PID PROGRAM ARGUMENT...`, which `tied` makes.

Owns the tie between the supervisor and its processes: after `kill -9` of the supervisor nothing can
run on. The signal is set before the program is loaded (it outlasts exec), and the parent is looked
at once more afterwards, in case it died in between. Standard library only, started with -S -E: it
costs about 10 ms.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def tied(program: Sequence[str]) -> list[str]:
    """Returns the command line of a program that ends with this process."""
    return [sys.executable, "-S", "-E", __file__, str(os.getpid()), *program]


def main(arguments: list[str]) -> None:
    """Ties this process to its parent, then turns into the program."""
    parent, program = int(arguments[0]), arguments[1:]
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:
        sys.exit("the process that started this one is gone")
    os.execv(program[0], program)


if __name__ == "__main__":
    main(sys.argv[1:])
