"""A model of several engines is one model to its callers.

Prompts that begin alike meet at one engine, and what a lost engine computed goes on at another.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import pathlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from tests.kserve.wire import Wire, stream, text
from tests.service.fake_engine import FakeEngine
from tests.service.fake_supervisor import FakeSupervisor
from tests.service.harness import engine_model, events_of, ids_of, kinds_of, quick_start

from headrace.v1 import generation_pb2, inference_pb2, inference_pb2_grpc
from headrace_protos.control.v1 import control_pb2
from headrace_service.config import ServiceConfig
from headrace_service.server import Service

TOKENS = [10, 11, 12]
READY = control_pb2.BACKEND_STATE_READY


# -- a service over two engines of one model


@dataclasses.dataclass
class Server:
    """A service and the two engines of its one model."""

    service: Service
    engines: list[FakeEngine]
    stub: Any
    channel: grpc.aio.Channel
    supervisor: FakeSupervisor

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(120):
            while not condition():
                await asyncio.sleep(0.01)

    def generate(self, spec: generation_pb2.GenerationSpec) -> Any:
        return self.stub.Generate(inference_pb2.GenerateRequest(spec=spec))

    def tell(self, *addresses: str) -> None:
        """Says where the model's engines are, by number; "": nobody has the number."""
        first, *others = addresses
        self.supervisor.set_model(self.engines[0].model.name, READY, first, replica_addresses=others)

    def at(self, request_id: str) -> int:
        """Which engine has a request."""
        [found] = [index for index, engine in enumerate(self.engines) if request_id in engine.requests]
        return found

    async def specs(self) -> list[generation_pb2.GenerationSpec]:
        """A prompt for each engine."""
        found: dict[int, generation_pb2.GenerationSpec] = {}
        for first in range(3, 60):
            spec = spec_of(first)
            made = await self.stub.Submit(inference_pb2.SubmitRequest(spec=spec))
            found.setdefault(self.at(made.request_id), spec)
            if len(found) == len(self.engines):
                break
        return [found[index] for index in range(len(self.engines))]


def spec_of(first: int, last: int = 5) -> generation_pb2.GenerationSpec:
    """A prompt whose beginning `first` names."""
    return generation_pb2.GenerationSpec(token_ids=generation_pb2.TokenIds(ids=[first] * 64 + [last]))


@contextlib.asynccontextmanager
async def served(model_path: pathlib.Path, sockets: pathlib.Path) -> AsyncIterator[Server]:
    engines = [FakeEngine(engine_model(model_path), lambda add, index: TOKENS) for _ in range(2)]
    for index, engine in enumerate(engines):
        # So quick that no prompt waits for others.
        engine.state.load.prefill_tokens_per_second = 1e9
        await engine.start(f"unix:{sockets}/engine-{index}.sock")
    name = engines[0].model.name
    supervisor = FakeSupervisor(name)
    await supervisor.start(f"unix:{sockets}/control.sock")
    supervisor.set_model(name, READY, engines[0].address, replica_addresses=[engines[1].address])
    service = Service(
        ServiceConfig(listen=("127.0.0.1:0",), control=f"unix:{sockets}/control.sock", shutdown_grace_s=0.5)
    )
    (address,) = await service.start()
    async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        server = Server(service, engines, inference_pb2_grpc.InferenceServiceStub(channel), channel, supervisor)
        try:
            models = service.core.models
            await server.until(lambda: len(list(models)) == 2 and all(model.serving for model in models))
            yield server
        finally:
            await service.stop(0)
            await supervisor.stop()
            for engine in engines:
                await engine.stop()


@pytest_asyncio.fixture
async def server(model_path: pathlib.Path, sockets: pathlib.Path) -> AsyncIterator[Server]:
    with quick_start():
        async with served(model_path, sockets) as running:
            yield running


async def test_prompts_that_begin_alike_meet_at_one_engine(server: Server) -> None:
    for first in range(3, 20):
        made = [await server.stub.Submit(inference_pb2.SubmitRequest(spec=spec_of(first, last))) for last in range(4)]
        assert len({server.at(one.request_id) for one in made}) == 1
    assert all(engine.requests for engine in server.engines)


async def test_every_wire_takes_a_prompt_to_the_same_engine(server: Server) -> None:
    wire = Wire(server.channel)

    async def asked(call: Any) -> int:
        """Which engine a call went to."""
        before = [len(engine.requests) for engine in server.engines]
        await call
        [found] = [index for index, engine in enumerate(server.engines) if len(engine.requests) > before[index]]
        return found

    found = set()
    for index in range(8):
        prompt = f"{index} of eight: " + "once upon a time " * 6
        spec = generation_pb2.GenerationSpec(text=prompt)
        submit = inference_pb2.SessionSubmit(spec=spec)
        session = server.stub.Session()
        engines = [
            await asked(events_of(server.generate(spec))),
            await asked(server.stub.Complete(inference_pb2.CompleteRequest(spec=spec))),
            await asked(server.stub.Submit(inference_pb2.SubmitRequest(spec=spec))),
            await asked(first_of(session, inference_pb2.SessionRequest(stream_id=1, submit=submit))),
            await asked(wire.ModelInfer(text(prompt))),
            await asked(stream(wire, text(prompt, stream=True))),
        ]
        session.cancel()
        assert len(set(engines)) == 1
        found.add(engines[0])
    assert found == {0, 1}


async def first_of(session: Any, request: inference_pb2.SessionRequest) -> None:
    await session.write(request)
    await session.read()


async def test_callers_see_one_model(server: Server) -> None:
    assert len((await server.stub.ListModels(inference_pb2.ListModelsRequest())).models) == 1
    made = [
        (await server.stub.Submit(inference_pb2.SubmitRequest(spec=spec_of(first)))).request_id
        for first in range(3, 15)
    ]
    name = server.engines[0].model.name
    for model in ("", name):
        listed = (await server.stub.ListRequests(inference_pb2.ListRequestsRequest(model=model))).requests
        assert sorted(row.request_id for row in listed) == sorted(made)
        load = await server.stub.GetLoad(inference_pb2.GetLoadRequest(model=model))
        one = await next(iter(server.service.core.models)).engine.load()
        assert one.kv_blocks and (load.kv_blocks, load.model) == (2 * one.kv_blocks, name)


async def test_requests_are_found_by_their_ids_at_either_engine(server: Server) -> None:
    for index, spec in enumerate(await server.specs()):
        made = await server.stub.Submit(inference_pb2.SubmitRequest(spec=spec))
        subscribed = server.stub.Subscribe(inference_pb2.SubscribeRequest(request_id=made.request_id))
        assert ids_of(await events_of(subscribed)) == TOKENS
        await server.stub.Cancel(inference_pb2.CancelRequest(request_id=made.request_id))
        assert made.request_id in [abort.request_id for abort in server.engines[index].aborts]


async def test_a_session_reads_detached_generations_of_either_engine(server: Server) -> None:
    def submit(stream_id: int, spec: generation_pb2.GenerationSpec, detached: bool) -> inference_pb2.SessionRequest:
        message = inference_pb2.SessionSubmit(spec=spec, detached=detached)
        return inference_pb2.SessionRequest(stream_id=stream_id, submit=message)

    session = server.stub.Session()
    specs = await server.specs()
    for index, spec in enumerate(specs):
        for detached in (False, True):
            await session.write(submit(1 + 2 * index + detached, spec, detached))
    ended: set[int] = set()
    async with asyncio.timeout(120):
        while len(ended) < 4:
            response = await session.read()
            ended |= {event.stream_id for event in response.events if event.event.HasField("done")}
            assert not any(event.HasField("error") for event in response.events)
    session.cancel()


async def test_an_engine_that_is_lost_leaves_its_streams_and_prompts_to_others(server: Server) -> None:
    specs = await server.specs()
    for engine in server.engines:
        engine.running.clear()
    calls = [server.generate(spec) for spec in specs]
    for call in calls:
        await call.read()
    await server.engines[1].stop()
    server.engines[0].running.set()
    for call in calls:
        events = await events_of(call)
        assert ids_of(events) == TOKENS and kinds_of(events)[-1] == "done"
    assert ids_of(await events_of(server.generate(specs[1]))) == TOKENS
    assert server.service.core.serving
    load = await server.stub.GetLoad(inference_pb2.GetLoadRequest())
    assert load.serving and load.kv_blocks
    # It comes back, and what begins so comes back to it.
    back = FakeEngine(server.engines[1].model, lambda add, index: TOKENS)
    await back.start(server.engines[1].address)
    server.engines[1] = back
    await server.until(lambda: all(model.serving for model in server.service.core.models))
    made = await server.stub.Submit(inference_pb2.SubmitRequest(spec=specs[1]))
    assert server.at(made.request_id) == 1


async def test_an_idempotency_key_has_one_engine_and_follows_its_request_alone(server: Server) -> None:
    def submit(key: str) -> Any:
        return server.stub.Submit(inference_pb2.SubmitRequest(spec=spec_of(7), idempotency_key=key))

    made = {key: await submit(key) for key in (f"key {index}" for index in range(8))}
    at = {key: server.at(one.request_id) for key, one in made.items()}
    assert set(at.values()) == {0, 1}
    for key, one in made.items():
        again = await submit(key)
        assert again.existing and again.request_id == one.request_id
    await server.engines[0].stop()
    await server.until(lambda: not all(model.serving for model in server.service.core.models))
    for key, one in made.items():
        again = await submit(key)
        assert again.existing and again.request_id == one.request_id
    # New keys of the lost engine begin at the other one, and stay there.
    new = [f"new {index}" for index in range(8)]
    begun = await asyncio.gather(*(submit(key) for key in new))
    assert {server.at(one.request_id) for one in begun} == {1} and not any(one.existing for one in begun)
    again = await asyncio.gather(*(submit(key) for key in new))
    assert [one.request_id for one in again] == [one.request_id for one in begun]


async def test_engines_join_and_leave_while_the_model_is_served(server: Server) -> None:
    models = server.service.core.models
    first, second = server.engines
    made = [
        (await server.stub.Submit(inference_pb2.SubmitRequest(spec=spec_of(index)))).request_id
        for index in range(3, 15)
    ]
    at_second = [request_id for request_id in made if server.at(request_id) == 1]
    at_first = [request_id for request_id in made if server.at(request_id) == 0]
    third = FakeEngine(first.model, lambda add, index: TOKENS)
    third.state.load.prefill_tokens_per_second = 1e9
    await third.start(first.address.replace("engine-0", "engine-2"))
    server.engines.append(third)
    server.tell(first.address, second.address, third.address)
    await server.until(lambda: len(list(models)) == 3 and all(model.serving for model in models))
    moved = {index: server.at((await submitted(server, index)).request_id) for index in range(3, 40)}
    assert set(moved.values()) == {0, 1, 2}
    # The first leaves: its number stays free, and the others keep theirs and what they have.
    server.tell("", second.address, third.address)
    await server.until(lambda: len(list(models)) == 2)
    # What the first had is kept by the others, under the same ids.
    await server.until(lambda: set(at_first) <= {*second.requests, *third.requests})
    for request_id in (*at_first, *at_second):
        subscribed = server.stub.Subscribe(inference_pb2.SubscribeRequest(request_id=request_id))
        assert ids_of(await events_of(subscribed)) == TOKENS
    with pytest.raises(grpc.aio.AioRpcError) as error:
        unknown = at_first[0].replace("0", "z")
        await events_of(server.stub.Subscribe(inference_pb2.SubscribeRequest(request_id=unknown)))
    assert error.value.code() is grpc.StatusCode.NOT_FOUND
    for index, number in moved.items():
        now = server.at((await submitted(server, index)).request_id)
        assert now == number if number else now in (1, 2)
    # It comes back under its number, with its prefixes.
    server.tell(first.address, second.address, third.address)
    await server.until(lambda: len(list(models)) == 3 and all(model.serving for model in models))
    assert {index: server.at((await submitted(server, index)).request_id) for index in moved} == moved


async def submitted(server: Server, first: int) -> inference_pb2.SubmitResponse:
    return await server.stub.Submit(inference_pb2.SubmitRequest(spec=spec_of(first)))


async def test_an_engine_that_leaves_hands_its_streams_over(server: Server) -> None:
    specs = await server.specs()
    for engine in server.engines:
        engine.running.clear()
    calls = [server.generate(spec) for spec in specs]
    for call in calls:
        await call.read()
    server.tell(server.engines[0].address)
    server.engines[0].running.set()
    for call in calls:
        events = await events_of(call)
        assert ids_of(events) == TOKENS and kinds_of(events)[-1] == "done"
    assert ids_of(await events_of(server.generate(specs[1]))) == TOKENS


async def test_a_number_that_has_another_address_is_another_engine(server: Server) -> None:
    specs = await server.specs()
    other = FakeEngine(server.engines[1].model, lambda add, index: [20, 21])
    await other.start(server.engines[1].address.replace("engine-1", "engine-9"))
    server.tell(server.engines[0].address, other.address)
    models = server.service.core.models
    await server.until(lambda: [model.address for model in models][-1] == other.address)
    await server.until(lambda: all(model.serving for model in models))
    assert ids_of(await events_of(server.generate(specs[1]))) == [20, 21]
    await other.stop()
