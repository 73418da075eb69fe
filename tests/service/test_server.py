"""The server around the RPCs: health, reflection, models, load, tokenizing, shutdown."""

from __future__ import annotations

import asyncio
import json
import pathlib
import shutil
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
import structlog
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tests.service.harness import ANSWER, Running, events_of, retry_delay_s, running_service, text_of

from headrace.v1 import generation_pb2, inference_pb2
from headrace_service.api import inference_service

Spec = generation_pb2.GenerationSpec
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def test_every_method_of_the_proto_has_a_handler_of_its_kind() -> None:
    methods = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].methods_by_name
    handlers = inference_service.method_handlers(Mock())
    assert set(handlers) == set(methods)
    for name, method in methods.items():
        assert handlers[name].response_streaming == method.server_streaming  # type: ignore[attr-defined]


async def test_health_is_checked_by_name(running: Running) -> None:
    health = health_pb2_grpc.HealthStub(running.channel)
    for name in ("", "headrace.v1.InferenceService"):
        assert (await health.Check(health_pb2.HealthCheckRequest(service=name))).status == SERVING
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await health.Check(health_pb2.HealthCheckRequest(service="other"))
    assert refused.value.code() == grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("/grpc.health.v1.Health/Check", "unary_unary"),
        ("/grpc.health.v1.Health/Watch", "unary_stream"),
        ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "stream_stream"),
    ],
)
@pytest.mark.parametrize("data", [b"\xff", b"\x0a\x02\xff\xfe"], ids=["no message", "no UTF-8"])
async def test_bytes_that_are_no_message_are_refused_by_services_that_are_not_ours_too(
    running: Running, method: str, kind: str, data: bytes
) -> None:
    sent = iter([data]) if kind == "stream_stream" else data
    call = getattr(running.channel, kind)(method)(sent)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await (call if kind == "unary_unary" else call.read())
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (refused.value.details() or "").startswith("request: not a valid protobuf message")
    assert (await health_pb2_grpc.HealthStub(running.channel).Check(health_pb2.HealthCheckRequest())).status


async def test_watch_follows_the_engines_word_its_silence_and_its_loss(running: Running) -> None:
    watch = health_pb2_grpc.HealthStub(running.channel).Watch(health_pb2.HealthCheckRequest())
    other = health_pb2_grpc.HealthStub(running.channel).Watch(health_pb2.HealthCheckRequest())
    assert (await other.read()).status == SERVING
    # Its end must not cost the first watcher anything.
    other.cancel()

    async def expect(status: int) -> None:
        async with asyncio.timeout(120):
            assert (await watch.read()).status == status

    await expect(SERVING)
    running.engine.state.serving = False
    running.engine.send_state()
    await expect(NOT_SERVING)
    running.engine.state.serving = True
    running.engine.send_state()
    await expect(SERVING)
    running.engine.beats = False
    running.engine.state.stale_after_ns = 300_000_000
    running.engine.send_state()
    await expect(NOT_SERVING)
    running.engine.state.stale_after_ns = 600_000_000_000
    running.engine.send_state()
    await expect(SERVING)
    address = running.engine.address
    await running.engine.stop()
    await expect(NOT_SERVING)
    running.engine.beats = True
    await running.engine.start(address)
    await expect(SERVING)
    watch.cancel()


async def test_a_silent_engine_is_given_up_and_its_streams_end_unavailable(
    model_path: pathlib.Path, sockets: pathlib.Path
) -> None:
    async with running_service(model_path, sockets, engine_silence_s=3.0) as running:
        running.engine.running.clear()
        running.engine.beats = False
        call = running.stub.Generate(inference_pb2.GenerateRequest(spec=Spec(text="x")))
        await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await asyncio.wait_for(events_of(call), 60)
        assert ended.value.code() == grpc.StatusCode.UNAVAILABLE
        assert retry_delay_s(ended.value) is not None


async def test_requests_are_refused_while_the_engine_makes_no_progress(running: Running) -> None:
    running.engine.beats = False
    running.engine.state.stale_after_ns = 100_000_000
    running.engine.send_state()
    await running.until(lambda: not running.service.core.serving)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await events_of(running.stub.Generate(inference_pb2.GenerateRequest(spec=Spec(text="x"))))
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_reflection_lists_and_describes_the_services(running: Running) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(running.channel)
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="headrace.v1.InferenceService"),
    ]
    listed, described = [answer async for answer in stub.ServerReflectionInfo(iter(requests))]
    names = {service.name for service in listed.list_services_response.service}
    assert names == {
        "headrace.v1.InferenceService",
        "headrace.v1.AdminService",
        "inference.GRPCInferenceService",
        "grpc.health.v1.Health",
        "xds.service.orca.v3.OpenRcaService",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    assert described.file_descriptor_response.file_descriptor_proto


@pytest.mark.parametrize(
    ("symbol", "found"),
    [
        ("headrace.v1.InferenceService.Tokenize", True),
        ("inference.GRPCInferenceService.ModelInfer", True),
        ("xds.service.orca.v3.OpenRcaService.StreamCoreMetrics", True),
        ("headrace.v1.InferenceService.Dream", False),
        ("headrace.v1.Dream.Tokenize", False),
        ("Tokenize", False),
        ("", False),
    ],
)
async def test_reflection_finds_methods(running: Running, symbol: str, found: bool) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(running.channel)
    request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol)
    async for answer in stub.ServerReflectionInfo(iter([request])):
        assert answer.HasField("file_descriptor_response") == found
        assert answer.HasField("error_response") != found
        for data in answer.file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(data)
            assert all(field.json_name for message in file.message_type for field in message.field)


async def test_reflection_can_be_switched_off(model_path: pathlib.Path, sockets: pathlib.Path) -> None:
    async with running_service(model_path, sockets, reflection=False) as running:
        # As one request: a grpc.aio client whose write of a stream meets the end of the call
        # reports INTERNAL by itself.
        call = running.channel.unary_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")(b"")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_the_model_is_described(running: Running) -> None:
    (model,) = (await running.stub.ListModels(inference_pb2.ListModelsRequest())).models
    assert model == (await running.stub.GetModel(inference_pb2.GetModelRequest(model="tiny"))).model
    assert (model.name, model.architecture, model.max_context_tokens) == ("tiny", "LlamaForCausalLM", 512)
    assert (model.max_outputs, list(model.end_of_text_token_ids), model.has_chat_template) == (16, [1, 3], True)
    assert model.default_sampling.temperature == 0.5
    # Every figure of the engine's, in its place.
    plan = model.memory_plan
    assert [getattr(plan, field.name) for field in plan.DESCRIPTOR.fields] == [1, 2, 3, 4, 5, 6, 7, 8, True]
    report = model.quantization
    layers, head = ["int4", 64, 4.5, 0.25, 0.5, "a"], ["int8", 8.5, 0.75]
    assert [getattr(report, field.name) for field in report.DESCRIPTOR.fields] == [
        *layers,
        *head,
        report.measured,
        "int8 per token",
    ]
    measured = report.measured
    assert [getattr(measured, field.name) for field in measured.DESCRIPTOR.fields] == ["gptq", 9, 3.25, 3.5, 0.125, 0.0]
    assert measured.HasField("divergence_interval")
    assert model.default_sampling.top_p == pytest.approx(0.9)


async def test_recommendations_that_requests_do_not_get_are_named(
    model_path: pathlib.Path, sockets: pathlib.Path
) -> None:
    folder = sockets / "bent"
    shutil.copytree(model_path, folder)
    recommended = {"temperature": 0.001, "repetition_penalty": 12, "suppress_tokens": [5, 6], "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(recommended))
    with structlog.testing.capture_logs() as logged:
        async with running_service(folder, sockets) as running:
            model = (await running.stub.GetModel(inference_pb2.GetModelRequest())).model
    assert list(model.not_followed) == [
        "temperature 0.001 is served as 0.01: requests take 0, or 0.01 to 100",
        "repetition_penalty 12 is served as 10: requests take 0.01 to 10",
        "suppress_tokens (a list of 2 entries) has no effect",
    ]
    assert model.default_sampling.temperature == pytest.approx(0.01) and model.default_sampling.repetition_penalty == 10
    warned = [line for line in logged if line["event"] == "model.recommendation_not_followed"]
    assert [line["generation_config"] for line in warned] == list(model.not_followed)
    assert {(line["model"], line["log_level"]) for line in warned} == {("bent", "warning")}


async def test_recommendations_that_are_followed_are_not_worth_a_word(running: Running) -> None:
    assert not (await running.stub.GetModel(inference_pb2.GetModelRequest())).model.not_followed


async def test_load_is_the_engines(running: Running) -> None:
    load = await running.stub.GetLoad(inference_pb2.GetLoadRequest())
    assert (load.kv_blocks, load.max_waiting_requests, load.serving) == (64, 8, True)


@pytest.mark.parametrize("text", ["", "the fox", "größer 東京 🙂\n\n", "<|start|>user", "x" * 5000])
async def test_detokenize_undoes_tokenize(running: Running, text: str) -> None:
    tokens = (await running.stub.Tokenize(inference_pb2.TokenizeRequest(text=text))).token_ids
    assert tokens[0] == 0
    plain = (await running.stub.Tokenize(inference_pb2.TokenizeRequest(text=text, add_special_tokens=False))).token_ids
    assert list(tokens)[1:] == list(plain) == running.ids(text)
    back = await running.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=plain, skip_special_tokens=False))
    assert back.text == text


async def test_detokenize_refuses_ids_beyond_the_vocabulary(running: Running) -> None:
    vocabulary = running.engine.model.vocabulary_size
    assert (await running.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[vocabulary - 1]))).text == ""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await running.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[vocabulary]))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_shutdown_lets_streams_finish_and_refuses_new_ones(running: Running) -> None:
    running.engine.running.clear()
    call = running.stub.Generate(inference_pb2.GenerateRequest(spec=Spec(text="x")))
    await call.read()
    stopping = asyncio.ensure_future(running.service.stop(600))
    health = health_pb2_grpc.HealthStub(running.channel)
    await running.until(lambda: not running.service.core.serving)
    assert (await health.Check(health_pb2.HealthCheckRequest())).status == NOT_SERVING
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await events_of(running.stub.Generate(inference_pb2.GenerateRequest(spec=Spec(text="x"))))
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    assert not stopping.done()
    running.engine.running.set()
    assert text_of(await events_of(call)) == ANSWER
    await asyncio.wait_for(stopping, 60)


@pytest.mark.parametrize("unary", [False, True])
async def test_what_is_open_after_the_grace_time_ends_unavailable(running: Running, unary: bool) -> None:
    running.engine.running.clear()
    spec = Spec(text="x")
    ending: Any
    if unary:
        ending = asyncio.ensure_future(_whole(running, spec))
    else:
        ending = asyncio.ensure_future(events_of(running.stub.Generate(inference_pb2.GenerateRequest(spec=spec))))
    await running.until(lambda: running.engine.requests)
    await asyncio.wait_for(running.service.stop(0.2), 60)
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await ending
    assert ended.value.code() == grpc.StatusCode.UNAVAILABLE
    assert ended.value.details() == "the server is shutting down"


async def _whole(running: Running, spec: Spec) -> Any:
    return await running.stub.Complete(inference_pb2.CompleteRequest(spec=spec))
