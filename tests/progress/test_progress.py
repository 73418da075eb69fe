"""Progress in figures, as bars on a terminal and as few lines elsewhere."""

from __future__ import annotations

import io
import itertools
import sys

import pytest

from headrace_progress.phase import Phase, duration
from headrace_progress.shown import ShownProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def stderr_of(monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO) -> io.StringIO:
    """Takes the place of stderr; within the test, since pytest has its own there until then."""
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    return stderr


@pytest.mark.parametrize(
    ("phase", "now", "words"),
    [
        (Phase("8 open", 64, "requests", 10.0, 16), 20.0, "16 of 64 requests, 25%, 30 s left"),
        (Phase("8 open", 64, "requests", 10.0), 13.0, "0 of 64 requests, 0%, 3 s so far"),
        (Phase("8 open", 64, "requests", 10.0, 1), 10.5, "1 of 64 requests, 1%, 0 s so far"),
        (Phase("8 open", 64, "requests", 10.0, 64), 13.25, "64 requests in 3.2 s"),
        (Phase("weights", 15360, "MiB", 0.0, 1536), 3.0, "1.5 of 15.0 GiB, 10%, 512 MiB/s, 27 s left"),
        (Phase("weights", 15360, "MiB", 0.0, 15360), 5.0, "15.0 GiB in 5.0 s, 3.0 GiB/s"),
        (Phase("weights", 14, "MiB", 0.0, 7), 2.0, "7 of 14 MiB, 50%, 4 MiB/s, 2 s left"),
        # What was there before counts for no rate.
        (Phase("file", 2048, "MiB", 0.0, 1536, 1024), 2.0, "1.5 of 2.0 GiB, 75%, 256 MiB/s, 2 s left"),
        (Phase("8 open", 6, "s", 0.0, 6), 6.2, "6.2 s"),
        (Phase("libraries", 1, "", 0.0), 12.4, "12 s so far"),
        (Phase("libraries", 1, "", 0.0, 1), 12.4, "12.4 s"),
        (Phase("steps", 9, "steps", 0.0, 3, detail="7 kernels compiled"), 6.0,
         "3 of 9 steps, 33%, 12 s left, 7 kernels compiled"),
    ],
)  # fmt: skip
def test_a_phase_says_how_far_it_is_and_how_long_the_rest_takes(phase: Phase, now: float, words: str) -> None:
    assert phase.words(now) == words


def test_times_are_said_as_people_do() -> None:
    assert [duration(seconds) for seconds in (0.4, 59.4, 125, 4320)] == ["0 s", "59 s", "2 min 5 s", "1 h 12 min"]


def test_lines_come_every_few_seconds_and_none_for_what_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = stderr_of(monkeypatch, io.StringIO())
    clock = itertools.count(0.0, 0.5)
    with ShownProgress(lambda: next(clock)) as progress:
        progress.begin("quick", 2, "steps")
        progress.advance("quick")
        progress.advance("quick")
        assert stderr.getvalue() == ""
        progress.begin("long", 1000, "steps")
        for _ in range(40):
            progress.advance("long")
    lines = stderr.getvalue().splitlines()
    # Two to three looks at the clock an update.
    assert 2 <= len(lines) <= 13
    assert all(line.startswith("headrace: long: ") and line.endswith(" left") for line in lines)


def test_a_terminal_shows_a_bar_for_each_phase_within_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = stderr_of(monkeypatch, Terminal())
    with ShownProgress() as progress:
        progress.begin("first", 14, "requests")
        progress.note("a line above")
        progress.update("first", 14)
        progress.begin("second", 1, "")
    text = stderr.getvalue()
    assert "a line above" in text and "14 requests in" in text and "s so far" in text
    assert text.endswith("\x1b[?25h"), "the cursor is still hidden"


def test_no_progress_leaves_the_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = stderr_of(monkeypatch, Terminal())
    with ShownProgress():
        pass
    assert stderr.getvalue() == ""
