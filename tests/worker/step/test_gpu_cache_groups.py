"""Several cache groups in the runner for GPUs, padded to captured shapes and launched as it is."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import pytest
import torch
from tests.support.engine_on_runner import greedy
from tests.worker.step.test_cache_groups import BLOCK_SIZE, Made, prompt_of, qwen2

from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.worker.sampling.sampler import Sampler
from headrace_backend.worker.start_up.sizes import WorkerSizes
from headrace_backend.worker.step.buffers import StepLimits
from headrace_backend.worker.step.gpu_runner import GpuRunner
from headrace_backend.worker.step.shape import AttentionSizes, captured_shapes
from headrace_kernels.triton_runtime import INTERPRETED, forced

DEVICES = [
    pytest.param(
        "cpu", marks=[pytest.mark.slow, pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")]
    ),
    pytest.param(
        "cuda:0",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")],
    ),
]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """On a CPU the kernels run in the interpreter."""
    with forced() if request.param == "cpu" else contextlib.nullcontext():
        yield request.param


def gpu_runner(
    batch_sizes: tuple[int, ...], model: CausalLM, sizes: WorkerSizes, caches: list[torch.Tensor]
) -> GpuRunner:
    """The runner for GPUs on the caches' device, which may be a CPU."""
    model.use_cache_groups(sizes.cache.layer_groups)
    attention = AttentionSizes.of(model.num_heads, caches[0], model.dtype)
    limits = StepLimits(
        sizes.max_num_seqs,
        sizes.max_num_batched_tokens,
        sizes.max_model_len,
        model.attention_window,
        num_groups=sizes.num_groups,
    )
    sampler = Sampler(sizes.max_num_seqs, model.vocab_size, caches[0].device)
    mixed = (16, 32) if batch_sizes else ()
    shapes = captured_shapes(batch_sizes, mixed, sizes.max_num_seqs, attention, lambda _: None)
    return GpuRunner(model, sampler, caches, limits, attention, shapes)


@pytest.mark.parametrize("batch_sizes", [(), (1, 2, 4)], ids=["exact", "padded"])
def test_tokens_are_those_of_transformers(
    device: str, batch_sizes: tuple[int, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Decodes, chunks and both; blocks that went back are full of NaN, and are used again."""
    made = Made(tmp_path_factory.mktemp("mixed"), qwen2(2 if device == "cpu" else 4), device)
    lengths, count = ((40, 3), 4) if device == "cpu" else ((150, 3, 111, 21, 90), 24)
    prompts = [prompt_of(length, length) for length in lengths]
    make = functools.partial(gpu_runner, batch_sizes)
    engine = made.engine(38, make=make, max_num_batched_tokens=32)
    found = engine.outputs([greedy(prompt, count) for prompt in prompts])
    assert found == [[made.expected(tuple(prompt), count)] for prompt in prompts]
    captured = engine.worker.runner.num_captured
    assert (captured > 0) == bool(batch_sizes and device != "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
def test_a_worker_of_a_card_has_groups_in_its_graphs(kv_dtype: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The runner that start-up makes: chunks, a preemption, and outputs that share a prompt."""
    made = Made(tmp_path_factory.mktemp("mixed"), qwen2(4), "cuda:0")
    sampled = {"temperature": 0.9, "seed": 3, "n": 3}

    def outputs(**changes: object) -> list[list[list[int]]]:
        asked = [greedy(prompt_of(60, seed), 60) for seed in range(4)] + [greedy(prompt_of(37), 20, **sampled)]
        return made.engine(kv_dtype=kv_dtype, max_num_seqs=8, max_num_batched_tokens=64, **changes).outputs(asked)

    assert BLOCK_SIZE == 16
    assert outputs(num_blocks=34) == outputs(num_blocks=200)
