"""Ctrl-C in a program of one's own: it ends what is read, and the client goes on.

A KeyboardInterrupt inside grpc's wait left one of its locks taken, once in about thirty times: the channel's next call never got an answer.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests.clients.canned_service import CannedServer

INTERRUPTED = """
import os, random, signal, sys, threading, time
import headrace

server, kind = sys.argv[1:]
chance = random.Random(1)
with headrace.Client(server) as client:
    for turn in range(60):
        session = client.session() if kind == "session" else None
        reader = client.generate("fast") if session is None else session.submit("fast")
        next(reader)
        try:
            threading.Timer(chance.uniform(0, 0.01), os.kill, (os.getpid(), signal.SIGINT)).start()
            for event in reader:
                pass
            sys.exit("not interrupted")
        except KeyboardInterrupt:
            (reader if session is None else session).close()
        assert list(reader) == []
        assert client.generate("hello", max_tokens=3, timeout=20).result().text == "w0 w1 w2 "
print("whole", turn + 1)
"""


@pytest.mark.parametrize("kind", ["stream", "session"])
def test_the_client_goes_on_after_a_keyboard_interrupt(server: CannedServer, kind: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, server.address, kind],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "whole 60\n"), done.stderr
