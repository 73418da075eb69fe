"""Processes are killed or stopped while streams are open.

The tests look at what a caller sees, what comes back, and that nothing is left behind.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.faults.open_streams import NOT_SERVING, SERVING, TOKENS, Strike, prompt, read_all
from tests.support.processes import alive, wait_until
from tests.support.rpc import CALL_TIMEOUT_S, connected, greedy, idle_load, read, serves
from tests.support.running_server import RunningServer, running_server

from headrace.v1 import inference_pb2

# Long enough to be still running when another process has been killed and replaced.
DETACHED_TOKENS = 400
# Far more than a death needs to be seen, and than a step takes on a busy machine.
WATCHDOG_S = 20.0
OPTIONS = ("--dtype", "fp32", "--device", "cpu", "--num-blocks", "512", "--watchdog-s", str(WATCHDOG_S))


@contextmanager
def watched(address: str) -> Iterator[list[tuple[float, int]]]:
    """Collects the statuses that one Health.Watch reports, with the times at which they came."""
    seen: list[tuple[float, int]] = []
    with grpc.insecure_channel(address) as channel:
        call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())

        def collect() -> None:
            try:
                for response in call:
                    seen.append((time.monotonic(), response.status))
            except grpc.RpcError:
                pass  # cancelled below

        thread = threading.Thread(target=collect)
        thread.start()
        yield seen
        call.cancel()
        thread.join(10)


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningServer]:
    """One server, whose processes are lost and started again by one test after the other."""
    with running_server(*OPTIONS) as server:
        yield server


@pytest.fixture
def server(shared: RunningServer) -> RunningServer:
    """It serves, and has none of an earlier test's generations."""
    wait_until(lambda: serves(shared.address), 120, "SERVING")
    wait_until(lambda: idle_load(shared.address), 120, "no request left")
    return shared


@pytest.fixture(scope="module")
def golden(shared: RunningServer) -> list[list[int]]:
    """The undisturbed answers."""
    return [reader.tokens for reader in asyncio.run(read_all(shared.address))]


def assert_resumed(server: RunningServer, kind: int, golden: list[list[int]]) -> float:
    """Strikes the worker under open streams; they must go on where they were.

    Returns when it struck.
    """
    old = server.worker().pid
    strike = Strike(old, kind)
    readers = asyncio.run(read_all(server.address, strike))
    assert {reader.code for reader in readers} == {grpc.StatusCode.OK}
    assert [reader.tokens for reader in readers] == golden
    assert all(reader.resumed == 1 for reader in readers)
    assert not alive([old])
    wait_until(lambda: serves(server.address), 120, "SERVING again")
    return strike.at


# tests/backend/workers kills workers, tests/supervisor backends, every day.
@pytest.mark.slow
def test_the_worker_then_the_backend_is_killed_under_one_health_watch(
    server: RunningServer, golden: list[list[int]]
) -> None:
    with watched(server.address) as seen:
        wait_until(lambda: [status for _, status in seen] == [SERVING], 60, "the first status")
        struck_worker = assert_resumed(server, signal.SIGKILL, golden)

        worker = server.worker().pid
        strike = Strike(server.backend().pid, signal.SIGKILL)
        readers = asyncio.run(read_all(server.address, strike))
        assert {reader.code for reader in readers} == {grpc.StatusCode.UNAVAILABLE}
        assert all(reader.retry_info for reader in readers)
        assert all(r.tokens == answer[: len(r.tokens)] for r, answer in zip(readers, golden, strict=True))
        wait_until(lambda: not alive([worker]), 60, "the dead backend's worker gone")
        wait_until(lambda: serves(server.address), 120, "SERVING again")
        again = asyncio.run(read_all(server.address, num_tokens=20))
        assert [reader.tokens for reader in again] == [answer[:20] for answer in golden]

        expected = [SERVING, NOT_SERVING, SERVING, NOT_SERVING, SERVING]
        wait_until(lambda: [status for _, status in seen] == expected, 60, f"{expected}, not {seen}")
        # Said long before it was over, and not when it was.
        for down, struck in ((1, struck_worker), (3, strike.at)):
            noticed_s, recovered_s = (seen[place][0] - struck for place in (down, down + 1))
            assert 0 <= noticed_s < min(WATCHDOG_S, max(2.0, 0.75 * recovered_s))


# A stopped worker is found in tests/backend/workers/test_worker_faults.
@pytest.mark.slow
def test_a_hung_worker_is_noticed_and_replaced(server: RunningServer, golden: list[list[int]]) -> None:
    with watched(server.address) as seen:
        struck = assert_resumed(server, signal.SIGSTOP, golden)
        statuses = [status for _, status in seen]
        assert NOT_SERVING in statuses
        assert seen[statuses.index(NOT_SERVING)][0] - struck < WATCHDOG_S + 30


# That nothing outlives a killed supervisor is in tests/e2e/test_models, with two models.
# Without a real service to kill: tests/backend/test_backend_process, where a lost stream keeps
# detached generations.
@pytest.mark.slow
def test_a_detached_generation_survives_the_death_of_its_service(
    server: RunningServer, golden: list[list[int]]
) -> None:
    with connected(server.address) as stub:
        spec = greedy(prompt(0), DETACHED_TOKENS)
        request_id = stub.Submit(inference_pb2.SubmitRequest(spec=spec), timeout=CALL_TIMEOUT_S).request_id
    service = server.services()[0].pid
    os.kill(service, signal.SIGKILL)
    wait_until(lambda: service not in [process.pid for process in server.services()], 60, "the service gone")
    wait_until(lambda: serves(server.address), 120, "SERVING again")
    with connected(server.address) as stub:
        request = inference_pb2.SubscribeRequest(request_id=request_id)
        survivor = read(stub.Subscribe(request, timeout=CALL_TIMEOUT_S))
    assert len(survivor.tokens[0]) == DETACHED_TOKENS
    assert survivor.tokens[0][:TOKENS] == golden[0]
    assert survivor.done is not None
