"""The GPU's way through steps with drafts, in the interpreter here: it answers as a CPU without."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tests.support.kernel_case import DEVICES
from tests.worker.driver import BLOCK_SIZE, MAX_MODEL_LEN, NUM_BLOCKS, NUM_ROWS, execute, id_bytes
from tests.worker.speculation.drafted_rows import GuessingDrafter, Job, plain_answers, run
from tests.worker.speculation.test_cpu_verification import OPTIONS, assert_same, job
from tests.worker.speculation.test_cpu_verification import runner as cpu_runner
from tests.worker.speculation.test_reported_drafts import alone, masks_of, plans

from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.worker.sampling.sampler import Sampler
from headrace_backend.worker.speculation.drafter import Drafter
from headrace_backend.worker.speculation.ngram_drafter import NgramDrafter
from headrace_backend.worker.speculation.speculation import RowDrafts, Speculation
from headrace_backend.worker.step.buffers import StepLimits
from headrace_backend.worker.step.gpu_runner import GpuRunner
from headrace_backend.worker.step.kv_caches import allocate_kv_caches, kv_type
from headrace_backend.worker.step.shape import AttentionSizes, captured_shapes
from headrace_kernels.triton_runtime import INTERPRETED, compilation_count, forced

NUM_TOKENS = 128


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """On a CPU the kernels run in the interpreter."""
    if request.param == "cpu" and not INTERPRETED:
        pytest.skip("needs Triton's interpreter")
    with forced() if request.param == "cpu" else contextlib.nullcontext():
        yield request.param


@pytest.fixture
def model(device: str, request: pytest.FixtureRequest) -> CausalLM:
    model: CausalLM = request.getfixturevalue("shallow_llama" if device == "cpu" else "llama_on_gpu")
    return model


@pytest.fixture
def twin(device: str, request: pytest.FixtureRequest) -> CausalLM:
    """Model with the same weights for the CPU's runner."""
    model: CausalLM = request.getfixturevalue("shallow_llama" if device == "cpu" else "llama")
    return model


def gpu_runner(
    model: CausalLM, device: str, drafter: Drafter, batch_sizes: tuple[int, ...] = (), kv_dtype: str = "auto"
) -> GpuRunner:
    shape = (NUM_BLOCKS, 2, model.num_kv_heads, BLOCK_SIZE, model.head_dim)
    where, tokens_per_row = torch.device(device), 1 + drafter.num_drafts
    caches = allocate_kv_caches(model.num_layers, shape, kv_type(kv_dtype, torch.float32), where)
    sizes = AttentionSizes.of(model.num_heads, caches[0], model.dtype, tokens_per_row)
    mixed = (16, 64, 128) if batch_sizes else ()
    made = GpuRunner(
        model,
        Sampler(NUM_ROWS, model.vocab_size, where),
        caches,
        StepLimits(NUM_ROWS, NUM_TOKENS, MAX_MODEL_LEN, tokens_per_row=tokens_per_row),
        sizes,
        captured_shapes(batch_sizes, mixed, NUM_ROWS, sizes),
        speculation=Speculation(drafter, RowDrafts(NUM_ROWS, tokens_per_row, where), model.vocab_size),
    )
    made.capture(lambda *_: None)
    return made


def assert_drafts_change_nothing(
    model: CausalLM,
    twin: CausalLM,
    device: str,
    jobs: list[Job],
    num_drafts: int,
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8),
    kv_dtype: str = "auto",
) -> None:
    expected = plain_answers(lambda: cpu_runner(twin, None, kv_dtype), jobs)
    answers = {each.row: each.tokens for each in expected}
    drafting = gpu_runner(model, device, GuessingDrafter(num_drafts, answers, 0.7), batch_sizes, kv_dtype)
    draws = random.Random(1)
    assert_same(run(drafting, jobs, lambda: draws.choice((0, num_drafts, num_drafts))), expected)


# Each kind of option once; the CPU's tests have each by itself.
KINDS = ["greedy", "top_p", "penalties", "bad_words", "min_tokens", "logprobs"]


# Steps of whatever sizes and padded to captured ones; the second are those of a server.
@pytest.mark.parametrize(
    "batch_sizes", [pytest.param((), marks=pytest.mark.slow), (1, 2, 4, 8)], ids=["exact", "padded"]
)
def test_rows_with_options_answer_as_on_a_cpu_without_drafts(
    model: CausalLM, twin: CausalLM, device: str, batch_sizes: tuple[int, ...]
) -> None:
    jobs = [
        job(row, 7, **(OPTIONS[option] | {"min_tokens": 5} if option == "min_tokens" else OPTIONS[option]))
        for row, option in enumerate(KINDS[:5])
    ]
    jobs.append(Job(5, [9, 8, 7], 7, OPTIONS["logprobs"] | {"seed": 3}))
    assert_drafts_change_nothing(model, twin, device, jobs, 4, batch_sizes)


# What caches hold is read alike by one token and by several (tests/kernels/attention).
@pytest.mark.parametrize(
    ("num_drafts", "kv_dtype"),
    [pytest.param(*each, marks=pytest.mark.slow) for each in ((1, "int8"), (3, "fp8"), (8, "auto"))],
)
def test_any_number_of_drafts_over_any_cache(
    model: CausalLM, twin: CausalLM, device: str, num_drafts: int, kv_dtype: str
) -> None:
    """Eight drafts and the row's last token are more than the decode kernel takes."""
    jobs = [job(0, 10), job(1, 10, temperature=0.9)]
    assert_drafts_change_nothing(model, twin, device, jobs, num_drafts, kv_dtype=kv_dtype)


# Lookup by a CPU's runner is in test_cpu_verification, the drafter alone in
# tests/kernels/speculation.
@pytest.mark.slow
def test_lookup_on_the_device_answers_as_without(model: CausalLM, twin: CausalLM, device: str) -> None:
    # The second row repeats one token, whatever the weights are.
    repeating = {"logit_bias_ids": id_bytes(4), "logit_bias_values": np.array([60], np.float32).tobytes()}
    jobs = [job(0, 16, **OPTIONS["bias"]), job(2, 16, **repeating)]
    expected = plain_answers(lambda: cpu_runner(twin), jobs)
    drafter = NgramDrafter(4, NUM_ROWS, MAX_MODEL_LEN, torch.device(device))
    counts: list[int] = []
    drafting = gpu_runner(model, device, drafter, (1, 2, 4, 8))
    warm = compilation_count() + drafting.num_captured
    found = run(drafting, jobs, lambda: 4, on_result=lambda result: counts.extend(result.counts.tolist()))
    assert_same(found, expected)
    assert max(counts) == 5, "all drafts of the row that repeats itself are right"
    assert device == "cpu" or warm > 0


@pytest.mark.slow  # test_reported_drafts.py has them on a CPU, tests/kernels the kernel.
def test_draws_behind_drafts_have_masks_of_their_own(model: CausalLM, twin: CausalLM, device: str) -> None:
    allowed = [set(range(place, 97, 2 + place % 2)) for place in range(6)]
    expected = alone(twin, allowed)
    drafted = [*expected[:3], (expected[3] + 1) % 97, *expected[4:]]
    made, reported = gpu_runner(model, device, GuessingDrafter(4, {0: drafted}, 1.0), (1, 2, 4, 8)), []
    assert made.speculation is not None
    drafts = made.speculation.report_to(reported.append)
    first, second = plans()
    assert execute(made, first, masks_of(1, allowed[:1])).tokens[0] == expected[0]
    result = execute(made, second, masks_of(2, allowed[1:]))
    drafts.send_arrived()
    assert result.tokens[: result.counts[0]].tolist() == expected[1:4]
    assert [each.tokens.tolist() for each in reported] == [drafted[1:5]]
