"""Fixtures of the client tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.clients.canned_service import CannedServer, canned_server
from tests.clients.secured_server import Certificates, make_certificates

from headrace import Client


@pytest.fixture
def server() -> Iterator[CannedServer]:
    with canned_server() as running:
        yield running


@pytest.fixture
def client(server: CannedServer) -> Iterator[Client]:
    with Client(server.address) as connected:
        yield connected


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))
