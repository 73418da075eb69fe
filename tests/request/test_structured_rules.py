"""What the text of a structured output must be before anybody compiles it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_request import limits, structured_output
from headrace_request.rule_kinds import Bounds
from headrace_request.structured_output import StructuredOutput, Tag
from headrace_request.structured_rules import StructuredText

RULE = StructuredText(limits.MAX_STRUCTURED_BYTES, limits.MAX_STRUCTURED_DEPTH)
BOUNDS = Bounds(100, 100, 1)


def broken(asked: StructuredOutput | None) -> list[tuple[str, str]]:
    return [tuple(violation) for violation in RULE.broken("spec.structured_output", asked, BOUNDS)]


def nested(levels: int) -> str:
    """A schema of so many objects in each other, below a key that pointers escape."""
    return '{"a/b": ' * (levels - 1) + "{}" + "}" * (levels - 1)


@given(st.sampled_from(["json_schema", "regex", "grammar", "choice", "structural_tags"]), st.text())
def test_any_text_is_taken_or_refused_by_its_form(form: str, text: str) -> None:
    for field, rule in broken(StructuredOutput(form, text)):  # type: ignore[arg-type]
        assert field.startswith(f"spec.structured_output.{form}") and rule


def test_what_can_be_compiled_is_taken() -> None:
    for asked in (
        None,
        StructuredOutput("json_object"),
        StructuredOutput("json_schema", nested(64)),
        StructuredOutput("json_schema", "true"),
        StructuredOutput("regex", "a+"),
        StructuredOutput("grammar", "start: A"),
        structured_output.choice(["a", "ü\n"]),
        structured_output.structural_tags([Tag("<", "<f>", "{}", "</f>")]),
        StructuredOutput("regex", "x" * limits.MAX_STRUCTURED_BYTES),
    ):
        assert broken(asked) == []


def test_a_schema_that_nests_too_deeply_is_refused_with_its_path() -> None:
    [(field, rule)] = broken(StructuredOutput("json_schema", nested(65)))
    assert field == "spec.structured_output.json_schema"
    assert rule == "nests deeper than 64 levels at " + "/a~1b" * 64


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 40_000, "[1]", '"x"', "{", "\ud800"])
def test_what_is_no_schema_is_refused(text: str) -> None:
    assert [field for field, _ in broken(StructuredOutput("json_schema", text))] == [
        "spec.structured_output.json_schema"
    ]


def test_a_text_that_is_too_long_is_refused_by_its_bytes() -> None:
    [(_, rule)] = broken(StructuredOutput("regex", "ü" * (limits.MAX_STRUCTURED_BYTES // 2 + 1)))
    assert rule == "has 262146 bytes; must have at most 262144"


def test_mistakes_in_entries_are_named_by_their_places() -> None:
    assert broken(structured_output.choice(["a", ""]))[0][0].endswith("choice.texts[1]")
    assert broken(structured_output.choice([]))[0][0].endswith("choice.texts")
    tags = [Tag("<", "<f>", "{}"), Tag("<", "f>", "{}")]
    assert broken(structured_output.structural_tags(tags))[0][0].endswith("structural_tags.tags[1].begin")
    tags = [Tag("<", "<f>", json.dumps([]))]
    assert broken(structured_output.structural_tags(tags))[0][0].endswith("structural_tags.tags[0].json_schema")
    assert broken(structured_output.structural_tags([Tag("", "", "{}")]))[0][0].endswith("tags[0].trigger")
