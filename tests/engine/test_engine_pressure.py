"""The engine with far too few blocks for what is asked.

There are many rows, long prompts in small chunks, priorities, forks, and workers that die in
between.
"""

from __future__ import annotations

import hypothesis
from hypothesis import strategies as st
from tests.engine.fake_worker import expected_tokens
from tests.engine.harness import Harness, request
from tests.support.examples import examples

asked = st.tuples(
    st.integers(1, 70),  # prompt tokens
    st.integers(1, 60),  # max_tokens
    st.integers(1, 4),  # n
    st.integers(-2, 2),  # priority
    st.integers(0, 12),  # steps before it comes
)


@hypothesis.settings(max_examples=examples(150), deadline=None)
@hypothesis.given(
    st.integers(8, 20),
    st.sampled_from([16, 20, 64]),
    st.booleans(),
    st.lists(asked, min_size=3, max_size=12),
    st.sets(st.integers(1, 60), max_size=2),
)
def test_tokens_do_not_depend_on_pressure(
    num_blocks: int,
    token_budget: int,
    enable_prefix_cache: bool,
    requests: list[tuple[int, int, int, int, int]],
    deaths: set[int],
) -> None:
    harness = Harness(
        num_blocks,
        max_num_seqs=10,
        max_num_batched_tokens=token_budget,
        enable_prefix_cache=enable_prefix_cache,
        ageing_s=1e-6,
    )
    arrivals = [
        (request(prompt, min(max_tokens, num_blocks * 16 + 1 - prompt), n=n, priority=priority, seed=seed), pause)
        for seed, (prompt, max_tokens, n, priority, pause) in enumerate(requests)
    ]
    for spec, reader in harness.serve(arrivals, deaths, lambda: plan_and_settle(harness)):
        assert [reader.tokens[index] for index in range(spec.asked.n)] == [
            expected_tokens(spec, i) for i in range(spec.asked.n)
        ]
    assert harness.engine.load().used_blocks == 0


def plan_and_settle(harness: Harness) -> None:
    """A step that preempts lets nobody in, or it would take back at once what it gave."""
    preemptions = harness.engine.load().preemptions
    plan = harness.engine.plan()
    if plan is not None:
        harness.worker.push(plan)
        if harness.engine.load().preemptions > preemptions:
            forks = set(plan.sample.rows.tolist()) - set(plan.forward.rows.tolist())
            assert {admission.row for admission in plan.admissions} <= forks
    harness.engine.check_integrity()
    if harness.engine.num_in_flight == 2 or plan is None:
        if harness.worker.plans:
            harness.settle()
    harness.read()
