"""ModelStreamInfer and what is larger than a message.

Several responses where that is possible, else `error_message` for that request alone.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio
from tests.kserve.conformance_models import all_models
from tests.kserve.wire import Wire, is_final, raw_strings, request, stream, strings_of, text
from tests.service.harness import Running, running_service
from tests.service.model_folder import add_token, write_model_folder
from tests.support import engine_requests

from headrace_protos.inference import grpc_service_pb2 as pb

LIMIT = 1 << 16
LONG = [200] * 200
# A number of tokens that is answered by one whose text no message holds.
HUGE = 7


@pytest_asyncio.fixture
async def limited(tmp_path: pathlib.Path, sockets: pathlib.Path) -> AsyncIterator[Running]:
    """A service whose messages have 64 KiB.

    Its engine answers with 200 tokens, and where `HUGE` are asked for with one of 70,000 bytes.
    """
    folder = write_model_folder(tmp_path / "tiny")
    huge = add_token(folder, "x" * 70_000)
    async with running_service(
        folder,
        sockets,
        lambda add, index: [huge] if engine_requests.asked(add).stop.max_tokens == HUGE else LONG,
        max_message_bytes=LIMIT,
        conformance_models=all_models.__name__,
    ) as running:
        running.engine.logprobs = 20
        yield running


@pytest.fixture
def wire(limited: Running) -> Wire:
    return Wire(limited.channel)


def asked(max_tokens: int, **sampling: object) -> str:
    return json.dumps({"max_tokens": max_tokens, "ignore_eos": True, **sampling})


def identity(num_bytes: int, id: str) -> pb.ModelInferRequest:
    """A request to echo so many bytes."""
    message = request("simple_identity", id)
    message.inputs.add(name="INPUT0", datatype="BYTES", shape=[1, 1])
    message.raw_input_contents.append(raw_strings(b"x" * num_bytes))
    return message


def reported(messages: list[pb.ModelStreamInferResponse]) -> dict[str, str]:
    """The error of each request that failed."""
    return {message.infer_response.id: message.error_message for message in messages if message.error_message}


async def test_a_response_to_a_reader_that_was_behind_is_cut_into_some_that_fit(limited: Running, wire: Wire) -> None:
    # All but the first token of 16 outputs come at once: 5 MB of log probabilities.
    limited.engine.hold_tokens = len(LONG) - 1
    sampling = asked(len(LONG), n=16, logprobs=20)
    messages = await stream(
        wire, text(id="many", stream=True, sampling=sampling, return_logprobs=True, return_finish_reason=True)
    )
    assert reported(messages) == {}
    assert max(message.ByteSize() for message in messages) <= LIMIT
    responses = [message.infer_response for message in messages]
    assert [is_final(response) for response in responses] == [False] * (len(responses) - 1) + [True]
    columns = [strings_of(response, "logprobs") for response in responses]
    texts = [strings_of(response) for response in responses]
    piece = limited.tokenizer.decode([200])
    for output in range(16):
        assert sum(len(json.loads(column[output])) for column in columns) == len(LONG)
        assert "".join(row[output] for row in texts) == piece * len(LONG)
    assert strings_of(responses[-1], "finish_reason") == ["length"] * 16


@pytest.mark.parametrize("flags", [{}, {"return_finish_reason": True}, {"stream": False}])
@pytest.mark.parametrize("n", [1, 2])
async def test_a_response_that_no_message_holds_is_its_requests_failure_and_the_stream_goes_on(
    limited: Running, wire: Wire, flags: dict[str, bool], n: int
) -> None:
    huge = text(id="huge", sampling=asked(HUGE, n=n), **{"stream": True, **flags})
    call = wire.ModelStreamInfer()
    await call.write(huge)
    first = await call.read()
    assert first.infer_response.id == "huge" and "bytes, a message at most 65536" in first.error_message
    await limited.until(lambda: limited.service.core.num_open == 0)
    await call.write(text(id="next", stream=True))
    await call.done_writing()
    rest = []
    while isinstance(message := await call.read(), pb.ModelStreamInferResponse):
        rest.append(message)
    assert reported(rest) == {} and is_final(rest[-1].infer_response)
    (stats,) = (await wire.ModelStatistics(pb.ModelStatisticsRequest(name="vllm_model"))).model_stats
    assert (stats.inference_stats.fail.count, stats.inference_stats.success.count) == (1, 1)


async def test_a_mistake_about_one_generation_is_its_failure_and_the_stream_goes_on(
    limited: Running, wire: Wire
) -> None:
    script = limited.engine.script
    # An id that no vocabulary has, as no engine should send it.
    limited.engine.script = lambda add, index: (
        [1 << 20] if engine_requests.asked(add).stop.max_tokens == HUGE else script(add, index)
    )
    bad, good = text(id="bad", stream=True, sampling=asked(HUGE)), text(id="good", stream=True)
    answers = await stream(wire, bad, good)
    assert [*reported(answers)] == ["bad"] and reported(answers)["bad"].startswith("internal error ")
    assert is_final(answers[-1].infer_response) and answers[-1].infer_response.id == "good"


async def test_it_is_the_status_of_the_call_for_those_who_asked(wire: Wire) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stream(wire, text(stream=True, sampling=asked(HUGE)), metadata=(("triton_grpc_error", "true"),))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "a message at most 65536" in (refused.value.details() or "")


async def test_the_limit_of_a_stream_counts_all_of_its_message(wire: Wire) -> None:
    """Each of many echoes one byte apart in size is answered, whole or by an error.

    The stream goes on behind them all.
    """
    # The largest that may be asked for; its answer is some bytes larger.
    most = max(size for size in range(LIMIT - 200, LIMIT) if identity(size, str(size)).ByteSize() <= LIMIT)
    sizes = range(most - 30, most + 1)
    answers = await stream(wire, *(identity(size, str(size)) for size in sizes), identity(1, "last"))
    assert [answer.infer_response.id for answer in answers] == [*map(str, sizes), "last"]
    fitting = [not answer.error_message for answer in answers[:-1]]
    assert fitting == sorted(fitting, reverse=True) and 0 < sum(fitting) < len(fitting)
    largest = answers[sum(fitting) - 1]
    assert largest.ByteSize() == LIMIT and not answers[-1].error_message
    size = sizes[sum(fitting) - 1]
    # The answer to ModelInfer has no frame around it: some bytes more are an answer there.
    assert strings_of(await wire.ModelInfer(identity(size, str(size))), "OUTPUT0") == ["x" * size]
    with pytest.raises(grpc.aio.AioRpcError, match="a message at most 65536") as refused:
        await wire.ModelInfer(identity(most, str(most)))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("streamed", [False, True])
async def test_prompts_that_no_answer_could_repeat_are_not_computed(
    limited: Running, wire: Wire, streamed: bool
) -> None:
    message = text("the " * 450, id="echo", sampling=asked(4, n=16))
    # 28,800 bytes of prompts fit; 40 times as many would not.
    assert len(strings_of(await wire.ModelInfer(message))) == 16
    limited.engine.requests.clear()
    large = text("x" * 5000, id="echo", sampling=asked(4, n=16))
    if streamed:
        (answer,) = await stream(wire, large)
        assert "the prompt before each of 16 outputs has 80000 bytes" in answer.error_message
    else:
        with pytest.raises(grpc.aio.AioRpcError, match="the prompt before each of 16 outputs has 80000 bytes"):
            await wire.ModelInfer(large)
    assert not limited.engine.requests
