"""The grammar that holds Gemma 4 to its form of calls, and to tools' schemas in it.

As strings are not JSON's there, a schema becomes rules of its own: objects, arrays, texts, numbers
and choices. A schema that says more is refused for strict tools, by name.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Final

from headrace_service.output_forms import lark
from headrace_service.output_forms.call_format import Tool, ToolUse
from headrace_service.output_forms.lark import TokenIds

OPEN: Final = "<|tool_call>"
CLOSE: Final = "<tool_call|>"
# Begins and ends a string.
QUOTE: Final = '<|"|>'
MARKERS: Final = (OPEN, CLOSE, QUOTE)
# Of any schema, all without effect on what a value may be.
_NOTES: Final = frozenset({"description", "title", "default", "examples", "$comment", "deprecated", "$schema", "$id"})
# What the grammar holds, by type, beside `type`, `enum` and `const`.
_HELD: Final[Mapping[str, frozenset[str]]] = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "string": frozenset(),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "boolean": frozenset(),
    "null": frozenset(),
}
_CHOICES: Final = "anyOf"
# Characters that a bare key can't have.
_NOT_IN_KEYS: Final = frozenset("{}[]:,<> \t\r\n")
_MOST_ITEMS: Final = 1000


def why_not_strict(tool: Tool) -> str:
    """Returns why no grammar can hold this tool's arguments in this format; "": one can."""
    return _why_not(tool.parameters, "the arguments")


def _why_not(schema: object, name: str) -> str:
    if not isinstance(schema, Mapping):
        return ""
    unknown = sorted(set(schema) - _NOTES - _held(schema))
    if unknown:
        return f"{unknown[0]} of {name}"
    if any(isinstance(value, (list, dict)) or QUOTE in str(value) for value in _allowed(schema) or ()):
        return f"a value of {name} that is no text or number, or has {QUOTE} in it"
    for key in ("minItems", "maxItems"):
        if schema.get(key, 0) not in range(_MOST_ITEMS):
            return f"{key} of {name}"
    properties = _items(schema)
    for key, _ in properties:
        if not key or _NOT_IN_KEYS & set(key):
            return f"the name {key}"
    lacking = set(_list(schema.get("required"))) - {key for key, _ in properties}
    if lacking or isinstance(schema.get("items"), list):
        return f"{'required' if lacking else 'items'} of {name}"
    return next((why for sub, of in _inner(schema, name) if (why := _why_not(sub, of))), "")


def _held(schema: Mapping[str, Any]) -> set[str]:
    """The keywords of a schema that its rule holds values to."""
    if _CHOICES in schema:
        return {_CHOICES}
    if _allowed(schema) is not None:
        return {"type", "const", "enum"}
    return {"type"}.union(*(_HELD.get(kind, frozenset()) for kind in _types(schema)))


def _inner(schema: Mapping[str, Any], name: str) -> Iterator[tuple[object, str]]:
    """The schemas within one, with what they are called."""
    for key, sub in _items(schema):
        yield sub, key
    yield schema.get("items"), f"entries of {name}"
    for choice in _list(schema.get(_CHOICES)):
        yield choice, name


def grammar(use: ToolUse, token_ids: TokenIds) -> str:
    """Returns the grammar of an output with such calls.

    Args:
        use: the tools, and whether they are called. Strict ones pass `why_not_strict`.
        token_ids: the special tokens that markers are.
    """
    rules = _Rules(token_ids)
    calls = []
    for tool in use.tools:
        arguments = rules.value(tool.parameters if tool.strict else {"type": "object"}, "object")
        calls.append(f"{lark.quoted(f'call:{tool.name}')} {arguments}")
    body = f"{lark.any_of(calls)} {lark.marker_of(CLOSE, token_ids.get(CLOSE))}"
    return lark.marked_calls(use, OPEN, token_ids.get(OPEN), body, rules.lines)


class _Rules:
    """The rules of values, made as they are asked for."""

    def __init__(self, token_ids: TokenIds) -> None:
        self._quote = lark.marker_of(QUOTE, token_ids.get(QUOTE))
        name, text_end = lark.text_to("text_end", QUOTE, token_ids.get(QUOTE))
        self.lines = [
            text_end,
            f"any_text: {self._quote} {name}",
            'any_object: "{" (any_member ("," any_member)*)? "}"',
            r"any_member: /[^{}\[\]:,<> \t\r\n]{1,64}/ " + '":" any_value',
            'any_array: "[" (any_value ("," any_value)*)? "]"',
            f"any_scalar: {lark.json_of({'type': ['number', 'boolean', 'null']})}",
            "any_value: any_text | any_object | any_array | any_scalar",
        ]
        self._numbers = itertools.count()

    def value(self, schema: object, default: str = "") -> str:
        """Returns the rule of values that a schema allows.

        Args:
            schema: what `why_not_strict` finds nothing in.
            default: the type of values where the schema names none; "": any.
        """
        if not isinstance(schema, Mapping):
            return "any_value"
        allowed = _allowed(schema)
        if allowed is not None:
            return lark.any_of([self._constant(value) for value in allowed])
        if _CHOICES in schema:
            return lark.any_of([self.value(choice) for choice in _list(schema[_CHOICES])])
        types = _types(schema) if "type" in schema else [default] if default else []
        return lark.any_of([self._of_type(kind, schema) for kind in types]) if types else "any_value"

    def _of_type(self, kind: str, schema: Mapping[str, Any]) -> str:
        match kind:
            case "string":
                return "any_text"
            case "object":
                return self._object(schema) if "properties" in schema else "any_object"
            case "array":
                return self._array(schema)
        own = {key: schema[key] for key in _HELD.get(kind, ()) if key in schema}
        return lark.json_of({"type": kind, **own})

    def _object(self, schema: Mapping[str, Any]) -> str:
        """The properties in the order in which templates write them, by name."""
        required, properties = _list(schema.get("required")), sorted(_items(schema), key=lambda one: one[0].lower())
        name, count = f"object_{next(self._numbers)}", len(properties)
        for index, (key, sub) in enumerate(properties):
            self.lines.append(f"{name}_{index}: {lark.quoted(f'{key}:')} {self.value(sub)}")
        # What may come from a property on: with a comma where another stands before it.
        self.lines.append(f'{name}_first_{count}: ""')
        self.lines.append(f'{name}_then_{count}: ""')
        for index, (key, _) in enumerate(properties):
            begun, then = f"{name}_{index} {name}_then_{index + 1}", f'"," {name}_{index} {name}_then_{index + 1}'
            left_out = "" if key in required else f" | {name}_first_{index + 1}"
            left_out_then = "" if key in required else f" | {name}_then_{index + 1}"
            self.lines.append(f"{name}_first_{index}: {begun}{left_out}")
            self.lines.append(f"{name}_then_{index}: {then}{left_out_then}")
        return f'"{{" {name}_first_0 "}}"'

    def _array(self, schema: Mapping[str, Any]) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[" "]"'
        name = f"entry_{next(self._numbers)}"
        self.lines.append(f"{name}: {self.value(schema.get('items'))}")
        further = f'("," {name}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return f'"[" {name} {further} "]"' if least else f'"[" ({name} {further})? "]"'

    def _constant(self, value: object) -> str:
        if isinstance(value, str):
            return f"{self._quote} {lark.quoted(value)} {self._quote}" if value else f"{self._quote} {self._quote}"
        return lark.json_of({"const": value})


def _types(schema: Mapping[str, Any]) -> list[str]:
    """The types that a schema names; without any, all whose keywords it has."""
    stated = schema.get("type")
    if stated is None:
        return [kind for kind, held in _HELD.items() if held & set(schema)]
    return [stated] if isinstance(stated, str) else [kind for kind in _list(stated) if isinstance(kind, str)]


def _allowed(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values that a schema lists; None: it lists none."""
    if "const" in schema:
        return [schema["const"]]
    return _list(schema["enum"]) if "enum" in schema else None


def _items(schema: Mapping[str, Any]) -> list[tuple[str, object]]:
    properties = schema.get("properties")
    return list(properties.items()) if isinstance(properties, Mapping) else []


def _list(value: object) -> list[Any]:
    """Returns a keyword's list; what is none, the compiler refuses where it matters."""
    return value if isinstance(value, list) else []
