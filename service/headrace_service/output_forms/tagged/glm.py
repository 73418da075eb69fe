"""Calls as <tool_call>NAME with an <arg_key> and an <arg_value> each argument: GLM-4.5 and later.

Between <tool_call> and </tool_call> stands the function's name, then for each argument
<arg_key>NAME</arg_key> and <arg_value>VALUE</arg_value>, with or without line breaks between. A
value is text where the schema says string, JSON otherwise; the arguments that are reported are one
JSON object all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from headrace_service.output_forms import lark
from headrace_service.output_forms.call_format import Tool, ToolUse
from headrace_service.output_forms.lark import TokenIds
from headrace_service.output_forms.marked_call import MAX_NAME_CHARACTERS
from headrace_service.output_forms.tagged.arguments import properties_of, required_of, text_value
from headrace_service.output_forms.tagged.reader import TaggedReader
from headrace_service.output_forms.text_pieces import SPACE, Expected

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
KEY: Final = "<arg_key>"
_KEY_END: Final = "</arg_key>"
_VALUE: Final = "<arg_value>"
_VALUE_END: Final = "</arg_value>"
MARKERS: Final = (OPEN, CLOSE, KEY, _KEY_END, _VALUE, _VALUE_END)
# An argument's name in a grammar, where the schema does not count.
_ANY_KEY: Final = r"/[^<>\n]{1,64}/"


class GlmReader(TaggedReader):
    """Reads the format."""

    markers = (OPEN, CLOSE)
    # The name of an argument so far.
    _key = ""

    @property
    def holds(self) -> bool:
        """Whether text that came is in no part yet."""
        return super().holds or self._at in (self._in_key, self._before_value)

    def _head_places(self) -> tuple[Callable[[str], str], ...]:
        return (self._before_name, self._in_name, self._behind_name)

    def _expected_in_head(self) -> Expected:
        return Expected(self._spelling(KEY), self._spelling(CLOSE), after_space=True)

    def _is_of_name(self, char: str) -> bool:
        begins_marker = any(self._spelling(marker).startswith(char) for marker in (KEY, CLOSE))
        return not (char.isspace() or char in "<>" or begins_marker)

    def _before_name(self, text: str) -> str:
        rest = text.lstrip(SPACE)
        self._head += text[: len(text) - len(rest)]
        if len(self._head) > MAX_NAME_CHARACTERS:
            self._no_call()
        elif rest:
            self._at = self._in_name
        return rest

    def _in_name(self, text: str) -> str:
        rest = self._name.feed(text)
        if rest and self._name.text:
            self._at = self._behind_name
        elif rest:
            self._no_call()
        return rest

    def _behind_name(self, text: str) -> str:
        decided = self._expected.feed(text)
        if decided is None:
            return ""
        space, marker, rest = decided
        if marker:
            self._start_call(self._name.text)
            self._go_on(marker)
        else:
            self._no_call(space)
        return rest

    def _go_on(self, marker: str) -> None:
        """Goes on behind a name or a value: with another argument, or with the call's end."""
        if marker == self._spelling(KEY):
            self._key = ""
            self._look_for(_KEY_END, CLOSE)
            self._at = self._in_key
        else:
            self._end_call()

    def _broken(self) -> None:
        """The call ends within an argument."""
        self._calls.finish(whole=False)
        self._at = self._begin()

    def _in_key(self, text: str) -> str:
        more, marker, rest = self._find(text)
        self._key += more
        if marker == self._spelling(_KEY_END):
            self._look_for(_VALUE, CLOSE)
            self._at = self._before_value
        elif marker:
            self._broken()
        return rest

    def _before_value(self, text: str) -> str:
        _, marker, rest = self._find(text)
        if marker == self._spelling(_VALUE):
            self._begin_value(self._key.strip())
            self._look_for(_VALUE_END)
            self._at = self._in_value
        elif marker:
            self._broken()
        return rest

    def _in_value(self, text: str) -> str:
        more, marker, rest = self._find(text)
        self._add_value(more)
        if marker:
            self._end_value()
            self._look_for(KEY, CLOSE)
            self._at = self._between_arguments
        return rest

    def _between_arguments(self, text: str) -> str:
        _, marker, rest = self._find(text)
        if marker:
            self._go_on(marker)
        return rest


def grammar(use: ToolUse, token_ids: TokenIds) -> str:
    """Returns the grammar of an output with such calls.

    Args:
        use: the tools, and whether they are called. Strict ones pass `arguments.why_not_strict`.
        token_ids: the special tokens that markers are.
    """

    def marker(text: str) -> str:
        return lark.marker_of(text, token_ids.get(text))

    any_value, lines = lark.text_to("any_value", _VALUE_END, token_ids.get(_VALUE_END))
    rules = [lines, r'line: "\n"']
    for index, tool in enumerate(use.tools):
        rules += _function(f"call_{index}", tool, marker, any_value)
    some_call = lark.any_of([f"call_{index}" for index in range(len(use.tools))])
    return lark.marked_calls(use, OPEN, token_ids.get(OPEN), f"{some_call} {marker(CLOSE)}", rules)


def _function(rule: str, tool: Tool, marker: Callable[[str], str], any_value: str) -> list[str]:
    """Returns the lines of a function's rules."""
    begin = f"{lark.quoted(tool.name)} line?"

    def argument(key: str, value: str) -> str:
        return f"{marker(KEY)} {key} {marker(_KEY_END)} line? {marker(_VALUE)} {value} line?"

    if not tool.strict:
        return [f"{rule}: {begin} {rule}_any*", f"{rule}_any: {argument(_ANY_KEY, any_value)}"]
    lines, names = [], []
    required = required_of(tool)
    for index, (name, schema) in enumerate(properties_of(tool)):
        texts = text_value(schema)
        if texts is None:
            shared = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
            value = f"{lark.json_of({**schema, **shared})} {marker(_VALUE_END)}"
        else:
            value = f"{lark.any_of(list(map(lark.quoted, texts)))} {marker(_VALUE_END)}" if texts else any_value
        lines.append(f"{rule}_{index}: {argument(lark.quoted(name), value)}")
        names.append(f"{rule}_{index}" if name in required else f"{rule}_{index}?")
    return [f"{rule}: {begin} {' '.join(names)}", *lines]
