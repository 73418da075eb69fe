"""The engine on a device that takes its time.

Plans are held back, or where steps are short made further ahead; newcomers join the next step, and
nothing else changes.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from tests.engine.fake_worker import expected_tokens
from tests.engine.harness import Harness, Reader, request
from tests.support.examples import examples

from headrace_backend.engine.request import AbortCause, EngineRequest

MS = 1_000_000
STEP_NS = 5 * MS
LEAD_NS = MS // 2


class DeviceHarness(Harness):
    """A GPU whose steps take 5 ms each, one after the other.

    Results are read when they are done, and plans are asked for when they are due.
    """

    step_ns, lead_ns = STEP_NS, LEAD_NS

    def __init__(self, **changes: Any) -> None:
        super().__init__(256, 512, max_num_batched_tokens=128, **changes)
        self.ready(on_gpu=True)
        # When the steps in flight are launched and done.
        self.times: deque[tuple[int, int]] = deque()
        self.free_ns = 0
        self.asked_ns: list[int] = []

    def ready(self, on_gpu: bool) -> None:
        """A worker that keeps all that it captures, if it is on a GPU."""
        captured = self.config.captured_mixed_sizes() if on_gpu else ()
        self.engine.worker_ready(self.num_blocks, on_gpu, captured)

    def new_device(self, failed_step_id: int = 0) -> None:
        """The worker is lost, and another takes its place."""
        self.engine.worker_lost(failed_step_id)
        self.times.clear()
        self.worker = self.new_worker()
        self.ready(on_gpu=True)

    def plan(self) -> bool:
        planned = False
        while (plan := self.engine.plan()) is not None:
            self.worker.push(plan)
            self.free_ns = max(self.begins_ns(), self.free_ns) + self.step_ns
            self.times.append((self.now_ns + self.lead_ns, self.free_ns))
            self.asked_ns.append(self.now_ns)
            planned = True
        self.read()
        return planned

    def begins_ns(self) -> int:
        """When a step that is planned now can begin on the device."""
        return self.now_ns + self.lead_ns

    def event(self) -> None:
        """Goes on to what comes first: a plan that is due, or the end of a step."""
        self.plan()
        due_ns = self.engine.plan_due_ns
        if due_ns is not None and (not self.times or due_ns < self.times[0][1]):
            assert due_ns > self.now_ns, "a plan that is due is made"
            self.now_ns = due_ns
            self.plan()
        elif self.times:
            self.settle()

    def settle(self) -> None:
        launched_ns, done_ns = self.times.popleft()
        self.now_ns = max(self.now_ns, done_ns)
        result = self.worker.run()
        result.started_at_ns, result.launched_at_ns, result.finished_at_ns = launched_ns, launched_ns, done_ns
        self.engine.settle(result)
        self.read()

    def finish(self) -> None:
        """Until nothing is left."""
        for _ in range(20_000):
            if not self.engine.has_work:
                break
            self.event()
            self.engine.check_integrity()
        assert not self.engine.has_work
        while self.times:
            self.settle()

    def held(self) -> None:
        """Goes on until a plan is held back."""
        for _ in range(2_000):
            self.event()
            self.plan()
            if self.engine.plan_due_ns is not None:
                return
        raise AssertionError("nothing is ever held back")


class ShortStepsHarness(DeviceHarness):
    """Two ranks' GPUs with steps of 1.5 ms, of which one rank needs 2.5 ms to launch a step.

    The other one, whose launches are reported, needs 0.9.
    """

    step_ns, lead_ns = 1_500_000, 900_000

    def begins_ns(self) -> int:
        return self.now_ns + 2_500_000

    def run_to_short_steps(self) -> None:
        """Goes on until it is known that launching binds."""
        for _ in range(100):
            self.event()
            self.plan()


def answers(spec: EngineRequest, reader: Reader) -> bool:
    return reader.tokens.get(0, []) == expected_tokens(spec, 0)[: len(reader.tokens.get(0, []))]


def background(harness: DeviceHarness) -> tuple[EngineRequest, Reader]:
    spec = request(20, max_tokens=400)
    return spec, harness.add(spec)


def test_who_comes_while_a_plan_is_held_back_is_in_the_next_step() -> None:
    harness = DeviceHarness()
    background(harness)
    harness.held()
    done_ns = harness.times[0][1]
    newcomer = harness.add(request(40, max_tokens=3))
    assert harness.engine.plan() is None, "it waits for the others"
    harness.event()
    harness.settle()
    harness.plan()
    harness.settle()
    assert len(newcomer.tokens[0]) == 1
    assert harness.now_ns <= done_ns + STEP_NS + LEAD_NS


def test_the_device_is_kept_busy() -> None:
    harness = DeviceHarness()
    background(harness)
    harness.held()
    begin_ns, steps = harness.now_ns, harness.engine.load().step_count
    for _ in range(200):
        harness.event()
    load = harness.engine.load()
    assert load.held_plans > 90
    assert load.late_plans <= 2
    assert harness.now_ns - begin_ns < 1.02 * STEP_NS * (load.step_count - steps + 1)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_without_graphs_or_gpu_two_steps_are_always_in_flight(on_gpu: bool) -> None:
    harness = DeviceHarness(**({"graph_sizes": "off"} if on_gpu else {}))
    harness.ready(on_gpu)
    background(harness)
    for _ in range(300):
        harness.event()
    assert harness.engine.load().held_plans == 0


def test_with_every_row_taken_nothing_is_held_back() -> None:
    harness = DeviceHarness(max_num_seqs=1)
    background(harness)
    for _ in range(300):
        harness.event()
    assert harness.engine.load().held_plans == 0


def test_cancel_and_deadline_act_while_a_plan_is_held_back() -> None:
    harness = DeviceHarness()
    spec, reader = background(harness)
    hurried = harness.add(request(9, max_tokens=400, deadline_ns=harness.now_ns + 1_000 * MS))
    harness.held()
    harness.engine.abort(spec.request_id, spec.tenant, AbortCause.CANCELLED)
    harness.read()
    assert reader.done is not None
    harness.now_ns = max(harness.now_ns, 2_000 * MS)
    harness.engine.expire()
    harness.read()
    assert hurried.done is not None
    harness.finish()


def test_a_worker_that_is_lost_takes_what_is_held_back_with_it() -> None:
    harness = DeviceHarness()
    spec, reader = background(harness)
    harness.held()
    harness.new_device()
    assert harness.engine.plan_due_ns is None
    harness.finish()
    assert answers(spec, reader)
    assert reader.done is not None


def test_those_on_trial_after_a_failed_step_are_planned_one_step_at_a_time() -> None:
    harness = DeviceHarness()
    everyone = [background(harness) for _ in range(3)]
    harness.held()
    held = harness.engine.load().held_plans
    harness.new_device(failed_step_id=harness.engine._in_flight[0].step_id)
    harness.plan()
    assert harness.engine.num_in_flight == 1
    assert harness.engine.plan_due_ns is None
    harness.finish()
    assert harness.engine.load().held_plans >= held
    assert all(reader.done is not None and answers(spec, reader) for spec, reader in everyone)


def test_a_drained_engine_ends_what_it_has() -> None:
    harness = DeviceHarness()
    spec, reader = background(harness)
    harness.held()
    harness.engine.drain()
    harness.finish()
    assert reader.done is not None and answers(spec, reader)


def period_ns(harness: DeviceHarness) -> float:
    """Time from step to step."""
    begin_ns, steps = harness.now_ns, harness.engine.load().step_count
    for _ in range(100):
        harness.event()
        harness.plan()
    return (harness.now_ns - begin_ns) / (harness.engine.load().step_count - steps)


def test_short_steps_are_planned_so_far_ahead_that_the_slowest_rank_launches_in_time() -> None:
    harness = ShortStepsHarness()
    background(harness)
    harness.run_to_short_steps()
    assert period_ns(harness) < 1.01 * harness.step_ns
    assert harness.engine.num_in_flight == 3


def test_who_comes_beside_short_steps_is_in_the_step_behind_those_in_flight() -> None:
    harness = ShortStepsHarness()
    background(harness)
    harness.run_to_short_steps()
    newcomer = harness.add(request(40, max_tokens=3))
    for _ in range(harness.engine.num_in_flight):
        assert not newcomer.tokens
        harness.settle()
        harness.plan()
    harness.settle()
    assert len(newcomer.tokens[0]) == 1


@pytest.mark.parametrize("step_us", [1_700, 1_900])
def test_steps_of_twice_a_lead_are_not_short(step_us: int) -> None:
    harness = DeviceHarness()
    harness.step_ns, harness.lead_ns = 1_000 * step_us, 900_000
    background(harness)
    for _ in range(100):
        harness.event()
        harness.plan()
    assert harness.engine.num_in_flight == (3 if step_us < 1_800 else 2)


@pytest.mark.parametrize("changes", [{"speculate": "mtp"}, {"pp": 2}])
def test_no_further_step_is_in_flight_where_results_say_what_is_computed(changes: dict[str, Any]) -> None:
    """Drafts do, and the device waits; a second stage has a third step in flight in any case."""
    harness = ShortStepsHarness(**changes)
    for _ in range(3):
        background(harness)
    harness.run_to_short_steps()
    assert harness.engine.num_in_flight == 1 + changes.get("pp", 1)
    if "speculate" in changes:
        assert period_ns(harness) > 1.3 * harness.step_ns


@pytest.mark.parametrize("of_device", [DeviceHarness, ShortStepsHarness])
@hypothesis.given(
    st.lists(st.tuples(st.integers(1, 200), st.integers(1, 60), st.integers(0, 40)), min_size=1, max_size=12),
    st.integers(0, 500),
)
@hypothesis.settings(max_examples=examples(25), deadline=None)
def test_when_plans_are_made_changes_no_token(
    of_device: type[DeviceHarness], arrivals: list[tuple[int, int, int]], death: int
) -> None:
    harness = of_device()
    readers = [background(harness)]
    if isinstance(harness, ShortStepsHarness):
        harness.run_to_short_steps()
        assert harness.engine.num_in_flight == 3
    else:
        harness.held()
    count = 0
    for length, max_tokens, pause in arrivals:
        spec = request(length, max_tokens=max_tokens)
        readers.append((spec, harness.add(spec)))
        for _ in range(pause):
            harness.event()
            count += 1
            if count == death:
                harness.new_device()
    harness.finish()
    for spec, reader in readers:
        assert reader.done is not None
        assert answers(spec, reader)
