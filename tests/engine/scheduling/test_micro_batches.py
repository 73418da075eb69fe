"""With pipeline stages, steps in flight have different rows, and nobody's tokens change."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies
from tests.engine.fake_worker import expected_tokens
from tests.engine.harness import Harness, request
from tests.support.examples import examples

from headrace_backend.step.plan import StepPlan


def planned_rows(harness: Harness) -> list[list[int]]:
    """The rows that decode in each step in flight, after planning as far as the engine goes."""
    harness.plan()
    plans = [StepPlan.decode(plan).forward for plan in harness.worker.plans]
    return [sorted(plan.rows[plan.known_counts < plan.counts].tolist()) for plan in plans]


def busy_harness(pp: int, num_requests: int) -> Harness:
    """Rows that all decode, and the steps of a full pipeline in flight."""
    harness = Harness(pp=pp, max_num_seqs=16)
    for index in range(num_requests):
        harness.add(request(8, max_tokens=100, seed=index))
    for _ in range(4 * pp):
        harness.step()
    return harness


@pytest.mark.parametrize(("pp", "num_requests"), [(2, 2), (2, 5), (3, 7), (4, 8)])
def test_each_stage_has_rows_of_its_own(pp: int, num_requests: int) -> None:
    harness = busy_harness(pp, num_requests)
    taken = [0] * num_requests
    for _ in range(6 * pp):
        in_flight = planned_rows(harness)
        assert len(in_flight) == pp + 1, "one step for each stage, and one ahead"
        for first in range(2):
            together = [row for rows in in_flight[first : first + pp] for row in rows]
            assert len(set(together)) == len(together) == num_requests, "all rows, each in one stage"
        assert max(map(len, in_flight)) <= -(-num_requests // pp)
        for row in in_flight[0]:
            taken[row] += 1
        harness.settle()
    assert max(taken) - min(taken) <= 1, "rows take turns"


@pytest.mark.parametrize("pp", [2, 4])
def test_a_row_alone_is_planned_one_token_ahead(pp: int) -> None:
    harness = busy_harness(pp, 1)
    for _ in range(4):
        assert planned_rows(harness) == [[0], [0]]
        harness.settle()


def test_one_stage_has_all_rows_in_every_step() -> None:
    harness = busy_harness(1, 5)
    assert planned_rows(harness) == [[0, 1, 2, 3, 4]] * 2


def test_chunks_of_one_prompt_follow_each_other() -> None:
    harness = Harness(pp=3, max_num_batched_tokens=16, num_blocks=64)
    harness.add(request(60, max_tokens=4))
    harness.plan()
    plans = [StepPlan.decode(plan).forward for plan in harness.worker.plans]
    assert [plan.starts.tolist() for plan in plans] == [[0], [16], [32], [48]]


def test_a_micro_batch_whose_blocks_another_one_holds_makes_way() -> None:
    """Each output needs two blocks of three, and the less urgent one's turn comes first."""
    harness = Harness(num_blocks=3, pp=2, max_num_seqs=3, enable_prefix_cache=False)
    spec = request(1, 18, n=2)
    reader = harness.add(spec)
    harness.run()
    assert [reader.tokens[index] for index in range(2)] == [expected_tokens(spec, index) for index in range(2)]


ARRIVALS = strategies.lists(
    strategies.tuples(strategies.integers(1, 40), strategies.integers(1, 12), strategies.integers(0, 3)),
    min_size=1,
    max_size=10,
)


@hypothesis.settings(max_examples=examples(60), deadline=None)
@hypothesis.given(
    pp=strategies.integers(2, 4),
    arrivals=ARRIVALS,
    num_blocks=strategies.integers(4, 30),
    deaths=strategies.sets(strategies.integers(1, 20), max_size=2),
)
def test_stages_change_no_tokens(
    pp: int, arrivals: list[tuple[int, int, int]], num_blocks: int, deaths: set[int]
) -> None:
    """Whatever comes, is preempted for want of blocks, or loses its workers."""
    harness = Harness(pp=pp, num_blocks=num_blocks, max_num_seqs=4, max_num_batched_tokens=32)
    specs = [(request(length, max_tokens=tokens, seed=seed), seed) for seed, (length, tokens, _) in enumerate(arrivals)]
    pauses = [pause for _, _, pause in arrivals]
    served = harness.serve([(spec, pause) for (spec, _), pause in zip(specs, pauses, strict=True)], deaths)
    for spec, reader in served:
        assert reader.tokens[0] == expected_tokens(spec, 0)
