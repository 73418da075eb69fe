"""Tools from the caller to the last token, with the demo model, which calls them by itself.

That calls keep their schemas at any temperature is the grammar's work, which ones and with what is
the model's: what it says greedily in fp32 is compared as it stands.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from tests.support.running_server import RunningServer, running_server

from headrace import Client, Delta, FinishReason, InvalidRequest, Message, Tool
from headrace.conversations.content import ToolCallFinished, ToolCallStarted

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = Tool("weather", "The weather of a city.", SCHEMA)
CLOCK = Tool("clock")
QUESTION = "What is the weather in Paris?"


@pytest.fixture
def client(server: RunningServer) -> Iterator[Client]:
    with Client(server.address) as client:
        yield client


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FORECAST = Tool("get_forecast", "Returns the weather in a city.", CITY)
TIMER = Tool("set_timer", "Sets a timer.", {"type": "object", "properties": {"minutes": {"type": "integer"}}})


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "loose"])
def test_the_model_calls_the_tool_that_a_question_needs(client: Client, strict: bool) -> None:
    tools = [dataclasses.replace(tool, strict=strict) for tool in (TIMER, FORECAST)]
    said = [Message("user", "What is the weather in Lisbon?")]
    answer = client.chat(said, tools=tools, max_tokens=80).result()
    (call,) = answer.tool_calls
    assert (call.name, call.parsed(), call.valid) == ("get_forecast", {"city": "Lisbon"}, True)
    assert answer.outputs[0].finish_reason is FinishReason.TOOL_CALLS and answer.text == ""
    said += [answer.message, Message("tool", '{"sky": "rainy", "temperature": 12}', tool_call_id=call.id)]
    # As many callers do, the last turn comes without tools or with them.
    for offered in (tools, None):
        second = client.chat(said, tools=offered, max_tokens=80).result()
        assert second.text == "The weather in Lisbon is rainy, at 12 degrees." and not second.tool_calls


def test_a_question_that_needs_no_tool_is_answered(client: Client) -> None:
    answer = client.chat("What is the capital of France?", tools=[TIMER], max_tokens=80).result()
    assert "Paris" in answer.text and answer.tool_calls == ()


def test_two_cities_are_two_calls(client: Client) -> None:
    question = "What is the weather in Oslo and Rome?"
    answer = client.chat(question, tools=[FORECAST], max_tokens=120).result()
    assert [call.parsed() for call in answer.tool_calls] == [{"city": "Oslo"}, {"city": "Rome"}]
    single = client.chat(question, tools=[FORECAST], parallel_tool_calls=False, max_tokens=120).result()
    assert [call.parsed() for call in single.tool_calls] == [{"city": "Oslo"}]


def test_every_call_of_a_strict_tool_keeps_its_schema(client: Client) -> None:
    options: dict[str, Any] = {"n": 8, "temperature": 1.0, "seed": 3, "max_tokens": 120}
    stream = client.chat(QUESTION, tools=[WEATHER, CLOCK], tool_choice="required", parallel_tool_calls=False, **options)
    outputs = stream.result().outputs
    assert {output.finish_reason for output in outputs} == {FinishReason.TOOL_CALLS}
    assert all(output.text == "" for output in outputs)
    calls = [call for output in outputs for call in output.tool_calls]
    assert len(calls) == 8 and all(call.valid for call in calls)
    assert len({call.id for call in calls}) == 8
    for call in calls:
        if call.name == "weather":
            jsonschema.validate(call.parsed(), SCHEMA)


@pytest.mark.slow  # test_speculation.py has forms every day.
def test_drafts_change_no_call_of_a_strict_tool() -> None:
    options: dict[str, Any] = {"n": 4, "temperature": 1.0, "seed": 3, "max_tokens": 120}
    drafts = ("--speculate", "ngram", "--speculate-tokens", "4")
    fp32 = ("--device", "cpu", "--dtype", "fp32")
    found = []
    for flags in (fp32, (*fp32, *drafts)):
        with running_server(*flags) as server, Client(server.address) as client:
            said = client.chat(QUESTION, tools=[WEATHER, CLOCK], tool_choice="required", **options).result()
            found.append([(list(output.token_ids), output.finish_reason) for output in said.outputs])
            assert (said.ledger.draft_tokens > 0) == (flags is not fp32)
    assert found[0] == found[1]


def test_a_named_tool_is_called_and_its_result_goes_back(client: Client) -> None:
    answer = client.chat(QUESTION, tools=[WEATHER, CLOCK], tool_choice="weather", max_tokens=120).result()
    (call,) = answer.tool_calls
    assert call.name == "weather"
    said = [Message("user", QUESTION), answer.message, Message("tool", "Sunny.", tool_call_id=call.id)]
    second = client.chat(said, tools=[WEATHER], tool_choice="none", max_tokens=8).result()
    assert second.tool_calls == () and len(second.token_ids) > 0


def test_who_joins_within_a_call_gets_the_rest_of_it(client: Client) -> None:
    submitted = client.submit(messages=QUESTION, tools=[WEATHER], tool_choice="required", max_tokens=120)
    whole = client.subscribe(submitted).result()
    (call,) = [call for call in whole.tool_calls][:1]
    for from_token in range(0, len(whole.token_ids), 4):
        events = [event for event in client.subscribe(submitted, from_token=from_token) if isinstance(event, Delta)]
        contents = [content for event in events for content in event.content]
        finished = [content for content in contents if isinstance(content, ToolCallFinished) and content.index == 0]
        assert not finished or finished[0].arguments == call.arguments
        started = [content for content in contents if isinstance(content, ToolCallStarted) and content.index == 0]
        assert all((begun.id, begun.name) == (call.id, call.name) for begun in started)
    with client.session() as session:
        generation = session.submit(messages=QUESTION, tools=[WEATHER], tool_choice="weather", max_tokens=120)
        assert generation.result().tool_calls[0].name == "weather"


def test_a_schema_that_cannot_be_compiled_is_the_tools_fault(client: Client) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?<=b)c"}}, "required": ["a"]}
    with pytest.raises(InvalidRequest) as refused:
        client.chat(QUESTION, tools=[Tool("a", "", schema)], max_tokens=4).result()
    assert refused.value.violations[0].field == "tools"
    assert client.chat(QUESTION, tools=[CLOCK], max_tokens=4).result().token_ids


def test_chosen_outputs_have_their_calls(client: Client) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 120, "best_of": 4, "n": 2}
    options |= {"tool_choice": "required", "parallel_tool_calls": False}
    outputs = client.chat(QUESTION, tools=[WEATHER], **options).result().outputs
    assert [output.finish_reason for output in outputs] == [FinishReason.TOOL_CALLS] * 2
    assert all(call.valid for output in outputs for call in output.tool_calls)
    scores = [output.score for output in outputs]
    assert None not in scores and scores == sorted(scores, reverse=True)


def test_a_search_takes_tools_that_are_not_strict(client: Client) -> None:
    loose = dataclasses.replace(WEATHER, strict=False)
    assert client.chat(QUESTION, tools=[loose], beam_search=2, max_tokens=6).result().outputs[0].score is not None
    with pytest.raises(InvalidRequest) as refused:
        client.chat(QUESTION, tools=[WEATHER], beam_search=2, max_tokens=6).result()
    assert [violation.field for violation in refused.value.violations] == ["tools"]


# What each program prints of the loop; they are the same in all languages.
LOOP = (
    "What is the weather in Paris?",
    '  weather({"city": "Paris"})',
    "The weather in Paris is sunny, at 21 degrees.",
    "And in Oslo?",
    '  weather({"city": "Oslo"})',
    "The weather in Oslo is snowy, at -3 degrees.",
)


def test_the_python_programs_go_from_question_to_answer(server: RunningServer, tmp_path: pathlib.Path) -> None:
    examples = ROOT / "clients/python/examples"
    assert _run(tmp_path, sys.executable, str(examples / "tools.py"), server.address).splitlines() == [*LOOP]
    filled = _run(tmp_path, sys.executable, str(examples / "schema.py"), server.address)
    assert filled == "Person(name='Clara Weber', age=34, city='Lisbon')\n"


def _run(folder: pathlib.Path, *command: str) -> str:
    """Runs a program; returns what it printed."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "clients/python")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout
