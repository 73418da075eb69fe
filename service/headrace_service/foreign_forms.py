"""The form of outputs, as OpenAI's API and vLLM's options say it, into a `StructuredOutput`.

Owns their names and types. What a form's text must be is checked as for every wire (`validation`),
and what can't be compiled is refused by the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from headrace.v1 import generation_pb2
from headrace_service import errors

Output = generation_pb2.StructuredOutput
_FORMS: Final = ("json_schema", "json_object", "regex", "choice", "grammar", "structural_tags")


def names(field: str) -> dict[str, str]:
    """What the forms are called by a caller who gave one in `field`."""
    output = "spec.structured_output"
    return {
        output: field,
        **{f"{output}.{form}": field for form in _FORMS},
        f"{output}.choice.texts": field,
        f"{output}.structural_tags.tags": f"{field}.structures",
    }


def read_response_format(given: Mapping[str, Any], field: str) -> Output | None:
    """Returns the form that OpenAI's `response_format` asks for; None: any text.

    Raises:
        ServiceError: INVALID_ARGUMENT or UNIMPLEMENTED, naming the field.
    """
    match given.get("type"):
        case "text":
            return None
        case "json_object":
            return Output(json_object={})
        case "json_schema":
            holder = given.get("json_schema")
            if not isinstance(holder, dict) or "schema" not in holder:
                raise errors.invalid_field(f"{field}.json_schema", "must be an object with a schema")
            return _json(holder["schema"], f"{field}.json_schema.schema")
        case "structural_tag":
            return _structural_tag(given, field)
    raise errors.invalid_field(f"{field}.type", "must be text, json_object, json_schema or structural_tag")


def read_vllm(given: Mapping[str, Any], field: str) -> Output | None:
    """Returns the form that an object of vLLM's asks for (`structured_outputs`); None: any text.

    Raises:
        ServiceError: INVALID_ARGUMENT or UNIMPLEMENTED, naming the field.
    """
    asked = {name: value for name, value in given.items() if value is not None and value is not False}
    if not asked:
        return None
    if len(asked) > 1:
        raise errors.invalid_field(field, f"must name one form (given: {', '.join(sorted(asked)):.80})")
    [(name, value)] = asked.items()
    if name not in VLLM_FORMS:
        raise errors.unimplemented(f"{field}.{name[:64]}: is not supported by this server")
    return VLLM_FORMS[name](value, f"{field}.{name}")


def _json(value: Any, field: str) -> Output:
    """A JSON Schema, as an object or as its text."""
    if not isinstance(value, str | dict | bool):
        raise errors.invalid_field(field, "must be a JSON Schema: an object, or its JSON text")
    return Output(json_schema=value if isinstance(value, str) else msgspec.json.encode(value).decode())


def _json_object(value: Any, field: str) -> Output:
    if value is not True:
        raise errors.invalid_field(field, "must be true or false")
    return Output(json_object={})


def _regex(value: Any, field: str) -> Output:
    return Output(regex=_text(value, field))


def _grammar(value: Any, field: str) -> Output:
    return Output(grammar=_text(value, field))


def _choice(value: Any, field: str) -> Output:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise errors.invalid_field(field, "must be a list of strings")
    return Output(choice={"texts": value})


def _structural_tag(value: Any, field: str) -> Output:
    """The tags of an object with `structures` and `triggers`, or of its JSON text."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            raise errors.invalid_field(field, "must be JSON") from None
    try:
        asked = msgspec.convert(value, _VllmTags)
    except msgspec.ValidationError as error:
        raise errors.invalid_field(field, f"must have structures and triggers: {error}") from None
    tags = generation_pb2.StructuralTags()
    for index, structure in enumerate(asked.structures):
        trigger = next((each for each in asked.triggers if each and structure.begin.startswith(each)), None)
        if trigger is None:
            raise errors.invalid_field(f"{field}.structures[{index}].begin", "must begin with one of the triggers")
        tags.tags.add(
            trigger=trigger,
            begin=structure.begin,
            json_schema=msgspec.json.encode(structure.schema).decode(),
            end=structure.end,
        )
    return Output(structural_tags=tags)


class _Structure(msgspec.Struct, frozen=True):
    begin: str
    schema: dict[str, Any] | bool
    end: str


class _VllmTags(msgspec.Struct, frozen=True):
    structures: list[_Structure]
    triggers: list[str]


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise errors.invalid_field(field, "must be a string")
    return value


VLLM_FORMS: Final[Mapping[str, Callable[[Any, str], Output]]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _structural_tag,
}
"""What vLLM calls the forms, in an object or behind "guided_"."""
