"""Calls as <function=...> with a <parameter=...> for each argument: Qwen3-Coder, and Seed-OSS.

Between <tool_call> and </tool_call> stands <function=NAME>, then for each argument
<parameter=NAME>, a line break, the value, a line break and </parameter>, then </function>. A value
is text where the schema says string, JSON otherwise; the arguments that are reported are one JSON
object all the same. Seed-OSS has <seed:tool_call> and </seed:tool_call> around the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

import msgspec

from headrace_service.output_forms import lark
from headrace_service.output_forms.call_format import CallReader, Spelling, Tool, ToolUse
from headrace_service.output_forms.json_call import JsonState
from headrace_service.output_forms.lark import TokenIds
from headrace_service.output_forms.parts import Calls, Part
from headrace_service.output_forms.text_pieces import Expected, Name

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
MARKERS: Final = (OPEN, CLOSE)
SEED_MARKERS: Final = ("<seed:tool_call>", "</seed:tool_call>")
_FUNCTION: Final = "<function="
_FUNCTION_END: Final = "</function>"
_PARAMETER: Final = "<parameter="
_PARAMETER_END: Final = "</parameter>"
# Names longer than this are none.
_MAX_NAME_CHARACTERS: Final = 256
# Of an object that a text argument may have beside its type, all without effect on what it may be.
_NOTES: Final = frozenset({"type", "description", "title", "default", "examples", "$comment", "deprecated"})
_OF_OBJECTS: Final = frozenset(
    {"type", "properties", "required", "additionalProperties", "description", "title", "$defs", "definitions"}
    | {"$schema", "$id", "$comment", "examples", "default"}
)


class QwenCoderReader(CallReader):
    """Reads the format.

    Args:
        parts: where parts are appended.
        calls: takes the calls.
        spelling: of markers.
        is_after_marker: whether whitespace at the beginning belongs to something else.
        text_parameters: by function, the arguments whose values are text.
    """

    # Around a call.
    markers: ClassVar[tuple[str, str]] = MARKERS

    def __init__(
        self,
        parts: list[Part],
        calls: Calls,
        spelling: Spelling,
        is_after_marker: bool,
        text_parameters: Mapping[str, frozenset[str]],
    ) -> None:
        super().__init__(parts, calls, spelling, is_after_marker)
        self._text_parameters = text_parameters
        self._function = ""
        self._parameter: list[str] = []
        self._num_arguments = 0
        # The value that is being read: whether it is text, what it may end with, and what is not
        # text so far.
        self._is_text = False
        self._is_begun = False
        self._line_break = ""
        self._value: list[str] = []
        # What stood before a function's name, and the name.
        self._head = ""
        self._expected = Expected(_FUNCTION, after_space=True)
        self._name = Name(_is_of_name, _MAX_NAME_CHARACTERS)

    def _begin(self) -> Callable[[str], str]:
        self._look_for(*self.markers)
        return self._in_text

    @property
    def holds(self) -> bool:
        """Whether text that came is in no part yet."""
        is_undecided = self._at in (self._behind_marker, self._in_function_name, self._in_parameter_name)
        return super().holds or is_undecided or bool(self._value or self._line_break)

    def finish(self) -> None:
        """The output ends here."""
        if self._at in (self._behind_marker, self._in_function_name):
            self._head += self._expected.flush()
            self._no_call()
        super().finish()

    def _in_text(self, text: str) -> str:
        before, marker, rest = self._find(text)
        self._text.feed(before)
        if marker == self._spelling(self.markers[0]):
            self._head, self._name = marker, Name(_is_of_name, _MAX_NAME_CHARACTERS)
            self._expected = Expected(_FUNCTION, after_space=True)
            self._search, self._at = None, self._behind_marker
        elif marker and self._calls.count:
            self._text.marker()
        else:
            self._text.feed(marker)
        return rest

    def _behind_marker(self, text: str) -> str:
        decided = self._expected.feed(text)
        if decided is None:
            return ""
        space, function, rest = decided
        self._head += space + function
        if function:
            self._at = self._in_function_name
        else:
            self._no_call()
        return rest

    def _in_function_name(self, text: str) -> str:
        rest = self._name.feed(text)
        if rest.startswith(">"):
            self._start(self._name.text.strip())
            return rest[1:]
        if rest:
            self._no_call()
        return rest

    def _no_call(self) -> None:
        """What stood behind the marker is no call: it is text."""
        self._text.feed(self._head + self._name.text)
        self._at = self._begin()

    def _start(self, name: str) -> None:
        self._text.marker()
        self._calls.start(name)
        self._function, self._num_arguments = name, 0
        self._to_parameters()

    # -- arguments

    def _to_parameters(self) -> None:
        self._look_for(_PARAMETER, _FUNCTION_END, self.markers[1])
        self._at = self._between_parameters

    def _between_parameters(self, text: str) -> str:
        _, marker, rest = self._find(text)
        if marker == _PARAMETER:
            self._parameter, self._at = [], self._in_parameter_name
        elif marker:
            self._calls.add("}" if self._num_arguments else "{}")
            self._calls.finish(whole=True)
            self._at = self._begin()
        return rest

    def _in_parameter_name(self, text: str) -> str:
        name, found, rest = text.partition(">")
        self._parameter.append(name)
        if found:
            self._begin_value("".join(self._parameter).strip())
        return rest

    def _begin_value(self, name: str) -> None:
        self._is_text = name in self._text_parameters.get(self._function, ())
        begin = ", " if self._num_arguments else "{"
        self._calls.add(f"{begin}{json_text(name)}: " + ('"' if self._is_text else ""))
        self._num_arguments += 1
        self._is_begun, self._line_break, self._value = False, "", []
        self._look_for(_PARAMETER_END, _FUNCTION_END)
        self._at = self._in_value

    def _in_value(self, text: str) -> str:
        text, marker, rest = self._find(text)
        if text and not self._is_begun:
            # The line break behind the name.
            text, self._is_begun = text.removeprefix("\n"), True
        if not self._is_text:
            self._value.append(text)
        elif text:
            self._add_text(text)
        if marker:
            self._end_value()
        # A model may forget the value's own end.
        return marker + rest if marker == _FUNCTION_END else rest

    def _add_text(self, text: str) -> None:
        """Reports text, but for the line break that may be its last."""
        text, self._line_break = self._line_break + text, ""
        if text.endswith("\n"):
            text, self._line_break = text[:-1], "\n"
        self._calls.add(json_text(text)[1:-1])

    def _end_value(self) -> None:
        if self._is_text:
            self._calls.add('"')
        else:
            self._calls.add(as_json("".join(self._value).strip()))
        self._line_break, self._value = "", []
        self._to_parameters()

    def _after_call(self, state: JsonState) -> None:
        raise AssertionError("the format has no objects")


class SeedReader(QwenCoderReader):
    """Reads the format as Seed-OSS writes it."""

    markers = SEED_MARKERS


def text_parameters(tool: Tool) -> frozenset[str]:
    """Returns the arguments of a tool whose values are text, by its schema."""
    properties = tool.parameters.get("properties")
    return frozenset(name for name, schema in _items(properties) if _is_text(schema))


def properties_of(tool: Tool) -> list[tuple[str, Mapping[str, Any]]]:
    """Returns name and schema of each argument of a tool."""
    return _items(tool.parameters.get("properties"))


def required_of(tool: Tool) -> list[Any]:
    """Returns the names of the arguments that a call must have."""
    return _list(tool.parameters.get("required"))


def text_value(schema: Mapping[str, Any]) -> list[str] | None:
    """Returns the texts that a value is one of, none where it is any text; None: it is no text."""
    if not _is_text(schema):
        return None
    allowed = [schema["const"]] if "const" in schema else _list(schema.get("enum"))
    return [text for text in allowed if isinstance(text, str)]


def why_not_strict(tool: Tool) -> str:
    """Returns why no grammar can hold this tool's arguments in this format; "": one can."""
    unknown = sorted(set(tool.parameters) - _OF_OBJECTS)
    if unknown:
        return f"{unknown[0]} of an object"
    for name, schema in _items(tool.parameters.get("properties")):
        further = sorted(set(schema) - _NOTES - {"enum", "const"}) if _is_text(schema) else []
        if further:
            return f"{further[0]} of the text {name}"
        if any("\n" in name or char in name for char in "<>"):
            return f"the name {name}"
    return ""


def grammar(use: ToolUse, token_ids: TokenIds, markers: tuple[str, str] = MARKERS) -> str:
    """Returns the grammar of an output with such calls.

    Args:
        use: the tools, and whether they are called. Strict ones pass `why_not_strict`.
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


def _is_text(schema: Mapping[str, Any]) -> bool:
    allowed = [schema["const"]] if "const" in schema else schema.get("enum")
    if "type" in schema:
        return bool(schema["type"] == "string")
    return isinstance(allowed, list) and bool(allowed) and all(isinstance(one, str) for one in allowed)


def _items(properties: object) -> list[tuple[str, Mapping[str, Any]]]:
    """Returns the properties of a schema; one that may be anything has an empty one."""
    if not isinstance(properties, Mapping):
        return []
    return [(name, schema if isinstance(schema, Mapping) else {}) for name, schema in properties.items()]


def _list(value: object) -> list[Any]:
    """Returns a keyword's list; what is none, the compiler refuses where it matters."""
    return value if isinstance(value, list) else []


def _is_of_name(char: str) -> bool:
    return char not in "<>\n"


def as_json(text: str) -> str:
    """Returns a value as JSON: as it is if it is that, else as a string."""
    try:
        msgspec.json.decode(text)
        return text
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return json_text(text)


def json_text(text: str) -> str:
    """Returns a text as JSON."""
    return json.dumps(text, ensure_ascii=False)
