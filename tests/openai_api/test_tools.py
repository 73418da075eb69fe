"""Tools and reasoning in OpenAI's JSON: the request, the answer, and its chunks."""

from __future__ import annotations

import asyncio
import pathlib
import tempfile
from array import array
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from tests.openai_api.harness import CHAT, HELLO, Running, running_door
from tests.service.api.test_tools import ANSWER, TOOLS_TEMPLATE
from tests.service.model_folder import END, write_model_folder

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS, "strict": True}}]
CALLED = {"content": "I look.", "reasoning_content": "They ask for größer 東京."}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def tools(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    model = write_model_folder(
        tmp_path_factory.mktemp("tools") / "tiny", TOOLS_TEMPLATE + "{{ reasoning_effort or '' }}"
    )
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        async with running_door(model, pathlib.Path(folder)) as running:
            tokens = [*running.tokenizer.encode(ANSWER, add_special_tokens=False).ids, END]
            running.engine.script = lambda add, index: tokens
            yield running


@pytest.mark.asyncio(loop_scope="module")
async def test_an_answer_has_calls_and_reasoning_beside_its_content(tools: Running) -> None:
    response = await tools.post(CHAT, {"messages": HELLO, "tools": TOOLS, "tool_choice": "auto"})
    choice = response.json()["choices"][0]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert {name: message[name] for name in CALLED} == CALLED
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "weather", "arguments": '{"city": "東京"}'},
        {"name": "other", "arguments": "{}"},
    ]
    assert response.json()["usage"]["completion_tokens_details"]["reasoning_tokens"] > 5
    assert tools.newest_asked.structured_output.form == "grammar"  # type: ignore[union-attr]


@pytest.mark.asyncio(loop_scope="module")
async def test_calls_that_can_not_be_written_are_the_tools_fault(tools: Running) -> None:
    tools.engine.running.clear()
    asking = asyncio.create_task(tools.post(CHAT, {"messages": HELLO, "tools": TOOLS}))
    known = set(tools.engine.requests)
    await tools.until(lambda: set(tools.engine.requests) - known)
    tools.engine.end_unmet(tools.newest.add.request_id, "spec.structured_output", "can't be met")
    response = await asking
    tools.engine.running.set()
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")


@pytest.mark.asyncio(loop_scope="module")
async def test_chunks_are_the_answer_in_pieces(tools: Running) -> None:
    whole = (await tools.post(CHAT, {"messages": HELLO, "tools": TOOLS})).json()["choices"][0]["message"]
    events = await tools.events(CHAT, {"messages": HELLO, "tools": TOOLS})
    joined: dict[str, Any] = {"content": "", "reasoning_content": ""}
    calls: dict[int, dict[str, Any]] = {}
    for delta in [event["choices"][0]["delta"] for event in events]:
        for name in joined:
            joined[name] += delta.get(name, "")
        for piece in delta.get("tool_calls", []):
            call = calls.setdefault(piece["index"], {**piece, "function": {"name": "", "arguments": ""}})
            for name, text in piece["function"].items():
                call["function"][name] += text
    assert joined == CALLED
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    called = [{name: value for name, value in call.items() if name != "index"} for call in calls.values()]
    # The ids of calls are the request's own.
    assert [{**call, "id": ""} for call in called] == [{**call, "id": ""} for call in whole["tool_calls"]]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_call_and_its_result_are_shown_to_the_model(tools: Running) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Paris?"},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    assert (await tools.post(CHAT, {"messages": messages, "max_reasoning_tokens": 9})).status_code == 200
    ids = array("I", tools.newest_asked.prompt_token_ids)
    text = tools.tokenizer.decode(ids, skip_special_tokens=False)
    assert '<think>Paris?</think>[c1 weather {"city": "Paris"}]<|end|><|start|>tool\nsunny(c1 weather)' in text
    assert tools.newest_asked.reasoning is not None
    assert tools.newest_asked.reasoning.max_tokens == 9


@pytest.mark.parametrize(("effort", "shown"), [("high", "high"), ("none", ""), (None, "")])
@pytest.mark.asyncio(loop_scope="module")
async def test_an_effort_reaches_the_template(tools: Running, effort: str | None, shown: str) -> None:
    assert (await tools.post(CHAT, {"messages": HELLO, "reasoning_effort": effort})).status_code == 200
    ids = array("I", tools.newest_asked.prompt_token_ids)
    assert tools.tokenizer.decode(ids, skip_special_tokens=False).endswith(f"<|start|>assistant\n{shown}")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": TOOLS * 2}, "tools[1].function.name", "an earlier tool's"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "b"}}}, "tool_choice", "none of"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format", "must not be set beside"),
        ({"max_reasoning_tokens": 0}, "max_reasoning_tokens", "at least 1"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_what_is_wrong_with_tools_is_named(
    tools: Running, fields: dict[str, Any], param: str, words: str
) -> None:
    response = await tools.post(CHAT, {"messages": HELLO, **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert words in error["message"]
