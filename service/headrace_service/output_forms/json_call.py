"""A call written as JSON, read while its text arrives.

Owns just as much of JSON as shows where a value ends: which object has a name and arguments, and
when they are whole. Whether arguments are valid JSON is looked at once, at their end
(`parts.Calls`). The time of a character does not depend on what came before it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

import msgspec

from headrace_service.output_forms.parts import Calls

_SPACE = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")


class JsonValue:
    """Finds the end of one JSON value; to be fed from the value's first character on."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._is_scalar = False
        self.is_over = False

    def take(self, char: str) -> bool:
        """Takes a character; returns whether it belongs to the value."""
        if self._in_string:
            self._take_of_string(char)
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]" and self._depth:
            self._depth -= 1
            self.is_over = self._depth == 0
        elif self._depth == 0 and (char in ",}]" or char in _SPACE):
            self.is_over = True
            return False
        return True

    def _take_of_string(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._in_string = False
            self.is_over = self._depth == 0


class JsonState(enum.Enum):
    """How far an object has come."""

    OPEN = enum.auto()
    # A whole call.
    WHOLE = enum.auto()
    # No call: nothing of it was reported, and `JsonCall.raw` has its text.
    NO_CALL = enum.auto()
    # A call had begun, and what followed is no JSON.
    BROKEN = enum.auto()


class JsonCall:
    """One object with a name and arguments, which may also be called parameters.

    Other keys are passed over. Arguments are reported as they come, once the name is known.

    Args:
        calls: takes the call.

    Attributes:
        state: how far it has come.
    """

    def __init__(self, calls: Calls) -> None:
        self.state = JsonState.OPEN
        self._calls = calls
        self._next: Callable[[str], None] = self._expect_object
        # All text, until the call has begun.
        self._raw: list[str] = []
        self._key = ""
        self._value = JsonValue()
        # Text of the value, if it is kept: keys, names, and arguments before their name.
        self._kept: list[str] = []
        self._early_arguments: str | None = None
        # Arguments of an open call that were not reported yet.
        self._new: list[str] = []
        self._has_arguments = False

    @property
    def raw(self) -> str:
        """The text of what has not become a call."""
        return "".join(self._raw)

    def feed(self, text: str) -> str:
        """Takes more text; returns what is behind the object, once it is not open any more."""
        num_taken = 0
        for char in text:
            if self.state is not JsonState.OPEN:
                break
            if not self._calls.is_open:
                self._raw.append(char)
            self._next(char)
            num_taken += 1
        self._report()
        if self.state in (JsonState.WHOLE, JsonState.BROKEN):
            self._calls.finish(whole=self.state is JsonState.WHOLE)
        return text[num_taken:]

    def finish(self) -> None:
        """The output ends here."""
        if self.state is not JsonState.OPEN:
            return
        has_begun = self._calls.is_open
        self._break()
        if has_begun:
            self._calls.finish(whole=False)

    # -- one method for each place within the object

    def _expect_object(self, char: str) -> None:
        if char == "{":
            self._next = self._expect_key
        elif char not in _SPACE:
            self._break()

    def _expect_key(self, char: str) -> None:
        if char == '"':
            self._begin_value()
            self._next = self._in_key
            self._in_key(char)
        elif char == "}":
            self._end_object()
        elif char not in _SPACE:
            self._break()

    def _in_key(self, char: str) -> None:
        self._kept.append(char)
        self._value.take(char)
        if self._value.is_over:
            self._key = _string("".join(self._kept)) or ""
            self._next = self._expect_colon

    def _expect_colon(self, char: str) -> None:
        if char == ":":
            self._begin_value()
            self._next = self._expect_value
        elif char not in _SPACE:
            self._break()

    def _expect_value(self, char: str) -> None:
        if char in ",}]:":
            self._break()
        elif char not in _SPACE:
            self._next = self._in_value
            self._in_value(char)

    def _in_value(self, char: str) -> None:
        belongs = self._value.take(char)
        if belongs:
            self._keep(char)
        if self._value.is_over:
            self._end_value()
            if self.state is JsonState.OPEN and not belongs:
                self._expect_more(char)

    def _expect_more(self, char: str) -> None:
        if char == ",":
            self._next = self._expect_key
        elif char == "}":
            self._end_object()
        elif char not in _SPACE:
            self._break()

    # -- values

    def _begin_value(self) -> None:
        self._value, self._kept = JsonValue(), []

    @property
    def _is_arguments(self) -> bool:
        return self._key in _ARGUMENTS and not self._has_arguments

    def _keep(self, char: str) -> None:
        if self._is_arguments and self._calls.is_open:
            self._new.append(char)
        elif self._is_arguments or self._key == "name":
            self._kept.append(char)

    def _end_value(self) -> None:
        self._next = self._expect_more
        if self._is_arguments:
            self._has_arguments = True
            if not self._calls.is_open:
                self._early_arguments = "".join(self._kept)
        elif self._key == "name" and not self._calls.is_open:
            name = _string("".join(self._kept))
            if not name:
                self._break()
                return
            self._calls.start(name)
            self._raw = []
            self._new.append(self._early_arguments or "")

    def _end_object(self) -> None:
        if not self._calls.is_open:
            self._break()
            return
        if not self._has_arguments:
            # A function without parameters.
            self._new.append("{}")
        self.state = JsonState.WHOLE

    def _break(self) -> None:
        self.state = JsonState.BROKEN if self._calls.is_open else JsonState.NO_CALL

    def _report(self) -> None:
        if self._new:
            self._calls.add("".join(self._new))
            self._new = []


def _string(text: str) -> str | None:
    """Returns what a JSON string says; None: it is none."""
    try:
        return msgspec.json.decode(text, type=str)
    except (msgspec.DecodeError, UnicodeError):
        return None
