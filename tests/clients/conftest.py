"""Fixtures of the client tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.clients.canned_service import CannedServer, canned_server

from headrace import Client


@pytest.fixture
def server() -> Iterator[CannedServer]:
    with canned_server() as running:
        yield running


@pytest.fixture
def client(server: CannedServer) -> Iterator[Client]:
    with Client(server.address) as connected:
        yield connected
