"""Masked rows draw as if other tokens did not exist; rows beside them draw as ever."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.examples import examples
from tests.worker.driver import NUM_ROWS, Entry, admission, column, execute, id_bytes, make_runner, step

from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.step.masks import StepMasks, mask_words
from headrace_backend.step.plan import RowAdmission, SamplePlan, StepResult
from headrace_backend.worker.sampling.sampler import Sampler

VOCAB = 40
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.5, "top_k": 5, "top_p": 0.9},
    {"temperature": 1.0, "num_logprobs": 5},
    {"temperature": 0.7, "presence_penalty": 0.5, "repetition_penalty": 1.3, "output_ids": id_bytes(3, 3)},
    {"temperature": 1.0, "logit_bias_ids": id_bytes(1), "logit_bias_values": np.float32(5).tobytes()},
)


def result_of(rows: list[RowAdmission], logits: torch.Tensor, masks: StepMasks | None) -> StepResult:
    sampler = Sampler(NUM_ROWS, VOCAB, torch.device("cpu"))
    sampler.admit(rows)
    places = column(*(row.row for row in rows))
    result = StepResult(1, 0, 0, np.empty(0, np.int32), np.empty(0, np.uint8))
    sampler.sample(SamplePlan(places, column(*range(len(rows))), 0 * places), logits.clone(), masks).fill(result)
    return result


def packed(allowed: list[set[int]], vocab: int) -> np.ndarray:
    words = np.zeros((len(allowed), mask_words(vocab)), np.uint32)
    for row, tokens in enumerate(allowed):
        for token in tokens:
            words[row, token // 32] |= np.uint32(1 << token % 32)
    return words.view(np.int32)


@settings(max_examples=examples(80), deadline=None)
@given(
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=NUM_ROWS),
    st.lists(st.none() | st.sets(st.integers(0, VOCAB - 1), min_size=1), min_size=NUM_ROWS, max_size=NUM_ROWS),
    st.integers(0, 2**31),
)
def test_a_mask_is_a_ban_of_all_other_tokens(
    kinds: list[dict[str, Any]], allowed: list[set[int] | None], seed: int
) -> None:
    allowed = allowed[: len(kinds)]
    rows = [
        admission(row, seed=row, is_masked=tokens is not None, **kind)
        for row, (kind, tokens) in enumerate(zip(kinds, allowed, strict=True))
    ]
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    masked = [index for index, tokens in enumerate(allowed) if tokens is not None]
    masks = StepMasks(
        1, column(*masked), column(*masked) * 0, packed([tokens for tokens in allowed if tokens is not None], VOCAB)
    )
    banned = logits.clone()
    for index, tokens in enumerate(allowed):
        if tokens is not None:
            banned[index, [token for token in range(VOCAB) if token not in tokens]] = -torch.inf
    result, expected, free = (
        result_of(rows, logits, masks), result_of(rows, banned, None), result_of(rows, logits, None)
    )  # fmt: skip
    assert result.tokens.tolist() == expected.tokens.tolist() and result.ok.all()
    np.testing.assert_array_equal(result.logprob_sampled, expected.logprob_sampled)
    np.testing.assert_array_equal(result.top_token_ids, expected.top_token_ids)
    for index, tokens in enumerate(allowed):
        if tokens is None:
            assert result.tokens[index] == free.tokens[index]
        else:
            assert int(result.tokens[index]) in tokens


def test_a_mask_that_leaves_nothing_is_an_output_that_can_not_go_on() -> None:
    rows = [admission(0, is_masked=True), admission(1)]
    result = result_of(rows, torch.zeros(2, VOCAB), StepMasks(1, column(0), column(0), packed([set()], VOCAB)))
    assert result.ok.tolist() == [0, 1]


def test_a_greedy_row_of_a_whole_model_draws_from_its_mask(llama: CausalLM) -> None:
    """A runner that would take the most likely token without logits looks at the mask."""
    plan = step(
        [Entry(0, 0, [3, 4, 5], (0,)), Entry(1, 0, [3, 4, 5], (1,))],
        [admission(0, is_masked=True), admission(1)], {0: [1], 1: [2]}, num_masked=1,
    )  # fmt: skip
    free = execute(make_runner(llama, 2, 2, 8), plan).tokens.tolist()
    assert free[0] == free[1]
    masks = StepMasks(1, column(0), column(0), packed([{token for token in range(97) if token != free[0]}], 97))
    masked = execute(make_runner(llama, 2, 2, 8), plan, masks).tokens.tolist()
    assert masked[0] != free[0] and masked[1] == free[1]
