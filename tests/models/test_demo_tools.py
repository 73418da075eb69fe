"""Conversations with tools of the demo corpus, and the chat template that lays them out."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.running_server import DEMO

from headrace_service.text.template_worker import compile_template

sys.path.insert(0, str(DEMO / "scripts"))

from corpus import TOOL_DOMAINS, render, training_item  # noqa: E402
from corpus_draw import Draw, Item  # noqa: E402
from corpus_smalltalk import UNKNOWN  # noqa: E402
from demo_shards import ROW_TOKENS, SPOKEN_BIT, Encoder  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from tool_corpus import conversations, kinds, wordings  # noqa: E402
from tool_corpus.layout import CHAT_TEMPLATE  # noqa: E402

SPLITS = ("heldout", "phrasing")
CALL = re.compile(r"<tool_call>(.*?)</tool_call>")
RESULT = re.compile(r"<tool_response>(.*)</tool_response>", re.DOTALL)
# Before tools, as the first releases had it.
PLAIN_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
Turns = Sequence[tuple[str, str]]


@pytest.fixture(scope="module")
def trained() -> list[Turns]:
    """Conversations with tools as training has them."""
    draw = Draw(11, "train")
    return [conversations.conversation(draw) for _ in range(1_200)]


def _texts(turns: Turns) -> set[str]:
    return {text for role, text in turns if role == "user" and not RESULT.match(text)}


def _tools(turns: Turns) -> list[dict[str, Any]]:
    """The tools that a conversation shows, as requests offer them."""
    if turns[0][0] != "system":
        return []
    first, *lines = turns[0][1].split("\n")
    assert first == "Tools:"
    functions = []
    for line in lines:
        name, description, properties = re.fullmatch(r"([\w-]+): (?:([^{]*) )?(\{.*\})", line).groups("")  # type: ignore[union-attr]
        parameters = {"type": "object", "properties": json.loads(properties)}
        functions.append({"name": name, "description": description, "parameters": parameters})
    return [{"type": "function", "function": function} for function in functions]


def _shown(turns: Turns) -> dict[str, dict[str, Any]]:
    """The properties of each tool that a conversation shows, by its name."""
    return {tool["function"]["name"]: tool["function"]["parameters"]["properties"] for tool in _tools(turns)}


def test_calls_name_a_tool_that_is_shown_and_say_what_the_question_says(trained: list[Turns]) -> None:
    called = 0
    for turns in trained:
        shown, question = _shown(turns), ""
        for role, text in turns:
            question = text if role == "user" and not RESULT.match(text) else question
            for call in CALL.findall(text) if shown else ():
                said = json.loads(call)
                assert set(said) == {"name", "arguments"} and set(said["arguments"]) <= set(shown[said["name"]])
                assert all(str(value) in question for value in said["arguments"].values()), (question, call)
                called += 1
    assert called > 600


def test_no_slot_is_left_open(trained: list[Turns]) -> None:
    texts = [text for turns in trained for role, text in turns if role != "system"]
    assert not [text for text in texts if re.search(r"\{[a-z_]+\}", text)]


def test_answers_use_the_results(trained: list[Turns]) -> None:
    """A number that a tool returned stands in the answer."""
    checked = 0
    for turns in trained:
        for (_, result), (role, answer) in zip(turns, turns[1:], strict=False):
            found = RESULT.fullmatch(result)
            if role != "assistant" or not found or "<tool_call>" in answer:
                continue
            value = re.fullmatch(r'\{"(?:result|value)": (-?[0-9.]+)\}', found[1])
            assert value is None or value[1] in answer
            checked += value is not None
    assert checked > 30


def test_what_no_tool_can_do_is_not_called(trained: list[Turns]) -> None:
    answers = [answer for turns in trained for role, answer in turns if role == "assistant"]
    assert sum(answer == UNKNOWN for answer in answers) > 50
    assert any("<tool_call>" not in turns[-1][1] and len(turns) == 3 for turns in trained)


def test_no_call_is_taught_where_no_tool_is_shown(trained: list[Turns]) -> None:
    without = [turns for turns in trained if turns[0][0] != "system"]
    assert len(without) > 30
    for turns in without:
        assert all("<tool_call>" not in text for role, text in turns if role == "assistant")
        assert turns[-1][1] == UNKNOWN or any(role == "recited" for role, _ in turns)


def test_recited_turns_are_read_and_not_spoken() -> None:
    encoder = Encoder(Tokenizer.from_file(str(DEMO / "tokenizer.json")))
    turns = (("user", "Time?"), ("recited", "<tool_call>"), ("assistant", "It is late."))
    (row,) = encoder.encode_many([Item("t", turns)])
    plain = [token & (SPOKEN_BIT - 1) for token in row]
    spoken = encoder.tokenizer.decode([token & (SPOKEN_BIT - 1) for token in row if token & SPOKEN_BIT])
    assert spoken == "It is late." and plain.count(encoder.roles["assistant"]) == 2


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("domain", sorted(TOOL_DOMAINS))
def test_held_out_questions_never_occur_in_training(domain: str, split: str, trained: list[Turns]) -> None:
    asked = set[str]().union(*map(_texts, trained))
    draw = Draw(20260, split)
    items = [TOOL_DOMAINS[domain](draw) for _ in range(100)]
    assert not {text for item in items for text in _texts(item.turns)} & asked


def test_kinds_and_phrasings_kept_back_never_occur_in_training(trained: list[Turns]) -> None:
    names = {re.sub(r"[^a-z]", "", name.lower()) for turns in trained for name in _shown(turns)}
    words = [kind.words for kind in kinds.TRAINED]
    unseen = {re.sub(r"[^a-z]", "", name) for one in words for name in one.names.unseen}
    assert len(unseen) > 30 and not unseen & names
    assert not {"playsong", "openinghours", "postage", "reservetable"} & names
    descriptions = {text for one in words for text in one.descriptions.unseen}
    assert not any(f": {text} {{" in turns[0][1] for turns in trained for text in descriptions)
    fixed = [re.split(r"\{\w+\}", text.rstrip(".?")) for one in words for text in one.questions.unseen]
    patterns = re.compile("|".join(".{1,40}".join(map(re.escape, parts)) for parts in fixed if len("".join(parts)) > 8))
    found = [text for turns in trained for text in _texts(turns) if patterns.fullmatch(text.rstrip(".?!"))]
    assert not found


def test_new_tools_are_of_kinds_that_training_has_not() -> None:
    kept_back = {one.words for one in kinds.KEPT_BACK}
    assert {wordings.SONG, wordings.HOURS, wordings.POSTAGE, wordings.TABLE} == kept_back
    assert not kept_back & {one.words for one in kinds.TRAINED}
    descriptions = [one.words.descriptions.draw(Draw(3, "heldout")) for one in kinds.KEPT_BACK]
    items = [conversations.new_tool(Draw(seed, "heldout")) for seed in range(30)]
    assert all(any(text in item.turns[0][1] for text in descriptions) for item in items)


def test_conversations_fit_a_row_and_have_tools_in_their_share() -> None:
    encoder = Encoder(Tokenizer.from_file(str(DEMO / "tokenizer.json")))
    draw = Draw(5, "train")
    items = [training_item(draw) for _ in range(600)]
    with_tools = [item for item in items if item.turns[0][1].startswith("Tools:\n")]
    assert 80 < len(with_tools) < 200
    assert max(map(len, encoder.encode_many(with_tools))) <= ROW_TOKENS


# -- the template


def _messages(turns: Turns) -> list[dict[str, Any]]:
    """The turns as a server gives them to templates."""
    messages: list[dict[str, Any]] = []
    for role, text in turns:
        if found := RESULT.fullmatch(text):
            messages.append({"role": "tool", "content": found[1]})
        elif calls := CALL.findall(text):
            functions = [{"type": "function", "function": json.loads(call)} for call in calls]
            messages.append({"role": "assistant", "content": "", "tool_calls": functions})
        else:
            messages.append({"role": role, "content": text})
    return messages


def test_the_template_lays_conversations_out_as_training_has_them(trained: list[Turns]) -> None:
    template = compile_template(CHAT_TEMPLATE)
    for turns in trained[:300]:
        tools = _tools(turns)
        laid_out = template.render(bos_token="", messages=_messages(turns[1:] if tools else turns), tools=tools)
        assert laid_out == render(tuple(turns))


def test_a_tool_is_shown_with_its_description_and_one_without_parameters_as_none() -> None:
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    weather = {"name": "weather", "description": "Tells it.", "parameters": city}
    clock = {"name": "clock", "description": "", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": function} for function in (weather, clock)]
    text = compile_template(CHAT_TEMPLATE).render(bos_token="<|bos|>", messages=[], tools=tools)
    assert text == '<|bos|><|system|>Tools:\nweather: Tells it. {"city": {"type": "string"}}\nclock: {}<|end|>'


@given(
    messages=st.lists(
        st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": st.text()}),
        max_size=5,
    ),
    opens=st.booleans(),
)
def test_conversations_without_tools_are_laid_out_as_before(messages: list[dict[str, str]], opens: bool) -> None:
    variables: dict[str, Any] = {"bos_token": "<|bos|>", "messages": messages, "add_generation_prompt": opens}
    now = compile_template(CHAT_TEMPLATE)
    before = compile_template(PLAIN_TEMPLATE).render(**variables)
    assert now.render(**variables) == now.render(**variables, tools=None) == before


@pytest.mark.parametrize("folder", [DEMO, DEMO / "draft"], ids=["target", "draft"])
def test_the_folders_have_the_template_of_the_scripts(folder: Path) -> None:
    assert json.loads((folder / "tokenizer_config.json").read_text())["chat_template"] == CHAT_TEMPLATE
