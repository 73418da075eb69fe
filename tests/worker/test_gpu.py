"""The same plans on a GPU: the same tokens as on a CPU, and a worker process that runs ahead."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.worker.driver import NUM_ROWS, Entry, admission, column, execute, id_bytes, make_runner, step

from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.step_plan import SamplePlan, StepPlan, StepResult
from headrace_backend.worker.device import choose_device
from headrace_backend.worker.memory_plan import free_memory_bytes
from headrace_backend.worker.model_runner import ModelRunner
from headrace_backend.worker.sampler import Sampler
from headrace_kernels.philox import NoiseKeys, gumbel_noise_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
PROMPTS = [[int(x) for x in np.random.default_rng(row).integers(3, 97, 5 + 9 * row)] for row in range(5)]


def mixed_plans() -> list[StepPlan]:
    """Five prompts, the longest in two chunks, a fork with a copied block, a release, and tokens the plan does not know."""
    tables = {row: [row * 8 + i for i in range(8)] for row in range(5)}
    start = [Entry(row, 0, PROMPTS[row], (row,)) for row in range(4)] + [Entry(4, 0, PROMPTS[4][:20])]
    plans = [step(start, [admission(row) for row in range(5)], tables, step_id=1)]
    decode = [Entry(row, len(PROMPTS[row]), None, (row,), 1) for row in range(4)]
    plans.append(step([*decode, Entry(4, 20, PROMPTS[4][20:], (4, 5))], [admission(5)], {5: [32, 33, 50]}, step_id=2))
    decode = [Entry(row, len(PROMPTS[row]) + 1, None, (row,), 2) for row in (1, 2, 3)]
    ends = [Entry(row, len(PROMPTS[4]), None, (row,), 1) for row in (4, 5)]
    plans.append(step([*decode, *ends], released=(0,), copies=((34, 50),), step_id=3))
    for number in range(4, 12):
        entries = [Entry(row, len(PROMPTS[row]) + number - 2, None, (row,), number - 1) for row in (1, 2, 3)]
        plans.append(step(entries, released=(4, 5) if number == 4 else (), step_id=number))
    return plans


def runner_of(model: CausalLM, device: str) -> ModelRunner:
    return make_runner(model, model.num_layers, model.num_kv_heads, model.head_dim, torch.device(device))


def test_greedy_tokens_are_those_of_the_cpu(llama: CausalLM, llama_on_gpu: CausalLM) -> None:
    on_cpu, on_gpu = runner_of(llama, "cpu"), runner_of(llama_on_gpu, "cuda:0")
    for plan in mixed_plans():
        assert execute(on_gpu, plan).tokens.tolist() == execute(on_cpu, plan).tokens.tolist()


def test_noise_is_that_of_the_cpu() -> None:
    keys = NoiseKeys(torch.tensor([5, -(2**62)]), torch.tensor([0, 3]), torch.tensor([0, 77]))
    on_gpu = gumbel_noise_reference(NoiseKeys(*(column.cuda() for column in keys)), 40_001).cpu()
    # The bits are the same; the logarithms differ in their last places.
    torch.testing.assert_close(on_gpu, gumbel_noise_reference(keys, 40_001), rtol=1e-5, atol=1e-5)


def test_rows_with_parameters_of_all_kinds_draw_as_on_the_cpu() -> None:
    vocab = 500
    history = {"needs_history": True, "prompt_ids": id_bytes(1, 2), "output_ids": id_bytes(3, 3)}
    rows = [
        admission(0, temperature=1.0),
        admission(1, temperature=0.7, top_k=20, num_logprobs=20),
        admission(2, temperature=1.5, top_p=0.9, min_p=0.01),
        admission(3, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.1, **history),
        admission(4, bad_words=[id_bytes(3, 7), id_bytes(9)], **history),
        admission(5, logit_bias_ids=id_bytes(4), logit_bias_values=np.float32(6).tobytes(), num_logprobs=0),
        admission(6, min_tokens=3, stop_token_ids=id_bytes(11, 12)),
        admission(7),
    ]
    samplers = {device: Sampler(NUM_ROWS, vocab, torch.device(device)) for device in ("cpu", "cuda:0")}
    generator = torch.Generator().manual_seed(0)
    for sampler in samplers.values():
        sampler.admit(rows)
    for position in range(2, 8):
        logits = torch.randn(8, vocab, generator=generator) * 3
        plan = SamplePlan(column(*range(8)), column(*range(8)), column(*[position] * 8))
        results = []
        for device, sampler in samplers.items():
            result = StepResult(1, 0, 0, np.empty(0, np.int32), np.empty(0, np.uint8))
            sampler.sample(plan, logits.clone().to(device)).fill(result)
            results.append(result)
        assert results[0].tokens.tolist() == results[1].tokens.tolist()
        assert results[0].ok.tolist() == results[1].ok.tolist()
        assert results[0].top_token_ids.tolist() == results[1].top_token_ids.tolist()
        assert results[0].logprob_ranks.tolist() == results[1].logprob_ranks.tolist()
        np.testing.assert_allclose(results[0].top_logprobs, results[1].top_logprobs, atol=1e-4)


def test_auto_is_the_gpu_and_its_free_memory_is_what_cuda_says() -> None:
    device, _ = choose_device("auto")
    assert device == torch.device("cuda", 0)
    assert 1 << 30 < free_memory_bytes(device) <= torch.cuda.get_device_properties(device).total_memory
