"""How long chunks are, and that no policy of lengths changes a token."""

from __future__ import annotations

import dataclasses
from unittest import mock

import hypothesis
import pytest
from hypothesis import strategies as st
from tests.engine.fake_worker import expected_tokens
from tests.engine.harness import Harness, request
from tests.support.examples import examples

from headrace_backend.engine.scheduling import step_time, token_budget, waiting_queue
from headrace_backend.engine.scheduling.step_time import StepLoad, StepTimeModel
from headrace_backend.engine.scheduling.token_budget import StepLimits, TokenBudget

MODEL = StepTimeModel()
MAX_TOKENS = 8192


def budget(target_us: float | None = 13_000) -> TokenBudget:
    made = TokenBudget(MAX_TOKENS, MODEL)
    made.target_us = target_us
    return made


def decodes(count: int = 16, context: int = 600) -> StepLoad:
    return StepLoad(count, count * context)


def test_without_a_target_a_prompt_takes_what_the_token_budget_leaves() -> None:
    limits = budget(None)
    limits.begin(decodes(16), 500)
    assert limits.chunk(0, 50_000) == MAX_TOKENS - 16


def test_without_decodes_a_prompt_takes_the_whole_budget() -> None:
    limits = budget()
    limits.begin(StepLoad(), 500)
    assert limits.chunk(0, 50_000) == MAX_TOKENS


def test_beside_decodes_a_step_keeps_to_its_time() -> None:
    limits, load = budget(), decodes()
    limits.begin(load, 3000)
    count = limits.chunk(0, 3000)
    load.add_chunk(0, count)
    assert 10_000 < MODEL.predict_us(load) <= 13_000
    assert limits.chunk(0, 500) == 0


def test_several_prompts_share_a_step_in_order() -> None:
    limits, load = budget(), decodes()
    limits.begin(load, 2300)
    counts = []
    for length in (150, 150, 2000):
        counts.append(limits.chunk(0, length))
        load.add_chunk(0, counts[-1])
    assert counts[:2] == [150, 150]
    assert counts[2] >= 64
    assert MODEL.predict_us(load) <= 13_000


def test_end_of_a_prompt_is_not_left_to_a_step_of_its_own_if_it_nearly_fits() -> None:
    limits, load = budget(), decodes()
    limits.begin(load, 1000)
    most = limits.chunk(0, 100_000)
    assert limits.chunk(0, most + 5) == most + 5


def with_least_chunk_us(load: StepLoad, model: StepTimeModel = MODEL) -> float:
    more = dataclasses.replace(load)
    more.add_chunk(0, 64)
    return model.predict_us(more)


class OfAMixture(StepTimeModel):
    """Steps with prompts take 3 ms more than decodes, however few their tokens are."""

    __slots__ = ()

    def predict_us(self, load: StepLoad) -> float:
        return super().predict_us(load) + 3_000.0 * (load.num_prefill_tokens > 0)

    def fitting_tokens(self, load: StepLoad, start: int, limit_us: float) -> int:
        return super().fitting_tokens(load, start, limit_us - 3_000.0)


def test_the_first_tokens_of_a_prompt_do_not_take_its_share_of_the_time() -> None:
    load, model = decodes(250, 600), OfAMixture()
    limits = TokenBudget(MAX_TOKENS, model)
    limits.target_us = 13_000
    alone_us = model.predict_us(load)
    assert alone_us > 0.8 * 13_000 and with_least_chunk_us(load, model) - alone_us > 0.25 * alone_us
    limits.begin(load, 3000)
    load.add_chunk(0, limits.chunk(0, 3000))
    assert load.num_prefill_tokens >= 128
    assert model.predict_us(load) - with_least_chunk_us(decodes(250, 600), model) <= 0.25 * alone_us


def test_prompt_advances_however_long_decodes_take() -> None:
    limits, load = budget(1_000), decodes(200, 8000)
    limits.begin(load, 3000)
    alone_us = MODEL.predict_us(load)
    count = limits.chunk(0, 3000)
    assert count >= 64
    load.add_chunk(0, count)
    assert MODEL.predict_us(load) <= 1.25 * alone_us


def test_deep_in_a_long_prompt_a_chunk_is_as_short_as_its_time_asks_for() -> None:
    limits, load = budget(), decodes(64, 4000)
    limits.begin(load, 2048)
    chunks = [limits.chunk(start, 3900) for start in (1000, 16_384, 28_672, 120_000)]
    assert chunks == sorted(chunks, reverse=True) and chunks[0] > 2 * chunks[2]
    assert chunks[-1] == 64


CAPTURED = (16, 64, 128, 256, 384, 512)


def padded_budget(target_us: float = 13_000) -> TokenBudget:
    model = StepTimeModel()
    model.captured = CAPTURED
    made = TokenBudget(MAX_TOKENS, model)
    made.target_us = target_us
    return made


@hypothesis.given(
    st.integers(1, 200),
    st.integers(0, 100_000),
    st.integers(0, 400),
    st.integers(300, 3900),
    st.integers(6_000, 16_000),
)
def test_a_chunk_fills_a_captured_size_or_ends_its_prompt(
    num_decodes: int, start: int, first_prompt: int, num_left: int, target_us: int
) -> None:
    limits, load = padded_budget(target_us), decodes(num_decodes)
    limits.begin(load, 500)
    if first_prompt:
        count = limits.chunk(0, first_prompt)
        load.add_chunk(0, count)
        if count < first_prompt:
            assert load.num_tokens in CAPTURED or load.num_tokens > CAPTURED[-1]
    count = limits.chunk(start, num_left)
    load.add_chunk(start, count)
    assert count in (0, num_left) or load.num_tokens in CAPTURED or load.num_tokens > CAPTURED[-1]


def test_the_largest_captured_size_that_fits_is_filled() -> None:
    limits, load = padded_budget(), decodes(16)
    limits.begin(load, 3900)
    load.add_chunk(0, limits.chunk(0, 3900))
    larger = StepLoad(16, 16 * 600)
    larger.add_chunk(0, CAPTURED[CAPTURED.index(load.num_tokens) + 1] - 16)
    assert limits._model.predict_us(load) <= 0.96 * 13_000 < limits._model.predict_us(larger)


def test_padding_costs_what_tokens_cost() -> None:
    model = padded_budget()._model
    padded, full = decodes(16), decodes(16)
    padded.add_chunk(0, 130)
    full.add_chunk(0, 240)
    pairs_us = model.coefficients_us[step_time._PAIRS] * (full.attention_pairs - padded.attention_pairs)
    assert model.predict_us(full) - model.predict_us(padded) == pytest.approx(pairs_us)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_without_graphs_no_size_is_preferred(on_gpu: bool) -> None:
    harness = Harness()
    harness.engine.worker_ready(64, on_gpu=on_gpu)
    assert harness.engine._step_times.captured == ()


def test_steps_are_padded_to_what_each_worker_kept() -> None:
    harness = Harness(max_num_batched_tokens=512)
    model = harness.engine._step_times
    for kept, padded in ((CAPTURED, 384), ((16, 64, 128, 256, 512), 512), ((), 300)):
        harness.engine.worker_ready(64, on_gpu=True, captured_mixed_sizes=kept)
        assert model.captured == kept
        assert model.padded(300) == padded


def test_a_crowd_gets_the_whole_budget_until_none_of_it_waits() -> None:
    limits = budget()
    alone = StepLoad()
    alone.add_chunk(0, MAX_TOKENS)
    per_token_us = MODEL.predict_us(alone) / MAX_TOKENS
    whole = MAX_TOKENS - 16

    def length(backlog_us: float) -> int:
        limits.begin(decodes(), int(backlog_us / per_token_us))
        return limits.chunk(0, 1 << 20)

    before = length(90_000)
    assert before < whole
    assert length(510_000) == whole
    assert length(300_000) == whole
    # Its last prompts too, which would else take many short steps.
    assert length(1_000) == whole
    assert length(0) == before
    assert before < length(300_000) < whole


@pytest.mark.parametrize("pair_us", [0.0012, 0.0028])
def test_a_crowd_is_known_by_whole_steps_however_dear_attention_deep_in_a_context_is(pair_us: float) -> None:
    model, whole, whole_us = StepTimeModel(), StepLoad(), 144_000.0
    whole.add_chunk(0, MAX_TOKENS)
    for number in range(200):
        if number < 5:
            model.observe(whole, whole_us)
        deep = StepLoad()
        deep.add_chunk(6000, 600 + number % 50)
        model.observe(deep, 4000 + 12 * deep.num_tokens + pair_us * deep.attention_pairs)
    limits = TokenBudget(MAX_TOKENS, model)
    limits.target_us = 13_000
    limits.begin(decodes(), int(550_000 / whole_us * MAX_TOKENS))
    assert limits.throughput


def test_even_for_a_crowd_chunks_deep_in_a_long_prompt_do_not_hold_a_step_for_seconds() -> None:
    limits, load = budget(), decodes()
    limits.begin(load, 1 << 20)
    count = limits.chunk(100_000, 20_000)
    load.add_chunk(100_000, count)
    assert MODEL.predict_us(load) < 300_000


@pytest.mark.parametrize("share", [0.3, 0.5])
def test_long_prompt_leaves_a_share_of_a_step_to_those_behind_it(share: float) -> None:
    limits, load = budget(), decodes()
    limits.begin(load, 3900)
    assert limits.is_long(0, 100_000, 8)
    assert not limits.is_long(0, 2_000, 8)
    assert limits.is_long(0, 2_000, 2)
    assert not limits.is_long(0, 500, 2)
    alone_us = MODEL.predict_us(load)
    limits.reserve(share)
    load.add_chunk(0, limits.chunk(0, 2_000))
    others_us = MODEL.predict_us(load)
    limits.unreserve()
    load.add_chunk(0, limits.chunk(0, 100_000))
    assert 13_000 - others_us == pytest.approx(share * (13_000 - alone_us), rel=0.4)


def stretching(num_decodes: int = 16, num_steps: int = 250) -> tuple[TokenBudget, StepLoad]:
    """A step after so many that had decodes and nothing else."""
    limits, load = budget(), decodes(num_decodes)
    for _ in range(num_steps):
        limits.note_decodes(num_decodes)
    limits.begin(load, 1500)
    return limits, load


def test_now_and_then_a_prompt_of_several_steps_is_ended_in_one() -> None:
    limits, load = stretching()
    assert limits.chunk(0, 1500) == 1500
    load.add_chunk(0, 1500)
    assert 2 * 13_000 < MODEL.predict_us(load) <= 4 * 13_000
    assert limits.chunk(0, 1500) == 0, "a step is stretched once"
    limits.begin(decodes(), 1500)
    assert limits.chunk(0, 1500) < 700, "and the next one is not"


@pytest.mark.parametrize(
    ("num_steps", "num_decodes", "num_left"),
    [(150, 16, 1500), (250, 16, 900), (250, 16, 6000), (250, 0, 100_000)],
    ids=["too soon", "spares too little", "takes too long", "nobody waits"],
)
def test_otherwise_a_step_is_not_stretched(num_steps: int, num_decodes: int, num_left: int) -> None:
    limits, _ = stretching(num_decodes, num_steps)
    assert limits.chunk(0, num_left) < num_left


@hypothesis.given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 4000)), min_size=50, max_size=400))
def test_few_gaps_are_stretched_whoever_comes(steps: list[tuple[int, int]]) -> None:
    limits = budget()
    num_gaps = num_long = most = 0
    for num_decodes, num_left in steps * 3:
        load = decodes(num_decodes)
        limits.note_decodes(num_decodes)
        limits.begin(load, num_left)
        ordinary_us = max(13_000, with_least_chunk_us(load) + 0.25 * MODEL.predict_us(load))
        load.add_chunk(0, limits.chunk(0, num_left))
        num_gaps, most = num_gaps + num_decodes, max(most, num_decodes)
        if num_decodes and MODEL.predict_us(load) > 1.1 * ordinary_us:
            num_long += num_decodes
    assert num_long <= 0.005 * num_gaps + 3 * most


class TimedHarness(Harness):
    """A harness whose steps take what the prior of the model predicts.

    The target thus binds from the first step on.
    """

    def settle(self) -> None:
        result = self.worker.run()
        load = self.engine._in_flight[0].load
        result.started_at_ns = self.now_ns
        self.now_ns += int(1e3 * MODEL.predict_us(load))
        result.finished_at_ns = self.now_ns
        self.engine.settle(result)
        self.read()


def test_engine_keeps_steps_with_decodes_to_their_time() -> None:
    harness = TimedHarness(
        4096, model_len=40_000, max_num_batched_tokens=4096, step_time_target_ms=8.0, enable_prefix_cache=False
    )
    harness.add(request(30, max_tokens=60))
    harness.step()
    harness.step()
    late = harness.add(request(2000, max_tokens=2))
    longest_ms = 0.0
    while late.done is None:
        before_ns = harness.now_ns
        harness.step()
        longest_ms = max(longest_ms, (harness.now_ns - before_ns) / 1e6)
    assert 6.5 < longest_ms <= 8.0
    assert harness.worker.num_tokens > 2000


def test_engine_lets_short_prompts_pass_a_long_one() -> None:
    harness = TimedHarness(
        4096, model_len=40_000, max_num_batched_tokens=4096, step_time_target_ms=6.0, enable_prefix_cache=False
    )
    harness.add(request(30, max_tokens=400))
    harness.step()
    harness.step()
    long = harness.add(request(8_000, max_tokens=2))
    for _ in range(3):
        harness.step()
    short = harness.add(request(60, max_tokens=2))
    while short.done is None:
        harness.step()
    assert long.started is not None and not long.tokens
    harness.run()
    assert long.done is not None


asked = st.tuples(st.integers(1, 70), st.integers(1, 40), st.integers(1, 3), st.integers(-2, 2), st.integers(0, 8))


@hypothesis.settings(max_examples=examples(60), deadline=None)
@hypothesis.given(
    st.integers(8, 20),
    st.booleans(),
    st.lists(asked, min_size=3, max_size=10),
    st.sets(st.integers(1, 60), max_size=2),
)
def test_tokens_do_not_depend_on_chunks_of_few_tokens_with_long_prompts_set_back(
    num_blocks: int, prefix_cache: bool, requests: list[tuple[int, int, int, int, int]], deaths: set[int]
) -> None:
    """Chunks of three tokens and up run beside decodes, so that prompts of 24 count as long.

    There are few blocks, priorities, forks, and workers that die.
    """
    small = mock.patch.multiple(token_budget, _LEAST_CHUNK_TOKENS=3, _LEAST_PREFILL_SHARE=0.002)
    with small:
        harness = TimedHarness(
            num_blocks,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            enable_prefix_cache=prefix_cache,
            ageing_s=1e-3,
            step_time_target_ms=0.001,
        )
        arrivals = [
            (request(prompt, min(max_tokens, num_blocks * 16 + 1 - prompt), n=n, priority=priority, seed=seed), pause)
            for seed, (prompt, max_tokens, n, priority, pause) in enumerate(requests)
        ]
        readers = harness.serve(arrivals, deaths)
    for spec, reader in readers:
        assert [reader.tokens[index] for index in range(spec.asked.n)] == [
            expected_tokens(spec, i) for i in range(spec.asked.n)
        ]
    assert harness.engine.load().used_blocks == 0


def test_waiting_tokens_are_counted_up_to_a_limit_each() -> None:
    harness = Harness(max_num_seqs=1, num_blocks=400, model_len=6000)
    waiting = harness.engine._scheduler.waiting
    harness.add(request(10, max_tokens=40))
    harness.step()
    harness.add(request(100, max_tokens=2))
    harness.add(request(5000, max_tokens=2))
    assert waiting.num_counted_tokens == 100 + waiting_queue.MAX_COUNTED_TOKENS
    harness.run()
    assert waiting.num_counted_tokens == 0


@pytest.mark.parametrize(
    ("target_ms", "on_gpu", "target_us"),
    [(0.0, True, 13_800), (0.0, False, 1_000_000), (8.0, True, 8_000), (8.0, False, 8_000)],
)
def test_each_device_has_a_default_target(target_ms: float, on_gpu: bool, target_us: float) -> None:
    harness = Harness(step_time_target_ms=target_ms)
    harness.engine.worker_ready(64, on_gpu=on_gpu)
    assert harness.engine._budget.target_us == target_us


class Cpu:
    """A budget, its model, and a processor on which each token costs the same."""

    def __init__(self, token_us: float, limits: StepLimits = StepLimits(0.0, 10.0)) -> None:  # noqa: B008  # immutable
        self.token_us = token_us
        self.model = StepTimeModel()
        self.budget = TokenBudget(2048, self.model)
        self.budget.set_limits(limits, on_gpu=False)

    def duration_us(self, load: StepLoad) -> float:
        return 3_000 + self.token_us * (12 + load.num_tokens + load.attention_pairs / 4_000)

    def prompt(self, num_tokens: int, num_decodes: int = 0) -> list[tuple[int, float]]:
        """Computes a prompt: tokens of each chunk, and how long its step took."""
        steps, start = [], 0
        while start < num_tokens:
            load = StepLoad(num_decodes, 100 * num_decodes)
            self.budget.note_decodes(num_decodes)
            self.budget.begin(load, num_tokens - start)
            count = self.budget.chunk(start, num_tokens - start)
            load.add_chunk(start, count)
            duration_us = self.duration_us(load)
            self.model.observe(load, duration_us)
            self.budget.note_step(load, duration_us)
            steps.append((count, duration_us))
            start += count
        return steps


def test_on_a_cpu_the_first_chunk_is_short_and_the_next_ones_grow_to_the_whole_budget() -> None:
    cpu = Cpu(token_us=100)
    assert [count for count, _ in cpu.prompt(8000)] == [64, 128, 256, 512, 1024, 2048, 2048, 1920]


@hypothesis.given(st.floats(10, 60_000), st.integers(1, 6000), st.integers(0, 64))
def test_on_a_cpu_no_step_is_much_longer_than_the_limit_from_the_first_on(
    token_us: float, num_tokens: int, num_decodes: int
) -> None:
    cpu = Cpu(token_us)
    for number in range(3):
        for count, duration_us in cpu.prompt(num_tokens, num_decodes):
            # The model learns by what it got wrong: never by more than what was measured before,
            # twice.
            assert count <= 64 or duration_us < (2.6 if number == 0 else 1.6) * 1_000_000


def test_on_a_cpu_a_step_that_took_too_long_makes_the_next_ones_shorter() -> None:
    cpu = Cpu(token_us=100)
    cpu.prompt(8000)
    cpu.token_us = 10_000
    (first, _), *others = cpu.prompt(8000)
    assert first == 2048
    assert max(count for count, _ in others) < 100


def test_a_cpu_whose_steps_hold_one_chunk_takes_prompts_in_their_order() -> None:
    cpu = Cpu(token_us=15_000)
    cpu.prompt(500)
    cpu.budget.begin(StepLoad(), 4000)
    assert not cpu.budget.is_long(0, 4000, 8)


@pytest.mark.parametrize(
    ("target_ms", "watchdog_s", "most_ms"), [(0, 10, 1000), (0, 2, 500), (50, 10, 1000), (4000, 10, 4000)]
)
def test_no_step_of_a_cpu_is_planned_for_as_long_as_the_watchdog_waits(
    target_ms: float, watchdog_s: float, most_ms: float
) -> None:
    cpu = Cpu(1_000, StepLimits(target_ms, watchdog_s))
    for _ in range(20):
        steps = cpu.prompt(8000)
    assert 0.6 * most_ms < max(duration_us for _, duration_us in steps) / 1e3 < 1.2 * most_ms
