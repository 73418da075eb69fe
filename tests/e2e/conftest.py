"""The undisturbed server of this process of pytest, for tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.processes import wait_until
from tests.support.rpc import idle_load
from tests.support.running_server import RunningServer


@pytest.fixture
def server(shared_server: RunningServer) -> Iterator[RunningServer]:
    """The shared server; fails the test if it leaves a request or a block behind."""
    yield shared_server
    wait_until(lambda: idle_load(shared_server.address), 60, "no request and no block left")
