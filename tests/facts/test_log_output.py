"""A process's own output: what can't be written is lost, counted and noted, and nothing fails."""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest
from tests.support.running_server import ROOT, environment

from headrace_facts.log_output import LossyFile

FULL = pathlib.Path("/dev/full")
_LOGS = """
import sys
from headrace_facts import log_output
log_output.keep_going()
for number in range(3):
    print("line", number)
    print("line", number, file=sys.stderr)
with open(sys.argv[1], "w") as reported:
    print(log_output.take_lost_lines(), log_output.take_lost_lines(), file=reported)
"""


def text_on(file: LossyFile) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BufferedWriter(file), line_buffering=True)


@pytest.fixture
def full_pipe() -> Iterator[tuple[int, int]]:
    """Both ends of a pipe that does not block and takes nothing more."""
    reads, writes = os.pipe2(os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while os.write(writes, b"." * 4096):
            pass
    yield reads, writes
    os.close(reads)
    os.close(writes)


def drained(reads: int) -> bytes:
    """What a pipe holds."""
    parts = []
    with contextlib.suppress(BlockingIOError):
        while part := os.read(reads, 1 << 16):
            parts.append(part)
    return b"".join(parts)


def test_a_full_disk_takes_nothing_and_ends_nobody(tmp_path: pathlib.Path) -> None:
    with FULL.open("wb") as full:
        command = [sys.executable, "-c", _LOGS, str(tmp_path / "reported")]
        done = subprocess.run(command, stdout=full, stderr=full, env=environment(), cwd=ROOT, timeout=240)
    assert done.returncode == 0
    assert (tmp_path / "reported").read_text() == "6 0\n"


def test_a_reader_that_left_ends_nobody(tmp_path: pathlib.Path) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-c", _LOGS, str(tmp_path / "reported")]
    done = subprocess.run(command, stdout=writes, stderr=writes, env=environment(), cwd=ROOT, timeout=240)
    os.close(writes)
    assert done.returncode == 0
    assert (tmp_path / "reported").read_text() == "6 0\n"


def test_what_was_lost_is_noted_once_before_the_next_line(full_pipe: tuple[int, int]) -> None:
    reads, writes = full_pipe
    file = LossyFile(writes)
    log = text_on(file)
    print("a\nb", file=log)
    print("c", file=log)
    assert file.num_lost_lines == 3
    drained(reads)
    print("d", file=log)
    print("e", file=log)
    assert drained(reads).decode().splitlines() == [
        "headrace: lines of this log that were lost: 3 (a pipe that does not block is full)",
        "d",
        "e",
    ]
    assert file.num_lost_lines == 3


def test_a_line_that_was_cut_is_ended_before_the_note(full_pipe: tuple[int, int]) -> None:
    reads, writes = full_pipe
    log = text_on(LossyFile(writes))
    # A pipe takes pages: room for one, and a line of two.
    os.read(reads, 4096)
    print("x" * 8000, file=log)
    rest = drained(reads)
    print("whole", file=log)
    cut, note, line = (rest + drained(reads)).lstrip(b".").decode().splitlines()
    assert set(cut) == {"x"} and len(cut) < 8000
    assert note == "headrace: lines of this log that were lost: 1 (a pipe that does not block is full)"
    assert line == "whole"


def test_what_is_written_arrives_as_it_is(tmp_path: pathlib.Path) -> None:
    with (tmp_path / "log").open("wb") as target:
        log = text_on(LossyFile(target.fileno()))
        for number in range(1000):
            log.write(f"line {number}\n" * (number % 3))
        log.flush()
    expected = "".join(f"line {number}\n" * (number % 3) for number in range(1000))
    assert (tmp_path / "log").read_text() == expected
