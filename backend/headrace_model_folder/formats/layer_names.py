"""Which linear layers a quantization names: exactly, by pattern, by the end or a part of a name.

Owns the rules of the formats and the guard in front of regular expressions, which come from a file
that anybody may have written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from headrace_model_folder.errors import InvalidModelFolder, shown

LM_HEAD = "lm_head"
_MOST_ENTRIES = 16_384
# What regular expressions may hold. Matching may try every way to spread a name over repetitions
# and every alternative of each group: `_ways` bounds how many those are.
_LONGEST_PATTERN = 512
_MOST_REPETITIONS = 4
_MOST_WAYS = 1 << 20
_MOST_WAYS_TOGETHER = 1 << 21
_MOST_PATTERNS = 4096
_LONGEST_NAME = 40
# Escapes and classes: one character, whatever they hold.
_CHARACTER = re.compile(r"\\.|\[\^?\]?[^\]\\]*(?:\\.[^\]\\]*)*\]", re.DOTALL)
# What begins with (? and is more than a group, a name for it, or a look ahead or back: flags and
# comments could hide a repeated group.
_SPECIAL = re.compile(r"\(\?(?![:=!]|<[=!]|P<)")
_REPETITION = re.compile(r"(?:[*+?]|\{[^{}]*\})[?+]?")
# Takes exponential time where the group may match in several ways.
_REPEATED_GROUP = re.compile(r"\)[*+{]")


class Patterns:
    """Regular expressions of one folder, whose time is bounded one by one and together."""

    def __init__(self) -> None:
        self._count = 0
        self._ways = 0

    def compiled(self, pattern: str, where: str) -> re.Pattern[str]:
        """One of them.

        Raises:
            InvalidModelFolder: It is none, or it or all so far may take long.
        """
        ways = _ways(pattern)
        if ways is None:
            raise InvalidModelFolder(
                f"{where} has the pattern {shown(pattern)}: at most {_LONGEST_PATTERN} characters and "
                f"{_MOST_REPETITIONS} repetitions, few alternatives and no repeated group are matched"
            )
        self._count, self._ways = self._count + 1, self._ways + ways
        if self._count > _MOST_PATTERNS or self._ways > _MOST_WAYS_TOGETHER:
            raise InvalidModelFolder(
                f"{where} has {shown(pattern)} after {self._count - 1} other patterns, which together may take too "
                f"long: at most {_MOST_PATTERNS} are matched, fewer if they have several repetitions"
            )
        try:
            return re.compile(pattern)
        except (re.error, OverflowError, RecursionError):
            raise InvalidModelFolder(f"{where} has {shown(pattern)}, which is no regular expression") from None


def _ways(pattern: str) -> int | None:
    """In how many ways a name may be tried at most; None: more than are matched."""
    if len(pattern) > _LONGEST_PATTERN:
        return None
    text = _CHARACTER.sub("x", pattern)
    if _SPECIAL.search(text) or _REPEATED_GROUP.search(text):
        return None
    repetitions = len(_REPETITION.findall(text.replace("(?", "(")))
    ways = math.comb(_LONGEST_NAME + repetitions, repetitions) * _alternatives(text)
    return None if repetitions > _MOST_REPETITIONS or ways > _MOST_WAYS else ways


def _alternatives(text: str) -> int:
    """Number of alternatives in all groups, multiplied."""
    product, groups = 1, [1]
    for character in text:
        if character == "(":
            groups.append(1)
        elif character == "|":
            groups[-1] += 1
        elif character == ")" and len(groups) > 1:
            product *= groups.pop()
    return product * math.prod(groups)


def dotted_parts(name: str) -> frozenset[str]:
    """A name, its beginnings, its ends and its parts, cut at dots."""
    words = name.split(".")
    ends = range(1, len(words) + 1)
    return frozenset(".".join(words[begin:end]) for end in ends for begin in range(end))


def strings(value: object, where: str) -> Sequence[str]:
    """A list of strings; none if absent.

    Raises:
        InvalidModelFolder: Something else, or very many.
    """
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise InvalidModelFolder(f"{where} must be a list of strings, is {shown(value)}")
    if len(value) > _MOST_ENTRIES:
        raise InvalidModelFolder(f"{where} must have at most {_MOST_ENTRIES} entries, has {len(value)}")
    return value
