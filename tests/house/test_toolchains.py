"""A run where a client's toolchain is missing skips its tests and says so at its end.

Where toolchains are demanded it fails.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
from tests.support.toolchains import Toolchain, require

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFTEST = "from tests.conftest import pytest_terminal_summary\n"
TEST = """
import pytest
from tests.support.toolchains import Toolchain, require

ABSENT = Toolchain("the Cobol client", "no-such-compiler", ("--version",), (1,), "ask your grandmother")

@pytest.mark.parametrize("number", [1, 2])
def test_needs_it(number):
    require(ABSENT)

def test_needs_nothing():
    pass
"""


def run(folder: pathlib.Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(TEST)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("DEMAND_", "PYTEST_"))}
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-ra",
            "-p",
            "no:cacheprovider",
            "-o",
            f"pythonpath={ROOT}",
            *options,
            str(folder),
        ],
        cwd=folder,
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.parametrize("processes", ["0", pytest.param("2", marks=pytest.mark.slow)])
def test_a_run_ends_by_naming_what_it_left_out(tmp_path: pathlib.Path, processes: str) -> None:
    ended = run(tmp_path, "-n", processes)
    assert ended.returncode == 0, ended.stdout
    assert "1 passed, 2 skipped" in ended.stdout
    *_, last = (line for line in ended.stdout.splitlines() if line and not line.startswith("="))
    assert last.startswith("left out: tests of the Cobol client") and "no-such-compiler" in last
    assert last.endswith("ask your grandmother (2 tests)")


# What is left out without them is named, above; CI demands them.
@pytest.mark.slow
def test_demanded_toolchains_fail_the_run(tmp_path: pathlib.Path) -> None:
    ended = run(tmp_path, DEMAND_TOOLCHAINS="1")
    assert ended.returncode == 1
    assert "1 passed" in ended.stdout and "2 failed" in ended.stdout


def test_an_old_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEMAND_TOOLCHAINS", raising=False)
    old = Toolchain("the Python client", sys.executable, ("--version",), (99, 1), "wait")
    with pytest.raises(pytest.skip.Exception, match=r"99\.1 is needed"):
        require(old)
    assert require(Toolchain("the Python client", sys.executable, ("--version",), (3, 8), "")) == sys.executable
