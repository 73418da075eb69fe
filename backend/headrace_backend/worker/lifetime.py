"""The worker never outlives the process that started it, and ends at once when it has to.

Owns the tie to the parent, the signals that are not the worker's business, and the process's end.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import os
import signal
import sys
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Has the kernel kill this process when its parent ends.

    Raises:
        SystemExit: The parent is gone already.
        OSError: The kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    end_if_orphaned(parent_pid)


def end_if_orphaned(parent_pid: int) -> None:
    """Ends the process if `parent_pid` is not its parent any more.

    The signal alone is not enough: a parent that died before it was asked for sends none.

    Raises:
        SystemExit: Then.
    """
    if os.getppid() != parent_pid:
        raise SystemExit(1)


def arrange_signals() -> None:
    """Leaves Ctrl-C, which the terminal sends to every process, to the supervisor.

    SIGUSR1 writes the main thread's stack to stderr: for a watchdog, before it kills.

    Not those of other threads: they may be running, and reading frames that change has ended a
    worker that had only been stopped (signal 11).
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, all_threads=False)


def end_process(code: int) -> NoReturn:
    """Ends the process.

    What was registered for its end is done; what it made is left to the kernel.

    The interpreter would take the ranks' group apart, and NCCL then waits for every graph that
    holds one of its operations to be gone, and may wait for ranks that are.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
