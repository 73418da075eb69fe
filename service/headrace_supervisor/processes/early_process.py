"""A process that is begun before anybody knows what it is to do, so that it imports meanwhile.

Owns it until it is taken: then it is sent the command line that it would have been started with and
copies of the descriptors that this names (`headrace_backend.step.handover`). One that is never
taken is killed when this process ends, however that comes about. Imports nothing heavy, because it
is there to be begun first of all.
"""

from __future__ import annotations

import atexit
import socket
import subprocess
import sys
from collections.abc import Sequence

from headrace_backend.step.handover import hand_over
from headrace_supervisor.processes import launch

FLAG = "--early"


class EarlyProcess:
    """A process that runs `python -m MODULE --early DESCRIPTOR`, and waits for its arguments."""

    def __init__(self, module: str, arguments: Sequence[str] = ()) -> None:
        """Begins it.

        Args:
            module: what it runs.
            arguments: what it has to know at once.

        Raises:
            OSError: it can't be started.
        """
        self._program = (sys.executable, "-m", module)
        ours, theirs = socket.socketpair()
        self._channel = ours
        with theirs:
            command = [*self._program, FLAG, str(theirs.fileno()), *arguments]
            try:
                self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
                    launch.tied(command),
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    pass_fds=(theirs.fileno(),),
                )
            except OSError:
                ours.close()
                raise
        atexit.register(self.end)

    def taken(self, command: Sequence[str], descriptors: Sequence[int]) -> subprocess.Popen[bytes] | None:
        """Sends it the arguments of a command, and gives it to the caller.

        Args:
            command: what would be started now.
            descriptors: descriptors that the command names.

        Returns:
            The process; None where it can't be this one: it was taken, has ended, or runs something
            else.
        """
        if self._process is None or tuple(command[: len(self._program)]) != self._program:
            return None
        if self._process.poll() is None:
            try:
                hand_over(self._channel, command[len(self._program) :], descriptors)
            except OSError:
                self.end()
                return None
            process, self._process = self._process, None
            self._channel.close()
            return process
        self.end()
        return None

    def end(self) -> None:
        """Kills it, and what it has started with it, unless it was taken."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            self._channel.close()
