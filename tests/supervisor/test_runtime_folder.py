"""The private folder: closed to others, gone afterwards, and swept when its server was killed."""

from __future__ import annotations

import pathlib
import stat

import pytest

from headrace_supervisor.runtime_folder import RuntimeFolderError, runtime_folder


def test_only_its_user_may_enter(tmp_path: pathlib.Path) -> None:
    with runtime_folder(tmp_path) as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert list(tmp_path.iterdir()) == []


def test_a_dead_servers_folder_is_removed_and_a_living_ones_kept(tmp_path: pathlib.Path) -> None:
    dead = tmp_path / "headrace-dead"
    dead.mkdir()
    (dead / "lock").touch()
    others = tmp_path / "headrace-of-something-else"
    others.mkdir()
    with runtime_folder(tmp_path) as first, runtime_folder(tmp_path) as second:
        assert first.exists() and second.exists() and others.exists()
        assert not dead.exists()


def test_a_base_that_is_missing_or_too_long_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    with pytest.raises(RuntimeFolderError, match="absent"), runtime_folder(tmp_path / "absent"):
        pass
    with pytest.raises(RuntimeFolderError, match="107 bytes"), runtime_folder(tmp_path / ("x" * 90)):
        pass
