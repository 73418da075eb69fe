"""A backend, idle or busy, or a service is stopped and stays.

It is found, ended and replaced as if it had died, and nothing is left behind.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import grpc
import psutil
import pytest
from tests.faults.open_streams import Reader, Strike, read_all
from tests.support.processes import alive, wait_until
from tests.support.rpc import idle_load, serves
from tests.support.running_server import RunningServer, configuration_of, running_server

OPTIONS = ("--services", "2", "--hang-timeout-s", "2", "--dtype", "fp32", "--device", "cpu", "--num-blocks", "512")
CANARY_TOKENS = 20


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningServer]:
    """One server, whose processes are stopped by one test after the other."""
    with running_server(*OPTIONS) as server:
        yield server


@pytest.fixture
def server(shared: RunningServer) -> RunningServer:
    """All of it serves, and has none of an earlier test's generations."""
    wait_until(lambda: len(shared.services()) == 2, 120, "both services")
    wait_until(lambda: serves(shared.address), 120, "SERVING")
    wait_until(lambda: idle_load(shared.address), 120, "no request left")
    return shared


@pytest.fixture(scope="module")
def golden(shared: RunningServer) -> list[list[int]]:
    """The undisturbed answers."""
    wait_until(lambda: serves(shared.address), 120, "SERVING")
    return [reader.tokens for reader in asyncio.run(read_all(shared.address))]


def descriptors(pid: int) -> list[str]:
    """What a process has open."""
    folder = f"/proc/{pid}/fd"
    found = []
    for name in os.listdir(folder):
        try:
            found.append(os.readlink(f"{folder}/{name}"))
        except FileNotFoundError:
            continue
    return sorted(found)


def pulse(process: psutil.Process) -> str:
    """The pipe into which a process beats, as its descriptors name it."""
    command = process.cmdline()
    return os.readlink(f"/proc/{process.pid}/fd/{command[command.index('--pulse-fd') + 1]}")


def assert_replaced(server: RunningServer, process: psutil.Process, name: str) -> None:
    wait_until(lambda: not alive([process.pid]), 120, f"{name} gone")
    line = f"{name} hangs and is killed"
    wait_until(lambda: any(line in said and f"pid={process.pid} " in said for said in server.lines), 60, line)


def assert_answers(server: RunningServer, golden: list[list[int]]) -> None:
    wait_until(lambda: serves(server.address), 120, "SERVING again")
    again = asyncio.run(read_all(server.address, num_tokens=CANARY_TOKENS))
    assert [reader.tokens for reader in again] == [answer[:CANARY_TOKENS] for answer in golden]


def assert_broken_off(readers: list[Reader], golden: list[list[int]]) -> None:
    """Each stream ended once, with what it had until then."""
    assert {reader.code for reader in readers} == {grpc.StatusCode.UNAVAILABLE}
    for reader, answer in zip(readers, golden, strict=True):
        assert 0 < len(reader.tokens) < len(answer)
        assert reader.tokens == answer[: len(reader.tokens)]


# One that is busy is, in the next test; one of two in tests/e2e/test_replicas.
@pytest.mark.slow
def test_an_idle_backend_that_is_stopped_is_replaced(server: RunningServer, golden: list[list[int]]) -> None:
    backend, worker = server.backend(), server.worker()
    backend.suspend()
    assert_replaced(server, backend, "backend")
    wait_until(lambda: not alive([worker.pid]), 60, "the dead backend's worker gone")
    assert_answers(server, golden)


# Who is stopped is replaced in tests/supervisor/test_hang_watch; streams of a backend that is
# gone end so in test_processes_die.
@pytest.mark.slow
def test_a_busy_backend_that_is_stopped_ends_its_streams_and_leaves_nothing(
    server: RunningServer, golden: list[list[int]]
) -> None:
    backend, worker = server.backend(), server.worker()
    held = len(descriptors(server.process.pid))
    assert pulse(backend) in descriptors(server.process.pid)
    assert pulse(backend) not in descriptors(worker.pid)
    readers = asyncio.run(read_all(server.address, Strike(backend.pid, signal.SIGSTOP)))
    assert_broken_off(readers, golden)
    assert all(reader.retry_info for reader in readers)
    assert_replaced(server, backend, "backend")
    wait_until(lambda: not alive([worker.pid]), 60, "the dead backend's worker gone")
    assert_answers(server, golden)
    wait_until(lambda: len(descriptors(server.process.pid)) == held, 60, "as many descriptors as before")


def busy_service(server: RunningServer) -> psutil.Process:
    """The service that has a caller."""
    port = int(server.address.rpartition(":")[2])
    callers = {
        service: [each for each in service.net_connections("tcp") if each.laddr.port == port and each.raddr]
        for service in server.services()
    }
    [busy] = [service for service, connections in callers.items() if connections]
    return busy


# Who is stopped is replaced in tests/supervisor/test_hang_watch.
@pytest.mark.slow
def test_a_service_that_is_stopped_is_replaced(server: RunningServer, golden: list[list[int]]) -> None:
    stopped: list[tuple[str, psutil.Process]] = []

    def stop() -> None:
        service = busy_service(server)
        stopped.append((configuration_of(service).stem, service))
        service.suspend()

    assert_broken_off(asyncio.run(read_all(server.address, stop)), golden)
    [(name, service)] = stopped
    assert_replaced(server, service, name)
    wait_until(lambda: len(server.services()) == 2, 120, "both services")
    assert_answers(server, golden)
