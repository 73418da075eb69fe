"""Outputs of gpt-oss's format become the same parts, however they are cut.

The conversations are written here after the published description of the format.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.service.output_forms.harmony_case import IDS, TEMPLATE, feed, form_of, plan_of, read, units
from tests.service.output_forms.test_reading import Shown, shown
from tests.support.examples import examples

from headrace_service.output_forms.harmony import MARKERS, channel_within
from headrace_service.output_forms.model_form import ModelForm
from headrace_service.output_forms.output_reader import OutputReader
from headrace_service.output_forms.parts import CallFinished, Text

TOOLS = plan_of("weather", "clock")
PLAIN = plan_of()
PARIS = '{"city": "Paris"}'
THOUGHTS = ("reasoning", "They ask.\n")
THOUGHT = "<|channel|>analysis<|message|>They ask.\n<|end|>"
NEXT = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>"
WEATHER = "commentary to=functions.weather <|constrain|>json<|message|>"

RECORDED: list[tuple[str, Any, str, list[Shown]]] = [
    ("an answer", TOOLS, f"{FINAL}Sunny.\n<|return|>", ["Sunny.\n"]),
    (
        "reasoning and an answer",
        PLAIN,
        f"{THOUGHT}{NEXT}{FINAL}It is sunny.<|return|>",
        [THOUGHTS, "It is sunny."],
    ),
    (
        "several messages of reasoning",
        PLAIN,
        f"{THOUGHT}{NEXT}{THOUGHT}{NEXT}{FINAL}Sunny.",
        [("reasoning", "They ask.\n\n\nThey ask.\n"), "Sunny."],
    ),
    (
        "a call behind reasoning",
        TOOLS,
        f"{THOUGHT}{NEXT}<|channel|>{WEATHER}{PARIS}<|call|>",
        [THOUGHTS, ("weather", PARIS, True)],
    ),
    (
        "a preamble and a call, its type without a space before it",
        TOOLS,
        f"{THOUGHT}{NEXT}<|channel|>commentary<|message|>I look.<|end|>{NEXT}<|channel|>commentary "
        f"to=functions.weather<|constrain|>json<|message|>{PARIS}<|call|>",
        [THOUGHTS, "I look.", ("weather", PARIS, True)],
    ),
    (
        "a recipient behind the role",
        TOOLS,
        f"{THOUGHT}{NEXT} to=functions.clock<|channel|>commentary json<|message|>{{}}<|call|>",
        [THOUGHTS, ("clock", "{}", True)],
    ),
    ("a recipient at once", TOOLS, " to=functions.clock<|channel|>commentary<|message|>{}", [("clock", "{}", True)]),
    (
        "a call in the channel of reasoning",
        TOOLS,
        "<|channel|>analysis to=functions.clock code<|message|>{}<|call|>",
        [("clock", "{}", True)],
    ),
    ("no arguments", TOOLS, "<|channel|>commentary to=functions.clock<|message|><|call|>", [("clock", "{}", True)]),
    (
        "a recipient without its namespace",
        TOOLS,
        "<|channel|>commentary to=clock<|message|>{}<|call|>",
        [("clock", "{}", True)],
    ),
    (
        "a function that nobody has",
        TOOLS,
        "<|channel|>commentary to=browser.search<|message|>{}<|call|>",
        [("browser.search", "{}", False)],
    ),
    ("arguments that are cut", TOOLS, f'<|channel|>{WEATHER}{{"city": "Par', [("weather", '{"city": "Par', False)]),
    ("whole arguments at the end", TOOLS, f"<|channel|>{WEATHER}{PARIS}", [("weather", PARIS, True)]),
    ("a call that is cut", TOOLS, "<|channel|>commentary to=functions.clock<|message|>", [("clock", "", False)]),
    ("arguments that are no object", TOOLS, f"<|channel|>{WEATHER}3<|call|>", [("weather", "3", False)]),
    (
        "two calls",
        TOOLS,
        f"<|channel|>{WEATHER}{PARIS}<|call|>{NEXT}<|channel|>commentary to=functions.clock<|message|>{{}}<|call|>",
        [("weather", PARIS, True), ("clock", "{}", True)],
    ),
    (
        "a call without tools",
        PLAIN,
        f"<|channel|>{WEATHER}{PARIS}<|call|>",
        [f"commentary to=functions.weather json{PARIS}"],
    ),
    ("to a person", TOOLS, "<|channel|>commentary to=user<|message|>Hello.", ["Hello."]),
    (
        "a preamble and an answer are two paragraphs",
        PLAIN,
        f"<|channel|>commentary<|message|>I look.<|end|>{NEXT}{FINAL}Sunny.<|return|>",
        ["I look.\n\nSunny."],
    ),
    ("text alone", TOOLS, "Paris is sunny.\n", ["Paris is sunny.\n"]),
    ("text that begins like a recipient", TOOLS, "to be", ["to be"]),
    ("text of one letter", TOOLS, "t", ["t"]),
    ("nothing", TOOLS, "", []),
    ("a body without a header", TOOLS, "<|message|>Sunny.<|end|>", ["Sunny."]),
    ("a channel that nobody knows", TOOLS, "<|channel|>poetry<|message|>A rose.<|end|>", ["poetryA rose."]),
    ("a role that is another's", TOOLS, f"{THOUGHT}<|start|>user<|message|>Hi.", [THOUGHTS, "userHi."]),
    ("a channel without its word", TOOLS, "<|channel|><|message|>So.", ["So."]),
    ("a header that never ends", TOOLS, "<|channel|>final\nSo <|end|>it is.", ["final\nSo \n\nit is."]),
    ("two channels", TOOLS, "<|channel|>final<|channel|>final<|message|>So.", ["finalfinalSo."]),
    ("a header without a body", TOOLS, f"{THOUGHT}{NEXT}<|end|>So.", [THOUGHTS, "assistant\n\nSo."]),
    ("a header that is cut", TOOLS, f"{THOUGHT}{NEXT}<|channel|>comm", [THOUGHTS]),
    (
        "a message whose end is left out",
        TOOLS,
        f"<|channel|>analysis<|message|>So.{FINAL}Sunny.<|return|>",
        [("reasoning", "So."), "Sunny."],
    ),
    ("text between messages", TOOLS, f"{THOUGHT} well {NEXT}{FINAL}So.", [THOUGHTS, " well \n\nSo."]),
    ("the prompt ends within an answer", plan_of(within="final"), "and sunny.<|return|>", ["and sunny."]),
    (
        "the prompt ends within reasoning",
        plan_of("clock", within="analysis"),
        f"so.<|end|>{NEXT}{FINAL}Sunny.",
        [("reasoning", "so."), "Sunny."],
    ),
]


@pytest.mark.parametrize(("plan", "text", "expected"), [pytest.param(*case[1:], id=case[0]) for case in RECORDED])
def test_a_recorded_output_becomes_its_parts_a_character_at_a_time_or_at_once(
    plan: Any, text: str, expected: list[Shown]
) -> None:
    assert shown(read(plan, [text])) == expected
    assert read(plan, units(text)) == read(plan, [text])


PLANS = (TOOLS, PLAIN, plan_of("clock", within="analysis"), plan_of(within="final"))
_WORDS = [
    *MARKERS, "assistant", "analysis", "commentary", "final", " to=functions.", "to=", "weather", "clock", "user",
    " ", "json", "{", "}", '"a": 1', "\n", "é", "x" * 150, "a",
]  # fmt: skip
MIXED = st.lists(st.sampled_from(_WORDS), max_size=24).map("".join)


@st.composite
def damaged(draw: Any) -> str:
    """A recorded output in which something else stands in some place."""
    whole = units(draw(st.sampled_from([case[2] for case in RECORDED])))
    begin = draw(st.integers(0, len(whole)))
    return "".join(whole[:begin]) + draw(MIXED) + "".join(whole[begin + draw(st.integers(0, 8)) :])


OUTPUTS = st.one_of(MIXED, damaged())


@settings(max_examples=examples(500), deadline=None)
@given(st.sampled_from(PLANS), OUTPUTS, st.booleans(), st.data())
def test_the_parts_of_any_output_do_not_depend_on_how_it_is_cut(
    plan: Any, text: str, shows_special: bool, data: Any
) -> None:
    smallest = units(text)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(smallest)), max_size=12)))
    pieces = ["".join(smallest[begin:end]) for begin, end in zip([0, *cuts], [*cuts, len(smallest)], strict=True)]
    whole = read(plan, [text], shows_special)
    assert read(plan, pieces, shows_special) == read(plan, smallest, shows_special) == whole
    for part in whole:
        if isinstance(part, CallFinished) and part.valid:
            assert isinstance(json.loads(part.arguments), dict)


@settings(max_examples=examples(300), deadline=None)
@given(st.sampled_from(PLANS), OUTPUTS)
def test_no_text_is_lost_but_headers(plan: Any, text: str) -> None:
    # Every letter that no header can have arrives in a part.
    said = "".join(
        part.arguments if isinstance(part, CallFinished) else getattr(part, "text", "") for part in read(plan, [text])
    )
    assert sum(said.count(char) for char in '{}é"') >= sum(text.count(char) for char in '{}é"')


@settings(max_examples=examples(200), deadline=None)
@given(st.sampled_from(PLANS), OUTPUTS)
def test_what_is_held_back_is_never_what_was_reported(plan: Any, text: str) -> None:
    smallest = units(text)
    reader = OutputReader(plan, "request/0", shows_special=False)
    for place, unit in enumerate(smallest):
        feed(reader, unit)
        if not reader.holds:
            rest = OutputReader(plan, "request/0", shows_special=False)
            feed(rest, "".join(smallest[: place + 1]))
            assert not rest.holds


def test_tokens_of_reasoning_are_counted_with_its_markers_and_headers() -> None:
    reader = OutputReader(TOOLS, "request/0", shows_special=False)
    tokens = ["<|channel|>", "analysis", "<|message|>", "So", ".", "<|end|>"]
    for token in [*tokens, "<|start|>", "assistant", *tokens]:
        feed(reader, token)
    assert reader.num_reasoning_tokens == 14
    for token in ["<|start|>", "assistant", "<|channel|>", "final", "<|message|>", "So", "<|return|>"]:
        feed(reader, token)
    assert reader.num_reasoning_tokens == 14


def test_markers_that_a_model_spells_out_are_text() -> None:
    reader = OutputReader(TOOLS, "request/0", shows_special=False)
    feed(reader, FINAL)
    reader.feed(1, "Write <|end|><|start|>assistant.")
    reader.finish()
    assert reader.take() == [Text("Write <|end|><|start|>assistant.")]


def test_special_tokens_within_a_body_are_shown_if_they_are_asked_for() -> None:
    text = f"{FINAL}a<|constrain|>b<|return|>"
    assert read(TOOLS, [text], shows_special=True) == [Text("a<|constrain|>b")]
    assert read(TOOLS, [text]) == [Text("ab")]


@pytest.mark.parametrize(
    ("prompt", "channel"),
    [
        ("<|start|>user<|message|>Hi<|end|><|start|>assistant", ""),
        ("<|start|>user<|message|>Hi<|end|>", ""),
        ("<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>final<|message|>It is", "final"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "analysis"),
        ("<|start|>assistant<|channel|>poetry<|message|>", ""),
        ("Hi", ""),
    ],
)
def test_the_prompt_says_in_which_channel_an_output_begins(prompt: str, channel: str) -> None:
    assert channel_within(prompt) == channel


@pytest.mark.parametrize(
    ("template", "wanted", "name", "why"),
    [
        (TEMPLATE, "auto", "harmony", ""),
        ("tools", "harmony", "harmony", ""),
        (TEMPLATE, "off", "", "tool_format off"),
        (TEMPLATE.removeprefix("tools"), "auto", "", "does not show tools"),
    ],
)
def test_channels_are_read_whether_tools_are_taken_or_not(template: str, wanted: str, name: str, why: str) -> None:
    form = form_of(template, wanted)
    assert (form.call_format, form.has_channels) == (name, True)
    assert why in form.why_no_tools
    plan = form.plan((), begins_inside=False)
    assert plan is not None and plan.has_channels
    section = form.section
    assert section is not None and section.end_ids == (IDS["<|end|>"],)
    assert bytes(token for token in section.closing_ids if token < 256) == b"assistantfinal"


def test_another_format_that_the_operator_names_is_read_as_such() -> None:
    form = form_of(TEMPLATE, "hermes")
    assert (form.call_format, form.has_channels) == ("hermes", False)


def test_a_tokenizer_without_the_special_tokens_writes_no_harmony() -> None:
    form = ModelForm.of(TEMPLATE, lambda text: list(text.encode()), ())
    assert (form.call_format, form.has_channels, form.section) == ("", False, None)
    assert "special token <|start|>" in form.why_no_tools
