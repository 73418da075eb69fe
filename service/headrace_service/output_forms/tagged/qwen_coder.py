"""Calls as <function=...> with a <parameter=...> for each argument: Qwen3-Coder, and Seed-OSS.

Between <tool_call> and </tool_call> stands <function=NAME>, then for each argument
<parameter=NAME>, a line break, the value, a line break and </parameter>, then </function>. A value
is text where the schema says string, JSON otherwise; the arguments that are reported are one JSON
object all the same. Seed-OSS has <seed:tool_call> and </seed:tool_call> around the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from headrace_service.output_forms import lark
from headrace_service.output_forms.call_format import Spelling, Tool, ToolUse
from headrace_service.output_forms.lark import TokenIds
from headrace_service.output_forms.parts import Calls, Part
from headrace_service.output_forms.tagged.arguments import properties_of, required_of, text_value
from headrace_service.output_forms.tagged.reader import TaggedReader

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
MARKERS: Final = (OPEN, CLOSE)
SEED_MARKERS: Final = ("<seed:tool_call>", "</seed:tool_call>")
_FUNCTION: Final = "<function="
_FUNCTION_END: Final = "</function>"
_PARAMETER: Final = "<parameter="
_PARAMETER_END: Final = "</parameter>"


class QwenCoderReader(TaggedReader):
    """Reads the format."""

    markers = MARKERS
    word = _FUNCTION

    def __init__(
        self,
        parts: list[Part],
        calls: Calls,
        spelling: Spelling,
        is_after_marker: bool,
        text_parameters: Mapping[str, frozenset[str]],
    ) -> None:
        """Takes what `TaggedReader` takes."""
        super().__init__(parts, calls, spelling, is_after_marker, text_parameters)
        self._parameter: list[str] = []
        # Of the value that is being read: whether any of it came, and what it may end with.
        self._is_begun = False
        self._line_break = ""

    @property
    def holds(self) -> bool:
        """Whether text that came is in no part yet."""
        return super().holds or self._at == self._in_parameter_name or bool(self._line_break)

    def _is_of_name(self, char: str) -> bool:
        return char not in "<>\n"

    def _in_name(self, text: str) -> str:
        rest = self._name.feed(text)
        if rest.startswith(">"):
            self._start_call(self._name.text.strip())
            self._to_parameters()
            return rest[1:]
        if rest:
            self._no_call()
        return rest

    def _to_parameters(self) -> None:
        self._look_for(_PARAMETER, _FUNCTION_END, self.markers[1])
        self._at = self._between_parameters

    def _between_parameters(self, text: str) -> str:
        _, marker, rest = self._find(text)
        if marker == _PARAMETER:
            self._parameter, self._at = [], self._in_parameter_name
        elif marker:
            self._end_call()
        return rest

    def _in_parameter_name(self, text: str) -> str:
        name, found, rest = text.partition(">")
        self._parameter.append(name)
        if found:
            self._begin_value("".join(self._parameter).strip())
            self._is_begun, self._line_break = False, ""
            self._look_for(_PARAMETER_END, _FUNCTION_END)
            self._at = self._in_value
        return rest

    def _in_value(self, text: str) -> str:
        text, marker, rest = self._find(text)
        if text and not self._is_begun:
            # The line break behind the name.
            text, self._is_begun = text.removeprefix("\n"), True
        self._add_value(self._without_last_break(text) if self._is_text and text else text)
        if marker:
            self._end_value()
            self._line_break = ""
            self._to_parameters()
        # A model may forget the value's own end.
        return marker + rest if marker == _FUNCTION_END else rest

    def _without_last_break(self, text: str) -> str:
        """Returns text but for the line break that may be the value's last, behind the one held."""
        text, self._line_break = self._line_break + text, ""
        if text.endswith("\n"):
            text, self._line_break = text[:-1], "\n"
        return text


class SeedReader(QwenCoderReader):
    """Reads the format as Seed-OSS writes it."""

    markers = SEED_MARKERS


def grammar(use: ToolUse, token_ids: TokenIds, markers: tuple[str, str] = MARKERS) -> str:
    """Returns the grammar of an output with such calls.

    Args:
        use: the tools, and whether they are called. Strict ones pass `arguments.why_not_strict`.
        token_ids: the special tokens that markers are.
        markers: around a call.
    """
    begin, end = markers
    rules = [line for index, tool in enumerate(use.tools) for line in _function(f"call_{index}", tool)]
    rules.append(f"value_end[lazy]: TEXT {lark.quoted(chr(10) + _PARAMETER_END)}")
    some_call = lark.any_of([f"call_{index}" for index in range(len(use.tools))])
    body = f"space? {some_call} space? {lark.marker_of(end, token_ids.get(end))}"
    return lark.marked_calls(use, begin, token_ids.get(begin), body, rules)


def seed_grammar(use: ToolUse, token_ids: TokenIds) -> str:
    """Returns `grammar` with the markers of Seed-OSS."""
    return grammar(use, token_ids, SEED_MARKERS)


def _function(rule: str, tool: Tool) -> list[str]:
    """Returns the lines of a function's rules."""
    begin = lark.quoted(f"{_FUNCTION}{tool.name}>\n")
    end = lark.quoted(_FUNCTION_END)
    if not tool.strict:
        return [
            f"{rule}: {begin} {rule}_any* {end}",
            f'{rule}_any: "{_PARAMETER}" /[^<>\\n]{{1,64}}/ ">\\n" value_end "\\n"',
        ]
    required = required_of(tool)
    lines, names = [], []
    for index, (name, schema) in enumerate(properties_of(tool)):
        argument = f"{rule}_{index}"
        opening = lark.quoted(f"{_PARAMETER}{name}>\n")
        lines.append(f'{argument}: {opening} {_value(schema, tool.parameters)} "\\n"')
        names.append(argument if name in required else f"{argument}?")
    return [f"{rule}: {begin} {' '.join(names)} {end}", *lines]


def _value(schema: Mapping[str, Any], whole: Mapping[str, Any]) -> str:
    """Returns the rule of a value and of its end."""
    end = lark.quoted("\n" + _PARAMETER_END)
    texts = text_value(schema)
    if texts is None:
        shared = {key: whole[key] for key in ("$defs", "definitions") if key in whole}
        return f"{lark.json_of({**schema, **shared})} {end}"
    return f"{lark.any_of([lark.quoted(text) for text in texts])} {end}" if texts else "value_end"
