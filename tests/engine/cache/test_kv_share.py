"""A tenant holds its share of the KV cache and no more, at the expense of nobody but itself."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from tests.engine.fake_worker import expected_tokens
from tests.engine.harness import Harness, Reader, request
from tests.support.examples import examples

from headrace_backend.engine.errors import RefusalCode, RequestRefused
from headrace_backend.engine.events import EndReason
from headrace_backend.engine.limits.tenant_account import TenantAccount
from headrace_backend.engine.request import EngineRequest, TenantLimits

HALF = TenantLimits(kv_cache_share=0.5)


def greedy(prompt: Any, max_tokens: int = 8, limits: TenantLimits = HALF, **changes: Any) -> EngineRequest:
    return request(prompt, max_tokens, tenant="greedy", limits=limits, **changes)


def account(harness: Harness, tenant: str = "greedy") -> TenantAccount:
    found = harness.engine._quotas.find(tenant)
    assert found is not None
    return found


def whole(spec: EngineRequest, reader: Reader) -> bool:
    return [reader.tokens[index] for index in range(spec.asked.n)] == [
        expected_tokens(spec, i) for i in range(spec.asked.n)
    ]


def run_watching(harness: Harness) -> int:
    """Until nothing is left.

    Returns the most blocks that the greedy tenant held; a prefix cache may have kept more for
    later.
    """
    most = 0
    while harness.engine.has_work:
        harness.checked_step()
        most = max(most, account(harness).num_blocks if harness.engine.has_work else 0)
    harness.run()
    return most


def test_others_pass_a_tenant_that_waits_for_its_share() -> None:
    harness = Harness(num_blocks=16, max_num_seqs=8, max_num_batched_tokens=512)
    mine = [(spec, harness.add(spec)) for spec in (greedy(60, 60, request_id=f"g{i}") for i in range(5))]
    other = request(40, 4, tenant="other")
    reader = harness.add(other)
    harness.checked_step()
    assert reader.started is not None, "four requests of the greedy tenant wait before it, and it starts"
    assert sum(reader.started is not None for _, reader in mine) == 1
    assert harness.engine.load().preemptions == 0
    assert run_watching(harness) <= 8
    assert all(whole(spec, reader) for spec, reader in [*mine, (other, reader)])


def test_tenant_over_its_share_preempts_its_own_newest_and_never_another() -> None:
    harness = Harness(num_blocks=24, max_num_seqs=8, max_num_batched_tokens=512)
    other = request(100, 20, tenant="other")
    before = harness.add(other)
    mine = [greedy(20, 60, TenantLimits(kv_cache_share=1 / 3)) for _ in range(3)]
    readers = [harness.add(spec) for spec in mine]
    later = request(16, 30, tenant="other")
    after = harness.add(later)
    assert run_watching(harness) == 8
    assert before.done is not None and before.done.preemptions == 0
    assert after.done is not None and after.done.preemptions == 0
    preemptions = [reader.done.preemptions for reader in readers if reader.done is not None]
    assert preemptions[0] == 0 and sum(preemptions) == harness.engine.load().preemptions > 0
    assert preemptions[2] >= 1, "the newest goes first"
    assert all(whole(spec, reader) for spec, reader in zip(mine, readers, strict=True))


def test_prompt_shared_by_outputs_counts_once() -> None:
    harness = Harness(num_blocks=16, max_num_seqs=8, max_num_batched_tokens=512)
    # Five blocks of prompt, and one more for each output: with its own prompt each, they would not
    # fit together.
    spec = greedy(16 * 5, 8, n=3)
    reader = harness.add(spec)
    harness.checked_step()
    harness.checked_step()
    assert account(harness).num_blocks == 5 + 3
    harness.run()
    assert whole(spec, reader)
    assert harness.engine.load().preemptions == 0


def test_cached_blocks_are_nobodys() -> None:
    harness = Harness(num_blocks=16, max_num_seqs=8, max_num_batched_tokens=512)
    for seed in range(4):
        harness.add(greedy([1 + seed] * 100, 8))
        harness.run()
    assert harness.engine.load().cached_blocks > 8
    harness.add(greedy([1] * 100, 8))
    harness.checked_step()
    assert account(harness).num_blocks == 7
    harness.run()


def test_request_beyond_its_share_is_refused_with_the_arithmetic() -> None:
    harness = Harness(num_blocks=16)
    with pytest.raises(RequestRefused) as refused:
        harness.add(greedy(100, 30))
    assert refused.value.code is RefusalCode.RESOURCE_EXHAUSTED and refused.value.retry_after_ns is None
    for part in ("kv_cache_share", "129 tokens", "9 blocks of 16", "8 of 16 blocks"):
        assert part in refused.value.message
    harness.add(greedy(100, 29))
    harness.run()
    with pytest.raises(RequestRefused, match="0 of 16 blocks"):
        harness.add(greedy(1, 1, TenantLimits(kv_cache_share=1e-9)))


@pytest.mark.parametrize(("share", "num_blocks"), [(0.29, 29), (0.7, 70), (1.0, 100), (0.001, 0), (0.019, 1)])
def test_share_is_of_whole_blocks(share: float, num_blocks: int) -> None:
    harness = Harness(num_blocks=100)
    found = harness.engine._quotas.account("t", TenantLimits(kv_cache_share=share), 0)
    assert found.max_blocks == num_blocks


def test_smaller_share_ends_what_cannot_fit_any_more_and_lets_the_rest_go_on() -> None:
    harness = Harness(num_blocks=16, max_num_seqs=8, max_num_batched_tokens=512)
    large, small = greedy(100, 20), greedy(10, 40)
    ended, kept = harness.add(large), harness.add(small)
    harness.checked_step()
    last = greedy(10, 40, TenantLimits(kv_cache_share=0.25))
    reader = harness.add(last)
    harness.run()
    assert ended.ends[0].reason is EndReason.ERROR and "kv_cache_share" in ended.ends[0].unfit
    assert whole(small, kept) and whole(last, reader)


def test_smaller_share_takes_nothing_but_gives_nothing_until_it_is_met() -> None:
    harness = Harness(num_blocks=16, max_num_seqs=8, max_num_batched_tokens=512)
    specs = [greedy(30, 34, TenantLimits(kv_cache_share=1.0)) for _ in range(4)]
    readers = [harness.add(spec) for spec in specs]
    harness.checked_step()
    assert account(harness).num_blocks == 8
    specs.append(greedy(30, 34, TenantLimits(kv_cache_share=0.25)))
    readers.append(harness.add(specs[-1]))
    held = [account(harness).num_blocks]
    while harness.engine.has_work:
        harness.checked_step()
        held.append(account(harness).num_blocks if harness.engine.has_work else 0)
    assert held[0] == 8 and all(after <= max(before, 4) for before, after in zip(held, held[1:], strict=False))
    assert all(whole(spec, reader) for spec, reader in zip(specs, readers, strict=True))


def test_larger_share_lets_waiting_requests_in_at_once() -> None:
    harness = Harness(num_blocks=16, max_num_seqs=8, max_num_batched_tokens=512)
    readers = [harness.add(greedy(60, 60)) for _ in range(2)]
    harness.checked_step()
    assert readers[1].started is None
    harness.add(greedy(5, 2, TenantLimits(kv_cache_share=1.0)))
    harness.checked_step()
    assert readers[1].started is not None
    harness.run()


def test_tenant_passed_over_is_tried_again_when_its_worker_is_lost() -> None:
    """The one who waits is more urgent than those who ran: nobody comes back ahead of it."""
    harness = Harness(num_blocks=16, max_num_seqs=8, max_num_batched_tokens=512, ageing_s=10.0)
    running = greedy([1] * 60, 60)
    readers = [harness.add(running)]
    harness.checked_step()
    urgent = greedy([2] * 60, 60, priority=2)
    readers.append(harness.add(urgent))
    harness.checked_step()
    assert readers[1].started is None
    harness.replace_worker()
    harness.checked_step()
    assert readers[1].started is not None
    harness.run()
    assert whole(running, readers[0]) and whole(urgent, readers[1])


def test_blocks_that_a_prompt_still_needs_are_not_given_to_the_next_one() -> None:
    harness = Harness(num_blocks=64, max_num_seqs=8, max_num_batched_tokens=16, enable_prefix_cache=False)
    # A long prompt leaves half of each step to others, and takes its blocks chunk by chunk.
    readers = [harness.add(greedy([1] * 300, 60)), harness.add(greedy([2] * 200, 8))]
    other = harness.add(request([3] * 200, 8, tenant="other"))
    harness.run()
    assert harness.engine.load().preemptions == 0
    assert readers[0].done is not None and readers[1].done is not None and other.done is not None
    assert other.done.ended_at_ns < readers[0].done.ended_at_ns


def test_deadline_is_not_measured_by_prompts_that_are_passed_over() -> None:
    harness = Harness(num_blocks=64, max_num_seqs=8, max_num_batched_tokens=512, enable_prefix_cache=False)
    harness.add(greedy([1] * 300, 200))
    harness.step()
    for _ in range(5):
        harness.add(greedy([2] * 400, 8))
    harness.checked_step()
    # 300 tokens took a microsecond: 2,000 wait for six or more.
    spec = request(20, 4, tenant="other", deadline_ns=harness.now_ns + 5_000)
    with pytest.raises(RequestRefused, match="expected wait"):
        harness.add(greedy(20, 4, deadline_ns=harness.now_ns + 5_000))
    assert harness.engine.load().expected_wait_ns == 0
    reader = harness.add(spec)
    for _ in range(3):
        harness.checked_step()
    assert reader.tokens[0]
    harness.engine.stream_lost(1)
    harness.engine.check_integrity()


def fastest_walk_ns(line: list[int]) -> int:
    """The time of the fastest of twenty walks over all who wait, in nanoseconds."""
    fastest_ns = 10**9
    for _ in range(20):
        began = time.perf_counter_ns()
        for waiting in line:
            if waiting < 0:
                break
        fastest_ns = min(fastest_ns, time.perf_counter_ns() - began)
    return fastest_ns


def test_passing_over_a_long_line_costs_a_step_nothing() -> None:
    """10,000 waiting requests of a tenant at its share, and one of another behind them."""
    harness = Harness(
        num_blocks=64,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        max_waiting_requests=20_000,
        enable_prefix_cache=False,
    )
    # All of its share at once, for long.
    harness.add(greedy(480, 30))
    harness.step()
    for _ in range(10_000):
        harness.add(greedy(20, 100))
    reader = harness.add(request(20, 200, tenant="other"))
    fastest_ns = 10**9
    for _ in range(20):
        began = time.perf_counter_ns()
        plan = harness.engine.plan()
        fastest_ns = min(fastest_ns, time.perf_counter_ns() - began)
        if plan is not None:
            harness.worker.push(plan)
        harness.settle()
    assert reader.started is not None and len(reader.tokens[0]) > 10
    assert harness.engine.load().waiting_requests == 10_000
    # A bare walk over the line takes four times as long. The fastest of many, as the machine may be
    # busy.
    assert fastest_ns < fastest_walk_ns(list(range(10_000)))
    harness.engine.stream_lost(1)


asked = st.tuples(
    st.integers(1, 60),  # prompt tokens
    st.integers(1, 50),  # max_tokens
    st.integers(1, 3),  # n
    st.integers(-1, 1),  # priority
    st.integers(0, 8),  # steps before it comes
    st.sampled_from(["a", "b", "free"]),
)


@hypothesis.settings(max_examples=examples(150), deadline=None)
@hypothesis.given(
    num_blocks=st.integers(8, 24),
    shares=st.tuples(st.floats(0.2, 0.9), st.floats(0.2, 0.9)),
    token_budget=st.sampled_from([16, 40, 200]),
    enable_prefix_cache=st.booleans(),
    requests=st.lists(asked, min_size=2, max_size=12),
    deaths=st.sets(st.integers(1, 40), max_size=2),
)
def test_no_pressure_lifts_a_tenant_above_its_share(
    num_blocks: int,
    shares: tuple[float, float],
    token_budget: int,
    enable_prefix_cache: bool,
    requests: list[tuple[int, int, int, int, int, str]],
    deaths: set[int],
) -> None:
    harness = Harness(
        num_blocks,
        max_num_seqs=10,
        max_num_batched_tokens=token_budget,
        enable_prefix_cache=enable_prefix_cache,
        ageing_s=1e-6,
    )
    limits = {"a": TenantLimits(kv_cache_share=shares[0]), "b": TenantLimits(kv_cache_share=shares[1])}
    limits["free"] = TenantLimits()
    most = {"a": int(shares[0] * num_blocks + 1e-6), "b": int(shares[1] * num_blocks + 1e-6), "free": num_blocks}
    arrivals = []
    for seed, (prompt, max_tokens, n, priority, pause, tenant) in enumerate(requests):
        room = most[tenant] * 16 + 1
        if room > 2:
            prompt = min(prompt, room - 1)
            max_tokens = min(max_tokens, room - prompt)
            spec = request(prompt, max_tokens, n=n, priority=priority, seed=seed, tenant=tenant, limits=limits[tenant])
            arrivals.append((spec, pause))

    def step() -> None:
        harness.checked_step()
        for kept in harness.engine._quotas:
            assert kept.num_blocks <= most[kept.tenant]

    for spec, reader in harness.serve(arrivals, deaths, step):
        assert whole(dataclasses.replace(spec), reader)
    assert harness.engine.load().used_blocks == 0
    assert len(harness.engine._quotas) == 0
