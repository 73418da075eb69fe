"""A service that is started with the addresses of several engines.

They serve one model together; what is something else is left out, named, and taken in when it fits.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pathlib
import socket
from typing import Any

import grpc
import pytest
import structlog
from grpc_health.v1 import health_pb2
from hypothesis import given
from hypothesis import strategies as st
from tests.service.fake_engine import FakeEngine
from tests.service.many_engines import TOKENS, Joined, fake, joined, replace, running

from headrace.v1 import inference_pb2
from headrace_service.config import ServiceConfig
from headrace_service.engines import request_ids, takeover_order
from headrace_service.engines.engine_group import EngineGroup, Identity, LeftOut

NOT_SERVING, SERVING = health_pb2.HealthCheckResponse.NOT_SERVING, health_pb2.HealthCheckResponse.SERVING


class Refusing(FakeEngine):
    """A backend of another protocol version."""

    async def Connect(self, request_iterator: Any, context: Any) -> None:
        await context.read()
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this backend speaks protocol version 9")


async def test_services_that_name_the_engines_in_any_order_find_each_others_requests(
    model_path: pathlib.Path, sockets: pathlib.Path
) -> None:
    engines = [fake(model_path) for _ in range(3)]
    async with (
        running(*engines, sockets=sockets) as addresses,
        joined(addresses) as one,
        joined([addresses[2], addresses[0], addresses[1]]) as other,
    ):
        await one.until_used(3)
        await other.until_used(3)
        assert await one.status("") == SERVING
        for first in range(3, 30):
            request_id = await one.submit(first)
            assert await other.read(request_id) == TOKENS
            # Prompts that begin alike meet, whoever is asked.
            again = await other.submit(first)
            assert request_ids.tag_of(again) == request_ids.tag_of(request_id)
        assert all(engine.requests for engine in engines)
        # Fewer engines leave the numbers of the others as they are.
        async with joined(addresses[1:]) as fewer:
            await fewer.until_used(2)
            kept = [request_id for engine in engines[1:] for request_id in engine.requests]
            assert [await fewer.read(request_id) for request_id in kept] == [TOKENS] * len(kept)


async def test_what_serves_something_else_is_left_out_named_and_taken_in_when_it_fits(
    model_path: pathlib.Path, sockets: pathlib.Path
) -> None:
    right = [fake(model_path) for _ in range(4)]
    odd = [fake(model_path, name="another"), fake(model_path, revision="old"), fake(model_path, Refusing)]
    with structlog.testing.capture_logs() as logged:
        # The odd ones are named first: most decide, not the first.
        async with running(*odd, *right, sockets=sockets) as addresses, joined(addresses) as server:
            await server.until_used(4)
            await server.until(lambda: len(server.service.core.models.left_out()) == 3)
            model = await server.model()
            assert (model.name, model.revision) == (right[0].model.name, right[0].model.revision)
            lines = list(model.engines_left_out)
            assert [f"{line.partition('.sock: ')[0]}.sock" for line in lines] == addresses[:3]
            assert "serves another at revision" in lines[0] and f"the others {model.name}" in lines[0]
            assert "at revision old" in lines[1] and "protocol version 9" in lines[2]
            listed = (await server.stub.ListModels(inference_pb2.ListModelsRequest())).models
            assert [(one.name, list(one.engines_left_out)) for one in listed] == [(model.name, lines)]
            assert [await server.status(f"engine/{address}") for address in addresses] == [NOT_SERVING] * 3 + [
                SERVING
            ] * 4
            assert await server.status("") == SERVING
            for first in range(3, 30):
                await server.submit(first)
            assert not any(engine.requests for engine in odd)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await server.stub.GetModel(inference_pb2.GetModelRequest(model="another"))
            assert error.value.code() is grpc.StatusCode.NOT_FOUND
            fitting = [await replace(engine, fake(model_path)) for engine in odd]
            await server.until_used(7)
            assert not (await server.model()).engines_left_out
            # Prompts that were asked before stay where they are cached.
            for first in range(30, 150):
                await server.submit(first)
            assert all(engine.requests for engine in fitting)
            for engine in fitting:
                await engine.stop()
    named = [line["engine"] for line in logged if line["event"] == "engine.left_out"]
    # Once each, however often they were asked.
    assert sorted(named) == sorted(addresses[:3])


async def meet_late_one(server: Joined, engine: FakeEngine, late: FakeEngine, late_address: str) -> None:
    await server.until_used(1)
    assert await server.status("") == SERVING
    assert await server.read(await server.submit(3)) == TOKENS
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await server.stub.GetModel(inference_pb2.GetModelRequest(model="another"))
    assert error.value.code() is grpc.StatusCode.NOT_FOUND
    await late.start(late_address)
    await server.until_used(2)
    for first in range(3, 30):
        await server.submit(first)
    assert engine.requests and late.requests
    await late.stop()


async def test_a_service_starts_when_one_engine_serves_and_finds_the_others_later(
    model_path: pathlib.Path, sockets: pathlib.Path
) -> None:
    engine, late = fake(model_path), fake(model_path)
    late_address = f"unix:{sockets}/late.sock"
    with structlog.testing.capture_logs() as logged:
        async with running(engine, sockets=sockets) as [address], joined([late_address, address]) as server:
            await meet_late_one(server, engine, late, late_address)
    missing = [line["engines"] for line in logged if line["event"] == "service.started_without"]
    assert missing == [[late_address]]


async def test_engines_that_change_their_model_one_after_the_other_take_the_service_along(
    model_path: pathlib.Path, sockets: pathlib.Path
) -> None:
    engines = [fake(model_path) for _ in range(3)]
    async with running(*engines, sockets=sockets) as addresses, joined(addresses) as server:
        await server.until_used(3)
        before = (await server.model()).revision
        engines[0] = await replace(engines[0], fake(model_path, revision="new"))
        await server.until(lambda: len(server.service.core.models.left_out()) == 1)
        assert (await server.model()).revision == before
        engines[1] = await replace(engines[1], fake(model_path, revision="new"))
        await server.until(
            lambda: {model.address for model in server.service.core.models if model.serving} == {*addresses[:2]}
        )
        assert (await server.model()).revision == "new"
        engines[2] = await replace(engines[2], fake(model_path, revision="new"))
        await server.until_used(3)
        assert not (await server.model()).engines_left_out
        for engine in engines:
            await engine.stop()


async def test_engines_found_by_a_name_come_and_go_with_its_addresses(
    model_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name server is the test's; the engines have addresses of their own on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    engines = {f"127.0.0.{last}": fake(model_path) for last in (1, 2)}
    for host, engine in engines.items():
        await engine.start(f"{host}:{port}")
    hosts: list[str] = []
    real = socket.getaddrinfo

    def look_up(host: Any, *rest: Any, **named: Any) -> Any:
        if host != "engines.example":
            return real(host, *rest, **named)
        if not hosts:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in hosts]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with structlog.testing.capture_logs() as logged:
        async with joined([], engines_dns=(f"engines.example:{port}",), engines_dns_s=0.1) as server:
            await server.until(lambda: server.service.core.models.look_ups.failures)
            with pytest.raises(grpc.aio.AioRpcError, match="engines.example:.* resolves to nothing: Name or service"):
                await server.model()
            assert await server.status("") == NOT_SERVING
            hosts.append("127.0.0.1")
            await server.until_used(1)
            hosts.append("127.0.0.2")
            await server.until_used(2)
            for first in range(3, 30):
                await server.submit(first)
            assert all(engine.requests for engine in engines.values())
            hosts.pop(0)
            await server.until(lambda: [model.address for model in server.service.core.models] == [f"127.0.0.2:{port}"])
            # A name server that fails takes no engine away.
            hosts.clear()
            await server.until(lambda: server.service.core.models.look_ups.failures)
            assert await server.read(await server.submit(3)) == TOKENS
    assert len([line for line in logged if line["event"] == "engines.no_address"]) == 2
    for engine in engines.values():
        await engine.stop()


async def test_engines_of_a_file_come_and_go_as_it_changes(
    model_path: pathlib.Path, sockets: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    engines = [fake(model_path), fake(model_path)]
    path = tmp_path / "engines"
    async with running(*engines, sockets=sockets) as (first, second), joined([], engines_file=path) as server:
        models, file = server.service.core.models, server.service.core.models.file
        assert file is not None
        await server.until(lambda: file.failure)
        with pytest.raises(grpc.aio.AioRpcError, match=f"engines_file: {path}: No such file"):
            await server.model()
        path.write_text(f"# the first\n{first}\n")
        await server.until_used(1)
        # Twice the same engine is one engine.
        path.write_text(f"{first}\n\n {second} \n{first}\n")
        await server.until_used(2)
        # Nobody writes to this pipe, and the file is still followed.
        path.unlink()
        os.mkfifo(path)
        await server.until(lambda: file.failure == f"engines_file: {path}: is no file")
        path.unlink()
        # A file with a mistake takes no engine away, and brings none.
        path.write_text(f"{second}\nnowhere\n")
        await server.until(lambda: "nowhere" in file.failure)
        assert "line 2: 'nowhere' must be HOST:PORT with a port of 1 to 65535, or unix:PATH" in file.failure
        assert sum(model.serving for model in models) == 2
        path.write_text(f"{second}\n")
        await server.until(lambda: [model.address for model in models] == [second])
        assert await server.read(await server.submit(3)) == TOKENS


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"engine": ("here",)}, "engine: 'here' must be HOST:PORT with a port of 1 to 65535, or unix:PATH"),
        ({"engine": ("here:0",)}, "engine: 'here:0' must be HOST:PORT with a port of 1 to 65535"),
        ({"engines_dns": ("engines:0",)}, "engines_dns: 'engines:0' must be NAME:PORT with a port of 1 to 65535"),
        ({"engine": ("a:1", "b:2", "a:1")}, "engine: 'a:1' is named twice"),
        ({"engines_dns": ("unix:/engine.sock",)}, "engines_dns: 'unix:/engine.sock' must be NAME:PORT"),
        ({"engines_dns": ("engines",)}, "engines_dns: 'engines' must be NAME:PORT"),
        ({"engines_dns": ("a:1",), "control": "unix:/c"}, "engine: the backend's address is needed, or control"),
        ({"engines_file": "f", "control": "unix:/c"}, "engine: the backend's address is needed, or control"),
        ({"engines_file": "f", "engines_dns": ("a:1",)}, "engines_file: engines_dns names engines too"),
    ],
)
def test_engines_that_cannot_be_meant_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ServiceConfig(listen=("127.0.0.1:0",), **settings)


# -- the choice of the model


@dataclasses.dataclass(eq=False)
class Engine:
    """One engine as the group sees it."""

    number: int
    left_out: str = ""
    serving: bool = True
    is_reachable: bool = True
    num_open: int = 0
    is_known: bool = True

    @property
    def address(self) -> str:
        return f"unix:/{self.number}"


@given(st.lists(st.sampled_from("aab"), min_size=1, max_size=7), st.randoms())
def test_services_come_to_one_model_whoever_answers_first(revisions: list[str], order: Any) -> None:
    async def left_out() -> list[int]:
        group: EngineGroup[Engine] = EngineGroup()
        engines = [Engine(number) for number in range(len(revisions))]
        for engine in engines:
            group.join(engine)
        asked = list(engines)
        order.shuffle(asked)

        async def ask(engine: Engine) -> None:
            try:
                await group.admit(engine, Identity("model", revisions[engine.number]))
                group.take_in(engine)
            except LeftOut as why:
                group.failed(engine, str(why))

        await asyncio.gather(*map(ask, asked))
        used = {engine.number for engine in group.engines}
        assert used == {engine.number for engine in engines if not engine.left_out}
        return [engine.number for engine in engines if engine.left_out]

    most = max(revisions, key=revisions.count)
    assert asyncio.run(left_out()) == [number for number, one in enumerate(revisions) if one != most]


@given(st.sets(st.text(max_size=20), max_size=50))
def test_tags_tell_engines_apart_by_their_numbers_alone(addresses: set[str]) -> None:
    numbers = {request_ids.number_of(address) for address in addresses}
    assert all(0 <= number < 1 << 20 for number in numbers)
    assert len({request_ids.model_tag("model", number) for number in numbers}) == len(numbers)


@given(st.text(max_size=8), st.text(min_size=1, max_size=8), st.integers(0, 2**20 - 1), st.text(min_size=1, max_size=8))
def test_an_id_tells_the_place_of_its_key_and_the_number_of_its_engine(
    tenant: str, key: str, number: int, model: str
) -> None:
    tag, place = request_ids.model_tag(model, number), request_ids.key_place(tenant, key)
    source = request_ids.RequestIds()
    made = [source.new(tag, place) for _ in range(5)]
    assert made == sorted(made) and len(set(made)) == 5
    for request_id in made:
        assert (request_ids.place_of(request_id), request_ids.tag_of(request_id)) == (place, tag)
        assert request_ids.number_in(request_ids.tag_of(request_id), model) == number


@given(st.sets(st.integers(0, 2**20 - 1), min_size=2, max_size=12), st.text(max_size=4))
def test_the_order_of_takeover_is_kept_when_engines_leave(numbers: set[int], place: str) -> None:
    engines = [Engine(number) for number in numbers]
    order = takeover_order.in_order(engines, place, most=12)
    assert takeover_order.in_order(reversed(engines), place, most=12) == order
    assert takeover_order.in_order(order[1:], place, most=12) == order[1:]
