"""A request that makes steps fail ends, alone; nobody else loses a token."""

from __future__ import annotations

import dataclasses

import hypothesis
import pytest
from hypothesis import strategies as st
from tests.engine.fake_worker import expected_tokens
from tests.engine.harness import Harness, Reader, request
from tests.support.examples import examples

from headrace_backend.engine.events import EndReason
from headrace_backend.engine.request import AbortCause, EngineRequest
from headrace_backend.engine.scheduling.isolation import GUILTY
from headrace_backend.step.plan import StepPlan


@dataclasses.dataclass(frozen=True)
class Poison:
    """Steps fail that compute tokens from `position` on of a request with this seed."""

    seed: int
    position: int = 0


# What is known of a step that a worker can't compute: its number; that of the step after it, which
# was launched already; nothing.
KNOWLEDGE = ("exact", "late", "none")


class FaultyHarness(Harness):
    """A worker that can't compute some steps, and is replaced."""

    def __init__(self, poisons: set[Poison], known: str = "exact", **changes: object) -> None:
        super().__init__(**changes)  # type: ignore[arg-type]
        self.poisons = poisons
        self.known = known
        self.fails_once = False
        self.num_failures = 0
        self.num_closer = 0
        self.found: list[str] = []

    def settle(self) -> None:
        plan = StepPlan.decode(self.worker.plans[0])
        if not self.fails_once and not self._is_poisoned(plan):
            super().settle()
            return
        self.fails_once = False
        self.num_failures += 1
        last = StepPlan.decode(self.worker.plans[-1])
        outcome = self.engine.worker_lost({"exact": plan.step_id, "late": last.step_id, "none": 0}[self.known])
        self.num_closer += outcome.closer
        self.found += [outcome.guilty_request_id] if outcome.guilty_request_id else []
        self.now_ns += 1_000
        self.worker = self.new_worker()
        self.engine.worker_ready(self.num_blocks)
        self.read()
        self.engine.check_integrity()

    def _is_poisoned(self, plan: StepPlan) -> bool:
        seeds = {row: entry.admission.sampling.seed for row, entry in self.worker.rows.items()}
        seeds |= {admission.row: admission.sampling.seed for admission in plan.admissions}
        forward = plan.forward
        ends = (forward.starts + forward.counts).tolist()
        return any(
            seeds[row] == poison.seed and end > poison.position
            for row, end in zip(forward.rows.tolist(), ends, strict=True)
            for poison in self.poisons
        )


def check_tokens(asked: list[tuple[EngineRequest, Reader]]) -> None:
    for spec, reader in asked:
        assert [reader.tokens[index] for index in range(spec.asked.n)] == [
            expected_tokens(spec, i) for i in range(spec.asked.n)
        ]
        assert all(end.reason is EndReason.LENGTH for end in reader.ends.values())


def start(harness: Harness, count: int, max_tokens: int = 40) -> list[tuple[EngineRequest, Reader]]:
    specs = [request(5 + seed, max_tokens=max_tokens, seed=seed) for seed in range(count)]
    return [(spec, harness.add(spec)) for spec in specs]


@pytest.mark.parametrize("known", KNOWLEDGE)
def test_prompt_that_fails_is_found_with_one_more_failure(known: str) -> None:
    harness = FaultyHarness({Poison(99)}, known)
    asked = start(harness, 5)
    for _ in range(4):
        harness.step()
    guilty = harness.add(request(12, seed=99, request_id="guilty"))
    harness.run()
    assert (guilty.ends[0].reason, guilty.ends[0].error) == (EndReason.ERROR, GUILTY)
    assert not guilty.tokens
    check_tokens(asked)
    assert (harness.num_failures, harness.num_closer, harness.found) == (2, 1, ["guilty"])


def test_request_that_fails_while_it_decodes_is_found_by_halves() -> None:
    harness = FaultyHarness({Poison(3, position=20)}, num_blocks=128)
    asked = start(harness, 8)
    harness.run()
    spec, guilty = asked.pop(3)
    assert guilty.ends[0].reason is EndReason.ERROR
    assert guilty.tokens[0] == expected_tokens(spec, 0)[: len(guilty.tokens[0])]
    check_tokens(asked)
    assert harness.num_failures <= 5
    # Each failure but the first narrows the search, so that the server does not give up on the way.
    assert harness.num_closer == harness.num_failures - 1
    assert harness.found == [spec.request_id]


@pytest.mark.parametrize("count", [1, 8])
def test_failure_that_does_not_come_again_ends_nobody(count: int) -> None:
    harness = FaultyHarness(set(), num_blocks=128)
    asked = start(harness, count)
    for _ in range(5):
        harness.step()
    harness.fails_once = True
    harness.run()
    check_tokens(asked)
    assert harness.num_failures == 1


def test_second_failure_long_after_a_passed_trial_ends_nobody() -> None:
    harness = FaultyHarness(set())
    asked = start(harness, 1)
    for _ in range(2):
        for _ in range(10):
            harness.step()
        harness.fails_once = True
    harness.run()
    check_tokens(asked)
    assert harness.num_failures == 2


def test_during_a_trial_nobody_else_is_computed_and_what_waits_can_be_cancelled() -> None:
    harness = FaultyHarness(set(), num_blocks=128)
    asked = start(harness, 6)
    for _ in range(3):
        harness.step()
    harness.fails_once = True
    harness.settle()
    late = harness.add(request(6, seed=50))
    harness.plan()
    assert harness.engine.load().running_sequences == 1
    assert not harness.plan()
    # The oldest is the last to be tried.
    spec, reader = asked.pop(0)
    assert harness.engine.abort(spec.request_id, "", AbortCause.CANCELLED).was_active
    harness.run()
    assert reader.ends[0].reason is EndReason.CANCELLED
    assert late.ends[0].reason is EndReason.LENGTH
    check_tokens(asked)


def test_device_that_can_compute_nothing_is_not_blamed_on_ever_more_requests() -> None:
    harness = FaultyHarness({Poison(seed) for seed in range(8)})
    start(harness, 8)
    harness.run()
    # From then on each failure is one more death without a cause, and the server gives up.
    assert (len(harness.found), harness.num_closer) == (8, 3)


def test_many_such_prompts_at_once_are_told_from_a_device_that_can_compute_nothing() -> None:
    harness = FaultyHarness({Poison(seed) for seed in range(90, 98)}, num_blocks=128)
    asked = start(harness, 5)
    while not all(reader.tokens for _, reader in asked):
        harness.step()
    guilty = [harness.add(request(12, seed=seed)) for seed in range(90, 98)]
    harness.run()
    assert all(reader.ends[0].error == GUILTY for reader in guilty)
    check_tokens(asked)
    # One that narrows nothing down for each that does: a server that counts those in a row never
    # has two.
    assert (harness.num_failures, harness.num_closer) == (16, 8)


def test_worker_that_is_ended_from_outside_makes_nobody_a_suspect() -> None:
    harness = FaultyHarness(set(), num_blocks=128)
    asked = start(harness, 6)
    for _ in range(3):
        harness.step()
    harness.plan()
    harness.replace_worker()
    harness.plan()
    assert harness.engine.load().running_sequences == 6
    harness.run()
    check_tokens(asked)


def test_worker_that_dies_of_something_else_during_a_trial_changes_nothing() -> None:
    harness = FaultyHarness({Poison(2, position=15)}, num_blocks=128)
    asked = start(harness, 4)
    while not harness.num_failures:
        harness.step()
    harness.plan()
    harness.replace_worker()
    harness.run()
    _, guilty = asked.pop(2)
    assert guilty.ends[0].reason is EndReason.ERROR
    check_tokens(asked)


@hypothesis.settings(max_examples=examples(60), deadline=None)
@hypothesis.given(
    num_blocks=st.integers(12, 40),
    requests=st.lists(
        st.tuples(st.integers(1, 60), st.integers(1, 30), st.integers(1, 3), st.integers(0, 5)), min_size=1, max_size=8
    ),
    poisons=st.dictionaries(st.integers(0, 7), st.integers(0, 80), max_size=3),
    known=st.sampled_from(KNOWLEDGE),
    deaths=st.sets(st.integers(1, 60), max_size=2),
)
def test_only_who_makes_steps_fail_ends_with_an_error(
    num_blocks: int,
    requests: list[tuple[int, int, int, int]],
    poisons: dict[int, int],
    known: str,
    deaths: set[int],
) -> None:
    harness = FaultyHarness(
        {Poison(seed, position) for seed, position in poisons.items()},
        known,
        num_blocks=num_blocks,
        max_num_batched_tokens=40,
        max_num_seqs=6,
    )
    asked = harness.serve(
        [
            (request(prompt, max_tokens, n=n, seed=seed), pause)
            for seed, (prompt, max_tokens, n, pause) in enumerate(requests)
        ],
        deaths,
    )

    def fails(spec: EngineRequest) -> bool:
        # The last token of an output is not computed.
        return len(spec.prompt_ids) + spec.asked.stop.max_tokens - 1 > poisons.get(spec.asked.sampling.seed, 1 << 20)

    check_tokens([(spec, reader) for spec, reader in asked if not fails(spec)])
    for spec, reader in asked:
        if fails(spec):
            assert EndReason.ERROR in {end.reason for end in reader.ends.values()}
    assert harness.engine.load().used_blocks == 0
