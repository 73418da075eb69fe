"""The examples, files and README alike, run to their end when they are copied out.

They run with canned answers, and with those of a real server.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest
from tests.clients.canned_service import CannedServer, answer
from tests.clients.secured_server import API_KEY, Certificates, secured_server
from tests.support.running_server import RunningServer

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "clients/python/examples"
README = (ROOT / "clients/python/README.md").read_text()
PRINTED = {
    "generate.py": answer(32),
    "chat.py": answer(64),
    "stream_async.py": "first token after 3.0 ms",
    "subscribe_resume.py": f"{answer(10)!r} + 'w10 w11 '",
    "cancel.py": "cancelled: True",
    "deadline.py": "after 12 tokens",
    "session.py": f"'2 + 2 =' -> {answer(24)!r} (length)",
}
# What the demo model answers.
PRINTED_BY_THE_MODEL = {
    "generate.py": "' there was a ",
    "chat.py": "Without it every new token would cost a pass over the whole text",
    "stream_async.py": "'The capital of France is' -> ' Paris' (stop)",
    "subscribe_resume.py": "' there was a ",
    "cancel.py": "its readers see: cancelled",
    "deadline.py": "deadline after ",
    "session.py": "'2 + 2 =' -> ' 4' (stop)",
}
# By the heading they stand under; "" is the first screen.
README_BLOCKS = {
    heading.strip(): code
    for heading, text in re.findall(r"(?:^#+ (.*)$)\n((?:(?!^##? ).*\n?)*)", README, re.MULTILINE)
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
}
# Those that need more than a server on 127.0.0.1:50051.
WITH_OWN_SERVER = {"TLS and keys", "Without a server"}


def _run(folder: pathlib.Path, *command: str, **variables: str) -> str:
    """Runs a program in a folder of its own; returns what it printed."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "clients/python")} | variables
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _block(heading: str, server: str) -> str:
    code = README_BLOCKS[heading]
    assert code.count('"127.0.0.1:50051"') == 1
    return code.replace("127.0.0.1:50051", server)


def test_every_example_is_tried() -> None:
    # What the last two do with an answer wants one of a model: tests/e2e/test_tools.py.
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*PRINTED, "tls_key.py", "tools.py", "schema.py"}
    assert len(README_BLOCKS) == README.count("```python") == 10


@pytest.mark.parametrize("name", PRINTED)
def test_example_runs(server: CannedServer, tmp_path: pathlib.Path, name: str) -> None:
    assert PRINTED[name] in _run(tmp_path, str(EXAMPLES / name), server.address)


# What they print is compared with canned answers above; README's blocks have a real server below.
@pytest.mark.slow
@pytest.mark.parametrize("name", PRINTED)
def test_example_runs_against_a_real_server(shared_server: RunningServer, tmp_path: pathlib.Path, name: str) -> None:
    assert PRINTED_BY_THE_MODEL[name] in _run(tmp_path, str(EXAMPLES / name), shared_server.address)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("heading", [name for name in README_BLOCKS if name not in WITH_OWN_SERVER])
def test_readme_example_runs_against_a_real_server(
    shared_server: RunningServer, tmp_path: pathlib.Path, heading: str
) -> None:
    assert _run(tmp_path, "-c", _block(heading, shared_server.address)).strip()


def test_examples_of_tls_and_keys_run(certificates: Certificates, tmp_path: pathlib.Path) -> None:
    ca = certificates.ca.certificate
    (tmp_path / "ca.pem").write_bytes(ca.read_bytes())
    with secured_server(certificates) as server:
        printed = _run(tmp_path, str(EXAMPLES / "tls_key.py"), server.address, str(ca), HEADRACE_API_KEY=API_KEY)
        assert printed == f"{answer(2)}\nrefused: UNAUTHENTICATED\n"
        block = README_BLOCKS["TLS and keys"].replace("localhost:50051", server.address)
        assert _run(tmp_path, "-c", block, HEADRACE_API_KEY=API_KEY) == answer(2) + "\n"


# `headrace.local` itself is tried in tests/e2e/test_private_servers.
@pytest.mark.slow
def test_the_readmes_local_server_runs() -> None:
    paths = ("service", "backend", "both_sides", "kernels", "protos/python", "clients/python")
    path = os.pathsep.join(str(ROOT / part) for part in paths)
    assert _run(ROOT, "-c", README_BLOCKS["Without a server"], PYTHONPATH=path).strip()
