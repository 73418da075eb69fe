"""One of several parts of the suite, so that a run of CI need not try all that takes minutes.

Owns which files are in a part: the same ones for the same number of parts, whatever files come and
go beside them. Files of other parts are not even imported.
"""

from __future__ import annotations

import argparse
import pathlib
import zlib
from typing import NamedTuple

_TESTS = pathlib.Path(__file__).parents[1]


class SuitePart(NamedTuple):
    """Part `number`, from 1, of `count`."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> SuitePart:
        """Reads NUMBER/COUNT.

        Raises:
            argparse.ArgumentTypeError: It is not of that form, or there is no such part.
        """
        number, slash, count = text.partition("/")
        if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
            raise argparse.ArgumentTypeError(f"it is NUMBER/COUNT, NUMBER from 1 to COUNT, not {text!r}")
        return cls(int(number), int(count))

    def has(self, path: pathlib.Path) -> bool:
        """Whether a file of tests is in it."""
        name = path.relative_to(_TESTS).as_posix()
        return zlib.crc32(name.encode()) % self.count == self.number - 1
