"""Streams of a real server.

Readers come late or leave; requests have Cancel, several outputs and stop strings; reflection lists
the services.
"""

from __future__ import annotations

import concurrent.futures

import grpc
import pytest
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from tests.support.processes import wait_until
from tests.support.rpc import CALL_TIMEOUT_S, Transcript, connected, generate, greedy, health, read
from tests.support.running_server import RunningServer

from headrace.v1 import generation_pb2, inference_pb2, inference_pb2_grpc

STORY = "Once upon a time"
LONG = 160


def subscribe(address: str, request_id: str, from_token: int = 0) -> Transcript:
    with connected(address) as stub:
        request = inference_pb2.SubscribeRequest(request_id=request_id, from_token=from_token)
        return read(stub.Subscribe(request, timeout=CALL_TIMEOUT_S))


def submit(stub: inference_pb2_grpc.InferenceServiceStub, max_tokens: int = LONG) -> str:
    request = inference_pb2.SubmitRequest(spec=greedy(STORY, max_tokens))
    return str(stub.Submit(request, timeout=CALL_TIMEOUT_S).request_id)


def listed(stub: inference_pb2_grpc.InferenceServiceStub, request_id: str) -> inference_pb2.RequestSummary:
    rows = stub.ListRequests(inference_pb2.ListRequestsRequest(), timeout=CALL_TIMEOUT_S).requests
    return next(row for row in rows if row.request_id == request_id)


def test_readers_from_the_start_and_from_the_middle_get_the_same_stream(server: RunningServer) -> None:
    with connected(server.address) as stub, concurrent.futures.ThreadPoolExecutor() as pool:
        request_id = submit(stub)
        whole = pool.submit(subscribe, server.address, request_id)
        wait_until(lambda: listed(stub, request_id).output_tokens >= LONG // 2, 120, "half of the tokens")
        middle = pool.submit(subscribe, server.address, request_id, LONG // 2).result()
        late = subscribe(server.address, request_id)
    assert len(whole.result().tokens[0]) == LONG
    assert middle.first_token() == LONG // 2
    assert middle.tokens[0] == whole.result().tokens[0][LONG // 2 :]
    assert whole.result().texts[0].endswith(middle.texts[0])
    assert (late.tokens, late.texts) == (whole.result().tokens, whole.result().texts)
    assert whole.result().tokens[0] == generate(server.address, greedy(STORY, LONG)).tokens[0]


def test_a_reader_that_leaves_does_not_end_a_submitted_generation(server: RunningServer) -> None:
    with connected(server.address) as stub:
        request_id = submit(stub)
        reader = stub.Subscribe(inference_pb2.SubscribeRequest(request_id=request_id), timeout=CALL_TIMEOUT_S)
        next(response for response in reader if response.event.HasField("delta"))
        reader.cancel()
    again = subscribe(server.address, request_id)
    assert again.reason() == generation_pb2.FINISH_REASON_LENGTH
    assert len(again.tokens[0]) == LONG


def test_cancel_ends_a_submitted_generation_for_its_readers(server: RunningServer) -> None:
    with connected(server.address) as stub:
        request_id = submit(stub, max_tokens=1500)
        reader = stub.Subscribe(inference_pb2.SubscribeRequest(request_id=request_id), timeout=CALL_TIMEOUT_S)
        next(response for response in reader if response.event.HasField("delta"))
        assert stub.Cancel(inference_pb2.CancelRequest(request_id=request_id), timeout=CALL_TIMEOUT_S).cancelled
        rest = read(reader)
        assert not stub.Cancel(inference_pb2.CancelRequest(request_id=request_id), timeout=CALL_TIMEOUT_S).cancelled
    assert rest.reason() == generation_pb2.FINISH_REASON_CANCELLED
    assert rest.done is not None and rest.done.usage.output_tokens < 1500


def test_dropping_a_generate_call_frees_its_blocks(server: RunningServer) -> None:
    with connected(server.address) as stub:
        stream = stub.Generate(inference_pb2.GenerateRequest(spec=greedy(STORY, 1500)), timeout=CALL_TIMEOUT_S)
        next(response for response in stream if response.event.HasField("delta"))
        assert stub.GetLoad(inference_pb2.GetLoadRequest()).kv_cache_usage > 0
        stream.cancel()


def test_several_greedy_outputs_are_equal_and_share_the_prompts_blocks(server: RunningServer) -> None:
    prompt = [100 + index % 900 for index in range(500)]  # 31 full blocks and a part of one
    # A reader that was held up asks too late for the load; with another salt, what it ran before is
    # no help.
    for attempt in range(10):
        load = None
        transcript = Transcript()
        with connected(server.address) as stub:
            request = inference_pb2.GenerateRequest(spec=greedy(prompt, 60, n=4, cache_salt=str(attempt)))
            for response in stub.Generate(request, timeout=CALL_TIMEOUT_S):
                transcript.take(response.event)
                if load is None and len(transcript.tokens) == 4:
                    load = stub.GetLoad(inference_pb2.GetLoadRequest())
        if load is not None and load.running_sequences:
            break
    assert load is not None and load.kv_cache_usage > 0
    # Shared: 31, and per output the copied part with up to 60 tokens after it. Unshared: 4 x 32 at
    # least.
    assert load.kv_cache_usage * load.kv_blocks <= 31 + 4 * 5 + 0.5
    assert [transcript.tokens[index] for index in range(4)] == [transcript.tokens[0]] * 4
    assert transcript.done is not None and transcript.done.usage.prompt_tokens == 500
    assert transcript.done.usage.output_tokens == 240
    assert transcript.tokens[0] == generate(server.address, greedy(prompt, 60)).tokens[0]


def test_several_sampled_outputs_differ_and_repeat_with_their_seed(server: RunningServer) -> None:
    spec = greedy(STORY, 40, n=4)
    spec.sampling.CopyFrom(generation_pb2.SamplingParameters(temperature=1.0, seed=7))
    sampled = generate(server.address, spec)
    assert len({tuple(sampled.tokens[index]) for index in range(4)}) == 4
    assert generate(server.address, spec).tokens == sampled.tokens
    spec.n = 1
    assert generate(server.address, spec).tokens[0] == sampled.tokens[0]


@pytest.mark.parametrize("include", [False, True])
def test_text_ends_at_the_stop_string_and_ids_and_text_stay_aligned(server: RunningServer, include: bool) -> None:
    whole = generate(server.address, greedy(STORY, 60))
    # From inside a word to inside another one, so that the match begins and ends within tokens.
    middle = whole.texts[0].index(" ", len(whole.texts[0]) // 2)
    stop = whole.texts[0][middle - 2 : middle + 3]
    spec = greedy(STORY, 60)
    spec.stop.strings.append(stop)
    spec.stop.include_stop_string = include
    stopped = generate(server.address, spec)
    begin = whole.texts[0].index(stop)
    assert stopped.texts[0] == whole.texts[0][: begin + len(stop) if include else begin]
    assert stopped.reason() == generation_pb2.FINISH_REASON_STOP
    assert stopped.finished[0].matched_stop.text == stop
    assert stopped.tokens[0] == whole.tokens[0][: len(stopped.tokens[0])]
    with connected(server.address) as stub:
        ids: list[int] = []
        text = ""
        deltas = [event.delta for event in stopped.events if event.HasField("delta")]
        for delta in deltas:
            ids.extend(delta.token_ids)
            text += "".join(piece.text for piece in delta.content)
            rendered = stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=ids)).text
            # Only the last delta may end within a token, where the match cut it.
            assert rendered == text or (delta is deltas[-1] and rendered.startswith(text))
    assert stop in rendered


def test_deadline_and_time_limit_end_a_generation(server: RunningServer) -> None:
    spec = greedy(STORY, 1500)
    spec.time_limit.FromMilliseconds(300)
    assert generate(server.address, spec).reason() == generation_pb2.FINISH_REASON_DEADLINE
    with connected(server.address) as stub:
        # The connection is not the call's time.
        stub.GetLoad(inference_pb2.GetLoadRequest())
        # A machine that is held up may need more for the first token, and is then slow enough for a
        # longer time.
        for timeout_s in (1.5, 6.0, 24.0):
            transcript = Transcript()
            with pytest.raises(grpc.RpcError) as error:
                call = stub.Generate(inference_pb2.GenerateRequest(spec=greedy(STORY, 1500)), timeout=timeout_s)
                for response in call:
                    transcript.take(response.event)
            if transcript.tokens:
                break
        assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        request_id = transcript.events[0].accepted.request_id
        wait_until(lambda: listed(stub, request_id).state == inference_pb2.REQUEST_STATE_FINISHED)
        assert listed(stub, request_id).output_tokens < 1500


def test_a_time_limit_that_passes_before_the_first_step_ends_ok_on_every_call(server: RunningServer) -> None:
    spec = greedy(STORY, 4)
    spec.time_limit.FromMicroseconds(1)
    deadline = generation_pb2.FINISH_REASON_DEADLINE
    assert generate(server.address, spec).reason() == deadline
    with connected(server.address) as stub:
        complete = inference_pb2.CompleteRequest(spec=spec)
        complete.spec.n = 2
        answer = stub.Complete(complete, timeout=CALL_TIMEOUT_S)
        assert [(output.finished.reason, list(output.token_ids)) for output in answer.outputs] == [(deadline, [])] * 2
        submitted = stub.Submit(inference_pb2.SubmitRequest(spec=spec), timeout=CALL_TIMEOUT_S)
        asked = inference_pb2.SessionRequest(stream_id=1, submit=inference_pb2.SessionSubmit(spec=spec))
        events = [event for step in stub.Session(iter([asked]), timeout=CALL_TIMEOUT_S) for event in step.events]
    assert subscribe(server.address, submitted.request_id).reason() == deadline
    assert not any(event.HasField("error") for event in events)
    assert [event.event.output_finished.reason for event in events if event.event.HasField("output_finished")] == [
        deadline
    ]


def test_one_port_has_all_services_and_reflection_lists_them(server: RunningServer) -> None:
    with grpc.insecure_channel(server.address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        listed = set(database.get_services())
        assert {"headrace.v1.InferenceService", "grpc.health.v1.Health"} <= listed
        assert any(name.startswith("grpc.reflection.") for name in listed)
        methods = database.FindFileContainingSymbol("headrace.v1.InferenceService").service[0].method
    ours = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].methods
    assert [method.name for method in methods] == [method.name for method in ours]
    assert health(server.address) == 1
