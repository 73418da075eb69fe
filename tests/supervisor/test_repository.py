"""Names of the model repository: what is a model, and that no name leads out of it."""

from __future__ import annotations

import pathlib

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_supervisor import repository as repositories
from headrace_supervisor.refusals import Refused
from headrace_supervisor.repository import ModelRepository


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    for path in ("models/b", "models/a.1-x", "models/.hidden", "models/no-config", "models/with space", "outside"):
        (tmp_path / path).mkdir(parents=True)
    for path in ("b", "a.1-x", ".hidden", "with space", "../outside"):
        (tmp_path / "models" / path / "config.json").touch()
    (tmp_path / "models" / "file").touch()
    (tmp_path / "models" / "alias").symlink_to("b")
    (tmp_path / "models" / "escape").symlink_to(tmp_path / "outside")
    (tmp_path / "models" / "loop").symlink_to("loop")
    return tmp_path / "models"


def test_models_are_folders_with_a_config_below_the_repository(folder: pathlib.Path) -> None:
    assert ModelRepository(folder).names() == ("a.1-x", "alias", "b")


def test_a_folder_with_a_gguf_file_is_a_model(folder: pathlib.Path) -> None:
    (folder / "no-config" / "model.gguf").touch()
    assert ModelRepository(folder).names() == ("a.1-x", "alias", "b", "no-config")


def test_a_repository_that_is_gone_has_no_models(tmp_path: pathlib.Path) -> None:
    assert ModelRepository(tmp_path / "missing").names() == ()


def test_names_are_looked_up_on_the_disk_of_this_moment(folder: pathlib.Path) -> None:
    models = ModelRepository(folder)
    assert models.find("b") == folder / "b"
    (folder / "b" / "config.json").unlink()
    with pytest.raises(Refused):
        models.find("b")


@pytest.mark.parametrize("name", ["escape", "loop", "no-config", "file", "unknown"])
def test_what_is_no_model_is_not_found(folder: pathlib.Path, name: str) -> None:
    with pytest.raises(Refused) as refused:
        ModelRepository(folder).find(name)
    assert refused.value.code is grpc.StatusCode.NOT_FOUND and str(folder) not in str(refused.value)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../outside", "b/../b", "/etc", ".hidden", "a\\b", "with space", "a\0b", "x" * 129, "ü"]
)
def test_what_is_no_name_is_invalid(folder: pathlib.Path, name: str) -> None:
    with pytest.raises(Refused) as refused:
        ModelRepository(folder).find(name)
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT and "path traversal" in str(refused.value)


@given(name=st.text(max_size=200))
def test_a_name_that_is_taken_is_one_path_component(name: str) -> None:
    try:
        repositories.check_name(name)
    except Refused:
        return
    assert pathlib.PurePosixPath(name).parts == (name,) and not name.startswith(".") and "\0" not in name
