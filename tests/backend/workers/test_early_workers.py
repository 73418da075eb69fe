"""Workers that are started before they know what they are to do: used, passed over, or ended."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from headrace_backend.server.lifetime import ExitCode
from headrace_backend.server.main import main
from headrace_backend.server.workers.early_workers import EarlyWorkers, wanted
from headrace_backend.step.handover import hand_over, handed_over

# Waits as a worker does, and writes what it was sent through the descriptor that its second
# argument names.
SCRIPT = """
import os, socket, sys
from headrace_backend.step.handover import handed_over
sent = handed_over(socket.socket(fileno=int(sys.argv[2])))
if sent is not None:
    with open(sent.descriptors[int(sent.arguments[1])], "w") as file:
        file.write(" ".join([sys.argv[4], *sent.arguments]))
"""
COMMAND = (sys.executable, "-c", SCRIPT)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    for descriptor in (reading, writing):
        try:
            os.close(descriptor)
        except OSError:
            pass


def test_a_rank_s_process_gets_its_arguments_and_the_descriptors_that_they_name(pipe: tuple[int, int]) -> None:
    early = EarlyWorkers(COMMAND, 2)
    reading, writing = pipe
    processes = []
    for rank in (1, 0):
        process = early.taken(rank, ["--pipe", str(writing)], [writing])
        assert process is not None
        processes.append(process)
        assert process.wait(60) == 0
        assert os.read(reading, 100) == f"{rank} --pipe {writing}".encode()
    assert processes[0].pid != processes[1].pid and len(early) == 0
    assert early.taken(2, [], []) is None


def test_a_process_that_has_ended_meanwhile_is_passed_over(pipe: tuple[int, int]) -> None:
    others = set(psutil.Process().children())
    early = EarlyWorkers((sys.executable, "-c", ""), 1)
    [started] = set(psutil.Process().children()) - others
    # Waits for its end and no other child's, and leaves it to whoever started it.
    os.waitid(os.P_PID, started.pid, os.WEXITED | os.WNOWAIT)
    assert early.taken(0, ["--pipe", str(pipe[1])], [pipe[1]]) is None


def test_those_that_nobody_takes_are_ended() -> None:
    early = EarlyWorkers(COMMAND, 2)
    assert len(early) == 2
    early.close()
    assert len(early) == 0 and not [each for each in psutil.Process().children() if "--early" in each.cmdline()]


def test_a_process_whose_parent_is_gone_is_sent_nothing() -> None:
    ours, theirs = socket.socketpair()
    ours.close()
    assert handed_over(theirs) is None
    theirs.close()
    with pytest.raises(OSError, match="closed|descriptor|peer|pipe"):
        hand_over(ours, ["--x"], [])


def test_long_arguments_come_whole() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        arguments = ["--config-json", "ä" * 3_000_000]
        hand_over(ours, arguments, [0, 2])
        sent = handed_over(theirs)
    assert sent is not None and sent.arguments == arguments and sent.descriptors.keys() == {0, 2}
    for descriptor in sent.descriptors.values():
        os.close(descriptor)


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        (["--config-json", "x", "--early-workers", "4"], 4),
        (["--early-workers"], 0),
        (["--early-workers", "-1"], 0),
        (["--early-workers", "many"], 0),
        ([], 0),
    ],
)
def test_a_command_line_says_how_many(arguments: list[str], count: int) -> None:
    assert wanted(arguments) == count


def test_a_backend_that_is_refused_leaves_no_early_worker(tmp_path: pathlib.Path) -> None:
    early = EarlyWorkers(COMMAND, 1)
    config = tmp_path / "backend.json"
    config.write_text(json.dumps({"engine": {"model": str(tmp_path)}, "listen": f"unix:{tmp_path}/s"}))
    assert main(["--config-json", str(config)], early_workers=early) == ExitCode.REFUSED
    assert not [each for each in psutil.Process().children() if "--early" in each.cmdline()]


def test_a_worker_that_is_never_sent_anything_ends_well() -> None:
    """A real one, whose parent closes its end as the backend does when it ends in order."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "headrace_backend.worker", "--early", str(theirs.fileno()), "--rank", "0"]
        process = subprocess.Popen([*command, "--parent-pid", str(os.getpid())], pass_fds=(theirs.fileno(),))
    ours.close()
    assert process.wait(300) == 0
