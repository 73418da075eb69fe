"""What harmony's grammars allow is what its reader understands.

Outputs are drawn at random from the masks, over bytes and special tokens, and read.
"""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import llguidance
import pytest
from llguidance import LLMatcher
from tests.service.output_forms.harmony_case import END, IDS, TOKENS, encode, form_of, plan_of, read
from tests.service.output_forms.test_grammars import CLOCK, NOTE, SCHEMAS, WEATHER

from headrace_backend.structured_output.forms import grammar_of
from headrace_request.structured_output import StructuredOutput
from headrace_service.output_forms.call_format import Tool, ToolUse
from headrace_service.output_forms.parts import CallFinished, CallStarted, Part, Reasoning, Text


class _Bytes:
    """The tokenizer as llguidance asks for it."""

    eos_token_id = END
    bos_token_id = None
    tokens = TOKENS
    special_token_ids = range(END, len(TOKENS))

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


TOKENIZER = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()), n_vocab=len(TOKENS))
FORM = form_of()
THOUGHT = "<|channel|>analysis<|message|>So.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"


def matcher_of(grammar: str) -> LLMatcher:
    return LLMatcher(TOKENIZER, grammar, log_level=0)


def allowed(matcher: LLMatcher) -> list[int]:
    bits = int.from_bytes(matcher.compute_bitmask(), "little")
    assert not matcher.is_error(), matcher.get_error()
    return [token for token in range(len(TOKENS)) if bits >> token & 1]


def accepts(grammar: str, text: str) -> bool:
    """Whether a whole output is one that a grammar allows."""
    matcher = matcher_of(grammar)
    return bool(matcher.consume_tokens(encode(text))) and bool(matcher.is_accepting())


def drawn(grammar: str, draw: random.Random, begin: str, most: int = 600) -> str | None:
    """An output that begins like this; None: it came to no end."""
    matcher, tokens = matcher_of(grammar), encode(begin)
    assert matcher.consume_tokens(tokens), matcher.get_error()
    while len(tokens) < most:
        able = allowed(matcher)
        if END in able and (len(able) == 1 or draw.random() < 0.3):
            return b"".join(TOKENS[token] for token in tokens).decode()
        readable = [token for token in able if token > END or 31 < token < 127]
        markers = [token for token in readable if token > END]
        token = draw.choice(markers if markers and draw.random() < 0.2 else readable or able)
        assert matcher.consume_token(token), matcher.get_error()
        tokens.append(token)
    return None


def calls_of(use: ToolUse, within: str = "", budget: int | None = None) -> str:
    return LLMatcher.grammar_from_lark(FORM.grammar(use, within, budget))


@pytest.mark.parametrize("begin", ["", THOUGHT, PREAMBLE, THOUGHT + " to=functions.", "<|channel|>commentary to="])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_every_output_that_a_grammar_allows_is_read_as_valid_calls_or_an_answer(choice: Any, begin: str) -> None:
    tools = [WEATHER, CLOCK, NOTE]
    if choice == "required" and begin == PREAMBLE:
        assert not accepts(calls_of(ToolUse(tools, choice)), PREAMBLE + "<|channel|>final<|message|>a")
        return
    draw, num_whole = random.Random(3), 0
    for _ in range(4):
        text = drawn(calls_of(ToolUse(tools, choice)), draw, begin)
        if text is None:
            continue
        num_whole += 1
        parts = read(plan_of(*SCHEMAS), [text])
        names = [part.name for part in parts if isinstance(part, CallStarted)]
        finished = [part for part in parts if isinstance(part, CallFinished)]
        assert len(names) == len(finished) <= 1
        for name, call in zip(names, finished, strict=True):
            assert call.valid, text
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[name])
        assert finished or choice == "auto"
        assert not any("assistant" in part.text for part in parts if isinstance(part, Text)), text
        if choice == "required":
            assert not any(isinstance(part, Text) for part in parts), text
    assert num_whole >= 2


def test_both_places_of_a_recipient_are_allowed_and_no_other_function() -> None:
    grammar = calls_of(ToolUse([CLOCK]))
    for header in [
        "<|channel|>commentary to=functions.clock <|constrain|>json",
        "<|channel|>commentary to=functions.clock<|constrain|>json",
        "<|channel|>commentary to=functions.clock json",
        "<|channel|>commentary to=functions.clock",
        " to=functions.clock<|channel|>commentary json",
        " to=functions.clock<|channel|>commentary <|constrain|>json",
    ]:
        assert accepts(grammar, f"{THOUGHT}{header}<|message|>{{}}"), header
        assert accepts(grammar, f"{header}<|message|>{{}}"), header
    assert not accepts(grammar, "<|channel|>commentary to=functions.weather<|message|>{}")
    assert not accepts(grammar, "<|channel|>commentary to=functions.clock<|message|>{}<|start|>")
    assert accepts(grammar, THOUGHT + THOUGHT + PREAMBLE + "<|channel|>final<|message|>It is noon.")


def test_a_tool_that_is_not_strict_gets_any_object() -> None:
    tool = Tool("clock", "", {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}, strict=False)
    grammar = calls_of(ToolUse([tool], "required"))
    assert accepts(grammar, '<|channel|>commentary to=functions.clock json<|message|>{"b": [true]}')
    assert not accepts(grammar, "<|channel|>commentary to=functions.clock json<|message|>[]")


@pytest.mark.parametrize(
    ("within", "rest"),
    [
        ("final", "noon."),
        ("analysis", "So.<|end|><|start|>assistant<|channel|>final<|message|>noon."),
        ("commentary", "I look.<|end|><|start|>assistant<|channel|>commentary to=functions.clock<|message|>{}"),
    ],
)
@pytest.mark.parametrize("budget", [None, 5])
def test_an_output_goes_on_where_its_prompt_ends(within: str, rest: str, budget: int | None) -> None:
    assert accepts(calls_of(ToolUse([CLOCK]), within, budget), rest)
    assert not accepts(calls_of(ToolUse([CLOCK]), "", budget), rest)


def test_a_budget_ends_reasoning_and_leaves_the_choice_of_a_call() -> None:
    grammar = calls_of(ToolUse([CLOCK]), budget=4)
    matcher = matcher_of(grammar)
    assert matcher.consume_tokens(encode("<|channel|>analysis<|message|>word"))
    assert allowed(matcher) == [IDS["<|end|>"]]
    head = "<|channel|>analysis<|message|>word<|end|><|start|>assistant"
    assert accepts(grammar, head + "<|channel|>final<|message|>noon.")
    assert accepts(grammar, head + " to=functions.clock<|channel|>commentary<|message|>{}")
    assert not accepts(grammar, head + head + "<|channel|>final<|message|>noon.")


FORMS = [
    (StructuredOutput("json_schema", '{"type": "array", "items": {"type": "integer"}}'), "[12]", "12"),
    (StructuredOutput("json_object"), '{"b": [1]}', "[1]"),
    (StructuredOutput("regex", "a/b+"), "a/bb", "a/c"),
    (StructuredOutput("choice", '["yes", "no \\"x\\""]'), 'no "x"', "maybe"),
    (StructuredOutput("grammar", 'start: before "!"\nbefore: "hi"'), "hi!", "hi"),
    (
        StructuredOutput(
            "structural_tags",
            '[{"trigger": "<f", "begin": "<f>", "json_schema": "{\\"type\\": \\"integer\\"}", "end": "</f>"}]',
        ),
        "so <f>3</f>.",
        "so <f>x</f>.",
    ),
]


@pytest.mark.parametrize(("form", "good", "bad"), FORMS, ids=[form.form for form, _, _ in FORMS])
def test_a_form_is_that_of_the_final_message_alone(form: StructuredOutput, good: str, bad: str) -> None:
    def around(within: str = "") -> str:
        return grammar_of(StructuredOutput(form.form, form.text, FORM.around_answer(within, None)))

    final = "<|channel|>final<|message|>"
    for before in ["", THOUGHT, THOUGHT + THOUGHT]:
        assert accepts(around(), before + final + good)
        assert not accepts(around(), before + final + bad)
    assert accepts(around("final"), good)
    assert not accepts(around(), THOUGHT + PREAMBLE + final + good)
    constrained = "<|channel|>final <|constrain|>json<|message|>"
    for text in [good, constrained + good, THOUGHT + good, final + good + "<|end|>"]:
        assert not accepts(around(), text)
    assert read(plan_of(), [THOUGHT + final + good]) == [Reasoning("So."), Text(good)]


def parts_text(parts: list[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Text))


def test_drawn_outputs_of_a_form_have_it() -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    form = StructuredOutput("json_schema", json.dumps(schema), FORM.around_answer("", 20))
    draw, num_whole = random.Random(8), 0
    for _ in range(6):
        text = drawn(grammar_of(form), draw, "")
        if text is not None:
            num_whole += 1
            jsonschema.validate(json.loads(parts_text(read(plan_of(), [text]))), schema)
    assert num_whole >= 2
