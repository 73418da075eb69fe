"""When a first token counts: when it has left the service, by every wire that streams.

An answer in one message has none.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from tests.kserve.wire import Wire, text
from tests.service.api.test_session import submit
from tests.service.harness import events_of
from tests.service.tracing.conftest import TracedService
from tests.service.tracing.test_reported_calls import generate, session

from headrace.v1 import generation_pb2, inference_pb2
from headrace_facts.facts import Generation
from headrace_service.streams.generation_stream import GenerationStream
from headrace_service.streams.output_text import OutputText

Spec = generation_pb2.GenerationSpec


async def read_whole(traced: TracedService, wire: str) -> None:
    """One answer by each wire."""
    kserve = Wire(traced.running.channel)
    if wire == "generate":
        await events_of(generate(traced))
    elif wire == "chat":
        message = inference_pb2.ChatMessage(role=inference_pb2.ROLE_USER, parts=[inference_pb2.Part(text="hello")])
        await events_of(traced.stub.Chat(inference_pb2.ChatRequest(messages=[message])))
    elif wire == "complete":
        await traced.stub.Complete(inference_pb2.CompleteRequest(spec=Spec(text="hello")))
    elif wire == "session":
        await session(traced, submit(1))
    elif wire == "ModelInfer":
        await kserve.ModelInfer(text(id="one", stream=False))
    else:
        call = kserve.ModelStreamInfer()
        await call.write(text(id="one", stream=wire == "ModelStreamInfer"))
        await call.done_writing()
        assert [response async for response in call]


@pytest.mark.parametrize("wire", ["generate", "chat", "session", "ModelStreamInfer"])
async def test_a_first_token_counts_when_it_has_left(
    traced: TracedService, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, late_s = OutputText.take, 0.05

    def take_late(output: OutputText, messages: list[bytes]) -> None:
        time.sleep(late_s)
        take(output, messages)

    monkeypatch.setattr(OutputText, "take", take_late)
    await read_whole(traced, wire)
    (generation,) = await traced.telemetry.until(Generation)
    assert generation.streamed and generation.ttft_ns > 0
    assert generation.first_chunk_ns >= generation.ttft_ns + late_s * 1e9
    assert generation.first_chunk_ns <= generation.end_ns - generation.arrival_ns


@pytest.mark.parametrize("wire", ["complete", "ModelInfer", "ModelStreamInfer, whole"])
async def test_an_answer_in_one_message_has_no_first_chunk(traced: TracedService, wire: str) -> None:
    await read_whole(traced, wire)
    (generation,) = await traced.telemetry.until(Generation)
    assert (generation.streamed, generation.first_chunk_ns) == (False, 0) and generation.ttft_ns > 0


async def test_a_first_token_that_never_left_is_none(traced: TracedService) -> None:
    traced.engine.running.clear()
    call = generate(traced)
    await call.read()
    call.cancel()
    (generation,) = await traced.telemetry.until(Generation)
    assert (generation.first_chunk_ns, generation.ttft_ns) == (0, 0)


@pytest.mark.parametrize("blocked_at", [0, 1, 2])
async def test_messages_before_the_first_token_are_not_it(traced: TracedService, blocked_at: int) -> None:
    """Accepted, started and the first tokens are written one after the other.

    The third of them counts.
    """
    traced.engine.running.clear()
    left: list[int] = []

    async def write(message: bytes) -> None:
        if len(left) == blocked_at:
            await asyncio.sleep(0.03)
        left.append(time.monotonic_ns())

    deliver = traced.running.service.core.deliver

    async def deliver_here(stream: GenerationStream, _: Any) -> None:
        await deliver(stream, write)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(traced.running.service.core), "deliver", lambda core, *arguments: deliver_here(*arguments))
        call = asyncio.create_task(events_of(generate(traced)))
        await traced.running.until(lambda: traced.engine.requests)
        traced.engine.running.set()
        await call
    (generation,) = await traced.telemetry.until(Generation)
    arrived_ns = generation.arrival_ns + generation.first_chunk_ns
    assert left[2] <= arrived_ns <= left[3]


async def test_a_submit_of_a_session_arrives_when_it_is_read(
    traced: TracedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    find, late_s = type(traced.running.service.core).open_generation, 0.05

    def find_late(core: Any) -> Any:
        time.sleep(late_s)
        return find(core)

    monkeypatch.setattr(type(traced.running.service.core), "open_generation", find_late)
    await session(traced, submit(1))
    (generation,) = await traced.telemetry.until(Generation)
    assert generation.ttft_ns >= late_s * 1e9
