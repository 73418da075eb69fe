"""The KServe wire of a whole server with two service processes.

It gives the answers of headrace.v1, and both wires have one ledger and one repository.
"""

from __future__ import annotations

import pathlib
import re
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton
from tests.kserve.conformance_models import all_models
from tests.kserve.wire import request, simple, strings_of, text
from tests.support.processes import wait_until
from tests.support.rpc import generate, greedy, idle_load
from tests.support.running_server import ROOT, RunningServer, running_server

from headrace_protos.inference import grpc_service_pb2 as pb

NUM_CONNECTIONS = 12
SAMPLING = '{"max_tokens": 24, "temperature": 0, "ignore_eos": true}'


class Connection:
    """Calls on a connection of its own, which one of the service processes takes."""

    def __init__(self, address: str, stack: ExitStack) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        self._channel = stack.enter_context(grpc.insecure_channel(address, options=options))

    def __getattr__(self, method: str) -> Callable[[Any], Any]:
        descriptor = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name[method]
        call = self._channel.unary_unary(
            f"/inference.GRPCInferenceService/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=getattr(pb, descriptor.output_type.name).FromString,
        )
        return lambda message: call(message, timeout=120, wait_for_ready=True)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    options = (
        "--dtype",
        "fp32",
        "--device",
        "cpu",
        "--services",
        "2",
        "--conformance-models",
        all_models.__name__,
        "--kserve-shared-memory",
    )
    with running_server(*options) as started:
        yield started


@pytest.fixture
def connections(server: RunningServer) -> Iterator[list[Connection]]:
    """Enough connections that both processes have some, with overwhelming probability."""
    with ExitStack() as stack:
        yield [Connection(server.address, stack) for _ in range(NUM_CONNECTIONS)]


def all_serve(server: RunningServer) -> bool:
    """Whether every service has reached the engine: they take connections before that."""
    with ExitStack() as stack:
        fresh = [Connection(server.address, stack) for _ in range(NUM_CONNECTIONS)]
        return all(connection.ModelReady(pb.ModelReadyRequest(name="demo")).ready for connection in fresh)


def successes(connection: Connection, model: str) -> int:
    (stats,) = connection.ModelStatistics(pb.ModelStatisticsRequest(name=model)).model_stats
    return int(stats.inference_stats.success.count)


def test_both_wires_give_the_same_text(server: RunningServer, connections: list[Connection]) -> None:
    prompt = "The old sailor"
    ours = generate(server.address, greedy(prompt, 24)).texts[0]
    for model in ("demo", "vllm_model"):
        answer = connections[0].ModelInfer(text(prompt, model, sampling=SAMPLING, exclude_input_in_output=True))
        assert strings_of(answer) == [ours]
    with triton.InferenceServerClient(server.address) as client:
        pieces: list[Any] = []
        client.start_stream(callback=lambda result, error: pieces.append((result, error)))
        kinds = {"text_input": "BYTES", "stream": "BOOL", "sampling_parameters": "BYTES"}
        inputs = [triton.InferInput(name, [1], kind) for name, kind in kinds.items()]
        for given, raw in zip(inputs, (prompt.encode(), True, SAMPLING.encode()), strict=True):
            given.set_data_from_numpy(as_array(raw))
        client.async_stream_infer("demo", inputs)
        client.stop_stream()
    assert all(error is None for _, error in pieces)
    assert b"".join(result.as_numpy("text_output")[0] for result, _ in pieces).decode() == ours
    wait_until(lambda: idle_load(server.address), 60, "no request and no block left")


def as_array(value: Any) -> Any:
    return np.array([value], dtype=bool if isinstance(value, bool) else np.object_)


def test_the_example_of_the_documentation_runs(server: RunningServer, tmp_path: pathlib.Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "kserve.md").read_text(), re.DOTALL)
    file = tmp_path / "example.py"
    file.write_text(program.replace("127.0.0.1:50051", server.address))
    ended = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("Once upon a time there ")


def test_the_statistics_are_one_ledger_that_outlives_a_process(
    server: RunningServer, connections: list[Connection]
) -> None:
    before = successes(connections[0], "simple")
    for connection in connections:
        connection.ModelInfer(simple())
    assert {successes(connection, "simple") - before for connection in connections} == {NUM_CONNECTIONS}
    victim = server.services()[0]
    victim.kill()
    psutil.wait_procs([victim], timeout=30)
    wait_until(lambda: len(server.services()) == 2, 60, "the service was not started again")
    with ExitStack() as stack:
        for _ in range(NUM_CONNECTIONS):
            assert successes(Connection(server.address, stack), "simple") - before == NUM_CONNECTIONS
    wait_until(lambda: all_serve(server), 60, "both services serve again")


def test_what_one_process_learned_all_know(connections: list[Connection]) -> None:
    path = pathlib.Path(f"/dev/shm/hrtest-{secrets.token_hex(6)}")
    path.write_bytes(b"\0" * 256)
    try:
        register = pb.SystemSharedMemoryRegisterRequest(name="r", key=path.name, byte_size=256)
        connections[0].SystemSharedMemoryRegister(register)
        for connection in connections:
            status = connection.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest())
            assert list(status.regions) == ["r"]
        connections[1].SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest())
        assert not connections[2].SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest()).regions
    finally:
        path.unlink()
    settings = pb.LogSettingsRequest()
    settings.settings["log_verbose_level"].uint32_param = 1
    connections[0].LogSettings(settings)
    for connection in connections:
        assert connection.LogSettings(pb.LogSettingsRequest()).settings["log_verbose_level"].uint32_param == 1


# The calls are in tests/kserve, models that come and go in test_models.
@pytest.mark.slow
def test_a_model_is_unloaded_and_loaded_by_name(server: RunningServer, connections: list[Connection]) -> None:
    connection = connections[0]
    assert connection.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="simple")).is_loaded
    with pytest.raises(grpc.RpcError) as refusal:
        connection.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="simple"))
    assert refusal.value.code() is grpc.StatusCode.UNIMPLEMENTED
    with pytest.raises(grpc.RpcError) as refusal:
        connection.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="nobody"))
    assert "failed to load 'nobody'" in refusal.value.details()
    connection.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="demo"))
    assert not connection.ModelReady(pb.ModelReadyRequest(name="demo")).ready
    with pytest.raises(grpc.RpcError) as refusal:
        connection.ModelInfer(request("demo"))
    assert refusal.value.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAVAILABLE)
    # KServe's clients name the model in the field in which Triton's name a repository.
    loaded = connection.RepositoryModelLoad(pb.RepositoryModelLoadRequest(repository_name="demo"))
    assert (loaded.model_name, loaded.is_loaded) == ("demo", True)
    answer = connection.ModelInfer(text("hello", "demo", sampling=SAMPLING))
    assert strings_of(answer)[0].startswith("hello")
    wait_until(lambda: all_serve(server), 60, "both services serve again")


# Streams of our own API go on so in tests/faults/test_processes_die.
@pytest.mark.slow
def test_a_worker_that_dies_costs_a_stream_no_token(server: RunningServer) -> None:
    prompt, num_tokens = "The old sailor", 160
    ours = generate(server.address, greedy(prompt, num_tokens)).texts[0]
    sampling = f'{{"max_tokens": {num_tokens}, "temperature": 0, "ignore_eos": true}}'
    with grpc.insecure_channel(server.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        call = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=pb.ModelStreamInferResponse.FromString,
        )(iter([text(prompt, "demo", sampling=sampling, stream=True)]), timeout=240)
        pieces = [next(call).infer_response]
        server.worker().kill()
        pieces += [message.infer_response for message in call]
    assert "".join(strings_of(piece)[0] for piece in pieces) == ours
