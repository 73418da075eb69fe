"""The whole sampler through its kernels agrees with the references on the same plans."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.examples import examples
from tests.worker.driver import NUM_ROWS, admission, column, id_bytes

from headrace_backend.step.plan import RowAdmission, SamplePlan, StepResult
from headrace_backend.worker.sampling.sampler import SampledTokens, Sampler
from headrace_kernels import triton_runtime

VOCAB = 30
CPU = torch.device("cpu")
IDS = st.lists(st.integers(0, VOCAB - 1), max_size=6)


@st.composite
def admissions(draw: st.DrawFn) -> list[RowAdmission]:
    rows = []
    for row in range(draw(st.integers(1, 4))):
        words = draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), max_size=2))
        bias = draw(st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -1.5, 2.0]), max_size=3))
        penalized = draw(st.booleans())
        rows.append(
            admission(
                row,
                temperature=draw(st.sampled_from([0.0, 0.6, 1.0])),
                top_k=draw(st.sampled_from([0, -1, 1, 4, VOCAB, 2**31 - 1])),
                top_p=draw(st.sampled_from([1.0, 0.9, 0.5])),
                min_p=draw(st.sampled_from([0.0, 0.1])),
                top_n_sigma=draw(st.sampled_from([0.0, 0.0, 1.3])),
                seed=draw(st.integers(0, 2**64 - 1)),
                output_index=draw(st.integers(0, 3)),
                bad_words=tuple(id_bytes(*word) for word in words),
                logit_bias_ids=id_bytes(*bias),
                logit_bias_values=np.array(list(bias.values()), np.float32).tobytes(),
                min_tokens=draw(st.integers(0, 3)),
                stop_token_ids=id_bytes(*draw(st.sets(st.integers(2, 5), max_size=2))),
                repetition_penalty=1.3 if penalized else 1.0,
                presence_penalty=draw(st.sampled_from([-1.0, 0.0, 0.7])) if penalized else 0.0,
                frequency_penalty=0.25 if penalized else 0.0,
                num_logprobs=draw(st.sampled_from([-1, 0, 3, 40])),
                prompt_ids=id_bytes(*draw(IDS)) if penalized or words else b"",
                output_ids=id_bytes(*draw(IDS)) if penalized or words else b"",
            )
        )
    return rows


def result_of(sampled: SampledTokens) -> StepResult:
    result = StepResult(1, 0, 0, np.empty(0, np.int32), np.empty(0, np.uint8))
    sampled.fill(result)
    return result


def assert_equal(result: StepResult, expected: StepResult) -> None:
    assert result.tokens.tolist() == expected.tokens.tolist()
    assert result.ok.tolist() == expected.ok.tolist()
    for name in ("logprob_indices", "logprob_ranks", "logprob_counts", "top_token_ids"):
        assert getattr(result, name).tolist() == getattr(expected, name).tolist()
    # fp32 sums in another order.
    np.testing.assert_allclose(result.logprob_sampled, expected.logprob_sampled, atol=1e-5)
    np.testing.assert_allclose(result.top_logprobs, expected.top_logprobs, atol=1e-5)


def run_both(rows: list[RowAdmission], device: torch.device, vocab: int, seed: int, steps: int) -> None:
    """Steps of all rows on both samplers.

    A row is spoilt in the second, and the first leaves after it.
    """
    reference, tested = Sampler(NUM_ROWS, vocab, CPU), Sampler(NUM_ROWS, vocab, device)
    for sampler in (reference, tested):
        sampler.admit(rows)
    generator = torch.Generator().manual_seed(seed)
    numbers = [a.row for a in rows]
    for position in range(steps):
        plan = SamplePlan(column(*numbers), column(*range(len(numbers))), column(*[position] * len(numbers)))
        logits = torch.randn(len(numbers), vocab, generator=generator) * 3
        if position == 1:
            logits[-1, vocab // 2] = float("nan")
        expected = result_of(reference.sample(plan, logits.clone()))
        if device.type == "cpu":
            with triton_runtime.forced():
                result = result_of(tested.sample(plan, logits.clone()))
        else:
            result = result_of(tested.sample(plan, logits.to(device)))
        assert_equal(result, expected)
        if position == 1 and len(numbers) > 1:
            for sampler in (reference, tested):
                sampler.release(column(numbers[0]))
            numbers = numbers[1:]


@pytest.mark.skipif(not triton_runtime.INTERPRETED, reason="kernels on CPU tensors need the interpreter")
@settings(max_examples=examples(12, least=4), deadline=None)
@given(admissions(), st.integers(0, 2**31))
def test_kernels_give_what_the_references_give(rows: list[RowAdmission], seed: int) -> None:
    run_both(rows, CPU, VOCAB, seed, steps=3)


PLAIN = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.8, "seed": 2**64 - 1},
    {"temperature": 2.0, "top_k": 5},
    {"temperature": 2.0, "top_n_sigma": 0.8},
]
CHANGED = [
    {"repetition_penalty": 2.0, "prompt_ids": id_bytes(1)},
    {"min_tokens": 1, "stop_token_ids": id_bytes(3)},
    {"logit_bias_ids": id_bytes(5), "logit_bias_values": np.array([3.0], np.float32).tobytes()},
]


def test_only_the_logits_of_rows_that_ask_for_it_are_changed() -> None:
    sampler = Sampler(NUM_ROWS, VOCAB, CPU)
    sampler.admit([admission(row, **changes) for row, changes in enumerate(PLAIN + CHANGED)])
    before = torch.randn(NUM_ROWS, VOCAB, generator=torch.Generator().manual_seed(1)).abs()

    def changed(*rows: int) -> list[bool]:
        logits = before[: len(rows)].clone()
        sampler.change(SamplePlan(column(*rows), column(*range(len(rows))), column(*[0] * len(rows))), logits)
        return (logits != before[: len(rows)]).any(dim=1).tolist()

    first = len(PLAIN)
    assert not any(changed(*range(first)))
    for row in range(first, first + len(CHANGED)):
        assert changed(row) == [True]
        assert changed(0, row, 1) == [False, True, False]
    # A row's next sequence may ask for nothing.
    sampler.release(column(first))
    sampler.admit([admission(first)])
    assert changed(0, first) == [False, False]


def test_a_plain_draw_is_the_general_one_and_padding_is_greedy() -> None:
    sampler = Sampler(NUM_ROWS, VOCAB, CPU)
    sampler.admit([admission(row, **changes) for row, changes in enumerate(PLAIN)])
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(0))
    plan = SamplePlan(column(3, 0, 2, 1), column(0, 1, 2, 3), column(4, 5, 6, 7))
    expected = sampler.sample(plan, logits[:4].clone())
    rows, positions = torch.tensor([3, 0, 2, 1, NUM_ROWS]).int(), torch.tensor([4, 5, 6, 7, 0]).int()
    tokens, finite = sampler.draw_all(logits, rows, positions)
    assert tokens.tolist() == [*expected.tokens.tolist(), int(logits[4].argmax())]
    assert finite.all()


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [4096, 128_256])
def test_the_sampler_on_a_card_is_the_samplers_on_a_cpu_and_never_waits(vocab: int) -> None:
    device = torch.device("cuda:0")
    history = {"prompt_ids": id_bytes(1, 2, 3), "output_ids": id_bytes(4, 4)}
    penalties = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.1}
    changes = [*PLAIN, {"temperature": 1.0, **penalties, **history}]
    bias = {"logit_bias_ids": id_bytes(5, 7), "logit_bias_values": np.array([3.0, -100.0], np.float32).tobytes()}
    changes.append({"min_tokens": 2, "stop_token_ids": id_bytes(3), "num_logprobs": 0, **bias})
    changes.append({"bad_words": (id_bytes(1), id_bytes(2, 3)), "num_logprobs": 20, **history})
    rows = [admission(row, **change) for row, change in enumerate(changes)]
    run_both(rows, device, vocab, 3, steps=4)
    sampler = Sampler(NUM_ROWS, vocab, device)
    plan = SamplePlan(column(*range(len(rows))), column(*range(len(rows))), column(*[0] * len(rows)))
    logits = torch.randn(len(rows), vocab, device=device, dtype=torch.bfloat16)
    torch.cuda.set_sync_debug_mode("error")
    try:
        sampler.admit(rows)
        sampled = sampler.sample(plan, logits)
        sampler.release(plan.rows)
        sampler.admit(rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sampled.finite.all()
