"""A private server process: started on a Unix socket, watched, stopped and cleaned up.

Owns the child process, its folder and the lines it prints. Does not wait for readiness nor speak
the API (server.py). A command line goes in, a process that accepts connections on `target`
comes out; nothing of it is left after stop(), nor after this program is killed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping

SUPERVISOR_MODULE = "headrace_supervisor"
# A Unix socket's path holds 107 bytes; the server's own private folder and socket in this one need
# some.
MAX_FOLDER_BYTES = 70
KEPT_LINES = 200
# Reads until this program closes the pipe or dies, then stops the server's process group and
# removes the folder.
_GUARD_SCRIPT = (
    'read -r _; kill -TERM "$1" 2>/dev/null; i=0; '
    'while kill -0 "$1" 2>/dev/null && [ $i -lt 100 ]; do sleep 0.1; i=$((i+1)); done; '
    'kill -KILL -- "-$1" 2>/dev/null; rm -rf -- "$2"'
)

FlagValue = str | int | float | bool | Iterable[str | int | float]


class LocalServerError(Exception):
    """The local server could not be started, or ended before it was ready.

    The message holds its last line.
    """


def serve_command(model: str, folder: str, options: Mapping[str, FlagValue]) -> list[str]:
    """Returns the command line of `headrace serve`, with each option as a flag.

    The server refuses flags that it does not know.

    The server's private files are kept in `folder` too, so that nothing is left of them even where
    it had to be killed.
    """
    command = [sys.executable, "-m", SUPERVISOR_MODULE, "serve", "--model", model, "--listen", address_in(folder)]
    for name, value in {"runtime_folder": folder, **options}.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            command.append(flag)
        elif value is False:
            command.append("--no-" + flag[2:])
        else:
            values = [value] if isinstance(value, str | int | float) else value
            command += [part for single in values for part in (flag, str(single))]
    return command


def address_in(folder: str) -> str:
    """The address of a server whose socket is in `folder`."""
    return f"unix:{folder}/server.sock"


class ServerProcess:
    """A started server. `target` is its gRPC address, `lines` the last lines it printed."""

    def __init__(self, command: Callable[[str], list[str]], on_line: Callable[[str], None] | None) -> None:
        """Starts the process.

        Args:
            command: Gives the command line for the private folder.
            on_line: Called in a thread of its own with each line that the server prints.
        """
        self._folder = _private_folder()
        self.target = address_in(self._folder)
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._on_line = on_line
        try:
            # A session of its own: Ctrl-C in the terminal reaches this program only, which then
            # stops the server in order.
            self._process = subprocess.Popen(
                command(self._folder),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                text=True,
                errors="replace",
            )
            self._guard = self._start_guard()
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._reader = threading.Thread(target=self._read_lines, name="headrace-server-output", daemon=True)
        self._reader.start()

    def exit_message(self) -> str | None:
        """None while the process runs; afterwards how it ended, with its last line."""
        code = self._process.poll()
        if code is None:
            return None
        self._reader.join(timeout=2)
        last = next((line for line in reversed(self.lines) if line.strip()), "it printed nothing")
        return f"the server ended with exit code {code}: {last.strip()}"

    def stop(self, grace: float) -> None:
        """Ends the process and all it started, and removes the folder.

        SIGTERM comes first, then SIGKILL after `grace` seconds.
        """
        try:
            self._process.terminate()
            try:
                self._process.wait(grace)
            except subprocess.TimeoutExpired:
                pass
        finally:
            self._kill_group()
            self._process.wait()
            self._stop_guard()
            self._reader.join(timeout=2)
            shutil.rmtree(self._folder, ignore_errors=True)

    def _kill_group(self) -> None:
        """Ends whatever the server left behind in its session."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass

    def _start_guard(self) -> subprocess.Popen[bytes]:
        """Starts a shell that stops the server if this program is killed.

        The shell outlives this program by the time that takes.
        """
        return subprocess.Popen(
            ["/bin/sh", "-c", _GUARD_SCRIPT, "headrace-guard", str(self._process.pid), self._folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _stop_guard(self) -> None:
        self._guard.kill()
        self._guard.wait()
        assert self._guard.stdin is not None
        self._guard.stdin.close()

    def _read_lines(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                self.lines.append(line.rstrip("\n"))
                self._report(line.rstrip("\n"))

    def _report(self, line: str) -> None:
        """Calls on_line, but never again after it has failed.

        The server's output must still be read.
        """
        if self._on_line is None:
            return
        try:
            self._on_line(line)
        except Exception:
            self._on_line = None
            traceback.print_exc()


def _private_folder() -> str:
    """Makes a folder that only this user can enter (mode 0700).

    Its path is short enough for a socket.
    """
    base = tempfile.gettempdir()
    if len(os.fsencode(base)) > MAX_FOLDER_BYTES - len("/headrace-xxxxxxxx"):
        base = "/tmp"
    return tempfile.mkdtemp(prefix="headrace-", dir=base)
