"""Rows with all sorts of parameters side by side agree with a reference in Python lists.

The reference handles one row.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.examples import examples
from tests.worker.driver import NUM_ROWS, admission, column, id_bytes

from headrace_backend.step.plan import RowAdmission, SamplePlan, StepResult
from headrace_backend.worker.sampling.sampler import Sampler

VOCAB = 30


def new_sampler(vocab: int = VOCAB) -> Sampler:
    return Sampler(NUM_ROWS, vocab, torch.device("cpu"))


def draw(sampler: Sampler, rows: list[int], positions: list[int], logits: torch.Tensor) -> StepResult:
    plan = SamplePlan(column(*rows), column(*range(len(rows))), column(*positions))
    result = StepResult(1, 0, 0, np.empty(0, np.int32), np.empty(0, np.uint8))
    sampler.sample(plan, logits.clone()).fill(result)
    return StepResult.decode(result.encode())


def changed_naively(a: RowAdmission, logits: list[float], output: list[int]) -> list[float]:
    """The documented order: bias, bans, repetition, presence and frequency penalties."""
    logits = list(logits)
    bias = zip(
        np.frombuffer(a.sampling.logit_bias_ids, np.int32),
        np.frombuffer(a.sampling.logit_bias_values, np.float32),
        strict=True,
    )
    for token, value in bias:
        logits[token] += float(value)
    if len(output) < a.min_tokens:
        for token in np.frombuffer(a.stop_token_ids, np.int32):
            logits[token] = -math.inf
    for encoded in a.sampling.bad_words:
        word = np.frombuffer(encoded, np.int32).tolist()
        if len(word) == 1 or output[-(len(word) - 1) :] == word[:-1]:
            logits[word[-1]] = -math.inf
    for token in set(np.frombuffer(a.prompt_ids, np.int32).tolist()) | set(output):
        logits[token] *= 1 / a.sampling.repetition_penalty if logits[token] > 0 else a.sampling.repetition_penalty
    for token in set(output):
        logits[token] -= a.sampling.presence_penalty + a.sampling.frequency_penalty * output.count(token)
    return logits


IDS = st.lists(st.integers(0, VOCAB - 1), max_size=6)


@st.composite
def admissions_of_all_rows(draw_from: st.DrawFn) -> list[RowAdmission]:
    rows = []
    for row in range(draw_from(st.integers(1, NUM_ROWS))):
        bias = draw_from(
            st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -1.5, 2.0, 5.0]), max_size=4)
        )
        # Two letters, so that prefixes do occur.
        words = draw_from(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), max_size=4))
        penalized = draw_from(st.booleans())
        changes = dict(
            logit_bias_ids=id_bytes(*bias),
            logit_bias_values=np.array(list(bias.values()), np.float32).tobytes(),
            min_tokens=draw_from(st.integers(0, 6)),
            stop_token_ids=id_bytes(*draw_from(st.sets(st.integers(2, 5), max_size=2))),
            bad_words=tuple(id_bytes(*word) for word in words),
            repetition_penalty=draw_from(st.sampled_from([0.5, 1.0, 1.3])) if penalized else 1.0,
            presence_penalty=draw_from(st.sampled_from([-1.0, 0.0, 0.7])) if penalized else 0.0,
            frequency_penalty=draw_from(st.sampled_from([0.0, 0.25])) if penalized else 0.0,
            num_logprobs=draw_from(st.sampled_from([-1, -1, 0, 3, 20])),
            prompt_ids=id_bytes(*draw_from(IDS)) if penalized or words else b"",
            output_ids=id_bytes(*draw_from(IDS)) if penalized or words else b"",
        )
        rows.append(admission(row, **changes))
    return rows


@settings(max_examples=examples(80), deadline=None)
@given(admissions_of_all_rows(), st.integers(0, 2**31))
def test_greedy_rows_with_everything_else_follow_the_documented_order(rows: list[RowAdmission], seed: int) -> None:
    sampler = new_sampler()
    sampler.admit(rows)
    generator = torch.Generator().manual_seed(seed)
    outputs = [np.frombuffer(a.output_ids, np.int32).tolist() for a in rows]
    for _ in range(5):
        logits = torch.randn(len(rows), VOCAB, generator=generator) * 3
        # The two letters of the bad words are likely.
        logits[:, :2] += 3
        result = draw(sampler, [a.row for a in rows], [len(output) for output in outputs], logits)
        assert result.ok.all()
        top_start = 0
        for index, a in enumerate(rows):
            changed = torch.tensor(changed_naively(a, logits[index].tolist(), outputs[index]), dtype=torch.float64)
            token = int(result.tokens[index])
            # fp32 against fp64: among tokens that are equal within rounding either is right.
            assert changed[token] >= changed.max() - 1e-4
            outputs[index].append(token)
            if a.num_logprobs >= 0:
                entry = result.logprob_indices.tolist().index(index)
                expected = torch.log_softmax(changed, dim=0)
                count = int(result.logprob_counts[entry])
                assert count == min(a.num_logprobs, int(expected.isfinite().sum()))
                assert abs(result.logprob_sampled[entry] - expected[token]) < 1e-4
                assert result.logprob_ranks[entry] == 1
                top = result.top_logprobs[top_start : top_start + count]
                np.testing.assert_allclose(top, expected.sort(descending=True).values[:count], atol=1e-4)
                ids = result.top_token_ids[top_start : top_start + count]
                np.testing.assert_allclose(expected[ids.tolist()], top, atol=1e-4)
                top_start += count
        assert top_start == result.top_token_ids.size


@settings(max_examples=examples(40), deadline=None)
@given(admissions_of_all_rows(), st.permutations(range(NUM_ROWS)), st.integers(0, 2**31), st.data())
def test_a_row_draws_the_same_in_any_company(
    rows: list[RowAdmission], places: list[int], seed: int, data: st.DataObject
) -> None:
    """Same parameters, logits and seed, in another row, alone."""
    kinds = [
        dict(temperature=0.0),
        dict(temperature=1.0),
        dict(temperature=0.7, top_p=0.8),
        dict(temperature=2.0, top_k=5),
        dict(temperature=2.0, top_n_sigma=0.8),
    ]
    chosen = [data.draw(st.sampled_from(kinds)) for _ in rows]
    samplings = [
        msgspec.structs.replace(a.sampling, seed=2**64 - 1 - a.row, **kind)
        for a, kind in zip(rows, chosen, strict=True)
    ]
    rows = [msgspec.structs.replace(a, sampling=sampling) for a, sampling in zip(rows, samplings, strict=True)]
    together = new_sampler()
    together.admit(rows)
    alone = [new_sampler() for _ in rows]
    for a, sampler, place in zip(rows, alone, places, strict=False):
        sampler.admit([msgspec.structs.replace(a, row=place)])
    generator = torch.Generator().manual_seed(seed)
    for position in range(4):
        logits = torch.randn(len(rows), VOCAB, generator=generator) * 2
        tokens = draw(together, [a.row for a in rows], [position] * len(rows), logits).tokens.tolist()
        for index, sampler in enumerate(alone):
            by_itself = draw(sampler, [places[index]], [position], logits[index : index + 1])
            assert by_itself.tokens.tolist() == [tokens[index]]


def test_a_row_that_is_not_finite_is_named_and_the_others_go_on() -> None:
    sampler = new_sampler()
    everything_banned = tuple(id_bytes(token) for token in range(VOCAB))
    sampler.admit(
        [
            admission(0, temperature=1.0, num_logprobs=2),
            admission(1, num_logprobs=2),
            admission(2, temperature=1.0, top_p=0.5, num_logprobs=0),
            admission(3, bad_words=everything_banned, num_logprobs=1),
        ]
    )
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(3))
    before = draw(sampler, [0, 1, 2, 3], [0] * 4, logits)
    assert before.ok.tolist() == [1, 1, 1, 0]
    logits[1] = math.nan
    after = draw(sampler, [0, 1, 2, 3], [0] * 4, logits)
    assert after.ok.tolist() == [1, 0, 1, 0]
    assert after.tokens.tolist() == [before.tokens[0], 0, before.tokens[2], 0]
    assert after.logprob_counts.tolist() == [2, 0, 0, 0]
    assert after.logprob_ranks[[1, 3]].tolist() == [0, 0]
    assert not np.isnan(after.logprob_sampled).any()
    assert np.isfinite(after.top_logprobs).all()


def test_min_tokens_counts_from_the_position_in_the_output() -> None:
    sampler = new_sampler()
    sampler.admit([admission(0, min_tokens=2, stop_token_ids=id_bytes(4))])
    logits = torch.zeros(1, VOCAB)
    logits[0, 4] = 10
    assert [int(draw(sampler, [0], [position], logits).tokens[0]) for position in range(4)] == [0, 0, 4, 4]


def test_bad_words_look_at_the_output_only() -> None:
    sampler = new_sampler()
    words = {"bad_words": (id_bytes(7, 8),)}
    sampler.admit([admission(0, prompt_ids=id_bytes(7), **words), admission(1, output_ids=id_bytes(7), **words)])
    logits = torch.zeros(2, VOCAB)
    logits[:, 8] = 10
    assert draw(sampler, [0, 1], [0, 1], logits).tokens.tolist() == [8, 0]


def test_penalty_counts_are_forgotten_with_their_row() -> None:
    sampler = new_sampler()
    penalized = {"presence_penalty": 2.0}
    logits = torch.zeros(1, VOCAB)
    logits[0, 9] = 1
    for _ in range(20):
        sampler.admit([admission(5, **penalized)])
        assert [int(draw(sampler, [5], [position], logits).tokens[0]) for position in range(3)] == [9, 0, 1]
        sampler.release(column(5))
    assert sampler._penalties.num_taken == 0
    sampler.admit([admission(row, **penalized) for row in range(NUM_ROWS)])
    rows = list(range(NUM_ROWS))
    assert draw(sampler, rows, [0] * NUM_ROWS, logits.expand(NUM_ROWS, -1)).tokens.tolist() == [9] * NUM_ROWS
    assert draw(sampler, rows, [1] * NUM_ROWS, logits.expand(NUM_ROWS, -1)).tokens.tolist() == [0] * NUM_ROWS


def test_top_k_beyond_the_vocabulary_keeps_all() -> None:
    sampler = new_sampler()
    sampler.admit([admission(row, temperature=1.0, top_k=k, seed=5) for row, k in enumerate([0, -1, VOCAB, 2**31 - 1])])
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0)).expand(4, -1)
    assert len(set(draw(sampler, [0, 1, 2, 3], [0] * 4, logits).tokens.tolist())) == 1
