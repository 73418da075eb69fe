"""headrace.v1 through the gRPC proxies of a real Ray Serve, to a deployment on a real cluster."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from tests.support.ports import free_port
from tests.support.processes import wait_until
from tests.support.ray_cluster import NEEDS_RAY, deployment_tables, ray_cluster
from tests.support.rpc import Transcript, generate, greedy, idle_load, read

from headrace.v1 import inference_pb2, inference_pb2_grpc
from headrace_ray import config

pytestmark = [pytest.mark.slow, NEEDS_RAY, pytest.mark.timeout(900)]

APPLICATION = (("application", "headrace"),)


@pytest.fixture(scope="module")
def addresses() -> Iterator[tuple[str, str]]:
    """Addresses of Serve's gRPC proxy and of the deployment's service."""
    from ray import serve

    from headrace_ray import deployment, gateway

    with ray_cluster(cpus=2) as cluster:
        port, http = free_port(), free_port()
        tables = deployment_tables(free_port())
        status = deployment.up(config.parse(tables), cluster.address, wait_s=300.0)
        serve.start(
            http_options={"port": http},
            grpc_options={"port": port, "grpc_servicer_functions": [gateway.SERVICER]},
        )
        serve.run(gateway.application("demo"), name="headrace")
        try:
            yield f"127.0.0.1:{port}", next(report.address for report in status.services.values())
        finally:
            serve.shutdown()
            deployment.down("demo")


@pytest.fixture
def stub(addresses: tuple[str, str]) -> Iterator[inference_pb2_grpc.InferenceServiceStub]:
    with grpc.insecure_channel(addresses[0]) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


def test_an_answer_is_the_services_own(
    addresses: tuple[str, str], stub: inference_pb2_grpc.InferenceServiceStub
) -> None:
    spec = greedy("The river", 32)
    through = read(stub.Generate(inference_pb2.GenerateRequest(spec=spec), timeout=240, metadata=APPLICATION))
    assert through.tokens == generate(addresses[1], spec).tokens
    model = stub.GetModel(inference_pb2.GetModelRequest(), timeout=60, metadata=APPLICATION).model
    assert model.name == "demo"


def test_tokens_come_one_by_one_and_a_reader_that_leaves_ends_its_generation(
    addresses: tuple[str, str], stub: inference_pb2_grpc.InferenceServiceStub
) -> None:
    request = inference_pb2.GenerateRequest(spec=greedy("The river", 1900))
    stream = stub.Generate(request, timeout=240, metadata=APPLICATION)
    transcript = Transcript()
    for response in stream:
        transcript.take(response.event)
        if len(transcript.tokens.get(0, ())) >= 2:
            break
    # It goes on: the first tokens did not wait for the last one.
    load = stub.GetLoad(inference_pb2.GetLoadRequest(), timeout=60, metadata=APPLICATION)
    assert load.running_sequences == 1
    stream.cancel()
    wait_until(lambda: idle_load(addresses[1]), what="the generation ends with its reader")


def test_a_deadline_ends_a_generation(
    addresses: tuple[str, str], stub: inference_pb2_grpc.InferenceServiceStub
) -> None:
    request = inference_pb2.GenerateRequest(spec=greedy("The river", 1900))
    with pytest.raises(grpc.RpcError) as ended:
        read(stub.Generate(request, timeout=1, metadata=APPLICATION))
    assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED  # type: ignore[attr-defined]
    wait_until(lambda: idle_load(addresses[1]), what="nothing runs after the deadline")


def test_a_session_is_forwarded_both_ways(stub: inference_pb2_grpc.InferenceServiceStub) -> None:
    def asked() -> Iterator[inference_pb2.SessionRequest]:
        for stream_id in (1, 2):
            submit = inference_pb2.SessionSubmit(spec=greedy("The river", 8))
            yield inference_pb2.SessionRequest(stream_id=stream_id, submit=submit)

    done = {
        event.stream_id
        for response in stub.Session(asked(), timeout=240, metadata=APPLICATION)
        for event in response.events
        if event.event.HasField("done")
    }
    assert done == {1, 2}


def test_a_status_and_its_sentence_pass(stub: inference_pb2_grpc.InferenceServiceStub) -> None:
    for call in (
        lambda: read(
            stub.Generate(inference_pb2.GenerateRequest(spec=greedy("x", 0)), timeout=60, metadata=APPLICATION)
        ),
        lambda: stub.GetModel(inference_pb2.GetModelRequest(model="no-such"), timeout=60, metadata=APPLICATION),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            call()
        code, said = refused.value.code(), refused.value.details()  # type: ignore[attr-defined]
        assert (code, said.split(":")[0]) in {
            (grpc.StatusCode.INVALID_ARGUMENT, "spec.stop.max_tokens"),
            (grpc.StatusCode.NOT_FOUND, "Request for unknown model"),
        }
