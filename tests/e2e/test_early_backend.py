"""The backend that `headrace serve` begins before it has read its settings: nothing of it is left.

Whether the command line is refused or the server is ended, at any moment; and a server starts
without it too.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator

import psutil
import pytest
from tests.support.processes import wait_until
from tests.support.running_server import DEMO, environment

_MARK = "TEST_EARLY_BACKEND"


class Start:
    """A server that starts; all its processes are found by a variable of their environment."""

    def __init__(self, *arguments: str) -> None:
        self._mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headrace_supervisor", "serve", *arguments],
            env=environment() | {_MARK: self._mark, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def others(self, module: str | None = None) -> list[psutil.Process]:
        """The processes besides the first that live, of a module or of any."""
        found = []
        for process in psutil.process_iter():
            try:
                ours = process.environ().get(_MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE
                if ours and process.pid != self.process.pid and (module is None or module in process.cmdline()):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def none_is_left(self) -> None:
        """Waits for the ends of all that the first one's end brings about."""
        wait_until(lambda: not self.others(), what="nothing is left")


@contextlib.contextmanager
def start(*arguments: str) -> Iterator[Start]:
    begun = Start(*arguments)
    try:
        yield begun
    finally:
        begun.process.kill()
        begun.process.communicate()
        for process in begun.others():
            process.kill()


@pytest.fixture
def folder() -> Iterator[pathlib.Path]:
    """A folder with a path that is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="headrace-", dir="/tmp") as path:
        yield pathlib.Path(path)


def options(folder: pathlib.Path) -> tuple[str, ...]:
    alone = ("--listen", f"unix:{folder}/s", "--runtime-folder", str(folder), "--telemetry", "off")
    return (*alone, "--device", "cpu", "--worker-threads", "1", "--kv-memory", "16MiB")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [(("/no/such/folder",), "no such model folder"), ((str(DEMO), "--tp", "three"), "--tp"), (("--bogus",), "--bogus")],
)
def test_what_is_refused_leaves_nothing(folder: pathlib.Path, arguments: tuple[str, ...], reason: str) -> None:
    with start(*arguments, *options(folder)) as begun:
        said, _ = begun.process.communicate(timeout=300)
        assert begun.process.returncode == 2 and reason in said and "Traceback" not in said
        begun.none_is_left()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_server_that_is_ended_while_it_starts_leaves_nothing(folder: pathlib.Path, number: int) -> None:
    with start(str(DEMO), *options(folder)) as begun:
        wait_until(lambda: begun.others("headrace_backend.worker"), what="the first worker is there")
        begun.process.send_signal(number)
        begun.process.wait(300)
        begun.none_is_left()


def test_a_server_starts_without_the_backend_that_it_has_begun(folder: pathlib.Path) -> None:
    with start(str(DEMO), *options(folder)) as begun:
        [early] = wait_until(lambda: begun.others("headrace_backend"), what="the first backend is there")
        assert "--early" in early.cmdline()
        os.kill(early.pid, signal.SIGKILL)
        assert begun.process.stdout is not None
        lines = iter(begun.process.stdout.readline, "")
        assert any(line.startswith("listening on ") for line in lines)
        [backend] = begun.others("headrace_backend")
        assert backend.pid != early.pid
        begun.process.terminate()
        assert begun.process.wait(300) == 0
        begun.none_is_left()
