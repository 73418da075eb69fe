"""The model folder that all backends of a test run share."""

from __future__ import annotations

import pathlib

import pytest
from tests.backend.backend_harness import write_model_folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_model_folder(tmp_path_factory.mktemp("models") / "tiny")
