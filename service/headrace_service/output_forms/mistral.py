"""Calls behind [TOOL_CALLS]: a JSON array of them, or a name, [ARGS] and arguments: Mistral."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from headrace_service.output_forms import lark
from headrace_service.output_forms.call_format import CallReader, Tool, ToolUse
from headrace_service.output_forms.json_call import JsonState, JsonValue
from headrace_service.output_forms.lark import TokenIds
from headrace_service.output_forms.text_pieces import SPACE, Expected, Name

OPEN: Final = "[TOOL_CALLS]"
CALL_ID: Final = "[CALL_ID]"
ARGUMENTS: Final = "[ARGS]"
MARKERS: Final = (OPEN, CALL_ID, ARGUMENTS)
_MAX_NAME_CHARACTERS: Final = 128


class MistralReader(CallReader):
    """Reads both ways of writing calls, whichever a model uses."""

    def _begin(self) -> Callable[[str], str]:
        self._to_text()
        return self._in_text

    @property
    def holds(self) -> bool:
        """Whether text that came is in no part yet."""
        return super().holds or self._at in (self._behind_marker, self._in_name, self._behind_name, self._past_id)

    def finish(self) -> None:
        """The output ends here."""
        if self._at in (self._behind_marker, self._in_name, self._behind_name, self._past_id):
            self._head += self._name.text if self._at == self._in_name else self._expected.flush()
            self._no_call()
        super().finish()

    def _to_text(self) -> None:
        self._look_for(OPEN)
        self._at = self._in_text

    def _in_text(self, text: str) -> str:
        before, marker, rest = self._find(text)
        self._text.feed(before)
        if marker:
            self._head = marker
            self._expected = Expected("[", after_space=True)
            self._search, self._at = None, self._behind_marker
        return rest

    def _behind_marker(self, text: str) -> str:
        decided = self._expected.feed(text)
        if decided is None:
            return ""
        space, bracket, rest = decided
        self._head += space
        if bracket:
            self._begin_json(self._head + bracket)
        else:
            self._name, self._at = Name(_is_of_name, _MAX_NAME_CHARACTERS), self._in_name
        return rest

    def _no_call(self) -> None:
        """What stood behind the marker is no call: it is text."""
        self._text.feed(self._head)
        self._to_text()

    # -- an array of objects

    def _after_call(self, state: JsonState) -> None:
        if state is JsonState.WHOLE:
            self._at = self._between_objects
        else:
            self._to_text()

    def _between_objects(self, text: str) -> str:
        rest = text.lstrip(SPACE)
        if rest.startswith(","):
            self._begin_json("")
            return rest[1:]
        if rest:
            self._to_text()
        return rest.removeprefix("]")

    # -- a name, and arguments

    def _in_name(self, text: str) -> str:
        rest = self._name.feed(text)
        if rest:
            self._head += self._name.text
            self._expected = Expected(*map(self._spelling, (CALL_ID, ARGUMENTS)), "{")
            self._at = self._behind_name
        return rest

    def _behind_name(self, text: str) -> str:
        decided = self._expected.feed(text)
        if decided is None:
            return ""
        _, marker, rest = decided
        if not marker or not self._name.text:
            self._no_call()
            return marker + rest
        if marker != self._spelling(CALL_ID):
            return self._begin_arguments(marker, rest)
        self._look_for(ARGUMENTS, "{")
        self._at = self._past_id
        return rest

    def _past_id(self, text: str) -> str:
        _, marker, rest = self._find(text)
        return self._begin_arguments(marker, rest) if marker else rest

    def _begin_arguments(self, marker: str, rest: str) -> str:
        self._text.marker()
        self._calls.start(self._name.text)
        self._search, self._value, self._at = None, JsonValue(), self._before_arguments
        return marker + rest if marker == "{" else rest

    def _before_arguments(self, text: str) -> str:
        rest = text.lstrip(SPACE)
        if rest:
            self._at = self._in_arguments
        return rest

    def _in_arguments(self, text: str) -> str:
        num_taken = 0
        for char in text:
            if self._value.is_over or not self._value.take(char):
                break
            num_taken += 1
        self._calls.add(text[:num_taken])
        if self._value.is_over:
            self._calls.finish(whole=True)
            self._to_text()
        return text[num_taken:]


def _is_of_name(char: str) -> bool:
    return char.isalnum() or char in "_-."


def grammar(use: ToolUse, token_ids: TokenIds) -> str:
    """Returns the grammar of an output with such calls.

    Args:
        use: the tools, and whether they are called.
        token_ids: the special tokens that markers are. With that of [ARGS] the model writes names
            and arguments, else arrays.
    """
    calls = [f"call_{index}" for index in range(len(use.tools))]
    open_id = token_ids.get(OPEN)
    if ARGUMENTS in token_ids:
        rules = [f"{call}: {_named(tool, token_ids)}" for call, tool in zip(calls, use.tools, strict=True)]
        return lark.marked_calls(use, OPEN, open_id, lark.any_of(calls), rules)
    rules = [f"{call}: {_object(tool)}" for call, tool in zip(calls, use.tools, strict=True)]
    several = f' ("," space? {lark.any_of(calls)})*' if use.parallel else ""
    # One array has all calls.
    once = ToolUse(use.tools, use.choice, parallel=False)
    return lark.marked_calls(once, OPEN, open_id, f'space? "[" {lark.any_of(calls)}{several} "]"', rules)


def _object(tool: Tool) -> str:
    begin = '{"name": ' + lark.quoted(tool.name) + ', "arguments": '
    return f'{lark.quoted(begin)} {lark.arguments_of(tool)} "}}"'


def _named(tool: Tool, token_ids: TokenIds) -> str:
    marker = lark.marker_of(ARGUMENTS, token_ids[ARGUMENTS])
    return f"{lark.quoted(tool.name)} {marker} {lark.arguments_of(tool)}"
