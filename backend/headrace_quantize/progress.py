"""How far a run is, on stderr: a bar on a terminal, a line per layer elsewhere.

Owns nothing of what is done.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

import rich.console
import rich.progress


class RunProgress:
    """A bar while it is entered. Counts layers."""

    def __init__(self, total: int) -> None:
        """Shows nothing yet."""
        self._console = rich.console.Console(file=sys.stderr, highlight=False, soft_wrap=True)
        self._total, self._began_s = total, time.monotonic()
        self._bar: rich.progress.Progress | None = None
        if self._console.is_terminal:
            self._bar = rich.progress.Progress(
                rich.progress.TextColumn("{task.description}"),
                rich.progress.BarColumn(),
                rich.progress.MofNCompleteColumn(),
                rich.progress.TextColumn("layers"),
                rich.progress.TimeElapsedColumn(),
                rich.progress.TimeRemainingColumn(),
                console=self._console,
            )

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
            self._bar.add_task("quantizing", total=self._total)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def done(self, count: int, what: str) -> None:
        """So many layers are done, the last one in this way."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=count, description=what)
        else:
            self.note(f"{count} of {self._total} layers: {what}, {time.monotonic() - self._began_s:.1f} s")

    def note(self, line: str) -> None:
        """A line for the operator."""
        self._console.print(f"headrace: {line}", markup=False)
