"""The progress of one command on its standard error, whoever reads it.

Owns the choice between bars and lines, and how often there is a line. Lines are for logs: at most
one every few seconds, fewer of what takes hours, and none of what takes less.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import rich.console

from headrace_progress.bars import Bars
from headrace_progress.phase import Phase

_LINE_INTERVAL_S = 5.0
# So many lines in all the time that a phase has taken so far.
_LINES_A_PHASE = 20


class ShownProgress:
    """Shows phases while it is entered: a bar for each on a terminal, elsewhere lines."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Shows nothing yet."""
        self._console = rich.console.Console(file=sys.stderr, highlight=False, soft_wrap=True)
        self._clock = clock
        self._bars = Bars(self._console, clock) if self._console.is_terminal else None
        self._phases: dict[str, Phase] = {}
        self._line_s = clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.close()

    def begin(self, name: str, total: float, unit: str, done: float = 0.0) -> None:
        """A phase begins, of which some may be done already."""
        self._phases[name] = Phase(name, total, unit, self._clock(), done, done)
        self._show(self._phases[name])

    def report(self, name: str, done: float, total: float, unit: str, detail: str = "") -> None:
        """So much of a phase is done, which begins with its first report."""
        if name not in self._phases:
            self.begin(name, total, unit, done)
        self.update(name, done, detail)

    def update(self, name: str, done: float, detail: str = "") -> None:
        """So much of a phase that has begun is done."""
        phase = self._phases[name]
        phase.done, phase.detail = done, detail
        self._show(phase)

    def advance(self, name: str) -> None:
        """One more unit of a phase is done."""
        phase = self._phases[name]
        self.update(name, phase.done + 1, phase.detail)

    def left_s(self, name: str) -> float | None:
        """Seconds that a phase will still take; None: nobody can say yet."""
        return self._phases[name].left_s(self._clock())

    def milestone(self, line: str) -> None:
        """Prints a line where there are no bars that show as much."""
        if self._bars is None:
            self.note(line)

    def note(self, line: str) -> None:
        """Prints a line, on a terminal above the bars."""
        self._line_s = self._clock()
        self._console.print(f"headrace: {line}", markup=False)

    def _show(self, phase: Phase) -> None:
        if self._bars is not None:
            self._bars.update(phase)
        elif not phase.is_finished:
            now = self._clock()
            if now - self._line_s >= max(_LINE_INTERVAL_S, (now - phase.begun_s) / _LINES_A_PHASE):
                self.note(f"{phase.name}: {phase.words(now)}")
