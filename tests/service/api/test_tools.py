"""Tools and reasoning through a whole service, with an engine whose answers are written here."""

from __future__ import annotations

import json
import pathlib
from array import array
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest
import pytest_asyncio
from tests.service.harness import Running, events_of, ids_of, running_service, violations_of
from tests.service.model_folder import END, TEMPLATE, write_model_folder
from tests.support.engine_requests import asked
from tokenizers import Tokenizer

from headrace.v1 import generation_pb2, inference_pb2
from headrace_request.reasoning import Reasoning

Spec, Tool, Choice = generation_pb2.GenerationSpec, inference_pb2.Tool, inference_pb2.ToolChoice
Content, Message, Part = generation_pb2.Content, inference_pb2.ChatMessage, inference_pb2.Part
# Shows tools, calls, results and reasoning, as a template of transformers' convention does.
TOOLS_TEMPLATE = (
    "{% if tools %}<|start|>tools\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}<tool_call><|end|>{% endif %}"
    "{% for message in messages %}<|start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}[{{ call.id }} {{ call.function.name }} "
    "{{ call.function.arguments | tojson }}]{% endfor %}"
    "{% if message.tool_call_id %}({{ message.tool_call_id }} {{ message.name }}){% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SCHEMA = '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}'
WEATHER = Tool(name="weather", description="The weather of a city.", parameters_json_schema=SCHEMA)
QUESTION = [Message(role=inference_pb2.ROLE_USER, parts=[Part(text="The weather?")])]
ANSWER = (
    "<think>\nThey ask for größer 東京.\n</think>\n\nI look.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "東京"}}\n</tool_call>\n'
    '<tool_call>{"name": "other", "arguments": {}}</tool_call>'
)
PARTS = [
    ("reasoning", "They ask for größer 東京."),
    ("text", "I look."),
    ("weather", '{"city": "東京"}', True),
    ("other", "{}", False),
]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    path = tmp_path_factory.mktemp("tools")
    folder = write_model_folder(path / "tiny", TOOLS_TEMPLATE)
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(ANSWER, add_special_tokens=False).ids + [END]
    async with running_service(folder, path, lambda add, index: tokens, context=4096) as running:
        yield running


def parts_of(events: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Text and reasoning as it came, and each call once it is over."""
    parts: list[tuple[Any, ...]] = []
    names, deltas = {}, {}
    for content in [content for event in events for content in event.delta.content]:
        match content.WhichOneof("kind"):
            case "tool_call_started":
                call = content.tool_call_started
                names[call.index], deltas[call.index] = call.name, ""
            case "tool_call_arguments":
                deltas[content.tool_call_arguments.index] += content.tool_call_arguments.delta
            case "tool_call_finished":
                call = content.tool_call_finished
                assert call.arguments == deltas[call.index]
                parts.append((names[call.index], call.arguments, call.valid))
            case kind:
                if parts and parts[-1][0] == kind:
                    parts[-1] = (kind, parts[-1][1] + getattr(content, kind))
                else:
                    parts.append((kind, getattr(content, kind)))
    return parts


def units_of(events: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Contents a character at a time, so that those of different deltas can be compared."""
    units: list[tuple[Any, ...]] = []
    for content in [content for event in events for content in event.delta.content]:
        kind = content.WhichOneof("kind")
        if kind in ("text", "reasoning"):
            units += [(kind, char) for char in getattr(content, kind)]
        elif kind == "tool_call_arguments":
            units += [(kind, content.tool_call_arguments.index, char) for char in content.tool_call_arguments.delta]
        else:
            units.append((kind, getattr(content, kind).SerializeToString()))
    return units


async def chat(service: Running, **fields: Any) -> list[generation_pb2.GenerationEvent]:
    return await events_of(service.stub.Chat(inference_pb2.ChatRequest(messages=QUESTION, **fields)))


def newest(service: Running) -> Any:
    return asked(list(service.engine.requests.values())[-1].add)


def newest_prompt(service: Running) -> str:
    text: str = service.tokenizer.decode(array("I", newest(service).prompt_token_ids), skip_special_tokens=False)
    return text


@pytest.mark.asyncio(loop_scope="module")
async def test_an_answer_comes_as_reasoning_text_and_calls_beside_all_of_its_tokens(service: Running) -> None:
    events = await chat(service, tools=[WEATHER])
    assert parts_of(events) == PARTS
    assert ids_of(events) == [*service.ids(ANSWER), END]
    finished = next(event.output_finished for event in events if event.HasField("output_finished"))
    assert finished.reason == generation_pb2.FINISH_REASON_TOOL_CALLS
    num_reasoning = len(service.ids(ANSWER[: ANSWER.index("</think>") + 8]))
    assert abs(events[-1].done.usage.reasoning_tokens - num_reasoning) <= 1
    assert json.dumps({"type": "function"})[1:-1] in newest_prompt(service)


@pytest.mark.asyncio(loop_scope="module")
async def test_without_tools_calls_are_text_and_reasoning_is_not(service: Running) -> None:
    events = await chat(service)
    assert [part[0] for part in parts_of(events)] == ["reasoning", "text"]
    assert parts_of(events)[1][1] == ANSWER[ANSWER.index("I look") :]
    assert "tools" not in newest_prompt(service)


@pytest.mark.asyncio(loop_scope="module")
async def test_the_engine_gets_reasoning_its_budget_and_the_grammar(service: Running) -> None:
    await chat(service, tools=[WEATHER], spec=Spec(max_reasoning_tokens=7))
    start, end = service.ids("<think>"), service.ids("</think>")
    assert newest(service).reasoning == Reasoning(tuple(start), tuple(end), 7)
    assert newest(service).structured_output.form == "grammar"
    loose = Tool(name="weather", strict=False)
    await chat(service, tools=[loose])
    assert newest(service).structured_output is None
    await chat(service, tools=[loose], tool_choice=Choice(mode=inference_pb2.TOOL_CHOICE_MODE_REQUIRED))
    assert newest(service).structured_output.text.startswith("start: space? marked")
    await chat(service, tools=[Tool(name="clock"), WEATHER], tool_choice=Choice(name="weather"))
    assert "weather" in newest(service).structured_output.text
    assert "clock" not in newest(service).structured_output.text
    await chat(service, tools=[WEATHER], tool_choice=Choice(mode=inference_pb2.TOOL_CHOICE_MODE_NONE))
    assert newest(service).structured_output is None


@pytest.mark.asyncio(loop_scope="module")
async def test_calls_and_results_go_back_as_messages(service: Running) -> None:
    call = inference_pb2.ToolCall(id="c1", name="weather", arguments_json='{"city": "Paris"}')
    parts = [Part(reasoning="Paris?"), Part(text="I look.")]
    messages = [
        *QUESTION,
        Message(role=inference_pb2.ROLE_ASSISTANT, parts=parts, tool_calls=[call]),
        Message(role=inference_pb2.ROLE_TOOL, parts=[Part(text="sunny")], tool_call_id="c1"),
    ]
    await events_of(service.stub.Chat(inference_pb2.ChatRequest(messages=messages)))
    expected = '<think>Paris?</think>I look.[c1 weather {"city": "Paris"}]<|end|><|start|>tool\nsunny(c1 weather)'
    assert expected in newest_prompt(service)


@pytest.mark.asyncio(loop_scope="module")
async def test_an_id_that_comes_again_is_its_latest_calls(service: Running) -> None:
    turns: list[Any] = []
    for name in ("weather", "other"):
        call = inference_pb2.ToolCall(id="c1", name=name, arguments_json="{}")
        turns += [Message(role=inference_pb2.ROLE_ASSISTANT, tool_calls=[call]), result("c1")]
    await events_of(service.stub.Chat(inference_pb2.ChatRequest(messages=[*QUESTION, *turns])))
    prompt = newest_prompt(service)
    assert prompt.index("sunny(c1 weather)") < prompt.index("sunny(c1 other)")


@pytest.mark.asyncio(loop_scope="module")
async def test_who_reads_from_any_token_on_gets_what_follows_of_a_call(service: Running) -> None:
    request = inference_pb2.SubmitRequest(messages=QUESTION, tools=[WEATHER])
    submitted = await service.stub.Submit(request)
    Subscribe = inference_pb2.SubscribeRequest
    whole = await events_of(service.stub.Subscribe(Subscribe(request_id=submitted.request_id)))
    assert parts_of(whole) == PARTS
    again = await events_of(service.stub.Subscribe(Subscribe(request_id=submitted.request_id)))
    assert units_of(again) == units_of(whole)
    for from_token in range(1, len(ids_of(whole)), 3):
        call = service.stub.Subscribe(Subscribe(request_id=submitted.request_id, from_token=from_token))
        rest = await events_of(call)
        units = units_of(rest)
        assert units == units_of(whole)[len(units_of(whole)) - len(units) :]
        first = next(event.delta.first_token_index for event in rest if event.HasField("delta"))
        assert first <= from_token
        assert ids_of(rest) == ids_of(whole)[first:]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_session_brings_the_same_events(service: Running) -> None:
    call = service.stub.Session()
    submit = inference_pb2.SessionSubmit(messages=QUESTION, tools=[WEATHER])
    await call.write(inference_pb2.SessionRequest(stream_id=1, submit=submit))
    await call.done_writing()
    events = [event.event async for message in call for event in message.events]
    assert parts_of(events) == PARTS
    assert ids_of(events) == [*service.ids(ANSWER), END]


@pytest.mark.asyncio(loop_scope="module")
async def test_token_ids_alone_are_not_read(service: Running) -> None:
    events = await chat(service, tools=[WEATHER], spec=Spec(token_ids_only=True))
    assert parts_of(events) == []
    assert ids_of(events) == [*service.ids(ANSWER), END]


def calling(**fields: Any) -> list[Message]:
    call = {"id": "c1", "name": "weather", "arguments_json": "{}", **fields}
    return [*QUESTION, Message(role=inference_pb2.ROLE_ASSISTANT, tool_calls=[inference_pb2.ToolCall(**call)])]


def result(call_id: str) -> Message:
    return Message(role=inference_pb2.ROLE_TOOL, parts=[Part(text="sunny")], tool_call_id=call_id)


DEEP = '{"type": "object", "a": ' + "[" * 64 + "]" * 64 + "}"
BROKEN: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({"tools": [WEATHER, WEATHER]}, {"tools[1].name": "must not be weather, which is an earlier tool's"}),
    ({"tools": [Tool(name="a b")]}, {"tools[0].name": 'must be 1 to 64 letters, digits, "_", "-" and "."'}),
    ({"tools": [Tool(name="a")] * 129}, {"tools": "must have at most 128 entries"}),
    (
        {"tools": [Tool(name="a", description="b" * (1 << 17))]},
        {"tools": "has 131073 bytes; must have at most 131072"},
    ),
    (
        {"tools": [Tool(name="a", parameters_json_schema="[]")]},
        {"tools[0].parameters_json_schema": "must be a JSON object"},
    ),
    (
        {"tools": [Tool(name="a", parameters_json_schema='{"type": "string"}')]},
        {"tools[0].parameters_json_schema": "must be the schema of an object"},
    ),
    (
        {"tools": [Tool(name="a", parameters_json_schema=DEEP)]},
        {"tools[0].parameters_json_schema": f"nests deeper than 64 levels at /a{'/0' * 63}"},
    ),
    ({"tools": [WEATHER], "tool_choice": Choice(name="b")}, {"tool_choice.name": "'b' is none of the tools"}),
    ({"tools": [WEATHER], "tool_choice": Choice(mode=9)}, {"tool_choice.mode": "must be a ToolChoiceMode"}),
    ({"tool_choice": Choice(name="b")}, {"tool_choice": "must not be set without tools"}),
    ({"parallel_tool_calls": False}, {"parallel_tool_calls": "must not be set without tools"}),
    (
        {"tools": [WEATHER], "spec": Spec(structured_output=generation_pb2.StructuredOutput(regex="a"))},
        {
            "spec.structured_output": "must not be set beside tools, unless tool_choice is none: "
            "an output is one or the other"
        },
    ),
    (
        {"messages": calling(arguments_json="[1]")},
        {"messages[1].tool_calls[0].arguments_json": "must be a JSON object"},
    ),
    ({"messages": calling(name="")}, {"messages[1].tool_calls[0].name": "must not be empty"}),
    (
        {"messages": calling(id="")},
        {"messages[1].tool_calls[0].id": "must have at least 1 and at most 64 characters"},
    ),
    (
        {"messages": [*calling(), result("c2")]},
        {"messages[2].tool_call_id": "must be the id of a call of an earlier message"},
    ),
    (
        {"messages": [*calling(), result("c1"), result("c1")]},
        {"messages[3].tool_call_id": "must be the id of a call that has no result yet"},
    ),
    (
        {
            "messages": [
                *QUESTION,
                Message(role=inference_pb2.ROLE_ASSISTANT, tool_calls=[*calling()[-1].tool_calls] * 2),
            ]
        },
        {"messages[1].tool_calls[1].id": "must not be that of another call beside it"},
    ),
    (
        {"messages": [Message(role=inference_pb2.ROLE_USER, parts=[Part(text="a")], tool_call_id="b")]},
        {"messages[0].tool_call_id": "must not be set but in messages of tools"},
    ),
    (
        {"messages": [Message(role=inference_pb2.ROLE_USER, parts=[Part(reasoning="a")])]},
        {"messages[0].parts[0].reasoning": "must not be set but in the assistant's messages"},
    ),
    (
        {"messages": calling(), "continue_last_message": True},
        {"messages[1].tool_calls": "must be empty when continue_last_message is set"},
    ),
    ({"spec": Spec(max_reasoning_tokens=0)}, {"spec.max_reasoning_tokens": "must be at least 1 and at most 4095"}),
]


@pytest.mark.parametrize(("fields", "expected"), BROKEN)
@pytest.mark.asyncio(loop_scope="module")
async def test_what_is_wrong_with_tools_is_named(
    service: Running, fields: dict[str, Any], expected: dict[str, str]
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await events_of(service.stub.Chat(inference_pb2.ChatRequest(**{"messages": QUESTION, **fields})))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert violations_of(raised.value) == expected


@pytest.mark.asyncio(loop_scope="module")
async def test_tools_without_a_conversation_are_refused(service: Running) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await service.stub.Submit(inference_pb2.SubmitRequest(spec=Spec(text="a"), tools=[WEATHER]))
    assert violations_of(raised.value) == {"tools": "must not be set without messages"}
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await events_of(
            service.stub.Generate(inference_pb2.GenerateRequest(spec=Spec(text="a", max_reasoning_tokens=1)))
        )
    assert violations_of(raised.value) == {"spec.max_reasoning_tokens": "must not be set but for a conversation"}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("template", "tool_format", "why"),
    [
        (TEMPLATE, "hermes", "tools: the model takes none: the model's chat template does not show tools"),
        (TOOLS_TEMPLATE, "off", "tools: the model takes none: the server was started with tool_format off"),
    ],
)
async def test_a_model_that_takes_no_tools_says_what_is_missing(
    template: str, tool_format: str, why: str, tmp_path: pathlib.Path, sockets: pathlib.Path
) -> None:
    folder = write_model_folder(tmp_path / "tiny", template)
    async with running_service(folder, sockets, tool_format=tool_format) as running:
        model = (await running.stub.GetModel(inference_pb2.GetModelRequest())).model
        assert (model.tool_format, model.reasoning) == ("", template == TOOLS_TEMPLATE)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await chat(running, tools=[WEATHER])
        assert (raised.value.code(), raised.value.details()) == (grpc.StatusCode.FAILED_PRECONDITION, why)
        if not model.reasoning:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await chat(running, spec=Spec(max_reasoning_tokens=5))
            rule = "must not be set: the model's chat template has no markers of reasoning"
            assert violations_of(raised.value) == {"spec.max_reasoning_tokens": rule}
