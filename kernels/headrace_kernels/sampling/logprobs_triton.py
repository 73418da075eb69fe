"""`logprobs.token_logprobs` as two Triton kernels, for any number of top tokens.

They need neither a sort nor a look from the host.

    logits --(row, block)--> per block: its highest logit, its mass, its first token, how many come
    before the sampled one --(row)--> log probabilities, rank, top tokens

The top tokens come one by one: the best of the blocks' first tokens is the next of the row, and
only its block is searched again, for the first token behind it.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace_kernels.sampling.ordering_triton import KEY_SHIFTS, LOWEST_KEY, best_of, comes_before, ordered_keys

# 16 tokens per thread; not measured yet.
_BLOCK = 2048
_WARPS = 4


@triton.jit
def _load(logits, offs_token, VOCAB: tl.constexpr):
    """float32 logits. NaN sorts as +inf: such a row means nothing, but its ids must be ids."""
    values = tl.load(logits + offs_token, mask=offs_token < VOCAB, other=-float("inf")).to(tl.float32)
    return tl.where(values == values, values, float("inf"))


@triton.jit
def summarize_rows_kernel(
    logits,
    tokens,
    peaks,
    masses,
    firsts,
    counts,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
):
    """Program (block, row).

    Args:
        logits: [num_rows, VOCAB].
        tokens: int64 [num_rows].
        peaks: float32 [num_rows, NUM_SLOTS], out.
        masses: float32, likewise: the block's sum of exp(logit - highest).
        firsts: int32, likewise: its most likely token.
        counts: int32, likewise: how many of its tokens come before the sampled one.
        VOCAB: Tokens.
        BLOCK: Tokens of a block.
        NUM_SLOTS: Blocks of a row, rounded up.
        KEY_SHIFT: Low bits that are equal in all keys (`ordering_triton`).
    """
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    logits += row * VOCAB
    offs_token = block * BLOCK + tl.arange(0, BLOCK)
    values = _load(logits, offs_token, VOCAB)
    token = tl.load(tokens + row).to(tl.int32)
    token_key = ordered_keys(tl.load(logits + token).to(tl.float32), KEY_SHIFT)
    peak, first = best_of(values, offs_token)
    origin = tl.where(peak == -float("inf"), 0.0, peak)
    before = comes_before(ordered_keys(values, KEY_SHIFT), offs_token, token_key, token) & (offs_token < VOCAB)
    slot = row * NUM_SLOTS + block
    tl.store(peaks + slot, peak)
    tl.store(masses + slot, tl.sum(tl.exp(values - origin), axis=0))
    tl.store(firsts + slot, first)
    tl.store(counts + slot, tl.sum(before.to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["num_top"])
def report_rows_kernel(
    logits,
    tokens,
    peaks,
    masses,
    firsts,
    counts,
    sampled,
    ranks,
    top_ids,
    top,
    num_top,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
):
    """Program (row).

    Args:
        logits: [num_rows, VOCAB].
        tokens: int64 [num_rows].
        peaks: float32 [num_rows, NUM_SLOTS], the first kernel's.
        masses: float32, likewise.
        firsts: int32, likewise.
        counts: int32, likewise.
        sampled: float32 [num_rows], out.
        ranks: int32 [num_rows], out.
        top_ids: int64 [num_rows, num_top], out.
        top: float32 [num_rows, num_top], out.
        num_top: Top tokens of each row, at most VOCAB.
        VOCAB: Tokens.
        BLOCK: Tokens of a block.
        NUM_BLOCKS: Blocks of a row.
        NUM_SLOTS: Number of entries, rounded up to a power of two.
        KEY_SHIFT: Low bits that are equal in all keys (`ordering_triton`).
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * VOCAB
    offs_slot = tl.arange(0, NUM_SLOTS)
    mask_slot = offs_slot < NUM_BLOCKS
    slots = row * NUM_SLOTS + offs_slot
    peak = tl.load(peaks + slots, mask=mask_slot, other=-float("inf"))
    first = tl.load(firsts + slots, mask=mask_slot, other=0)
    mass = tl.load(masses + slots, mask=mask_slot, other=0.0)
    row_peak = tl.max(peak, axis=0)
    log_mass = tl.log(tl.sum(mass * tl.exp(peak - row_peak), axis=0))
    token = tl.load(tokens + row)
    tl.store(sampled + row, tl.load(logits + token).to(tl.float32) - row_peak - log_mass)
    tl.store(ranks + row, 1 + tl.sum(tl.load(counts + slots, mask=mask_slot, other=0), axis=0))
    first_keys = tl.where(mask_slot, ordered_keys(peak, KEY_SHIFT), LOWEST_KEY)
    for place in range(num_top):
        key, id = best_of(first_keys, first)
        tl.store(top_ids + row * num_top + place, id.to(tl.int64))
        tl.store(top + row * num_top + place, tl.load(logits + id).to(tl.float32) - row_peak - log_mass)
        # The first token of the same block behind this one.
        block = id // BLOCK
        offs_token = block * BLOCK + tl.arange(0, BLOCK)
        keys = ordered_keys(_load(logits, offs_token, VOCAB), KEY_SHIFT)
        is_behind = ((keys < key) | ((keys == key) & (offs_token > id))) & (offs_token < VOCAB)
        next_key, next_id = best_of(tl.where(is_behind, keys, LOWEST_KEY), offs_token)
        first_keys = tl.where(offs_slot == block, next_key, first_keys)
        first = tl.where(offs_slot == block, next_id, first)


def token_logprobs_triton(
    logits: torch.Tensor, tokens: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The fields of `token_logprobs_reference`'s result; sums may differ in their last places."""
    num_rows, vocab_size = logits.shape
    assert 0 <= num_top <= vocab_size
    logits, device = logits.contiguous(), logits.device
    num_blocks = triton.cdiv(vocab_size, _BLOCK)
    num_slots = triton.next_power_of_2(num_blocks)
    peaks, masses = torch.empty(2, num_rows, num_slots, dtype=torch.float32, device=device)
    firsts, counts = torch.empty(2, num_rows, num_slots, dtype=torch.int32, device=device)
    sampled = torch.empty(num_rows, dtype=torch.float32, device=device)
    ranks = torch.empty(num_rows, dtype=torch.int32, device=device)
    top_ids = torch.empty(num_rows, num_top, dtype=torch.int64, device=device)
    top = torch.empty(num_rows, num_top, dtype=torch.float32, device=device)
    sizes = {"VOCAB": vocab_size, "BLOCK": _BLOCK, "NUM_SLOTS": num_slots, "KEY_SHIFT": KEY_SHIFTS[logits.dtype]}
    inputs = (logits, tokens, peaks, masses, firsts, counts)
    summarize_rows_kernel[num_blocks, num_rows](*inputs, **sizes, num_warps=_WARPS)
    report_rows_kernel[(num_rows,)](
        *inputs, sampled, ranks, top_ids, top, num_top, **sizes, NUM_BLOCKS=num_blocks, num_warps=_WARPS
    )
    return sampled, ranks, top_ids, top
