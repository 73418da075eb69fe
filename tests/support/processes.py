"""Processes and waiting, for the tests of every room.

Which still run, and conditions that come true within a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import psutil

Value = TypeVar("Value")


def alive(pids: Iterable[int]) -> list[int]:
    """Returns which of the processes still run (zombies do not)."""
    found = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except psutil.NoSuchProcess:
            continue
    return found


def wait_until(condition: Callable[[], Value], timeout_s: float = 120.0, what: str = "the condition") -> Value:
    """Polls a condition until it is true and returns its value.

    Fails with `what` after the timeout. Pauses grow from 20 to 100 ms: to ask a server costs both
    sides milliseconds, which what is waited for could have.
    """
    begun = time.monotonic()
    while not (value := condition()):
        passed = time.monotonic() - begun
        assert passed < timeout_s, f"not within {timeout_s} s: {what}"
        time.sleep(min(0.1, max(0.02, passed / 10)))
    return value
