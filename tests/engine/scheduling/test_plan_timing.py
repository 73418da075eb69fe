"""Plans are due as late as possible, but never so late that the device often waits.

They are due at once where nothing is known or gained.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Callable

import hypothesis
import pytest
from hypothesis import strategies as st
from tests.support.examples import examples

from headrace_backend.engine.scheduling.plan_timing import PlanTiming, RecentLimit

US, MS = 1_000, 1_000_000


@dataclasses.dataclass
class Device:
    """A worker that is never without a plan for longer than the timing makes it be."""

    timing: PlanTiming
    seed: int = 0
    lead_ns: float = 1 * MS
    # Of a step with prompts, times that of another.
    mixed_leads: float = 1.0
    noise: float = 0.02
    now_ns: int = 5_000 * MS
    idle_ns: float = 0.0
    # How long before the end of the step in flight each plan was asked for.
    ahead_ns: list[float] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        assert self.timing.may_plan(self.now_ns, False)
        self.timing.planned(5_000, False)
        self.launched_ns = self.now_ns + self.lead_ns
        self.end_ns = self.launched_ns + 5 * MS
        self.settled_ns = float(self.now_ns)

    def step(self, predicted_us: float = 5_000, true_us: float | None = None, mixed: bool = False) -> None:
        """Plans the next step when it is due, then settles the one in flight."""
        duration_us = predicted_us if true_us is None else true_us
        duration_ns = 1e3 * duration_us * self.random.lognormvariate(0.0, self.noise)
        asked_ns = self.now_ns
        timing = self.timing
        settled = False
        if not timing.may_plan(self.now_ns, True, mixed):
            due_ns = timing.due_ns
            assert due_ns is not None and due_ns > self.now_ns
            asked_ns = min(due_ns, int(self.end_ns))
            if due_ns > self.end_ns:
                timing.settled(int(self.launched_ns), int(self.end_ns))
                settled = True
            assert timing.may_plan(asked_ns, True, mixed)
        timing.planned(predicted_us, mixed)
        self.ahead_ns.append(self.end_ns - asked_ns)
        lead_ns = self.lead_ns * (self.mixed_leads if mixed else 1.0)
        launched_ns = asked_ns + lead_ns * self.random.uniform(0.8, 1.2)
        if not settled:
            timing.settled(int(self.launched_ns), int(self.end_ns))
        self.idle_ns += max(0.0, launched_ns - self.end_ns)
        self.now_ns = int(self.end_ns)
        self.launched_ns = launched_ns
        self.end_ns = max(launched_ns, self.end_ns) + duration_ns

    def steps(self, count: int, of: Callable[[int], dict[str, float]] = lambda _: {}) -> None:
        for index in range(count):
            self.step(**of(index))  # type: ignore[arg-type]  # durations, and whether it is mixed


def timing() -> PlanTiming:
    made = PlanTiming()
    made.worker_ready(holds=True)
    return made


def test_plans_come_shortly_before_the_step_in_flight_ends_once_that_is_known() -> None:
    device = Device(timing())
    device.steps(300)
    # At first a whole step ahead; then what planning and launching take and a little more.
    assert device.ahead_ns[3] == pytest.approx(5 * MS, rel=0.2)
    assert 1 * MS < statistics.mean(device.ahead_ns[150:]) < 1.8 * MS
    assert device.timing.num_held > 200


def test_the_device_hardly_waits() -> None:
    device = Device(timing(), noise=0.05)
    device.steps(2000)
    assert device.timing.num_late < 0.06 * 2000
    assert device.idle_ns < 0.002 * 2000 * 5 * MS


@hypothesis.given(
    st.integers(0, 1000),
    st.floats(0.05, 4.0),
    st.floats(1.0, 2.5),
    st.floats(0.0, 0.1),
    st.floats(0.7, 1.4),
    st.lists(st.floats(1_000, 60_000), min_size=1, max_size=5),
)
@hypothesis.settings(max_examples=examples(60), deadline=None)
def test_whatever_steps_take_the_device_waits_for_few_and_not_long(
    seed: int, lead_ms: float, mixed_leads: float, noise: float, bias: float, durations_us: list[float]
) -> None:
    device = Device(timing(), seed, lead_ms * MS, mixed_leads, noise)
    device.steps(400)
    before, idle_ns, begin_ns = device.timing.num_late, device.idle_ns, device.now_ns

    def of(index: int) -> dict[str, float]:
        predicted_us = durations_us[index % len(durations_us)]
        return {"predicted_us": predicted_us, "true_us": bias * predicted_us, "mixed": index % 3 == 0}

    device.steps(1200, of)
    # Steps shorter than their launch keep the device waiting however early they are planned.
    if min(durations_us) * bias > 1.5e3 * lead_ms * mixed_leads:
        assert device.timing.num_late - before < 0.1 * 1200
        assert device.idle_ns - idle_ns < 0.02 * (device.now_ns - begin_ns)


def test_a_prediction_that_is_suddenly_wrong_heals_within_a_few_steps() -> None:
    device = Device(timing())
    device.steps(300)
    late = device.timing.num_late
    device.steps(200, lambda _: {"predicted_us": 5_000, "true_us": 3_000})
    assert 2 <= device.timing.num_late - late <= 12


def test_a_single_accident_changes_nothing() -> None:
    device = Device(timing(), noise=0.0)
    device.steps(300)
    device.step(5_000, 1_000)
    device.steps(2)
    device.ahead_ns.clear()
    device.steps(50)
    assert max(device.ahead_ns) < 1.6 * MS


def test_errors_of_steps_with_prompts_are_their_own() -> None:
    device = Device(timing(), noise=0.0)
    device.steps(1200, lambda index: {"mixed": index % 4 == 0, "true_us": 4_000 if index % 4 == 0 else 5_000})
    device.ahead_ns.clear()
    device.steps(40, lambda _: {"mixed": False})
    assert statistics.mean(device.ahead_ns[2:]) < 1.6 * MS


def device_of_two_leads() -> Device:
    """A device of which a step with prompts is launched in 2 ms and another one in 1 ms."""
    device = Device(timing(), mixed_leads=2.0, noise=0.0)
    device.steps(600, lambda index: {"mixed": index % 4 == 0})
    device.step(mixed=False)
    return device


@pytest.mark.parametrize("mixed", [False, True])
def test_plans_are_held_where_steps_are_of_one_kind(mixed: bool) -> None:
    device = Device(timing(), mixed_leads=2.0)
    device.steps(60, lambda _: {"mixed": mixed})
    assert device.timing.num_held > 20
    assert not device.timing.may_plan(device.now_ns, True, False)
    assert not device.timing.may_plan(device.now_ns, True, True)


def test_a_plan_is_due_sooner_while_prompts_wait() -> None:
    device = device_of_two_leads()
    made = device.timing
    assert not made.may_plan(device.now_ns, True, False)
    later_ns = made.due_ns
    assert not made.may_plan(device.now_ns, True, True)
    sooner_ns = made.due_ns
    assert later_ns is not None and sooner_ns is not None
    assert 0.9 * MS < later_ns - sooner_ns < 1.5 * MS
    # The prompt was cancelled.
    assert not made.may_plan(sooner_ns, True, False)
    assert made.due_ns == later_ns
    assert not made.may_plan(later_ns - 1, True, False)
    assert made.may_plan(later_ns, True, False)


def test_a_prompt_that_comes_late_is_planned_at_once_and_does_not_count_as_planned_before() -> None:
    device = device_of_two_leads()
    made = device.timing
    for _ in range(200):
        assert not made.may_plan(device.now_ns, True, False)
        due_ns = made.due_ns
        assert due_ns is not None
        came_ns = due_ns - MS // 4
        assert not made.may_plan(came_ns - 1, True, False)
        assert made.may_plan(came_ns, True, True)
        made.planned(5_000, True)
        made.settled(int(device.launched_ns), int(device.end_ns))
        # From its coming on it takes 1.5 ms.
        device.now_ns, device.launched_ns = int(device.end_ns), came_ns + 1.5 * MS
        device.end_ns = max(device.end_ns, device.launched_ns) + 5 * MS
        device.step(mixed=False)
    assert not made.may_plan(device.now_ns, True, False)
    later_ns = made.due_ns
    assert not made.may_plan(device.now_ns, True, True)
    assert later_ns is not None and made.due_ns is not None
    assert later_ns - made.due_ns < 0.6 * MS


@pytest.mark.parametrize("duration_us", [300, 1_500])
def test_short_steps_are_planned_a_whole_step_ahead(duration_us: float) -> None:
    device = Device(timing())
    device.steps(300, lambda _: {"predicted_us": duration_us})
    late = device.timing.num_held
    device.steps(50, lambda _: {"predicted_us": duration_us})
    assert device.timing.num_held == late


@pytest.mark.parametrize(
    ("predicted_us", "mixed", "replayed", "binds"),
    [
        (1_500, False, True, True),
        (5_000, False, True, False),
        (1_500, True, True, False),
        (1_500, False, False, False),
        # Nobody knows how long it takes.
        (0, False, True, False),
    ],
)
def test_launching_binds_where_all_in_flight_are_short_decodes(
    predicted_us: float, mixed: bool, replayed: bool, binds: bool
) -> None:
    made = timing()
    assert not made.launching_binds
    device = Device(made)
    device.steps(300, lambda _: {"predicted_us": 1_500})
    assert made.launching_binds
    assert made.may_plan(int(device.end_ns), False)
    made.planned(predicted_us, mixed, replayed)
    assert made.launching_binds is binds


def test_rare_slow_launches_do_not_make_steps_short() -> None:
    device = Device(timing(), lead_ns=0.8 * MS)
    for _ in range(20):
        device.steps(30)
        device.lead_ns = 3.5 * MS
        device.step()
        device.lead_ns = 0.8 * MS
    assert not device.timing.launching_binds


def test_nothing_is_held_back_without_a_worker_that_launches_fast() -> None:
    made = PlanTiming()
    made.worker_ready(holds=False)
    device = Device(made)
    device.steps(300)
    assert made.num_held == made.num_late == 0


def test_nothing_is_held_back_if_nobody_could_join() -> None:
    made = timing()
    device = Device(made)
    device.steps(300)
    held = made.num_held
    assert made.may_plan(device.now_ns, False)
    made.planned(5_000, False)
    assert (made.num_held, made.due_ns) == (held, None)


def test_another_worker_is_learned_anew() -> None:
    made = timing()
    device = Device(made)
    device.steps(300)
    assert not made.may_plan(device.now_ns, True)
    made.worker_ready(holds=True)
    assert made.due_ns is None
    held = made.num_held
    other = Device(made, lead_ns=3 * MS)
    other.steps(20)
    assert made.num_held == held
    other.steps(300)
    assert made.num_held > held
    assert statistics.mean(other.ahead_ns[200:]) > 3 * MS


def test_results_without_a_launch_time_teach_nothing() -> None:
    made = timing()
    now_ns = 1_000 * MS
    for _ in range(200):
        assert made.may_plan(now_ns, True)
        made.planned(5_000, False)
        now_ns += 5 * MS
        made.settled(0, now_ns)
    assert made.num_held == 0


def test_how_long_steps_are_launched_kernel_by_kernel_teaches_nothing() -> None:
    made = timing()
    device = Device(made)
    device.steps(300)
    now_ns = int(device.end_ns)
    made.settled(int(device.launched_ns), now_ns)
    for _ in range(60):
        # Launching takes as long as computing, and only the end of it is known.
        made.may_plan(now_ns, False)
        made.planned(40_000, True, replayed=False)
        made.settled(now_ns + 35 * MS, now_ns + 41 * MS)
        now_ns += 42 * MS
    assert made.may_plan(now_ns, False)
    made.planned(5_000, False)
    assert not made.may_plan(now_ns, True)
    assert made.due_ns is not None
    assert made.due_ns - now_ns > 3 * MS


def test_a_step_that_ends_before_its_successor_is_due_is_followed_at_once() -> None:
    made = timing()
    device = Device(made)
    device.steps(300)
    assert not made.may_plan(device.now_ns, True)
    due_ns = made.due_ns
    assert due_ns is not None
    made.settled(int(device.launched_ns), device.now_ns + MS)
    late = made.num_late
    assert made.may_plan(device.now_ns + MS, True)
    made.planned(5_000, False)
    made.settled(device.now_ns + 2 * MS, device.now_ns + 7 * MS)
    assert made.num_late == late + 1


def test_a_plan_that_found_nothing_to_compute_is_not_held_against_the_next() -> None:
    made = timing()
    device = Device(made)
    device.steps(300)
    assert not made.may_plan(device.now_ns, True)
    assert made.due_ns is not None
    assert made.may_plan(made.due_ns, True)
    made.settled(int(device.launched_ns), int(device.end_ns))
    held, late = made.num_held, made.num_late
    later_ns = int(device.end_ns) + 10_000 * MS
    assert made.may_plan(later_ns, True)
    made.planned(5_000, False)
    made.settled(later_ns + MS, later_ns + 6 * MS)
    assert (made.num_held, made.num_late) == (held, late)


@hypothesis.given(st.lists(st.floats(-1e9, 1e9, allow_nan=False), min_size=1, max_size=400))
def test_a_recent_limit_is_exceeded_by_one_of_the_last_samples(samples: list[float]) -> None:
    limit = RecentLimit()
    for sample in samples:
        limit.add(sample)
    last = samples[-128:]
    assert limit.value in last
    assert sum(sample > limit.value for sample in last) <= len(last) // 128
    assert limit.known == (len(last) >= 24)
