"""Processes that are forked from a Python which has imported what they need.

`warm_python` runs programs to their end; these run beside a test, which signals them and waits for
them. A backend imports for 0.7 s of a core, a fork takes none of it.

Owns the Python that forks, and how a test sees one of its children: by a descriptor that stays
with the process whatever becomes of its number, and by a file with its exit code.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import gc
import itertools
import json
import os
import pathlib
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence

# An exit code is written as soon as its process has ended.
_LIMIT_S = 120.0


class ForkedProcess:
    """What a test needs of `subprocess.Popen`, for a process whose parent is another."""

    def __init__(self, pid: int, descriptor: int, exit_code: pathlib.Path) -> None:
        """Takes a process over that has just been forked.

        Args:
            pid: Its number.
            descriptor: Readable once the process has ended. Owned from now on.
            exit_code: File that has its exit code after its end.
        """
        self.pid = pid
        self._descriptor = descriptor
        self._exit_code = exit_code

    def poll(self) -> int | None:
        """Returns the exit code, negative for a signal; None while the process runs."""
        return self._code() if self._has_ended(0.0) else None

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end and returns the exit code.

        Raises:
            subprocess.TimeoutExpired: The process still ran after so many seconds.
        """
        if not self._has_ended(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return self._code()

    def terminate(self) -> None:
        """Sends SIGTERM, unless the process has ended."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL, unless the process has ended."""
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, number)

    def _has_ended(self, timeout_s: float | None) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(self._descriptor, selectors.EVENT_READ)
            return bool(selector.select(timeout_s))

    def _code(self) -> int:
        deadline = time.monotonic() + _LIMIT_S
        while not self._exit_code.exists():
            assert time.monotonic() < deadline, f"nobody wrote how process {self.pid} ended"
            time.sleep(0.001)
        return int(self._exit_code.read_text())

    def __del__(self) -> None:
        os.close(self._descriptor)


class ForkingPython:
    """Started with its first process, ended with this one."""

    def __init__(self, imports: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts nothing yet.

        Args:
            imports: Modules that processes find imported; none of them may start a thread.
            environment: Environment of all processes.
        """
        self._imports, self._environment = imports, environment
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-forked-")
        self._numbers = itertools.count(1)

    def start(self, script: pathlib.Path, arguments: Sequence[str], stderr: pathlib.Path) -> ForkedProcess:
        """Forks a process that runs a script as `python SCRIPT ARGUMENTS` would.

        Its standard error becomes the file `stderr`.
        """
        with self._lock:
            exit_code = pathlib.Path(self._folder.name) / str(next(self._numbers))
            asked = _Start(str(script), list(arguments), str(stderr), str(exit_code))
            connection = self._connection()
            connection.sendall(json.dumps(dataclasses.asdict(asked)).encode() + b"\n")
            answer, descriptors, _, _ = socket.recv_fds(connection, 100, 1)
        assert descriptors, "the Python that forks has ended"
        return ForkedProcess(int(answer), descriptors[0], exit_code)

    def _connection(self) -> socket.socket:
        if self._socket is None:
            self._socket, theirs = socket.socketpair()
            command = [sys.executable, "-m", __name__, str(theirs.fileno()), *self._imports]
            process = subprocess.Popen(command, env=dict(self._environment), pass_fds=[theirs.fileno()])
            theirs.close()
            atexit.register(_end, self._socket, process)
        return self._socket


def _end(connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """Ends the Python that forks; it ends with its connection."""
    connection.close()
    process.wait()


@dataclasses.dataclass(frozen=True)
class _Start:
    """A process that is asked for."""

    script: str
    arguments: list[str]
    stderr: str
    exit_code: str


class _Forker:
    """Forks what it is asked for and writes down how its children end."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._exit_codes: dict[int, pathlib.Path] = {}
        # Has a byte for each child that ends.
        self._wakes, self._woken = os.pipe()
        os.set_blocking(self._woken, False)

    def serve(self) -> _Start | None:
        """Answers requests.

        Returns:
            In a child, the process that it is to become; in the parent None, at the end.
        """
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._woken)
        requests = self._connection.makefile("r")
        with selectors.DefaultSelector() as selector:
            selector.register(self._connection, selectors.EVENT_READ)
            selector.register(self._wakes, selectors.EVENT_READ)
            while True:
                ready = {key.fd for key, _ in selector.select()}
                if self._wakes in ready:
                    os.read(self._wakes, 1000)
                    self._reap()
                if self._connection.fileno() in ready:
                    line = requests.readline()
                    if not line:
                        return None
                    if (start := self._fork(_Start(**json.loads(line)))) is not None:
                        break
        # A child; what the parent has open is none of its business.
        requests.close()
        self._connection.close()
        return start

    def _fork(self, start: _Start) -> _Start | None:
        """Returns the request in the child, None in the parent."""
        assert threading.active_count() == 1, "threads do not survive a fork"
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(self._wakes)
            os.close(self._woken)
            return start
        self._exit_codes[pid] = pathlib.Path(start.exit_code)
        descriptor = os.pidfd_open(pid)
        socket.send_fds(self._connection, [str(pid).encode()], [descriptor])
        os.close(descriptor)
        return None

    def _reap(self) -> None:
        """Writes the exit code of each child that has ended."""
        while self._exit_codes:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            file = self._exit_codes.pop(pid)
            file.with_suffix(".new").write_text(str(os.waitstatus_to_exitcode(status)))
            file.with_suffix(".new").rename(file)


def main(descriptor: int, imports: Sequence[str]) -> None:
    """Serves a connection until its end.

    Children run what they were forked for and end as any Python does.
    """
    for name in imports:
        __import__(name)
    # What was imported stays: children would copy its memory to look for cycles in it.
    gc.freeze()
    start = _Forker(socket.socket(fileno=descriptor)).serve()
    if start is None:
        return
    log = os.open(start.stderr, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(log, 2)
    os.close(log)
    sys.argv = [start.script, *start.arguments]
    runpy.run_path(start.script, run_name="__main__")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
