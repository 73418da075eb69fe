"""What is larger than a message.

Cut where it can be, the failure of its own request where it cannot, on every way of reading.
"""

from __future__ import annotations

import pathlib
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio
from tests.service.harness import Running, events_of, ids_of, running_service, text_of
from tests.service.model_folder import add_token, write_model_folder
from tests.support.engine_requests import asked

from headrace.v1 import generation_pb2, inference_pb2

LIMIT = 1 << 16
LONG = [200] * 1000
# A prompt of one token that is answered by one token, whose text no message holds.
HUGE = 9
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest_asyncio.fixture
async def limited(tmp_path: pathlib.Path, sockets: pathlib.Path) -> AsyncIterator[Running]:
    """A service whose messages have 64 KiB.

    Its engine answers with 1,000 tokens, and a prompt of `HUGE` with one of 70,000 bytes.
    """
    folder = write_model_folder(tmp_path / "tiny")
    huge = add_token(folder, "x" * 70_000)
    prompt = HUGE.to_bytes(4, "little")
    async with running_service(
        folder,
        sockets,
        lambda add, index: [huge] if asked(add).prompt_token_ids == prompt else LONG,
        context=4096,
        max_message_bytes=LIMIT,
    ) as running:
        running.engine.logprobs = 20
        yield running


def spec(**fields: object) -> generation_pb2.GenerationSpec:
    ids = generation_pb2.TokenIds(ids=[10, 11])
    return generation_pb2.GenerationSpec(token_ids=ids, **fields)  # type: ignore[arg-type]


def huge() -> generation_pb2.GenerationSpec:
    return generation_pb2.GenerationSpec(token_ids=generation_pb2.TokenIds(ids=[HUGE]))


async def ended(running: Running, asked: generation_pb2.GenerationSpec) -> str:
    """The id of a submitted generation that has ended."""
    submitted = await running.stub.Submit(inference_pb2.SubmitRequest(spec=asked))
    await running.until(lambda: running.engine.requests[submitted.request_id].done)
    return str(submitted.request_id)


async def test_a_log_with_log_probabilities_is_read_in_messages_that_fit(limited: Running) -> None:
    request_id = await ended(limited, spec(logprobs=20, n=2))
    events = await events_of(limited.stub.Subscribe(inference_pb2.SubscribeRequest(request_id=request_id)))
    assert max(event.ByteSize() for event in events) < LIMIT
    for index in range(2):
        assert ids_of(events, index) == LONG
        deltas = [event.delta for event in events if event.HasField("delta") and event.delta.output_index == index]
        assert sum(len(delta.logprobs.top_token_ids) for delta in deltas) == 20 * len(LONG)


async def test_a_stop_string_is_cut_off_a_log_that_is_read_in_many_messages(limited: Running) -> None:
    stop = generation_pb2.StopConditions(strings=["y" * 200])
    request_id = await ended(limited, spec(logprobs=20, stop=stop))
    events = await events_of(limited.stub.Subscribe(inference_pb2.SubscribeRequest(request_id=request_id)))
    piece = limited.tokenizer.decode([200])
    assert text_of(events) == (piece * len(LONG))[:-200]
    assert ids_of(events) == LONG


async def test_logs_that_a_session_joins_come_in_messages_that_fit(limited: Running) -> None:
    ids = [await ended(limited, spec(logprobs=20, n=2)), await ended(limited, spec(n=16))]
    session = limited.stub.Session()
    for stream_id, request_id in enumerate(ids, 1):
        attach = inference_pb2.SessionAttach(request_id=request_id)
        await session.write(inference_pb2.SessionRequest(stream_id=stream_id, attach=attach))
    await session.done_writing()
    steps = [step async for step in session]
    assert await session.code() is grpc.StatusCode.OK
    assert max(step.ByteSize() for step in steps) <= LIMIT
    with_logprobs = [e.event.delta.token_ids for s in steps for e in s.events if e.event.HasField("delta")]
    assert sum(map(len, with_logprobs)) == 2 * len(LONG)
    rows = [step.tokens for step in steps if step.tokens.token_ids]
    assert sum(len(tokens.token_ids) for tokens in rows) == 16 * len(LONG)
    assert all(stream_id == 2 for tokens in rows for stream_id in tokens.stream_ids)
    # What a generation's end says comes after all of its tokens.
    assert steps[-1].events[-1].event.HasField("done")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("attached", [False, True])
async def test_a_token_that_no_message_holds_ends_its_generation_and_no_other_of_the_session(
    limited: Running, attached: bool
) -> None:
    session = limited.stub.Session()
    if attached:
        request = inference_pb2.SessionAttach(request_id=await ended(limited, huge()))
        await session.write(inference_pb2.SessionRequest(stream_id=1, attach=request))
    else:
        submit = inference_pb2.SessionSubmit(spec=huge())
        await session.write(inference_pb2.SessionRequest(stream_id=1, submit=submit))
    await session.write(inference_pb2.SessionRequest(stream_id=2, submit=inference_pb2.SessionSubmit(spec=spec())))
    await session.done_writing()
    steps = [step async for step in session]
    events = [event for step in steps for event in step.events]
    (error,) = [event.error for event in events if event.HasField("error")]
    assert error.code == EXHAUSTED.value[0] and "bytes, a message at most 65536" in error.message
    assert [event.stream_id for event in events if event.event.HasField("done")] == [2]
    assert sum(len(step.tokens.token_ids) for step in steps) == len(LONG)


async def test_a_mistake_about_one_generation_is_its_failure_and_the_session_goes_on(limited: Running) -> None:
    script, prompt = limited.engine.script, HUGE.to_bytes(4, "little")
    # An id that no vocabulary has, as no engine should send it.
    limited.engine.script = lambda add, index: (
        [1 << 20] if asked(add).prompt_token_ids == prompt else script(add, index)
    )
    session = limited.stub.Session()
    for stream_id, wanted in enumerate((huge(), spec()), 1):
        submit = inference_pb2.SessionSubmit(spec=wanted)
        await session.write(inference_pb2.SessionRequest(stream_id=stream_id, submit=submit))
    await session.done_writing()
    events = [event async for step in session for event in step.events]
    assert [(event.stream_id, event.error.code) for event in events if event.HasField("error")] == [(1, 13)]
    assert [event.stream_id for event in events if event.event.HasField("done")] == [2]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("method", ["Generate", "Complete", "Subscribe"])
async def test_a_token_that_no_message_holds_ends_its_call_and_the_next_is_answered(
    limited: Running, method: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        if method == "Complete":
            await limited.stub.Complete(inference_pb2.CompleteRequest(spec=huge()))
        elif method == "Generate":
            await events_of(limited.stub.Generate(inference_pb2.GenerateRequest(spec=huge())))
        else:
            request = inference_pb2.SubscribeRequest(request_id=await ended(limited, huge()))
            await events_of(limited.stub.Subscribe(request))
    assert refused.value.code() is EXHAUSTED
    assert ids_of(await events_of(limited.stub.Generate(inference_pb2.GenerateRequest(spec=spec())))) == LONG
    await limited.until(lambda: limited.service.core.num_open == 0)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("subscribed", [False, True])
async def test_what_hears_of_a_prompt_comes_in_messages_that_fit(limited: Running, subscribed: bool) -> None:
    limited.engine.prompt_part_tokens = 2048
    asked = spec(prompt_logprobs=20)
    asked.token_ids.ids[:] = range(20, 320)
    asked.token_ids.ids.extend([370] * 1800)
    if subscribed:
        request = inference_pb2.SubscribeRequest(request_id=await ended(limited, asked))
        events = await events_of(limited.stub.Subscribe(request))
    else:
        events = await events_of(limited.stub.Generate(inference_pb2.GenerateRequest(spec=asked)))
    assert max(event.ByteSize() for event in events) < LIMIT
    parts = [event.prompt_logprobs for event in events if event.HasField("prompt_logprobs")]
    next_index = 1
    for part in parts:
        assert part.first_token_index == next_index
        next_index += len(part.logprobs.ranks)
    # The fake engine's rank of a token is its id, and its most likely ones follow it.
    ranks = [rank for part in parts for rank in part.logprobs.ranks]
    assert ranks == list(asked.token_ids.ids)[1:]
    tops = [top for part in parts for top in part.logprobs.top_token_ids]
    assert tops == [rank + top for rank in ranks for top in range(20)]


async def test_an_answer_in_one_message_that_is_too_large_says_what_to_use(limited: Running) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=r"a message at most 65536; use Generate") as refused:
        await limited.stub.Complete(inference_pb2.CompleteRequest(spec=spec(logprobs=20)))
    assert refused.value.code() is EXHAUSTED
