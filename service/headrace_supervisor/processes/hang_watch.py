"""Whether a process that lives does its work.

Its event loop beats into a pipe (`headrace_facts.pulse`), and here its silence is counted.

Owns the pipe, the count, and what is said of a process that hangs. Ending it is
`managed_process`'s.

What counts is ticks of this process without a beat, not time: a supervisor, or a machine, that was
suspended finds beats or has missed its own ticks as well, and accuses nobody. A process that the
kernel says is stopped hangs after the timeout. One that is silent but not stopped gets three times
as long, because on a machine without a free core that is what a healthy one looks like; and it is
only counted after its first beat, because imports and reading a folder are no hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import pathlib
import signal
from collections.abc import Iterator
from typing import Final

import structlog

from headrace_facts import pulse
from headrace_supervisor.processes.running_process import RunningProcess

_TICK_S: Final = pulse.BEAT_S
_PATIENCE_WITH_RUNNING: Final = 3
# To write stacks in, and to beat after all.
_LAST_WORDS_S: Final = 1.0
# Of /proc/<pid>/stat.
_STOPPED: Final = frozenset("Tt")
_STATES: Final = {
    "T": "stopped",
    "t": "stopped by a debugger",
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a disk or a device",
}
_READ_BYTES: Final = 1 << 16

_log = structlog.get_logger(process="supervisor")


class Silence:
    """Counts the ticks of one life without a beat."""

    def __init__(self, timeout_ticks: float) -> None:
        self._timeout_ticks = timeout_ticks
        self._has_beaten = False
        self.ticks = 0
        self._stopped_ticks = 0

    def tick(self, *, heard: bool, stopped: bool) -> bool:
        """Counts one tick; returns whether the process hangs."""
        if heard:
            self._has_beaten = True
            self.ticks = self._stopped_ticks = 0
            return False
        self.ticks += 1
        self._stopped_ticks = self._stopped_ticks + 1 if stopped else 0
        too_long = self._has_beaten and self.ticks >= _PATIENCE_WITH_RUNNING * self._timeout_ticks
        return too_long or self._stopped_ticks >= self._timeout_ticks


class HangWatch:
    """Listens to one life of a process. Made by `listening`.

    Attributes:
        arguments: what its command line needs.
        descriptors: what it must inherit.
    """

    def __init__(self, name: str, timeout_s: float, reader: int, writer: int) -> None:
        self._name = name
        self._timeout_ticks = math.ceil(timeout_s / _TICK_S) if timeout_s else math.inf
        self._reader = reader
        self.arguments: tuple[str, ...] = (pulse.FLAG, str(writer))
        self.descriptors: tuple[int, ...] = (writer,)

    async def until_hung(self, process: RunningProcess) -> None:
        """Returns when the process hangs, after saying so.

        One that is not stopped has written its stack by then, and let a last chance to beat pass.
        """
        silence = Silence(self._timeout_ticks)
        while True:
            await asyncio.sleep(_TICK_S)
            heard = self._heard()
            state = "" if heard else _state(process.pid)
            if not silence.tick(heard=heard, stopped=state in _STOPPED):
                continue
            found = {"pid": process.pid, "silent_s": silence.ticks * _TICK_S, "state": _STATES.get(state, state)}
            if state in _STOPPED:
                _log.error(f"{self._name} hangs and is killed", **found)
                return
            _log.error(f"{self._name} hangs: its stack follows, then it is killed", **found)
            if not await self._beats_after_all(process):
                return
            _log.warning(f"{self._name} goes on and is spared", pid=process.pid)
            silence = Silence(self._timeout_ticks)

    async def _beats_after_all(self, process: RunningProcess) -> bool:
        """Has the process write its stack, and listens once more.

        faulthandler answers SIGUSR1 without the interpreter.
        """
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGUSR1)
        await asyncio.sleep(_LAST_WORDS_S)
        return self._heard()

    def _heard(self) -> bool:
        try:
            return bool(os.read(self._reader, _READ_BYTES))
        except BlockingIOError:
            return False


@contextlib.contextmanager
def listening(name: str, timeout_s: float) -> Iterator[HangWatch]:
    """A watch over one life of the process of this name, with its pipe.

    Args:
        name: for people.
        timeout_s: how long a stopped process may be silent; 0: for ever.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        yield HangWatch(name, timeout_s, reader, writer)
    finally:
        os.close(reader)
        os.close(writer)


def _state(pid: int) -> str:
    """The kernel's letter for what a process does; empty if it is gone."""
    try:
        status = pathlib.Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ""
    return status.rpartition(")")[2].split()[0]
