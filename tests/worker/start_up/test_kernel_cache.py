"""The folder of compiled kernels.

Where it is, who may write to it, and what happens where it can't be used.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
from triton.runtime.cache import triton_key

from headrace_backend.worker.start_up.kernel_cache import (
    VARIABLE,
    UnusableFolder,
    checked_folder,
    default_folder,
    hash_compiler,
    use_kernel_cache,
)


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv(VARIABLE, "to be restored")
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_the_default_is_the_users_own_cache(tmp_path: pathlib.Path) -> None:
    assert use_kernel_cache(None) is None
    folder = tmp_path / "cache" / "headrace" / "kernels"
    assert os.environ[VARIABLE] == str(folder)
    assert folder.stat().st_mode & 0o777 == 0o700 and list(folder.iterdir()) == []
    assert default_folder({}) == pathlib.Path.home() / ".cache" / "headrace" / "kernels"
    assert default_folder({"XDG_CACHE_HOME": "relative"}) == default_folder({})


def test_a_setting_beats_the_environment_and_the_environment_the_default(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "/from/outside")
    assert use_kernel_cache(None) is None
    assert os.environ[VARIABLE] == "/from/outside"
    assert use_kernel_cache(tmp_path / "mine") is None
    assert os.environ[VARIABLE] == str(tmp_path / "mine")


def test_a_folder_that_cannot_be_made_gives_way_to_a_temporary_one_and_is_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    notice = use_kernel_cache(tmp_path / "file" / "kernels")
    assert notice is not None and str(tmp_path / "file" / "kernels") in notice and "--kernel-cache" in notice
    temporary = pathlib.Path(os.environ[VARIABLE])
    assert temporary.is_dir() and temporary.stat().st_mode & 0o777 == 0o700
    temporary.rmdir()


def test_the_temporary_folder_goes_with_the_process(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    code = (
        "import os,sys,pathlib; from headrace_backend.worker.start_up.kernel_cache import "
        "*\nuse_kernel_cache(pathlib.Path(sys.argv[1])); print(os.environ[VARIABLE])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, str(tmp_path / "file")]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert "headrace-kernels-" in output and not pathlib.Path(output.strip()).exists()


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_may_write_to_is_not_trusted(tmp_path: pathlib.Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(UnusableFolder, match="others may write to it"):
        checked_folder(tmp_path)
    tmp_path.chmod(0o755)
    assert checked_folder(tmp_path) == tmp_path


def test_the_compiler_is_hashed_before_a_kernel_asks_for_it() -> None:
    triton_key.cache_clear()
    hash_compiler().join()
    # What a kernel asks is answered from memory.
    assert triton_key.cache_info().misses == 1
    triton_key()
    assert triton_key.cache_info()[:2] == (1, 1)
