"""Ctrl-C while the `headrace` script still imports what commands need."""

from __future__ import annotations

import pathlib
import subprocess
import sys

CLIENT = pathlib.Path(__file__).resolve().parents[3] / "clients/python"
# SIGINT comes with the import of grpc.
_INTERRUPTED = """
import importlib.abc, os, signal, sys
sys.path.insert(0, sys.argv[1])
class Interrupt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "grpc":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
signal.signal(signal.SIGINT, getattr(signal, sys.argv[2]))
import headrace_command
headrace_command._run = lambda: print(signal.getsignal(signal.SIGINT) is getattr(signal, sys.argv[2]))
headrace_command.main()
"""


def _run(handler: str) -> tuple[int, str, str]:
    command = [sys.executable, "-c", _INTERRUPTED, str(CLIENT), handler]
    ended = subprocess.run(command, capture_output=True, text=True)
    return ended.returncode, ended.stdout, ended.stderr


def test_an_interrupt_during_imports_is_one_line() -> None:
    assert _run("default_int_handler") == (130, "", "interrupted\n")


def test_an_ignored_interrupt_stays_ignored_also_by_the_command() -> None:
    assert _run("SIG_IGN") == (0, "True\n", "")
