"""Linear attention of entries of one token in Triton: all between the projections in one launch.

A program has one value head of one entry, with its whole matrix in registers, which is read and
written once. It convolves the head's value and the key head's query and key for itself, and norms
and gates the output, for which it needs all of it. Value heads that share a query and a key each
convolve these; the first of them keeps their inputs, in a place that no other of this step reads
(`convolution`). Numbers are rounded where the operations one by one round them.

    c = silu(convolution);  S <- exp(g) S + k u';  out = norm(S' q) * silu(gate)

with u = beta (v - exp(g) S' k). What S' q is behind the update, exp(g) S' q + (k' q) u, takes sums
over what was read, as u does, so that both are summed at once.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from headrace_kernels import card
from headrace_kernels.early_launch import grid_before_is_done, grid_behind_may_start
from headrace_kernels.recurrence.gated_delta_kernels import inverse_length, log_of_decay
from headrace_kernels.rms_norm import scaled_by_rms

# Elements of the largest matrix that a program holds, 128 for each thread of its warps.
_MOST_ELEMENTS = 128 * 128
# For 256 rows of Qwen3.5 9B on an H200 4 warps took 316 us, 8 370 and 16 654; for one row 7.3, 9.1
# and 11.0 (docs/experiments.md, "prompts by chunks and decodes in one launch").
_NUM_WARPS = 4


def takes_decodes(heads) -> bool:
    """Whether a head's matrix fits into a program's registers."""
    return bool(triton.next_power_of_2(heads.key_dim) * triton.next_power_of_2(heads.value_dim) <= _MOST_ELEMENTS)


@triton.jit
def _convolved(
    inputs, weight, row_tails, channels, mask, keeps, position, KERNEL: tl.constexpr, TAPS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Returns silu of a token's convolution in some channels, rounded to the inputs' type, in fp32.

    With `keeps` the token's inputs are kept for later ones. All inputs that a channel sees are one
    tile [channels, TAPS]: as a column each, the compiler has every thread load and convolve all
    channels that it multiplies by later, which takes all of its registers.
    """
    channels, taps = channels[:, None], tl.arange(0, TAPS)[None, :]
    seen = position - (KERNEL - 1) + taps
    is_own, is_kept = taps == KERNEL - 1, (taps < KERNEL - 1) & (seen >= 0)
    own = tl.load(inputs + channels + 0 * taps, mask=mask[:, None] & is_own, other=0.0)
    places = row_tails + (seen + KERNEL) % KERNEL * CHANNELS + channels
    kept = tl.load(places, mask=mask[:, None] & is_kept, other=0.0)
    factors = tl.load(weight + channels * KERNEL + taps, mask=mask[:, None] & (taps < KERNEL), other=0.0)
    total = tl.sum((own.to(tl.float32) + kept) * factors.to(tl.float32), axis=1)
    tl.store(places, own.to(tl.float32), mask=mask[:, None] & is_own & keeps)
    return (total / (1.0 + tl.exp(-total))).to(inputs.dtype.element_ty).to(tl.float32)


@triton.jit(do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "rows"])
def _decode_kernel(
    mixed, gate, correction, decay, weight, log_decay, decay_bias, norm, matrices, tails, out,
    query_start_loc, seq_lens, rows,
    mixed_stride, gate_stride, correction_stride, decay_stride, row_stride, tail_stride, length_eps, norm_eps,
    HEADS: tl.constexpr, KERNEL: tl.constexpr, TAPS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        grid_behind_may_start()
        grid_before_is_done()
    KEY_HEADS: tl.constexpr = HEADS.num_key_heads
    VALUE_HEADS: tl.constexpr = HEADS.num_value_heads
    KEY_DIM: tl.constexpr = HEADS.key_dim
    VALUE_DIM: tl.constexpr = HEADS.value_dim
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
    head, entry = tl.program_id(0), tl.program_id(1)
    token = tl.load(query_start_loc + entry).to(tl.int64)
    if tl.load(query_start_loc + entry + 1) == token + 1:
        offs_k, offs_v = tl.arange(0, KEYS), tl.arange(0, VALUES)
        mask_k, mask_v = offs_k < KEY_DIM, offs_v < VALUE_DIM
        position, row = tl.load(seq_lens + entry) - 1, tl.load(rows + entry).to(tl.int64)
        # Of S, which is empty where the entry begins its sequence: what lies there may be anything.
        places = head * (KEY_DIM * VALUE_DIM) + offs_k[:, None] * VALUE_DIM + offs_v[None, :]
        state_places, mask = matrices + row * row_stride + places, mask_k[:, None] & mask_v[None, :]
        inputs, row_tails, key_head = mixed + token * mixed_stride, tails + row * tail_stride, head // GROUP
        keys, is_first = key_head * KEY_DIM + offs_k, head % GROUP == 0
        query = _convolved(inputs, weight, row_tails, keys, mask_k, is_first, position, KERNEL, TAPS, CHANNELS)
        keys += KEY_HEADS * KEY_DIM
        key = _convolved(inputs, weight, row_tails, keys, mask_k, is_first, position, KERNEL, TAPS, CHANNELS)
        values = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + offs_v
        value = _convolved(inputs, weight, row_tails, values, mask_v, True, position, KERNEL, TAPS, CHANNELS)
        # Behind the convolutions: what follows is laid out as the last large load is.
        state = tl.load(state_places, mask=mask & (position > 0), other=0.0)
        query = query * inverse_length(query, length_eps, 0) * (KEY_DIM**-0.5)
        key = key * inverse_length(key, length_eps, 0)
        beta = tl.sigmoid(tl.load(correction + token * correction_stride + head).to(tl.float32))
        raw = tl.load(decay + token * decay_stride + head).to(tl.float32) + tl.load(decay_bias + head)
        shrink = tl.exp(log_of_decay(raw, tl.exp(tl.load(log_decay + head))))
        update = beta * (value - shrink * tl.sum(state * key[:, None], axis=0))
        result = shrink * tl.sum(state * query[:, None], axis=0) + tl.sum(key * query, axis=0) * update
        tl.store(state_places, shrink * state + key[:, None] * update[None, :], mask=mask)
        # As the operations one by one: the output, its norm and the product are rounded.
        DTYPE: tl.constexpr = out.dtype.element_ty
        result = result.to(DTYPE).to(tl.float32)[None, :]
        factors = tl.load(norm + offs_v, mask=mask_v, other=0.0)[None, :]
        normed = scaled_by_rms(result, tl.sum(result * result, axis=1) / VALUE_DIM, factors, norm_eps)
        opened = tl.load(gate + token * gate_stride + head * VALUE_DIM + offs_v, mask=mask_v, other=0.0).to(tl.float32)
        gated = normed.to(DTYPE).to(tl.float32) * (opened / (1.0 + tl.exp(-opened)))[None, :]
        there = out + (token * VALUE_HEADS + head) * VALUE_DIM + offs_v[None, :]
        tl.store(there, gated.to(DTYPE), mask=mask_v[None, :])


def launch_decodes(tokens, weights, states, entries, heads, out, length_eps, num_warps: int | None = None) -> None:
    """Computes `delta_net.delta_net`, whose arguments these are, of entries of one token.

    Args:
        tokens: What the projections give.
        weights: The layer's other weights.
        states: States of all rows, changed in place.
        entries: Entries of the step; those of more tokens are left out.
        heads: Numbers and sizes of heads, such that `takes_decodes(heads)`.
        out: [num_tokens, all heads' outputs] to be written, of entries of one token.
        length_eps: Added to the square of a query's or key's length.
        num_warps: Warps of a program; None: those of the launch rule.
    """
    lines = (states.matrices, states.tails)
    strides = (line.stride(0) for line in (*tokens, *lines))
    early, kernel = card.launches_early(out.device), weights.convolution.shape[1]
    _decode_kernel[(heads.num_value_heads, entries.rows.shape[0])](
        *tokens, weights.convolution, weights.log_decay, weights.decay_bias, weights.norm, *lines, out,
        *entries.columns, *strides, length_eps, weights.norm_eps,
        heads, kernel, *(triton.next_power_of_2(size) for size in (kernel, heads.key_dim, heads.value_dim)), early,
        num_warps=num_warps or _NUM_WARPS, launch_pdl=early,
    )  # fmt: skip
