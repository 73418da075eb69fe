"""Outputs of a given form, from the caller to the last token, with the demo model."""

from __future__ import annotations

import functools
import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
from benchmarks.made_schemas import make_schema
from tests.support.running_server import RunningServer

from headrace import Client, Completion, FinishReason, InvalidRequest, StructuralTag

PROMPT = "Once upon a time"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
DIGITS = {"regex": "[0-9]{30,60}"}
# How often a call is made again whose number of steps depends on how busy the machine is.
_TRIES = 4


@pytest.fixture
def client(server: RunningServer) -> Any:
    with Client(server.address) as client:
        yield client


def whole(client: Client, n: int = 4, **options: Any) -> list[str]:
    """Outputs at temperature 1, each of which has come to its form's end."""
    outputs = client.complete(PROMPT, n=n, **{"temperature": 1.0, "max_tokens": 200, "seed": 5} | options).outputs
    assert [output.finish_reason for output in outputs] == [FinishReason.STOP] * n
    return [output.text for output in outputs]


def test_every_output_keeps_its_schema(client: Client) -> None:
    for schema in (PERSON, json.dumps(PERSON)):
        for text in whole(client, n=2, json_schema=schema):
            jsonschema.validate(json.loads(text), PERSON)


def test_every_form_holds(client: Client) -> None:
    assert all(re.fullmatch("(ab|c){2,5}[0-9]", text) for text in whole(client, regex="(ab|c){2,5}[0-9]"))
    choices = ["yes", "no", 'a "quoted" \\ one', "größer\nals"]
    assert set(whole(client, choice=choices)) <= set(choices)
    assert all(re.fullmatch("[ab]+!", text) for text in whole(client, grammar='start: ("a" | "b")~1..9 "!"'))
    outputs = client.complete(PROMPT, json_object=True, n=8, max_tokens=200, seed=1).outputs
    ended = [json.loads(output.text) for output in outputs if output.finish_reason is FinishReason.STOP]
    assert ended and all(isinstance(value, dict) for value in ended)


def test_tags_have_their_form_within_free_text(client: Client) -> None:
    tag = StructuralTag("e", "e[", {"type": "integer", "minimum": 0, "maximum": 99}, "]")
    found = 0
    for output in client.complete(PROMPT, structural_tags=[tag], temperature=1.0, max_tokens=60, seed=3, n=8).outputs:
        *parts, last = output.text.split("e")[1:] or [""]
        found += output.text.count("e[")
        assert all(re.match(r"\[(0|[1-9][0-9]?)\]", part) for part in parts)
        assert re.match(r"(\[([0-9]{0,2}\]?)?)?", last)
    assert found >= 5


def test_what_sampling_asks_for_holds_beside_a_form(client: Client) -> None:
    """The form's end waits for min_tokens, unless nothing else can follow; stops cut it."""
    options: dict[str, Any] = {"temperature": 1.0, "seed": 9, "max_tokens": 100}
    few = client.complete(PROMPT, regex="[0-9]+", **options)
    many = client.complete(PROMPT, regex="[0-9]+", min_tokens=40, **options)
    assert len(few.outputs[0].token_ids) < 40 <= len(many.outputs[0].token_ids)
    assert many.outputs[0].text.isdigit()
    complete = client.complete(PROMPT, choice=["seven"], min_tokens=50, **options).outputs[0]
    assert (complete.text, complete.finish_reason) == ("seven", FinishReason.STOP)
    no_end = client.complete(PROMPT, choice=["seven"], ignore_eos=True, **options).outputs[0]
    assert (no_end.text, no_end.finish_reason) == ("seven", FinishReason.STOP)
    stopped = client.complete(PROMPT, **DIGITS, stop=["7"], **options).outputs[0]
    assert re.fullmatch("[0-9]*", stopped.text) and "7" not in stopped.text
    assert stopped.finish_reason is FinishReason.STOP
    reported = client.complete(PROMPT, regex="[ab]{9}", logprobs=20, presence_penalty=0.5, **options).outputs[0]
    assert re.fullmatch("[ab]{9}", reported.text) and reported.logprobs is not None
    # What the form excludes has no probability, so few tokens are left to report.
    assert all(1 <= count < 20 for count in reported.logprobs.top_counts)


@pytest.mark.slow  # tests/engine/scheduling/test_late_masks.py: rows do not depend on masks.
def test_a_seed_gives_the_same_form_again_and_others_are_not_touched(client: Client) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 11, "max_tokens": 50}
    alone = client.complete(PROMPT, **options).outputs[0].token_ids
    formed = client.complete(PROMPT, json_schema=PERSON, **options).outputs[0].token_ids
    with client.generate(PROMPT, regex="[0-9]*", ignore_eos=True, max_tokens=400, seed=1):
        assert client.complete(PROMPT, **options).outputs[0].token_ids == alone
        assert client.complete(PROMPT, json_schema=PERSON, **options).outputs[0].token_ids == formed


ADDRESS = {
    "type": "object",
    "properties": {
        "favourite_colour": {"enum": ["red", "ultramarine", "aquamarine"]},
        "is_registered_member": {"type": "boolean"},
        "postal_address": {"type": "string", "maxLength": 12},
    },
    "required": ["favourite_colour", "is_registered_member", "postal_address"],
    "additionalProperties": False,
}


def assert_same(fast: Completion, drawn: Completion) -> None:
    """The answers have the same tokens and, but for rounding, the same log-probabilities."""
    for output, expected in zip(fast.outputs, drawn.outputs, strict=True):
        assert (output.token_ids, output.finish_reason) == (expected.token_ids, expected.finish_reason)
        if expected.logprobs is not None:
            assert output.logprobs is not None
            assert output.logprobs.ranks == expected.logprobs.ranks
            assert output.logprobs.top_token_ids == expected.logprobs.top_token_ids
            assert output.logprobs.sampled == pytest.approx(expected.logprobs.sampled, abs=1e-3)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 1.0, "seed": 4, "logprobs": 0},
        {"temperature": 1.0, "seed": 5, "presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
        {"temperature": 1.0, "seed": 6, "min_tokens": 30, "stop": ["ber"]},
        {"temperature": 1.0, "seed": 7, "max_tokens": 11},
    ],
)
def test_what_a_form_leaves_no_choice_about_takes_fewer_steps_and_stays(client: Client, options: Any) -> None:
    """Without drafts each token is drawn."""
    options = {"max_tokens": 120, "n": 3} | options
    drawn = client.complete(PROMPT, json_schema=ADDRESS, max_drafts=0, **options)
    # Whether it pays to compute what must come is learned from what steps take, which says little
    # while others keep the machine busy: not each time.
    for _ in range(_TRIES):
        fast = client.complete(PROMPT, json_schema=ADDRESS, **options)
        assert_same(fast, drawn)
        if fast.ledger.step_count < drawn.ledger.step_count:
            return
    pytest.fail(f"{_TRIES} times as many steps as without, {drawn.ledger.step_count}")


@pytest.mark.parametrize(
    "options",
    [{"choice": ["seven"], "bad_words": ["seven"]}, {"regex": "(no ){9}", "bad_words": ["no no no no no no"]}],
)
def test_bad_words_that_leave_nothing_of_a_form_are_the_callers_mistake(client: Client, options: Any) -> None:
    with pytest.raises(InvalidRequest, match="leave out one of them") as refused:
        client.complete(PROMPT, max_tokens=100, **options)
    assert [violation.field for violation in refused.value.violations] == ["spec.stop.bad_words"]
    with pytest.raises(InvalidRequest, match="leave out one of them"):
        list(client.generate(PROMPT, max_tokens=100, **options).text())


@pytest.mark.parametrize(
    ("form", "named"),
    [
        ({"json_schema": {"properties": {"a": {"items": {"uniqueItems": True}}}}}, "at /properties/a/items: "),
        ({"json_schema": "{"}, "json_schema: is no JSON"),
        ({"json_schema": "[" * 100_000}, "json_schema: "),
        ({"json_schema": {"type": "string", "pattern": "x" * (256 << 10)}}, "must have at most 262144"),
        ({"json_schema": {"$ref": "#"}}, "no text has this form"),
        ({"json_schema": {"type": "integer", "minimum": 2, "maximum": 1}}, "minimum (2) is greater"),
        ({"regex": "["}, "regex parse error"),
        ({"regex": "a{1000000}"}, "spec.structured_output.regex: "),
        ({"grammar": "start: ("}, "spec.structured_output.grammar: "),
        ({"choice": []}, "choice.texts: must have at least 1 entry"),
        ({"choice": ["a", ""]}, "choice.texts[1]: must not be empty"),
        ({"structural_tags": [StructuralTag("a", "b", True)]}, "tags[0].begin: must begin with the trigger"),
        ({"structural_tags": [StructuralTag("a", "ab", "[")]}, "tags[0].json_schema: is no JSON"),
    ],
)
def test_a_form_that_can_not_be_had_is_refused(client: Client, form: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        client.complete(PROMPT, max_tokens=5, **form)
    assert named in str(refused.value)


@pytest.mark.slow  # the first two compile for 2 s of CPU each
@pytest.mark.parametrize(
    ("form", "limit"),
    [
        ({"json_schema": {"properties": {f"property{i}": {} for i in range(9000)}}}, "2 s"),
        ({"json_schema": {"patternProperties": {f"^x{i}[a-z]{{1,50}}$": True for i in range(3000)}}}, "2 s"),
        ({"grammar": "start: r0\n" + "".join(f'r{i}: r{i + 1} r{i + 1} | "a"\n' for i in range(9000)) + 'r9000: "x"'},
            "256 MiB, or nests too deeply"),
    ],
)  # fmt: skip
def test_what_takes_too_much_to_compile_is_refused_while_others_are_served(
    client: Client, form: dict[str, Any], limit: str
) -> None:
    with client.generate(PROMPT, max_tokens=1000, ignore_eos=True, time_limit=60) as others:
        with pytest.raises(InvalidRequest) as refused:
            client.complete(PROMPT, max_tokens=5, **form)
        assert limit in str(refused.value)
        assert next(iter(others)) is not None
    assert whole(client, choice=["still here"]) == ["still here"] * 4


@pytest.mark.slow
@pytest.mark.timeout(3600)  # 100,000 tokens: minutes on quiet cores
def test_no_output_of_a_thousand_schemas_breaks_its_own(server: RunningServer) -> None:
    """One output each at temperature 1. Those that max_tokens cuts prove nothing; few are.

    Three quarters of what the demo model writes are spaces and line breaks between the parts.
    """

    def num_cut(seed: int, client: Client) -> int:
        schema, cut = make_schema(seed), 0
        completion = client.complete(PROMPT, json_schema=schema, temperature=1.0, max_tokens=400, seed=seed)
        for output in completion.outputs:
            if output.finish_reason is FinishReason.LENGTH:
                cut += 1
            else:
                jsonschema.validate(json.loads(output.text), schema)
        return cut

    with Client(server.address) as client, ThreadPoolExecutor(24) as pool:
        assert sum(pool.map(functools.partial(num_cut, client=client), range(1000))) < 50
