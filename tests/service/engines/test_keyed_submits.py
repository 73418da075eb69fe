"""An idempotency key whose engine is away has its request at another one, and one request only.

The services and their connections are real; the engines are fakes that judge as a backend does
whether they may stand in for another one, after a fraction of a backend's quiet time.
"""

from __future__ import annotations

import asyncio
import pathlib
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2, status_pb2
from tests.service.engines.test_guardian import ANSWER, Group, copy_of, group
from tests.service.fake_engine import FakeEngine
from tests.service.many_engines import Joined, fake, replace

from headrace.v1 import generation_pb2, inference_pb2
from headrace_service.generations import keyed_requests

UNREACHED = "may be in use at an engine that cannot be reached"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are lost count as settled after a fraction of the time, as fakes are quick."""
    monkeypatch.setattr(keyed_requests, "_SETTLED_S", 0.2)


async def submit(service: Joined, key: str, first: int = 7, timeout_s: float = 60.0) -> Any:
    spec = generation_pb2.GenerationSpec(token_ids=generation_pb2.TokenIds(ids=[first] * 64))
    request = inference_pb2.SubmitRequest(spec=spec, idempotency_key=key)
    return await service.stub.Submit(request, timeout=timeout_s)


async def refusal(service: Joined, key: str) -> grpc.aio.AioRpcError:
    """A Submit that is held until patience ends, after several attempts, and refused then."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(grpc.aio.AioRpcError) as error:
        patch.setattr(keyed_requests, "_PATIENCE_S", 1.5)
        await submit(service, key)
    return error.value


async def keys_of_one_engine(three: Group, number: int) -> tuple[FakeEngine, list[str]]:
    """Keys that belong to one engine, the first of which has a request there."""
    first = await submit(three.one, "key 0")
    home, keys = three.at(first.request_id), ["key 0"]
    for index in range(1, 200):
        made = await submit(three.one, f"probe {index}", first=9)
        if made.request_id in home.requests:
            # The key's engine depends on the tenant and the key alone; free it for the test.
            del home.requests[made.request_id]
            guardian = three.one.service.core.generations._guardian
            guardian.forget(guardian._by_id.get(made.request_id))
            keys.append(f"probe {index}")
            if len(keys) == number:
                return home, keys
    raise AssertionError("no keys of one engine")


def keyed(three: Group, key: str) -> list[str]:
    """Ids of the requests that engines have under a key."""
    found = [r for engine in three.engines for r in engine.requests.values() if r.add.idempotency_key == key]
    return [request.add.request_id for request in found]


async def came_back(three: Group, lost: FakeEngine, folder: pathlib.Path) -> FakeEngine:
    back = await replace(lost, fake(folder))
    back.script, back.life = lost.script, "another life"
    three.engines.append(back)
    for service in (three.one, three.other):
        await service.until_used(len(three.engines))
    return back


async def test_a_key_whose_engine_is_lost_has_one_request_elsewhere(
    model_path: pathlib.Path, sockets: pathlib.Path
) -> None:
    async with group(model_path, sockets) as three:
        home, keys = await keys_of_one_engine(three, 4)
        await three.lose(home)
        made = {}
        for index, key in enumerate(keys[1:]):
            made[key] = await submit((three.one, three.other)[index % 2], key)
            assert not made[key].existing
        for key, first in made.items():
            for service in (three.one, three.other):
                again = await submit(service, key)
                assert (again.existing, again.request_id) == (True, first.request_id)
                assert await service.read(first.request_id) == ANSWER
        back = await came_back(three, home, model_path)
        for key, first in made.items():
            for service in (three.other, three.one):
                assert (await submit(service, key)).request_id == first.request_id
            assert keyed(three, key) == [first.request_id]
        # It follows its request, and never goes back to its own engine before that is lost too.
        assert not any(request.add.idempotency_key in made for request in back.requests.values())
        await back.stop()


async def test_a_key_placed_elsewhere_moves_on_when_that_engine_is_lost_too(
    model_path: pathlib.Path, sockets: pathlib.Path
) -> None:
    async with group(model_path, sockets) as three:
        home, keys = await keys_of_one_engine(three, 2)
        three.hold()
        await three.lose(home)
        made = await submit(three.one, keys[1])
        await three.other.until(lambda: three.at(made.request_id) is not None)
        second = three.at(made.request_id)
        back = await came_back(three, home, model_path)
        back.running.clear()
        await three.lose(second)
        # Whoever is asked while the request is on its way waits for it.
        answers = await asyncio.gather(*(submit(service, keys[1]) for service in (three.other, three.one) * 3))
        assert {answer.request_id for answer in answers} == {made.request_id}
        assert keyed(three, keys[1]) == [made.request_id]
        await back.stop()


async def test_many_at_once_make_one_request(model_path: pathlib.Path, sockets: pathlib.Path) -> None:
    async with group(model_path, sockets) as three:
        home, keys = await keys_of_one_engine(three, 2)
        await three.lose(home)
        answers = await asyncio.gather(*(submit(service, keys[1]) for service in (three.one, three.other) * 8))
        assert len({answer.request_id for answer in answers}) == 1
        assert sum(not answer.existing for answer in answers) == 1
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await submit(three.other, keys[1], first=8)
        assert error.value.code() is grpc.StatusCode.ALREADY_EXISTS


async def test_no_engine_stands_in_for_one_that_another_service_reaches(
    model_path: pathlib.Path, sockets: pathlib.Path
) -> None:
    async with group(model_path, sockets) as three:
        home, keys = await keys_of_one_engine(three, 3)
        home.shun("one")
        await three.one.until(lambda: sum(model.is_reachable for model in three.one.service.core.models) == 2)
        # The other service may place it there at any time, and does.
        error = await refusal(three.one, keys[1])
        assert error.code() is grpc.StatusCode.UNAVAILABLE and UNREACHED in (error.details() or "")
        assert not keyed(three, keys[1])
        made = await submit(three.other, keys[1])
        assert three.at(made.request_id) is home
        assert (await refusal(three.one, keys[1])).code() is grpc.StatusCode.UNAVAILABLE
        home.shunned.clear()
        assert (await submit(three.one, keys[1])).request_id == made.request_id
        assert keyed(three, keys[1]) == [made.request_id]


async def test_the_keys_engine_takes_nothing_that_may_be_where_another_service_looks(
    model_path: pathlib.Path, sockets: pathlib.Path
) -> None:
    async with group(model_path, sockets) as three:
        home, keys = await keys_of_one_engine(three, 2)
        await three.lose(home)
        made = await submit(three.one, keys[1])
        stand_in = three.at(made.request_id)
        back = await came_back(three, home, model_path)
        stand_in.shun("other")
        await three.other.until(lambda: sum(model.is_reachable for model in three.other.service.core.models) == 2)
        # The key's own engine is back and empty, and the other service can't ask the right one.
        assert (await refusal(three.other, keys[1])).code() is grpc.StatusCode.UNAVAILABLE
        assert keyed(three, keys[1]) == [made.request_id]
        stand_in.shunned.clear()
        assert (await submit(three.other, keys[1])).request_id == made.request_id
        await back.stop()


async def test_no_engine_stands_in_while_requests_of_the_lost_one_are_on_their_way(
    model_path: pathlib.Path, sockets: pathlib.Path
) -> None:
    async with group(model_path, sockets) as three:
        home, keys = await keys_of_one_engine(three, 2)
        three.hold()
        waits = await submit(three.one, keys[1])
        assert three.at(waits.request_id) is home
        # Nobody has room for it, so it is nowhere but with its guardian.
        for engine in three.engines:
            engine.refusal = status_pb2.Status(code=code_pb2.RESOURCE_EXHAUSTED, message="the queue is full")
        await three.lose(home)
        assert (await refusal(three.other, keys[1])).code() is grpc.StatusCode.UNAVAILABLE
        assert copy_of(three.one, waits.request_id).moving is not None
        for engine in three.engines:
            engine.refusal = None
        assert (await submit(three.other, keys[1])).request_id == waits.request_id
        assert keyed(three, keys[1]) == [waits.request_id]


async def test_a_call_that_no_engine_can_take_ends_by_name(model_path: pathlib.Path, sockets: pathlib.Path) -> None:
    async with group(model_path, sockets) as three:
        _, keys = await keys_of_one_engine(three, 2)
        for engine in list(three.engines):
            await three.lose(engine)
        error = await refusal(three.one, keys[1])
        assert error.code() is grpc.StatusCode.UNAVAILABLE and "cannot be reached" in (error.details() or "")
        # The service says so itself before the deadline, or the client's clock is the first.
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await submit(three.one, keys[1], timeout_s=1.0)
        assert late.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
