"""The timer that plans wait for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop
from tests.support.descriptors import settled_descriptors, stay_open

from headrace_backend.server.precise_timer import PreciseTimer

MS = 1_000_000
Run = Callable[[Coroutine[Any, Any, None]], None]


class Calls:
    """When a timer called back."""

    def __init__(self) -> None:
        self.at_ns: list[int] = []
        self.timer = PreciseTimer(asyncio.get_running_loop(), lambda: self.at_ns.append(time.monotonic_ns()))

    async def wait(self, num_calls: int) -> None:
        deadline_s = time.monotonic() + 60
        while len(self.at_ns) < num_calls and time.monotonic() < deadline_s:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("run", [uvloop.run, asyncio.run])
def test_it_is_never_early_and_finer_than_a_millisecond(run: Run) -> None:
    async def main() -> None:
        calls, lateness = Calls(), []
        for index in range(40):
            due_ns = time.monotonic_ns() + 2 * MS + index * 37_000
            calls.timer.set(due_ns)
            await calls.wait(index + 1)
            lateness.append(calls.at_ns[index] - due_ns)
        calls.timer.close()
        assert min(lateness) >= 0
        # A loop's own timers have milliseconds, and would never be as near; a busy machine is late
        # more often than not.
        assert min(lateness) < MS // 2

    run(main())


def test_a_moment_that_has_passed_calls_back_at_once() -> None:
    async def main() -> None:
        calls = Calls()
        calls.timer.set(time.monotonic_ns() - MS)
        await calls.wait(1)
        calls.timer.set(-5)
        await calls.wait(2)
        calls.timer.close()
        assert len(calls.at_ns) == 2

    uvloop.run(main())


def test_only_the_moment_set_last_counts() -> None:
    async def main() -> None:
        calls = Calls()
        first_ns = time.monotonic_ns() + 5 * MS
        calls.timer.set(first_ns)
        calls.timer.set(first_ns + 20 * MS)
        await calls.wait(1)
        await asyncio.sleep(0.03)
        calls.timer.close()
        assert len(calls.at_ns) == 1
        assert calls.at_ns[0] >= first_ns + 20 * MS

    uvloop.run(main())


def test_one_that_is_closed_does_not_call_and_leaves_no_descriptor() -> None:
    async def main() -> None:
        before = settled_descriptors()
        calls = Calls()
        calls.timer.set(time.monotonic_ns() + 2 * MS)
        calls.timer.close()
        calls.timer.close()
        await asyncio.sleep(0.01)
        assert not calls.at_ns
        assert not stay_open(before)

    uvloop.run(main())
