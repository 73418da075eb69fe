"""With drafts a CPU answers as it does without, whatever the drafts are and what is asked for."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.examples import examples
from tests.worker.driver import MAX_MODEL_LEN, NUM_ROWS, id_bytes, make_runner
from tests.worker.speculation.drafted_rows import GuessingDrafter, Job, plain_answers, run

from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.step.plan import StepResult
from headrace_backend.worker.speculation.drafter import Drafter, SettledTokens
from headrace_backend.worker.speculation.ngram_drafter import NgramDrafter
from headrace_backend.worker.speculation.speculation import RowDrafts, Speculation
from headrace_backend.worker.step.cpu_runner import CpuRunner

TOKENS_PER_ROW = 5
PROMPTS = [[int(x) for x in np.random.default_rng(row).integers(3, 97, 5 + 7 * row)] for row in range(5)]
# Each with every option that a draw may depend on.
OPTIONS: dict[str, dict[str, object]] = {
    "greedy": {},
    "temperature": {"temperature": 0.9},
    "top_k": {"temperature": 1.2, "top_k": 7},
    "top_p": {"temperature": 1.2, "top_p": 0.8},
    "min_p": {"temperature": 1.5, "min_p": 0.1},
    "top_n_sigma": {"temperature": 1.5, "top_n_sigma": 1.0},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.4},
    "drawn_penalties": {"temperature": 0.8, "frequency_penalty": 1.5},
    "bias": {"logit_bias_ids": id_bytes(4, 9), "logit_bias_values": np.array([6, 5], np.float32).tobytes()},
    "bad_words": {
        "logit_bias_ids": id_bytes(4, 9),
        "logit_bias_values": np.array([30, 29], np.float32).tobytes(),
        "bad_words": (id_bytes(4, 4), id_bytes(9, 4, 9), id_bytes(11)),
    },
    "min_tokens": {
        "logit_bias_ids": id_bytes(4),
        "logit_bias_values": np.float32(30).tobytes(),
        "min_tokens": 13,
        "stop_token_ids": id_bytes(4),
    },
    "logprobs": {"num_logprobs": 3, "temperature": 0.7},
    "bare_logprobs": {"num_logprobs": 0},
}


def runner(llama: CausalLM, drafter: Drafter | None = None, kv_dtype: str = "auto") -> CpuRunner:
    speculation = None
    if drafter is not None:
        rows = RowDrafts(NUM_ROWS, 1 + drafter.num_drafts, torch.device("cpu"))
        speculation = Speculation(drafter, rows, llama.vocab_size)
    return make_runner(llama, llama.num_layers, llama.num_kv_heads, llama.head_dim, kv_dtype, speculation)


def job(row: int, count: int, **parameters: object) -> Job:
    """A row whose admission brings its prompt, as those of a server that drafts do."""
    return Job(row, PROMPTS[row], count, {"prompt_ids": id_bytes(*PROMPTS[row]), "seed": 7 + row} | parameters)


def assert_same(found: list[Job], expected: list[Job]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.tokens, one.ok) == (other.tokens, other.ok)
        assert [entry[1:3] for entry in one.logprobs] == [entry[1:3] for entry in other.logprobs]
        for entry, wanted in zip(one.logprobs, other.logprobs, strict=True):
            # Logits of batches of other shapes differ in their last places.
            np.testing.assert_allclose([entry[0], *entry[3]], [wanted[0], *wanted[3]], atol=1e-4)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("option", "share_right"), [("greedy", 0.0), *((option, share) for option in OPTIONS for share in (0.7, 1.0))]
)
def test_each_option_answers_as_without_drafts(llama: CausalLM, option: str, share_right: float) -> None:
    jobs = [job(row, 30, **OPTIONS[option]) for row in (0, 3)]
    expected = plain_answers(lambda: runner(llama), jobs)
    answers = {each.row: each.tokens for each in expected}
    drafting = runner(llama, GuessingDrafter(TOKENS_PER_ROW - 1, answers, share_right))
    num_steps: list[StepResult] = []
    found = run(drafting, jobs, lambda: TOKENS_PER_ROW - 1, on_result=num_steps.append)
    assert_same(found, expected)
    if share_right == 1:
        # A token of the prompt's step, then five a step, and steps that were planned ahead.
        assert len(num_steps) <= 1 + 6 + 2


@settings(max_examples=examples(30), deadline=None)
@given(
    options=st.lists(st.sampled_from(sorted(OPTIONS)), min_size=1, max_size=5),
    share_right=st.sampled_from([0.3, 0.8, 0.95]),
    ahead=st.integers(0, 2),
    seed=st.integers(0, 1 << 16),
)
def test_rows_of_all_kinds_together_answer_as_each_alone(
    llama: CausalLM, options: list[str], share_right: float, ahead: int, seed: int
) -> None:
    """Numbers of drafts differ from row to row and from step to step, none among them."""
    draws = random.Random(seed)
    jobs = [job(row, draws.randint(1, 40), **OPTIONS[option]) for row, option in enumerate(options)]
    expected = plain_answers(lambda: runner(llama), jobs)
    answers = {each.row: each.tokens for each in expected}
    drafting = runner(llama, GuessingDrafter(TOKENS_PER_ROW - 1, answers, share_right, seed))
    assert_same(run(drafting, jobs, lambda: draws.randint(0, TOKENS_PER_ROW - 1), ahead), expected)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
def test_lookup_answers_as_without_and_takes_fewer_steps(llama: CausalLM, kv_dtype: str) -> None:
    """Two tokens are so likely that an answer repeats itself, where it does not have to go on."""
    jobs = [job(row, 60, **OPTIONS["bad_words"]) for row in (1, 4)]
    expected = plain_answers(lambda: runner(llama, None, kv_dtype), jobs)
    drafter = NgramDrafter(TOKENS_PER_ROW - 1, NUM_ROWS, MAX_MODEL_LEN, torch.device("cpu"))
    steps: list[StepResult] = []
    found = run(runner(llama, drafter, kv_dtype), jobs, lambda: TOKENS_PER_ROW - 1, on_result=steps.append)
    assert_same(found, expected)
    assert len(steps) < 45


class BrokenDrafter(GuessingDrafter):
    """Raises, or proposes what is no token or no answer at all."""

    def __init__(self, num_drafts: int, way: str) -> None:
        super().__init__(num_drafts, {}, 1.0)
        self.way = way

    def propose(self, settled: object) -> torch.Tensor:
        size = settled.rows.shape[0]  # type: ignore[attr-defined]
        if self.way == "raises":
            raise RuntimeError("no drafts today")
        if self.way == "another shape":
            return torch.zeros(size, self.num_drafts + 1, dtype=torch.int32)
        if self.way == "floats":
            return torch.zeros(size, self.num_drafts)
        return torch.full((size, self.num_drafts), {"negative": -5, "beyond": 97, "huge": 1 << 40}[self.way])


@pytest.mark.parametrize("way", ["raises", "another shape", "floats", "negative", "beyond", "huge"])
def test_a_drafter_that_fails_loses_its_drafts_alone(
    llama: CausalLM, way: str, capfd: pytest.CaptureFixture[str]
) -> None:
    jobs = [job(0, 12), job(2, 12, temperature=0.8)]
    expected = plain_answers(lambda: runner(llama), jobs)
    results: list[StepResult] = []
    drafting = runner(llama, BrokenDrafter(TOKENS_PER_ROW - 1, way))
    assert_same(run(drafting, jobs, lambda: TOKENS_PER_ROW - 1, on_result=results.append), expected)
    lost = [result.lost_drafts for result in results]
    assert lost[0] == 2 * (TOKENS_PER_ROW - 1) and lost == sorted(lost) and lost[-1] > lost[0]
    # Its first failure is printed, and no other.
    assert capfd.readouterr().err.count("Traceback") == (way in ("raises", "another shape", "floats"))


def test_a_failure_of_one_of_several_ranks_is_raised(llama: CausalLM) -> None:
    rows = RowDrafts(NUM_ROWS, TOKENS_PER_ROW, torch.device("cpu"))
    speculation = Speculation(BrokenDrafter(TOKENS_PER_ROW - 1, "raises"), rows, llama.vocab_size, has_peers=True)
    broken = make_runner(llama, llama.num_layers, llama.num_kv_heads, llama.head_dim, speculation=speculation)
    with pytest.raises(RuntimeError, match="no drafts today"):
        run(broken, [job(0, 3)])


@contextlib.contextmanager
def token_of_nan(llama: CausalLM, token: int) -> Iterator[None]:
    """Keys and values of a token are NaN, and so are logits behind it."""
    embedding = llama.model.embed_tokens
    assert embedding is not None and isinstance(embedding.weight, torch.Tensor)
    weight = embedding.weight
    before = weight[token].clone()
    with torch.inference_mode():
        weight[token] = torch.nan
    try:
        yield
    finally:
        with torch.inference_mode():
            weight[token] = before


def test_bad_numbers_end_their_own_row_only(llama: CausalLM) -> None:
    """A row whose own token the model can't compute ends behind it, and settles all before."""
    jobs = [job(0, 20), job(1, 20)]
    expected = plain_answers(lambda: runner(llama), jobs)
    answers = {each.row: each.tokens for each in expected}
    drafting = runner(llama, GuessingDrafter(TOKENS_PER_ROW - 1, answers, 1.0))
    bad = next(token for token in expected[0].tokens[7:] if token not in expected[0].tokens[:7])
    place = expected[0].tokens.index(bad)
    assert bad not in expected[1].tokens and bad not in PROMPTS[0] + PROMPTS[1]
    with token_of_nan(llama, bad):
        found = run(drafting, jobs, lambda: TOKENS_PER_ROW - 1)
    assert found[0].tokens == [*expected[0].tokens[: place + 1], 0]
    assert found[0].ok == [1] * (place + 1) + [0]
    assert (found[1].tokens, found[1].ok) == (expected[1].tokens, expected[1].ok)


@pytest.mark.parametrize("option", ["greedy", "drawn_penalties", "bad_words", "logprobs"])
@pytest.mark.parametrize("place", range(TOKENS_PER_ROW - 1))
def test_a_draft_that_the_model_cannot_compute_ends_nobody(llama: CausalLM, option: str, place: int) -> None:
    """Each step proposes it, at one place among drafts that are right."""
    jobs = [job(0, 12, **OPTIONS[option]), job(1, 12)]
    expected = plain_answers(lambda: runner(llama), jobs)
    used = {token for each in expected for token in each.tokens + each.prompt}
    bad = next(token for token in range(97) if token not in used)

    class Drafter(GuessingDrafter):
        def propose(self, settled: SettledTokens) -> torch.Tensor:
            drafts = super().propose(settled)
            drafts[settled.rows == 0, place] = bad
            return drafts

    drafting = runner(llama, Drafter(TOKENS_PER_ROW - 1, {each.row: each.tokens for each in expected}, 1.0))
    with token_of_nan(llama, bad):
        found = run(drafting, jobs, lambda: TOKENS_PER_ROW - 1)
    assert_same(found, expected)
