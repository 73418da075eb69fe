"""Workers that are started before anyone knows what they are to do, so that they import meanwhile.

A worker's imports take seconds, torch's most of them, and the backend's own take part of one before
it can start a worker. So it starts as many as it will need with its first lines, and tells each
later what it would have been started with (`step.handover`). Owns these processes until a rank
takes them. They serve the first life of the workers alone; later ones are started when they are
needed. Imports nothing heavy, because all this is done before anything is.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Sequence

from headrace_backend.step.handover import hand_over

FLAG = "--early-workers"
# Ranks of one host; more are started when they are needed.
_MOST = 64


class _Waiting:
    """One process that waits for its arguments."""

    def __init__(self, command: Sequence[str], rank: int) -> None:
        ours, theirs = socket.socketpair()
        self._channel = ours
        with theirs:
            # The rank is for who looks at processes; the arguments say it too.
            arguments = ["--early", str(theirs.fileno()), "--rank", str(rank), "--parent-pid", str(os.getpid())]
            self.process = subprocess.Popen(
                [*command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),
                pass_fds=(theirs.fileno(),),
                process_group=0,
            )

    def sent(self, arguments: Sequence[str], descriptors: Sequence[int]) -> bool:
        """Sends it its arguments; False if it is gone."""
        try:
            if self.process.poll() is None:
                hand_over(self._channel, arguments, descriptors)
                return True
        except OSError:
            pass
        finally:
            self._channel.close()
        return False

    def end(self) -> None:
        self._channel.close()
        self.process.kill()
        self.process.wait()


class EarlyWorkers:
    """Processes that wait for their arguments, one for each of a host's first ranks."""

    def __init__(self, command: Sequence[str] = (), count: int = 0) -> None:
        """Starts so many. One that can't be started now is started when it is needed.

        Args:
            command: What starts a worker.
            count: How many; of more than a host has ranks some wait in vain, until `close`.
        """
        # By rank.
        self._waiting: dict[int, _Waiting] = {}
        with contextlib.suppress(OSError):
            for rank in range(min(count, _MOST)):
                self._waiting[rank] = _Waiting(command, rank)

    def __len__(self) -> int:
        return len(self._waiting)

    def taken(self, rank: int, arguments: Sequence[str], descriptors: Sequence[int]) -> subprocess.Popen[bytes] | None:
        """Sends a rank's process its arguments; None: there is none that lives.

        Args:
            rank: The rank.
            arguments: What a worker is started with.
            descriptors: Descriptors that the arguments name; it gets copies.
        """
        waiting = self._waiting.pop(rank, None)
        if waiting is None:
            return None
        if waiting.sent(arguments, descriptors):
            return waiting.process
        waiting.end()
        return None

    def close(self) -> None:
        """Ends those that nobody has taken."""
        while self._waiting:
            self._waiting.popitem()[1].end()


def wanted(arguments: Sequence[str]) -> int:
    """How many a command line asks for; 0 where it does not say a number."""
    following = dict(zip(arguments, arguments[1:], strict=False)).get(FLAG, "0")
    return int(following) if following.isdecimal() else 0
