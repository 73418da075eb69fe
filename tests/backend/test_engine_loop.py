"""The engine's driver in a real event loop, with a device that takes real time.

Plans that are held back are sent when they are due.
"""

from __future__ import annotations

import asyncio
import pathlib
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
import uvloop
from tests.support.engine_requests import greedy_request

from headrace_backend.config import EngineConfig
from headrace_backend.engine.engine import Engine
from headrace_backend.engine.events import RequestDone
from headrace_backend.engine.request import EngineRequest, ModelLimits, Subscriber
from headrace_backend.engine.requests.outbox import Outbox
from headrace_backend.server.engine_loop import EngineLoop
from headrace_backend.server.precise_timer import PreciseTimer
from headrace_backend.step.messages import RecordKind
from headrace_backend.step.plan import StepPlan, StepResult

MS = 1_000_000
STEP_NS = 8 * MS
NUM_BLOCKS = 256
# What the device replays from graphs.
CAPTURED = (16, 32, 64, 128, 256)


class Device:
    """Steps take 8 ms each, one after the other.

    Its loop and timer are those of the process, so what makes it late makes the engine late.
    """

    def __init__(self) -> None:
        config = EngineConfig(
            model=pathlib.Path("model"), block_size=16, max_num_seqs=8, max_num_batched_tokens=256, graph_sizes="auto"
        )
        clock = time.monotonic_ns
        self.loop = EngineLoop(Engine(config, ModelLimits(100, 4096, (0,)), None, clock), clock)
        self._timer = PreciseTimer(asyncio.get_running_loop(), self._step_done)
        self._running: deque[tuple[int, StepResult]] = deque()
        self._free_ns = 0
        # How long before the end of the step in flight a plan came; and when plans came that admit
        # somebody.
        self.ahead_ns: list[int] = []
        self.admitted_ns: list[int] = []
        self.num_done = 0

    def start(self) -> None:
        self.loop.start(self._deliver)
        self.loop.workers_ready(self.send_plan, NUM_BLOCKS, True, CAPTURED)

    def stop(self) -> None:
        self.loop.stop()
        self._timer.close()

    def lose(self) -> None:
        self.loop.workers_lost()
        self._running.clear()

    def add(self, name: str, max_tokens: int) -> None:
        spec = EngineRequest(name, greedy_request([1, 2, 3], max_tokens), detached=True)
        self.loop.engine.add(spec, Subscriber(1, len(name)))
        self.loop.changed()

    def send_plan(self, kind: RecordKind, encoded: bytes) -> bool:
        plan, now_ns = StepPlan.decode(encoded), time.monotonic_ns()
        if plan.admissions:
            self.admitted_ns.append(now_ns)
        self.ahead_ns.append(self._free_ns - now_ns)
        began_ns = max(now_ns, self._free_ns)
        self._free_ns = began_ns + STEP_NS
        size = plan.sample.rows.size
        tokens, finite = np.full(size, 5, np.int32), np.ones(size, np.uint8)
        result = StepResult(plan.step_id, now_ns, self._free_ns, tokens, finite, launched_at_ns=now_ns)
        result.checked_ok = np.ones(plan.forward.checked_indices.size, np.uint8)
        self._running.append((self._free_ns, result))
        self._timer.set(self._running[0][0])
        return True

    def _step_done(self) -> None:
        while self._running and self._running[0][0] <= time.monotonic_ns():
            self.loop.on_results([self._running.popleft()[1].encode()])
        if self._running:
            self._timer.set(self._running[0][0])

    def _deliver(self, outboxes: dict[int, Outbox]) -> None:
        for outbox in outboxes.values():
            self.num_done += sum(isinstance(event, RequestDone) for _, event in outbox.events)


async def until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s, what
        await asyncio.sleep(0.0005)


@pytest.fixture(params=[uvloop.run, asyncio.run], ids=["uvloop", "asyncio"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    return request.param  # type: ignore[no-any-return]


Run = Callable[[Coroutine[Any, Any, None]], None]


async def held(device: Device) -> None:
    """Goes on until a plan is held back."""
    await until(lambda: device.loop.engine.plan_due_ns is not None, "nothing is held back")


def test_plans_are_sent_when_they_are_due(run: Run) -> None:
    async def main() -> None:
        device = Device()
        device.start()
        # A busy machine teaches wide margins, with which little is held back: however long it
        # takes, plans are sent shortly before they are needed.
        device.add("a", 3000)
        await until(lambda: device.loop.engine.load().held_plans > 0, "nothing was held back")
        device.ahead_ns.clear()
        await until(lambda: any(0 < ahead_ns < STEP_NS // 2 for ahead_ns in device.ahead_ns), "none was in time")
        device.stop()

    run(main())


def test_who_comes_while_a_plan_is_held_back_does_not_wait_a_step_more(run: Run) -> None:
    async def main() -> None:
        device = Device()
        device.start()
        device.add("a", 3000)
        lateness_ns: list[int] = []
        number = -1
        # Before the step in flight has ended, but for a busy machine.
        while not lateness_ns or min(lateness_ns) >= 0:
            number += 1
            assert number < 100, lateness_ns
            await held(device)
            came_ns, end_ns = time.monotonic_ns(), device._free_ns
            seen = len(device.admitted_ns)
            device.add("b" * (number + 2), 1)
            await until(lambda seen=seen: len(device.admitted_ns) > seen, "it is not admitted")  # type: ignore[misc]
            lateness_ns.append(device.admitted_ns[-1] - end_ns)
            assert device.admitted_ns[-1] > came_ns
            await until(lambda number=number: device.num_done == number + 1, "it does not end")  # type: ignore[misc]
        device.stop()

    run(main())


def test_workers_lost_and_replaced_while_a_plan_is_held_back(run: Run) -> None:
    async def main() -> None:
        device = Device()
        device.start()
        # A busy machine may hold nothing back for a while.
        device.add("a", 3000)
        await held(device)
        device.lose()
        await asyncio.sleep(0.02)
        num_plans = len(device.ahead_ns)
        device.loop.workers_ready(device.send_plan, NUM_BLOCKS, True, CAPTURED)
        await until(lambda: len(device.ahead_ns) >= num_plans + 20, "it does not go on")
        device.stop()

    run(main())


def test_a_stopped_loop_sends_no_plan_that_was_held_back(run: Run) -> None:
    async def main() -> None:
        device = Device()
        device.start()
        device.add("a", 3000)
        await held(device)
        device.stop()
        num_plans = len(device.ahead_ns)
        await asyncio.sleep(0.05)
        assert len(device.ahead_ns) == num_plans

    run(main())
