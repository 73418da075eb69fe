"""Prompts that begin alike are computed once.

They are published chunk by chunk, waited for, kept when their requests end early, and never shared
if they are not finite.
"""

from __future__ import annotations

import typing
from typing import Any

import hypothesis
import pytest
from benchmarks import simulate_prefixes
from hypothesis import strategies as st
from tests.engine.fake_worker import expected_tokens
from tests.engine.harness import Harness, Reader, request
from tests.support.examples import examples

from headrace_backend.config import EngineConfig
from headrace_backend.engine.events import EndReason
from headrace_backend.engine.request import AbortCause, EngineRequest
from headrace_backend.engine.scheduling import plan_builder, prefix_followers


def prompt(shared: int, own: int, number: int = 0) -> list[int]:
    """`shared` tokens that all have, then `own` ones of the number's."""
    return [1 + index * index % 7 for index in range(shared)] + [1 + (number + index) % 20 for index in range(own)]


def cached_tokens(reader: Reader) -> int:
    assert reader.started is not None
    return reader.started.cached_tokens


def measured_harness(**changes: Any) -> Harness:
    """A harness whose steps were measured as short, so that only the token budget cuts chunks."""
    harness = Harness(**changes)
    harness.add(request(prompt(0, 500, 99), 1))
    harness.run()
    return harness


def wave(count: int, shared: int, own: int) -> list[EngineRequest]:
    """Requests whose own parts differ from the first token on."""
    first = ([1 + number // 20, 1 + number % 20] for number in range(count))
    return [request(prompt(shared, 0) + ids + prompt(0, own - 2, number), 1) for number, ids in enumerate(first)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("budget", [2048, 8192])
def test_a_wave_computes_its_shared_prefix_once(budget: int) -> None:
    harness = Harness(
        4000, model_len=20_000, max_num_seqs=64, max_num_batched_tokens=budget, max_waiting_tokens=1 << 21
    )
    specs = wave(64, 16_000, 100)
    readers = [harness.add(spec) for spec in specs]
    harness.run()
    assert harness.worker.num_tokens == 16_000 + 64 * 100
    assert [reader.tokens[0] for reader in readers] == [expected_tokens(spec, 0) for spec in specs]
    assert [cached_tokens(reader) for reader in readers] == [0] + 63 * [16_000]


def test_a_cancelled_prompt_leaves_its_settled_chunks() -> None:
    harness = Harness(max_num_batched_tokens=64)
    cancelled = request(prompt(200, 0))
    harness.add(cancelled)
    for _ in range(2):
        harness.step()
    harness.engine.abort(cancelled.request_id, "", AbortCause.CANCELLED)
    # A third chunk is on its way, and is lost.
    reader = harness.add(request(prompt(200, 20)))
    harness.run()
    assert cached_tokens(reader) == 128


def test_a_preempted_prompt_finds_its_settled_chunks() -> None:
    """Four decodes need a block each at once, and take those of a half-computed prompt."""
    harness = Harness(num_blocks=15, max_num_batched_tokens=64)
    for number in range(4):
        harness.add(request(prompt(0, 14, number), 8))
    spec = request(prompt(140, 0), max_tokens=2)
    reader = harness.add(spec)
    while harness.engine.load().preemptions == 0:
        harness.checked_step()
    harness.run()
    assert reader.tokens[0] == expected_tokens(spec, 0)
    assert reader.done is not None and reader.done.preemptions == 1
    # 8, 60 and 60 tokens were planned before, of which the first two chunks had settled: their four
    # full blocks are not computed again.
    assert harness.worker.num_tokens == 4 * (14 + 7) + 140 + 1 + (8 + 60 + 60 - 64)


def test_a_prefix_is_found_while_its_prompt_is_still_computed() -> None:
    harness = Harness(max_num_batched_tokens=64)
    harness.add(request(prompt(300, 0)))
    for _ in range(3):
        harness.step()
    reader = harness.add(request(prompt(64, 20, 1), max_tokens=2, priority=1))
    harness.step()
    harness.step()
    assert cached_tokens(reader) == 64


def test_a_prompt_that_shares_little_does_not_wait() -> None:
    """The step has room for both, which have fewer than the least tokens in common."""
    shared = prefix_followers.LEAST_SHARED_TOKENS - 16
    harness = measured_harness(max_num_batched_tokens=256)
    harness.add(request(prompt(shared, 20, 1), 2))
    reader = harness.add(request(prompt(shared, 20, 2), 2))
    harness.plan()
    assert cached_tokens(reader) == 0


@pytest.mark.parametrize("priority", [0, 1])
def test_a_prompt_waits_for_one_that_computes_the_same_whoever_is_more_urgent(priority: int) -> None:
    """A less urgent one waits for all that both share, a more urgent one for what is in flight."""
    harness = measured_harness(max_num_batched_tokens=150, ageing_s=60.0)
    before = harness.worker.num_tokens
    first = harness.add(request(prompt(400, 1, 1), 1))
    harness.step()
    second = harness.add(request(prompt(400, 1, 2), 1, priority=priority))
    harness.plan()
    assert first.started is not None and second.started is None
    harness.run()
    assert harness.worker.num_tokens - before == 400 + 1 + 1


def test_whoever_is_overtaken_takes_up_what_the_other_computed() -> None:
    """The more urgent one finds too little in flight to wait for, and then is the faster one."""
    harness = measured_harness(num_blocks=200, model_len=1024, max_num_batched_tokens=64, ageing_s=60.0)
    before = harness.worker.num_tokens
    specs = [request(prompt(900, 1, number), 3, priority=number) for number in range(2)]
    readers = [harness.add(specs[0])]
    harness.checked_step()
    readers.append(harness.add(specs[1]))
    harness.checked_step()
    assert [reader.started is not None for reader in readers] == [True, True]
    while harness.engine.has_work:
        harness.checked_step()
    assert [reader.tokens[0] for reader in readers] == [expected_tokens(spec, 0) for spec in specs]
    assert harness.worker.num_tokens - before <= 900 + 2 * (1 + 2) + prefix_followers.LEAST_SHARED_TOKENS
    assert harness.engine.load().preemptions == 0


def test_a_long_prompt_and_a_less_urgent_one_do_not_compute_the_same_side_by_side(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A share of the steps is kept for the long one, and the shorter one is some tokens ahead."""
    monkeypatch.setattr(prefix_followers, "LEAST_SHARED_TOKENS", 32)
    harness = measured_harness(num_blocks=1000, model_len=1000, max_num_batched_tokens=64, ageing_s=60.0)
    before = harness.worker.num_tokens
    specs = [
        request(prompt(0, 701), 1),
        request(prompt(500, 1), 1, priority=-1),
        request(prompt(0, 701), 1),
        request(prompt(900, 1), 1),
    ]
    harness.serve(list(zip(specs, (4, 4, 1, 0), strict=True)))
    least = simulate_prefixes.least_tokens([spec.prompt_ids.tolist() for spec in specs])
    assert harness.worker.num_tokens - before <= least + 2 * 32


def test_nobody_waits_for_a_prompt_that_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps report few prompt tokens, and a more urgent prompt takes all of these."""
    monkeypatch.setattr(plan_builder, "MAX_PROMPT_LOGPROBS", 64)
    harness = Harness(400, model_len=4000, max_num_batched_tokens=256, ageing_s=60.0)
    harness.add(request(prompt(2400, 1, 1), 1, num_prompt_logprobs=0))
    for _ in range(3):
        harness.checked_step()
    harness.add(request(prompt(0, 400, 2), 1, num_prompt_logprobs=0, priority=1))
    for _ in range(2):
        harness.checked_step()
    follower = harness.add(request(prompt(1200, 1, 3), 1))
    for _ in range(3):
        harness.checked_step()
    assert follower.started is not None
    harness.run()


@pytest.mark.parametrize("is_between", [False, True])
def test_nobody_waits_for_a_prompt_that_a_less_urgent_one_precedes(is_between: bool) -> None:
    """The third one's prompt goes into each step before that of the one to be waited for."""
    harness = measured_harness(num_blocks=800, model_len=4000, max_num_batched_tokens=256, ageing_s=60.0)
    harness.add(request(prompt(3600, 1, 1), 1))
    harness.checked_step()
    if is_between:
        between = harness.add(request(prompt(0, 3600, 2), 1, priority=1))
        harness.checked_step()
        assert between.started is not None
    urgent = harness.add(request(prompt(1200, 1, 3), 1, priority=2))
    harness.plan()
    assert (urgent.started is not None) == is_between
    harness.run()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["staggered by 20 ms", "forks: 8 ends of a half", "ever more urgent, 5 ms"])
def test_a_simulated_card_computes_a_prefix_once(name: str) -> None:
    """Long prompts and limited steps, where the property with random arrivals has short ones."""
    case = next(case for case in simulate_prefixes.cases(seed=3) if case.name == name)
    computed, _ = simulate_prefixes.play(case, budget=2048, seed=3)
    assert computed <= 1.03 * simulate_prefixes.least_tokens(case.prompts)


@st.composite
def urgent_arrivals(draw: st.DrawFn) -> tuple[EngineRequest, int]:
    ids = draw(st.sampled_from([prompt(900, 0), prompt(500, 0), prompt(0, 700)]))
    own = draw(st.lists(st.integers(1, 20), min_size=1, max_size=20))
    return request(ids + own, 1, n=draw(st.integers(1, 2)), priority=draw(st.integers(-2, 2))), draw(st.integers(0, 4))


@hypothesis.settings(max_examples=examples(60), deadline=None)
@hypothesis.given(
    arrivals=st.lists(urgent_arrivals(), min_size=2, max_size=8), budget=st.sampled_from([32, 64, 100, 256, 1000])
)
def test_no_prompt_computes_much_of_what_others_compute(arrivals: list[tuple[EngineRequest, int]], budget: int) -> None:
    """Whoever comes when, and is more urgent than whom, where blocks are plenty."""
    harness = measured_harness(num_blocks=1000, model_len=1000, max_num_batched_tokens=budget, ageing_s=60.0)
    before = harness.worker.num_tokens
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_followers, "LEAST_SHARED_TOKENS", 32)
        served = harness.serve(arrivals)
    least = simulate_prefixes.least_tokens([spec.prompt_ids.tolist() for spec, _ in served])
    assert harness.worker.num_tokens - before <= least + len(served) * 64
    assert all(reader.tokens[0] == expected_tokens(spec, 0) for spec, reader in served)


@pytest.mark.parametrize("cause", ["leader", "follower", "worker"])
def test_whoever_waits_for_a_prefix_goes_on_whatever_happens(cause: str) -> None:
    harness = Harness(max_num_batched_tokens=128)
    specs = [request(prompt(400, 10, number), 3) for number in range(4)]
    readers = [harness.add(spec) for spec in specs]
    harness.checked_step()
    assert [reader.started is not None for reader in readers] == [True, False, False, False]
    if cause == "worker":
        harness.replace_worker()
    else:
        ended = specs[0 if cause == "leader" else 2]
        harness.engine.abort(ended.request_id, "", AbortCause.CANCELLED)
    harness.engine.check_integrity()
    harness.run()
    for spec, reader in zip(specs, readers, strict=True):
        if reader.ends[0].reason is not EndReason.CANCELLED:
            assert reader.tokens[0] == expected_tokens(spec, 0)
    lost = {"leader": 128 + 128, "follower": 0, "worker": 128}[cause]
    assert harness.worker.num_tokens <= 400 + 4 * (10 + 3) + lost


def test_a_prefix_computed_again_after_a_lost_worker_is_found() -> None:
    """Keys of a sequence outlive the worker's cache, and name the same tokens in the next one."""
    harness = Harness()
    harness.add(request(prompt(60, 1), 30))
    harness.step()
    harness.step()
    harness.replace_worker()
    harness.step()
    harness.step()
    reader = harness.add(request(prompt(60, 2), 2))
    harness.run()
    assert cached_tokens(reader) == 48


def test_a_tenants_prefix_is_not_waited_for_by_others() -> None:
    harness = measured_harness(max_num_batched_tokens=256)
    harness.add(request(prompt(300, 1, 1), 2))
    harness.step()
    other = harness.add(request(prompt(300, 1, 2), 2, tenant="other"))
    harness.plan()
    assert cached_tokens(other) == 0


def test_outputs_without_a_row_do_not_compute_the_prompt_again() -> None:
    harness = Harness(max_num_seqs=2, max_outputs=2, max_num_batched_tokens=512)
    first = request(prompt(0, 8), max_tokens=2)
    harness.add(first)
    spec = request(prompt(320, 5), max_tokens=4, n=2)
    reader = harness.add(spec)
    harness.run()
    assert [reader.tokens[index] for index in range(2)] == [expected_tokens(spec, index) for index in range(2)]
    assert harness.worker.num_tokens <= 8 + 2 + 325 + 5 + 2 * 4


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("poisoned", [0, 70, 130, 190])
def test_a_poisoned_chunk_is_never_published(poisoned: int, window: int | None) -> None:
    """One token's KV is not finite, near its chunk's end or before all that the last token sees."""
    harness = Harness(max_num_batched_tokens=64, attention_window=window)
    reader = harness.add(request(prompt(200, 0)))
    harness.worker.poison_after = poisoned
    harness.run()
    assert reader.ends[0].reason is EndReason.ERROR and reader.ends[0].error
    assert 0 not in reader.tokens
    # What follows a chunk that is not finite is not computed, but for the step that was planned
    # already.
    assert harness.worker.num_tokens <= 64 * (poisoned // 64 + 2)
    spec = request(prompt(200, 0))
    again = harness.add(spec)
    harness.run()
    assert cached_tokens(again) == poisoned // 64 * 64
    assert again.tokens[0] == expected_tokens(spec, 0)


def test_a_poisoned_prompt_ends_all_outputs_and_nobody_who_waits_for_it() -> None:
    harness = Harness(max_num_batched_tokens=128)
    reader = harness.add(request(prompt(300, 1, 1), 3, n=2))
    spec = request(prompt(300, 1, 2), 3)
    other = harness.add(spec)
    harness.plan()
    harness.worker.poison_after = 5
    harness.run()
    assert [reader.ends[index].reason for index in range(2)] == [EndReason.ERROR] * 2
    assert other.tokens[0] == expected_tokens(spec, 0)


def test_a_result_without_its_checks_is_wrong() -> None:
    harness = Harness(max_num_batched_tokens=64)
    harness.add(request(prompt(100, 0)))
    harness.plan()
    result = harness.worker.run()
    assert result.checked_ok.size == 1
    result.checked_ok = result.checked_ok[:0]
    with pytest.raises(ValueError, match="hidden states are checked"):
        harness.engine.settle(result)


@st.composite
def arrivals(draw: st.DrawFn) -> tuple[EngineRequest, int]:
    ids = prompt(draw(st.integers(0, 120)), draw(st.integers(1, 20)), draw(st.integers(0, 3)))
    spec = request(ids, draw(st.integers(1, 6)), n=draw(st.integers(1, 2)), priority=draw(st.integers(-1, 1)))
    return spec, draw(st.integers(0, 4))


@hypothesis.settings(max_examples=examples(60), deadline=None)
@hypothesis.given(
    specs=st.lists(arrivals(), min_size=1, max_size=8),
    least=st.sampled_from([16, 64]),
    num_blocks=st.integers(12, 40),
    budget=st.sampled_from([24, 64, 200]),
    poisons=st.dictionaries(st.integers(1, 40), st.integers(0, 60), max_size=3),
)
def test_tokens_do_not_depend_on_sharing_and_poison_stays_with_its_request(
    specs: list[tuple[EngineRequest, int]], least: int, num_blocks: int, budget: int, poisons: dict[int, int]
) -> None:
    """Reference counts and tables hold after every step (`checked_step`).

    Only requests with something that is not finite fail.
    """
    harness = Harness(num_blocks, model_len=160, max_num_batched_tokens=budget, max_num_seqs=4, ageing_s=1e-5)
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        harness.worker.poison_after = poisons.get(steps, harness.worker.poison_after)
        harness.checked_step()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_followers, "LEAST_SHARED_TOKENS", least)
        served = harness.serve(specs, step=step)
    failed = [reader for _, reader in served if any(end.reason is EndReason.ERROR for end in reader.ends.values())]
    assert len(failed) <= len(harness.worker.poisoned_rows)
    for spec, reader in served:
        for index, end in reader.ends.items():
            if end.reason is EndReason.LENGTH:
                assert reader.tokens[index] == expected_tokens(spec, index)
            else:
                assert end.reason is EndReason.ERROR and reader in failed


def test_no_block_has_more_tokens_than_must_be_shared() -> None:
    """Within as many tokens a block has to end, by which a prompt is found to be overtaken."""
    sizes = typing.get_args(EngineConfig.model_fields["block_size"].annotation)
    assert 1 <= min(sizes) and max(sizes) <= prefix_followers.LEAST_SHARED_TOKENS
