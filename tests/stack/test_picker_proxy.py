"""Envoy with an endpoint picker: calls go where it says, and answers do not pass through it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio
import yaml
from benchmarks.endpoint_picker import DESTINATION, EndpointPicker
from tests.service.harness import events_of, ids_of
from tests.service.model_folder import write_model_folder
from tests.stack.several_services import Front, several_services
from tests.support.compose_files import DEPLOY

from headrace.v1 import generation_pb2, inference_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")
NUM_TOKENS = 8


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Front, EndpointPicker]]:
    model_path = write_model_folder(tmp_path_factory.mktemp("models") / "tiny")
    picker = EndpointPicker(lambda path: "")
    await picker.start()
    async with several_services(model_path, "picker.yaml", {"picker": [picker.address]}) as front:
        yield front, picker
    await picker.stop()


@pytest.fixture
def front(running: tuple[Front, EndpointPicker]) -> Front:
    front, picker = running
    picker.pick = lambda path: front.services[0].address
    for service in front.services:
        service.engine.running.set()
        service.engine.requests.clear()
        service.engine.aborts.clear()
    return front


@pytest.fixture
def picker(running: tuple[Front, EndpointPicker]) -> EndpointPicker:
    return running[1]


async def test_calls_go_where_the_picker_says(front: Front, picker: EndpointPicker) -> None:
    for number, service in enumerate(front.services):
        picker.pick = lambda path, address=service.address: address  # type: ignore[misc]
        for _ in range(3):
            assert len(ids_of(await events_of(front.generate()))) == NUM_TOKENS
        assert front.answered[number] == 3


async def test_tokens_pass_one_by_one_and_in_order(front: Front, picker: EndpointPicker) -> None:
    engine = front.services[0].engine
    engine.running.clear()
    call = front.generate()
    await _until(lambda: engine.requests)
    received: list[int] = []
    for made in range(1, NUM_TOKENS + 1):
        engine.step()
        # No further token is made before this one is here.
        while len(received) < made:
            received += (await call.read()).event.delta.token_ids
    assert received == [token for output in next(iter(engine.requests.values())).outputs for token in output.tokens]
    assert await call.read() is not grpc.aio.EOF
    # Nothing of the answer went by the picker, nor does the shipped configuration send it any.
    assert picker.kinds == {"request_headers", "request_body"}


async def test_where_a_call_goes_is_not_the_callers_to_say(front: Front) -> None:
    other = front.services[1].address
    assert len(ids_of(await events_of(front.generate(metadata=((DESTINATION, other),))))) == NUM_TOKENS
    assert front.answered == [1, 0]


async def test_cancels_and_deadlines_reach_the_service(front: Front) -> None:
    engine = front.services[0].engine
    engine.running.clear()
    given_up = front.generate()
    await given_up.read()
    given_up.cancel()
    await _until(lambda: len(engine.aborts) == 1)
    stop = generation_pb2.StopConditions(max_tokens=NUM_TOKENS)
    request = inference_pb2.GenerateRequest(spec=generation_pb2.GenerationSpec(text="hello", stop=stop))
    late = front.stub.Generate(request, metadata=front.metadata, timeout=2)
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await events_of(late)
    assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await _until(lambda: len(engine.aborts) == 2)


async def test_sessions_do_not_wait_for_the_picker(front: Front, picker: EndpointPicker) -> None:
    picker.kinds.clear()
    session = front.stub.Session(metadata=front.metadata)
    stop = generation_pb2.StopConditions(max_tokens=NUM_TOKENS)
    submit = inference_pb2.SessionSubmit(spec=generation_pb2.GenerationSpec(text="hello", stop=stop))
    await session.write(inference_pb2.SessionRequest(stream_id=1, submit=submit))
    async with asyncio.timeout(240):
        first = await session.read()
    await session.done_writing()
    tokens = len(first.tokens.token_ids)
    while (response := await session.read()) is not grpc.aio.EOF:
        tokens += len(response.tokens.token_ids)
    assert tokens == NUM_TOKENS
    assert picker.kinds == set()


async def test_refusals_pass_with_their_details(front: Front) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await events_of(front.generate(tokens=0))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert any(key == "grpc-status-details-bin" for key, _ in refused.value.trailing_metadata())


async def test_a_picker_that_names_nobody_ends_calls_unavailable(front: Front, picker: EndpointPicker) -> None:
    for destination in ("", "not an address", "127.0.0.1:1"):
        picker.pick = lambda path, destination=destination: destination  # type: ignore[misc]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await events_of(front.generate())
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert front.answered == [0, 0]


async def test_a_picker_that_dies_takes_no_stream_along(front: Front, picker: EndpointPicker) -> None:
    engine = front.services[0].engine
    engine.running.clear()
    call = front.generate()
    await _until(lambda: engine.requests)
    await picker.stop()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await events_of(front.generate())
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    engine.running.set()
    assert len(ids_of(await events_of(call))) == NUM_TOKENS
    await picker.start(int(picker.address.rpartition(":")[2]))
    async with asyncio.timeout(240):
        while True:
            again = front.generate()
            if len(ids_of(await _events_or_none(again))) == NUM_TOKENS:
                return


async def _events_or_none(call: object) -> list[generation_pb2.GenerationEvent]:
    try:
        return await events_of(call)
    except grpc.aio.AioRpcError:
        await asyncio.sleep(0.2)
        return []


async def test_all_front_doors_keep_the_limits_of_the_first() -> None:
    """What stands between strangers and a service is said in four files, which must agree."""
    names = ("envoy.yaml", "balanced.yaml", "picker.yaml", "pod.yaml")
    first, *others = [yaml.safe_load((DEPLOY / "envoy" / name).read_text()) for name in names]
    for other in others:
        assert _guard(other) == _guard(first)
        assert other["overload_manager"] == first["overload_manager"]


def _guard(content: dict[str, object]) -> list[object]:
    """A front door without where calls go: its listener, and how it speaks to a service."""
    resources = content["static_resources"]
    (listener,) = resources["listeners"]  # type: ignore[index]
    (chain,) = listener["filter_chains"]
    (manager,) = chain["filters"]
    # A pod's front door speaks HTTP/1.1 too, for scrapes.
    elsewhere = ("http_filters", "route_config", "codec_type")
    config = {name: value for name, value in manager["typed_config"].items() if name not in elsewhere}
    chain["transport_socket"]["typed_config"]["common_tls_context"].pop("alpn_protocols", None)
    own = (
        "name",
        "type",
        "lb_policy",
        "load_balancing_policy",
        "load_assignment",
        "health_checks",
        "common_lb_config",
        "original_dst_lb_config",
    )
    clusters = [
        {name: value for name, value in cluster.items() if name not in own}
        for cluster in resources["clusters"]  # type: ignore[index]
        if cluster["name"] not in ("picker", "metrics")
    ]
    assert all(cluster == clusters[0] for cluster in clusters)
    listener = {name: value for name, value in listener.items() if name != "filter_chains"}
    chain = {name: value for name, value in chain.items() if name != "filters"}
    return [listener, chain, config, clusters[0]]


async def _until(condition: object) -> None:
    async with asyncio.timeout(240):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.01)
