"""Grammars hold what JSON Schemas say; formats of no standard say nothing."""

from __future__ import annotations

import copy
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from headrace_request import json_schema

LEAVES = st.sampled_from(
    [
        {"type": "string"},
        {"type": "string", "format": "date"},
        {"type": "string", "format": "path"},
        {"type": "integer", "format": "int64"},
        {"enum": [{"format": "path"}, 1]},
        True,
    ]
)


def nested(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    named = st.dictionaries(st.sampled_from(["format", "name", "items"]), children, max_size=3)
    return st.one_of(
        st.builds(lambda properties: {"type": "object", "properties": properties}, named),
        st.builds(lambda items: {"type": "array", "items": items, "format": "list"}, children),
        st.builds(lambda some: {"anyOf": some}, st.lists(children, min_size=1, max_size=3)),
        st.builds(lambda definitions: {"$defs": definitions, "$ref": "#"}, named),
    )


SCHEMAS = st.recursive(LEAVES, nested, max_leaves=12).filter(lambda schema: isinstance(schema, dict))


def formats(schema: Any) -> list[Any]:
    """The formats of a schema and of all within it."""
    found = [schema["format"]] if "format" in schema else []
    for _, part in json_schema.parts(schema):
        found += formats(part)
    return found


@given(SCHEMAS)
def test_formats_of_the_standard_are_held_and_no_others(schema: dict[str, Any]) -> None:
    before = copy.deepcopy(schema)
    held = json_schema.held(schema)
    assert schema == before
    assert formats(held) == [each for each in formats(schema) if each == "date"]


@given(SCHEMAS)
def test_nothing_but_formats_is_left_out(schema: dict[str, Any]) -> None:
    held = json_schema.without_annotations(schema)
    places = [path for path, _ in json_schema.parts(schema)]
    assert [path for path, _ in json_schema.parts(held)] == places
    assert {key: value for key, value in held.items() if isinstance(value, str)}.items() >= {
        key: value for key, value in schema.items() if isinstance(value, str) and key != "format"
    }.items()
    # Values are no schemas, whatever they look like.
    assert held.get("enum") == schema.get("enum")


@pytest.mark.parametrize("name", ["path", "password", "binary", "int64", "anything"])
def test_a_format_of_no_standard_is_compiled(name: str) -> None:
    schema = {"type": "object", "properties": {"format": {"type": "string", "format": name}}}
    jsonschema.validate({"format": "x"}, schema)
    grammar = LLMatcher.grammar_from_json_schema(json_schema.held(schema))
    assert LLMatcher.validate_grammar(grammar) == ""


@pytest.mark.parametrize("name", ["regex", "uri-reference", "json-pointer"])
def test_a_format_of_the_standard_that_can_not_be_held_is_refused_by_name(name: str) -> None:
    grammar = LLMatcher.grammar_from_json_schema(json_schema.held({"type": "string", "format": name}))
    assert name in LLMatcher.validate_grammar(grammar)


@pytest.mark.parametrize(("schema", "allowed"), [(True, True), (False, False), ({}, True)])
def test_true_and_false_are_schemas(schema: Any, allowed: bool) -> None:
    grammar = LLMatcher.grammar_from_json_schema(json_schema.held(schema))
    assert (LLMatcher.validate_grammar(grammar) == "") is allowed
