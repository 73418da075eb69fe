"""Outputs of conversations become the same parts, however their text is cut.

The outputs are recorded here as models of each format write them: one call, several, text around
them, what breaks off, and what only looks like a call.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.examples import examples

from headrace_service.output_forms.output_plan import KnownTool, OutputPlan
from headrace_service.output_forms.output_reader import OutputReader, merged
from headrace_service.output_forms.parts import CallArguments, CallFinished, CallStarted, Part, Reasoning, Text

TOOLS = (KnownTool("weather", ("city", "note")), KnownTool("clock"))
HERMES = OutputPlan(call_format="hermes", tools=TOOLS)
LLAMA = OutputPlan(call_format="llama3-json", tools=TOOLS)
MISTRAL = OutputPlan(call_format="mistral", tools=TOOLS)
QWEN_CODER = OutputPlan(call_format="qwen3-coder", tools=TOOLS)
SEED = OutputPlan(call_format="seed-oss", tools=TOOLS)
GLM = OutputPlan(call_format="glm", tools=TOOLS)
GEMMA = OutputPlan(call_format="gemma4", tools=TOOLS)
THINKING_GEMMA = OutputPlan(call_format="gemma4", tools=TOOLS, reasoning=("<|channel>thought\n", "<channel|>"))
THINKING = OutputPlan(reasoning=("<think>", "</think>"))
THINKING_HERMES = OutputPlan(call_format="hermes", tools=TOOLS, reasoning=("<think>", "</think>"))
INSIDE = OutputPlan(call_format="hermes", tools=TOOLS, reasoning=("<think>", "</think>"), begins_inside=True)

# Of a call: its name, its arguments, and whether it is valid.
Shown = str | tuple[str, str] | tuple[str, str, bool]
PARIS = '{"city": "Paris"}'


def read(plan: OutputPlan, pieces: list[str], place: str = "request/0") -> list[Part]:
    """Returns the parts of an output that arrives in these pieces; each run of a kind is one."""
    reader, parts = OutputReader(plan, place, shows_special=False), []
    for piece in pieces:
        reader.feed(1, piece)
        parts += reader.take()
    reader.finish()
    return merged([*parts, *reader.take()])


def shown(parts: list[Part]) -> list[Shown]:
    """Returns parts in few words, after a look at whether calls come in order."""
    made: list[Shown] = []
    name, arguments, count = "", "", 0
    for part in parts:
        match part:
            case Text(text):
                made.append(text)
            case Reasoning(text):
                made.append(("reasoning", text))
            case CallStarted(index, id, name):
                assert (index, len(id)) == (count, 9)
                arguments = ""
            case CallArguments(index, delta):
                assert index == count
                arguments += delta
            case CallFinished(index, whole, valid):
                assert (index, whole) == (count, arguments)
                made.append((name, whole, valid))
                count += 1
    return made


RECORDED: list[tuple[str, OutputPlan, str, list[Shown]]] = [
    ("text", HERMES, "It is sunny in Paris.\n", ["It is sunny in Paris.\n"]),
    (
        "a call",
        HERMES,
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        [("weather", PARIS, True)],
    ),
    (
        "text, two calls, text",
        HERMES,
        'I will look.\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>{"name":"clock","arguments":{}}</tool_call>\n\nDone.',
        ["I will look.", ("weather", PARIS, True), ("clock", "{}", True), "Done."],
    ),
    (
        "arguments before the name, other keys, an end marker within a string",
        HERMES,
        '<tool_call>{"id": [1, {"a": "}"}], "arguments": {"city": "</tool_call>\\"{"}, "name": "weather"}</tool_call>',
        [("weather", '{"city": "</tool_call>\\"{"}', True)],
    ),
    ("a function without arguments", HERMES, '<tool_call>{"name": "clock"}</tool_call>', [("clock", "{}", True)]),
    (
        "a function that nobody has",
        HERMES,
        '<tool_call>{"name": "x", "arguments": {}}</tool_call>',
        [("x", "{}", False)],
    ),
    ("no object", HERMES, "a <tool_call>[1]</tool_call>", ["a <tool_call>[1]</tool_call>"]),
    ("no name", HERMES, 'a\n<tool_call>{"arguments": 1} b', ['a\n<tool_call>{"arguments": 1} b']),
    (
        "arguments that are no object",
        HERMES,
        '<tool_call>{"name": "weather", "arguments": "Paris"}</tool_call>',
        [("weather", '"Paris"', False)],
    ),
    (
        "arguments that are no JSON",
        HERMES,
        '<tool_call>{"name": "weather", "arguments": {"city": Paris}}</tool_call> So.',
        [("weather", '{"city": Paris}', False), "So."],
    ),
    (
        "an object that breaks off",
        HERMES,
        '<tool_call>{"name": "weather", "arguments": {"city": "Paris"} nonsense</tool_call> So.',
        [("weather", PARIS, False), "So."],
    ),
    (
        "an output that is cut within arguments",
        HERMES,
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Par',
        [("weather", '{"city": "Par', False)],
    ),
    ("an output that is cut within a marker", HERMES, "so\n<tool_", ["so\n<tool_"]),
    ("an end marker without a call", HERMES, "a</tool_call>b", ["a</tool_call>b"]),
    (
        "a call without its end marker",
        HERMES,
        '<tool_call>{"name": "clock", "arguments": {}}<tool_call>{"name": "clock", "arguments": {}}',
        [("clock", "{}", True), ("clock", "{}", True)],
    ),
    ("a call", LLAMA, '{"name": "weather", "parameters": {"city": "Paris"}}', [("weather", PARIS, True)]),
    ("a call behind the tag", LLAMA, '<|python_tag|>{"name": "clock", "parameters": {}}', [("clock", "{}", True)]),
    (
        "two calls",
        LLAMA,
        '\n{"name": "weather", "parameters": {"city": "Paris"}}; {"name": "clock", "parameters": {}}\n',
        [("weather", PARIS, True), ("clock", "{}", True)],
    ),
    ("text", LLAMA, 'Use {"name": "clock"}.', ['Use {"name": "clock"}.']),
    ("an object that is no call", LLAMA, ' {"city": "Paris"} is it', [' {"city": "Paris"} is it']),
    ("text behind a call", LLAMA, '{"name": "clock", "parameters": {}} So.', [("clock", "{}", True), "So."]),
    (
        "an array",
        MISTRAL,
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}}, {"name": "clock", "arguments": {}}]',
        [("weather", PARIS, True), ("clock", "{}", True)],
    ),
    (
        "names and arguments",
        MISTRAL,
        'Well. [TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]clock[CALL_ID]abcdefghi[ARGS]{} So.',
        ["Well.", ("weather", PARIS, True), ("clock", "{}", True), "So."],
    ),
    ("a name without [ARGS]", MISTRAL, '[TOOL_CALLS]weather{"city": "Paris"}', [("weather", PARIS, True)]),
    ("nothing behind the marker", MISTRAL, "a [TOOL_CALLS] ", ["a [TOOL_CALLS] "]),
    ("no name behind the marker", MISTRAL, "[TOOL_CALLS][ARGS]{}", ["[TOOL_CALLS][ARGS]{}"]),
    ("cut", MISTRAL, '[TOOL_CALLS][{"name": "weather", "arguments": {', [("weather", "{", False)]),
    (
        "text and JSON",
        QWEN_CODER,
        'I look.\n<tool_call>\n<function=weather>\n<parameter=city>\nParis "<b>"\n\n</parameter>\n'
        "<parameter=days>\n[1, 2]\n</parameter>\n</function>\n</tool_call>",
        ["I look.", ("weather", '{"city": "Paris \\"<b>\\"\\n", "days": [1, 2]}', True)],
    ),
    (
        "no arguments",
        QWEN_CODER,
        "<tool_call>\n<function=clock>\n</function>\n</tool_call>\n<tool_call><function=clock></function></tool_call>",
        [("clock", "{}", True), ("clock", "{}", True)],
    ),
    (
        "a value that is no JSON",
        QWEN_CODER,
        "<tool_call><function=clock><parameter=zone>\nUTC\n</parameter></function></tool_call>",
        [("clock", '{"zone": "UTC"}', True)],
    ),
    (
        "a value without its end",
        QWEN_CODER,
        "<tool_call><function=weather><parameter=city>\nParis</function></tool_call> So.",
        [("weather", PARIS, True), "So."],
    ),
    (
        "cut within a value",
        QWEN_CODER,
        "<tool_call><function=weather><parameter=city>\nPar</par",
        [("weather", '{"city": "Par', False)],
    ),
    (
        "other markers around functions",
        SEED,
        "So.\n<seed:tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</seed:tool_call>",
        ["So.", ("weather", PARIS, True)],
    ),
    ("no function", QWEN_CODER, "a <tool_call>\nx<function=b>", ["a <tool_call>\nx<function=b>"]),
    (
        "text and JSON in tags",
        GLM,
        'I look.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris "<b>"\n</arg_value>\n'
        "<arg_key>days</arg_key>\n<arg_value>[1, 2]</arg_value>\n</tool_call>",
        ["I look.", ("weather", '{"city": "Paris \\"<b>\\"\\n", "days": [1, 2]}', True)],
    ),
    (
        "tags without line breaks, and no arguments",
        GLM,
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>\n"
        "<tool_call>clock\n</tool_call>So.",
        [("weather", PARIS, True), ("clock", "{}", True), "So."],
    ),
    (
        "a value in tags that is no JSON",
        GLM,
        "<tool_call>clock<arg_key>zone</arg_key><arg_value>UTC</arg_value></tool_call>",
        [("clock", '{"zone": "UTC"}', True)],
    ),
    (
        "cut within a value in tags",
        GLM,
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Par</arg",
        [("weather", '{"city": "Par', False)],
    ),
    (
        "a key without a value",
        GLM,
        "<tool_call>weather<arg_key>city</arg_key></tool_call> So.",
        [("weather", "", False), "So."],
    ),
    ("no name before tags", GLM, "a <tool_call>\n<arg_key>b", ["a <tool_call>\n<arg_key>b"]),
    ("a sentence behind the marker", GLM, "<tool_call>is a tag</tool_call>", ["<tool_call>is a tag</tool_call>"]),
    ("a call that is cut in its name", GLM, "<tool_call>weath", ["<tool_call>weath"]),
    ("a name of lines", QWEN_CODER, "<tool_call><function=a\nb>", ["<tool_call><function=a\nb>"]),
    (
        "reasoning",
        THINKING,
        "<think>\nThe user asks.\n\nI see. </think>\n\nParis. </think>",
        [("reasoning", "The user asks.\n\nI see."), "Paris. </think>"],
    ),
    ("no reasoning", THINKING, " Paris <think>", [" Paris <think>"]),
    ("reasoning that is cut", THINKING, "<think>so </thi", [("reasoning", "so </thi")]),
    ("reasoning of nothing", THINKING, "<think>\n\n</think>\n\nParis", ["Paris"]),
    (
        "reasoning about calls, then a call",
        THINKING_HERMES,
        '<think>Is it <tool_call>?</think>\n<tool_call>{"name": "clock", "arguments": {}}</tool_call>',
        [("reasoning", "Is it <tool_call>?"), ("clock", "{}", True)],
    ),
    (
        "calls around text",
        GEMMA,
        'So.\n<|tool_call>call:weather{city:<|"|>Paris "N"<|"|>,note:None}<tool_call|>\n'
        "<|tool_call>call:clock{}<tool_call|>",
        ["So.", ("weather", '{"city": "Paris \\"N\\"", "note": null}', True), ("clock", "{}", True)],
    ),
    (
        "values of every kind",
        GEMMA,
        '<|tool_call>call:clock{a:[ 1, -2.5e3,true,[],{<|"|>b c<|"|>:<|"|>{,}\n<|"|>}],d:{},e:word}<tool_call|>',
        [("clock", '{"a": [1, -2.5e3, true, [], {"b c": "{,}\\n"}], "d": {}, "e": "word"}', True)],
    ),
    ("no call behind the marker", GEMMA, "<|tool_call>clock{}<tool_call|>", ["<|tool_call>clock{}<tool_call|>"]),
    (
        "arguments that break off",
        GEMMA,
        "<|tool_call>call:clock{a:1]}<tool_call|><|tool_call>call:clock{}<tool_call|>",
        [("clock", '{"a": 1', False), ("clock", "{}", True)],
    ),
    ("a string that is cut", GEMMA, '<|tool_call>call:clock{a:<|"|>b<|', [("clock", '{"a": "b', False)]),
    (
        "thoughts, then a call",
        THINKING_GEMMA,
        "<|channel>thought\nIs it late?\n<channel|><|tool_call>call:clock{}<tool_call|>",
        [("reasoning", "Is it late?"), ("clock", "{}", True)],
    ),
    ("the prompt ends within reasoning", INSIDE, "so.\n</think>\n\nParis.\n", [("reasoning", "so."), "Paris.\n"]),
]
CASES = pytest.mark.parametrize(
    ("plan", "text", "expected"), [pytest.param(*case[1:], id=f"{case[1].call_format}: {case[0]}") for case in RECORDED]
)


@CASES
def test_a_recorded_output_becomes_its_parts_a_character_at_a_time_or_at_once(
    plan: OutputPlan, text: str, expected: list[Shown]
) -> None:
    assert shown(read(plan, [text])) == expected
    assert read(plan, list(text)) == read(plan, [text])


PLANS = (HERMES, LLAMA, MISTRAL, QWEN_CODER, SEED, GLM, THINKING_HERMES, INSIDE, THINKING_GEMMA)
# What formats are made of, put together at random.
_WORDS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<think>", "</think>",
    "<|tool_call>", "<tool_call|>", '<|"|>', "call:clock{", "<|channel>thought\n", "<channel|>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "<function=", "</function>", "<parameter=", "</parameter>", '{"name": "weather", "arguments": {', '{"name": "',
    "weather", '"', "\\", "{", "}", "[", "]", ":", ",", ";", ">", " ", "\n", "a", '"parameters": ', "é", "1",
]  # fmt: skip
MIXED = st.lists(st.sampled_from(_WORDS), max_size=24).map("".join)


@st.composite
def damaged(draw: Any) -> str:
    """A recorded output in which something else stands in some place."""
    text = draw(st.sampled_from([case[2] for case in RECORDED]))
    begin = draw(st.integers(0, len(text)))
    end = min(len(text), begin + draw(st.integers(0, 8)))
    return text[:begin] + draw(MIXED) + text[end:]


OUTPUTS = st.one_of(MIXED, damaged())


@settings(max_examples=examples(600), deadline=None)
@given(st.sampled_from(PLANS), OUTPUTS, st.data())
def test_the_parts_of_any_output_do_not_depend_on_how_it_is_cut(plan: OutputPlan, text: str, data: Any) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read(plan, [text])
    assert read(plan, pieces) == read(plan, list(text)) == whole
    for part in whole:
        if isinstance(part, CallFinished) and part.valid:
            assert isinstance(json.loads(part.arguments), dict)


@settings(max_examples=examples(300), deadline=None)
@given(st.sampled_from(PLANS), OUTPUTS)
def test_what_is_held_back_is_never_what_was_reported(plan: OutputPlan, text: str) -> None:
    # Whenever nothing is held, what came so far has become what it will stay.
    whole = read(plan, [text])
    reader, parts = OutputReader(plan, "request/0", shows_special=False), []
    for place, char in enumerate(text):
        reader.feed(1, char)
        parts += reader.take()
        if not reader.holds:
            rest = OutputReader(plan, "request/0", shows_special=False)
            rest.feed(1, text[: place + 1])
            assert not rest.holds
    reader.finish()
    assert merged([*parts, *reader.take()]) == whole


def test_ids_of_calls_are_the_same_whoever_reads_and_others_for_each_output() -> None:
    text = '<tool_call>{"name": "clock"}</tool_call>' * 2
    ids = [part.id for part in read(HERMES, [text]) if isinstance(part, CallStarted)]
    assert ids == [part.id for part in read(HERMES, list(text)) if isinstance(part, CallStarted)]
    other = [part.id for part in read(HERMES, [text], "request/1") if isinstance(part, CallStarted)]
    assert len({*ids, *other}) == 4


def test_a_special_token_is_a_marker_and_its_letters_are_text() -> None:
    plan = OutputPlan(call_format="mistral", tools=TOOLS, special_markers=((5, "[TOOL_CALLS]"),))
    reader = OutputReader(plan, "request/0", shows_special=False)
    reader.feed(1, 'I write [TOOL_CALLS] [{"name": "a"}] ')
    reader.feed_marker(5)
    reader.feed(1, '[{"name": "clock", "arguments": {}}]')
    reader.finish()
    assert shown(reader.take()) == ['I write [TOOL_CALLS] [{"name": "a"}]', ("clock", "{}", True)]


@pytest.mark.parametrize(("shows_special", "text"), [(True, "a[TOOL_CALLS] b"), (False, "a b")])
def test_a_special_token_that_begins_no_call_is_text_if_those_are_shown(shows_special: bool, text: str) -> None:
    plan = OutputPlan(call_format="mistral", tools=TOOLS, special_markers=((5, "[TOOL_CALLS]"),))
    reader = OutputReader(plan, "request/0", shows_special)
    reader.feed(1, "a")
    reader.feed_marker(5)
    reader.feed(1, " b")
    reader.finish()
    assert reader.take() == [Text(text)]


def test_gemmas_markers_that_are_special_tokens_end_strings_and_calls() -> None:
    """The end of a call, which no string can spell then, ends one whose string has no end."""
    special = ((4, "<|channel>"), (5, "<channel|>"), (6, "<|tool_call>"), (7, "<tool_call|>"), (8, '<|"|>'))
    reader = OutputReader(
        OutputPlan("gemma4", TOOLS, special, ("<|channel>thought\n", "<channel|>")), "request/0", shows_special=False
    )
    for piece in [4, "thought", "\n", "So", 5, 6, "call:weather{city:", 8, '<|"|>', 8, "}", 7]:
        reader.feed(1, piece) if isinstance(piece, str) else reader.feed_marker(piece)
    for piece in [6, "call:clock{a:", 8, "b<tool_call|>", 7, "Well."]:
        reader.feed(1, piece) if isinstance(piece, str) else reader.feed_marker(piece)
    reader.finish()
    assert shown(reader.take()) == [
        ("reasoning", "So"),
        ("weather", '{"city": "<|\\"|>"}', True),
        ("clock", '{"a": "b<tool_call|>', False),
        "Well.",
    ]


def test_tokens_of_reasoning_are_counted_with_its_markers() -> None:
    reader = OutputReader(THINKING, "request/0", shows_special=False)
    for piece in ["\n", "<th", "ink>", "so", ".", "</think>", "Paris", "."]:
        reader.feed(1, piece)
    assert reader.num_reasoning_tokens == 6


def test_a_format_of_a_later_version_is_read_as_text() -> None:
    assert read(OutputPlan(call_format="later", tools=TOOLS), ["a", "b "]) == [Text("ab ")]
