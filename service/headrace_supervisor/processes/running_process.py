"""A process that runs, as its owner in the event loop sees it.

Owns what is asked of one, which is what asyncio's own have, and the same for a process that was
begun before there was an event loop.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from typing import Protocol


class RunningProcess(Protocol):
    """What is asked of a process by whoever keeps it running."""

    @property
    def pid(self) -> int:
        """Process id."""

    @property
    def returncode(self) -> int | None:
        """Exit code; the negative number of the signal that ended it; None while it runs."""

    def send_signal(self, signal: int) -> None:
        """Sends a signal. Raises ProcessLookupError where it has ended."""

    async def wait(self) -> int:
        """Returns its exit code once it has ended."""


class BegunProcess:
    """A process that was started outside of the event loop, and is watched in the running one."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        """Watches it from now on.

        Raises:
            OSError: there are no descriptors left.
        """
        self._process = process
        self._ended = asyncio.Event()
        self._pidfd = os.pidfd_open(process.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code; the negative number of the signal that ended it; None while it runs."""
        return self._process.returncode

    def send_signal(self, signal: int) -> None:
        """Sends a signal, which one that has ended does not get."""
        self._process.send_signal(signal)

    async def wait(self) -> int:
        """Returns its exit code once it has ended."""
        await self._ended.wait()
        return self._process.wait()

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._process.wait()
        self._ended.set()
