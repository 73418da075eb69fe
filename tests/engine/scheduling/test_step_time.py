"""The model of a step's duration finds what steps cost, whatever else happens to them.

It never predicts nonsense.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

import hypothesis
import pytest
from hypothesis import strategies as st
from tests.support.examples import examples

from headrace_backend.engine.scheduling.step_time import StepLoad, StepTimeModel

Device = Callable[[StepLoad], float]


def device(factor: float = 1.0) -> Device:
    """A device that costs what the model can express, in microseconds."""

    def duration_us(load: StepLoad) -> float:
        tokens = load.num_decodes + load.num_prefill_tokens
        products = 5000 + 2 * tokens + 18 * max(0, tokens - 256)
        return factor * (products + 0.04 * load.context_tokens + 0.0015 * load.attention_pairs)

    return duration_us


def loads(seed: int) -> Iterator[StepLoad]:
    """Loads that a server computes.

    They are mostly decodes, sometimes prompts beside them, rarely a chunk deep in a long prompt.
    """
    rng = random.Random(seed)

    def one() -> StepLoad:
        num_decodes = rng.randint(1, 200)
        load = StepLoad(num_decodes, num_decodes * rng.randint(100, 2000))
        if rng.random() < 0.4:
            load.add_chunk(rng.choice([0, 0, 0, rng.randint(0, 8000)]), rng.randint(1, 1000))
        return load

    return itertools.chain.from_iterable(iter(lambda: (one(),), ()))


def teach(model: StepTimeModel, run: Device, num_steps: int, seed: int = 1, noise: float = 0.02) -> None:
    rng = random.Random(seed)
    for load in itertools.islice(loads(seed), num_steps):
        model.observe(load, run(load) * rng.lognormvariate(0, noise))


def worst_error(model: StepTimeModel, run: Device, seed: int = 99) -> float:
    return max(abs(model.predict_us(load) / run(load) - 1) for load in itertools.islice(loads(seed), 200))


def chunk(start: int, count: int) -> StepLoad:
    load = StepLoad()
    load.add_chunk(start, count)
    return load


def test_without_data_the_prior_is_of_a_plausible_size() -> None:
    model = StepTimeModel()
    assert 3_000 < model.predict_us(StepLoad(1, 600)) < 6_000
    assert 30_000 < model.predict_us(chunk(0, 2048)) < 60_000


@pytest.mark.parametrize("factor", [0.02, 0.3, 1.0, 8.0, 300.0])
def test_any_device_is_known_after_three_hundred_steps(factor: float) -> None:
    model = StepTimeModel()
    teach(model, device(factor), 300)
    assert worst_error(model, device(factor)) < 0.08


def test_what_no_step_has_shown_is_guessed_by_the_speed_of_those_seen() -> None:
    model = StepTimeModel()
    slow = device(20)
    for index in range(50):
        load = StepLoad(8 + index % 8, 600 * (8 + index % 8))
        model.observe(load, slow(load))
    assert 0.3 < model.predict_us(chunk(0, 2048)) / slow(chunk(0, 2048)) < 3


def test_outliers_do_not_move_it() -> None:
    model, run = StepTimeModel(), device()
    teach(model, run, 300)
    rng = random.Random(5)
    for load in itertools.islice(loads(5), 300):
        model.observe(load, run(load) * (50 if rng.random() < 0.03 else 1))
    assert worst_error(model, run) < 0.08


def test_hour_of_decoding_does_not_make_it_forget_prompts() -> None:
    model, run = StepTimeModel(), device()
    teach(model, run, 500)
    for index in range(5_000):
        load = StepLoad(16, 16 * (500 + index % 300))
        model.observe(load, run(load))
    for start, count in [(0, 400), (0, 1000), (6000, 600)]:
        assert model.predict_us(chunk(start, count)) == pytest.approx(run(chunk(start, count)), rel=0.1)


def test_another_device_after_a_restart_is_learned_although_each_of_its_steps_looks_like_an_outlier() -> None:
    model = StepTimeModel()
    teach(model, device(), 1000)
    teach(model, device(6), 600, seed=2)
    assert worst_error(model, device(6)) < 0.08
    teach(model, device(), 600, seed=3)
    assert worst_error(model, device()) < 0.08


@hypothesis.settings(max_examples=examples(60), deadline=None)
@hypothesis.given(
    st.lists(
        st.tuples(
            st.integers(0, 512),
            st.integers(0, 10**6),
            st.integers(0, 130_000),
            st.integers(0, 8192),
            st.floats(-10, 1e9),
        ),
        max_size=40,
    )
)
def test_coefficients_are_never_negative_whatever_is_observed(steps: list[tuple[int, int, int, int, float]]) -> None:
    model = StepTimeModel()
    for num_decodes, context, start, count, duration_us in steps:
        load = StepLoad(num_decodes, context)
        if count:
            load.add_chunk(start, count)
        model.observe(load, duration_us)
    assert all(coefficient >= 0 for coefficient in model.coefficients_us)
    assert model.predict_us(StepLoad(1, 1)) > 0


@hypothesis.settings(max_examples=examples(200), deadline=None)
@hypothesis.given(
    st.integers(0, 400), st.integers(0, 600), st.integers(0, 120_000), st.integers(500, 400_000), st.booleans()
)
def test_fitting_tokens_are_the_most_that_fit(
    num_decodes: int, num_before: int, start: int, limit_us: int, taught: bool
) -> None:
    model = StepTimeModel()
    if taught:
        teach(model, device(), 40)
    load = StepLoad(num_decodes, 700 * num_decodes)
    if num_before:
        load.add_chunk(0, num_before)

    def predicted(count: int) -> float:
        longer = StepLoad(num_decodes, 700 * num_decodes, load.num_prefill_tokens, load.attention_pairs)
        longer.add_chunk(start, count)
        return model.predict_us(longer)

    count = model.fitting_tokens(load, start, limit_us)
    assert count == 0 or predicted(count) <= limit_us + 1e-3
    assert predicted(count + 1) > limit_us - 1e-3


def test_chunks_deep_in_a_long_prompt_are_shorter() -> None:
    model = StepTimeModel()
    teach(model, device(), 300)
    load = StepLoad(16, 16 * 600)
    lengths = [model.fitting_tokens(load, start, 15_000) for start in (0, 10_000, 50_000, 100_000)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 4 * lengths[-1] > 0


def test_steps_that_leave_the_graphs_are_known_to_cost_more_at_once() -> None:
    """Beyond 256 tokens this device launches kernel by kernel, which takes 6 ms more."""
    model, smooth = StepTimeModel(), device()

    def run(load: StepLoad) -> float:
        tokens = load.num_decodes + load.num_prefill_tokens
        return smooth(load) + (6000 if load.num_prefill_tokens and tokens > 256 else 0)

    teach(model, run, 600)
    load = StepLoad(16, 16 * 600)
    # Without the jump 450 tokens fit into 11 ms.
    assert 240 <= model.fitting_tokens(load, 0, 11_000) < 300
    assert 350 < model.fitting_tokens(load, 0, 16_000) < 450


def test_masks_that_steps_wait_for_are_learned_and_others_cost_nothing() -> None:
    """A device that waits 30 us for each mask, and one whose masks are always there in time."""
    for mask_us in (30.0, 0.0):
        model, rng = StepTimeModel(), random.Random(4)
        for _ in range(600):
            num_masked = rng.choice([0, 16, 64, 160])
            load = StepLoad(64, 32_000, num_masked_draws=num_masked)
            model.observe(load, 6000 + mask_us * num_masked)
        costs = model.draft_costs_us(StepLoad(64, 32_000, num_masked_draws=64))
        # The prior and the coefficients of rows and tokens take a tenth of it.
        assert costs.masked_us == pytest.approx(mask_us, abs=4.0)
