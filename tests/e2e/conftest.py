"""One undisturbed server per process of pytest, for all tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.processes import wait_until
from tests.support.rpc import idle_load
from tests.support.running_server import RunningServer, running_server


@pytest.fixture(scope="session")
def shared_server() -> Iterator[RunningServer]:
    """A server of the demo model in fp32, with two services, any of which may be asked.

    In fp32 greedy answers can be compared token by token.
    """
    with running_server("--services", "2", "--dtype", "fp32", "--device", "cpu", "--num-blocks", "2048") as server:
        yield server


@pytest.fixture
def server(shared_server: RunningServer) -> Iterator[RunningServer]:
    """The shared server; fails the test if it leaves a request or a block behind."""
    yield shared_server
    wait_until(lambda: idle_load(shared_server.address), 60, "no request and no block left")
