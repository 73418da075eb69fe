"""Several cache groups in the runner for GPUs, padded to captured shapes and launched as it is."""

from __future__ import annotations

import contextlib
import functools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.support.engine_on_runner import greedy
from tests.worker.step.test_cache_groups import BLOCK_SIZE, Made, prompt_of, qwen2
from tests.worker.step.test_uneven_layers import gemma4, mixture, sharing

from headrace_backend.cache_groups import WHOLE_CONTEXTS
from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.worker.sampling.sampler import Sampler
from headrace_backend.worker.start_up.drafters import gpu_speculation
from headrace_backend.worker.start_up.sizes import WorkerSizes
from headrace_backend.worker.step.buffers import DeviceRows, StepLimits
from headrace_backend.worker.step.drafting_model import DraftingModel
from headrace_backend.worker.step.gpu_runner import GpuRunner
from headrace_backend.worker.step.row_states import block_caches, one_of_each
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
    batch_sizes: tuple[int, ...],
    model: CausalLM,
    sizes: WorkerSizes,
    kv_caches: list[torch.Tensor],
    *,
    draft: DraftingModel | None = None,
) -> GpuRunner:
    """The runner for GPUs on the caches' device, which may be a CPU."""
    model.use_cache_groups(sizes.cache.layer_groups)
    blocks = block_caches(kv_caches)[0]
    attention = AttentionSizes.of_layers(model.num_heads, one_of_each(kv_caches), model.dtype, sizes.tokens_per_row)
    limits = StepLimits(
        sizes.max_num_seqs,
        sizes.max_num_batched_tokens,
        sizes.max_model_len,
        model.attention_window,
        sizes.tokens_per_row,
        sizes.num_groups,
    )
    num_blocks, _, _, block_size, _ = blocks.shape
    device = blocks.device
    sampler = Sampler(sizes.max_num_seqs, model.vocab_size, device)
    rows = DeviceRows(sizes.max_num_seqs, -(-sizes.max_model_len // block_size), num_blocks, device, sizes.num_groups)
    speculation = gpu_speculation(model, sizes, sampler, rows, draft)
    mixed = (16, 32) if batch_sizes else ()
    batch_sizes = tuple(size for size in batch_sizes if size <= sizes.max_num_seqs)
    shapes = captured_shapes(batch_sizes, mixed, sizes.max_num_seqs, attention, lambda _: None)
    return GpuRunner(model, sampler, kv_caches, limits, attention, shapes, speculation=speculation, rows=rows)


@pytest.mark.parametrize("batch_sizes", [(), (1, 2, 4)], ids=["exact", "padded"])
def test_tokens_are_those_of_transformers(
    device: str, batch_sizes: tuple[int, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Decodes, chunks and both; blocks that went back are full of NaN, and are used again."""
    made = Made(tmp_path_factory.mktemp("mixed"), qwen2(2 if device == "cpu" else 4), device)
    lengths, count = ((40, 3), 4) if device == "cpu" else ((150, 3, 111, 21, 90), 24)
    prompts = [prompt_of(length, length) for length in lengths]
    make = functools.partial(gpu_runner, batch_sizes)
    engine = made.engine(38, make=make, max_num_batched_tokens=32, enable_prefix_cache=False)
    found = engine.outputs([greedy(prompt, count) for prompt in prompts])
    assert found == [[made.expected(tuple(prompt), count)] for prompt in prompts]
    captured = engine.worker.runner.num_captured
    assert (captured > 0) == bool(batch_sizes and device != "cpu")


@pytest.mark.parametrize("batch_sizes", [(), (1, 2, 4)], ids=["exact", "padded"])
def test_a_draft_model_reads_and_writes_the_first_groups_blocks(
    device: str, batch_sizes: tuple[int, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The model drafts for itself: what it finds in its own cache makes every draft right."""
    made = Made(tmp_path_factory.mktemp("mixed"), qwen2(2), device)
    count = 8 if device == "cpu" else 40
    prompts = [prompt_of(length, length) for length in (40, 25)]
    drafting = {"speculate": "draft", "draft_model": pathlib.Path("draft"), "speculate_tokens": "3"}
    make = functools.partial(gpu_runner, batch_sizes)
    settings = {"max_num_batched_tokens": 32, "tokens_per_row": 4, **drafting}
    engine = made.engine(24, make=make, draft=made.ours, **settings)
    readers = engine.readers_of([greedy(prompt, count) for prompt in prompts])
    for prompt, reader in zip(prompts, readers, strict=True):
        assert reader.tokens[0] == made.expected(tuple(prompt), count)
        assert reader.done is not None
        assert reader.done.draft_tokens == reader.done.accepted_tokens > 0


@pytest.mark.parametrize("batch_sizes", [(), (1, 2, 4)], ids=["exact", "padded"])
def test_rejected_drafts_and_copies_change_no_tokens(
    device: str, batch_sizes: tuple[int, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Drafts from the own context, and outputs that share a prompt's last block in both groups."""
    made = Made(tmp_path_factory.mktemp("mixed"), qwen2(2), device)
    make = functools.partial(gpu_runner, batch_sizes)
    settings = {"make": make, "max_num_batched_tokens": 32, "tokens_per_row": 4}
    drafting = {"speculate": "ngram", "speculate_tokens": "3"}
    repeating = prompt_of(15, 1) * 3
    engine = made.engine(24, **settings, **drafting)
    [reader] = engine.readers_of([greedy(repeating, 12)])
    assert reader.tokens[0] == made.expected(tuple(repeating), 12)
    assert reader.done is not None and reader.done.draft_tokens > reader.done.accepted_tokens
    sampled = {"temperature": 0.9, "seed": 7, "n": 3}
    found, whole = (
        made.engine(40, layout=layout, make=make, max_num_batched_tokens=32).outputs(
            [greedy(prompt_of(37), 8, **sampled)]
        )
        for layout in (made.layout, WHOLE_CONTEXTS)
    )
    assert found == whole and len(set(map(tuple, found[0]))) == 3


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


@pytest.mark.parametrize("batch_sizes", [(), (1, 2, 4)], ids=["exact", "padded"])
@pytest.mark.parametrize(
    ("make_config", "kv_dtype"), [(gemma4, "auto"), (gemma4, "fp8"), (sharing, "auto"), (mixture, "auto")]
)
def test_layers_may_differ_in_their_heads(
    device: str,
    make_config: Callable[[], Any],
    kv_dtype: str,
    batch_sizes: tuple[int, ...],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """One plan for kernels of two sizes of heads, over the same memory."""
    made = Made(tmp_path_factory.mktemp("uneven"), make_config(), device)
    lengths, count = ((40, 3), 4) if device == "cpu" else ((150, 3, 111, 21, 90), 24)
    prompts = [prompt_of(length, length) for length in lengths]
    make = functools.partial(gpu_runner, batch_sizes)
    engine = made.engine(38, make=make, max_num_batched_tokens=32, enable_prefix_cache=False, kv_dtype=kv_dtype)
    found = engine.outputs([greedy(prompt, count) for prompt in prompts])
    if kv_dtype == "auto":
        assert found == [[made.expected(tuple(prompt), count)] for prompt in prompts]
    else:
        whole = made.engine(90, layout=WHOLE_CONTEXTS, make=make, max_num_batched_tokens=32, kv_dtype=kv_dtype)
        assert found == whole.outputs([greedy(prompt, count) for prompt in prompts])
