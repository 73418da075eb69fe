"""Harmony from the caller to the last token, with the demo model's weights.

Its special tokens bear the names of harmony's. That calls and forms are valid is the grammar's
work. Each part is covered quicker: `tests/service/api/test_harmony.py`, the grammars and the
engine's sections of reasoning beside their rooms.
"""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from tests.e2e.test_tools import QUESTION, SCHEMA, WEATHER
from tests.service.harmony_folder import TEMPLATE
from tests.support.running_server import DEMO, RunningServer, running_server
from tokenizers import Tokenizer

from headrace import Client, FinishReason, InvalidRequest, Message, Tool

pytestmark = pytest.mark.slow
# In the place of the demo model's seven; the second and the third end outputs.
MARKERS = ("<|start|>", "<|return|>", "<|call|>", "<|end|>", "<|channel|>", "<|message|>", "<|constrain|>")
# A prompt may end within reasoning.
BEGUN = "{% if reasoning_effort == 'high' %}<|channel|>analysis<|message|>{% endif %}"
CLOCK = Tool("clock", "", {"type": "object", "properties": {}, "additionalProperties": False})
DRAWN: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 160}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("models") / "demo"
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("draft", "scripts"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    for added in tokenizer["added_tokens"]:
        tokenizer["model"]["vocab"].pop(added["content"], None)
        added["content"] = MARKERS[added["id"]]
        tokenizer["model"]["vocab"][added["content"]] = added["id"]
    (folder / "tokenizer.json").write_text(json.dumps({**tokenizer, "post_processor": None}))
    names = {"bos_token": "<|start|>", "eos_token": "<|return|>", "chat_template": TEMPLATE + BEGUN}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


@pytest.fixture(scope="module")
def server(folder: pathlib.Path) -> Iterator[RunningServer]:
    with running_server(model=folder) as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[Client]:
    with Client(server.address) as client:
        yield client


def test_every_call_of_a_strict_tool_keeps_its_schema(client: Client) -> None:
    stream = client.chat(QUESTION, tools=[WEATHER, CLOCK], tool_choice="required", n=8, max_reasoning_tokens=6, **DRAWN)
    outputs = stream.result().outputs
    assert {output.finish_reason for output in outputs} == {FinishReason.TOOL_CALLS}
    assert all(output.text == "" and len(output.tool_calls) == 1 and output.tool_calls[0].valid for output in outputs)
    for call in [output.tool_calls[0] for output in outputs]:
        if call.name == "weather":
            jsonschema.validate(call.parsed(), SCHEMA)


def test_a_call_and_its_result_go_back(client: Client) -> None:
    answer = client.chat(QUESTION, tools=[WEATHER], tool_choice="weather", max_reasoning_tokens=6, **DRAWN).result()
    (call,) = answer.tool_calls
    said = [Message("user", QUESTION), answer.message, Message("tool", "Sunny.", tool_call_id=call.id)]
    assert client.chat(said, tools=[WEATHER], max_tokens=8).result().token_ids


@pytest.mark.parametrize("effort", ["low", "high"])
def test_a_form_is_that_of_the_answer(client: Client, effort: Any) -> None:
    options = {"json_schema": SCHEMA, "n": 6, "max_reasoning_tokens": 6, "reasoning_effort": effort, **DRAWN}
    result = client.chat(QUESTION, **options).result()
    for output in result.outputs:
        jsonschema.validate(json.loads(output.text), SCHEMA)
    assert effort == "low" or all(output.reasoning for output in result.outputs)
    # Each has at most 6 tokens and an end.
    assert effort == "low" or 6 < result.usage.reasoning_tokens <= 6 * 7


def test_a_spent_budget_begins_the_answer(client: Client, folder: pathlib.Path) -> None:
    result = client.chat(QUESTION, reasoning_effort="high", max_reasoning_tokens=5, n=4, **DRAWN).result()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    closing = tokenizer.encode("<|end|><|start|>assistant<|channel|>final<|message|>", add_special_tokens=False).ids
    for output in result.outputs:
        assert list(output.token_ids[5 : 5 + len(closing)]) == closing
        assert output.reasoning and output.text and "assistant" not in output.text
    assert result.usage.reasoning_tokens == 4 * 6


def test_a_form_that_can_not_be_compiled_is_named_by_its_own_place(client: Client) -> None:
    with pytest.raises(InvalidRequest) as refused:
        client.chat(QUESTION, json_schema={"items": {"uniqueItems": True}}, max_tokens=4).result()
    (violation,) = refused.value.violations
    assert violation.field == "spec.structured_output.json_schema"
    assert violation.description.startswith("at /items")
