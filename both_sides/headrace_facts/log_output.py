"""Standard output and standard error of a process that serves: a full disk, or a reader that is
gone, costs lines of its log and not the process.

Owns the count of the lines that were lost, and the note of them before the next line that can be
written. Every process of the server calls `keep_going` where it sets up its log; those that tell
facts tell the count too.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any, TextIO


class LossyFile(io.FileIO):
    """Writes to a descriptor and never fails: what it does not take is counted, by lines, and
    forgotten.

    Attributes:
        num_lost_lines: over its whole life.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.num_lost_lines = 0
        self._num_unnoted = 0
        self._why = ""
        self._ends_within_line = False

    def write(self, data: Any, /) -> int:
        """Writes what there is room for, after the note of what was lost before.

        Returns how much of `data` is done with.
        """
        lines, note = bytes(data), self._note()
        num_written = self._attempt(note + lines)
        if num_written == 0 or num_written < len(note):
            self._lose(lines)
            return len(lines)
        self._num_unnoted = 0
        return num_written - len(note)

    def _attempt(self, data: bytes) -> int:
        try:
            num_written = super().write(data)
        except OSError as error:
            self._why = os.strerror(error.errno or 0)
            return 0
        if num_written is None:
            self._why = "a pipe that does not block is full"
            return 0
        self._ends_within_line = not data[:num_written].endswith(b"\n")
        return num_written

    def _lose(self, lines: bytes) -> None:
        num_lines = max(lines.count(b"\n"), 1)
        self.num_lost_lines += num_lines
        self._num_unnoted += num_lines

    def _note(self) -> bytes:
        if not self._num_unnoted:
            return b""
        line_end = "\n" if self._ends_within_line else ""
        return f"{line_end}headrace: lines of this log that were lost: {self._num_unnoted} ({self._why})\n".encode()


_files: list[LossyFile] = []
_num_told = 0


def keep_going() -> None:
    """Has this process go on when its standard output or error can't be written to any more.

    What somebody else put in their places stays.
    """
    sys.stdout = _lossy(sys.stdout, sys.__stdout__)
    sys.stderr = _lossy(sys.stderr, sys.__stderr__)


def take_lost_lines() -> int:
    """Lines that this process lost since it was asked last."""
    global _num_told
    num_before, _num_told = _num_told, sum(file.num_lost_lines for file in _files)
    return _num_told - num_before


def _lossy(stream: TextIO, own: TextIO | None) -> TextIO:
    if own is None or stream is not own:
        return stream
    file = LossyFile(stream.fileno())
    _files.append(file)
    return io.TextIOWrapper(
        io.BufferedWriter(file), encoding=stream.encoding, errors="backslashreplace", line_buffering=True
    )
