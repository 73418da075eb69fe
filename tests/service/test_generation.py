"""Generate, Complete and Chat over a real channel: events, text, ledgers, and how streams end."""

from __future__ import annotations

import asyncio
import pathlib
import time

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2
from tests.service.fake_engine import queue_full
from tests.service.harness import (
    ANSWER,
    Running,
    events_of,
    ids_of,
    kinds_of,
    retry_delay_s,
    running_service,
    text_of,
)
from tests.service.model_folder import BOS, END, EOS, START, write_model_folder
from tests.support.engine_requests import asked

from headrace.v1 import generation_pb2, inference_pb2
from headrace_protos.engine.v1 import engine_pb2

Spec = generation_pb2.GenerationSpec


def generate(running: Running, timeout: float | None = None, **spec: object) -> object:
    return running.stub.Generate(inference_pb2.GenerateRequest(spec=Spec(**{"text": "hello", **spec})), timeout=timeout)


async def test_generate_streams_accepted_started_deltas_finished_done(running: Running) -> None:
    events = await events_of(generate(running))
    assert kinds_of(events) == ["accepted", "started", "delta", "output_finished", "done"]
    assert text_of(events) == ANSWER
    assert ids_of(events) == running.ids(ANSWER)
    assert events[0].accepted.model_revision == running.engine.model.revision
    assert events[0].accepted.prompt_tokens == len(running.ids("hello")) + 1
    assert events[1].started.cached_tokens == 3
    assert events[-2].output_finished.reason == generation_pb2.FINISH_REASON_LENGTH
    assert events[-1].done.usage.output_tokens == len(running.ids(ANSWER))


async def test_each_delta_begins_where_the_one_before_ended_and_its_text_is_that_of_its_ids(running: Running) -> None:
    position = 0
    for event in await events_of(generate(running)):
        if event.WhichOneof("event") == "delta":
            assert event.delta.first_token_index == position
            position += len(event.delta.token_ids)
            text = "".join(content.text for content in event.delta.content)
            assert text == running.tokenizer.decode(list(event.delta.token_ids))
    assert position == len(running.ids(ANSWER))


async def test_the_engine_gets_the_resolved_request(running: Running) -> None:
    await events_of(generate(running, priority=7, cache_salt="salt"))
    (request,) = running.engine.requests.values()
    add, wanted = request.add, asked(request.add)
    assert np.frombuffer(wanted.prompt_token_ids, "<u4").tolist() == [BOS, *running.ids("hello")]
    # The folder's generation_config.json speaks where the caller does not.
    assert wanted.sampling.temperature == 0.5
    assert wanted.sampling.top_p == pytest.approx(0.9)
    assert set(np.frombuffer(wanted.stop.token_ids, "<u4").tolist()) == {EOS, END}
    assert wanted.stop.max_tokens == 512 - len(running.ids("hello")) - 1
    assert (wanted.priority, wanted.cache_salt, wanted.n, add.detached) == (7, b"salt", 1, False)
    assert wanted.num_logprobs == -1
    assert 0 < add.service_ns < 10**9


async def test_n_outputs_are_told_apart(model_path: pathlib.Path, sockets: pathlib.Path) -> None:
    def script(add: engine_pb2.AddRequest, index: int) -> list[int]:
        return [200 + index] * (3 + index)

    async with running_service(model_path, sockets, script) as running:
        events = await events_of(generate(running, n=3))
        assert [ids_of(events, index) for index in range(3)] == [[200] * 3, [201] * 4, [202] * 5]
        whole = await running.stub.Complete(inference_pb2.CompleteRequest(spec=Spec(text="hello", n=3)))
        assert [list(output.token_ids) for output in whole.outputs] == [[200] * 3, [201] * 4, [202] * 5]


async def test_complete_equals_the_stream(running: Running) -> None:
    whole = await running.stub.Complete(inference_pb2.CompleteRequest(spec=Spec(text="hello")))
    assert [content.text for content in whole.outputs[0].content] == [ANSWER]
    assert list(whole.outputs[0].token_ids) == running.ids(ANSWER)
    assert whole.outputs[0].finished.reason == generation_pb2.FINISH_REASON_LENGTH
    assert whole.usage.output_tokens == len(running.ids(ANSWER))
    assert whole.ledger.end_to_end_ns > 0


async def test_logprobs_cover_the_same_tokens_as_the_ids(running: Running) -> None:
    running.engine.logprobs = 2
    for event in await events_of(generate(running, logprobs=2)):
        if event.WhichOneof("event") == "delta":
            delta = event.delta
            assert list(delta.logprobs.sampled) == [-float(token) for token in delta.token_ids]
            assert list(delta.logprobs.top_counts) == [2] * len(delta.token_ids)
            assert list(delta.logprobs.top_token_ids) == [t + top for t in delta.token_ids for top in range(2)]


async def test_special_tokens_have_ids_and_text_only_on_demand(model_path: pathlib.Path, sockets: pathlib.Path) -> None:
    async with running_service(model_path, sockets, lambda add, index: [START, 300, END]) as running:
        word = running.tokenizer.decode([300])
        hidden = await events_of(generate(running))
        shown = await events_of(generate(running, skip_special_tokens=False))
        assert (ids_of(hidden), text_of(hidden)) == ([START, 300, END], word)
        assert text_of(shown) == f"<|start|>{word}<|end|>"
        assert hidden[-2].output_finished.matched_stop.token_id == END


async def test_a_matched_stop_string_is_cut_from_the_text_and_named(
    model_path: pathlib.Path, sockets: pathlib.Path
) -> None:
    async with running_service(model_path, sockets) as running:
        running.engine.hold_tokens = 6
        events = await events_of(generate(running, stop=generation_pb2.StopConditions(strings=[" done"])))
        assert text_of(events) == ANSWER.removesuffix(" done")
        assert ids_of(events) == running.ids(ANSWER)
        assert events[-2].output_finished.matched_stop.text == " done"


async def test_chat_lays_messages_out_by_the_folders_template(running: Running) -> None:
    message = inference_pb2.ChatMessage(
        role=inference_pb2.ROLE_USER, parts=[inference_pb2.Part(text="the "), inference_pb2.Part(text="fox?")]
    )
    events = await events_of(running.stub.Chat(inference_pb2.ChatRequest(messages=[message])))
    assert text_of(events) == ANSWER
    (request,) = running.engine.requests.values()
    prompt = np.frombuffer(asked(request.add).prompt_token_ids, "<u4").tolist()
    assert running.tokenizer.decode(prompt, skip_special_tokens=False) == (
        "<bos><|start|>user\nthe fox?<|end|>\n<|start|>assistant\n"
    )


async def test_chat_continues_the_last_message(running: Running) -> None:
    messages = [
        inference_pb2.ChatMessage(role=role, parts=[inference_pb2.Part(text=text)])
        for role, text in ((inference_pb2.ROLE_USER, "the fox?"), (inference_pb2.ROLE_ASSISTANT, "it jumps "))
    ]
    await events_of(running.stub.Chat(inference_pb2.ChatRequest(messages=messages, continue_last_message=True)))
    (request,) = running.engine.requests.values()
    prompt = np.frombuffer(asked(request.add).prompt_token_ids, "<u4").tolist()
    assert running.tokenizer.decode(prompt, skip_special_tokens=False).endswith("<|start|>assistant\nit jumps ")


async def test_a_template_that_makes_half_of_a_surrogate_pair_fails_on_that_conversation_alone(
    tmp_path: pathlib.Path, sockets: pathlib.Path
) -> None:
    folder = write_model_folder(tmp_path / "halves", template="{{ '%c' % (messages[-1].content | int) }}")
    async with running_service(folder, sockets) as running:

        def asked(number: int) -> inference_pb2.ChatRequest:
            parts = [inference_pb2.Part(text=str(number))]
            return inference_pb2.ChatRequest(
                messages=[inference_pb2.ChatMessage(role=inference_pb2.ROLE_USER, parts=parts)]
            )

        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await events_of(running.stub.Chat(asked(0xD800)))
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "U+D800, half of a surrogate pair" in (refused.value.details() or "")
        session = running.stub.Session()
        for stream_id, number in enumerate((0xDFFF, 65), 1):
            submit = inference_pb2.SessionSubmit(messages=asked(number).messages)
            await session.write(inference_pb2.SessionRequest(stream_id=stream_id, submit=submit))
        await session.done_writing()
        events = [event async for step in session for event in step.events]
        assert [event.error.code for event in events if event.stream_id == 1] == [refused.value.code().value[0]]
        assert events[-1].stream_id == 2 and events[-1].event.HasField("done")


async def test_chat_without_a_template_is_refused(tmp_path: pathlib.Path, sockets: pathlib.Path) -> None:
    folder = write_model_folder(tmp_path / "plain", template=None)
    message = inference_pb2.ChatMessage(role=inference_pb2.ROLE_USER, parts=[inference_pb2.Part(text="x")])
    async with running_service(folder, sockets) as running:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await events_of(running.stub.Chat(inference_pb2.ChatRequest(messages=[message])))
        assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert not (await running.stub.GetModel(inference_pb2.GetModelRequest())).model.has_chat_template


@pytest.mark.parametrize("unary", [False, True])
async def test_the_parts_of_the_ledger_add_up_to_what_the_client_measures(running: Running, unary: bool) -> None:
    # What the service cannot see is the way to the client and back. A busy machine may hold up one
    # call, not all of them.
    unseen_ns = [await _unseen_ns(running, unary)]
    while unseen_ns[-1] >= 50_000_000 and len(unseen_ns) < 50:
        unseen_ns.append(await _unseen_ns(running, unary))
    assert min(unseen_ns) < 50_000_000, unseen_ns


async def _unseen_ns(running: Running, unary: bool) -> int:
    began_ns = time.monotonic_ns()
    if unary:
        ledger = (await running.stub.Complete(inference_pb2.CompleteRequest(spec=Spec(text="hello")))).ledger
    else:
        ledger = (await events_of(generate(running)))[-1].done.ledger
    measured_ns = time.monotonic_ns() - began_ns
    parts = (
        ledger.queued_ns
        + ledger.prefill_ns
        + ledger.decode_ns
        + ledger.preempted_ns
        + ledger.engine_restart_ns
        + ledger.detokenize_and_send_ns
        + ledger.blocked_on_reader_ns
    )
    assert abs(parts - ledger.end_to_end_ns) < 1_000_000
    assert 0 < ledger.ttft_ns < ledger.end_to_end_ns <= measured_ns
    unseen: int = measured_ns - ledger.end_to_end_ns
    return unseen


async def test_a_dropped_call_aborts_its_request(running: Running) -> None:
    running.engine.running.clear()
    call = generate(running)
    await call.read()  # type: ignore[attr-defined]
    call.cancel()  # type: ignore[attr-defined]
    await running.until(lambda: running.engine.aborts)
    assert running.engine.aborts[0].cause == engine_pb2.ABORT_CAUSE_CANCELLED
    await running.until(lambda: not running.service.core.models.default.engine.streams and running.engine.detached)


async def test_a_calls_deadline_reaches_the_engine_and_ends_the_call(running: Running) -> None:
    running.engine.running.clear()
    call = generate(running, timeout=60)
    await call.read()  # type: ignore[attr-defined]
    (request,) = running.engine.requests.values()
    # gRPC rounds a timeout up on its way.
    assert 0 < request.add.remaining_ns <= 61_000_000_000
    call.cancel()  # type: ignore[attr-defined]
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await events_of(generate(running, timeout=0.5))
    assert ended.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await running.until(lambda: not running.service.core.models.default.engine.streams)


async def test_an_output_ended_by_the_calls_deadline_ends_the_call_with_it(running: Running) -> None:
    running.engine.running.clear()
    call = generate(running, timeout=120)
    await call.read()  # type: ignore[attr-defined]
    running.engine.expire(next(iter(running.engine.requests)))
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await events_of(call)
    assert ended.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_time_limit_ends_the_output_and_the_call_is_ok(running: Running) -> None:
    running.engine.running.clear()
    spec = Spec(text="hello")
    spec.time_limit.FromMilliseconds(250)
    call = running.stub.Generate(inference_pb2.GenerateRequest(spec=spec), timeout=120)
    await call.read()
    (request,) = running.engine.requests.values()
    assert request.add.remaining_ns == 250_000_000
    running.engine.expire(request.add.request_id)
    events = await events_of(call)
    assert events[-2].output_finished.reason == generation_pb2.FINISH_REASON_DEADLINE
    assert events[-1].HasField("done")
    assert await call.code() == grpc.StatusCode.OK


async def test_a_call_without_deadline_gets_the_servers_limit(model_path: pathlib.Path, sockets: pathlib.Path) -> None:
    async with running_service(model_path, sockets, default_time_limit_s=7.0) as running:
        await events_of(generate(running))
        (request,) = running.engine.requests.values()
        assert request.add.remaining_ns == 7_000_000_000


async def test_an_output_that_fails_says_so_and_the_stream_ends_ok(running: Running) -> None:
    running.engine.running.clear()
    call = generate(running)
    await call.read()  # type: ignore[attr-defined]
    running.engine.end_with_error(next(iter(running.engine.requests)), "logits were not finite")
    events = await events_of(call)
    finished = events[-2].output_finished
    assert finished.reason == generation_pb2.FINISH_REASON_ERROR
    assert finished.error.message == "logits were not finite"
    assert events[-1].HasField("done")


async def test_an_output_of_a_request_that_can_not_be_met_says_what_to_change(running: Running) -> None:
    running.engine.running.clear()
    call = generate(running)
    await call.read()  # type: ignore[attr-defined]
    running.engine.step()
    running.engine.end_unmet(next(iter(running.engine.requests)), "spec.stop.bad_words", "ban all; leave out one")
    events = await events_of(call)
    finished, detail = events[-2].output_finished, error_details_pb2.BadRequest()
    assert finished.reason == generation_pb2.FINISH_REASON_ERROR
    assert finished.error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert finished.error.message == "spec.stop.bad_words: ban all; leave out one"
    assert finished.error.details[0].Unpack(detail) and detail.field_violations[0].field == "spec.stop.bad_words"


async def test_resumed_is_passed_on(running: Running) -> None:
    running.engine.running.clear()
    call = generate(running)
    await call.read()  # type: ignore[attr-defined]
    running.engine.step()
    running.engine.resume(5_000)
    running.engine.running.set()
    events = await events_of(call)
    assert [event.resumed.pause_ns for event in events if event.HasField("resumed")] == [5_000]
    assert text_of(events) == ANSWER


async def test_a_full_queue_is_resource_exhausted_with_retry_info(running: Running) -> None:
    running.engine.refusal = queue_full(retry_after_s=3)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await events_of(generate(running))
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert retry_delay_s(refused.value) == 3
    assert not running.service.core.models.default.engine.streams


async def test_too_many_open_generations_are_refused_while_health_answers(
    model_path: pathlib.Path, sockets: pathlib.Path
) -> None:
    async with running_service(model_path, sockets, max_open_generations=2) as running:
        running.engine.running.clear()
        calls = [generate(running) for _ in range(2)]
        await asyncio.gather(*(call.read() for call in calls))  # type: ignore[attr-defined]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await events_of(generate(running))
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert retry_delay_s(refused.value) == 1
        running.engine.running.set()
        assert [text_of(await events_of(call)) for call in calls] == [ANSWER, ANSWER]


async def test_seeds_are_drawn_only_where_the_caller_gave_none(running: Running) -> None:
    for seed in (None, None, 0, 5):
        sampling = generation_pb2.SamplingParameters(seed=seed)
        await events_of(generate(running, sampling=sampling))
    seeds = [asked(request.add).sampling.seed for request in running.engine.requests.values()]
    assert seeds[2:] == [0, 5]
    assert seeds[0] != seeds[1]


async def test_bad_words_are_encoded_with_and_without_a_leading_space(running: Running) -> None:
    await events_of(generate(running, stop=generation_pb2.StopConditions(bad_words=["fox"])))
    (request,) = running.engine.requests.values()
    sequences = [np.frombuffer(word, "<u4").tolist() for word in asked(request.add).sampling.bad_words]
    assert sorted(sequences) == sorted([running.ids("fox"), running.ids(" fox")])


async def test_a_lost_engine_ends_streams_unavailable_and_the_service_recovers(running: Running) -> None:
    running.engine.running.clear()
    call = generate(running)
    await call.read()  # type: ignore[attr-defined]
    address = running.engine.address
    await running.engine.stop()
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await events_of(call)
    assert ended.value.code() == grpc.StatusCode.UNAVAILABLE
    assert retry_delay_s(ended.value) is not None
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await events_of(generate(running))
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    running.engine.running.set()
    await running.engine.start(address)
    await running.until(lambda: running.service.core.serving)
    assert text_of(await events_of(generate(running))) == ANSWER
