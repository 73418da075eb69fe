"""A backend that is begun before anybody knows what it is to do: used, passed over, or ended."""

from __future__ import annotations

import asyncio
import os
import pathlib
import sys
from collections.abc import Iterator

import psutil
import pytest
from tests.support.processes import alive, wait_until

from headrace_supervisor.processes import early_backend
from headrace_supervisor.processes.early_process import EarlyProcess
from headrace_supervisor.processes.managed_process import ManagedProcess, ProcessSpec, RestartRule

# Begun early it waits for its arguments, else it has them. It writes the first one through the
# descriptor that the second one names, and ends with the third as its exit code.
PROGRAM = """
import os, socket, sys
from headrace_backend.step.handover import handed_over
arguments, own = sys.argv[1:], None
if "--early" in arguments:
    sent = handed_over(socket.socket(fileno=int(arguments[1])))
    if sent is None:
        sys.exit(0)
    arguments, own = sent.arguments, sent.descriptors
word, descriptor, code = arguments[:3]
descriptor = int(descriptor) if own is None else own[int(descriptor)]
os.write(descriptor, f"{word} {os.getpid()}\\n".encode())
sys.exit(int(code))
"""
MODULE = "early_program"
COMMAND = (sys.executable, "-m", MODULE)


@pytest.fixture
def program(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    path = tmp_path / f"{MODULE}.py"
    path.write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    return path


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    os.close(reading)
    os.close(writing)


def waiting() -> list[psutil.Process]:
    """The processes that this one has begun early."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if MODULE in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def test_it_gets_the_arguments_of_a_command_and_the_descriptors_that_they_name(
    program: pathlib.Path, pipe: tuple[int, int]
) -> None:
    reading, writing = pipe
    early = EarlyProcess(MODULE)
    process = early.taken([*COMMAND, "hello", str(writing), "5"], [writing])
    assert process is not None and process.wait(120) == 5
    assert os.read(reading, 100) == f"hello {process.pid}\n".encode()
    assert early.taken([*COMMAND, "hello", str(writing), "5"], [writing]) is None
    early.end()


def test_another_program_is_not_its_business(program: pathlib.Path) -> None:
    early = EarlyProcess(MODULE)
    try:
        assert early.taken([sys.executable, "-m", "another"], []) is None
        wait_until(waiting)
    finally:
        early.end()
    assert not waiting()


def test_one_that_has_ended_meanwhile_is_passed_over(program: pathlib.Path, pipe: tuple[int, int]) -> None:
    program.write_text("")
    early = EarlyProcess(MODULE)
    # Waits for its end, and leaves it to whoever began it.
    os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
    assert early.taken([*COMMAND, "hello", str(pipe[1]), "0"], [pipe[1]]) is None


def test_a_managed_process_has_its_first_life_in_it_and_the_next_in_a_new_one(
    program: pathlib.Path, pipe: tuple[int, int]
) -> None:
    """Also its exit code is seen: with 2 a process gives up, with 3 it is started again."""
    reading, writing = pipe

    async def lives() -> tuple[int, int]:
        early = EarlyProcess(MODULE)
        [begun] = wait_until(waiting)
        os.set_inheritable(writing, True)
        spec = ProcessSpec("program", (*COMMAND, "life", str(writing), "3"), early)
        # A process that was begun is sent the watch's descriptors alone, so the test adds its own.
        taken = early.taken
        early.taken = lambda command, descriptors: taken(command, [*descriptors, writing])  # type: ignore[method-assign]
        process = ManagedProcess(spec, RestartRule(0.01, 1, 10.0), lambda: False)
        with pytest.raises(Exception, match=r"program ended 1 times .*exit code 3"):
            await process.start()
        return begun.pid, process.deaths

    pid, deaths = asyncio.run(lives())
    assert os.read(reading, 100) == f"life {pid}\n".encode() and deaths == 1


def test_a_managed_process_that_is_stopped_ends_it(program: pathlib.Path) -> None:
    program.write_text("import time\ntime.sleep(600)")

    async def life() -> int:
        early = EarlyProcess(MODULE)
        [begun] = wait_until(waiting)
        process = ManagedProcess(ProcessSpec("program", COMMAND, early), RestartRule(0.01, None, 10.0), lambda: True)
        process.start()
        while process._process is None:
            await asyncio.sleep(0.01)
        assert process._process.pid == begun.pid
        await process.stop(60.0, asyncio.Event())
        return begun.pid

    assert not alive([asyncio.run(life())])


@pytest.mark.parametrize(
    ("arguments", "environment", "ranks"),
    [
        (["serve", "folder"], {}, 1),
        (["serve", "folder", "--tp", "4"], {}, 4),
        (["serve", "--tensor-parallel-size=2", "--pp", "2"], {}, 4),
        (["serve", "--tp", "2", "--tp", "8"], {}, 8),
        (["serve"], {"HEADRACE_TP": "2", "HEADRACE_PP": "3"}, 6),
        (["serve", "--tp", "4"], {"HEADRACE_TP": "2"}, 4),
        (["serve", "--tp"], {}, 1),
        (["serve", "--tp", "many"], {"HEADRACE_PP": "-1"}, 1),
        (["serve", "--tp", "64", "--pp", "64"], {}, 64),
    ],
)
def test_a_command_line_says_how_many_workers(arguments: list[str], environment: dict[str, str], ranks: int) -> None:
    assert early_backend.num_ranks(arguments, environment) == ranks


@pytest.mark.parametrize("arguments", [[], ["doctor"], ["bench", "serve"], ["serve", "--help"], ["serve", "-h"]])
def test_nothing_is_begun_for_what_is_no_server(arguments: list[str]) -> None:
    early_backend.begin(arguments)
    assert early_backend.begun() is None


def test_a_machine_for_services_alone_begins_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_backend.importlib.util, "find_spec", lambda name: None)
    early_backend.begin(["serve", "folder"])
    assert early_backend.begun() is None
