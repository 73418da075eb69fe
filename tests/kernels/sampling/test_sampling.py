"""The draw: right distribution, exactly what truncation may keep, and no look at the neighbours."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.examples import examples

from headrace_kernels.sampling.choice import (
    Truncation,
    _choose_greedy_by_blocks,
    choose_greedy,
    choose_greedy_reference,
    draw,
    draw_truncated,
    kept_tokens_reference,
    top_n_sigma_threshold_reference,
)
from headrace_kernels.sampling.ordering import top_tokens_reference
from headrace_kernels.sampling.philox import NoiseKeys

# Few different values, so that equal logits are common.
LOGIT = st.one_of(st.integers(-3, 3).map(float), st.floats(-20, 20, width=32), st.just(-math.inf))


def some_keys(count: int, first_position: int = 0, seed: int = 11) -> NoiseKeys:
    positions = torch.arange(first_position, first_position + count)
    return NoiseKeys(torch.full((count,), seed), torch.zeros(count, dtype=torch.int64), positions)


def truncation(
    top_k: int = 0, min_p: float = 0.0, top_p: float = 1.0, count: int = 1, top_n_sigma: float = 0.0
) -> Truncation:
    columns = torch.tensor([top_n_sigma]), torch.tensor([top_k]), torch.tensor([min_p]), torch.tensor([top_p])
    return Truncation(*(column.expand(count) for column in columns))


def order(logits: np.ndarray) -> np.ndarray:
    """Most likely first, the lower id among equals."""
    return np.lexsort((np.arange(logits.size), -logits))


@st.composite
def rows_of_logits(draw_from: st.DrawFn) -> list[float]:
    row = draw_from(st.lists(LOGIT, min_size=2, max_size=40))
    return row if any(math.isfinite(value) for value in row) else [0.0, *row[1:]]


@settings(max_examples=examples(200), deadline=None)
@given(rows_of_logits(), st.data())
def test_the_order_of_tokens_is_exact_among_equals(row: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(row)))
    ids = top_tokens_reference(torch.tensor([row, row[::-1]]), count)
    for got, logits in zip(ids.tolist(), (row, row[::-1]), strict=True):
        assert got == order(np.array(logits))[:count].tolist()


@settings(max_examples=examples(300), deadline=None)
@given(
    rows_of_logits(),
    st.integers(0, 45),
    st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    st.one_of(st.just(1.0), st.floats(1 / 64, 255 / 256, width=32)),
    st.sampled_from([0.0, 0.0, 0.01, 0.5, 1.0, 1.7, 100.0]),
    st.sampled_from([3, 8, 1000]),
)
def test_truncation_keeps_the_smallest_set(
    row: list[float], top_k: int, min_p: float, top_p: float, top_n_sigma: float, first: int
) -> None:
    """Against sums in fp64.

    Where a sum comes within rounding of the border, either side of it is right, and so is each of
    several tokens there.
    """
    logits = np.array(row)
    ids = order(logits)
    probabilities = np.exp(logits[ids] - logits.max())
    sizes = set()
    for slack in (-1e-6, 0, 1e-6):
        survivors = probabilities[: top_k or None]
        if top_n_sigma:
            lowest = logits.max() - top_n_sigma * logits[np.isfinite(logits)].std() + slack
            survivors = survivors[: int((logits >= lowest).sum())]
        survivors = survivors[(survivors >= min_p + slack) & (survivors > 0)] if min_p else survivors
        # The most likely token is always kept.
        survivors = survivors if survivors.size else probabilities[:1]
        cumulative = np.cumsum(survivors) / survivors.sum()
        reaching = {1 + int((cumulative < top_p + slack).sum()) for slack in (-1e-5, 0, 1e-5)}
        sizes |= {min(size, survivors.size) for size in reaching} if top_p < 1 else {survivors.size}

    k = top_k if top_k < len(row) else 0
    num_candidates = min(len(row), max(first, k))
    candidates, num_kept, complete = kept_tokens_reference(
        torch.tensor([row]), truncation(k, min_p, top_p, top_n_sigma=top_n_sigma), num_candidates
    )
    if len(row) == num_candidates:
        assert complete.all()
    if complete.all():
        assert min(sizes) <= int(num_kept) <= max(sizes)
        assert candidates[0, : int(num_kept)].tolist() == ids[: int(num_kept)].tolist()


@pytest.mark.parametrize(
    ("top_k", "min_p", "top_p", "top_n_sigma"),
    [
        (0, 0.0, 1.0, 0.0),
        (3, 0.0, 1.0, 0.0),
        (0, 0.2, 1.0, 0.0),
        (0, 0.0, 0.7, 0.0),
        (6, 0.05, 0.9, 0.0),
        (0, 0.0, 1.0, 1.0),
        (6, 0.0, 0.9, 1.8),
    ],
)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_have_the_distribution_of_the_kept_tokens(
    top_k: int, min_p: float, top_p: float, top_n_sigma: float, temperature: float
) -> None:
    """Chi-square over 6,000 draws with fixed seeds, at a level of one in a million."""
    count = 6_000
    logits = np.array([2.0, 1.5, -1.0, 0.3, 0.3, 1.0, -0.5, 2.2])
    scaled = logits / temperature
    ids = order(scaled)
    probabilities = np.exp(scaled[ids])
    if top_n_sigma:
        # Whatever the temperature.
        probabilities = probabilities[: int((logits >= logits.max() - top_n_sigma * logits.std()).sum())]
    probabilities = probabilities[: top_k or None]
    probabilities = probabilities[probabilities >= min_p * probabilities[0]]
    probabilities /= probabilities.sum()
    if top_p < 1:
        probabilities = probabilities[: 1 + int((np.cumsum(probabilities) < top_p).sum())]
        probabilities /= probabilities.sum()

    rows, temperatures = torch.tensor(logits, dtype=torch.float32).expand(count, -1), torch.full((count,), temperature)
    if (top_k, min_p, top_p, top_n_sigma) == (0, 0.0, 1.0, 0.0):
        tokens = draw(rows, temperatures, some_keys(count))
    else:
        kept = truncation(top_k, min_p, top_p, count, top_n_sigma)
        tokens = draw_truncated(rows, temperatures, kept, some_keys(count))
    observed = np.bincount(tokens.numpy(), minlength=8)[ids]
    assert observed[probabilities.size :].sum() == 0
    expected = probabilities * count
    statistic = ((observed[: probabilities.size] - expected) ** 2 / expected).sum()
    # Wilson and Hilferty's bound on the chi-square quantile at 4.75 standard deviations.
    freedom = max(1, probabilities.size - 1)
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 4.76 * math.sqrt(2 / (9 * freedom))) ** 3


def test_banned_tokens_are_no_part_of_the_deviation() -> None:
    row = [3.0, 2.0, -1.0, -math.inf, -math.inf, 0.5]
    got = top_n_sigma_threshold_reference(torch.tensor([row, row]), torch.tensor([1.5, 0.0]))
    assert got.tolist() == [pytest.approx(3.0 - 1.5 * np.std([3.0, 2.0, -1.0, 0.5])), -math.inf]


@settings(max_examples=examples(50), deadline=None)
@given(rows_of_logits(), st.integers(0, 4), st.sampled_from([0.0, 0.1]))
def test_a_hundred_standard_deviations_leave_out_banned_tokens_alone(
    row: list[float], top_k: int, min_p: float
) -> None:
    logits = torch.tensor([row])
    k = top_k if top_k < len(row) else 0
    off, widest = (kept_tokens_reference(logits, truncation(k, min_p, top_n_sigma=n), len(row)) for n in (0.0, 100.0))
    assert torch.equal(off[0], widest[0])
    assert int(widest[1]) == min(int(off[1]), int(logits.isfinite().sum()))


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(2, 3000), st.integers(2, 12), st.integers(0, 2**31), st.data())
def test_a_rows_draw_does_not_depend_on_its_batch(vocab: int, count: int, seed: int, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(seed)
    # From peaked to flat: some rows need every token as a candidate.
    logits = torch.randn(count, vocab, generator=generator) * torch.logspace(-2, 1, count)[:, None]
    top_k = torch.tensor(data.draw(st.lists(st.sampled_from([0, 1, 5, 400]), min_size=count, max_size=count)))
    top_k[top_k >= vocab] = 0
    parameters = Truncation(
        torch.tensor(data.draw(st.lists(st.sampled_from([0.0, 1.0, 2.5]), min_size=count, max_size=count))),
        top_k,
        torch.tensor(data.draw(st.lists(st.sampled_from([0.0, 0.01, 0.5]), min_size=count, max_size=count))),
        torch.tensor(data.draw(st.lists(st.sampled_from([0.3, 0.95, 1.0]), min_size=count, max_size=count))),
    )
    temperature = torch.full((count,), 0.9)
    keys = some_keys(count, seed=seed)
    truncated, plain = draw_truncated(logits, temperature, parameters, keys), draw(logits, temperature, keys)
    for row in range(count):
        one = torch.tensor([row])
        alone = draw_truncated(logits[one], temperature[one], parameters.select(one), keys.select(one))
        assert alone.item() == truncated[row]
        assert draw(logits[one], temperature[one], keys.select(one)).item() == plain[row]


def test_a_flat_row_keeps_its_share_of_a_large_vocabulary() -> None:
    vocab = 20_000
    count = 32
    tokens = draw_truncated(
        torch.zeros(count, vocab), torch.ones(count), truncation(top_p=0.5, count=count), some_keys(count)
    )
    # Equal logits: the lower half of the ids, all of it.
    assert int(tokens.max()) < vocab * 0.5001
    assert int(tokens.max()) > vocab * 0.4


def test_top_k_of_one_is_greedy() -> None:
    logits = torch.randint(0, 3, (200, 50), generator=torch.Generator().manual_seed(0)).float()
    tokens = draw_truncated(logits, torch.full((200,), 5.0), truncation(top_k=1, count=200), some_keys(200))
    assert torch.equal(tokens, choose_greedy(logits)[0])


def test_greedy_takes_the_lowest_id_among_equals_and_names_not_finite_rows() -> None:
    nan, inf = math.nan, math.inf
    tokens, finite = choose_greedy(
        torch.tensor([[1.0, 3, 3, 2], [0, 0, 0, 0], [-inf, -inf, -5, -5], [1, nan, 2, 3], [-inf] * 4, [1, inf, 0, 0]])
    )
    assert tokens[:3].tolist() == [1, 0, 2]
    assert finite.tolist() == [True, True, True, False, False, False]


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(1, 6), st.sampled_from([128, 640, 8192]), st.integers(0, 2**31), st.booleans())
def test_greedy_by_blocks_is_greedy(count: int, vocab: int, seed: int, with_not_finite_rows: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Few different values: the highest comes often, in several blocks.
    logits = torch.randint(0, 8, (count, vocab), generator=generator).float()
    if with_not_finite_rows:
        logits[0, vocab // 2] = (math.nan, math.inf)[seed % 2]
        logits[-1] = -math.inf
    tokens, finite = _choose_greedy_by_blocks(logits)
    expected_tokens, expected_finite = choose_greedy_reference(logits)
    assert finite.tolist() == expected_finite.tolist()
    assert tokens.tolist() == expected_tokens.tolist()


@pytest.mark.parametrize("parameters", [truncation(top_p=0.9, count=3), truncation(top_k=4, count=3)])
def test_an_not_finite_row_leaves_the_others_alone(parameters: Truncation) -> None:
    logits = torch.randn(3, 600, generator=torch.Generator().manual_seed(0))
    temperature = torch.ones(3)
    expected = draw_truncated(logits, temperature, parameters, some_keys(3))
    for foul in (math.nan, -math.inf):
        spoiled = logits.clone()
        spoiled[1] = foul
        drawn = draw_truncated(spoiled, temperature, parameters, some_keys(3))
        assert drawn[[0, 2]].tolist() == expected[[0, 2]].tolist()
        assert 0 <= drawn[1] < 600
