"""Noise as a function of (seed, output, position, token)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.examples import examples

from headrace_kernels.sampling.philox import (
    NoiseKeys,
    gumbel_noise_at_reference,
    gumbel_noise_reference,
    philox_4x32_reference,
)

INT64 = st.integers(-(2**63), 2**63 - 1)


def keys_of(*keys: tuple[int, int, int]) -> NoiseKeys:
    return NoiseKeys(*(torch.tensor(column) for column in zip(*keys, strict=True)))


# The authors' known answers for philox4x32-10.
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_the_rounds_give_the_published_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    words = philox_4x32_reference(
        tuple(torch.tensor([word]) for word in counter),  # type: ignore[arg-type]
        tuple(torch.tensor([word]) for word in key),  # type: ignore[arg-type]
    )
    assert [int(word) for word in words] == expected


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.tuples(INT64, st.integers(0, 127), st.integers(0, 2**31 - 1)), min_size=1, max_size=9),
    st.integers(1, 700),
    st.data(),
)
def test_a_tokens_noise_does_not_depend_on_the_batch(
    keys: list[tuple[int, int, int]], vocab: int, data: st.DataObject
) -> None:
    noise = gumbel_noise_reference(keys_of(*keys), vocab)
    assert noise.shape == (len(keys), vocab)
    assert noise.isfinite().all()
    row = data.draw(st.integers(0, len(keys) - 1))
    ids = data.draw(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=20))
    alone = gumbel_noise_at_reference(keys_of(keys[row]), torch.tensor([ids]))[0]
    assert torch.equal(alone, noise[row, ids])
    larger = gumbel_noise_reference(keys_of(*keys), vocab + 300)
    assert torch.equal(larger[:, :vocab], noise)


def test_any_change_of_the_key_changes_the_noise() -> None:
    base = (5, 0, 0)
    others = [(6, 0, 0), (5 + 2**32, 0, 0), (5 - 2**63, 0, 0), (5, 1, 0), (5, 0, 1), (0, 5, 0)]
    noise = gumbel_noise_reference(keys_of(base, *others), 256)
    for row in range(1, len(others) + 1):
        assert (noise[0] == noise[row]).float().mean() < 0.01


def test_large_batches_are_computed_in_chunks_without_a_seam() -> None:
    keys = keys_of(*((seed, 0, 3) for seed in range(5)))
    vocab = 150_001
    noise = gumbel_noise_reference(keys, vocab)
    ids = torch.arange(0, vocab, 997).expand(5, -1)
    assert torch.equal(noise.gather(1, ids), gumbel_noise_at_reference(keys, ids))
    # Chunks that repeated each other would share far more than the few values that floats of this
    # number share by chance.
    assert noise.unique().numel() > 0.95 * noise.numel()


def test_the_noise_has_the_gumbel_distribution() -> None:
    """Kolmogorov-Smirnov at a level of one in a million, over tokens, positions and seeds."""
    keys = keys_of(*((seed, 0, position) for seed in range(10) for position in range(10)))
    sample = np.sort(gumbel_noise_reference(keys, 2000).numpy().ravel().astype(np.float64))
    distribution = np.exp(-np.exp(-sample))
    ranks = np.arange(1, sample.size + 1) / sample.size
    distance = max(np.max(ranks - distribution), np.max(distribution - ranks + 1 / sample.size))
    assert distance < math.sqrt(-math.log(1e-6 / 2) / 2 / sample.size)


def test_neighbouring_draws_are_uncorrelated() -> None:
    noise = gumbel_noise_reference(keys_of(*((1, 0, position) for position in range(200))), 1000).numpy()
    for shifted in (noise[1:, :] * 1.0, np.roll(noise, 1, axis=1)[1:]):
        correlation = np.corrcoef(noise[:-1].ravel(), shifted.ravel())[0, 1]
        assert abs(correlation) < 5 / math.sqrt(shifted.size)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_the_noise_of_a_card_is_that_of_a_cpu() -> None:
    keys = keys_of((5, 0, 0), (-(2**62), 3, 77))
    on_card = gumbel_noise_reference(NoiseKeys(*(column.cuda() for column in keys)), 40_001).cpu()
    # The bits are the same; the logarithms differ in their last places.
    torch.testing.assert_close(on_card, gumbel_noise_reference(keys, 40_001), rtol=1e-5, atol=1e-5)
