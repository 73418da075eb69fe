"""The sampling kernels.

They give the reference's tokens where arithmetic decides, the right distribution where noise
does, and do not look at the neighbours.

Without a card they run in Triton's interpreter, on small vocabularies in small blocks, so that
there are many of them; with one, at the sizes of models.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.any_two import any_two_meet

from headrace_kernels.sampling import parameters as columns
from headrace_kernels.sampling.choice import Truncation, kept_tokens_reference, sample_rows_reference
from headrace_kernels.sampling.choice_triton import sample_rows_triton
from headrace_kernels.sampling.philox import NoiseKeys, gumbel_noise_reference
from headrace_kernels.sampling.philox_triton import gumbel_noise

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL_BLOCK = 16
LOGIT = st.one_of(st.integers(-3, 3).map(float), st.floats(-20, 20, width=32), st.just(-math.inf))


def parameter_matrix(rows: list[dict[str, float]]) -> torch.Tensor:
    """One row per dictionary of column names, and the row for padding."""
    matrix = np.zeros((len(rows) + 1, columns.NUM_COLUMNS), np.int32)
    matrix.view(np.float32)[:-1, columns.TOP_P] = 1.0
    for row, values in enumerate(rows):
        for name, value in values.items():
            column = getattr(columns, name)
            is_float = name in ("TEMPERATURE", "TOP_P", "MIN_P", "TOP_N_SIGMA")
            matrix.view(np.float32 if is_float else np.int32)[row, column] = value
    return torch.from_numpy(matrix)


def sample(
    logits: torch.Tensor, matrix: torch.Tensor, rows: list[int], positions: list[int], block: int = SMALL_BLOCK
) -> tuple[list[int], list[bool]]:
    tokens, finite = sample_rows_triton(
        logits.to(DEVICE),
        torch.tensor(rows, dtype=torch.int32, device=DEVICE),
        torch.tensor(positions, dtype=torch.int32, device=DEVICE),
        matrix.to(DEVICE),
        block,
    )
    return tokens.tolist(), finite.tolist()


def is_right(token: int, logits: torch.Tensor, row: dict[str, float], position: int, share_slack: float = 1e-6) -> bool:
    """Whether a token is right for one row.

    It is within rounding of the best score among what the reference keeps, at either side of a
    border that a sum hits.
    """
    if row["TEMPERATURE"] == 0:
        return token == int((logits == logits.max()).nonzero()[0])
    scaled = (logits.float() / row["TEMPERATURE"])[None]
    vocab, device = logits.shape[0], logits.device
    seed = (int(row.get("SEED_HIGH", 0)) << 32) + (int(row.get("SEED_LOW", 0)) & 0xFFFFFFFF)
    key = (seed, int(row.get("OUTPUT_INDEX", 0)), position)
    keys = NoiseKeys(*(torch.tensor([value], device=device) for value in key))
    scores = (scaled + gumbel_noise_reference(keys, vocab))[0]
    top_k, min_p, top_p = int(row.get("TOP_K", 0)), row.get("MIN_P", 0.0), row.get("TOP_P", 1.0)
    top_n_sigma = row.get("TOP_N_SIGMA", 0.0)
    for slack, factor in itertools.product((0.0, -share_slack, share_slack), (1.0, 1 - 1e-6, 1 + 1e-6)):
        share = min(1.0, max(1e-30, top_p + slack)) if top_p < 1 else 1.0
        # The deviation is a sum too: in float32 there, in float64 here.
        parameters = (top_n_sigma * factor, top_k if top_k < vocab else 0, min_p * factor, share)
        truncation = Truncation(*(torch.tensor([value], device=device) for value in parameters))
        candidates, num_kept, _ = kept_tokens_reference(scaled, truncation, vocab)
        kept = candidates[0, : int(num_kept)]
        if token in kept[scores[kept] >= scores[kept].max() - 1e-5].tolist():
            return True
    return False


ROW = st.fixed_dictionaries(
    {
        "TEMPERATURE": st.sampled_from([0.0, 0.3, 1.0, 3.0]),
        "TOP_K": st.sampled_from([0, 0, 1, 2, 5, 17, 60, 1000]),
        "MIN_P": st.sampled_from([0.0, 0.0, 0.05, 0.4, 1.0]),
        "TOP_N_SIGMA": st.sampled_from([0.0, 0.0, 0.01, 0.7, 1.0, 2.3, 100.0]),
        "TOP_P": st.sampled_from([1.0, 1.0, 1e-6, 0.3, 0.7, 0.9, 0.999]),
        "SEED_LOW": st.integers(-(2**31), 2**31 - 1),
        "SEED_HIGH": st.integers(-(2**31), 2**31 - 1),
        "OUTPUT_INDEX": st.integers(0, 127),
    }
)


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, list[dict[str, float]]]:
    vocab = draw(st.sampled_from([2, 5, 31, 32, 33, 64, 77, 150]))
    rows = draw(st.lists(ROW, min_size=1, max_size=3))
    letters = draw(st.lists(LOGIT, min_size=8, max_size=8))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    # Some rows of few letters, full of ties; some of numbers that are all different.
    logits = torch.randn(len(rows), vocab, generator=generator) * draw(st.sampled_from([0.1, 1.0, 8.0]))
    for row in range(len(rows)):
        if draw(st.booleans()):
            chosen = torch.randint(0, 8, (vocab,), generator=generator)
            logits[row] = torch.tensor(letters)[chosen]
    logits[:, 0] = logits[:, 0].clamp(min=-20)
    return logits.to(draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))), rows


@settings(max_examples=12, deadline=None)
@given(batches(), st.integers(0, 2**31 - 1))
def test_a_row_gets_the_references_token(batch: tuple[torch.Tensor, list[dict[str, float]]], position: int) -> None:
    logits, rows = batch
    tokens, finite = sample(logits, parameter_matrix(rows), list(range(len(rows))), [position] * len(rows))
    assert all(finite)
    for index, row in enumerate(rows):
        assert is_right(tokens[index], logits[index], row, position)


@settings(max_examples=6, deadline=None)
@given(batches(), st.data())
def test_a_row_gets_the_same_token_in_any_batch(
    batch: tuple[torch.Tensor, list[dict[str, float]]], data: st.DataObject
) -> None:
    logits, rows = batch
    count = len(rows)
    matrix = parameter_matrix(rows)
    together, _ = sample(logits, matrix, list(range(count)), list(range(count)))
    order = data.draw(st.permutations([*range(count), count]))
    shuffled, _ = sample(logits[[min(i, count - 1) for i in order]], matrix, order, order)
    for place, row in enumerate(order):
        if row < count:
            assert shuffled[place] == together[row]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_lowest_id_among_equals_and_not_finite_rows_are_named(dtype: torch.dtype) -> None:
    nan, inf = math.nan, math.inf
    foul = [[1.0, nan, 2, 3], [-inf] * 4, [1, inf, 0, 0], [-nan] * 4]
    logits = torch.tensor([[1.0, 3, 3, 2], [-0.0, 0, 0, 0], [-inf, -inf, -5, -5], *foul], dtype=dtype)
    for settings_of_row in (
        {},
        {"TEMPERATURE": 1.0},
        {"TEMPERATURE": 1.0, "TOP_P": 0.5},
        {"TEMPERATURE": 0.7, "TOP_K": 2},
    ):
        count = logits.shape[0]
        tokens, finite = sample(logits, parameter_matrix([settings_of_row]), [0] * count, [0] * count)
        assert finite == [True] * 3 + [False] * 4
        assert tokens[3:] == [0] * 4
        assert tokens[2] in (2, 3)
        if not settings_of_row:
            assert tokens[:3] == [1, 0, 2]


def test_padding_is_greedy_and_a_top_k_of_one_too() -> None:
    logits = torch.randint(0, 3, (4, 50), generator=torch.Generator().manual_seed(0)).float()
    greedy = logits.max(dim=1).indices.tolist()
    matrix = parameter_matrix([{"TEMPERATURE": 5.0, "TOP_K": 1}])
    assert sample(logits, matrix, [0, 1, 0, 1], [3, 4, 5, 6])[0] == greedy


def test_a_temperature_that_overflows_ends() -> None:
    logits = torch.tensor([[-5.0, -6.0, -7.0], [5.0, 6.0, 7.0]])
    matrix = parameter_matrix([{"TEMPERATURE": 1e-38, "TOP_P": 0.5}])
    tokens, finite = sample(logits, matrix, [0, 0], [0, 0])
    assert finite == [True, True]
    assert all(0 <= token < 3 for token in tokens)


@pytest.mark.one_in(2)
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
def test_draws_have_the_distribution_of_the_kept_tokens(
    top_k: int, min_p: float, top_p: float, top_n_sigma: float
) -> None:
    """Chi-square over fixed seeds, at a level of one in a million."""
    count = 6_000 if DEVICE.type == "cuda" else 24
    logits = np.array([2.0, 1.5, -1.0, 0.3, 0.3, 1.0, -0.5, 2.2])
    scaled = logits / 0.8
    ids = np.lexsort((np.arange(8), -scaled))
    num_near = int((logits >= logits.max() - top_n_sigma * logits.std()).sum()) if top_n_sigma else 8
    probabilities = np.exp(scaled[ids])[:num_near][: top_k or None]
    probabilities = probabilities[probabilities >= min_p * probabilities[0]]
    probabilities /= probabilities.sum()
    if top_p < 1:
        probabilities = probabilities[: 1 + int((np.cumsum(probabilities) < top_p).sum())]
        probabilities /= probabilities.sum()
    row = {"TEMPERATURE": 0.8, "TOP_K": top_k, "MIN_P": min_p, "TOP_P": top_p, "TOP_N_SIGMA": top_n_sigma}
    matrix = parameter_matrix([{**row, "SEED_LOW": 9}])
    rows = torch.tensor(logits, dtype=torch.float32).expand(count, -1).contiguous()
    tokens, _ = sample(rows, matrix, [0] * count, list(range(count)))
    observed = np.bincount(tokens, minlength=8)[ids]
    assert observed[probabilities.size :].sum() == 0
    expected = probabilities * count
    statistic = ((observed[: probabilities.size] - expected) ** 2 / expected).sum()
    # Wilson and Hilferty's bound on the chi-square quantile at 4.75 standard deviations.
    freedom = max(1, probabilities.size - 1)
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 4.76 * math.sqrt(2 / (9 * freedom))) ** 3


@triton.jit
def write_noise_kernel(out, seed_low, seed_high, output_index, position, first_token, BLOCK: tl.constexpr):
    noise = gumbel_noise(
        first_token, tl.load(seed_low), tl.load(seed_high), tl.load(output_index), tl.load(position), BLOCK
    )
    tl.store(out + tl.arange(0, BLOCK), noise)


@pytest.mark.parametrize(
    ("seed", "output_index", "position", "first_token"),
    [(0, 0, 0, 0), (-1, 127, 2**31 - 1, 4096), (2**63 - 5, 3, 77, 128)],
)
def test_the_noise_is_the_references(seed: int, output_index: int, position: int, first_token: int) -> None:
    block = 4096
    parts = np.array([seed], np.int64).view(np.int32).tolist()
    out = torch.full((block,), math.nan, device=DEVICE)
    scalars = (torch.tensor([value], dtype=torch.int32, device=DEVICE) for value in (*parts, output_index, position))
    write_noise_kernel[(1,)](out, *scalars, first_token, BLOCK=block)
    keys = NoiseKeys(torch.tensor([seed]), torch.tensor([output_index]), torch.tensor([position]))
    expected = gumbel_noise_reference(keys, first_token + block)[0, first_token:]
    # A few last places of the two logarithms; those of a card's are larger.
    atol = 2e-6 if DEVICE.type == "cuda" else 5e-7
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-6, atol=atol)


@pytest.mark.parametrize("vocab", [9_000])
def test_blocks_of_the_real_size(vocab: int) -> None:
    rows = [
        {"TEMPERATURE": 0.0},
        {"TEMPERATURE": 1.0, "SEED_LOW": 4},
        {"TEMPERATURE": 1.0, "TOP_P": 0.5, "SEED_LOW": 5},
        {"TEMPERATURE": 0.8, "TOP_P": 0.9, "TOP_K": 40, "SEED_LOW": 6},
        {"TEMPERATURE": 2.0, "TOP_K": 700, "SEED_LOW": 7},
        {"TEMPERATURE": 1.0, "MIN_P": 0.1, "TOP_P": 0.8, "SEED_LOW": 8},
        {"TEMPERATURE": 1.5, "TOP_N_SIGMA": 1.0, "SEED_LOW": 9},
    ]
    logits = (torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(2)) * 2).to(torch.bfloat16)
    tokens, _ = sample(logits, parameter_matrix(rows), list(range(len(rows))), [1] * len(rows), block=2048)
    for index, row in enumerate(rows):
        assert is_right(tokens[index], logits[index], row, 1)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("count", "vocab", "dtype", "spread"),
    any_two_meet((1, 7, 256), (4096, 128_256), (torch.bfloat16, torch.float32), (0.5, 6.0)),
)
def test_tokens_at_the_sizes_of_models(count: int, vocab: int, dtype: torch.dtype, spread: float) -> None:
    kinds: list[dict[str, float]] = [
        {"TEMPERATURE": 0.0},
        {"TEMPERATURE": 1.0},
        {"TEMPERATURE": 0.7, "TOP_P": 0.9},
        {"TEMPERATURE": 0.7, "TOP_P": 0.8, "TOP_K": 20},
        {"TEMPERATURE": 1.0, "TOP_K": 2000, "TOP_P": 0.99},
        {"TEMPERATURE": 1.0, "MIN_P": 0.05, "TOP_P": 0.95},
        {"TEMPERATURE": 1.0, "TOP_P": 0.3},
        {"TEMPERATURE": 2.0, "TOP_N_SIGMA": 1.0},
        {"TEMPERATURE": 1.0, "TOP_N_SIGMA": 2.5, "TOP_K": 500, "TOP_P": 0.9},
    ]
    rows = [
        {**kinds[(index + count) % len(kinds)], "SEED_LOW": index, "OUTPUT_INDEX": index % 3} for index in range(count)
    ]
    generator = torch.Generator(DEVICE).manual_seed(count)
    logits = (torch.randn(count, vocab, device=DEVICE, generator=generator) * spread).to(dtype)
    tokens, finite = sample(logits, parameter_matrix(rows), list(range(count)), list(range(count)), block=2048)
    assert all(finite)
    # exp2 and sums in fp32 over the whole vocabulary: a few millionths of the share.
    for index in range(0, count, max(1, count // 24)):
        assert is_right(tokens[index], logits[index], rows[index], index, share_slack=3e-6)
    again, _ = sample(logits[-1:], parameter_matrix(rows), [count - 1], [count - 1], block=2048)
    assert again == tokens[-1:]


@pytest.mark.gpu
def test_a_captured_draw_follows_parameters_and_logits() -> None:
    """Nothing is compiled and nothing waits.

    The same graph draws what the references draw from new contents.
    """
    count, vocab = 8, 4096
    logits = torch.randn(count, vocab, device=DEVICE, dtype=torch.bfloat16)
    matrix = torch.zeros(count + 1, columns.NUM_COLUMNS, dtype=torch.int32, device=DEVICE)
    rows = torch.arange(count, dtype=torch.int32, device=DEVICE)
    sample_rows_triton(logits, rows, rows, matrix)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, _ = sample_rows_triton(logits, rows, rows, matrix)
    for seed in range(3):
        new = parameter_matrix([{"TEMPERATURE": 0.9, "TOP_K": 5, "SEED_LOW": seed + row} for row in range(count)])
        matrix.copy_(new)
        logits.normal_()
        graph.replay()
        expected, _ = sample_rows_reference(logits.cpu(), rows.cpu(), rows.cpu(), new)
        assert (tokens.cpu() == expected).sum() >= count - 1
