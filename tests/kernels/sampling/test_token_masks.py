"""Masks against a loop over tokens, and the kernel against its reference.

Without a GPU the kernel runs in Triton's interpreter.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_kernels.sampling.token_masks import mask_rows_reference, num_words
from headrace_kernels.sampling.token_masks_triton import mask_rows_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def case(num_samples: int, num_masked: int, vocab: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_samples, vocab, generator=generator)
    logits[:, ::7] = -torch.inf
    samples = torch.randperm(num_samples, generator=generator)[:num_masked].int()
    words = np.random.default_rng(seed).integers(0, 1 << 32, (len(samples), num_words(vocab)), np.uint32)
    return logits, samples, torch.from_numpy(words.view(np.int32))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 4), st.integers(0, 4), st.sampled_from([1, 31, 32, 33, 100]), st.integers(0, 2**31))
def test_only_tokens_without_a_bit_are_banned(num_samples: int, num_masked: int, vocab: int, seed: int) -> None:
    logits, samples, masks = case(num_samples, num_masked, vocab, seed)
    expected = logits.clone()
    for entry, sample in enumerate(samples.tolist()):
        for token in range(vocab):
            if not int(masks[entry, token // 32]) >> token % 32 & 1:
                expected[sample, token] = -torch.inf
    mask_rows_reference(logits, samples, masks)
    assert torch.equal(logits, expected)


def check_kernel(num_samples: int, num_masked: int, vocab: int, seed: int) -> None:
    logits, samples, masks = case(num_samples, num_masked, vocab, seed)
    result = logits.to(DEVICE)
    mask_rows_reference(logits, samples, masks)
    mask_rows_triton(result, samples.to(DEVICE), masks.to(DEVICE))
    assert torch.equal(result.cpu(), logits)


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.sampled_from([1, 33, 1024, 1025]), st.integers(0, 2**31))
def test_the_kernel_masks_as_the_reference(num_samples: int, num_masked: int, vocab: int, seed: int) -> None:
    check_kernel(num_samples, num_masked, vocab, seed)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [4096, 128_256, 151_665])
def test_the_kernel_masks_a_whole_batch(vocab: int) -> None:
    check_kernel(256, 250, vocab, 1)
