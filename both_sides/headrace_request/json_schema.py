"""JSON Schemas as grammars hold them, whoever writes the grammar.

Owns the options of the grammars' library that no schema may change, which of a schema's values are
schemas, and what of a schema says nothing about its instances.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from headrace_request.structured_rules import pointer_part

# Between the parts of JSON: a space or two, or one line break and an indent. Bounded, because a
# model may never leave off writing spaces. The last two would let outputs pass that the schema does
# not allow.
OPTIONS: Final[dict[str, Any]] = {
    "whitespace_pattern": r"[\x20\x09]{1,2}|[\x20\x09]{0,2}\x0D?\x0A[\x20\x09]{0,20}",
    "whitespace_flexible": True,
    "lenient": False,
    "coerce_one_of": False,
}
# Keywords whose value is a schema or a list of some, and those whose values are.
_SCHEMAS: Final = frozenset(
    "items prefixItems additionalItems additionalProperties contains not if then else propertyNames allOf anyOf oneOf "
    "unevaluatedItems unevaluatedProperties".split()
)
_MAPS: Final = frozenset("properties patternProperties dependentSchemas $defs definitions".split())
# Formats that JSON Schema defines (draft 2020-12, 7.3). Any other is an annotation, such as "path",
# "password" and "binary" of pydantic's types.
_FORMATS: Final = frozenset(
    "date-time date time duration email idn-email hostname idn-hostname ipv4 ipv6 uri uri-reference iri iri-reference "
    "uuid uri-template json-pointer relative-json-pointer regex".split()
)


def held(schema: Any) -> dict[str, Any]:
    """Returns the schema as a grammar takes it, with the options, and without annotations."""
    if not isinstance(schema, dict):
        schema = {} if schema else {"enum": []}
    return {**without_annotations(schema), "x-guidance": OPTIONS}


def without_annotations(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy in which no schema has a `format` that the standard does not define."""
    return {key: _value(key, value) for key, value in schema.items() if not _is_annotation(key, value)}


def _is_annotation(key: str, value: Any) -> bool:
    return key == "format" and isinstance(value, str) and value not in _FORMATS


def _value(key: str, value: Any) -> Any:
    if key in _SCHEMAS and isinstance(value, list):
        return [_schema(child) for child in value]
    if key in _MAPS and isinstance(value, dict):
        return {name: _schema(child) for name, child in value.items()}
    return _schema(value) if key in _SCHEMAS else value


def _schema(value: Any) -> Any:
    return without_annotations(value) if isinstance(value, dict) else value


def parts(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the schemas directly within a schema, each with its JSON pointer from there."""
    for key, value in schema.items() if isinstance(schema, dict) else ():
        entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        step = f"/{pointer_part(key)}"
        if key in _SCHEMAS and isinstance(value, dict):
            yield step, value
        elif key in _SCHEMAS or key in _MAPS:
            for name, child in entries:
                if isinstance(child, dict):
                    yield f"{step}/{pointer_part(name)}", child
