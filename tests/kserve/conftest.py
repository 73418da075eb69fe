"""Fixtures of the KServe wire's tests.

They are the service's own, with the conformance models and shared memory switched on.
"""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from tests.kserve.conformance_models import all_models
from tests.kserve.wire import Wire
from tests.service.harness import Running, running_service
from tests.service.model_folder import write_model_folder


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_model_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def sockets() -> Iterator[pathlib.Path]:
    """A folder whose path is short enough for unix sockets."""
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        yield pathlib.Path(folder)


@pytest_asyncio.fixture
async def running(model_path: pathlib.Path, sockets: pathlib.Path) -> AsyncIterator[Running]:
    async with running_service(
        model_path, sockets, conformance_models=all_models.__name__, kserve_shared_memory=True
    ) as service:
        yield service


@pytest.fixture
def wire(running: Running) -> Wire:
    return Wire(running.channel)
