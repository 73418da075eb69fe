"""Causal attention of a step's tokens over the paged KV cache.

Grouped-query heads and sliding windows are included.

Owns the choice of implementation, the specification (`paged_attention_reference`) and the CPU
path's description of a step (`AttentionMetadata`); the Triton kernels read a `PagedAttentionStep`.
A layer calls `rotate_write_attend` with what its projection gave; `paged_attention` is the part
after keys and values of the step's own tokens are in the cache.

What compiles, once for each kind of layer (with or without a window, sinks): `attention.decode`'s
kernel for each `DecodeWork.max_query_len` in use, and once more for steps of decodes alone, which
rotate and write heads themselves; `attention.prefill`'s one, `attention.gathered`'s two. Nothing
depends on batch sizes, lengths, the number of splits or tiles, or the window's width. So a step of
decodes alone, a decode per `max_query_len` beside a chunk and one beside a gathered chunk warm
everything up, and their columns may be all padding.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace_kernels.attention.cpu import GatherPlan, attend, plan_gathers
from headrace_kernels.attention.decode import decode_attention
from headrace_kernels.attention.gathered import gathered_attention
from headrace_kernels.attention.prefill import prefill_attention
from headrace_kernels.attention.quantized_kv import dequantized_blocks, memory_of
from headrace_kernels.attention.rope_kv import RawHeads, rope_and_write_kv
from headrace_kernels.attention.step import (
    DecodeScratch,
    DecodeWork,
    GatheredContext,
    GatherScratch,
    PagedAttentionStep,
    PrefillWork,
    ShareScratch,
)
from headrace_kernels.attention.tiles import heads_in_line
from headrace_kernels.triton_runtime import INTERPRETED

__all__ = [
    "AttentionMetadata",
    "DecodeScratch",
    "DecodeWork",
    "GatherScratch",
    "GatheredContext",
    "PagedAttentionStep",
    "PrefillWork",
    "RawHeads",
    "ShareScratch",
    "paged_attention",
    "paged_attention_reference",
    "rotate_write_attend",
]

_Int32Array = npt.NDArray[np.int32]


@dataclasses.dataclass(slots=True)
class AttentionMetadata:
    """Which tokens of a step belong to which row, and where each row's context lies.

    Rows are the entries of a step plan.

    Tensors are on the model's device. The numpy columns repeat two of them on the host, where
    decisions about grouping are made.
    """

    # [num_rows + 1] int32: row i has the tokens query_start_loc[i] up to query_start_loc[i + 1].
    query_start_loc: Tensor
    # [num_rows] int32: tokens of context, those of this step included.
    seq_lens: Tensor
    # [num_rows, max_blocks] int32; entries beyond a row's context are not read.
    block_tables: Tensor
    # [num_tokens] int64: where each token's key and value go; -1: nowhere.
    slot_mapping: Tensor
    # Tokens per block.
    block_size: int
    max_query_len: int
    max_seq_len: int
    # [num_rows] int32, each at least 1.
    query_lens_cpu: _Int32Array
    # [num_rows] int32.
    seq_lens_cpu: _Int32Array
    # [num_rows] int32: the rows of the batch that these are; None: only attention reads the step.
    rows: Tensor | None = None
    # [num_rows] int32: drafts at the end of each row's tokens; None: nobody drafts.
    num_drafts: Tensor | None = None
    # Made by the first layer that needs it, used by all others of the step.
    _plans: dict[tuple[int, int, int | None, bool], GatherPlan] = dataclasses.field(default_factory=dict, repr=False)

    def gather_plan(
        self, num_kv_heads: int, head_dim: int, sliding_window: int | None, has_sinks: bool = False
    ) -> GatherPlan:
        """How to collect the rows' keys and values for layers with these heads and this window."""
        key = (num_kv_heads, head_dim, sliding_window, has_sinks)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = plan_gathers(
                self.block_tables,
                self.query_lens_cpu,
                self.seq_lens_cpu,
                self.block_size,
                num_kv_heads,
                head_dim,
                sliding_window,
                has_sinks,
            )
        return plan


def paged_attention_reference(
    query: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Row by row in fp32 with a full matrix of scores. The specification; see `paged_attention`."""
    num_heads = query.shape[1]
    output = torch.empty_like(query)
    end = 0
    for row, (count, seq_len) in enumerate(
        zip(metadata.query_lens_cpu.tolist(), metadata.seq_lens_cpu.tolist(), strict=True)
    ):
        start, end = end, end + count
        num_blocks = -(-seq_len // metadata.block_size)
        blocks = dequantized_blocks(kv_cache, metadata.block_tables[row, :num_blocks].long())
        # [2, num_kv_heads, seq_len, head_dim], each key/value head repeated for its group of query
        # heads.
        context = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :seq_len].float()
        key, value = context.repeat_interleave(num_heads // context.shape[1], dim=1)
        scores = torch.einsum("qhd,hkd->hqk", query[start:end].float(), key) * scale
        scores.masked_fill_(~_visible(count, seq_len, sliding_window, query.device), float("-inf"))
        output[start:end] = torch.einsum("hqk,hkd->qhd", _probabilities(scores, sinks), value).to(query.dtype)
    return output


def _probabilities(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax of scores [num_heads, count, seq_len], with each head's sink in the denominator."""
    if sinks is None:
        return scores.softmax(dim=-1)
    column = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
    return torch.cat((scores, column), dim=-1).softmax(dim=-1)[:, :, :-1]


def _visible(count: int, seq_len: int, sliding_window: int | None, device: torch.device) -> Tensor:
    """[count, seq_len] whether each of the last `count` tokens sees each token of the context."""
    position = torch.arange(seq_len - count, seq_len, device=device)[:, None]
    other = torch.arange(seq_len, device=device)
    visible = other <= position
    return visible if sliding_window is None else visible & (other > position - sliding_window)


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata | PagedAttentionStep,
    scale: float,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of every token of the step over its row's context up to itself.

    Args:
        query: [num_tokens, num_heads, head_dim], rotated; may be a view with strides.
        kv_cache: [num_blocks, 2, num_kv_heads, block_size, head_dim], in the type of query or
            quantized (`quantized_kv`); num_kv_heads divides num_heads, and query head h reads
            key/value head h // (num_heads / num_kv_heads). Slots that a row has not written may
            hold anything, NaN included.
        metadata: The step. A `PagedAttentionStep` runs the Triton kernels, an `AttentionMetadata`
            PyTorch's attention over gathered blocks.
        scale: Multiplies the scores before the softmax, which is fp32. Positive.
        sliding_window: Tokens that a token sees, itself included; None: all before it.
        sinks: [num_heads] finite logits, each of which joins the denominator of its head's softmax
            as a score whose value is 0; None: there are none.

    Returns:
        [num_tokens, num_heads, head_dim] contiguous, in the type of query. Tokens that no entry of
        a `PagedAttentionStep` owns (padding) are not written.

    Raises:
        ValueError: The kernels were asked for what they cannot read: tensors on a CPU, or a cache
            that is neither contiguous nor one of `quantized_kv`.
    """
    if isinstance(metadata, AttentionMetadata):
        plan = metadata.gather_plan(kv_cache.shape[2], kv_cache.shape[4], sliding_window, sinks is not None)
        return attend(query, kv_cache, plan, scale, sinks)
    _refuse_what_kernels_cannot_read(query, kv_cache)
    return _run_kernels(heads_in_line(query), kv_cache, metadata, scale, sliding_window, sinks)


def rotate_write_attend(
    raw: RawHeads,
    kv_cache: Tensor,
    metadata: AttentionMetadata | PagedAttentionStep,
    scale: float,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Norms and rotates heads, writes keys and values, and attends: all between two projections.

    Args:
        raw: The projection's heads and how they are normed and rotated; see
            `rope_kv.rope_and_write_kv`.
        kv_cache: The cache of `paged_attention`. Changed in place: keys and values go to the slots
            of `metadata.slot_mapping`, each to the place that follows its row's context.
        metadata: The step (`paged_attention`).
        scale: Multiplies the scores (`paged_attention`).
        sliding_window: Tokens that a token sees (`paged_attention`).
        sinks: Logits in the denominators (`paged_attention`).

    Returns:
        [num_tokens, num_heads, head_dim], see `paged_attention`.

    Raises:
        ValueError: See `paged_attention`.
    """
    if isinstance(metadata, PagedAttentionStep) and _is_decodes_alone(metadata):
        # One row of 640 tokens takes 8.1 us a layer on an H200, and 9.4 where another kernel
        # rotates and writes.
        return _attend_raw(raw, kv_cache, metadata, scale, sliding_window, sinks)
    slots, norms = metadata.slot_mapping, (raw.query_norm, raw.key_norm, raw.eps)
    query = rope_and_write_kv(raw.qkv, raw.rotations, kv_cache, slots, raw.num_heads, *norms, raw.interleaved)
    return paged_attention(query, kv_cache, metadata, scale, sliding_window, sinks)


def _is_decodes_alone(step: PagedAttentionStep) -> bool:
    """Whether every entry has one token.

    Then there are neither longer entries nor a class of lengths that would take some.
    """
    return step.prefill is None and step.decode is not None and step.decode.max_query_len == 1


def _attend_raw(
    raw: RawHeads,
    kv_cache: Tensor,
    step: PagedAttentionStep,
    scale: float,
    sliding_window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    _refuse_what_kernels_cannot_read(raw.qkv, kv_cache)
    assert step.decode is not None
    qkv = raw.qkv.contiguous()
    output = torch.empty(qkv.shape[0], raw.num_heads, qkv.shape[2], dtype=qkv.dtype, device=qkv.device)
    decode_attention(qkv, kv_cache, step, step.decode, scale, sliding_window, output, sinks=sinks, raw=raw)
    return output


def _refuse_what_kernels_cannot_read(query: Tensor, kv_cache: Tensor) -> None:
    if not (query.is_cuda or INTERPRETED):
        raise ValueError(f"a PagedAttentionStep needs a CUDA device, and query is on {query.device}")
    memory_of(kv_cache)


def _run_kernels(
    query: Tensor,
    kv_cache: Tensor,
    step: PagedAttentionStep,
    scale: float,
    sliding_window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if step.decode is not None:
        decode_attention(query, kv_cache, step, step.decode, scale, sliding_window, output, sinks=sinks)
    if step.prefill is None:
        return output
    tiles, gathered = step.prefill.tiles, step.prefill.gathered
    if gathered is None:
        prefill_attention(query, kv_cache, step, step.prefill, scale, sliding_window, output, sinks)
    else:
        gathered_attention(query, kv_cache, step, tiles, gathered, scale, sliding_window, output, sinks)
    return output
