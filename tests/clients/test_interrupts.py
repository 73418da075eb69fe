"""Ctrl-C in a program of one's own: it ends what is read, and the client goes on.

A KeyboardInterrupt inside grpc's wait left one of its locks taken, once in about thirty times: the
channel's next call never got an answer. One inside close() did so, too. Python drops an interrupt
that strikes in a destructor or in the callback of a weak reference ("Exception ignored in ..."), as
people know it who press Ctrl-C twice: the programs here press again until they see it.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests.clients.canned_service import CannedServer

# What `during` does in a loop is interrupted at a moment of a few milliseconds that chance chooses,
# in each of many turns.
PROGRAM = """
import os, random, signal, sys, threading, time
import headrace

server, kind, turns, longest_s = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
chance = random.Random(1)

def press(delay_s, seen):
    time.sleep(delay_s)
    while not seen.is_set():
        os.kill(os.getpid(), signal.SIGINT)
        seen.wait(5)

with headrace.Client(server) as client:
    for turn in range(turns):
        session = client.session() if kind == "session" else None
        reader = client.generate("fast") if session is None else session.submit("fast")
        opened = reader if session is None else session
        next(reader)
        seen = threading.Event()
        thread = threading.Thread(target=press, args=(chance.uniform(0, longest_s), seen))
        try:
            thread.start()
            during(reader, opened)
            sys.exit("not interrupted")
        except KeyboardInterrupt:
            seen.set()
        thread.join()
        opened.close()
        assert list(reader) == []
        assert client.generate("hello", max_tokens=3, timeout=60).result().text == "w0 w1 w2 "
print("whole", turn + 1)
"""
READS = """
def during(reader, opened):
    for event in reader:
        pass
"""
CLOSES = """
def during(reader, opened):
    while True:
        opened.close()
"""


def run(server: CannedServer, kind: str, what: str, turns: int, longest_s: float) -> None:
    done = subprocess.run(
        [sys.executable, "-c", what + PROGRAM, server.address, kind, str(turns), str(longest_s)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.returncode, done.stdout) == (0, f"whole {turns}\n"), done.stderr


@pytest.mark.parametrize("kind", ["stream", "session"])
def test_the_client_goes_on_after_a_keyboard_interrupt(server: CannedServer, kind: str) -> None:
    run(server, kind, READS, 60, 0.01)


@pytest.mark.parametrize("turns", [20, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["stream", "session"])
def test_the_client_goes_on_after_a_keyboard_interrupt_while_it_closes(
    server: CannedServer, kind: str, turns: int
) -> None:
    run(server, kind, CLOSES, turns, 0.002)
