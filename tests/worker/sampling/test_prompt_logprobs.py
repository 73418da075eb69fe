"""Log probabilities of prompts as the worker computes them.

Transformers' own in fp32, however the prompt is cut, on a CPU and on a GPU's path.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from tests.support.examples import examples
from tests.worker.driver import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    NUM_BLOCKS,
    NUM_ROWS,
    Entry,
    admission,
    execute,
    id_bytes,
    make_runner,
    step,
)

from headrace_backend.config import EngineConfig
from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.step.plan import StepPlan, StepResult
from headrace_backend.worker.sampling import prompt_logprobs
from headrace_backend.worker.sampling.sampler import Sampler
from headrace_backend.worker.start_up import fitted_runner
from headrace_backend.worker.start_up.sizes import WorkerSizes
from headrace_backend.worker.start_up.warm_up import warm_up
from headrace_backend.worker.step.buffers import StepLimits
from headrace_backend.worker.step.gpu_runner import GpuRunner
from headrace_backend.worker.step.kv_caches import allocate_kv_caches
from headrace_backend.worker.step.runner import Runner
from headrace_backend.worker.step.shape import AttentionSizes, captured_shapes
from headrace_kernels.triton_runtime import INTERPRETED, compilation_count, forced

# fp32 on both sides; sums in another order.
TOLERANCE = 2e-4
NUM_TOP = 4
BLOCKS_PER_ROW = MAX_MODEL_LEN // BLOCK_SIZE // 2
ON_GPU = [
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")),
    pytest.param(
        "cuda:0",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")],
    ),
]

chunks_of_prompts = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3), min_size=1, max_size=3)


@pytest.fixture(scope="module")
def references(llama_path: pathlib.Path) -> dict[tuple[int, ...], torch.Tensor]:
    """Log probabilities of transformers at each position of a prompt, computed once per prompt."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(llama_path).float().eval()

    class Computed(dict[tuple[int, ...], torch.Tensor]):
        def __missing__(self, prompt: tuple[int, ...]) -> torch.Tensor:
            with torch.inference_mode():
                self[prompt] = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
            return self[prompt]

    return Computed()


def prompt_of(row: int, length: int) -> list[int]:
    return [int(x) for x in np.random.default_rng(row).integers(3, 97, length)]


def plans_of(chunk_sizes: list[list[int]], num_tops: list[int]) -> Iterator[StepPlan]:
    """Row by row one chunk more in each step.

    A row whose prompt is complete draws and then decodes beside the others.
    """
    prompts = [prompt_of(row, sum(sizes)) for row, sizes in enumerate(chunk_sizes)]
    for number in range(max(len(sizes) for sizes in chunk_sizes)):
        entries = []
        for row, (sizes, prompt) in enumerate(zip(chunk_sizes, prompts, strict=True)):
            start, drawn = sum(sizes[:number]), number - len(sizes)
            if drawn >= 0:
                entries.append(Entry(row, len(prompt) + drawn, None, (row,), drawn + 1))
                continue
            end = start + sizes[number]
            is_last = end == len(prompt)
            reported = prompt[start + 1 : end + 1]
            entries.append(Entry(row, start, prompt[start:end], (row,) if is_last else (), 0, reported, num_tops[row]))
        tables = {row: [row * BLOCKS_PER_ROW + i for i in range(BLOCKS_PER_ROW)] for row in range(len(prompts))}
        rows = [admission(row) for row in range(len(prompts))]
        yield step(entries, rows if number == 0 else [], tables if number == 0 else {}, step_id=number + 1)


def check(plan: StepPlan, result: StepResult, chunk_sizes: list[list[int]], references: dict) -> None:
    """One step's columns against the reference: each run's tokens, ranks and top tokens."""
    reported, top_first, first = plan.prompt_logprobs, 0, 0
    ends = np.cumsum(plan.forward.counts)
    for index, count, num_top in zip(reported.first_indices, reported.counts, reported.num_tops, strict=True):
        entry = int(np.searchsorted(ends, index, side="right"))
        row = int(plan.forward.rows[entry])
        reference = references[tuple(prompt_of(row, sum(chunk_sizes[row])))]
        position = int(plan.forward.starts[entry])
        expected = reference[position : position + count]
        tokens = torch.from_numpy(reported.token_ids[first : first + count].astype(np.int64))
        sampled = expected.gather(1, tokens[:, None])[:, 0]
        np.testing.assert_allclose(result.prompt_sampled[first : first + count], sampled, atol=TOLERANCE)
        ranks = 1 + (expected > sampled[:, None]).sum(1)
        assert result.prompt_ranks[first : first + count].tolist() == ranks.tolist()
        tops = slice(top_first, top_first + count * num_top)
        values, ids = expected.topk(int(num_top))
        assert result.prompt_top_token_ids[tops].tolist() == ids.flatten().tolist()
        np.testing.assert_allclose(result.prompt_top_logprobs[tops], values.flatten(), atol=TOLERANCE)
        first, top_first = first + count, tops.stop
    assert (first, top_first) == (result.prompt_sampled.size, result.prompt_top_token_ids.size)


@hypothesis.settings(max_examples=examples(40), deadline=None)
@hypothesis.given(chunks_of_prompts, st.lists(st.integers(0, 20), min_size=3, max_size=3))
def test_they_are_transformers_own_whatever_the_chunks(
    llama: CausalLM, references: dict, chunk_sizes: list[list[int]], num_tops: list[int]
) -> None:
    runner = make_runner(llama, llama.num_layers, llama.num_kv_heads, llama.head_dim)
    for plan in plans_of(chunk_sizes, num_tops):
        check(plan, execute(runner, plan), chunk_sizes, references)


def test_pieces_of_any_size_give_the_same(monkeypatch: pytest.MonkeyPatch, llama: CausalLM, references: dict) -> None:
    sizes = [[30], [1], [5]]
    for rows in (1, 7, 36, 1000):
        monkeypatch.setattr(prompt_logprobs, "CPU_PIECE_ROWS", rows)
        runner = make_runner(llama, llama.num_layers, llama.num_kv_heads, llama.head_dim)
        [plan] = plans_of(sizes, [NUM_TOP] * 3)
        check(plan, execute(runner, plan), sizes, references)


def test_they_are_the_models_own_whatever_the_row_asks_for(llama: CausalLM, references: dict) -> None:
    """Bias, penalties and temperature change the draw and not what is reported of the prompt."""
    prompt = prompt_of(0, 20)
    options = admission(
        0,
        temperature=0.7,
        repetition_penalty=1.5,
        logit_bias_ids=id_bytes(*prompt),
        logit_bias_values=np.full(20, 50, np.float32).tobytes(),
        prompt_ids=id_bytes(*prompt),
        num_logprobs=2,
    )
    plan = step([Entry(0, 0, prompt, (0,), 0, prompt[1:], NUM_TOP)], [options], {0: list(range(BLOCKS_PER_ROW))})
    runner = make_runner(llama, llama.num_layers, llama.num_kv_heads, llama.head_dim)
    result = execute(runner, plan)
    check(plan, result, [[20]], references)
    assert result.logprob_sampled[0] > -0.1 > result.prompt_sampled.max()


def gpu_runner(model: CausalLM, device: str) -> Runner:
    """With graphs for every step that the tests run, on a card."""
    shape = (NUM_BLOCKS, 2, model.num_kv_heads, BLOCK_SIZE, model.head_dim)
    caches = allocate_kv_caches(model.num_layers, shape, torch.float32, torch.device(device))
    sizes = AttentionSizes.of(model.num_heads, caches[0])
    shapes = captured_shapes((1, 2, 4), (16, 32, 64, 128), NUM_ROWS, sizes)
    sampler = Sampler(NUM_ROWS, model.vocab_size, torch.device(device))
    runner = GpuRunner(model, sampler, caches, StepLimits(NUM_ROWS, 128, MAX_MODEL_LEN), sizes, shapes)
    runner.capture(lambda *_: None)
    return runner


@pytest.mark.one_in(2)
@pytest.mark.parametrize("device", ON_GPU)
@pytest.mark.parametrize("chunk_sizes", [[[9, 12], [1, 2], [23]], [[4], [16, 1, 1]]], ids=["mixed", "short"])
def test_a_gpus_path_tells_the_same_and_draws_the_same(
    device: str, chunk_sizes: list[list[int]], references: dict, request: pytest.FixtureRequest
) -> None:
    llama = request.getfixturevalue("llama")
    on_cpu = make_runner(llama, llama.num_layers, llama.num_kv_heads, llama.head_dim)
    with forced() if device == "cpu" else contextlib.nullcontext():
        model = llama if device == "cpu" else request.getfixturevalue("llama_on_gpu")
        on_gpu = gpu_runner(model, device)
        results = [(plan, execute(on_gpu, plan)) for plan in plans_of(chunk_sizes, [NUM_TOP, 0, 7])]
    for plan, result in results:
        check(plan, result, chunk_sizes, references)
        assert result.tokens.tolist() == execute(on_cpu, plan).tokens.tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_nothing_compiles_after_the_warm_up(llama_on_gpu: CausalLM) -> None:
    sizes = {"max_num_seqs": NUM_ROWS, "max_num_batched_tokens": 128, "graph_sizes": "1,2,4"}
    config = EngineConfig.model_validate({"model": "model", "device": "cuda:0", **sizes})
    shape = (NUM_BLOCKS, 2, llama_on_gpu.num_kv_heads, BLOCK_SIZE, llama_on_gpu.head_dim)
    caches = allocate_kv_caches(llama_on_gpu.num_layers, shape, torch.float32, torch.device("cuda:0"))
    runner = fitted_runner.make_runner(llama_on_gpu, WorkerSizes.of(config, MAX_MODEL_LEN), caches)
    warm_up(runner, llama_on_gpu, caches, WorkerSizes.of(config, MAX_MODEL_LEN), lambda *_: None)
    assert isinstance(runner, GpuRunner)
    runner.capture(lambda *_: None)
    compiled, captured = compilation_count(), runner.num_captured
    for chunk_sizes in ([[9, 12], [1, 2], [23]], [[4], [16, 1, 1]], [[100]], [[63, 1], [40], [2]]):
        for plan in plans_of(chunk_sizes, [NUM_TOP, 0, 20]):
            execute(runner, plan)
        execute(runner, step([], released=tuple(range(len(chunk_sizes)))))
    assert (compilation_count(), runner.num_captured) == (compiled, captured)
