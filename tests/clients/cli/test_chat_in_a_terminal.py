"""`headrace chat` in front of a person: a pseudo-terminal, keys pressed at awkward moments."""

from __future__ import annotations

import contextlib
import os
import pathlib
import pty
import select
import subprocess
import sys
from collections.abc import Iterator

import pytest
from tests.clients.canned_service import CannedServer

from headrace.v1 import inference_pb2

ROOT = pathlib.Path(__file__).resolve().parents[3]
CTRL_C, CTRL_D, ALT_ENTER, UP = b"\x03", b"\x04", b"\x1b\r", b"\x1b[A"
# A terminal is asked to mark what is pasted as soon as a line is read, and no longer before that.
READING = "\x1b[?2004h"


class Terminal:
    """A chat in a terminal: what it shows, and keys."""

    def __init__(self, side: int, process: subprocess.Popen[bytes]) -> None:
        self._side = side
        self.process = process
        self._shown = ""

    def press(self, keys: bytes) -> None:
        """Types."""
        os.write(self._side, keys)

    def until(self, text: str, timeout_s: float = 90.0) -> str:
        """Waits until `text` is shown; returns what came before it."""
        while text not in self._shown:
            readable, _, _ = select.select([self._side], [], [], timeout_s)
            assert readable, f"waited for {text!r}, saw {self._shown!r}"
            self._shown += os.read(self._side, 4096).decode(errors="replace")
        before, self._shown = self._shown.split(text, 1)
        return before


@pytest.fixture
def terminal(server: CannedServer, tmp_path: pathlib.Path) -> Iterator[Terminal]:
    with chat_in_a_terminal(server, tmp_path) as running:
        yield running


@contextlib.contextmanager
def chat_in_a_terminal(server: CannedServer, state: pathlib.Path) -> Iterator[Terminal]:
    side, child_side = pty.openpty()
    # A session leader that opens a terminal gets it as its own, so that Ctrl-C is a signal.
    name = os.ttyname(child_side)
    script = f'exec "$0" "$@" <{name} >{name} 2>&1'
    environment = os.environ | {
        "PYTHONPATH": str(ROOT / "clients/python"),
        "HEADRACE_SERVER": server.address,
        "XDG_STATE_HOME": str(state),
    }
    command = ["/bin/sh", "-c", script, sys.executable, "-m", "headrace", "chat"]
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        yield Terminal(side, process)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        for descriptor in (side, child_side):
            with contextlib.suppress(OSError):
                os.close(descriptor)


def questions(server: CannedServer) -> list[str]:
    """What the model was asked, in order."""
    asked = [request for request in server.seen.requests if isinstance(request, inference_pb2.ChatRequest)]
    return [request.messages[-1].parts[0].text for request in asked]


def test_ctrl_c_stops_the_answer_and_not_the_loop(server: CannedServer, terminal: Terminal) -> None:
    """A person asks for an endless answer and presses Ctrl-C.

    Then comes an error, another question, and Ctrl-D.
    """
    assert f"canned on {server.address}" in terminal.until(READING)
    terminal.press(b"endless\n")
    terminal.until("w3 ")
    terminal.press(CTRL_C)
    terminal.until("[stopped]")
    terminal.until(READING)
    assert server.seen.cancelled.wait(120)
    terminal.press(b"invalid\n")
    terminal.until("INVALID_ARGUMENT")
    terminal.until(READING)
    terminal.press(CTRL_C)
    terminal.until("Ctrl-D leaves")
    terminal.press(b"hello\n")
    terminal.until("w4 ")
    terminal.until(READING)
    terminal.press(CTRL_D)
    assert terminal.process.wait(240) == 0
    said = [(m.role, m.parts[0].text) for m in server.seen.requests[-1].messages]
    assert [role for role, _ in said] == [2, 3, 2] and said[1][1].startswith("w0 w1 w2 ")


def test_a_line_typed_in_the_moment_the_prompt_shows_is_answered(server: CannedServer, terminal: Terminal) -> None:
    for turn in range(60):
        terminal.until(READING)
        terminal.press(f"line {turn}\n".encode())
    terminal.until("w4 ")
    terminal.until(READING)
    assert questions(server) == [f"line {i}" for i in range(60)]


def test_lines_typed_ahead_are_answered_one_by_one(server: CannedServer, terminal: Terminal) -> None:
    terminal.until(READING)
    terminal.press(b"slow\n")
    terminal.until("w1 ")
    terminal.press(b"first\nsecond\n")
    for _ in range(3):
        terminal.until(READING)
    assert questions(server) == ["slow", "first", "second"]


def test_every_line_after_a_stopped_answer_is_answered(server: CannedServer, terminal: Terminal) -> None:
    """A KeyboardInterrupt inside grpc's wait left one of its locks taken.

    Once in about thirty times the next answer never came.
    """
    terminal.until(READING)
    for turn in range(60):
        terminal.press(b"endless\n")
        terminal.until("w3 ")
        terminal.press(CTRL_C)
        terminal.until("[stopped]")
        terminal.until(READING)
        terminal.press(f"line {turn}\n".encode())
        terminal.until("w4 ", 20)
        terminal.until(READING, 20)
    assert len(questions(server)) == 120


def test_several_lines_are_one_message_and_are_found_in_the_next_chat(
    server: CannedServer, tmp_path: pathlib.Path
) -> None:
    with chat_in_a_terminal(server, tmp_path) as first:
        first.until(READING)
        first.press(b"\x1b[200~pasted\n/second line\x1b[201~\n")
        first.until("w4 ")
        first.until(READING)
        first.press(b"typed" + ALT_ENTER + b"in two\n")
        first.until("w4 ")
        first.until(READING)
        first.press(CTRL_D)
        assert first.process.wait(240) == 0
    file = tmp_path / "headrace" / "chat_history"
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    with chat_in_a_terminal(server, tmp_path) as second:
        second.until(READING)
        second.press(UP)
        second.until("in two")
        second.press(b"\n")
        second.until("w4 ")
    assert questions(server) == ["pasted\n/second line", "typed\nin two", "typed\nin two"]


def test_no_history_leaves_no_file_and_a_dumb_terminal_gets_no_codes(
    server: CannedServer, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_CHAT_HISTORY", "0")
    monkeypatch.setenv("TERM", "dumb")
    with chat_in_a_terminal(server, tmp_path) as terminal:
        shown = terminal.until("> ")
        terminal.press(b"hello\n")
        shown += terminal.until("w4 ")
    assert "\x1b" not in shown and not list(tmp_path.iterdir())
