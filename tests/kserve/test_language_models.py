"""Generations by both tensor conventions.

What the engine is asked for, and what comes back, at once and as a stream.
"""

from __future__ import annotations

import asyncio
import json

import grpc
import numpy as np
import pytest
from tests.kserve.wire import ENOUGH, Wire, add, is_final, numbers_of, raw_strings, request, stream, strings_of, text
from tests.service.harness import ANSWER, Running
from tests.service.model_folder import EOS
from tests.support import engine_requests

from headrace_protos.engine.v1 import engine_pb2
from headrace_protos.inference import grpc_service_pb2 as pb
from headrace_request.beam_search import BeamSearch
from headrace_request.request import Request
from headrace_request.selection_rules import NO_SAMPLING

ONE = [1, 1]


def triton_llm(
    prompt: str = "hello", max_tokens: int = ENOUGH, model: str = "ensemble", **flags: bool
) -> pb.ModelInferRequest:
    message = request(model)
    add(message, "text_input", "BYTES", ONE, raw_strings(prompt.encode()))
    add(message, "max_tokens", "INT32", ONE, np.int32(max_tokens).tobytes())
    for name, value in flags.items():
        add(message, name, "BOOL", ONE, bytes([value]))
    return message


def added(running: Running) -> engine_pb2.AddRequest:
    (engine_request,) = running.engine.requests.values()
    return engine_request.add


def asked(running: Running) -> Request:
    return engine_requests.asked(added(running))


def responses_of(messages: list[pb.ModelStreamInferResponse]) -> list[pb.ModelInferResponse]:
    assert not any(message.error_message for message in messages), messages
    return [message.infer_response for message in messages]


@pytest.mark.parametrize("model", ["vllm_model", "tiny"])
async def test_a_stream_brings_deltas_and_marks_the_last(running: Running, wire: Wire, model: str) -> None:
    responses = responses_of(await stream(wire, text(model=model, id="r1", stream=True)))
    assert "".join(strings_of(response)[0] for response in responses) == ANSWER
    assert len(responses) > 1
    assert [is_final(response) for response in responses] == [False] * (len(responses) - 1) + [True]
    for response in responses:
        assert (response.id, response.model_name, response.model_version) == ("r1", model, "1")
        assert [(o.name, o.datatype, list(o.shape)) for o in response.outputs] == [("text_output", "BYTES", [1])]


async def test_one_answer_begins_with_the_prompt_unless_asked_otherwise(wire: Wire) -> None:
    whole = await wire.ModelInfer(text("hello "))
    assert strings_of(whole) == ["hello " + ANSWER] and is_final(whole)
    (streamed,) = responses_of(await stream(wire, text("hello ", exclude_input_in_output=True)))
    assert strings_of(streamed) == [ANSWER] and is_final(streamed)


async def test_a_stream_with_the_prompt_is_refused_as_there(wire: Wire) -> None:
    (refused,) = await stream(wire, text(id="x", stream=True, exclude_input_in_output=False))
    assert refused.error_message == (
        "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."
    )
    assert refused.infer_response == pb.ModelInferResponse(id="x")


async def test_one_answer_cannot_be_a_stream(wire: Wire) -> None:
    for message in (text(stream=True), triton_llm(stream=True)):
        with pytest.raises(
            grpc.aio.AioRpcError, match="ModelInfer RPC doesn't support models with decoupled"
        ) as refusal:
            await wire.ModelInfer(message)
        assert refusal.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_sampling_parameters_may_all_be_strings(running: Running, wire: Wire) -> None:
    sampling = {
        "temperature": "0.5", "top_p": "0.25", "top_k": "7", "min_p": 0.5, "seed": "9", "max_tokens": "12",
        "min_tokens": 2,
        "repetition_penalty": 1.5, "presence_penalty": "-1", "frequency_penalty": 1, "stop": ["a", "b"],
        "stop_token_ids": [5],
        "ignore_eos": "true", "logit_bias": {"7": "-3.5"}, "skip_special_tokens": False, "best_of": 1,
        "use_beam_search": "false",
        "early_stopping": False, "length_penalty": "1.0", "logprobs": None,
    }  # fmt: skip
    await wire.ModelInfer(text(sampling=json.dumps(sampling)))
    add_request = asked(running)
    found, stop = add_request.sampling, add_request.stop
    assert (found.temperature, found.top_p, found.top_k, found.min_p, found.seed) == (0.5, 0.25, 7, 0.5, 9)
    assert (found.repetition_penalty, found.presence_penalty, found.frequency_penalty) == (1.5, -1, 1)
    assert np.frombuffer(found.logit_bias_ids, "<u4").tolist() == [7]
    assert (stop.max_tokens, stop.min_tokens, list(stop.strings)) == (12, 2, [b"a", b"b"])
    assert np.frombuffer(stop.token_ids, "<u4").tolist() == [5]


async def test_best_of_as_many_as_are_returned_asks_for_nothing(running: Running, wire: Wire) -> None:
    response = await wire.ModelInfer(text(sampling='{"best_of": 2, "n": 2}'))
    assert len(strings_of(response)) == 2 and asked(running).n == 2 and not asked(running).selects


@pytest.mark.parametrize(
    ("sent", "n", "best_of", "search"),
    [
        (
            {
                "use_beam_search": True,
                "best_of": 3,
                "length_penalty": "0.5",
                "early_stopping": "never",
                "temperature": 0,
            },
            1,
            0,
            BeamSearch(3, 0.5, "never"),
        ),
        ({"use_beam_search": "true", "n": 2, "early_stopping": True, "top_k": -1}, 2, 0, BeamSearch(2, 1.0, "full")),
        ({"best_of": 4, "n": 2, "length_penalty": 1}, 2, 4, None),
    ],
)
async def test_a_search_goes_by_vllms_names(
    running: Running, wire: Wire, sent: dict[str, object], n: int, best_of: int, search: BeamSearch | None
) -> None:
    """It is as wide as best_of, or else n."""
    await wire.ModelInfer(text(sampling=json.dumps(sent)))
    found = asked(running)
    assert (found.n, found.best_of, found.beam_search) == (n, best_of, search)
    assert search is None or found.sampling == NO_SAMPLING


async def test_without_a_number_of_tokens_there_are_sixteen(running: Running, wire: Wire) -> None:
    await wire.ModelInfer(text(sampling=None))
    assert asked(running).stop.max_tokens == 16


async def test_parameters_of_the_request_count_and_the_tensor_before_them(running: Running, wire: Wire) -> None:
    message = text(sampling='{"max_tokens": 3}')
    message.parameters["max_tokens"].int64_param = 5
    message.parameters["temperature"].string_param = "0"
    message.parameters["priority"].uint64_param = 1
    await wire.ModelInfer(message)
    add_request = asked(running)
    assert add_request.stop.max_tokens == 3 and add_request.sampling.temperature == 0
    assert add_request.priority == 100


async def test_additional_outputs_come_when_asked_for(running: Running, wire: Wire) -> None:
    running.engine.logprobs = 2
    message = text(
        sampling='{"logprobs": 2, "max_tokens": 64}', stream=True, return_finish_reason=True,
        return_cumulative_logprob=True,
        return_logprobs=True, return_num_input_tokens=True, return_num_output_tokens=True,
    )  # fmt: skip
    responses = responses_of(await stream(wire, message))
    reasons = [strings_of(response, "finish_reason")[0] for response in responses]
    assert reasons == ["None"] * (len(responses) - 1) + ["length"]
    assert sum(numbers_of(response, "num_output_tokens")[0] for response in responses) == len(running.ids(ANSWER))
    assert {numbers_of(response, "num_input_tokens")[0] for response in responses} == {len(running.ids("hello")) + 1}
    columns = [json.loads(strings_of(response, "logprobs")[0]) for response in responses]
    assert [len(column) for column in columns] == [numbers_of(r, "num_output_tokens")[0] for r in responses]
    entries = [entry for column in columns for entry in column]
    assert all(
        isinstance(value["logprob"], float) and set(value) == {"logprob", "rank", "decoded_token"}
        for entry in entries
        for value in entry.values()
    )
    assert all(str(token) in entry for token, entry in zip(running.ids(ANSWER), entries, strict=True))
    cumulative = [numbers_of(response, "cumulative_logprob")[0] for response in responses]
    assert cumulative == sorted(cumulative, reverse=True)


async def test_outputs_not_asked_for_do_not_come(wire: Wire) -> None:
    message = text(return_num_input_tokens=True, return_logprobs=True)
    message.outputs.add(name="num_input_tokens")
    response = await wire.ModelInfer(message)
    assert [output.name for output in response.outputs] == ["num_input_tokens"]
    response = await wire.ModelInfer(text(return_logprobs=True))
    assert strings_of(response, "logprobs") == ["null"]


@pytest.mark.parametrize("wanted", [None, True, False])
async def test_an_output_that_is_listed_comes_unless_its_input_says_no(wire: Wire, wanted: bool | None) -> None:
    flags = {} if wanted is None else {"return_finish_reason": wanted}
    message, other = text(**flags), triton_llm(**({} if wanted is None else {"return_log_probs": wanted}))
    for each, names in ((message, ["text_output", "finish_reason"]), (other, ["text_output", "cum_log_probs"])):
        for name in names:
            each.outputs.add(name=name)
        expected = names if wanted is not False else ["text_output"]
        assert [output.name for output in (await wire.ModelInfer(each)).outputs] == expected


async def test_several_outputs_come_side_by_side(wire: Wire) -> None:
    response = await wire.ModelInfer(text(sampling='{"n": 3, "max_tokens": 64}', exclude_input_in_output=True))
    assert strings_of(response) == [ANSWER] * 3 and list(response.outputs[0].shape) == [3]
    responses = responses_of(await stream(wire, text(sampling='{"n": 2, "max_tokens": 64}', stream=True)))
    assert ["".join(parts) for parts in zip(*map(strings_of, responses), strict=True)] == [ANSWER] * 2


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
async def test_the_other_convention_has_a_batch_dimension(running: Running, wire: Wire, model: str) -> None:
    responses = responses_of(await stream(wire, triton_llm(model=model, stream=True)))
    assert "".join(strings_of(response)[0] for response in responses) == ANSWER
    assert list(responses[0].outputs[0].shape) == ONE and is_final(responses[-1])
    assert asked(running).sampling.temperature == 0


async def test_the_other_conventions_words_reach_the_engine(running: Running, wire: Wire) -> None:
    message = triton_llm("hello ", return_log_probs=True, return_num_output_tokens=True)
    for name, value in (("temperature", 0.5), ("top_p", 0.25), ("frequency_penalty", 1)):
        add(message, name, "FP32", ONE, np.float32(value).tobytes())
    for name, number in (("top_k", 3), ("min_length", 2), ("end_id", EOS), ("pad_id", 0), ("beam_width", 1)):
        add(message, name, "INT32", ONE, np.int32(number).tobytes())
    add(message, "seed", "UINT64", ONE, np.uint64(1 << 63).tobytes())
    add(message, "stop_words", "BYTES", [1, 2], raw_strings(b"", b"stop"))
    response = await wire.ModelInfer(message)
    add_request = asked(running)
    found, stop = add_request.sampling, add_request.stop
    assert (found.temperature, found.top_p, found.top_k, found.seed) == (0.5, 0.25, 3, 1 << 63)
    assert (stop.max_tokens, stop.min_tokens, list(stop.strings)) == (ENOUGH, 2, [b"stop"])
    assert np.frombuffer(stop.token_ids, "<u4").tolist() == [EOS]
    # The fake engine ends a request that has a stop string as if it had matched.
    assert strings_of(response) == ["hello " + ANSWER.removesuffix("done")]
    num_tokens = len(running.ids(ANSWER))
    assert numbers_of(response, "num_output_tokens") == [num_tokens]
    assert len(numbers_of(response, "output_log_probs")) == num_tokens


async def test_the_statistics_are_the_clients_own_ledger(wire: Wire) -> None:
    num_responses = len(await stream(wire, text(stream=True)))
    await wire.ModelInfer(text())
    with pytest.raises(grpc.aio.AioRpcError):
        await wire.ModelInfer(text(sampling="{"))
    statistics = await wire.ModelStatistics(pb.ModelStatisticsRequest(name="vllm_model"))
    (stats,) = statistics.model_stats
    assert (stats.inference_count, stats.execution_count) == (2, 2)
    assert (stats.inference_stats.success.count, stats.inference_stats.fail.count) == (2, 1)
    assert stats.inference_stats.queue.count == stats.inference_stats.compute_infer.count == 2
    parts = stats.inference_stats
    inner = parts.queue.ns + parts.compute_input.ns + parts.compute_infer.ns + parts.compute_output.ns
    assert abs(inner - parts.success.ns) < 0.05 * parts.success.ns + 2_000_000
    assert stats.response_stats["0"].success.count == 2 and stats.response_stats["0"].fail.count == 1
    assert len(stats.response_stats) == num_responses
    (other,) = (await wire.ModelStatistics(pb.ModelStatisticsRequest(name="tiny"))).model_stats
    assert other.inference_count == 0


async def test_a_dropped_call_ends_the_generation_and_counts_as_cancelled(running: Running, wire: Wire) -> None:
    running.engine.running.clear()
    call = wire.ModelStreamInfer()
    await call.write(text(stream=True, id="a"))
    await running.until(lambda: len(running.engine.requests) == 1)
    call.cancel()
    await running.until(lambda: len(running.engine.aborts) == 1)
    await running.until(lambda: running.service.core.num_open == 0)
    (stats,) = (await wire.ModelStatistics(pb.ModelStatisticsRequest(name="vllm_model"))).model_stats
    assert stats.inference_stats.fail.count == 1 and stats.response_stats["0"].cancel.count == 1


@pytest.mark.parametrize("num_tokens", [0, 2])
async def test_a_request_that_can_not_be_met_is_refused_in_the_callers_words(
    running: Running, wire: Wire, num_tokens: int
) -> None:
    async def end() -> None:
        await running.until(lambda: len(running.engine.requests) > num_before)
        for _ in range(num_tokens):
            running.engine.step()
        running.engine.end_unmet(list(running.engine.requests)[-1], "spec.stop.bad_words", "ban all")

    rule = "sampling_parameters.bad_words: ban all"
    running.engine.running.clear()
    num_before, ending = 0, asyncio.create_task(end())
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await wire.ModelInfer(text())
    await ending
    assert (refused.value.code(), refused.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, rule)
    num_before, ending = 1, asyncio.create_task(end())
    *_, last = await stream(wire, text(stream=True))
    await ending
    assert last.error_message == rule


async def test_a_timeout_of_the_request_is_its_end(running: Running, wire: Wire) -> None:
    message = text(stream=True)
    message.parameters["timeout"].int64_param = 250_000
    task = asyncio.create_task(stream(wire, message))
    await task
    assert added(running).remaining_ns == pytest.approx(250_000_000, rel=0.5)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_call_that_is_given_up_frees_what_it_asked_for(running: Running, wire: Wire, streamed: bool) -> None:
    running.engine.running.clear()
    if streamed:
        call = wire.ModelStreamInfer()
        await call.write(text())
    else:
        call = wire.ModelInfer(text())
    await running.until(lambda: len(running.engine.requests) == 1)
    call.cancel()
    await running.until(lambda: len(running.engine.aborts) == 1)
    await running.until(lambda: running.service.core.num_open == 0)


async def test_a_calls_deadline_ends_its_generation(running: Running, wire: Wire) -> None:
    running.engine.running.clear()
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await wire.ModelInfer(text(), timeout=0.3)
    assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await running.until(lambda: len(running.engine.aborts) == 1)
    assert 0 < added(running).remaining_ns <= 300_000_000
