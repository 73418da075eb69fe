"""One pass through everything before the first request: libraries choose and compile on first use.

Owns which synthetic steps those are. On a CPU a short prompt and one more token. On a GPU every
size of step at which another kernel, or another version of one, may be chosen, with every kind of
draw, so that no request waits for a compiler. Those many steps go through representative layers
alone: layers of one kind launch the same kernels, and each launch of a deep model's some hundred
steps takes the host's time. A few whole steps follow, so that what sets layers apart after all is
met before the first request. The blocks that they write are as new afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.step.plan import StepPlan
from headrace_backend.weights.progress import Progress
from headrace_backend.worker.start_up.sizes import WorkerSizes
from headrace_backend.worker.start_up.synthetic_steps import (
    BlockPool,
    Chunk,
    SamplingKind,
    copying_step,
    drafted_step,
    make_step,
    next_step,
    prompts,
    release_step,
)
from headrace_backend.worker.step.kv_caches import clear_blocks
from headrace_backend.worker.step.row_states import block_caches
from headrace_backend.worker.step.runner import Runner, run_steps
from headrace_kernels.attention.plan import MOST_TOKENS_IN_PARTS, QUERY_LEN_CLASSES
from headrace_kernels.linear.quantized import WARM_ROWS
from headrace_kernels.triton_runtime import compilation_count, uses_triton

# Blocks that warm-up may write to.
_WARM_UP_BLOCKS = 64
# Context that all rows of a step read together, and context before a chunk: enough for every way of
# dividing attention's work, little enough for milliseconds a step.
_CONTEXT_TOKENS = 1 << 17
_CHUNK_CONTEXT_TOKENS = 4096
# Larger chunks are computed once, alone and without a context: they take the time, and the profile
# has run the largest in its other forms.
_LARGE_CHUNK_TOKENS = 512
# Tokens behind a deep context, so that the kernels over gathered contexts run for any number of
# query heads in a group.
_GATHERED_CHUNKS = (512, 1024, 2048)
_DEEP_CONTEXT_TOKENS = 16_384


def warm_up(
    runner: Runner,
    model: CausalLM,
    kv_caches: list[torch.Tensor],
    sizes: WorkerSizes,
    progress: Progress,
) -> None:
    """Runs the synthetic steps, then empties what they wrote.

    Args:
        runner: Takes the steps.
        model: The runner's.
        kv_caches: The runner's caches: per layer [num_blocks, 2, num_kv_heads, block_size,
            head_dim], of recurrent layers their rows' states.
        sizes: Bounds of the steps.
        progress: Called with (phase, done, total, unit).
    """
    blocks = block_caches(kv_caches)[0]
    pool = BlockPool(min(blocks.shape[0], _WARM_UP_BLOCKS), sizes.block_size)
    compiles = uses_triton(blocks)
    shallow = list(gpu_steps(sizes, pool)) if compiles else []
    whole = list(whole_steps(sizes, pool) if compiles else short_steps(sizes, pool))

    loaded = compilation_count()

    def on_step(done: int) -> None:
        kernels = f"{compilation_count() - loaded:,} kernels compiled or read" if compiles else ""
        progress("warm_up", done, len(shallow) + len(whole), "steps", kernels)

    if shallow:
        with model.representative_layers():
            run_steps(runner, shallow, on_step, model.vocab_size)
    run_steps(runner, whole, lambda done: on_step(len(shallow) + done), model.vocab_size)
    clear_blocks(kv_caches, pool.num_blocks)


def short_steps(sizes: WorkerSizes, pool: BlockPool) -> Iterator[StepPlan]:
    """A prompt that leaves one slot of its block, and the token that fills it."""
    length = min(pool.block_size - 1, max(sizes.max_model_len - 1, 1), sizes.max_num_batched_tokens)
    prompt = make_step([Chunk(0, length)], pool, SamplingKind.EVERYTHING)
    yield prompt
    if sizes.max_model_len > 1:
        yield next_step(prompt, pool)
    yield release_step(1)
    yield from drafted_steps(sizes, pool, 1, SamplingKind.EVERYTHING)


def drafted_steps(
    sizes: WorkerSizes, pool: BlockPool, rows: int, sampling: SamplingKind, most: int | None = None
) -> Iterator[StepPlan]:
    """Rows of a short prompt with as many drafts behind it as there may be; none without drafts.

    They are `most` at most, unless that is None. Where a draft model drafts, a step without drafts
    comes between, which it has to catch up with.
    """
    num_drafts = min(sizes.num_drafts, sizes.max_num_batched_tokens // rows - 1)
    num_drafts = num_drafts if most is None else min(num_drafts, most)
    if num_drafts < 1 or sizes.max_model_len < 2 + num_drafts:
        return
    prompt = make_step([Chunk(0, 1)] * rows, pool, sampling)
    yield prompt
    if sizes.speculate == "draft" and sizes.max_model_len >= 3 + num_drafts:
        prompt = next_step(prompt, pool)
        yield prompt
    yield drafted_step(prompt, num_drafts)
    yield release_step(rows)


def probe_steps(sizes: WorkerSizes, num_blocks: int) -> list[StepPlan]:
    """Yields steps that succeed on any worker that works.

    These are a prompt of a block with every sampling option, and a token after it.

    They leave no row taken.
    """
    return list(short_steps(sizes, BlockPool(min(num_blocks, _WARM_UP_BLOCKS), sizes.block_size)))


def gpu_steps(sizes: WorkerSizes, pool: BlockPool) -> Iterator[StepPlan]:
    """Yields steps of all classes, and every kind of draw for one row and for all.

    The classes are decodes by rows, chunks by tokens, chunks behind a context, and both mixed.
    """
    yield from short_steps(sizes, pool)
    most_rows = sizes.max_rows
    for rows in _sizes(most_rows):
        yield from _taken(_decodes(rows, sizes.max_model_len), pool, SamplingKind.GREEDY)
    for count in _sizes(min(sizes.max_num_batched_tokens, sizes.max_model_len)):
        yield from _taken([Chunk(0, count)], pool, SamplingKind.RANDOM)
        if count > _LARGE_CHUNK_TOKENS:
            continue
        yield from _taken(
            [Chunk(min(sizes.max_model_len - count, _CHUNK_CONTEXT_TOKENS), count)], pool, SamplingKind.RANDOM
        )
        rows = min(most_rows - 1, sizes.max_num_batched_tokens - count)
        yield from _taken([Chunk(0, count), *_decodes(rows, sizes.max_model_len)], pool, SamplingKind.GREEDY)
        yield make_step([Chunk(0, count)], pool, SamplingKind.GREEDY, draws=False)
        yield release_step(1)
    # Products know a step's tokens alone: short sequences make up those numbers together.
    for count in _sizes(min(sizes.max_num_batched_tokens, most_rows * sizes.max_model_len, max(WARM_ROWS))):
        if count > sizes.max_model_len:
            yield from _taken(prompts(count, sizes.max_model_len), pool, SamplingKind.GREEDY)
    # An output layer of few bits knows how many rows report prompts, which may be more than ever
    # draw.
    for count in WARM_ROWS:
        if most_rows < count <= sizes.max_num_batched_tokens:
            yield from _taken(prompts(count, sizes.max_model_len)[:most_rows], pool, SamplingKind.EVERYTHING)
    # Contexts are gathered for some of these, by the query heads of a group.
    for count in _GATHERED_CHUNKS:
        if count <= min(sizes.max_num_batched_tokens, sizes.max_model_len):
            yield from _taken(
                [Chunk(min(sizes.max_model_len - count, _DEEP_CONTEXT_TOKENS), count)], pool, SamplingKind.RANDOM
            )
    share = min(sizes.max_num_batched_tokens // most_rows, sizes.max_model_len)
    yield from _taken([Chunk(0, share)] * most_rows, pool, SamplingKind.GREEDY)
    for rows in (1, most_rows):
        for sampling in SamplingKind:
            yield from _taken([Chunk(0, 1)] * rows, pool, sampling)
            yield from drafted_steps(sizes, pool, rows, sampling)
    # Attention has kernels for some numbers of a row's query tokens, which it deals out to several
    # programs where a step has few.
    for num_drafts in sorted({min(size - 1, sizes.num_drafts) for size in QUERY_LEN_CLASSES}):
        for rows in (1, MOST_TOKENS_IN_PARTS // (1 + num_drafts) + 1):
            if rows < most_rows:
                yield from drafted_steps(sizes, pool, rows, SamplingKind.GREEDY, num_drafts)
    if pool.num_blocks > 1:
        yield copying_step()


def whole_steps(sizes: WorkerSizes, pool: BlockPool) -> Iterator[StepPlan]:
    """Yields a few steps that go through all layers.

    They are one decode and as many as there may be, a short prompt, a chunk behind a context, and
    one beside decodes.
    """
    yield from short_steps(sizes, pool)
    most_rows = sizes.max_rows
    yield from _taken(_decodes(most_rows, sizes.max_model_len), pool, SamplingKind.GREEDY)
    count = min(sizes.max_num_batched_tokens, sizes.max_model_len, max(WARM_ROWS))
    yield from _taken(
        [Chunk(min(sizes.max_model_len - count, _CHUNK_CONTEXT_TOKENS), count)], pool, SamplingKind.RANDOM
    )
    beside = min(count, sizes.max_num_batched_tokens - (most_rows - 1))
    yield from _taken([Chunk(0, beside), *_decodes(most_rows - 1, sizes.max_model_len)], pool, SamplingKind.GREEDY)
    yield from drafted_steps(sizes, pool, most_rows, SamplingKind.GREEDY)


def _decodes(rows: int, max_model_len: int) -> list[Chunk]:
    """Rows with one token each behind a context."""
    return [Chunk(min(max_model_len - 1, _CONTEXT_TOKENS // rows), 1)] * rows if rows else []


def _taken(chunks: list[Chunk], pool: BlockPool, sampling: SamplingKind) -> Iterator[StepPlan]:
    """A step, and the rows given back."""
    yield make_step(chunks, pool, sampling)
    yield release_step(len(chunks))


def _sizes(most: int) -> list[int]:
    """Sizes up to `most` at which launch rules change.

    These are 1 to 9, every power of two and the size after, those that products of few bits ask
    for, and the largest.
    """
    powers = [2**power for power in range(4, 21)]
    sizes = {*range(1, 10), *WARM_ROWS, *powers, *(power + 1 for power in powers), most}
    return sorted(size for size in sizes if size <= most)
