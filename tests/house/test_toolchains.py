"""What a run does where a client's toolchain is missing: it skips, and says so at its end; or it fails, where that is demanded."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
from tests.support.toolchains import Toolchain

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFTEST = "from tests.conftest import pytest_terminal_summary\n"
TEST = """
import pytest
from tests.support.toolchains import Toolchain, require

ABSENT = Toolchain("Cobol", ("no-such-compiler",), ("no-such-compiler",), (1, 0), "ask your grandmother")

@pytest.mark.parametrize("number", [1, 2])
def test_needs_it(number):
    require(ABSENT)

def test_needs_nothing():
    pass
"""


def run(folder: pathlib.Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(TEST)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HEADRACE_", "PYTEST_"))}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", f"pythonpath={ROOT}", *options, str(folder)],
        cwd=folder,
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.parametrize("processes", ["0", "2"])
def test_a_run_ends_by_naming_what_it_left_out(tmp_path: pathlib.Path, processes: str) -> None:
    ended = run(tmp_path, "-n", processes)
    assert ended.returncode == 0, ended.stdout
    assert "1 passed, 2 skipped" in ended.stdout
    *_, last = (line for line in ended.stdout.splitlines() if not line.startswith("="))
    assert last == "2 tests of the Cobol client (no-such-compiler not found). Get it: ask your grandmother"


def test_demanded_toolchains_fail_the_run(tmp_path: pathlib.Path) -> None:
    ended = run(tmp_path, HEADRACE_DEMAND_TOOLCHAINS="1")
    assert ended.returncode == 1
    assert "1 passed" in ended.stdout and "2 failed" in ended.stdout


def test_an_old_version_is_named() -> None:
    old = Toolchain("Python", (sys.executable,), (sys.executable, "--version"), (99, 1), "wait")
    lack = old.lack()
    assert lack is not None and "needed is 99.1" in lack
    assert Toolchain("Python", (sys.executable,), (sys.executable, "--version"), (3, 8), "").lack() is None
