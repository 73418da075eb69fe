"""One process that is to run.

Started, watched, started again when it dies or hangs, ended when asked.

Owns the backoff between starts and the verdict when starting is no use; whether a process hangs
says `hang_watch`. Each process leads a session of its own, so that Ctrl-C at a terminal reaches the
supervisor alone, and so that whatever it started can be ended with it. It dies with the supervisor
(`launch.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import NamedTuple

import structlog

from headrace_facts.oom_kills import RecentOomKills
from headrace_supervisor.processes import launch
from headrace_supervisor.processes.early_process import EarlyProcess
from headrace_supervisor.processes.hang_watch import HangWatch, listening
from headrace_supervisor.processes.running_process import BegunProcess, RunningProcess

# A process that lived this long has recovered: its next death starts the backoff anew.
_STABLE_S = 30.0
_LONGEST_PAUSE_S = 30.0
# How often the kernel's count of OOM kills is looked at.
_LOOK_S = 2.0
# What a process gets after a second SIGTERM.
_HURRIED_GRACE_S = 1.0
_REFUSED = 2

_log = structlog.get_logger(process="supervisor")


class ProcessSpec(NamedTuple):
    """A process by name: the program and its arguments.

    Attributes:
        name: for people.
        command: the program and its arguments.
        early: a process that waits to be sent these arguments; None: there is none. Only a first
            life can be its.
    """

    name: str
    command: tuple[str, ...]
    early: EarlyProcess | None = None


class RestartRule(NamedTuple):
    """When to start a process again.

    It has the first pause in seconds, which doubles, and the number of starts that may fail before
    the server ever served; None: as many as it takes.

    And when to end what hangs: `hang_watch`'s timeout in seconds; 0: never.
    """

    first_pause_s: float
    start_attempts: int | None
    hang_timeout_s: float


class ProcessGaveUp(Exception):  # an outcome
    """A process can't be kept running; the server ends with this exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class _Ending(NamedTuple):
    """How one life ended: exit code, and the same for people."""

    code: int
    manner: str


class ManagedProcess:
    """Keeps one process running from `start` to `stop`.

    Attributes:
        deaths: lives that ended by themselves in a row, each but the first within half a minute.
    """

    def __init__(self, spec: ProcessSpec, rule: RestartRule, has_served: Callable[[], bool]) -> None:
        self.spec = spec
        self._rule = rule
        self._has_served = has_served
        self._process: RunningProcess | None = None
        self._stopping = asyncio.Event()
        self.deaths = 0

    def start(self) -> asyncio.Task[None]:
        """Starts the process, and starts it again whenever it ends.

        The task raises ProcessGaveUp when that is no use.
        """
        self._task = asyncio.create_task(self._run(), name=self.spec.name)
        return self._task

    async def stop(self, grace_s: float, hurry: asyncio.Event) -> None:
        """Asks the process to end (SIGTERM), and kills it if it does not.

        It has `grace_s` seconds, or 1 s after `hurry` is set.
        """
        self._stopping.set()
        self._signal(signal.SIGTERM)
        hurried = asyncio.create_task(hurry.wait())
        await asyncio.wait({self._task, hurried}, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        if hurried.done() and not self._task.done():
            self._signal(signal.SIGTERM)
            await asyncio.wait({self._task}, timeout=_HURRIED_GRACE_S)
        hurried.cancel()
        if not self._task.done():
            _log.warning(f"{self.spec.name} did not end in time and is killed")
            self._signal(signal.SIGKILL)
        await asyncio.wait({self._task})

    async def _run(self) -> None:
        while not self._stopping.is_set():
            started = time.monotonic()
            ending = await self._live()
            if self._stopping.is_set():
                return
            stable = time.monotonic() - started >= _STABLE_S
            self.deaths = 1 if stable else self.deaths + 1
            self._give_up_if_no_use(ending)
            await self._pause(ending)

    async def _live(self) -> _Ending:
        """One life of the process, from start to end."""
        oom_kills = RecentOomKills()
        with listening(self.spec.name, self._rule.hang_timeout_s) as watch:
            self._process = await self._begun(watch)
            if self._stopping.is_set():
                self._signal(signal.SIGTERM)
            hanging = asyncio.create_task(self._end_when_hung(watch, self._process))
            try:
                code = await _exit_code(self._process, oom_kills)
            finally:
                was_hung = hanging.done()
                hanging.cancel()
        # Helpers that it left behind in its session.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return _Ending(code, _manner(code, "" if was_hung else oom_kills.after_sigkill()))

    async def _begun(self, watch: HangWatch) -> RunningProcess:
        """A new process, or the one that was begun for this."""
        command = [*self.spec.command, *watch.arguments]
        if self.spec.early is not None:
            begun = self.spec.early.taken(command, watch.descriptors)
            if begun is not None:
                return BegunProcess(begun)
        return await asyncio.create_subprocess_exec(
            *launch.tied(command),
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=watch.descriptors,
        )

    async def _end_when_hung(self, watch: HangWatch, process: RunningProcess) -> None:
        await watch.until_hung(process)
        self._signal(signal.SIGKILL)

    def _give_up_if_no_use(self, ending: _Ending) -> None:
        if self._rule.start_attempts is None:
            return
        if ending.code == _REFUSED:
            raise ProcessGaveUp(f"{self.spec.name} refused to start; see the lines above", _REFUSED)
        if self.deaths >= self._rule.start_attempts and not self._has_served():
            raise ProcessGaveUp(
                f"{self.spec.name} ended {self.deaths} times before the server was ready ({ending.manner})", 1
            )

    async def _pause(self, ending: _Ending) -> None:
        """Waits before the next start, or until `stop`."""
        pause_s = min(self._rule.first_pause_s * 2 ** (self.deaths - 1), _LONGEST_PAUSE_S)
        _log.warning(f"{self.spec.name} ended and is started again", how=ending.manner, pause_s=round(pause_s, 2))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), pause_s)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)


async def _exit_code(process: RunningProcess, oom_kills: RecentOomKills) -> int:
    """Waits for the end of a process."""
    while True:
        oom_kills.look()
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(process.wait(), _LOOK_S)


def _manner(code: int, after_sigkill: str) -> str:
    """How a process ended, for people; with what is known of a SIGKILL."""
    if code >= 0:
        return f"exit code {code}"
    return signal.Signals(-code).name + (after_sigkill if code == -signal.SIGKILL else "")
