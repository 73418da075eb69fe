"""Phases as bars on a terminal, one below the other; lines that are printed meanwhile go above.

Owns the form: a name, a bar of a quarter of 80 columns, and the phase's words, whose times go on
while nobody reports anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import rich.console
import rich.progress
import rich.text

from headrace_progress.phase import Phase

_BAR_COLUMNS = 20
# Few enough that a process which measures its own times is not disturbed.
_DRAWN_PER_S = 4


class Bars:
    """One bar for each phase, by its name. Shows nothing before the first."""

    def __init__(self, console: rich.console.Console, clock: Callable[[], float] = time.monotonic) -> None:
        """Draws on a console, which is a terminal."""
        columns = (
            rich.progress.TextColumn("{task.description}", markup=False),
            rich.progress.BarColumn(bar_width=_BAR_COLUMNS),
            _Words(clock),
        )
        self._progress = rich.progress.Progress(
            *columns, console=console, redirect_stdout=False, refresh_per_second=_DRAWN_PER_S
        )
        self._tasks: dict[str, rich.progress.TaskID] = {}

    def update(self, phase: Phase) -> None:
        """Moves a phase's bar."""
        if not self._tasks:
            self._progress.start()
        if phase.name not in self._tasks:
            self._tasks[phase.name] = self._progress.add_task(phase.name, total=None, phase=phase)
        # A bar without a total moves to and fro.
        total = phase.total if phase.has_figure or phase.is_finished else None
        self._progress.update(self._tasks[phase.name], total=total, completed=phase.done, phase=phase)

    def close(self) -> None:
        """Leaves the terminal as it was; what the bars show stays."""
        if self._tasks:
            self._progress.stop()


class _Words(rich.progress.ProgressColumn):
    """The words of a task's phase, as of the moment at which they are drawn."""

    max_refresh = 0.5

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock
        # Phase -> words of its end, whose time stands still.
        self._ended: dict[str, str] = {}

    def render(self, task: rich.progress.Task) -> rich.text.Text:
        phase: Phase = task.fields["phase"]
        if not phase.is_finished:
            self._ended.pop(phase.name, None)
            return rich.text.Text(phase.words(self._clock()))
        return rich.text.Text(self._ended.setdefault(phase.name, phase.words(self._clock())))
