"""The kernels of penalties and log probabilities against their references.

Without a GPU they run in Triton's interpreter.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.any_two import any_two_meet

from headrace_kernels.sampling import parameters as columns
from headrace_kernels.sampling.logprobs import TokenLogprobs, token_logprobs_reference
from headrace_kernels.sampling.logprobs_triton import token_logprobs_triton
from headrace_kernels.sampling.penalties import penalize_rows_reference
from headrace_kernels.sampling.penalties_triton import penalize_rows_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def check_penalties(
    num_samples: int, num_slots: int, vocab: int, seed: int, spare_rows: int = 1, num_drafts: int | None = None
) -> None:
    """Some rows of a batch are penalized as the reference does it; the others are not touched."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_samples, vocab, generator=generator) * 5
    logits[:, ::5] = -math.inf
    num_penalized = min(num_slots, max(1, num_samples - spare_rows))
    samples = torch.randperm(num_samples, generator=generator)[:num_penalized]
    slots = torch.randperm(num_slots, generator=generator)[:num_penalized]
    rows = torch.randint(0, 9, (num_penalized,), generator=generator)
    masks = torch.rand(num_slots, vocab, generator=generator) < 0.3
    counts = torch.randint(-3, 4, (num_slots, vocab), generator=generator).clamp_(min=0).to(torch.int32)
    matrix = np.zeros((10, columns.NUM_COLUMNS), np.float32)
    matrix[:, columns.REPETITION : columns.FREQUENCY + 1] = np.random.default_rng(seed).uniform(0.5, 2, (10, 3))
    parameters = torch.from_numpy(matrix).view(torch.int32)
    expected, result = logits.clone(), logits.to(DEVICE)
    inputs: tuple[torch.Tensor, ...] = (samples, slots, rows, masks, counts, parameters)
    if num_drafts is not None:
        inputs += (torch.randint(-1, vocab, (num_penalized, num_drafts), generator=generator),)
    penalize_rows_reference(expected, *inputs)
    penalize_rows_triton(result, *(tensor.to(DEVICE) for tensor in inputs))
    # Division and fused multiplication round differently.
    torch.testing.assert_close(result.cpu(), expected, rtol=2e-6, atol=2e-6)
    untouched = sorted(set(range(num_samples)) - set(samples.tolist()))
    assert torch.equal(result.cpu()[untouched], logits[untouched])


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 5),
    st.sampled_from([1, 30, 1024, 1025]),
    st.integers(0, 2**31),
    st.sampled_from([None, 1, 3]),
)
def test_penalties_are_the_references(
    num_samples: int, num_slots: int, vocab: int, seed: int, num_drafts: int | None
) -> None:
    """With the tokens that were drafted before a draw, and without."""
    check_penalties(num_samples, num_slots, vocab, seed, num_drafts=num_drafts)


def test_each_draft_counts_as_a_token_of_the_output() -> None:
    """A token that is drafted twice counts twice."""
    counts = torch.tensor([[0, 0, 0], [0, 2, 1]], dtype=torch.int32)
    logits = torch.tensor([[1.0, -1.0, 2.0]]).repeat(2, 1)
    matrix = torch.zeros(1, columns.NUM_COLUMNS)
    matrix[0, columns.REPETITION : columns.FREQUENCY + 1] = torch.tensor([2.0, 0.5, 0.25])
    masks, both = torch.zeros(2, 3, dtype=torch.bool), torch.arange(2)
    arguments = (both, both, torch.zeros(2, dtype=torch.int64), masks)
    drafts = torch.tensor([[1, 2, 1], [-1, -1, -1]])
    penalize_rows_reference(logits, *arguments, counts * torch.tensor([[0], [1]]), matrix.view(torch.int32), drafts)
    assert torch.equal(logits[0], logits[1])
    assert counts.tolist() == [[0, 0, 0], [0, 2, 1]]


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [4096, 128_256])
def test_penalties_of_a_whole_batch(vocab: int) -> None:
    check_penalties(256, 300, vocab, 1, spare_rows=3)


def check_logprobs(logits: torch.Tensor, num_top: int, seed: int, atol: float) -> None:
    tokens = torch.randint(0, logits.shape[1], (logits.shape[0],), generator=torch.Generator().manual_seed(seed))
    logits, tokens = logits.to(DEVICE), tokens.to(DEVICE)
    # A banned token is never drawn.
    tokens = torch.where(logits.gather(1, tokens[:, None])[:, 0].isfinite(), tokens, logits.float().argmax(dim=1))
    expected = token_logprobs_reference(logits, tokens, num_top)
    result = TokenLogprobs(*token_logprobs_triton(logits, tokens, num_top))
    assert torch.equal(result.ranks, expected.ranks)
    assert torch.equal(result.top_ids, expected.top_ids)
    # The reference's own sum, in fp32 and one token after the other, is off by more than ours.
    exact = logits.double().log_softmax(dim=1)
    torch.testing.assert_close(result.sampled.double(), exact.gather(1, tokens[:, None])[:, 0], rtol=0, atol=atol)
    torch.testing.assert_close(result.top.double(), exact.gather(1, expected.top_ids), rtol=0, atol=atol)


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from([1, 2, 40, 2048, 2049, 5000]),
    st.integers(1, 3),
    st.integers(0, 25),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.integers(0, 2**31),
)
def test_logprobs_are_the_references(vocab: int, count: int, num_top: int, dtype: torch.dtype, seed: int) -> None:
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed)) * 4
    # Ties, and zeros of both signs.
    logits[0] = logits[0].round()
    logits[:, 3::7] = -math.inf
    # Half a step of fp32 numbers up to 64, and what the sum and its logarithm are off by.
    check_logprobs(logits.to(dtype), min(num_top, vocab), seed, atol=3e-6)


def test_all_tokens_of_a_small_vocabulary_are_reported_banned_ones_last() -> None:
    logits = torch.tensor([[1.0, -math.inf, 2.0, 2.0, -math.inf, 0.0, -0.0]])
    check_logprobs(logits, 7, 0, atol=2e-6)


def test_ids_of_an_not_finite_row_are_ids() -> None:
    logits = torch.tensor([[1.0, math.nan, 2.0, math.inf], [-math.inf] * 4, [math.nan] * 4], device=DEVICE)
    _, ranks, top_ids, _ = token_logprobs_triton(logits, torch.zeros(3, dtype=torch.int64, device=DEVICE), 4)
    assert sorted(top_ids[0].tolist()) == sorted(top_ids[1].tolist()) == sorted(top_ids[2].tolist()) == [0, 1, 2, 3]
    assert int(ranks.min()) >= 1


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_top", "count", "dtype"), any_two_meet((0, 1, 20, 100), (1, 256), (torch.float32, torch.bfloat16))
)
def test_logprobs_at_the_sizes_of_models(count: int, num_top: int, dtype: torch.dtype) -> None:
    for vocab in (4096, 128_256):
        generator = torch.Generator(DEVICE).manual_seed(num_top)
        logits = torch.randn(count, vocab, generator=generator, device=DEVICE) * 3
        # Sums over the whole vocabulary, and approximate exponentials.
        check_logprobs(logits.to(dtype), num_top, 5, atol=5e-5)
