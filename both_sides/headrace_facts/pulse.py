"""That a process's event loop runs, told to whoever started the process: a byte into a pipe, twice
a second.

Owns the writing end, which arrives as a descriptor on the command line. A loop that hangs writes
nothing, however alive its process looks from outside. What silence means is the listener's
(`headrace_supervisor.processes.hang_watch`). A process that nobody listens to is started without the flag.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
from typing import Final

BEAT_S: Final = 0.5
FLAG: Final = "--pulse-fd"


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Lets the process be started with a pipe."""
    parser.add_argument(
        FLAG, dest="pulse_fd", type=int, metavar="N", help="pipe into which a byte goes while the event loop runs"
    )


def start(descriptor: int | None) -> None:
    """Has the running event loop write from now on, to its end; None: nobody listens.

    Raises:
        OSError: the descriptor is none.
    """
    if descriptor is None:
        return
    # What this process starts must not hold the pipe; and a pipe that nobody empties must not stop
    # this process.
    os.set_inheritable(descriptor, False)
    os.set_blocking(descriptor, False)
    _beat(asyncio.get_running_loop(), descriptor)


def _beat(loop: asyncio.AbstractEventLoop, descriptor: int) -> None:
    with contextlib.suppress(BlockingIOError, BrokenPipeError):
        os.write(descriptor, b".")
    loop.call_later(BEAT_S, _beat, loop, descriptor)
