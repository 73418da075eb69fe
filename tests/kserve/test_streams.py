"""Many requests on one stream.

What interleaves, what keeps its order, and how failures are reported.
"""

from __future__ import annotations

import asyncio

import grpc
import numpy as np
import pytest
from tests.kserve.wire import Wire, add, is_final, numbers_of, request, simple, stream, strings_of, text
from tests.service.fake_engine import queue_full
from tests.service.harness import ANSWER, Running

from headrace_protos.inference import grpc_service_pb2 as pb


def repeat(count: int, delay_ms: int = 0, id: str = "", empty_final: bool = False) -> pb.ModelInferRequest:
    message = request("repeat_int32", id)
    add(message, "IN", "INT32", [count], np.arange(100, 100 + count, dtype="<i4").tobytes())
    add(message, "DELAY", "UINT32", [count], np.full(count, delay_ms, "<u4").tobytes())
    add(message, "WAIT", "UINT32", [1], np.uint32(0).tobytes())
    if empty_final:
        message.parameters["triton_enable_empty_final_response"].bool_param = True
    return message


async def test_generations_interleave_and_are_told_apart_by_id(running: Running, wire: Wire) -> None:
    ids = [f"r{index}" for index in range(20)]
    messages = await stream(wire, *(text(id=id, stream=True) for id in ids))
    order = [message.infer_response.id for message in messages]
    assert order != sorted(order, key=ids.index)
    for id in ids:
        mine = [message.infer_response for message in messages if message.infer_response.id == id]
        assert "".join(strings_of(response)[0] for response in mine) == ANSWER
        assert [is_final(response) for response in mine] == [False] * (len(mine) - 1) + [True]


async def test_single_responses_keep_the_order_of_their_requests(wire: Wire) -> None:
    slow = request("custom_identity_int32", "slow")
    add(slow, "INPUT0", "INT32", [1, 1], np.int32(1).tobytes())
    bad = simple("bad")
    del bad.inputs[0]
    call = wire.ModelStreamInfer()
    for message in (simple("a"), bad, simple("b"), simple("c")):
        await call.write(message)
    await call.done_writing()
    assert [message.infer_response.id async for message in call] == ["a", "bad", "b", "c"]


async def test_a_decoupled_request_holds_nobody_up(wire: Wire) -> None:
    call = wire.ModelStreamInfer()
    await call.write(repeat(1, delay_ms=500, id="slow"))
    await call.write(simple("quick"))
    await call.done_writing()
    assert [message.infer_response.id async for message in call] == ["quick", "slow"]


async def test_decoupled_responses_say_which_is_the_last(wire: Wire) -> None:
    messages = await stream(wire, repeat(3, id="x", empty_final=True))
    assert [numbers_of(message.infer_response, "OUT") for message in messages] == [[100], [101], [102]]
    assert [is_final(message.infer_response) for message in messages] == [False, False, True]


async def test_no_response_is_reported_only_to_those_who_asked(wire: Wire) -> None:
    assert await stream(wire, repeat(0)) == []
    (message,) = await stream(wire, repeat(0, id="x", empty_final=True))
    assert is_final(message.infer_response) and not message.infer_response.outputs
    assert message.infer_response.id == "x"
    (stats,) = (await wire.ModelStatistics(pb.ModelStatisticsRequest(name="repeat_int32"))).model_stats
    assert stats.response_stats["0"].empty_response.count == 1 and stats.inference_stats.success.count == 2


async def test_a_failed_request_is_answered_and_the_stream_goes_on(wire: Wire) -> None:
    messages = await stream(
        wire, text(b"\xff\xfe", id="bad", stream=True), text(id="unknown", model="nope"), simple("good")
    )
    reported = {message.infer_response.id: message.error_message for message in messages}
    assert reported["good"] == ""
    assert reported["bad"] == "text_input: must be UTF-8"
    assert "Request for unknown model: 'nope' is not found" in reported["unknown"]
    for message in messages:
        if message.error_message:
            assert message.infer_response == pb.ModelInferResponse(id=message.infer_response.id)


async def test_a_failed_request_is_answered_with_its_whole_id(wire: Wire) -> None:
    longest = "i" * 1024
    (answer,) = await stream(wire, request("nope", longest))
    assert answer.error_message and answer.infer_response.id == longest


async def test_a_failed_request_is_a_status_for_those_who_asked(wire: Wire) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await stream(wire, request("nope", "x"), metadata=(("triton_grpc_error", "true"),))
    assert failure.value.code() is grpc.StatusCode.NOT_FOUND
    assert "Request for unknown model: 'nope'" in (failure.value.details() or "")


async def test_the_engines_refusal_is_reported(running: Running, wire: Wire) -> None:
    running.engine.refusal = queue_full(3)
    (message,) = await stream(wire, text(stream=True, id="x"))
    assert "the queue is full" in message.error_message
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await wire.ModelInfer(text())
    assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_live_id_is_not_used_twice(running: Running, wire: Wire) -> None:
    running.engine.running.clear()
    call = wire.ModelStreamInfer()
    await call.write(text(id="same", stream=True))
    await call.write(text(id="same", stream=True))
    refused = await anext(aiter(call))
    assert refused.error_message == "id: 'same' names a live request"
    running.engine.running.set()
    await call.done_writing()
    assert "".join([strings_of(m.infer_response)[0] async for m in call]) == ANSWER
    # The id is free again once its request has ended.
    assert len(await stream(wire, text(id="same"), simple())) == 2


async def test_requests_without_id_may_run_together(wire: Wire) -> None:
    messages = await stream(wire, simple(), simple(), simple())
    assert [message.infer_response.id for message in messages] == ["", "", ""]


async def test_bytes_that_are_no_request_end_the_stream(wire: Wire) -> None:
    call = wire.ModelStreamInfer()
    await call.write(b"\xff\xff\xff")
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call.read()
    assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_engines_end_fails_requests_and_not_the_stream(running: Running, wire: Wire) -> None:
    running.engine.running.clear()
    call = wire.ModelStreamInfer()
    await call.write(text(id="r", stream=True))
    await running.until(lambda: len(running.engine.requests) == 1)
    await running.engine.stop()
    message = await call.read()
    assert message.infer_response.id == "r" and "engine" in message.error_message
    await call.write(simple("after"))
    assert (await call.read()).infer_response.id == "after"
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF


async def test_shutting_down_ends_streams_that_run(running: Running, wire: Wire) -> None:
    running.engine.running.clear()
    call = wire.ModelStreamInfer()
    await call.write(text(id="r", stream=True))
    await running.until(lambda: len(running.engine.requests) == 1)
    await asyncio.gather(running.service.core.drain(0.05))
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call.read()
    assert failure.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_an_empty_stream_ends_well(wire: Wire) -> None:
    assert await stream(wire) == []
