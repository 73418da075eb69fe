"""What an agent may say, and what ends its stream: the engine goes on with what makes sense."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from tests.backend.backend_harness import BackendProcess, connected, until
from tests.backend.hosts.host_harness import METADATA, backend_of_hosts, running_agent, write_two_layers

from headrace_backend.server.hosts.ranks_service import PROTOCOL_VERSION
from headrace_facts.version import server_version
from headrace_protos.ranks.v1 import ranks_pb2
from headrace_request.request import LAYOUT

HELLO = {
    "protocol_version": PROTOCOL_VERSION,
    "version": server_version(),
    "request_layout": LAYOUT,
    "host": "other",
    "device_kind": "cpu",
}
RECORDS_OF_RANK_0 = ranks_pb2.FromHost(records=ranks_pb2.Records(rank=0))


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_two_layers(tmp_path_factory.mktemp("models") / "layers")


@contextlib.asynccontextmanager
async def stream(address: str, metadata: tuple[tuple[str, str], ...] = METADATA) -> AsyncIterator[Any]:
    """A stream to the RanksService that takes messages, or bytes as they are."""
    async with grpc.aio.insecure_channel(address) as channel:
        join = channel.stream_stream(
            "/headrace_ranks.v1.RanksService/Join",
            request_serializer=lambda each: each if isinstance(each, bytes) else each.SerializeToString(),
            response_deserializer=ranks_pb2.ToHost.FromString,
        )
        call: Any = join(None, metadata=metadata)
        try:
            yield call
        finally:
            call.cancel()


async def status(call: Any) -> tuple[grpc.StatusCode, str]:
    async with asyncio.timeout(60):
        return await call.code(), await call.details()


def hello(**other: Any) -> ranks_pb2.FromHost:
    return ranks_pb2.FromHost(hello=ranks_pb2.Hello(**{**HELLO, **other}))


async def test_what_makes_no_sense_ends_the_stream_and_nothing_else(
    two_layers: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    ours = server_version()
    firsts: list[tuple[bytes | ranks_pb2.FromHost, grpc.StatusCode, str]] = [
        (b"\xff\xff\xff", grpc.StatusCode.INVALID_ARGUMENT, "the message is no FromHost"),
        (ranks_pb2.FromHost(), grpc.StatusCode.INVALID_ARGUMENT, "the first message must be hello"),
        (RECORDS_OF_RANK_0, grpc.StatusCode.INVALID_ARGUMENT, "the first message must be hello"),
        (
            hello(version="0.0.1"),
            grpc.StatusCode.FAILED_PRECONDITION,
            f"its Headrace is of version 0.0.1 (protocol 2), and the engine's of {ours} (2)",
        ),
        (hello(protocol_version=1), grpc.StatusCode.FAILED_PRECONDITION, f"version {ours} (protocol 1)"),
        (hello(request_layout="x"), grpc.StatusCode.FAILED_PRECONDITION, ", of another build"),
        (
            hello(device_kind="cuda"),
            grpc.StatusCode.FAILED_PRECONDITION,
            "its device is cuda, and the engine's ranks are on cpu",
        ),
    ]
    seconds = [
        (b"\xff\xff\xff", grpc.StatusCode.INVALID_ARGUMENT, "the message is no FromHost"),
        (RECORDS_OF_RANK_0, grpc.StatusCode.INVALID_ARGUMENT, "must be joined or refused"),
        (
            ranks_pb2.FromHost(refused=ranks_pb2.Refused(reason="no room")),
            grpc.StatusCode.FAILED_PRECONDITION,
            "no room",
        ),
    ]
    async with backend_of_hosts(tmp_path, two_layers, pp=2) as (backend, address):
        async with stream(address, ()) as call:
            assert await status(call) == (grpc.StatusCode.UNAUTHENTICATED, "a valid bearer token is required")
        for first, code, said in firsts:
            async with stream(address) as call:
                await call.write(first)
                found, details = await status(call)
                assert (found, said in details) == (code, True), details
        for second, code, said in seconds:
            async with stream(address) as call:
                await call.write(hello())
                task = (await call.read()).task
                assert (task.first_rank, task.num_ranks) == (1, 1)
                await call.write(second)
                found, details = await status(call)
                assert (found, said in details) == (code, True), details
        await serves(backend, address, two_layers, tmp_path)


async def serves(backend: BackendProcess, address: str, model: pathlib.Path, folder: pathlib.Path) -> None:
    """A host that makes sense is taken, and the engine serves."""
    async with connected(address, METADATA) as client:
        with running_agent(folder, model, address):
            await client.wait_serving()
    assert not backend.log_lines("stream of a host failed")


def say(**message: Any) -> Callable[[], ranks_pb2.FromHost]:
    return lambda: ranks_pb2.FromHost(**message)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("message", "said"),
    [
        (say(records=ranks_pb2.Records(rank=0)), "it reported rank 0, which is not its own"),
        (say(exited=ranks_pb2.Exited(rank=7)), "it reported rank 7, which is not its own"),
        (say(started=ranks_pb2.Started(pids=[1, 2])), "2 workers were started, and it has 1 ranks"),
        (say(marks=ranks_pb2.Marks(ranks=[ranks_pb2.RankMarks()])), "0 counters of rank 1"),
        (say(hello=ranks_pb2.Hello()), "hello came where none is expected"),
        (
            say(records=ranks_pb2.Records(rank=1, records=[ranks_pb2.Record(kind=99)])),
            "worker 1 sent a record of unknown kind 99",
        ),
        (say(ended=ranks_pb2.Ended(failure="no descriptors")), "host other (rank 1): no descriptors"),
    ],
    ids=["other rank", "no rank", "pids", "marks", "hello", "kind", "failure"],
)
async def test_a_host_that_says_what_can_not_be_is_lost_for_that_reason(
    two_layers: pathlib.Path, tmp_path: pathlib.Path, message: Callable[[], ranks_pb2.FromHost], said: str
) -> None:
    async with backend_of_hosts(tmp_path, two_layers, pp=2) as (backend, address):
        async with stream(address) as call:
            await call.write(hello())
            await call.read()
            await call.write(ranks_pb2.FromHost(joined=ranks_pb2.Joined()))
            while not (await call.read()).HasField("start"):
                pass
            await call.write(message())
            lost = await until(lambda: backend.log_lines("worker lost"))
            assert said in lost[0]["reason"]


# A stream that ends is a lost host in test_hosts.
@pytest.mark.slow
async def test_an_agent_that_says_nothing_more_is_given_up(two_layers: pathlib.Path, tmp_path: pathlib.Path) -> None:
    async with backend_of_hosts(tmp_path, two_layers, pp=2) as (backend, address):
        async with stream(address) as call:
            await call.write(hello())
            await call.read()
            await call.write(ranks_pb2.FromHost(joined=ranks_pb2.Joined()))
            lost = await until(lambda: backend.log_lines("worker lost"))
            assert "host other (rank 1): it said nothing for 10 s" in lost[0]["reason"]
            with pytest.raises(grpc.aio.AioRpcError, match="ABORTED"):
                while await call.read() is not grpc.aio.EOF:
                    pass
