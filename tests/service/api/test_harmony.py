"""gpt-oss's format through a whole service, with an engine whose answers are written here."""

from __future__ import annotations

import datetime
import pathlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from tests.service.api.test_tools import chat, newest, newest_prompt, parts_of, units_of
from tests.service.harmony_folder import ENDS, TEMPLATE, write_harmony_folder
from tests.service.harness import Running, events_of, ids_of, running_service, violations_of

from headrace.v1 import generation_pb2, inference_pb2

Spec, Tool, Choice = generation_pb2.GenerationSpec, inference_pb2.Tool, inference_pb2.ToolChoice
Message, Part = inference_pb2.ChatMessage, inference_pb2.Part
USER, ASSISTANT, TOOL = inference_pb2.ROLE_USER, inference_pb2.ROLE_ASSISTANT, inference_pb2.ROLE_TOOL
SCHEMA = """{"type": "object", "required": ["city"], "properties": {
    "city": {"type": "string", "description": "Where."}, "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
    "days": {"type": "array", "items": {"type": "integer"}}, "at": {"type": ["string", "null"]}}}"""
WEATHER = Tool(name="weather", description="The weather of a city.", parameters_json_schema=SCHEMA)
QUESTION = [Message(role=USER, parts=[Part(text="The weather?")])]
ANSWER = (
    "<|channel|>analysis<|message|>They ask for größer 東京.<|end|><|start|>assistant<|channel|>commentary<|message|>"
    "I'll look.<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    '{"city": "東京"}<|call|>'
)
PARTS = [("reasoning", "They ask for größer 東京."), ("text", "I'll look."), ("weather", '{"city": "東京"}', True)]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    path = tmp_path_factory.mktemp("harmony")
    folder = write_harmony_folder(path / "tiny")
    answer: list[int] = []
    async with running_service(folder, path, lambda add, index: answer, context=4096) as running:
        answer += running.ids(ANSWER)
        yield running


def calling(*calls: str, **parts: str) -> Message:
    made = [inference_pb2.ToolCall(id=f"c{place}", name=name, arguments_json="{}") for place, name in enumerate(calls)]
    return Message(role=ASSISTANT, parts=[Part(**{kind: text}) for kind, text in parts.items()], tool_calls=made)


async def prompt_of(service: Running, messages: list[Message], **fields: Any) -> str:
    await events_of(service.stub.Chat(inference_pb2.ChatRequest(messages=messages, **fields)))
    return newest_prompt(service)


@pytest.mark.asyncio(loop_scope="module")
async def test_an_answer_comes_as_reasoning_text_and_a_call_beside_all_of_its_tokens(service: Running) -> None:
    events = await chat(service, tools=[WEATHER])
    assert parts_of(events) == PARTS
    assert ids_of(events) == service.ids(ANSWER)
    finished = next(event.output_finished for event in events if event.HasField("output_finished"))
    assert finished.reason == generation_pb2.FINISH_REASON_TOOL_CALLS
    reasoning = ANSWER[: ANSWER.index("<|end|>") + len("<|end|>")]
    assert events[-1].done.usage.reasoning_tokens == len(service.ids(reasoning))


@pytest.mark.asyncio(loop_scope="module")
async def test_without_tools_reasoning_is_apart_all_the_same(service: Running) -> None:
    parts = parts_of(await chat(service))
    assert parts[0] == PARTS[0]
    assert parts[1] == ("text", "I'll look.\n\n" + 'assistantcommentary to=functions.weather json{"city": "東京"}')


@pytest.mark.asyncio(loop_scope="module")
async def test_who_reads_from_any_token_on_gets_what_follows(service: Running) -> None:
    submitted = await service.stub.Submit(inference_pb2.SubmitRequest(messages=QUESTION, tools=[WEATHER]))
    Subscribe = inference_pb2.SubscribeRequest
    whole = await events_of(service.stub.Subscribe(Subscribe(request_id=submitted.request_id)))
    for from_token in range(0, len(ids_of(whole)), 7):
        call = service.stub.Subscribe(Subscribe(request_id=submitted.request_id, from_token=from_token))
        rest = await events_of(call)
        assert units_of(rest) == units_of(whole)[len(units_of(whole)) - len(units_of(rest)) :]
        first = next(event.delta.first_token_index for event in rest if event.HasField("delta"))
        assert first <= from_token and ids_of(rest) == ids_of(whole)[first:]


@pytest.mark.asyncio(loop_scope="module")
async def test_the_engine_gets_the_ends_and_the_budget_or_a_grammar_of_all(service: Running) -> None:
    await chat(service, spec=Spec(max_reasoning_tokens=7))
    section, form = newest(service).reasoning, newest(service).structured_output
    assert form is None and section.max_tokens == 7 and section.repeats and not section.begins_inside
    assert section.start_ids == tuple(service.ids("<|channel|>analysis<|message|>"))
    assert section.end_ids == tuple(service.ids("<|end|>"))
    assert section.closing_ids == tuple(service.ids("<|start|>assistant<|channel|>final<|message|>"))
    ends = {service.tokenizer.token_to_id(text) for text in [*ENDS, "<|call|>"]}
    assert set(memoryview(newest(service).stop.token_ids).cast("I")) == ends
    await chat(service, spec=Spec(stop={"ignore_eos": True}))
    assert newest(service).stop.token_ids == b""
    await chat(service, spec=Spec(max_reasoning_tokens=7))

    await chat(service, tools=[WEATHER], spec=Spec(max_reasoning_tokens=7))
    assert newest(service).reasoning is None
    assert "thinking[max_tokens=7]" in newest(service).structured_output.text
    await chat(service, spec=Spec(max_reasoning_tokens=7, structured_output={"regex": "a"}))
    form = newest(service).structured_output
    assert newest(service).reasoning is None and (form.form, form.text) == ("regex", "a")
    assert "thinking[max_tokens=7]" in form.around and "@answer" in form.around
    await chat(service, tools=[Tool(name="weather", strict=False)], spec=Spec(max_reasoning_tokens=7))
    assert newest(service).structured_output is None and newest(service).reasoning == section


@pytest.mark.asyncio(loop_scope="module")
async def test_the_template_gets_date_effort_and_tools(service: Running) -> None:
    days = {datetime.datetime.now().strftime("%Y-%m-%d")}
    plain = await prompt_of(service, QUESTION)
    days.add(datetime.datetime.now().strftime("%Y-%m-%d"))
    assert any(f"Current date: {day}\n\nReasoning: medium<|end|>" in plain for day in days)
    assert plain.endswith("<|start|>user<|message|>The weather?<|end|><|start|>assistant")
    high = Spec(reasoning_effort=generation_pb2.REASONING_EFFORT_HIGH)
    asked = await prompt_of(service, QUESTION, tools=[WEATHER, Tool(name="clock")], spec=high)
    assert "Reasoning: high<|end|>" in asked
    assert (
        "// The weather of a city.\ntype weather = (_: {\n// Where.\ncity: string,\n"
        'unit?: "C" | "F", // default: "C"\ndays?: number[],\nat?: string | null,\n}) => any;' in asked
    )
    assert "type clock = () => any;" in asked
    model = (await service.stub.GetModel(inference_pb2.GetModelRequest())).model
    assert (model.tool_format, model.reasoning, model.reasoning_effort) == ("harmony", True, True)


@pytest.mark.asyncio(loop_scope="module")
async def test_reasoning_goes_back_until_the_answer_and_results_name_their_function(service: Running) -> None:
    result = Message(role=TOOL, parts=[Part(text="sunny")], tool_call_id="c0")
    called = [*QUESTION, calling("weather", reasoning="Which?"), result]
    prompt = await prompt_of(service, called)
    assert prompt.endswith(
        "<|start|>assistant<|channel|>analysis<|message|>Which?<|end|>"
        "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{}<|call|>"
        '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"sunny"<|end|><|start|>assistant'
    )
    answer = Message(role=ASSISTANT, parts=[Part(reasoning="So."), Part(text="Sunny.")])
    prompt = await prompt_of(service, [*called, answer, *QUESTION])
    assert "analysis" not in prompt and "So." not in prompt
    assert "<|start|>assistant<|channel|>final<|message|>Sunny.<|end|>" in prompt
    both = await prompt_of(service, [*QUESTION, calling("weather", reasoning="Which?", text="I'll look."), result])
    assert "<|channel|>analysis<|message|>Which?\n\nI'll look.<|end|>" in both


@pytest.mark.asyncio(loop_scope="module")
async def test_an_answer_that_is_continued_is_read_as_one(service: Running) -> None:
    begun = [*QUESTION, Message(role=ASSISTANT, parts=[Part(text="It is")])]
    call = service.stub.Chat(inference_pb2.ChatRequest(messages=begun, continue_last_message=True))
    events = await events_of(call)
    assert newest_prompt(service).endswith("<|channel|>final<|message|>It is")
    # The engine writes what it always does: within a message, another begins.
    assert parts_of(events)[0] == PARTS[0]
    await events_of(
        service.stub.Chat(
            inference_pb2.ChatRequest(
                messages=begun, continue_last_message=True, spec=Spec(structured_output={"regex": "a"})
            )
        )
    )
    assert newest(service).structured_output.around.startswith("start: @answer")


REFUSED: list[tuple[dict[str, Any], dict[str, str]]] = [
    (
        {"messages": [*QUESTION, calling("weather", "clock"), *QUESTION]},
        {"messages[1].tool_calls": "must have at most 1 entry: in the model's format, harmony, a message has one call"},
    ),
    (
        {"spec": Spec(reasoning_effort=9)},  # type: ignore[arg-type]  # no member
        {"spec.reasoning_effort": "must be a ReasoningEffort of this API: low, medium, high, or unset"},
    ),
]


@pytest.mark.parametrize(("fields", "named"), REFUSED)
@pytest.mark.asyncio(loop_scope="module")
async def test_what_is_wrong_is_refused_by_its_field(
    service: Running, fields: dict[str, Any], named: dict[str, str]
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await events_of(service.stub.Chat(inference_pb2.ChatRequest(**{"messages": QUESTION, **fields})))
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert violations_of(raised.value) == named


@pytest.mark.asyncio(loop_scope="module")
async def test_an_effort_is_of_conversations_alone(service: Running) -> None:
    spec = Spec(text="a", reasoning_effort=generation_pb2.REASONING_EFFORT_LOW)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await events_of(service.stub.Generate(inference_pb2.GenerateRequest(spec=spec)))
    assert violations_of(raised.value) == {"spec.reasoning_effort": "must not be set but for a conversation"}


@pytest.mark.asyncio
async def test_a_template_without_it_takes_no_effort(tmp_path: pathlib.Path, sockets: pathlib.Path) -> None:
    folder = write_harmony_folder(tmp_path / "tiny", TEMPLATE.replace("reasoning_effort", "something"))
    async with running_service(folder, sockets) as running:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await chat(running, spec=Spec(reasoning_effort=generation_pb2.REASONING_EFFORT_LOW))
        rule = "must not be set: the model's chat template has no reasoning_effort"
        assert violations_of(raised.value) == {"spec.reasoning_effort": rule}
