"""Kernels' sources, found quickly while the kernels are imported.

Triton asks for the lines of each kernel when it is defined, and Python finds a function's last line
by a tokenizer that is written in Python: for 340 kernels that is half of what importing them takes.
Ours stand at the top of their files and are formatted, so that a function ends where its
indentation does. What is found is the same to the letter (a test asks for each kernel), since
compiled kernels are kept under a hash of it.
"""

from __future__ import annotations

import contextlib
import inspect
import linecache
import pathlib
from collections.abc import Iterator
from types import FunctionType
from typing import Any

_FOLDER = str(pathlib.Path(__file__).parent)
_QUOTES = '"""'
_slowly = inspect.getsourcelines


@contextlib.contextmanager
def quick_sources() -> Iterator[None]:
    """Has `inspect.getsourcelines` find our kernels quickly meanwhile, for all of the process."""
    inspect.getsourcelines = source_lines  # type: ignore[assignment]  # it has another name for its argument
    try:
        yield
    finally:
        inspect.getsourcelines = _slowly


def source_lines(found: Any) -> tuple[list[str], int]:
    """Returns what `inspect.getsourcelines` returns: the lines, and the number of the first.

    Args:
        found: A function, or what else has a source.

    Raises:
        OSError: There is no source.
    """
    if isinstance(found, FunctionType) and found.__code__.co_filename.startswith(_FOLDER):
        first = found.__code__.co_firstlineno
        lines = _function(linecache.getlines(found.__code__.co_filename)[first - 1 :])
        if lines is not None:
            return lines, first
    return _slowly(found)


def _function(lines: list[str]) -> list[str] | None:
    """The lines of the function that they begin with; None where its indentation does not say."""
    if not lines or lines[0][0] not in "@d":
        return None
    begun = False
    last = 0
    for number, line in enumerate(lines):
        if line[0] in " \t":
            last = number if line.strip() else last
        elif line.startswith("def ") and not begun:
            begun, last = True, number
        elif line[0] in ")]}" or (line[0] == "@" and not begun):
            last = number
        elif line[0] not in "#\r\n":
            break
    function = lines[: last + 1]
    # A text of several lines may have some without indentation.
    return function if begun and "".join(function).count(_QUOTES) % 2 == 0 else None
