"""A real backend that is begun before its arguments are known: it gets them, or ends unseen."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Iterator

import psutil
from tests.support.processes import alive, wait_until

from headrace_backend.server.early_arguments import known_arguments
from headrace_backend.server.lifetime import ExitCode
from headrace_backend.step.handover import hand_over


@contextlib.contextmanager
def begun() -> Iterator[tuple[subprocess.Popen[str], socket.socket]]:
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "headrace_backend", "--early", str(theirs.fileno()), "--early-workers", "1"]
        process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stderr=subprocess.PIPE, text=True)
    with ours, process:
        try:
            yield process, ours
        finally:
            process.kill()


def test_one_that_is_sent_nothing_ends_with_its_workers_and_says_nothing() -> None:
    with begun() as (process, channel):
        workers = wait_until(psutil.Process(process.pid).children, what="its worker is started")
        channel.close()
        assert process.wait(300) == ExitCode.OK
        assert process.stderr is not None and process.stderr.read() == ""
        assert not alive(worker.pid for worker in workers)


def test_what_it_is_sent_is_refused_as_a_command_line_would_be(tmp_path: pathlib.Path) -> None:
    config = tmp_path / "backend.json"
    config.write_text(json.dumps({"engine": {"model": str(tmp_path / "none")}, "listen": f"unix:{tmp_path}/s"}))
    reading, writing = os.pipe()
    with begun() as (process, channel):
        workers = wait_until(psutil.Process(process.pid).children, what="its worker is started")
        hand_over(channel, ["--config-json", str(config), "--pulse-fd", str(writing)], [writing])
        os.close(writing)
        assert process.wait(300) == ExitCode.REFUSED
        assert process.stderr is not None and "no such model folder" in process.stderr.read()
        assert not alive(worker.pid for worker in workers)
    # Its copy of the descriptor was the last.
    assert os.read(reading, 1) == b""
    os.close(reading)


def test_a_command_line_that_is_whole_is_taken_as_it_is() -> None:
    assert known_arguments(["--config-json", "file"]) == ["--config-json", "file"]
