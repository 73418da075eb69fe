"""Which arguments of a tool are text, and what of its schema the grammars of tags can hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from headrace_service.output_forms.call_format import Tool

# Of an object that a text argument may have beside its type, all without effect on what it may be.
_NOTES: Final = frozenset({"type", "description", "title", "default", "examples", "$comment", "deprecated"})
_OF_OBJECTS: Final = frozenset(
    {"type", "properties", "required", "additionalProperties", "description", "title", "$defs", "definitions"}
    | {"$schema", "$id", "$comment", "examples", "default"}
)


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
