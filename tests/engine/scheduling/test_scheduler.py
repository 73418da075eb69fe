"""Who is computed when: budget, order, chunks, preemption, forks."""

from __future__ import annotations

import pytest
from tests.engine.fake_worker import expected_tokens
from tests.engine.harness import Harness, request

from headrace_backend.engine.request import AbortCause
from headrace_backend.step.plan import StepPlan


def next_plan(harness: Harness) -> StepPlan:
    plan = harness.engine.plan()
    assert plan is not None
    harness.worker.push(plan)
    return plan


def test_two_steps_are_planned_ahead_and_the_second_knows_no_token() -> None:
    harness = Harness()
    harness.add(request(10))
    first, second = next_plan(harness), next_plan(harness)
    assert harness.engine.plan() is None
    assert first.forward.known_counts.tolist() == [10]
    assert (second.forward.starts.tolist(), second.forward.counts.tolist()) == ([10], [1])
    assert second.forward.known_counts.tolist() == [0]
    assert second.sample.output_positions.tolist() == [1]


def test_nothing_is_planned_beyond_max_tokens() -> None:
    harness = Harness()
    reader = harness.add(request(10, max_tokens=2))
    next_plan(harness)
    next_plan(harness)
    harness.settle()
    assert harness.engine.plan() is None
    harness.settle()
    assert reader.done is not None
    # The last token's KV is not computed.
    assert harness.worker.num_tokens == 11


def test_long_prompt_is_computed_in_chunks_beside_decodes() -> None:
    harness = Harness(max_num_batched_tokens=16)
    harness.add(request(5, max_tokens=20))
    harness.step()
    harness.add(request(40, max_tokens=3))
    counts = []
    for _ in range(3):
        plan = harness.engine.plan()
        if plan is None:
            harness.settle()
            plan = next_plan(harness)
        else:
            harness.worker.push(plan)
        counts.append(plan.forward.counts.tolist())
    assert counts == [[1, 15], [1, 15], [1, 10]]


def test_token_budget_bounds_the_rows_so_that_every_row_can_decode() -> None:
    harness = Harness(max_num_batched_tokens=16, max_num_seqs=64)
    readers = [harness.add(request(2, max_tokens=4, seed=seed)) for seed in range(40)]
    harness.step()
    assert harness.engine.load().running_sequences <= 16
    harness.run()
    assert all(reader.done is not None for reader in readers)


def test_first_come_first_served_among_equals() -> None:
    harness = Harness(max_num_seqs=1)
    readers = [harness.add(request(4, max_tokens=2)) for _ in range(4)]
    for index, reader in enumerate(readers):
        while reader.done is None:
            harness.step()
        assert all(later.done is None for later in readers[index + 1 :])


def test_priority_goes_first_until_waiting_has_outweighed_it() -> None:
    harness = Harness(max_num_seqs=1, ageing_s=5.0)
    harness.add(request(4, max_tokens=2))
    harness.step()
    ordinary = harness.add(request(4, max_tokens=2))
    harness.now_ns += 4_000_000_000
    urgent = harness.add(request(4, max_tokens=2, priority=1))
    harness.now_ns += 2_000_000_000
    late_urgent = harness.add(request(4, max_tokens=2, priority=1))
    harness.run()
    ends = [reader.done.ended_at_ns for reader in (urgent, ordinary, late_urgent) if reader.done is not None]
    assert len(ends) == 3 and ends == sorted(ends)


def test_newest_is_preempted_first_and_goes_on_without_a_difference() -> None:
    harness = Harness(num_blocks=8, enable_prefix_cache=False)
    specs = [request(20, max_tokens=40, seed=seed) for seed in range(3)]
    readers = []
    for spec in specs:
        readers.append(harness.add(spec))
        harness.now_ns += 10
    harness.run()
    for spec, reader in zip(specs, readers, strict=True):
        assert reader.tokens[0] == expected_tokens(spec, 0)
    preemptions = [reader.done.preemptions for reader in readers if reader.done is not None]
    assert preemptions[0] == 0 and preemptions[-1] > 0
    assert harness.engine.load().preemptions == sum(preemptions)


def test_token_on_its_way_at_preemption_is_kept() -> None:
    harness = Harness(num_blocks=4, max_num_seqs=2)
    old, new = request(30, max_tokens=30), request(15, max_tokens=14, seed=1)
    readers = [harness.add(old)]
    harness.now_ns += 1
    readers.append(harness.add(new))
    harness.step()
    while not harness.engine.load().preemptions:
        harness.plan()
        if harness.engine.load().preemptions:
            break
        harness.settle()
    before = len(readers[1].tokens[0])
    while harness.worker.plans:
        harness.settle()
    assert len(readers[1].tokens[0]) == before + 1
    harness.run()
    assert readers[1].tokens[0] == expected_tokens(new, 0)


def test_preempted_sequence_waits_for_a_token_that_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a deeper pipeline than ours can show it with certainty."""
    monkeypatch.setattr("headrace_backend.engine.engine.USUAL_STEPS_IN_FLIGHT", 3)
    harness = Harness(num_blocks=4, max_num_seqs=2)
    old, new = request(30, max_tokens=30), request(15, max_tokens=14, seed=1)
    harness.add(old)
    harness.now_ns += 1
    reader = harness.add(new)
    while not harness.engine.load().preemptions:
        if harness.engine.num_in_flight == 2:
            harness.settle()
        next_plan(harness)
    assert harness.engine.num_in_flight == 2
    harness.engine.abort(old.request_id, "", AbortCause.CANCELLED)
    assert harness.engine.plan() is None
    harness.run()
    assert reader.tokens[0] == expected_tokens(new, 0)


@pytest.mark.parametrize(("priority", "steps_before"), [(1, 6), (1, 1), (-1, 6), (-1, 1)])
def test_prompt_in_chunks_gives_way_to_decodes_or_stalls_behind_them(priority: int, steps_before: int) -> None:
    """Six rows cross a block's border at once while a prompt is half computed.

    The prompt is more or less urgent than they are, and blocks are short.
    """
    harness = Harness(num_blocks=17, max_num_batched_tokens=22, enable_prefix_cache=False, ageing_s=1.0)
    specs = [request(8, max_tokens=20, seed=seed) for seed in range(6)]
    readers = [harness.add(spec) for spec in specs]
    for _ in range(steps_before):
        harness.step()
    specs.append(request(140, max_tokens=3, priority=priority))
    readers.append(harness.add(specs[-1]))
    while harness.engine.has_work:
        harness.step()
        harness.engine.check_integrity()
    for spec, reader in zip(specs, readers, strict=True):
        assert reader.tokens[0] == expected_tokens(spec, 0)
    *of_decodes, of_prompt = [reader.done.preemptions for reader in readers if reader.done is not None]
    if steps_before == 6:
        # What the step computes already is not taken from it; the prompt stalls and keeps what it
        # has.
        assert (sum(of_decodes), of_prompt) == (0, 0)
    elif priority < 0:
        assert (sum(of_decodes), of_prompt) == (0, 1)
    else:
        assert sum(of_decodes) > 0 and of_prompt == 0


def test_request_with_one_output_preempted_still_decodes() -> None:
    harness = Harness(num_blocks=3, enable_prefix_cache=False)
    spec = request(10, max_tokens=30, n=2)
    reader = harness.add(spec)
    while not harness.engine.load().preemptions:
        harness.step()
    while len(reader.ends) < 1:
        harness.step()
    harness.run()
    assert [reader.tokens[index] for index in range(2)] == [expected_tokens(spec, index) for index in range(2)]
    done = reader.done
    assert done is not None and done.preemptions == 1
    # Only between the end of the one and the next step of the other nothing is computed.
    assert done.preempted_ns <= 2_000


def test_prefix_of_an_ended_request_is_not_computed_again() -> None:
    harness = Harness()
    harness.add(request(40, max_tokens=2))
    harness.run()
    computed = harness.worker.num_tokens
    reader = harness.add(request(40, max_tokens=2))
    harness.run()
    assert harness.worker.num_tokens - computed == 40 - 32 + 1
    assert reader.started is not None and reader.started.cached_tokens == 32
    load = harness.engine.load()
    assert (load.prefix_query_tokens, load.prefix_hit_tokens) == (80, 32)


def test_prefix_hit_leaves_at_least_one_token_to_compute() -> None:
    harness = Harness()
    spec = request(32, max_tokens=2)
    harness.add(spec)
    harness.run()
    reader = harness.add(request(32, max_tokens=2))
    harness.run()
    assert reader.started is not None and reader.started.cached_tokens == 16
    assert reader.tokens[0] == expected_tokens(spec, 0)


@pytest.mark.parametrize(("tenant", "salt"), [("other", b""), ("", b"salt")])
def test_prefix_is_not_shared_with_another_tenant_or_salt(tenant: str, salt: bytes) -> None:
    harness = Harness()
    harness.add(request(40, max_tokens=2))
    harness.run()
    reader = harness.add(request(40, max_tokens=2, tenant=tenant, cache_salt=salt))
    harness.run()
    assert reader.started is not None and reader.started.cached_tokens == 0


def test_prefix_is_not_published_before_its_step_has_settled() -> None:
    harness = Harness()
    harness.add(request(40))
    harness.plan()
    reader = harness.add(request(40))
    harness.settle()
    harness.plan()
    assert reader.started is not None and reader.started.cached_tokens == 32
    harness = Harness()
    harness.add(request(40, max_tokens=1))
    next_plan(harness)
    reader = harness.add(request(40))
    next_plan(harness)
    harness.read()
    assert reader.started is not None and reader.started.cached_tokens == 0


def test_outputs_fork_from_one_prompt() -> None:
    harness = Harness(num_blocks=64)
    spec = request(20, max_tokens=20, n=4)
    reader = harness.add(spec)
    plan = next_plan(harness)
    assert plan.forward.counts.tolist() == [20]
    assert plan.sample.token_indices.tolist() == [19] * 4
    assert harness.engine.load().used_blocks == 2
    second = next_plan(harness)
    # All write to the shared last block; one of them may keep it.
    assert second.forward.copy_sources.size == 3
    assert len(set(second.forward.copy_sources.tolist())) == 1
    harness.run()
    assert [reader.tokens[index] for index in range(4)] == [expected_tokens(spec, index) for index in range(4)]
    assert harness.worker.num_copies == 3


def test_fork_at_a_block_border_copies_nothing() -> None:
    harness = Harness()
    spec = request(32, max_tokens=5, n=3)
    reader = harness.add(spec)
    harness.run()
    assert harness.worker.num_copies == 0
    assert [reader.tokens[index] for index in range(3)] == [expected_tokens(spec, index) for index in range(3)]


def test_outputs_without_a_row_wait_and_find_the_prompt_cached() -> None:
    harness = Harness(max_num_seqs=4, max_outputs=4)
    harness.add(request(8, max_tokens=30))
    harness.add(request(8, max_tokens=30))
    spec = request(40, max_tokens=6, n=4)
    reader = harness.add(spec)
    harness.step()
    assert harness.engine.load().running_sequences == 4
    computed = harness.worker.num_tokens
    harness.run()
    assert [reader.tokens[index] for index in range(4)] == [expected_tokens(spec, index) for index in range(4)]
    # Two outputs and the two other requests decode; two outputs compute what follows the prompt's
    # full blocks.
    assert harness.worker.num_tokens - computed <= 2 * 29 + 2 * 5 + 2 * (8 + 5)


def test_head_of_the_queue_is_not_overtaken_by_what_would_fit() -> None:
    harness = Harness(num_blocks=6, max_num_seqs=4)
    harness.add(request(50, max_tokens=20))
    harness.step()
    large = harness.add(request(60, max_tokens=5))
    harness.now_ns += 1
    small = harness.add(request(4, max_tokens=2))
    harness.run()
    assert large.done is not None and small.done is not None
    assert large.done.queued_ns <= small.done.queued_ns + 1


def test_rows_are_released_in_a_later_plan_than_the_one_in_flight() -> None:
    harness = Harness(max_num_seqs=1)
    spec = request(4, max_tokens=10)
    stop = expected_tokens(spec, 0)[0]
    harness.add(request(4, max_tokens=10, token_ids=frozenset([stop])))
    second = harness.add(request(5, max_tokens=2))
    next_plan(harness)
    next_plan(harness)
    harness.settle()
    plan = next_plan(harness)
    assert plan.released_rows.tolist() == [0]
    assert [admission.row for admission in plan.admissions] == [0]
    harness.run()
    assert second.tokens[0] == expected_tokens(request(5, max_tokens=2), 0)


def test_ten_thousand_waiting_cost_no_more_than_a_hundred() -> None:
    """Counted, not timed: planning a full batch touches the front of the queue at most."""
    visits = []
    for num_waiting in (100, 10_000):
        harness = Harness(max_num_seqs=2, max_waiting_requests=20_000)
        for _ in range(num_waiting + 2):
            harness.add(request(4, max_tokens=20))
        harness.step()
        harness.step()
        waiting = harness.engine._scheduler.waiting
        peeks = 0
        original = type(waiting).peek

        def counted(queue: object, original: object = original) -> object:
            nonlocal peeks
            peeks += 1
            return original(queue)  # type: ignore[operator]

        type(waiting).peek = counted  # type: ignore[method-assign, assignment]
        try:
            for _ in range(10):
                harness.step()
        finally:
            type(waiting).peek = original  # type: ignore[method-assign]
        visits.append(peeks)
    assert visits[0] == visits[1] <= 10
