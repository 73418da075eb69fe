"""The examples run to their end against a server; what they print is the server's answer."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
from tests.clients.canned_service import CannedServer, answer

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "clients/python/examples"
PRINTED = {
    "generate.py": answer(32),
    "chat.py": answer(64),
    "stream_async.py": "first token after 3.0 ms",
    "subscribe_resume.py": f"{answer(10)!r} + 'w10 w11 '",
    "cancel.py": "cancelled: True",
    "deadline.py": "after 12 tokens",
}


def test_every_example_is_tried() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(PRINTED)


@pytest.mark.parametrize("name", PRINTED)
def test_example_runs(server: CannedServer, name: str) -> None:
    process = subprocess.run(
        [sys.executable, str(EXAMPLES / name), server.address],
        env=os.environ | {"PYTHONPATH": str(ROOT / "clients/python")},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == 0, process.stderr
    assert PRINTED[name] in process.stdout
