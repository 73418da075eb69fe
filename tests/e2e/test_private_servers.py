"""Servers without a port, and servers that live as long as a block or a command.

The block is `headrace.local`; the command is `headrace demo`.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator

import psutil
import pytest
from tests.support.processes import wait_until
from tests.support.rpc import generate, greedy, health
from tests.support.running_server import DEMO, ROOT, environment, running_server

import headrace


@pytest.fixture
def short_folder() -> Iterator[pathlib.Path]:
    """An empty temporary folder whose path leaves room for a socket's name."""
    with tempfile.TemporaryDirectory(prefix="hr-", dir="/tmp") as folder:
        yield pathlib.Path(folder)


def marked(mark: str) -> list[psutil.Process]:
    """Live processes that inherited the variable MARK with this value."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


# The server of `headrace demo`, below, is on such a socket.
@pytest.mark.slow
def test_a_server_on_a_unix_socket_has_no_port(short_folder: pathlib.Path) -> None:
    address = f"unix:{short_folder}/public.sock"
    with running_server("--dtype", "fp32", "--num-blocks", "64", listen=address) as server:
        assert server.address == address
        assert health(address) == 1
        assert len(generate(address, greedy("Once upon a time", 8)).tokens[0]) == 8
        for pid in server.all_pids():
            assert not [c for c in psutil.Process(pid).net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert list(short_folder.iterdir()) == []


# `headrace demo`, below, starts its server by `headrace.local` too.
@pytest.mark.slow
def test_a_local_server_answers_and_is_gone(short_folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short_folder))
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    mark = uuid.uuid4().hex
    monkeypatch.setenv("MARK", mark)
    with headrace.local(str(DEMO), worker_threads=1, num_blocks=64) as client:
        completion = client.complete("Once upon a time", max_tokens=12, temperature=0.0)
        assert completion.text and completion.usage.output_tokens == 12
        assert "".join(client.generate("Once upon a time", max_tokens=12, temperature=0.0).text()) == completion.text
        assert len(marked(mark)) >= 4
    wait_until(lambda: not marked(mark), 60, "no process left")
    assert list(short_folder.iterdir()) == []


def test_the_demo_answers_and_leaves_nothing_behind(short_folder: pathlib.Path) -> None:
    mark = uuid.uuid4().hex
    ended = subprocess.run(
        [sys.executable, "-m", "headrace", "demo", "--max-tokens", "24"],
        capture_output=True, text=True, timeout=600, cwd=ROOT,
        env=environment() | {"TMPDIR": str(short_folder), "MARK": mark, "PROMPT": "What is a KV cache?"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "What is a KV cache?" in ended.stdout and "cache" in ended.stdout.split("?", 1)[1]
    for word in ("TTFT", "queued", "decode", "--prompt", "headrace serve"):
        assert word in ended.stderr, ended.stderr
    wait_until(lambda: not marked(mark), 60, "no process left")
    assert list(short_folder.iterdir()) == []
