"""A minute of the byte fuzzer; `make test ARGS="-m slow"` runs it."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
from tests.support.running_server import ROOT, environment

_SECONDS = 60


@pytest.mark.slow
def test_a_minute_of_fuzzing_finds_no_crash(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("atheris")
    command = [
        sys.executable,
        "-m",
        "tests.fuzz.fuzz_requests",
        str(tmp_path / "corpus"),
        f"-max_total_time={_SECONDS}",
        f"-artifact_prefix={tmp_path}/",
    ]
    ended = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=20 * _SECONDS)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "DONE" in ended.stderr
