"""The private folder: closed to others, gone afterwards, and swept when its server was killed."""

from __future__ import annotations

import concurrent.futures
import pathlib
import stat
import tempfile
from collections.abc import Iterator

import pytest

from headrace_supervisor.config import SupervisorConfig, runtime_base
from headrace_supervisor.runtime_folder import RuntimeFolderError, runtime_folder


@pytest.fixture
def base() -> Iterator[pathlib.Path]:
    """A folder with a short path; pytest's own may be too long for sockets."""
    with tempfile.TemporaryDirectory() as name:
        yield pathlib.Path(name)


def test_only_its_user_may_enter(base: pathlib.Path) -> None:
    with runtime_folder(base) as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert list(base.iterdir()) == []


def test_a_dead_servers_folder_is_removed_and_a_living_ones_kept(base: pathlib.Path) -> None:
    dead = base / "headrace-dead"
    dead.mkdir()
    (dead / "lock").touch()
    others = base / "headrace-of-something-else"
    others.mkdir()
    with runtime_folder(base) as first, runtime_folder(base) as second:
        assert first.exists() and second.exists() and others.exists()
        assert not dead.exists()


def test_servers_that_start_at_once_leave_each_others_folders_alone(base: pathlib.Path) -> None:
    def start_often(_: int) -> None:
        for _ in range(100):
            with runtime_folder(base) as folder:
                assert (folder / "lock").exists()

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(start_often, range(8)))
    assert list(base.iterdir()) == []


def test_a_base_that_is_missing_or_too_long_is_refused_by_name(base: pathlib.Path) -> None:
    with pytest.raises(RuntimeFolderError, match="absent"), runtime_folder(base / "absent"):
        pass
    with pytest.raises(RuntimeFolderError, match="too many for sockets"), runtime_folder(base / ("x" * 90)):
        pass


def test_a_default_that_is_too_long_gives_way(base: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = base / ("x" * 80)
    session.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(session))
    assert runtime_base(SupervisorConfig()) == pathlib.Path("/tmp")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    assert runtime_base(SupervisorConfig()) == base
    assert runtime_base(SupervisorConfig(runtime_folder=session)) == session
