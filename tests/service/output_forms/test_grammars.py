"""What a format's grammar allows is what its reader understands.

Outputs are drawn at random from the masks of the grammar, over a vocabulary of bytes and special
tokens, and read.
"""

from __future__ import annotations

import json
import random
import typing
from typing import Any

import jsonschema
import llguidance
import pytest
from llguidance import LLMatcher

from headrace_service.config import ServiceConfig
from headrace_service.output_forms.call_format import Tool, ToolUse
from headrace_service.output_forms.model_form import NAMES as ALL_NAMES
from headrace_service.output_forms.model_form import ModelForm
from headrace_service.output_forms.output_reader import OutputReader
from headrace_service.output_forms.parts import CallFinished, CallStarted, Text

WEATHER = Tool(
    "weather",
    "The weather of a place.",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Paris", 'a "b"\n<c>']},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "parts": {"type": "array", "items": {"enum": ["rain", "wind"]}, "maxItems": 2},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
)
CLOCK = Tool("clock", "", {"type": "object", "properties": {}, "additionalProperties": False})
NOTE = Tool("note", "", {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]})
SCHEMAS = {tool.name: tool.parameters for tool in (WEATHER, CLOCK, NOTE)}
# Harmony's grammar is one of whole outputs: `test_harmony_grammar`.
NAMES = tuple(name for name in ALL_NAMES if name != "harmony")
# Tokens of one byte, then the special ones.
END, SPECIAL = 256, (
    "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|tool_call>", "<tool_call|>", '<|"|>',
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
)  # fmt: skip
TOKENS = [bytes([byte]) for byte in range(256)] + [b"<end>"] + [text.encode() for text in SPECIAL]
_TEMPLATES = {
    "gemma4": "tools <|tool_call>",
    "glm": "tools <tool_call> <arg_key>",
    "hermes": "tools <tool_call>",
    "llama3-json": "tools <|python_tag|>",
    "mistral": "tools [TOOL_CALLS]",
    "qwen3-coder": "tools <tool_call> <function=",
    "seed-oss": "tools <seed:tool_call> <function=",
}


class _Bytes:
    """The tokenizer as llguidance asks for it."""

    eos_token_id = END
    bos_token_id = None
    tokens = TOKENS
    special_token_ids = range(END, len(TOKENS))

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


TOKENIZER = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()), n_vocab=len(TOKENS))


def encode(text: str, specials: bool) -> list[int]:
    return [END + 1 + SPECIAL.index(text)] if specials and text in SPECIAL else list(text.encode())


def form_of(name: str, specials: bool) -> ModelForm:
    """A model of a format, whose markers are special tokens or text."""
    special_ids = range(END, len(TOKENS)) if specials else ()
    return ModelForm.of(_TEMPLATES[name], lambda text: encode(text, specials), special_ids)


def drawn(grammar: str, draw: random.Random, begin: list[int], most: int = 500) -> list[int] | None:
    """Tokens of an output that begins like this; None: it came to no end."""
    matcher = LLMatcher(TOKENIZER, LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert matcher.consume_tokens(begin), matcher.get_error()
    tokens = list(begin)
    while not matcher.is_stopped() and len(tokens) < most:
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        assert not matcher.is_error(), matcher.get_error()
        allowed = [token for token in range(len(TOKENS)) if bits >> token & 1]
        readable = [token for token in allowed if token >= END or 31 < token < 127 or token == 10]
        token = END if END in allowed and draw.random() < 0.3 else draw.choice(readable or allowed)
        if token == END:
            return tokens
        assert matcher.consume_token(token), matcher.get_error()
        tokens.append(token)
    return tokens if matcher.is_stopped() else None


def read(form: ModelForm, tools: list[Tool], tokens: list[int]) -> OutputReader:
    plan = form.plan(tools, begins_inside=False)
    assert plan is not None
    reader = OutputReader(plan, "request/0", shows_special=False)
    run: list[int] = []
    for token in [*tokens, END]:
        if token < END:
            run.append(token)
            continue
        reader.feed(len(run), bytes(run).decode(errors="replace"))
        run = []
        if token in reader.marker_ids:
            reader.feed_marker(token)
    reader.finish()
    return reader


CASES = [(name, False) for name in NAMES] + [("mistral", True), ("llama3-json", True), ("gemma4", True), ("glm", True)]
# How an output that calls functions begins, where it may do otherwise.
_MARKERS = {
    "hermes": "<tool_call>", "qwen3-coder": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama3-json": "{",
    "gemma4": "<|tool_call>", "glm": "<tool_call>", "seed-oss": "<seed:tool_call>",
}  # fmt: skip
_TEXT = {name: b"" if name == "llama3-json" else b"So.\n" for name in NAMES}


@pytest.mark.parametrize(("name", "specials"), CASES)
@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("parallel", [True, False])
def test_every_output_that_a_grammar_allows_is_read_as_valid_calls(
    name: str, specials: bool, choice: Any, parallel: bool
) -> None:
    # A text goes on until its end marker, which random draws come to where that is one token alone.
    has_ends = name not in ("qwen3-coder", "seed-oss") and (name not in ("gemma4", "glm") or specials)
    form, tools = form_of(name, specials), [WEATHER, CLOCK, *([NOTE] if has_ends else [])]
    use = ToolUse(tools, choice, parallel)
    draw, num_calls, num_whole = random.Random(5), [], 0
    begin = [] if choice == "required" else [*_TEXT[name], *encode(_MARKERS[name], specials)]
    for _ in range(5):
        tokens = drawn(form.grammar(use), draw, begin)
        if tokens is None:
            continue
        num_whole += 1
        reader = read(form, tools, tokens)
        parts = reader.take()
        names = [part.name for part in parts if isinstance(part, CallStarted)]
        finished = [part for part in parts if isinstance(part, CallFinished)]
        assert len(names) == len(finished) == reader.num_calls
        for called, part in zip(names, finished, strict=True):
            assert part.valid, part
            jsonschema.validate(json.loads(part.arguments), SCHEMAS[called])
        if choice == "required":
            assert finished and not any(isinstance(part, Text) for part in parts), parts
        num_calls.append(len(finished))
    assert num_whole >= 2
    assert max(num_calls) > 0
    assert parallel or max(num_calls) == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_tool_that_is_not_strict_gets_any_object(name: str) -> None:
    tool = Tool("clock", "", {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}, strict=False)
    assert not ToolUse([tool]).needs_grammar
    form = form_of(name, False)
    matcher = LLMatcher(TOKENIZER, LLMatcher.grammar_from_lark(form.grammar(ToolUse([tool], "required"))), log_level=0)
    texts = {
        "gemma4": '<|tool_call>call:clock{b:[true,<|"|>c<|"|>]}<tool_call|>',
        "glm": "<tool_call>clock\n<arg_key>b</arg_key>\n<arg_value>[true]</arg_value>\n</tool_call>",
        "hermes": '<tool_call>\n{"name": "clock", "arguments": {"b": [true]}}\n</tool_call>',
        "llama3-json": '{"name": "clock", "parameters": {"b": [true]}}',
        "mistral": '[TOOL_CALLS][{"name": "clock", "arguments": {"b": [true]}}]',
        "seed-oss": "<seed:tool_call>\n<function=clock>\n<parameter=b>\n[true]\n</parameter>\n</function>\n"
        "</seed:tool_call>",
        "qwen3-coder": "<tool_call>\n<function=clock>\n<parameter=b>\n[true]\n</parameter>\n</function>\n</tool_call>",
    }
    assert matcher.consume_tokens(list(texts[name].encode())), matcher.get_error()
    assert matcher.is_accepting()


@pytest.mark.parametrize(
    ("template", "wanted", "name", "why"),
    [
        (None, "auto", "", "the model's folder has no chat template"),
        ("messages", "hermes", "", "the model's chat template does not show tools"),
        ("tools", "auto", "", "names no format of calls"),
        ("tools", "mistral", "mistral", ""),
        ("tools <tool_call>", "off", "", "tool_format off"),
        *[(template, "auto", name, "") for name, template in _TEMPLATES.items()],
    ],
)
def test_the_format_is_the_template_s_or_the_operator_s(template: str | None, wanted: str, name: str, why: str) -> None:
    form = ModelForm.of(template, lambda text: list(text.encode()), (), wanted)
    assert form.call_format == name
    assert why in form.why_no_tools


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "b"}}}, "pattern of the text a"),
        ({"type": "object", "properties": {"a<": {"type": "string"}}}, "the name a<"),
        ({"type": "object", "oneOf": []}, "oneOf of an object"),
        ({"type": "object", "properties": {"a": {"type": "integer", "minimum": 1}}}, ""),
    ],
)
def test_what_no_grammar_of_xml_can_hold_is_named(schema: dict[str, Any], why: str) -> None:
    assert form_of("qwen3-coder", False).why_not_strict(Tool("a", "", schema)) == why
    assert form_of("hermes", False).why_not_strict(Tool("a", "", schema)) == ""


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "b"}}}, "pattern of a"),
        ({"type": "object", "properties": {"a:": {}}}, "the name a:"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}}, "$ref of a"),
        ({"type": "object", "required": ["a"]}, "required of the arguments"),
        ({"type": "object", "properties": {"a": {"enum": [["b"]]}}}, "a value of a that is no text or number"),
        ({"type": "object", "properties": {"a": {"items": {"oneOf": []}, "type": "array"}}}, "oneOf of entries of a"),
        ({"type": "object", "properties": {"a": {"type": "array", "minItems": 2000}}}, "minItems of a"),
        ({"type": "object", "properties": {"a": {"anyOf": [{"type": "null"}, {"type": "string"}]}}}, ""),
    ],
)
def test_what_no_grammar_of_bare_strings_can_hold_is_named(schema: dict[str, Any], why: str) -> None:
    found = form_of("gemma4", False).why_not_strict(Tool("a", "", schema))
    assert found.startswith(why) and bool(found) == bool(why)


def test_the_setting_names_every_format() -> None:
    names = typing.get_args(ServiceConfig.model_fields["tool_format"].annotation)
    assert set(names) == {"auto", "off", *ALL_NAMES}
