"""Sessions: many generations over one stream, each with its own life."""

from __future__ import annotations

import asyncio
import pathlib
from collections import defaultdict
from typing import Any

import grpc
import pytest
from tests.service.harness import ANSWER, Running, running_service

from headrace.v1 import generation_pb2, inference_pb2

Spec = generation_pb2.GenerationSpec
Request = inference_pb2.SessionRequest
Submit = inference_pb2.SessionSubmit
Attach = inference_pb2.SessionAttach
Cancel = inference_pb2.SessionCancel


class Collected:
    """What a session's caller has got, by stream id."""

    def __init__(self) -> None:
        self.messages: list[inference_pb2.SessionResponse] = []
        self.ids: dict[int, list[int]] = defaultdict(list)
        self.text: dict[int, str] = defaultdict(str)
        self.kinds: dict[int, list[str]] = defaultdict(list)
        self.events: dict[int, list[inference_pb2.SessionEvent]] = defaultdict(list)

    def take(self, message: inference_pb2.SessionResponse) -> None:
        self.messages.append(message)
        tokens = message.tokens
        texts = tokens.texts or [""] * len(tokens.token_ids)
        for stream_id, token, text in zip(tokens.stream_ids, tokens.token_ids, texts, strict=True):
            self.ids[stream_id].append(token)
            self.text[stream_id] += text
            self._kind(stream_id, "tokens")
        for event in message.events:
            self.events[event.stream_id].append(event)
            kind = event.event.WhichOneof("event") if event.HasField("event") else "error"
            if kind == "delta":
                self.ids[event.stream_id].extend(event.event.delta.token_ids)
                self.text[event.stream_id] += "".join(content.text for content in event.event.delta.content)
            self._kind(event.stream_id, kind)

    def _kind(self, stream_id: int, kind: str) -> None:
        if self.kinds[stream_id][-1:] != [kind]:
            self.kinds[stream_id].append(kind)

    def ended(self, stream_id: int) -> bool:
        return self.kinds[stream_id][-1:] in (["done"], ["error"])


async def read_until(call: Any, collected: Collected, condition: Any) -> None:
    async with asyncio.timeout(120):
        while not condition():
            message = await call.read()
            assert message is not grpc.aio.EOF, "the session ended"
            collected.take(message)


def submit(stream_id: int, **fields: Any) -> Request:
    spec = fields.pop("spec", Spec(text="hello"))
    return Request(stream_id=stream_id, submit=Submit(spec=spec, **fields))


async def test_every_generation_comes_whole_and_in_order(running: Running) -> None:
    call, collected = running.stub.Session(), Collected()
    for stream_id in range(1, 9):
        await call.write(submit(stream_id))
    await call.done_writing()
    async for message in call:
        collected.take(message)
    for stream_id in range(1, 9):
        assert collected.text[stream_id] == ANSWER
        assert collected.ids[stream_id] == running.ids(ANSWER)
        assert collected.kinds[stream_id] == ["accepted", "started", "tokens", "output_finished", "done"]
    assert await call.code() == grpc.StatusCode.OK
    assert running.service.core.num_open == 0


async def test_a_step_is_one_message(model_path: pathlib.Path, sockets: pathlib.Path) -> None:
    async with running_service(model_path, sockets) as running:
        running.engine.running.clear()
        call, collected = running.stub.Session(), Collected()
        for stream_id in range(1, 21):
            await call.write(submit(stream_id))
        await read_until(call, collected, lambda: len(collected.kinds) == 20)
        for _ in range(3):
            running.engine.step()
            num_messages = len(collected.messages)
            await read_until(call, collected, lambda: collected.messages[-1].tokens.stream_ids)
            assert len(collected.messages[-1].tokens.stream_ids) == 20
            # the first step also tells that generations began
            assert len(collected.messages) - num_messages <= 2
            await read_until(call, collected, lambda: True)
            collected.messages.append(inference_pb2.SessionResponse())
        call.cancel()


async def test_token_ids_alone_come_without_text_and_at_once(running: Running) -> None:
    call, collected = running.stub.Session(), Collected()
    await call.write(submit(1, spec=Spec(text="hello", token_ids_only=True)))
    await call.done_writing()
    async for message in call:
        assert not message.tokens.texts
        collected.take(message)
    assert collected.ids[1] == running.ids(ANSWER)


async def test_a_failing_request_ends_alone(running: Running) -> None:
    call, collected = running.stub.Session(), Collected()
    await call.write(submit(1, spec=Spec(text="hello", sampling={"top_p": 2})))
    await call.write(submit(2, spec=Spec(text="hello", model="other")))
    await call.write(submit(3, spec=Spec(text="hello", beam_search={"width": 0})))
    await call.write(Request(stream_id=4, attach=Attach(request_id="nobody")))
    await call.write(submit(5, idempotency_key="k"))
    await call.write(Request(stream_id=6))
    await call.write(submit(0))
    await call.write(Request(stream_id=7, cancel=Cancel()))
    await call.write(submit(8))
    await call.done_writing()
    async for message in call:
        collected.take(message)
    codes = {stream_id: events[-1].error.code for stream_id, events in collected.events.items() if stream_id != 8}
    invalid, not_found = grpc.StatusCode.INVALID_ARGUMENT.value[0], grpc.StatusCode.NOT_FOUND.value[0]
    assert codes == {
        1: invalid,
        2: not_found,
        3: invalid,
        4: not_found,
        5: invalid,
        6: invalid,
        0: invalid,
        7: not_found,
    }
    assert "top_p" in collected.events[1][-1].error.message
    assert collected.text[8] == ANSWER
    assert await call.code() == grpc.StatusCode.OK


async def test_an_id_in_use_is_refused_and_its_generation_goes_on(running: Running) -> None:
    running.engine.running.clear()
    call, collected = running.stub.Session(), Collected()
    await call.write(submit(1))
    await read_until(call, collected, lambda: collected.kinds[1])
    await call.write(submit(1))
    await read_until(call, collected, lambda: collected.ended(0))
    running.engine.running.set()
    await read_until(call, collected, lambda: collected.ended(1))
    assert collected.text[1] == ANSWER
    await call.write(submit(1))
    await read_until(call, collected, lambda: collected.text[1] == 2 * ANSWER)
    call.cancel()


async def test_cancel_ends_one_generation_of_many(running: Running) -> None:
    running.engine.running.clear()
    call, collected = running.stub.Session(), Collected()
    await call.write(submit(1))
    await call.write(submit(2))
    await read_until(call, collected, lambda: collected.kinds[1] and collected.kinds[2])
    await call.write(Request(stream_id=1, cancel=Cancel()))
    await read_until(call, collected, lambda: collected.ended(1))
    finished = collected.events[1][-2].event.output_finished
    assert finished.reason == generation_pb2.FINISH_REASON_CANCELLED
    running.engine.running.set()
    await read_until(call, collected, lambda: collected.ended(2))
    assert collected.text[2] == ANSWER
    call.cancel()


async def test_a_dropped_session_cancels_what_is_attached_to_it_alone(running: Running) -> None:
    running.engine.running.clear()
    call, collected = running.stub.Session(), Collected()
    await call.write(submit(1))
    await call.write(submit(2, detached=True))
    await read_until(call, collected, lambda: collected.kinds[1] and collected.kinds[2])
    detached = collected.events[2][0].event.accepted.request_id
    call.cancel()
    await running.until(lambda: len(running.engine.aborts) == 1 and running.service.core.num_open == 0)
    assert running.engine.aborts[0].request_id == collected.events[1][0].event.accepted.request_id
    running.engine.running.set()
    again, rest = running.stub.Session(), Collected()
    await again.write(Request(stream_id=5, attach=Attach(request_id=detached)))
    await read_until(again, rest, lambda: rest.ended(5))
    await again.write(Request(stream_id=6, attach=Attach(request_id=detached, from_token=3)))
    await read_until(again, rest, lambda: rest.ended(6))
    assert rest.text[5] == ANSWER
    first = next(event.event.delta for event in rest.events[6] if event.event.HasField("delta"))
    assert rest.ids[6] == running.ids(ANSWER)[first.first_token_index :] and first.first_token_index <= 3
    again.cancel()


async def test_log_probabilities_and_conversations(running: Running) -> None:
    messages = [inference_pb2.ChatMessage(role=inference_pb2.ROLE_USER, parts=[inference_pb2.Part(text="hi")])]
    call, collected = running.stub.Session(), Collected()
    await call.write(submit(1, spec=Spec(stop={"max_tokens": 5}), messages=messages))
    await call.write(submit(2, spec=Spec(text="x"), messages=messages))
    await call.done_writing()
    async for message in call:
        collected.take(message)
    assert collected.kinds[1][-1] == "done" and collected.ids[1]
    assert collected.events[2][-1].error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]


async def test_bytes_that_are_no_message_end_the_session(running: Running) -> None:
    call = running.channel.stream_stream("/headrace.v1.InferenceService/Session")()
    await call.write(b"\xff\xff")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call.read()
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert running.service.core.num_open == 0


async def test_a_session_that_never_reads_is_bounded_and_ends_as_too_slow(
    model_path: pathlib.Path, sockets: pathlib.Path
) -> None:
    async with running_service(model_path, sockets, reader_stall_timeout_s=0.5) as running:
        options = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.http2.lookahead_bytes", 1 << 16),
            ("grpc.http2.bdp_probe", 0),
        ]
        async with grpc.aio.insecure_channel(running.address, options=options) as channel:
            call = channel.stream_stream("/headrace.v1.InferenceService/Session")()
            for _ in range(5_000):
                await call.write(Request(stream_id=1).SerializeToString())
            await running.until(lambda: not running.service.core.delivering)
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                while await call.read():
                    pass
        assert ended.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "client too slow" in (ended.value.details() or "")
