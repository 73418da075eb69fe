"""Processes are killed or stopped while streams are open: what a caller sees, what comes back, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.support.running_server import RunningServer, alive, running_server, wait_until

from headrace.v1 import generation_pb2, inference_pb2, inference_pb2_grpc

STREAMS = 8
TOKENS = 400
OPTIONS = ("--dtype", "fp32", "--device", "cpu", "--watchdog-s", "3")


def request(index: int) -> inference_pb2.GenerateRequest:
    """A long greedy generation."""
    return inference_pb2.GenerateRequest(
        spec=generation_pb2.GenerationSpec(
            token_ids=generation_pb2.TokenIds(ids=[20 + index, 30, 40 + index]),
            sampling=generation_pb2.SamplingParameters(temperature=0),
            stop=generation_pb2.StopConditions(max_tokens=TOKENS, ignore_eos=True),
        )
    )


class Reader:
    """One open stream."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.resumed = 0
        self.code: grpc.StatusCode | None = None
        self.retry_info = False

    async def read(self, stub: inference_pb2_grpc.InferenceServiceStub, index: int) -> None:
        """Reads to the end, whatever it is."""
        stream = stub.Generate(request(index), timeout=120)
        try:
            async for response in stream:
                self.tokens.extend(response.event.delta.token_ids)
                self.resumed += response.event.HasField("resumed")
        except grpc.aio.AioRpcError as error:
            details = dict(error.trailing_metadata() or ()).get("grpc-status-details-bin", b"")
            self.retry_info = b"google.rpc.RetryInfo" in details
        self.code = await stream.code()


async def read_all(address: str, disturb: object = None) -> list[Reader]:
    """Opens the streams; once all have tokens, calls `disturb`."""
    readers = [Reader() for _ in range(STREAMS)]
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        tasks = [asyncio.create_task(reader.read(stub, index)) for index, reader in enumerate(readers)]
        if disturb is not None:
            assert callable(disturb)
            while not all(len(reader.tokens) >= 5 for reader in readers):
                await asyncio.sleep(0.01)
            disturb()
        await asyncio.gather(*tasks)
    return readers


def health(address: str) -> int:
    """Serving status of the whole server."""
    with grpc.insecure_channel(address) as channel:
        return int(health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2).status)


SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def golden() -> list[list[int]]:
    """The undisturbed answers."""
    with running_server(*OPTIONS) as server:
        return [reader.tokens for reader in asyncio.run(read_all(server.address))]


def watch(address: str, seen: list[tuple[float, int]]) -> grpc.Call:
    """Collects the statuses that Health.Watch reports."""
    channel = grpc.insecure_channel(address)
    call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())

    async def collect() -> None:
        def run() -> None:
            try:
                for response in call:
                    seen.append((time.monotonic(), response.status))
            except grpc.RpcError:
                channel.close()

        await asyncio.to_thread(run)

    import threading

    threading.Thread(target=lambda: asyncio.run(collect()), daemon=True).start()
    return call


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP])
def test_streams_go_on_after_their_worker_died_or_hung(kind: int, golden: list[list[int]]) -> None:
    with running_server(*OPTIONS) as server:
        old = server.worker().pid
        seen: list[tuple[float, int]] = []
        call = watch(server.address, seen)
        struck: list[float] = []

        def strike() -> None:
            struck.append(time.monotonic())
            os.kill(old, kind)

        readers = asyncio.run(read_all(server.address, strike))
        assert [reader.tokens for reader in readers] == golden
        assert {reader.code for reader in readers} == {grpc.StatusCode.OK}
        assert all(reader.resumed == 1 for reader in readers)
        assert not alive([old])
        wait_until(lambda: health(server.address) == SERVING, 30, "SERVING again")
        statuses = [status for _, status in seen]
        assert NOT_SERVING in statuses
        noticed = next(at for at, status in seen if status == NOT_SERVING) - struck[0]
        assert noticed < (1.0 if kind == signal.SIGKILL else 4.5)
        call.cancel()


def test_streams_end_unavailable_when_the_backend_dies_and_it_comes_back(golden: list[list[int]]) -> None:
    with running_server(*OPTIONS) as server:
        backend, worker = server.backend().pid, server.worker().pid
        readers = asyncio.run(read_all(server.address, lambda: os.kill(backend, signal.SIGKILL)))
        assert {reader.code for reader in readers} == {grpc.StatusCode.UNAVAILABLE}
        assert all(reader.retry_info for reader in readers)
        assert all(
            reader.tokens == answer[: len(reader.tokens)] for reader, answer in zip(readers, golden, strict=True)
        )
        wait_until(lambda: not alive([worker]), 2.0, "the dead backend's worker gone")
        wait_until(lambda: health(server.address) == SERVING, 30, "SERVING again")
        again = asyncio.run(read_all(server.address))
        assert [reader.tokens for reader in again] == golden


def submit_then(server: RunningServer) -> str:
    """A detached generation; returns its id."""
    with grpc.insecure_channel(server.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        return str(stub.Submit(inference_pb2.SubmitRequest(spec=request(0).spec)).request_id)


def test_a_detached_generation_survives_the_death_of_the_service(golden: list[list[int]]) -> None:
    with running_server(*OPTIONS) as server:
        request_id = submit_then(server)
        service = server.services()[0].pid
        os.kill(service, signal.SIGKILL)
        wait_until(lambda: server.services() and server.services()[0].pid != service, 15, "another service")

        def reachable() -> bool:
            try:
                return health(server.address) == SERVING
            except grpc.RpcError:
                return False

        wait_until(reachable, 15, "SERVING again")
        with grpc.insecure_channel(server.address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            events = [
                r.event for r in stub.Subscribe(inference_pb2.SubscribeRequest(request_id=request_id), timeout=60)
            ]
        assert [token for event in events for token in event.delta.token_ids] == golden[0]
        assert events[-1].HasField("done")


def test_nothing_outlives_a_killed_supervisor() -> None:
    with running_server(*OPTIONS) as server:
        pids = server.all_pids()
        server.process.kill()
        server.process.wait()
        wait_until(lambda: not alive(pids), 5.0, "all descendants gone")
