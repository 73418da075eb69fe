"""Penalties against a naive implementation; log probabilities against fp64."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.examples import examples

from headrace_kernels.sampling.logprobs import token_logprobs
from headrace_kernels.sampling.penalties import Penalties, apply_penalties_reference

VOCAB = 12
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=20)


def penalized_naively(
    logits: list[float], prompt: list[int], output: list[int], repetition: float, presence: float, frequency: float
) -> list[float]:
    logits = list(logits)
    for token in set(prompt) | set(output):
        logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
    for token in set(output):
        logits[token] -= presence
    for token in output:
        logits[token] -= frequency
    return logits


ROW = st.tuples(
    st.lists(st.one_of(st.floats(-10, 10, width=32), st.just(-math.inf)), min_size=VOCAB, max_size=VOCAB),
    TOKENS,
    TOKENS,
    st.floats(0.125, 10, width=32),
    st.floats(-2, 2, width=32),
    st.floats(-2, 2, width=32),
)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(ROW, min_size=1, max_size=5))
def test_penalties_are_those_of_the_naive_loop(
    rows: list[tuple[list[float], list[int], list[int], float, float, float]],
) -> None:
    prompts = torch.zeros(len(rows), VOCAB, dtype=torch.bool)
    counts = torch.zeros(len(rows), VOCAB, dtype=torch.int32)
    for index, (_, prompt, output, *_) in enumerate(rows):
        prompts[index, prompt] = True
        counts[index] = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=VOCAB)
    strengths = Penalties(*(torch.tensor([row[i] for row in rows]) for i in (3, 4, 5)))
    result = apply_penalties_reference(torch.tensor([row[0] for row in rows]), prompts, counts, strengths)
    expected = torch.tensor([penalized_naively(*row) for row in rows])
    # fp32 here, fp64 there.
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1, 200), st.integers(1, 6), st.integers(0, 2**31), st.data())
def test_logprobs_are_those_of_fp64(vocab: int, count: int, seed: int, data: st.DataObject) -> None:
    # Rounded, so that there are equal logits.
    logits = (torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed)) * 4).round(decimals=1)
    tokens = torch.tensor(data.draw(st.lists(st.integers(0, vocab - 1), min_size=count, max_size=count)))
    num_top = data.draw(st.integers(0, min(20, vocab)))
    result = token_logprobs(logits, tokens, num_top)
    expected = torch.log_softmax(logits.double(), dim=1).numpy()
    for row in range(count):
        order = np.lexsort((np.arange(vocab), -logits[row].numpy())).tolist()
        assert result.top_ids[row].tolist() == order[:num_top]
        assert int(result.ranks[row]) == 1 + order.index(int(tokens[row]))
        np.testing.assert_allclose(result.sampled[row], expected[row, tokens[row]], atol=1e-5)
        np.testing.assert_allclose(result.top[row], expected[row, order[:num_top]], atol=1e-5)


def test_all_probabilities_add_up_to_one() -> None:
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(1)) * 8
    logits[:, ::7] = -math.inf
    result = token_logprobs(logits, torch.ones(4, dtype=torch.int64), 1000)
    torch.testing.assert_close(result.top.exp().sum(dim=1), torch.ones(4), rtol=0, atol=1e-5)
    assert (result.top.diff(dim=1)[result.top[:, 1:].isfinite()] <= 0).all()
