"""What a user sees while files come: bars on a terminal, a line now and then elsewhere. On stderr.

Owns the drawing only; files and bytes are reported by whoever fetches them, from several threads.
"""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Protocol, Self

import rich.console
import rich.progress

_LINE_EVERY_S = 10.0
# Columns of a file's name beside a bar on a terminal of 80.
_NAME_COLUMNS = 30


class Progress(Protocol):
    """The listener of a download."""

    def begin(self, path: str, num_bytes: int, already: int) -> None:
        """A file of a size begins; of it some bytes are there from an earlier try."""

    def advance(self, path: str, num_bytes: int) -> None:
        """Bytes of a file have come; fewer than none where it begins anew."""

    def finish(self, path: str) -> None:
        """A file is whole and its hash is right."""

    def note(self, line: str) -> None:
        """Something happened that a user should know."""

    def __enter__(self) -> Self:
        """Begins to draw."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends to draw."""


def shown_progress(total_bytes: int, num_files: int) -> Progress:
    """Returns bars where stderr is a terminal, else lines.

    Args:
        total_bytes: what all files have together, of which some may be there already.
        num_files: how many they are.
    """
    return Bars(total_bytes, num_files) if sys.stderr.isatty() else Lines(total_bytes)


def in_words(num_bytes: float) -> str:
    """A size for people, in units of 1,000 as hubs show them."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.1f} GB"


class Bars:
    """A bar for each file under way, and one for all where there are several."""

    def __init__(self, total_bytes: int, num_files: int) -> None:
        self._bars = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}", table_column=rich.table.Column(no_wrap=True)),
            rich.progress.BarColumn(bar_width=None),
            rich.progress.DownloadColumn(),
            rich.progress.TransferSpeedColumn(),
            rich.progress.TimeRemainingColumn(compact=True),
            console=rich.console.Console(stderr=True),
            transient=True,
        )
        self._all = self._bars.add_task("all files", total=total_bytes, visible=num_files > 1)
        self._files: dict[str, rich.progress.TaskID] = {}

    def __enter__(self) -> Self:
        """Begins to draw."""
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Takes the bars away; what stays is said by lines."""
        self._bars.stop()

    def begin(self, path: str, num_bytes: int, already: int) -> None:
        """Adds a file's bar."""
        name = path if len(path) <= _NAME_COLUMNS else "..." + path[3 - _NAME_COLUMNS :]
        self._files[path] = self._bars.add_task(name, total=num_bytes, completed=already)
        self._bars.advance(self._all, already)

    def advance(self, path: str, num_bytes: int) -> None:
        """Moves a file's bar, and that of all."""
        self._bars.advance(self._files[path], num_bytes)
        self._bars.advance(self._all, num_bytes)

    def finish(self, path: str) -> None:
        """Takes a file's bar away."""
        if path in self._files:
            self._bars.remove_task(self._files.pop(path))

    def note(self, line: str) -> None:
        """Writes a line above the bars."""
        self._bars.console.print(f"headrace: {line}", markup=False, highlight=False, soft_wrap=True)


class Lines:
    """A line when a file is whole, and one every few seconds."""

    def __init__(self, total_bytes: int) -> None:
        self._total = total_bytes
        self._done = 0
        self._came = 0
        self._started = self._last = time.monotonic()
        self._sizes: dict[str, int] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        """Begins."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends."""

    def begin(self, path: str, num_bytes: int, already: int) -> None:
        """Counts what is there already, and says so."""
        with self._lock:
            self._done += already
            self._sizes[path] = num_bytes
        if already:
            self.note(f"{path}: goes on at {in_words(already)} of {in_words(num_bytes)}")

    def advance(self, path: str, num_bytes: int) -> None:
        """Counts bytes; writes a line if the last is long ago."""
        with self._lock:
            self._done += num_bytes
            self._came += num_bytes
            now = time.monotonic()
            is_due = now - self._last >= _LINE_EVERY_S
            self._last = now if is_due else self._last
        if is_due:
            self.note(self._state(now - self._started))

    def finish(self, path: str) -> None:
        """Says that a file is there."""
        size = f" ({in_words(self._sizes[path])}, hash checked)" if path in self._sizes else ""
        self.note(f"{path}: done{size}")

    def note(self, line: str) -> None:
        """Writes a line."""
        sys.stderr.write(f"headrace: {line}\n")

    def _state(self, elapsed_s: float) -> str:
        rate = self._came / elapsed_s
        rest = f", {(self._total - self._done) / rate:,.0f} s left" if rate > 0 else ""
        percent = 100 * self._done // max(self._total, 1)
        return f"{in_words(self._done)} of {in_words(self._total)} ({percent}%), {in_words(rate)}/s{rest}"
