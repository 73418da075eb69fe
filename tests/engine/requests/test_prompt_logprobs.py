"""Log probabilities of prompts arrive whole, in order and once.

They do so whatever steps the prompt is cut into and whatever happens to them.
"""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies as st
from tests.engine.fake_worker import expected_prompt, expected_tokens
from tests.engine.harness import Harness, Reader, logprob_entries, request
from tests.support.examples import examples

from headrace_backend.engine.errors import RefusalCode, RequestRefused
from headrace_backend.engine.events import EndReason, PromptLogprobs, Started
from headrace_backend.engine.request import Subscriber
from headrace_backend.engine.scheduling import plan_builder

asked = st.tuples(
    st.integers(1, 70),  # prompt tokens
    st.integers(1, 30),  # max_tokens
    st.integers(1, 3),  # n
    st.sampled_from([-1, 0, 3]),  # most likely tokens; -1: nothing of the prompt
    st.integers(0, 8),  # steps before the next one comes
)


@hypothesis.settings(
    max_examples=examples(150),
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow],
)
@hypothesis.given(
    num_blocks=st.integers(8, 20),
    token_budget=st.sampled_from([16, 20, 64]),
    most_in_a_step=st.sampled_from([1, 7, 30, 2048]),
    requests=st.lists(asked, min_size=1, max_size=8),
    deaths=st.sets(st.integers(1, 40), max_size=2),
)
def test_each_token_is_reported_once_whatever_the_steps(
    monkeypatch: pytest.MonkeyPatch,
    num_blocks: int,
    token_budget: int,
    most_in_a_step: int,
    requests: list[tuple[int, int, int, int, int]],
    deaths: set[int],
) -> None:
    monkeypatch.setattr(plan_builder, "MAX_PROMPT_LOGPROBS", most_in_a_step)
    harness = Harness(num_blocks, max_num_seqs=6, max_num_batched_tokens=token_budget, ageing_s=1e-6)
    arrivals = [
        (request(prompt, min(most, num_blocks * 16 + 1 - prompt), n=n, seed=seed, num_prompt_logprobs=tops), pause)
        for seed, (prompt, most, n, tops, pause) in enumerate(requests)
    ]
    num_expected = 0
    for spec, reader in harness.serve(arrivals, deaths):
        expected = expected_prompt(spec) if spec.asked.num_prompt_logprobs >= 0 else []
        assert reader.prompt == expected
        assert [reader.tokens[index] for index in range(spec.asked.n)] == [
            expected_tokens(spec, i) for i in range(spec.asked.n)
        ]
        if expected:
            assert reader.started == Started(0)
        num_expected += len(expected)
    if not deaths:
        assert harness.worker.num_prompt_logprobs == num_expected, "what is computed again is not reported again"


def test_a_step_reports_no_more_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_builder, "MAX_PROMPT_LOGPROBS", 20)
    harness = Harness()
    harness.add(request(50, num_prompt_logprobs=0))
    harness.add(request(50, num_prompt_logprobs=0))
    harness.add(request(30))
    plan = harness.engine.plan()
    assert plan is not None
    # The second one waits for its turn, and whoever comes behind it in the queue too.
    assert plan.forward.counts.tolist() == [20]
    assert plan.prompt_logprobs.counts.tolist() == [20]


def test_steps_without_such_prompts_carry_nothing_of_it() -> None:
    harness = Harness()
    harness.add(request(40))
    plan = harness.engine.plan()
    assert plan is not None
    assert not any(getattr(plan.prompt_logprobs, name).size for name in plan.prompt_logprobs.__slots__)


def test_the_prompt_is_computed_whole_and_its_blocks_serve_others() -> None:
    harness = Harness()
    prompt = list(range(1, 21)) * 2
    first = harness.add(request(prompt, num_prompt_logprobs=1))
    harness.run()
    second = harness.add(request(prompt, num_prompt_logprobs=1))
    harness.run()
    third = harness.add(request(prompt))
    harness.run()
    assert first.prompt == second.prompt and len(first.prompt) == 39
    assert [reader.started for reader in (first, second, third)] == [Started(0), Started(0), Started(32)]


def test_after_a_preemption_what_was_reported_may_come_from_the_prefix_cache() -> None:
    harness = Harness(max_num_batched_tokens=32)
    prompt = list(range(1, 21)) * 4
    harness.add(request(prompt))
    harness.run()
    spec = request(prompt, num_prompt_logprobs=0)
    reader = harness.add(spec)
    harness.step()
    harness.step()
    assert 32 <= len(reader.prompt) < 79
    while harness.worker.plans:
        harness.settle()
    [sequence] = harness.engine._scheduler.batch.running
    harness.engine._scheduler._parts.blocks._preempt(sequence, harness.now_ns)
    num_tokens = harness.worker.num_tokens
    harness.run()
    assert reader.prompt == expected_prompt(spec)
    assert harness.worker.num_tokens - num_tokens < 32 + spec.asked.stop.max_tokens


def test_a_reader_that_comes_late_gets_the_parts_it_missed() -> None:
    harness = Harness(max_num_batched_tokens=16)
    spec = request(60, n=2, num_prompt_logprobs=2)
    first = harness.add(spec)
    for _ in range(3):
        harness.step()
    subscriber = harness.subscriber(stream_id=2)
    snapshot = harness.engine.attach(subscriber, spec.request_id, "", 1, 0)
    late = harness.readers[subscriber] = Reader(prompt=entries_of(snapshot.prompt_logprobs), started=Started(0))
    assert 0 < len(late.prompt) < 59
    harness.run()
    assert late.prompt == first.prompt == expected_prompt(spec)
    snapshot = harness.engine.attach(Subscriber(9, 1), spec.request_id, "", None, 0)
    assert entries_of(snapshot.prompt_logprobs) == first.prompt


def entries_of(parts: list[PromptLogprobs]) -> list[tuple[float, int, list[int]]]:
    entries: list[tuple[float, int, list[int]]] = []
    for part in parts:
        assert part.first_token_index == 1 + len(entries)
        entries += logprob_entries(part.columns)
    return entries


def test_a_number_that_is_none_ends_the_request_and_no_other() -> None:
    harness = Harness(max_num_batched_tokens=16)
    harness.worker.non_finite_prompt_token = 5
    broken = harness.add(request([1] * 20 + [5] + [1] * 20, n=2, num_prompt_logprobs=0))
    other = harness.add(request([1, 2, 3], num_prompt_logprobs=0))
    harness.run()
    assert len(broken.prompt) < 20 and not broken.tokens
    assert {end.reason for end in broken.ends.values()} == {EndReason.ERROR} and len(broken.ends) == 2
    assert other.ends[0].reason is EndReason.LENGTH and len(other.prompt) == 2


@pytest.mark.parametrize("column", ["prompt_sampled", "prompt_top_token_ids"])
def test_missing_numbers_are_a_wrong_result(column: str) -> None:
    harness = Harness()
    reader = harness.add(request(10, num_prompt_logprobs=2))
    harness.plan()
    result = harness.worker.run()
    setattr(result, column, getattr(result, column)[:-1])
    with pytest.raises(ValueError, match="prompt tokens"):
        harness.engine.settle(result)
    assert not reader.prompt and not reader.tokens


def test_memory_is_bounded_for_one_request_and_for_all() -> None:
    harness = Harness(max_prompt_logprobs_bytes=1 << 16, max_log_bytes=1 << 17, model_len=4096, num_blocks=300)
    most = 1 + (1 << 16) // (10 + 8 * 20)
    assert refusal(harness, most + 1, 20).retry_after_ns is None
    readers = [harness.add(request(most, 2, num_prompt_logprobs=20)) for _ in range(2)]
    assert refusal(harness, most, 20).retry_after_ns is not None
    harness.add(request(most, 2))
    harness.run()
    assert [len(reader.prompt) for reader in readers] == [most - 1] * 2
    # What is kept after the end counts as log, of which the bound holds one such prompt.
    assert 1 << 16 < harness.engine._table.log_bytes <= 1 << 17
    harness.add(request(most, 2, num_prompt_logprobs=20))
    harness.run()


def refusal(harness: Harness, num_tokens: int, num_tops: int) -> RequestRefused:
    with pytest.raises(RequestRefused, match=r"spec\.prompt_logprobs: .* bytes") as refused:
        harness.add(request(num_tokens, 2, num_prompt_logprobs=num_tops))
    assert refused.value.code is RefusalCode.RESOURCE_EXHAUSTED
    return refused.value
