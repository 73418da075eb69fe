"""The parts of an output, in the order in which the model wrote them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import string
from collections.abc import Collection

_ID_CHARACTERS = string.digits + string.ascii_letters
# What templates of Mistral's take; other models' take any.
_ID_LENGTH = 9


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """Text of the answer."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote for itself."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallStarted:
    """The model began to call a function, by its name; `index` counts the output's calls from 0."""

    index: int
    id: str
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    delta: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallFinished:
    """A call is over, with all of its arguments.

    It is valid if it came to its end, names a tool of the request, and its arguments are a JSON
    object.
    """

    index: int
    arguments: str
    valid: bool


Part = Text | Reasoning | CallStarted | CallArguments | CallFinished


class Calls:
    """The calls of one output while they arrive.

    Args:
        parts: where their parts are appended.
        names: the request's tools.
        place: names the output, the same whoever reads it; ids of calls are made of it.
    """

    def __init__(self, parts: list[Part], names: Collection[str], place: str) -> None:
        self._parts = parts
        self._names = names
        self._place = place
        self.count = 0
        self._name: str | None = None
        self._arguments: list[str] = []

    @property
    def is_open(self) -> bool:
        """Whether a call has begun and is not over."""
        return self._name is not None

    def start(self, name: str) -> None:
        """Begins a call."""
        self._parts.append(CallStarted(self.count, _call_id(f"{self._place}/{self.count}"), name))
        self._name, self._arguments = name, []

    def add(self, delta: str) -> None:
        """Takes more of the open call's arguments."""
        if delta:
            self._arguments.append(delta)
            self._parts.append(CallArguments(self.count, delta))

    def finish(self, whole: bool) -> None:
        """Ends the open call; `whole`: it came to its end."""
        arguments = "".join(self._arguments)
        valid = whole and self._name in self._names and _is_object(arguments)
        self._parts.append(CallFinished(self.count, arguments, valid))
        self.count += 1
        self._name = None


def _call_id(place: str) -> str:
    number = int.from_bytes(hashlib.sha256(place.encode()).digest(), "big")
    characters = []
    for _ in range(_ID_LENGTH):
        number, digit = divmod(number, len(_ID_CHARACTERS))
        characters.append(_ID_CHARACTERS[digit])
    return "".join(characters)


def _is_object(text: str) -> bool:
    try:
        # msgspec takes no half of a surrogate pair in an escape, which JSON may have.
        return isinstance(json.loads(text, parse_constant=_no_number), dict)
    except (ValueError, RecursionError):
        return False


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
