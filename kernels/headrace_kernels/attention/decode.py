"""Attention of rows with few query tokens over long contexts, bound by reading the cache once.

A program reads one *split* of one row's context for one key/value head; all query heads of the
group and all query tokens stand as rows of one tile, so that every key is read once. A row with one
split is finished then. Where several programs share a row, each leaves a partial result, and the
last one to finish merges them (`attention.merge`). Which program does what comes from
`attention.plan.plan_decode`; grids depend on the sizes of the columns only, so that all of it runs
in captured graphs.

Who is last: `DecodeScratch.done` has a counter for each row and key/value head. A program stores
its partial result, then adds 1, and the one that finds the others' count merges and sets the
counter back to 0, as the next layer and the next replay expect it. The addition releases what the
program's threads stored and acquires what the others' released. Nothing can leave a counter behind:
a launch that is refused runs no program, and a kernel that dies on the way (a bad address, a reset)
takes the CUDA context with it, scratch included; the worker's process ends and a new one allocates
zeros.

In a step of decodes alone the kernel also norms and rotates the new tokens' heads and writes their
keys and values (`raw`): no kernel before it then. Every split of a row rotates the row's query for
itself. The new token's key belongs to the last split that has any context: that program rotates it,
stores it, and takes it into its softmax from registers, so that nobody reads what this launch
writes.
"""

from __future__ import annotations

import triton
from torch import Tensor

from headrace_kernels import card
from headrace_kernels.attention.decode_kernels import decode_kernel, raw_decode_kernel
from headrace_kernels.attention.merge import merged_at_once
from headrace_kernels.attention.plan import FEW_DECODES, TRANSPOSED_ROWS, query_part
from headrace_kernels.attention.quantized_kv import memory_of
from headrace_kernels.attention.rope_kv import RawHeads, heads_for_norm
from headrace_kernels.attention.step import DecodeWork, PagedAttentionStep
from headrace_kernels.attention.tiles import (
    LOG2_E,
    AttentionShape,
    Launch,
    SplitShape,
    attention_shape,
    pipeline_stages,
)
from headrace_kernels.attention.transposed import takes_transposed, transposed_rule


def decode_attention(
    query: Tensor,
    kv_cache: Tensor,
    step: PagedAttentionStep,
    work: DecodeWork,
    scale: float,
    sliding_window: int | None,
    output: Tensor,
    *,
    sinks: Tensor | None = None,
    raw: RawHeads | None = None,
    launch: Launch | None = None,
    at_once: int | None = None,
) -> None:
    """Fills the rows of `output` that belong to the work's entries.

    Arguments as `attention.paged.paged_attention`, except that query heads lie side by side.

    Args:
        query: [num_tokens, num_heads, head_dim], of which the work's entries are read; with
            `raw`, its `qkv`.
        kv_cache: Changed with `raw`, see there.
        step: The step.
        work: Its entries with few query tokens.
        scale: Multiplies the scores.
        sliding_window: Tokens that a token sees.
        output: [num_tokens, num_heads, head_dim] contiguous.
        sinks: [num_heads] logits in the denominators; the first split of a row counts them.
        raw: Heads as the projection gave them. They are normed and rotated here, and keys and
            values are written to `step.slot_mapping`; the work must be of one query token an entry.
        launch: Replaces the rule, for measurements.
        at_once: Partial results that are merged at a time; replaces the rule, for measurements.
    """
    memory = memory_of(kv_cache)
    shape = attention_shape(output.shape[1], output.shape[2], kv_cache, memory)
    assert raw is None or work.max_query_len == 1, work.max_query_len
    launch, split = _split_shape(shape, work.max_query_len, query, sliding_window is not None, raw, launch, at_once)
    scratch = work.scratch
    columns = (work.splits, step.query_start_loc, step.seq_lens, step.rows, step.block_tables)
    strides = (query.stride(0), step.block_tables.stride(0))
    work_args = (memory.numbers, memory.scales, output, scratch.partial, scratch.lse, scratch.done, *columns, *strides)
    scores = (scale * LOG2_E, sliding_window or 0, sinks)
    constants = {
        "SHAPE": shape,
        "SPLIT": split,
        "num_warps": launch.warps,
        "maxnreg": launch.registers,
        "launch_pdl": split.is_early,
    }
    grid = (shape.num_kv_heads * triton.cdiv(split.query_len, split.part_len), work.splits.shape[0])
    if raw is None:
        decode_kernel[grid](query, *work_args, *scores, **constants)
    else:
        heads = (query, raw.rotations, raw.query_norm, raw.key_norm, step.slot_mapping)
        raw_decode_kernel[grid](*heads, *work_args, *scores, raw.eps, **constants)


def _split_shape(
    shape: AttentionShape,
    query_len: int,
    query: Tensor,
    is_windowed: bool,
    raw: RawHeads | None,
    launch: Launch | None,
    at_once: int | None,
) -> tuple[Launch, SplitShape]:
    """How a decode kernel is launched and compiled for entries of at most `query_len` tokens."""
    group = shape.num_heads // shape.num_kv_heads
    part_len = query_part(query_len, group, query.shape[0], shape.kind != "")
    query_rows = part_len * group
    is_transposed = takes_transposed(shape.kind, query_rows, shape.padded_dim, query.dtype)
    rows = TRANSPOSED_ROWS if is_transposed else max(16, triton.next_power_of_2(query_rows))
    is_normed = raw is not None and raw.query_norm is not None
    if launch is None:
        dim = shape.padded_dim
        are_few = part_len < query_len or (is_normed and query.shape[0] <= FEW_DECODES)
        launch = transposed_rule(dim, query.device) if is_transposed else _launch_rule(rows, dim, query, are_few)
    split = SplitShape(
        query_len=query_len,
        part_len=part_len,
        rows=rows,
        is_transposed=is_transposed,
        tile=launch.tile,
        stages=launch.stages,
        is_windowed=is_windowed,
        merged_rows=triton.next_power_of_2(query_rows),
        at_once=at_once or merged_at_once(query_rows, shape.padded_dim, launch.warps),
        rotary_dim=2 * raw.rotations.shape[2] if raw is not None else 0,
        interleaved=raw is not None and raw.interleaved,
        norm_heads=heads_for_norm(shape.head_dim // 2, launch.warps) if is_normed else 0,
        is_early=card.launches_early(query.device),
    )
    return launch, split


def _launch_rule(rows: int, dim: int, query: Tensor, are_few: bool) -> Launch:
    """Keys per tile, warps and stages of a split that no rule of `transposed` takes.

    are_few: The card has few programs, and each computes long before or behind its keys (heads with
    norms, drafts whose results are merged). No other program fills that time, so two warps become
    four: a step of one row behind 640 tokens takes an H200 2,305 us so and 2,411 with two in
    Qwen3-30B-A3B, with four drafts 4,254 and 4,370 in an 8B Llama; without norms and drafts that
    takes 4,377 us behind 8,000 tokens, and 4,274 with two (docs/experiments.md, "decode attention
    first, then the next kernel's weights").

    The sizes for 16 rows and heads of 128 were measured on an H200 (docs/experiments.md); the rest
    keeps registers and shared memory within bounds, and is not measured yet.

    A quantized cache has the launch of its model's type: registers hold its numbers in that type.
    """
    row_bytes = dim * query.element_size()
    tile = 64 if row_bytes <= 256 else 32 if row_bytes <= 512 else 16
    warps = 2 if rows <= 16 and rows * row_bytes <= 8192 else 4 if rows * row_bytes <= 16384 else 8
    if are_few and warps == 2:
        warps = 4
    return Launch(tile, warps, pipeline_stages(query.device, 0, 2 * tile * row_bytes, 3))
