"""Fixtures of the service's tests."""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from tests.service.harness import Running, running_service
from tests.service.model_folder import write_model_folder

from headrace_service.text import chat_template


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_model_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def sockets() -> Iterator[pathlib.Path]:
    """A folder whose path is short enough for unix sockets."""
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        yield pathlib.Path(folder)


@pytest.fixture(autouse=True)
def _patient_helper_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits longer for an interpreter than a server should: the machine may be busy."""
    monkeypatch.setattr(chat_template, "_START_ALLOWANCE_S", 60.0)


@pytest_asyncio.fixture
async def running(model_path: pathlib.Path, sockets: pathlib.Path) -> AsyncIterator[Running]:
    async with running_service(model_path, sockets) as service:
        yield service
