"""Fixtures of the tests of OpenAI's HTTP API."""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from tests.openai_api.harness import Running, running_door
from tests.service.model_folder import write_model_folder


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_model_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def sockets() -> Iterator[pathlib.Path]:
    """A folder whose path is short enough for unix sockets."""
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        yield pathlib.Path(folder)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(model_path: pathlib.Path) -> AsyncIterator[Running]:
    """One service for a module's tests, which leave it as they found it."""
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        async with running_door(model_path, pathlib.Path(folder), default_model_aliases=("acme/tiny",)) as running:
            yield running
