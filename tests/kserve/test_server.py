"""What server and models say of themselves, and the settings that clients may read and change."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tests.kserve.wire import SERVICE, Wire, simple
from tests.service.fake_supervisor import FakeSupervisor
from tests.service.harness import Running, running_service

from headrace_protos.control.v1 import control_pb2
from headrace_protos.inference import grpc_service_pb2 as pb
from headrace_protos.inference import model_config_pb2
from headrace_service import logs

CONFORMANCE = {
    "simple", "simple_int8", "simple_string", "simple_identity", "simple_sequence", "simple_dyna_sequence",
    "simple_string_dyna_sequence", "repeat_int32", "custom_identity_int32",
}  # fmt: skip
LANGUAGE = {"tiny", "vllm_model", "ensemble", "tensorrt_llm_bls"}


@pytest.fixture(autouse=True)
def _levels_as_before() -> Iterator[None]:
    yield
    logs.switch_by(lambda: logs.Switches.at("debug"))


async def refused(call: object, code: str) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await call  # type: ignore[misc]
    assert refusal.value.code().name == code
    return refusal.value.details() or ""


async def test_the_server_is_live_ready_and_named_as_clients_expect(wire: Wire) -> None:
    assert (await wire.ServerLive(pb.ServerLiveRequest())).live
    assert (await wire.ServerReady(pb.ServerReadyRequest())).ready
    metadata = await wire.ServerMetadata(pb.ServerMetadataRequest())
    assert metadata.name == "triton" and metadata.version.startswith("headrace ")
    assert {"statistics", "binary_tensor_data", "system_shared_memory", "sequence"} <= set(metadata.extensions)
    # What does not work here is not reported: nothing is traced, and there is no supervisor.
    assert {"trace", "model_repository"}.isdisjoint(metadata.extensions)


async def test_readiness_follows_the_engine(running: Running, wire: Wire) -> None:
    assert (await wire.ModelReady(pb.ModelReadyRequest(name="vllm_model"))).ready
    await running.engine.stop()
    await running.until(lambda: not running.service.core.serving)
    assert not (await wire.ServerReady(pb.ServerReadyRequest())).ready
    assert not (await wire.ModelReady(pb.ModelReadyRequest(name="vllm_model"))).ready
    assert (await wire.ModelReady(pb.ModelReadyRequest(name="simple"))).ready
    assert not (await wire.ModelReady(pb.ModelReadyRequest(name="nobody"))).ready


@pytest.mark.parametrize("method", ["ModelMetadata", "ModelConfig", "ModelStatistics"])
async def test_an_unknown_model_is_not_found(wire: Wire, method: str) -> None:
    ask, message = getattr(wire, method), getattr(pb, f"{method}Request")
    assert await refused(ask(message(name="x")), "NOT_FOUND") == "Request for unknown model: 'x' is not found"
    details = await refused(ask(message(name="simple", version="99")), "NOT_FOUND")
    assert details == "Request for unknown model: 'simple' version '99' is not found"
    for version in ("-1", "1.5", "v1", "0", "9" * 5000, "²"):
        assert "version should be an integer value > 0" in await refused(
            ask(message(name="simple", version=version)), "INVALID_ARGUMENT"
        )


async def test_configuration_and_metadata_report_the_same_tensors(wire: Wire) -> None:
    for name in sorted(CONFORMANCE | LANGUAGE):
        config = (await wire.ModelConfig(pb.ModelConfigRequest(name=name))).config
        metadata = await wire.ModelMetadata(pb.ModelMetadataRequest(name=name, version="1"))
        assert config.name == metadata.name == name and list(metadata.versions) == ["1"]
        batch = [-1] if config.max_batch_size else []
        for configured, reported in ((config.input, metadata.inputs), (config.output, metadata.outputs)):
            assert [(t.name, batch + list(t.dims)) for t in configured] == [(t.name, list(t.shape)) for t in reported]
            types = [model_config_pb2.DataType.Name(t.data_type) for t in configured]
            assert types == [f"TYPE_{t.datatype}".replace("BYTES", "STRING") for t in reported]


async def test_language_models_are_decoupled_and_say_what_they_are(running: Running, wire: Wire) -> None:
    config = (await wire.ModelConfig(pb.ModelConfigRequest(name="vllm_model"))).config
    assert config.model_transaction_policy.decoupled and config.backend == "vllm" and config.max_batch_size == 0
    assert not config.input[0].optional and all(tensor.optional for tensor in config.input[1:])
    config = (await wire.ModelConfig(pb.ModelConfigRequest(name="ensemble"))).config
    assert config.model_transaction_policy.decoupled and config.max_batch_size == 1
    metadata = await wire.ModelMetadata(pb.ModelMetadataRequest(name="ensemble"))
    assert metadata.properties["revision"] == running.engine.model.revision
    config = (await wire.ModelConfig(pb.ModelConfigRequest(name="simple_sequence"))).config
    assert config.HasField("sequence_batching") and not config.model_transaction_policy.decoupled


async def test_the_index_lists_all_models(running: Running, wire: Wire) -> None:
    index = await wire.RepositoryIndex(pb.RepositoryIndexRequest())
    assert {model.name: model.state for model in index.models} == dict.fromkeys(CONFORMANCE | LANGUAGE, "READY")
    assert "repository_name: must be empty" in await refused(
        wire.RepositoryIndex(pb.RepositoryIndexRequest(repository_name="x")), "INVALID_ARGUMENT"
    )


@pytest.mark.parametrize("name", ["../etc", "a/../b", "/etc/passwd", " ..", "model/", "..", "a\0b", "x" * 300])
async def test_a_name_that_is_a_path_is_never_looked_up(wire: Wire, name: str) -> None:
    load = pb.RepositoryModelLoadRequest(model_name=name)
    details = await refused(wire.RepositoryModelLoad(load), "INVALID_ARGUMENT")
    assert "failed to load" in details and "path traversal" in details
    assert "Request for unknown model" in await refused(
        wire.ModelInfer(pb.ModelInferRequest(model_name=name)), "NOT_FOUND"
    )


async def test_loading_is_off_without_a_supervisor(wire: Wire) -> None:
    for message in (pb.RepositoryModelLoadRequest(model_name="m"), pb.RepositoryModelLoadRequest(repository_name="m")):
        assert "explicit model load / unload is off" in await refused(
            wire.RepositoryModelLoad(message), "UNIMPLEMENTED"
        )
    unload = pb.RepositoryModelUnloadRequest(model_name="m")
    unload.parameters["unload_dependents"].bool_param = True
    assert "explicit model load" in await refused(wire.RepositoryModelUnload(unload), "UNIMPLEMENTED")
    unload.parameters["other"].bool_param = True
    assert "'other' is not known" in await refused(wire.RepositoryModelUnload(unload), "INVALID_ARGUMENT")


async def test_nothing_is_traced_and_that_cannot_be_changed(wire: Wire) -> None:
    settings = (await wire.TraceSetting(pb.TraceSettingRequest(model_name="simple"))).settings
    assert list(settings["trace_level"].value) == ["OFF"]
    request = pb.TraceSettingRequest()
    request.settings["trace_level"].value.append("OFF")
    request.settings["trace_rate"].SetInParent()
    await wire.TraceSetting(request)
    request.settings["trace_level"].value[:] = ["TIMESTAMPS"]
    assert "telemetry is off" in await refused(wire.TraceSetting(request), "UNIMPLEMENTED")
    request = pb.TraceSettingRequest()
    request.settings["nonsense"].value.append("1")
    assert "settings[nonsense]: is no trace setting" in await refused(wire.TraceSetting(request), "INVALID_ARGUMENT")


async def test_log_levels_are_switched_while_the_server_runs(wire: Wire) -> None:
    before = (await wire.LogSettings(pb.LogSettingsRequest())).settings
    assert before["log_info"].bool_param and before["log_verbose_level"].uint32_param == 0
    request = pb.LogSettingsRequest()
    request.settings["log_info"].bool_param = False
    request.settings["log_verbose_level"].uint32_param = 1
    after = (await wire.LogSettings(request)).settings
    assert not after["log_info"].bool_param and after["log_verbose_level"].uint32_param == 1
    assert after["log_warning"].bool_param and after["log_error"].bool_param
    assert (await wire.LogSettings(pb.LogSettingsRequest())).settings["log_verbose_level"].uint32_param == 1
    assert not (await wire.LogSettings(pb.LogSettingsRequest())).settings["log_info"].bool_param


async def test_a_full_runtime_folder_refuses_a_change_of_log_levels_and_loses_none(
    model_path: pathlib.Path, sockets: pathlib.Path
) -> None:
    supervisor = FakeSupervisor("tiny")
    await supervisor.start(f"unix:{sockets}/control.sock")
    supervisor.set_model("tiny", control_pb2.BACKEND_STATE_READY, f"unix:{sockets}/engine.sock")
    control = {"engine": (), "control": f"unix:{sockets}/control.sock"}
    async with running_service(model_path, sockets, **control) as running:
        wire = Wire(running.channel)
        switch = pb.LogSettingsRequest()
        switch.settings["log_warning"].bool_param = False
        await wire.LogSettings(switch)
        change = pb.LogSettingsRequest()
        change.settings["log_error"].bool_param = False
        (sockets / "kserve-log-settings.new").symlink_to("/dev/full")
        reported = await refused(wire.LogSettings(change), "UNAVAILABLE")
        assert reported == "the server's runtime folder takes no change (No space left on device); all is as it was"
        now = (await wire.LogSettings(pb.LogSettingsRequest())).settings
        assert now["log_error"].bool_param and not now["log_warning"].bool_param
        # There is room again.
        now = (await wire.LogSettings(change)).settings
        assert not now["log_error"].bool_param and not now["log_warning"].bool_param
    await supervisor.stop()


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("log_info", {"uint32_param": 1}, "INVALID_ARGUMENT"),
        ("log_verbose_level", {"bool_param": True}, "INVALID_ARGUMENT"),
        ("log_verbose_level", {"uint32_param": 9}, "INVALID_ARGUMENT"),
        ("log_file", {"string_param": "/tmp/x"}, "UNIMPLEMENTED"),
        ("log_file", {}, "INVALID_ARGUMENT"),
        ("log_format", {"string_param": "default"}, "UNIMPLEMENTED"),
        ("nonsense", {"bool_param": True}, "INVALID_ARGUMENT"),
    ],
)
async def test_a_setting_that_cannot_be_is_refused_and_changes_nothing(
    wire: Wire, name: str, value: dict[str, object], code: str
) -> None:
    request = pb.LogSettingsRequest()
    request.settings["log_warning"].bool_param = False
    request.settings[name].CopyFrom(pb.LogSettingsRequest.SettingValue(**value))  # type: ignore[arg-type]
    await refused(wire.LogSettings(request), code)
    assert (await wire.LogSettings(pb.LogSettingsRequest())).settings["log_warning"].bool_param


async def test_health_and_reflection_know_the_service(running: Running) -> None:
    health = health_pb2_grpc.HealthStub(running.channel)
    assert (await health.Check(health_pb2.HealthCheckRequest(service=SERVICE))).status == 1
    call = reflection_pb2_grpc.ServerReflectionStub(running.channel).ServerReflectionInfo()
    asked = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
        reflection_pb2.ServerReflectionRequest(file_by_filename="inference/model_config.proto"),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="headrace.v1.InferenceService"),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="no.such.Thing"),
    ]
    for request in asked:
        await call.write(request)
    await call.done_writing()
    services, wire_file, config_file, ours, missing = [response async for response in call]
    assert SERVICE in {service.name for service in services.list_services_response.service}
    names = [
        {
            descriptor_pb2.FileDescriptorProto.FromString(data).name
            for data in answer.file_descriptor_response.file_descriptor_proto
        }
        for answer in (wire_file, config_file, ours)
    ]  # fmt: skip
    assert names[0] == {"inference/grpc_service.proto", "inference/model_config.proto"}
    assert names[1] == {"inference/model_config.proto"}
    assert "headrace/v1/inference.proto" in names[2]
    assert missing.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


async def test_the_wire_can_be_left_out(model_path: pathlib.Path, sockets: pathlib.Path) -> None:
    async with running_service(model_path, sockets, kserve=False) as running:
        await refused(Wire(running.channel).ServerLive(pb.ServerLiveRequest()), "UNIMPLEMENTED")


async def test_conformance_models_are_served_only_where_asked(model_path: pathlib.Path, sockets: pathlib.Path) -> None:
    async with running_service(model_path, sockets, kserve_vllm_names=("other",)) as running:
        wire = Wire(running.channel)
        await refused(wire.ModelInfer(simple()), "NOT_FOUND")
        index = await wire.RepositoryIndex(pb.RepositoryIndexRequest())
        assert {model.name for model in index.models} == {"tiny", "other", "ensemble", "tensorrt_llm_bls"}
        assert "sequence" not in (await wire.ServerMetadata(pb.ServerMetadataRequest())).extensions


async def test_a_loaded_models_own_name_comes_before_another_convention(
    model_path: pathlib.Path, sockets: pathlib.Path
) -> None:
    async with running_service(model_path, sockets, kserve_tensorrt_llm_names=("tiny",)) as running:
        config = (await Wire(running.channel).ModelConfig(pb.ModelConfigRequest(name="tiny"))).config
        assert config.backend == "vllm"
