"""What a service reports: one fact for every generation and every call, on any wire.

Each has the right place in the caller's trace.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import numpy as np
import pytest
from tests.kserve.wire import Wire, text
from tests.service.api.test_session import Collected, read_until, submit
from tests.service.fake_engine import ENGINE, UNIX_OFFSET_NS, queue_full
from tests.service.harness import Running, events_of, kinds_of
from tests.service.tracing.conftest import SAMPLED, SPAN_ID, TRACE_ID, UNSAMPLED, TracedService

from headrace.v1 import generation_pb2, inference_pb2
from headrace_facts import facts, step_records
from headrace_facts.facts import CallEnded, Detail, Generation

Spec = generation_pb2.GenerationSpec
OURS = "headrace.v1.InferenceService/"
KSERVE = "inference.GRPCInferenceService/"


def generate(traced: TracedService, metadata: Any = SAMPLED, **spec: Any) -> Any:
    return traced.stub.Generate(inference_pb2.GenerateRequest(spec=Spec(text="hello", **spec)), metadata=metadata)


def num_emitted(generation: Generation, output: int = 0) -> int:
    emission = generation.emissions[output]
    return int(np.frombuffer(emission.counts, "<u4").sum()) or len(emission.made_at_ns) // 8


def check_emissions(generation: Generation, outputs: int = 1) -> None:
    """One entry per message, in order, each made before it was written, within the generation."""
    assert len(generation.emissions) == outputs
    for emission, steps in zip(
        generation.emissions, generation.trace.token_steps if generation.trace else [], strict=True
    ):
        made = np.frombuffer(emission.made_at_ns, "<u8")
        written = np.frombuffer(emission.written_at_ns, "<u8") if emission.written_at_ns else made
        counts = np.frombuffer(emission.counts, "<u4") if emission.counts else np.ones(len(made), np.uint32)
        assert len(made) == len(written) == len(counts) > 0
        assert counts.sum() == steps.num_tokens
        assert (np.diff(made.astype(np.int64)) >= 0).all() and (made <= written).all()
        assert generation.arrival_ns <= made[0] and written[-1] <= generation.end_ns


async def test_a_sampled_call_is_reported_with_its_place_in_the_trace(traced: TracedService) -> None:
    events = await events_of(generate(traced, sampling=generation_pb2.SamplingParameters(temperature=0.5, seed=7)))
    (generation,) = await traced.telemetry.until(Generation)
    (call,) = await traced.telemetry.until(CallEnded)
    assert call.method == OURS + "Generate" and call.status == "OK" and call.request_id == generation.request_id
    assert call.span is not None and generation.span is not None
    assert (call.span.trace_id, call.span.parent_span_id, call.span.tracestate) == (TRACE_ID, SPAN_ID, "vendor=value")
    assert (generation.span.trace_id, generation.span.parent_span_id) == (TRACE_ID, call.span.span_id)
    assert call.span.sampled and generation.span.sampled and generation.span.tracestate == "vendor=value"
    assert len({call.span.span_id, generation.span.span_id, SPAN_ID}) == 3
    assert call.start_ns <= generation.arrival_ns <= generation.end_ns <= call.end_ns
    (known,) = traced.engine.requests.values()
    assert known.add.traceparent == f"00-{TRACE_ID}-{generation.span.span_id}-01"
    assert (known.add.recording.parent_span_id, known.add.recording.tracestate) == (call.span.span_id, "vendor=value")
    done = events[-1].done
    assert generation.ledger["end_to_end"] == done.ledger.end_to_end_ns
    assert sum(value for name, value in generation.ledger.items() if name != "end_to_end") == done.ledger.end_to_end_ns
    assert (generation.output_tokens, generation.ttft_ns) == (done.usage.output_tokens, done.ledger.ttft_ns)
    assert generation.parameters == {"temperature": 0.5, "seed": 7} and generation.detail is Detail.ARRAY
    assert (
        generation.trace is not None and generation.trace.engine == ENGINE and generation.finish_reasons == ["length"]
    )
    check_emissions(generation)


async def test_a_call_that_is_not_sampled_is_reported_for_the_metrics_alone(traced: TracedService) -> None:
    await events_of(generate(traced, UNSAMPLED))
    await events_of(generate(traced, ()))
    generations = await traced.telemetry.until(Generation, 2)
    calls = await traced.telemetry.until(CallEnded, 2)
    assert len(generations) == len(calls) == 2
    for fact in (*generations, *calls):
        assert fact.span is None
    for generation in generations:
        assert generation.trace is None and generation.emissions == [] and generation.output_tokens > 0
        assert (generation.operation, generation.wire, generation.streamed) == ("text_completion", "generate", True)
    assert all(not known.add.traceparent for known in traced.engine.requests.values())
    assert not any(known.add.HasField("recording") for known in traced.engine.requests.values())


@pytest.mark.parametrize(
    "malformed", ["zz", "00-" + "0" * 32 + "-" + "b" * 16 + "-01", "ff-" + "a" * 32 + "-" + "b" * 16 + "-01"]
)
async def test_a_malformed_context_is_as_none(traced: TracedService, malformed: str) -> None:
    traced.telemetry.set(sample_ratio=1.0)
    await traced.running.until(lambda: traced.running.service.core.tracer.policy.sample_ratio == 1)  # type: ignore[union-attr]
    events = await events_of(generate(traced, (("traceparent", malformed),)))
    assert kinds_of(events)[-1] == "done"
    (call,) = await traced.telemetry.until(CallEnded)
    assert call.span is not None and call.span.parent_span_id == "" and call.span.trace_id not in malformed


async def test_tail_sampling_records_what_nobody_sampled(traced: TracedService) -> None:
    traced.telemetry.set(record_all=True)
    await traced.running.until(lambda: traced.running.service.core.tracer.policy.record_all)  # type: ignore[union-attr]
    await events_of(generate(traced, UNSAMPLED))
    (generation,) = await traced.telemetry.until(Generation)
    assert generation.span is not None and not generation.span.sampled and generation.span.trace_id == TRACE_ID
    (known,) = traced.engine.requests.values()
    assert known.add.traceparent.endswith("-00") and known.add.HasField("recording")
    check_emissions(generation)


async def test_several_outputs_have_columns_of_their_own(traced: TracedService) -> None:
    await events_of(generate(traced, n=3))
    (generation,) = await traced.telemetry.until(Generation)
    assert generation.parameters == {"choice.count": 3} and generation.finish_reasons == ["length"] * 3
    check_emissions(generation, 3)


async def test_detail_off_leaves_the_phases(traced: TracedService) -> None:
    await events_of(generate(traced, trace_detail=generation_pb2.TRACE_DETAIL_OFF))
    await events_of(generate(traced, trace_detail=generation_pb2.TRACE_DETAIL_SPAN))
    off, span = await traced.telemetry.until(Generation, 2)
    assert off.detail is Detail.OFF and off.emissions == [] and off.trace is not None and off.trace.phases
    assert span.detail is Detail.SPAN
    check_emissions(span)


async def test_an_unknown_detail_is_refused_by_name(traced: TracedService) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await generate(traced, trace_detail=99).read()
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "spec.trace_detail" in (
        error.value.details() or ""
    )
    (call,) = await traced.telemetry.until(CallEnded)
    assert call.status == "INVALID_ARGUMENT" and traced.telemetry.of(Generation) == []


# -- every wire


async def test_complete_and_chat_say_what_they_are(traced: TracedService) -> None:
    await traced.stub.Complete(inference_pb2.CompleteRequest(spec=Spec(text="hello")), metadata=SAMPLED)
    message = inference_pb2.ChatMessage(role=inference_pb2.ROLE_USER, parts=[inference_pb2.Part(text="hello")])
    await events_of(traced.stub.Chat(inference_pb2.ChatRequest(messages=[message]), metadata=SAMPLED))
    complete, chat = await traced.telemetry.until(Generation, 2)
    assert (complete.operation, complete.wire, complete.streamed) == ("text_completion", "complete", False)
    assert (chat.operation, chat.wire, chat.streamed) == ("chat", "chat", True)
    for generation in (complete, chat):
        check_emissions(generation)
    assert len(traced.telemetry.of(CallEnded)) == 2


@pytest.mark.parametrize("streamed", [False, True])
async def test_kserve_requests_bring_contexts_of_their_own(traced: TracedService, streamed: bool) -> None:
    wire = Wire(traced.running.channel)
    message = text(id="one", stream=streamed)
    message.parameters["traceparent"].string_param = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    message.parameters["tracestate"].string_param = "k=v"
    message.parameters["trace_detail"].string_param = "span"
    if streamed:
        call = wire.ModelStreamInfer(metadata=SAMPLED)
        await call.write(message)
        await call.done_writing()
        assert [response async for response in call]
    else:
        await wire.ModelInfer(message, metadata=SAMPLED)
    (generation,) = await traced.telemetry.until(Generation)
    (ended,) = await traced.telemetry.until(CallEnded)
    assert generation.wire == "kserve" and generation.streamed == streamed and generation.detail is Detail.SPAN
    assert generation.span is not None and ended.span is not None
    assert (generation.span.trace_id, generation.span.parent_span_id) == ("a" * 32, "b" * 16)
    assert generation.span.tracestate == "k=v" and ended.links == [generation.span]
    assert ended.span.trace_id == TRACE_ID and ended.method.startswith(KSERVE)
    check_emissions(generation)


async def test_kserve_refuses_a_detail_that_there_is_not(traced: TracedService) -> None:
    message = text()
    message.parameters["trace_detail"].string_param = "everything"
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await Wire(traced.running.channel).ModelInfer(message)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "off, array, span" in (
        error.value.details() or ""
    )


async def session(traced: TracedService, *requests: Any, metadata: Any = ()) -> Collected:
    call, collected = traced.stub.Session(metadata=metadata), Collected()
    for request in requests:
        await call.write(request)
    await read_until(call, collected, lambda: all(collected.ended(request.stream_id) for request in requests))
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    return collected


async def test_generations_of_a_session_without_a_context_are_traces_of_their_own(traced: TracedService) -> None:
    traced.telemetry.set(sample_ratio=1.0)
    await traced.running.until(lambda: traced.running.service.core.tracer.policy.sample_ratio == 1)  # type: ignore[union-attr]
    own = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    await session(traced, submit(1), submit(2), submit(3, traceparent=own, tracestate="k=v"))
    generations = await traced.telemetry.until(Generation, 3)
    (call,) = await traced.telemetry.until(CallEnded)
    spans = [generation.span for generation in generations]
    assert len(generations) == 3 and len({span.trace_id for span in spans if span}) == 3
    assert [span.parent_span_id for span in spans if span] == ["", "", "b" * 16]
    assert sorted(call.links, key=str) == sorted((span for span in spans if span), key=str) and call.request_id == ""
    for generation in generations:
        assert generation.wire == "session"
        check_emissions(generation)


async def test_generations_of_a_session_with_a_context_stand_under_it(traced: TracedService) -> None:
    await session(traced, submit(1), submit(2), metadata=SAMPLED)
    generations = await traced.telemetry.until(Generation, 2)
    (call,) = await traced.telemetry.until(CallEnded)
    assert call.span is not None and call.links == []
    assert {generation.span.parent_span_id for generation in generations if generation.span} == {call.span.span_id}


async def test_a_submitted_generation_is_the_backends_to_tell_and_its_readers_link_to_it(traced: TracedService) -> None:
    request = inference_pb2.SubmitRequest(spec=Spec(text="hello"), idempotency_key="again")
    answer = await traced.stub.Submit(request, metadata=SAMPLED)
    # The same key with another trace is the same request: contexts are no part of what is compared.
    assert (await traced.stub.Submit(request, metadata=SAMPLED)).existing
    subscribe = inference_pb2.SubscribeRequest(request_id=answer.request_id)
    assert kinds_of(await events_of(traced.stub.Subscribe(subscribe, metadata=SAMPLED)))[-1] == "done"
    submitted, _, subscribed = await traced.telemetry.until(CallEnded, 3)
    assert traced.telemetry.of(Generation) == []
    (known,) = traced.engine.requests.values()
    recording = known.add.recording
    assert (recording.operation, recording.wire) == ("text_completion", "submit")
    assert recording.parent_span_id == submitted.span.span_id  # type: ignore[union-attr]
    (link,) = subscribed.links
    assert known.add.traceparent == f"00-{link.trace_id}-{link.span_id}-01"
    assert submitted.request_id == subscribed.request_id == answer.request_id


async def test_the_backend_learns_what_an_untraced_detached_request_is(traced: TracedService) -> None:
    await traced.stub.Submit(inference_pb2.SubmitRequest(spec=Spec(text="hello")))
    (known,) = traced.engine.requests.values()
    assert known.add.traceparent == "" and known.add.recording.wire == "submit"


# -- every end


async def test_a_reader_who_leaves_is_reported_with_the_engines_trace(traced: TracedService) -> None:
    traced.engine.running.clear()
    call = generate(traced)
    await call.read()
    traced.engine.step()
    await call.read()
    call.cancel()
    (generation,) = await traced.telemetry.until(Generation)
    (ended,) = await traced.telemetry.until(CallEnded)
    assert generation.finish_reasons == ["cancelled"] and generation.trace is not None and generation.error_type == ""
    assert [type(fact) for fact in traced.telemetry.reported if fact in (generation, ended)] == [Generation, CallEnded]
    assert ended.status == "CANCELLED" and traced.engine.detached == []
    assert traced.running.service.core.num_open == 0
    assert not any(model.engine.streams for model in traced.running.service.core.models)


async def test_a_deadline_is_reported_once_with_the_engines_trace(traced: TracedService) -> None:
    traced.engine.running.clear()
    request = inference_pb2.GenerateRequest(spec=Spec(text="hello"))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await events_of(traced.stub.Generate(request, metadata=SAMPLED, timeout=0.5))
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    (generation,) = await traced.telemetry.until(Generation)
    (ended,) = await traced.telemetry.until(CallEnded)
    assert generation.finish_reasons == ["deadline"] and generation.trace is not None
    assert generation.error_type == "DEADLINE_EXCEEDED" and ended.status == "DEADLINE_EXCEEDED"


@pytest.mark.parametrize(("patience_s", "is_deadline"), [(0.53, True), (5.0, False)])
async def test_who_leaves_just_before_its_deadline_leaves_for_it(
    traced: TracedService, patience_s: float, is_deadline: bool
) -> None:
    """Clocks of callers begin some milliseconds before their calls arrive."""
    traced.engine.running.clear()
    request = inference_pb2.GenerateRequest(spec=Spec(text="hello"))
    call = traced.stub.Generate(request, metadata=SAMPLED, timeout=patience_s)
    await asyncio.sleep(0.5)
    call.cancel()
    (generation,) = await traced.telemetry.until(Generation)
    (ended,) = await traced.telemetry.until(CallEnded)
    assert generation.finish_reasons == ["deadline" if is_deadline else "cancelled"]
    assert ended.status == ("DEADLINE_EXCEEDED" if is_deadline else "CANCELLED")


async def test_a_service_that_ends_waits_for_what_the_engine_says_of_readers_who_left(traced: TracedService) -> None:
    traced.engine.silent_aborts = True
    traced.engine.running.clear()
    call = generate(traced)
    await call.read()
    call.cancel()
    await traced.running.until(lambda: traced.engine.aborts)
    stopping = asyncio.create_task(traced.running.service.stop(0))
    # No call is open, so there is nothing else to wait for.
    await asyncio.sleep(0.3)
    assert not stopping.done()
    traced.engine.expire(traced.engine.aborts[0].request_id)
    await stopping
    (generation,) = await traced.telemetry.until(Generation)
    assert generation.trace is not None


async def test_an_engine_that_never_says_how_it_ended_is_not_waited_for(
    traced: TracedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace_service.streams.ending._KEEP_S", 0.2)
    traced.engine.silent_aborts = True
    traced.engine.running.clear()
    call = generate(traced)
    await call.read()
    call.cancel()
    await traced.running.until(lambda: traced.engine.detached)
    assert len(await traced.telemetry.until(CallEnded)) == 1
    # Its backend reports it.
    assert traced.telemetry.of(Generation) == []


async def test_beyond_the_bound_readers_who_leave_are_given_up_at_once(
    traced: TracedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace_service.streams.ending._MAX_KEPT", 0)
    traced.engine.running.clear()
    call = generate(traced)
    await call.read()
    call.cancel()
    await traced.running.until(lambda: traced.engine.detached)


@pytest.mark.parametrize(("code", "name"), [(13, "engine_error"), (8, "RESOURCE_EXHAUSTED")])
async def test_a_failed_output_is_an_engine_error_unless_it_fits_no_more(
    traced: TracedService, code: int, name: str
) -> None:
    traced.engine.running.clear()
    call = generate(traced)
    await call.read()
    (request_id,) = traced.engine.requests
    traced.engine.end_with_error(request_id, "secret innards", code)
    await events_of(call)
    (generation,) = await traced.telemetry.until(Generation)
    assert generation.finish_reasons == ["error"] and generation.error_type == name
    assert "innards" not in repr(generation)


async def test_an_engine_that_is_lost_is_reported_once(traced: TracedService) -> None:
    traced.engine.running.clear()
    call = generate(traced)
    await call.read()
    traced.engine.step()
    await call.read()
    await traced.engine.stop()
    with pytest.raises(grpc.aio.AioRpcError):
        await events_of(call)
    (generation,) = await traced.telemetry.until(Generation)
    (ended,) = await traced.telemetry.until(CallEnded)
    assert generation.error_type == ended.status == "UNAVAILABLE" and generation.trace is None
    assert generation.finish_reasons == ["error"] and generation.output_tokens == 1


async def test_a_request_that_the_engine_refuses_is_no_generation(traced: TracedService) -> None:
    traced.engine.refusal = queue_full(1)
    with pytest.raises(grpc.aio.AioRpcError):
        await events_of(generate(traced))
    (ended,) = await traced.telemetry.until(CallEnded)
    assert ended.status == "RESOURCE_EXHAUSTED" and traced.telemetry.of(Generation) == []


async def test_a_session_cut_off_reports_all_its_generations_once(traced: TracedService) -> None:
    traced.engine.running.clear()
    call, collected = traced.stub.Session(metadata=SAMPLED), Collected()
    for stream_id in (1, 2, 3):
        await call.write(submit(stream_id))
    await read_until(call, collected, lambda: len(collected.kinds) == 3)
    traced.engine.step()
    await read_until(call, collected, lambda: all(collected.ids[stream_id] for stream_id in (1, 2, 3)))
    call.cancel()
    generations = await traced.telemetry.until(Generation, 3)
    assert len({generation.request_id for generation in generations}) == len(generations) == 3
    for generation in generations:
        assert (
            generation.trace is not None and generation.finish_reasons == ["cancelled"] and num_emitted(generation) == 1
        )


# -- calls and the rest


async def test_calls_that_generate_nothing_are_reported_and_probes_are_not(traced: TracedService) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    await traced.stub.ListModels(inference_pb2.ListModelsRequest())
    await health_pb2_grpc.HealthStub(traced.running.channel).Check(health_pb2.HealthCheckRequest())
    with pytest.raises(grpc.aio.AioRpcError):
        await traced.running.channel.unary_unary("/no.such/Method")(b"")
    with pytest.raises(grpc.aio.AioRpcError):
        await traced.stub.Cancel(inference_pb2.CancelRequest(request_id="unknown"))
    await traced.stub.Tokenize(inference_pb2.TokenizeRequest(text="x"))
    calls = await traced.telemetry.until(CallEnded, 3)
    assert [(call.method.removeprefix(OURS), call.status) for call in calls] == [
        ("ListModels", "OK"), ("Cancel", "NOT_FOUND"), ("Tokenize", "OK"),
    ]  # fmt: skip


async def test_steps_are_passed_on_in_the_engines_terms(traced: TracedService) -> None:
    await events_of(generate(traced))
    steps = [step for step in await traced.telemetry.until(facts.Steps, 3)]
    assert {(step.engine, step.unix_offset_ns) for step in steps} == {(ENGINE, UNIX_OFFSET_NS)}
    assert all(len(step.records) == step_records.RECORD.itemsize for step in steps)
    kinds = [type(fact) for fact in traced.telemetry.reported if isinstance(fact, facts.Steps | Generation)]
    assert kinds[-1] is Generation, "the steps of a generation are reported before it"


async def test_the_load_is_reported_every_second(traced: TracedService) -> None:
    traced.engine.running.clear()
    call = generate(traced)
    await call.read()
    await traced.running.until(
        lambda: any(load.open_generations == 1 for load in traced.telemetry.of(facts.ServiceLoad))
    )
    assert traced.telemetry.of(facts.ServiceLoad)[-1].open_calls == 1
    call.cancel()


async def test_who_tells_says_so_first(traced: TracedService) -> None:
    hello = traced.telemetry.reported[0]
    assert isinstance(hello, facts.Hello) and hello.kind == "service" and hello.name == "service"
    assert hello.pid and len(hello.instance) == 16


async def test_without_telemetry_the_engine_is_asked_for_nothing(running: Running) -> None:
    request = inference_pb2.GenerateRequest(spec=Spec(text="hello"))
    await events_of(running.stub.Generate(request, metadata=SAMPLED))
    (known,) = running.engine.requests.values()
    assert not known.add.HasField("recording") and known.add.traceparent == ""
    assert all(not connection.wants_step_records for connection in running.engine._connections)


async def test_a_fact_that_cannot_be_made_harms_nobody(traced: TracedService, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("headrace_service.streams.generation_fact.of", fail)
    assert kinds_of(await events_of(generate(traced)))[-1] == "done"
    traced.engine.running.clear()
    call = generate(traced)
    await call.read()
    call.cancel()
    await traced.telemetry.until(CallEnded, 2)
    traced.engine.running.set()
    assert kinds_of(await events_of(generate(traced)))[-1] == "done"
    assert traced.running.service.core.serving
