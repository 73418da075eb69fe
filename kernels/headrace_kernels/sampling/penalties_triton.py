"""`penalties.penalize_rows` as one Triton kernel: it touches only rows with penalties, once."""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace_kernels.sampling import parameters as columns

_REPETITION = tl.constexpr(columns.REPETITION)
_PRESENCE = tl.constexpr(columns.PRESENCE)
_FREQUENCY = tl.constexpr(columns.FREQUENCY)
_NUM_COLUMNS = tl.constexpr(columns.NUM_COLUMNS)

# 8 tokens per thread; not measured yet.
_BLOCK = 1024
_WARPS = 4
# Parts of one packed column, so their addresses have any alignment: nothing may be compiled for it.
_INDEX_POINTERS = ["samples", "slots", "rows", "drafts"]


@triton.jit(do_not_specialize=_INDEX_POINTERS, do_not_specialize_on_alignment=_INDEX_POINTERS)
def penalize_rows_kernel(
    logits,
    samples,
    slots,
    rows,
    prompt_masks,
    output_counts,
    parameters,
    drafts,
    VOCAB: tl.constexpr,
    NUM_DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (block, penalized row).

    Arguments as those of `penalties.penalize_rows_reference`, all matrices contiguous.
    """
    block, entry = tl.program_id(0), tl.program_id(1)
    parameters += tl.load(rows + entry).to(tl.int64) * _NUM_COLUMNS
    repetition = tl.load(parameters + _REPETITION).to(tl.float32, bitcast=True)
    presence = tl.load(parameters + _PRESENCE).to(tl.float32, bitcast=True)
    frequency = tl.load(parameters + _FREQUENCY).to(tl.float32, bitcast=True)
    offs_token = block * BLOCK + tl.arange(0, BLOCK)
    mask_token = offs_token < VOCAB
    target = logits + tl.load(samples + entry).to(tl.int64) * VOCAB + offs_token
    offs_slot = tl.load(slots + entry).to(tl.int64) * VOCAB + offs_token
    values = tl.load(target, mask=mask_token, other=0.0)
    in_prompt = tl.load(prompt_masks + offs_slot, mask=mask_token, other=0) != 0
    counts = tl.load(output_counts + offs_slot, mask=mask_token, other=0)
    for index in tl.static_range(NUM_DRAFTS):
        counts += (offs_token == tl.load(drafts + entry * NUM_DRAFTS + index)).to(tl.int32)
    penalized = tl.where(values > 0, values / repetition, values * repetition)
    values = tl.where(in_prompt | (counts > 0), penalized, values)
    values -= tl.where(counts > 0, presence, 0.0)
    values -= frequency * counts.to(tl.float32)
    tl.store(target, values, mask=mask_token)


def penalize_rows_triton(
    logits: torch.Tensor,
    samples: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    prompt_masks: torch.Tensor,
    output_counts: torch.Tensor,
    parameters: torch.Tensor,
    drafts: torch.Tensor | None = None,
) -> None:
    """`penalize_rows_reference`, with divisions that may differ in their last places."""
    assert logits.is_contiguous() and logits.dtype == torch.float32
    vocab_size = logits.shape[1]
    penalize_rows_kernel[triton.cdiv(vocab_size, _BLOCK), samples.shape[0]](
        logits,
        samples,
        slots,
        rows,
        prompt_masks,
        output_counts,
        parameters,
        # Not read where there are none.
        samples if drafts is None else drafts,
        VOCAB=vocab_size,
        NUM_DRAFTS=0 if drafts is None else drafts.shape[1],
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
