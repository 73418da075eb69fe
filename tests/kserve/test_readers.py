"""Readers of KServe streams that do not read: what they cost, and that nobody else pays."""

from __future__ import annotations

import asyncio
import pathlib
import time

import grpc
import pytest
from tests.kserve.wire import Wire, strings_of, text
from tests.service.harness import ANSWER, running_service
from tests.service.streams.test_readers import _SMALL_WINDOW, Flood


async def test_a_reader_that_never_reads_ends_as_too_slow_and_frees_its_requests(
    model_path: pathlib.Path, sockets: pathlib.Path
) -> None:
    limits = {"reader_cap_bytes": 4096, "reader_timeout_s": 0.5}
    async with running_service(model_path, sockets, **limits) as running:
        running.engine.running.clear()
        async with grpc.aio.insecure_channel(running.address, options=_SMALL_WINDOW) as channel:
            call = Wire(channel).ModelStreamInfer()
            for index in range(3):
                await call.write(text(id=str(index), stream=True))
            await running.until(lambda: len(running.engine.requests) == 3)
            flood, end_s = Flood(running), time.monotonic() + 60
            while running.service.core.delivering:
                assert time.monotonic() < end_s, "a reader that reads nothing goes on"
                flood.send(2000)
                await asyncio.sleep(0.02)
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                while await call.read() is not grpc.aio.EOF:
                    pass
            assert ended.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "client too slow" in (ended.value.details() or "")
        await running.until(lambda: running.service.core.num_open == 0)
        await running.until(lambda: len(running.engine.aborts) == 3)
        running.engine.running.set()
        answer = await Wire(running.channel).ModelInfer(text(exclude_input_in_output=True))
        assert strings_of(answer) == [ANSWER]


async def test_what_waits_for_a_reader_comes_in_fewer_responses(
    model_path: pathlib.Path, sockets: pathlib.Path
) -> None:
    async with running_service(model_path, sockets) as running:
        running.engine.running.clear()
        wire = Wire(running.channel)
        call = wire.ModelStreamInfer()
        await call.write(text(stream=True, return_num_output_tokens=True))
        await running.until(lambda: len(running.engine.requests) == 1)
        for _ in range(200):
            running.engine.step()
        await call.done_writing()
        responses = [message.infer_response async for message in call]
        assert "".join(strings_of(response)[0] for response in responses) == ANSWER
        assert len(responses) < len(running.ids(ANSWER))
