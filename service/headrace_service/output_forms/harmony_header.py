"""The header of a message in harmony: who writes it, in which channel, and to whom.

Owns what a header may say, and whether text that has not ended may become one. Its sections are
split by special tokens, of which readers know one character each.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Final

CHANNELS: Final = ("analysis", "commentary", "final")
ROLE: Final = "assistant"
FUNCTIONS: Final = "functions."
_RECIPIENT: Final = "to="
# Recipients and types of content; what has another character is no header.
_PLAIN: Final = re.compile(r"[A-Za-z0-9_./+=-]*")
# Those to whom a message goes that is no call.
_PEOPLE: Final = frozenset({"user", "all", "assistant"})
# What is longer is no header: a name of 64 characters, and some 50 more.
_MAX_CHARACTERS: Final = 256
# Behind the channel's token: a channel, a recipient, a type.
_MAX_WORDS: Final = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Addressed:
    """What a whole header says.

    Attributes:
        channel: one of `CHANNELS`; "": none is named.
        function: the function that is called; "": the message is none's arguments.
    """

    channel: str
    function: str


class Header:
    """A header while it arrives.

    Args:
        channel: the character that stands for the special token before the channel.
        constrain: that of the special token before the type of the content.
        begins: what the header begins with; a role that stands before it is not part of it.
        has_role: whether the role is part of it.
    """

    def __init__(self, channel: str, constrain: str, begins: str, has_role: bool) -> None:
        self._channel = channel
        self._constrain = constrain
        self._begins = begins
        self._num_before = len(begins) if has_role else 0
        self._has_role = has_role
        self.raw = begins

    def feed(self, text: str) -> bool:
        """Takes more text; returns whether all of it may still become a header."""
        self.raw += text
        return len(self.raw) <= _MAX_CHARACTERS and "\n" not in self.raw and self._may_go_on()

    @property
    def is_sure(self) -> bool:
        """Whether what came so far is hardly anything else than a header."""
        return bool(self._begins) or self._channel in self.raw or _RECIPIENT in self.raw

    def addressed(self) -> Addressed | None:
        """Returns what the header says, which is whole; None: it is none."""
        role, channel = self._sections()
        if self._has_role and role[:1] != [ROLE]:
            return None
        if channel is not None and (not channel or channel[0] not in CHANNELS):
            return None
        words = [*role, *(channel or [])]
        recipients = [word.removeprefix(_RECIPIENT) for word in words if word.startswith(_RECIPIENT)]
        to = recipients[0] if recipients else ""
        function = "" if to in _PEOPLE else to.removeprefix(FUNCTIONS)
        return Addressed(channel[0] if channel else "", function)

    def _sections(self) -> tuple[list[str], list[str] | None]:
        """Returns the words before the channel's token and behind it; None: it has not come."""
        before, token, behind = self.raw[self._num_before :].partition(self._channel)
        return before.split(), behind.replace(self._constrain, " ").split() if token else None

    def _may_go_on(self) -> bool:
        """Returns whether a header may begin so: once none may, none with more text may."""
        before, _, behind = self.raw[self._num_before :].partition(self._channel)
        if self._constrain in before or self._channel in behind:
            return False
        role, channel = self._sections()
        expected = [(ROLE,), (_RECIPIENT,)] if self._has_role else [(_RECIPIENT,)]
        if not all(_PLAIN.fullmatch(word) for word in [*role, *(channel or [])]):
            return False
        if not _fit(role, expected, is_over=channel is not None):
            return False
        if channel is None:
            return True
        return _fit(channel[:1], [CHANNELS], is_over=len(channel) > 1) and len(channel) <= _MAX_WORDS


def _fit(words: Sequence[str], expected: Sequence[tuple[str, ...]], is_over: bool) -> bool:
    """Returns whether each word is one of those expected at its place, the last one perhaps cut."""
    if len(words) > len(expected):
        return False
    for place, (word, texts) in enumerate(zip(words, expected, strict=False)):
        is_whole = is_over or place < len(words) - 1
        if texts == (_RECIPIENT,):
            fits = word.startswith(_RECIPIENT) or (not is_whole and _RECIPIENT.startswith(word))
        else:
            fits = word in texts or (not is_whole and any(text.startswith(word) for text in texts))
        if not fits:
            return False
    return True
