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

    Fails with `what` after the timeout.
    """
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)
    return value
