"""JSON to a request's struct, with errors that name the caller's field.

Owns the reading alone: the JSON is decoded once, null counts as absent, fields that this server
does not read go through `unsupported`.
"""

from __future__ import annotations

import itertools
import re
from typing import TypeVar

import msgspec

from headrace_service import errors
from headrace_service.openai.requests import nested_fields, shared_fields, unsupported
from headrace_service.openai.requests.shared_fields import SharedFields

Fields = TypeVar("Fields", bound=SharedFields)
_PLACE = re.compile(r"(.*) - at `(?:key in )?\$\.?(.*)`", re.DOTALL)
_MAX_IGNORED = 16
# Unknown names go into a header.
_HEADER_NAME = re.compile(r"[\w.\[\]-]{1,64}", re.ASCII)


def read(body: bytes, kind: type[Fields]) -> tuple[Fields, list[str]]:
    """Returns a request's fields, and the names of those that are ignored.

    Raises:
        ServiceError: INVALID_ARGUMENT, no JSON object, or a field of the wrong type; UNIMPLEMENTED,
            a field asks for what this server does not do.
    """
    try:
        values = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise errors.invalid_field("body", f"must be a JSON object: {_rule(body, error)}") from None
    except RecursionError:
        raise errors.invalid_field("body", "is nested too deeply") from None
    if not isinstance(values, dict):
        raise errors.invalid_field("body", "must be a JSON object")
    values = shared_fields.given(values)
    ignored = unsupported.check(values, kind.__struct_fields__)
    options = values.get("stream_options")
    if isinstance(options, dict):
        values["stream_options"] = options = shared_fields.given(options)
        ignored += unsupported.check(options, ("include_usage",), "stream_options.")
        if not values.get("stream"):
            raise errors.invalid_field("stream_options", "must be absent unless stream is true")
    nested = nested_fields.unknown({name: values[name] for name in values if name in kind.__struct_fields__})
    names = filter(_HEADER_NAME.fullmatch, itertools.chain(ignored, nested))
    try:
        return msgspec.convert(values, kind), list(itertools.islice(names, _MAX_IGNORED))
    except msgspec.ValidationError as error:
        raise _wrong_type(error) from None


def _rule(body: bytes, error: Exception) -> str:
    """What is wrong with a body; half of a surrogate pair at its text's end is called truncated."""
    is_whole = body.rstrip().endswith((b"}", b"]"))
    return "a \\u escape is half of a surrogate pair" if is_whole and "truncated" in str(error) else str(error)


def _wrong_type(error: msgspec.ValidationError) -> errors.ServiceError:
    """Returns INVALID_ARGUMENT for a field, in the words of its type."""
    found = _PLACE.fullmatch(str(error))
    rule, field = (found[1], found[2]) if found is not None else (str(error), "")
    rule = rule.replace("`", "").replace(" | null", "")
    missing = re.fullmatch(r"Object missing required field (\w+)", rule)
    if missing is not None:
        return errors.invalid_field(f"{field}.{missing[1]}".lstrip("."), "is needed")
    return errors.invalid_field(field or "body", f"{rule[:1].lower()}{rule[1:]}".replace("expected", "must be", 1))
