"""Log probabilities of prompts from the engine's columns to the caller.

Each once, in order, between started and the first delta, on every way.
"""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import Iterable

import grpc
import numpy as np
import pytest
from tests.service.harness import ANSWER, Running, events_of, kinds_of, running_service, text_of, violations_of
from tests.support.engine_requests import asked

from headrace.v1 import generation_pb2, inference_pb2
from headrace_protos.engine.v1 import engine_pb2
from headrace_service.api.session_batch import SessionBatch, SessionWire

Spec = generation_pb2.GenerationSpec
TEXT = "the quick brown fox jumps over the lazy dog"
NUM_TOPS = 2


def spec_of(**fields: object) -> generation_pb2.GenerationSpec:
    return Spec(**{"text": TEXT, "prompt_logprobs": NUM_TOPS, **fields})


def prompt_of(running: Running) -> list[int]:
    """The prompt as the engine got it."""
    *_, request = running.engine.requests.values()
    ids: list[int] = np.frombuffer(asked(request.add).prompt_token_ids, "<u4").tolist()
    return ids


def parts_of(events: Iterable[generation_pb2.GenerationEvent]) -> list[generation_pb2.PromptLogprobs]:
    return [event.prompt_logprobs for event in events if event.HasField("prompt_logprobs")]


def check(parts: list[generation_pb2.PromptLogprobs], prompt: list[int]) -> None:
    """The parts report all of the prompt but its first token, as the fake engine does."""
    assert len(parts) > 1
    position = 1
    for part in parts:
        columns = part.logprobs
        assert part.first_token_index == position
        ids = prompt[position : position + len(columns.ranks)]
        assert list(columns.ranks) == ids
        assert list(columns.sampled) == [-float(token) for token in ids]
        assert list(columns.top_counts) == [NUM_TOPS] * len(ids)
        assert list(columns.top_token_ids) == [token + top for token in ids for top in range(NUM_TOPS)]
        assert list(columns.top_logprobs) == [-float(token) - top for token in ids for top in range(NUM_TOPS)]
        position += len(ids)
    assert position == len(prompt)


async def test_they_come_between_started_and_the_first_delta(running: Running) -> None:
    """The fake engine sends them in one message with the first token."""
    events = await events_of(running.stub.Generate(inference_pb2.GenerateRequest(spec=spec_of(n=2))))
    parts = parts_of(events)
    check(parts, prompt_of(running))
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[: 3 + len(parts)] == ["accepted", "started", *["prompt_logprobs"] * len(parts), "delta"]
    assert text_of(events) == text_of(events, 1) == ANSWER


async def test_none_come_unless_they_are_asked_for(running: Running) -> None:
    events = await events_of(running.stub.Generate(inference_pb2.GenerateRequest(spec=Spec(text=TEXT))))
    assert not parts_of(events)
    (request,) = running.engine.requests.values()
    assert asked(request.add).num_prompt_logprobs < 0


async def test_complete_joins_them(running: Running) -> None:
    whole = await running.stub.Complete(inference_pb2.CompleteRequest(spec=spec_of()))
    check(list(whole.prompt_logprobs), prompt_of(running))
    assert whole.outputs[0].content[0].text == ANSWER


@pytest.mark.parametrize("from_token", [0, 4])
async def test_a_subscription_begins_with_them(running: Running, from_token: int) -> None:
    submitted = await running.stub.Submit(inference_pb2.SubmitRequest(spec=spec_of()))
    request = running.engine.requests[submitted.request_id]
    await running.until(lambda: request.outputs[0].released > from_token)
    subscribe = inference_pb2.SubscribeRequest(request_id=submitted.request_id, from_token=from_token)
    for _ in range(2):
        events = await events_of(running.stub.Subscribe(subscribe))
        check(parts_of(events), prompt_of(running))
        assert kinds_of(events)[:2] == ["accepted", "started"] and kinds_of(events)[-3] == "delta"
        # Once more when it has ended.
        await running.until(lambda: request.done)


async def test_a_session_gets_them_before_its_tokens(running: Running) -> None:
    running.engine.running.clear()
    call = running.stub.Session()
    submit = inference_pb2.SessionSubmit(spec=spec_of())
    await call.write(inference_pb2.SessionRequest(stream_id=5, submit=submit))
    await running.until(lambda: running.engine.requests)
    running.engine.running.set()
    await call.done_writing()
    parts: list[generation_pb2.PromptLogprobs] = []
    num_tokens = 0
    async with asyncio.timeout(120):
        async for response in call:
            num_tokens += len(response.tokens.token_ids)
            new = parts_of(event.event for event in response.events)
            assert not new or num_tokens == 0
            parts += new
    check(parts, prompt_of(running))
    assert num_tokens == len(running.ids(ANSWER))


@pytest.mark.parametrize("value", [21, 2**32 - 1])
async def test_too_many_are_refused_by_name(running: Running, value: int) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await events_of(running.stub.Generate(inference_pb2.GenerateRequest(spec=spec_of(prompt_logprobs=value))))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert violations_of(refused.value) == {"spec.prompt_logprobs": "must be at most 20"}
    assert not running.engine.requests


async def test_what_no_answer_can_hold_is_refused_before_it_is_computed(
    model_path: pathlib.Path, sockets: pathlib.Path
) -> None:
    async with running_service(model_path, sockets, context=4096, max_message_bytes=1 << 16) as running:
        spec = Spec(token_ids=generation_pb2.TokenIds(ids=[300] * 1000), prompt_logprobs=20)
        with pytest.raises(grpc.aio.AioRpcError, match=r"spec\.prompt_logprobs: .* 65536; use Generate") as refused:
            await running.stub.Complete(inference_pb2.CompleteRequest(spec=spec))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not running.engine.requests
        events = await events_of(running.stub.Generate(inference_pb2.GenerateRequest(spec=spec)))
        assert sum(len(part.logprobs.ranks) for part in parts_of(events)) == 999


def test_a_session_hears_of_long_prompts_in_messages_that_fit() -> None:
    """64 parts as the engine cuts them, which is 20 MB."""
    batch = SessionBatch(16 << 20)
    wire = SessionWire(batch, 3, deltas_are_events=False)
    count, tops = 2048, 20
    columns = engine_pb2.LogprobColumns(
        sampled=np.zeros(count, "<f4").tobytes(),
        ranks=np.full(count, 70_000, "<u4").tobytes(),
        top_counts=np.full(count, tops, "<u2").tobytes(),
        top_token_ids=np.full(tops * count, 100_000, "<u4").tobytes(),
        top_logprobs=np.zeros(tops * count, "<f4").tobytes(),
    )
    wire.accepted("request", "revision", 64 * count)
    for part in range(64):
        wire.prompt_logprobs(1 + part * count, columns)
    messages = batch.take()
    assert sum(map(len, messages)) > 18_000_000 and max(map(len, messages)) < 2 << 20
    events = [event for data in messages for event in inference_pb2.SessionResponse.FromString(data).events]
    assert events[0].event.HasField("accepted")
    assert [event.event.prompt_logprobs.first_token_index for event in events[1:]] == list(range(1, 64 * count, count))
    assert not batch.num_events
