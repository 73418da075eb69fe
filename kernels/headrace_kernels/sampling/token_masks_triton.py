"""`token_masks.mask_rows` as one Triton kernel: it touches only rows with a mask, once."""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

# 8 tokens per thread; not measured yet.
_BLOCK = 1024
_WARPS = 4
# Parts of packed columns, so their addresses have any alignment: nothing may be compiled for it.
_COLUMN_POINTERS = ["samples", "masks"]


@triton.jit(do_not_specialize=_COLUMN_POINTERS, do_not_specialize_on_alignment=_COLUMN_POINTERS)
def mask_rows_kernel(logits, samples, masks, VOCAB: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """Program (block, masked row).

    Arguments as those of `token_masks.mask_rows_reference`, all matrices contiguous. WORDS is the
    length of a mask.
    """
    block, entry = tl.program_id(0), tl.program_id(1)
    offs_token = block * BLOCK + tl.arange(0, BLOCK)
    mask_token = offs_token < VOCAB
    words = tl.load(masks + entry.to(tl.int64) * WORDS + offs_token // 32, mask=mask_token, other=0)
    is_banned = (words >> (offs_token % 32) & 1) == 0
    target = logits + tl.load(samples + entry).to(tl.int64) * VOCAB + offs_token
    # Tokens that may be drawn are neither read nor written.
    tl.store(target, float("-inf"), mask=mask_token & is_banned)


def mask_rows_triton(logits: torch.Tensor, samples: torch.Tensor, masks: torch.Tensor) -> None:
    """`mask_rows_reference`, exactly."""
    assert logits.is_contiguous() and logits.dtype == torch.float32
    assert masks.is_contiguous() and masks.dtype == torch.int32
    vocab_size = logits.shape[1]
    mask_rows_kernel[triton.cdiv(vocab_size, _BLOCK), samples.shape[0]](
        logits, samples, masks, VOCAB=vocab_size, WORDS=masks.shape[1], BLOCK=_BLOCK, num_warps=_WARPS
    )
