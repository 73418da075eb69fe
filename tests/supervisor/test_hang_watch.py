"""What counts as hanging, and what is said and done then."""

from __future__ import annotations

import asyncio
import math
import os
import pathlib
import signal
import sys
import time
from typing import cast

import hypothesis
import pytest
import structlog
from hypothesis import strategies
from tests.support.processes import wait_until

from headrace_supervisor.processes.hang_watch import Silence, listening
from headrace_supervisor.processes.managed_process import ManagedProcess, ProcessSpec, RestartRule

# Beats until the file `hang` is there, then hangs and runs on. Notes each life in the file `lives`.
_PROGRAM = """
import asyncio, faulthandler, os, pathlib, signal, sys, time
from headrace_facts import pulse
faulthandler.register(signal.SIGUSR1, all_threads=False)
folder = pathlib.Path(sys.argv[1])
def hang_here():
    while True: time.sleep(0.05)
async def main():
    pulse.start(int(sys.argv[3]))
    with (folder / 'lives').open('a') as lives: lives.write(f'{os.getpid()}\\n')
    while not (folder / 'hang').exists(): await asyncio.sleep(0.02)
    hang_here()
asyncio.run(main())
"""


class Program:
    """A process that beats, in a folder of its own."""

    def __init__(self, folder: pathlib.Path, name: str, hang_timeout_s: float) -> None:
        self.folder = folder / name
        self.folder.mkdir()
        spec = ProcessSpec(name, (sys.executable, "-c", _PROGRAM, str(self.folder)))
        self._managed = ManagedProcess(spec, RestartRule(0.01, None, hang_timeout_s), lambda: True)
        self._managed.start()

    def lives(self) -> list[int]:
        """Process ids so far."""
        path = self.folder / "lives"
        return [int(line) for line in path.read_text().splitlines()] if path.exists() else []

    async def stop(self) -> None:
        await self._managed.stop(60, asyncio.Event())


@pytest.fixture(autouse=True)
def packages_in_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


async def until_life(program: Program, number: int) -> None:
    await asyncio.to_thread(wait_until, lambda: len(program.lives()) >= number)


def ticks(silence: Silence, count: int, *, heard: bool = False, stopped: bool = False) -> list[bool]:
    return [silence.tick(heard=heard, stopped=stopped) for _ in range(count)]


def test_a_stopped_process_hangs_after_the_timeout() -> None:
    silence = Silence(4)
    ticks(silence, 1, heard=True)
    assert ticks(silence, 4, stopped=True) == [False, False, False, True]


def test_a_silent_process_that_runs_has_three_times_as_long() -> None:
    silence = Silence(4)
    ticks(silence, 1, heard=True)
    assert ticks(silence, 12) == [False] * 11 + [True]


def test_what_has_not_begun_to_beat_is_not_silent_but_may_be_stopped() -> None:
    silence = Silence(4)
    assert not any(ticks(silence, 1000))
    assert ticks(silence, 4, stopped=True)[-1]


def test_a_process_that_was_continued_is_counted_anew() -> None:
    silence = Silence(4)
    ticks(silence, 1, heard=True)
    assert not any(ticks(silence, 3, stopped=True) + ticks(silence, 1) + ticks(silence, 3, stopped=True))


def test_without_a_timeout_nobody_hangs() -> None:
    silence = Silence(math.inf)
    ticks(silence, 1, heard=True)
    assert not any(ticks(silence, 1000, stopped=True) + ticks(silence, 1000))


@hypothesis.given(
    strategies.integers(1, 20), strategies.lists(strategies.tuples(strategies.integers(0, 60), strategies.booleans()))
)
def test_who_beats_before_the_timeout_never_hangs(timeout: int, gaps: list[tuple[int, bool]]) -> None:
    silence = Silence(timeout)
    for gap, stopped in gaps:
        longest = timeout - 1 if stopped else 3 * timeout - 1
        assert not any(ticks(silence, 1, heard=True) + ticks(silence, min(gap, longest), stopped=stopped))


def test_who_is_stopped_and_who_hangs_are_replaced_and_the_reason_is_said(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def both() -> None:
        stopped, hung = (Program(tmp_path, name, 0.5) for name in ("stopped", "hung"))
        await asyncio.gather(until_life(stopped, 1), until_life(hung, 1))
        os.kill(stopped.lives()[0], signal.SIGSTOP)
        (hung.folder / "hang").touch()
        await until_life(stopped, 2)
        # It hangs in every life; on a busy machine one may be over before its stack is written.
        stacks = ""
        while "in hang_here" not in stacks or len(hung.lives()) < 2:
            await asyncio.sleep(0.05)
            stacks += capfd.readouterr().err
        await asyncio.gather(stopped.stop(), hung.stop())

    with structlog.testing.capture_logs() as said:
        asyncio.run(asyncio.wait_for(both(), 120))
    states = {each["event"]: each["state"] for each in said if each["log_level"] == "error"}
    assert states["stopped hangs and is killed"] == "stopped"
    assert states["hung hangs: its stack follows, then it is killed"] in ("sleeping", "running")


def test_a_supervisor_that_was_suspended_accuses_nobody(tmp_path: pathlib.Path) -> None:
    async def suspended() -> None:
        program = Program(tmp_path, "suspended", 2.5)
        await until_life(program, 1)
        [pid] = program.lives()
        os.kill(pid, signal.SIGSTOP)
        # One to three ticks without a beat, of the five that are too many.
        await asyncio.sleep(1.25)
        # The loop stands still for longer than the timeout, as in a machine that sleeps, and finds
        # the process as it was: one tick more.
        time.sleep(3)
        await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGCONT)
        await asyncio.sleep(1.0)
        assert program.lives() == [pid]
        os.kill(pid, 0)
        await program.stop()

    asyncio.run(suspended())


def test_who_beats_after_all_is_spared() -> None:
    class LateProcess:
        """This one, which beats when its stack is asked for."""

        pid = os.getpid()

        def __init__(self, writer: int) -> None:
            self.writer = writer

        def send_signal(self, number: int) -> None:
            assert number == signal.SIGUSR1
            os.write(self.writer, b".")

    async def late() -> None:
        with listening("late", 0.5) as watch:
            [writer] = watch.descriptors
            os.write(writer, b".")
            process = cast(asyncio.subprocess.Process, LateProcess(writer))
            watching = asyncio.create_task(watch.until_hung(process))
            with structlog.testing.capture_logs() as said:
                while "late goes on and is spared" not in [each["event"] for each in said]:
                    assert not watching.done()
                    await asyncio.sleep(0.05)
            watching.cancel()

    asyncio.run(asyncio.wait_for(late(), 120))
