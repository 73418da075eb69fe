"""The gated delta rule in Triton where tokens are drafted: what is pending, then a short entry.

A program has one value head of one entry with its whole matrix in registers. It reads the matrix,
applies what is pending up to where the row stands, computes the entry's tokens one after the other,
norms and gates their outputs, and writes the matrix as it was behind the last token that is sure to
stay; the drafts are kept (`pending`). So a step reads and writes a state once, however many drafts
it verifies, and a token more costs the arithmetic of one.

Tokens come convolved. Within this loop, as in `decode_kernels`, the convolution's tile would decide
how the matrix lies in registers: a row of it for each thread, so that each sum over keys is one of
128 numbers over all threads, and registers spill (sm_90).

Entries that are longer have no drafts, and are computed as prompts are, once a launch has applied
what they have pending.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from headrace_kernels.recurrence.gated_delta_kernels import inverse_length, log_of_decay
from headrace_kernels.rms_norm import scaled_by_rms

# For 64 rows of Qwen3.5 9B with 5 tokens and 4 pending on an H200 4 warps took 246 us, 8 took 524;
# for one row 27 and 36 (docs/experiments.md, "drafts and recurrent states").
_NUM_WARPS = 4
_COLUMNS = ["query_start_loc", "seq_lens", "rows", "num_drafts"]


@triton.jit
def _gates(correction, decay, bias, rate):
    """By how much a head's matrix is corrected, and what is left of it, of a token's two logits."""
    return tl.sigmoid(correction.to(tl.float32)), tl.exp(log_of_decay(decay.to(tl.float32) + bias, rate))


@triton.jit
def _applied(
    state, row_mixed, row_gates, head, keys, values, mask_k, mask_v, base, start, bias, rate, eps,
    PLACES: tl.constexpr, WIDTH: tl.constexpr, VALUE_HEADS: tl.constexpr,
):  # fmt: skip
    """Returns a head's matrix behind the pending tokens from `base` up to `start`."""
    for position in range(base, start):
        place = position % PLACES
        key = tl.load(row_mixed + place * WIDTH + keys, mask=mask_k, other=0.0)
        value = tl.load(row_mixed + place * WIDTH + values, mask=mask_v, other=0.0)
        logits = row_gates + place * (2 * VALUE_HEADS) + head
        beta, shrink = _gates(tl.load(logits), tl.load(logits + VALUE_HEADS), bias, rate)
        key = key * inverse_length(key, eps, 0)
        update = beta * (value - shrink * tl.sum(state * key[:, None], axis=0))
        state = shrink * state + key[:, None] * update[None, :]
    return state


@triton.jit(do_not_specialize_on_alignment=_COLUMNS)
def _drafted_kernel(
    mixed, gate, correction, decay, log_decay, decay_bias, norm, matrices, kept, kept_gates, bases, out,
    query_start_loc, seq_lens, rows, num_drafts,
    gate_stride, correction_stride, decay_stride, row_stride, length_eps, norm_eps,
    HEADS: tl.constexpr, PLACES: tl.constexpr, MOST: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Program (value head, entry): see `launch_drafted`."""
    KEY_HEADS: tl.constexpr = HEADS.num_key_heads
    VALUE_HEADS: tl.constexpr = HEADS.num_value_heads
    KEY_DIM: tl.constexpr = HEADS.key_dim
    VALUE_DIM: tl.constexpr = HEADS.value_dim
    # Elements of a token's queries, as many as of its keys, and of its keys and values.
    QUERIES: tl.constexpr = KEY_HEADS * KEY_DIM
    WIDTH: tl.constexpr = QUERIES + VALUE_HEADS * VALUE_DIM
    GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
    DTYPE: tl.constexpr = out.dtype.element_ty
    head, entry = tl.program_id(0), tl.program_id(1)
    first = tl.load(query_start_loc + entry)
    count = tl.load(query_start_loc + entry + 1) - first
    if (count > 0) & (count <= MOST):
        offs_k, offs_v = tl.arange(0, KEYS), tl.arange(0, VALUES)
        mask_k, mask_v = offs_k < KEY_DIM, offs_v < VALUE_DIM
        line = tl.load(rows + entry).to(tl.int64) * row_stride
        row_kept, row_gates, row_base = kept + line, kept_gates + line, bases + line + head
        start = tl.load(seq_lens + entry) - count
        # The tokens that are sure to stay.
        num_sure = count - tl.load(num_drafts + entry)
        # What lies in the line of a row that begins its sequence may be anything.
        base = tl.load(row_base, mask=start > 0, other=0)
        places = matrices + line + head * (KEY_DIM * VALUE_DIM) + offs_k[:, None] * VALUE_DIM + offs_v[None, :]
        mask = mask_k[:, None] & mask_v[None, :]
        keys, values = head // GROUP * KEY_DIM + offs_k, QUERIES + head * VALUE_DIM + offs_v
        rate, bias = tl.exp(tl.load(log_decay + head)), tl.load(decay_bias + head)
        factors = tl.load(norm + offs_v, mask=mask_v, other=0.0)[None, :]
        state = tl.load(places, mask=mask & (start > 0), other=0.0)
        state = _applied(
            state, row_kept, row_gates, head, keys, values, mask_k, mask_v, base, start, bias, rate, length_eps,
            PLACES, WIDTH, VALUE_HEADS,
        )  # fmt: skip
        for index in range(count):
            token, place = (first + index).to(tl.int64), (start + index) % PLACES
            here = mixed + token * (QUERIES + WIDTH)
            query = tl.load(here + keys, mask=mask_k, other=0.0).to(tl.float32)
            key = tl.load(here + QUERIES + keys, mask=mask_k, other=0.0).to(tl.float32)
            value = tl.load(here + QUERIES + values, mask=mask_v, other=0.0).to(tl.float32)
            of_correction = tl.load(correction + token * correction_stride + head)
            of_decay = tl.load(decay + token * decay_stride + head)
            if index >= num_sure:
                if head % GROUP == 0:
                    tl.store(row_kept + place * WIDTH + keys, key, mask=mask_k)
                tl.store(row_kept + place * WIDTH + values, value, mask=mask_v)
                logits = row_gates + place * (2 * VALUE_HEADS) + head
                tl.store(logits, of_correction.to(tl.float32))
                tl.store(logits + VALUE_HEADS, of_decay.to(tl.float32))
            query = query * inverse_length(query, length_eps, 0) * (KEY_DIM**-0.5)
            key = key * inverse_length(key, length_eps, 0)
            beta, shrink = _gates(of_correction, of_decay, bias, rate)
            update = beta * (value - shrink * tl.sum(state * key[:, None], axis=0))
            result = shrink * tl.sum(state * query[:, None], axis=0) + tl.sum(key * query, axis=0) * update
            state = shrink * state + key[:, None] * update[None, :]
            if index == num_sure - 1:
                tl.store(places, state, mask=mask)
            # As the operations one by one: the output, its norm and the product are rounded.
            result = result.to(DTYPE).to(tl.float32)[None, :]
            normed = scaled_by_rms(result, tl.sum(result * result, axis=1) / VALUE_DIM, factors, norm_eps)
            opened = tl.load(gate + token * gate_stride + head * VALUE_DIM + offs_v, mask=mask_v, other=0.0)
            opened = opened.to(tl.float32)
            gated = normed.to(DTYPE).to(tl.float32) * (opened / (1.0 + tl.exp(-opened)))[None, :]
            there = out + (token * VALUE_HEADS + head) * VALUE_DIM + offs_v[None, :]
            tl.store(there, gated.to(DTYPE), mask=mask_v[None, :])
        tl.store(row_base, start + num_sure)


@triton.jit(do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "rows"])
def _pending_kernel(
    log_decay, decay_bias, matrices, kept, kept_gates, bases, query_start_loc, seq_lens, rows, row_stride, length_eps,
    HEADS: tl.constexpr, PLACES: tl.constexpr, MOST: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Program (value head, entry): see `launch_pending`."""
    VALUE_HEADS: tl.constexpr = HEADS.num_value_heads
    KEY_DIM: tl.constexpr = HEADS.key_dim
    VALUE_DIM: tl.constexpr = HEADS.value_dim
    ALL_KEYS: tl.constexpr = HEADS.num_key_heads * KEY_DIM
    head, entry = tl.program_id(0), tl.program_id(1)
    count = tl.load(query_start_loc + entry + 1) - tl.load(query_start_loc + entry)
    if count > MOST:
        line = tl.load(rows + entry).to(tl.int64) * row_stride
        end = tl.load(seq_lens + entry)
        start = end - count
        base = tl.load(bases + line + head, mask=start > 0, other=0)
        if base < start:
            offs_k, offs_v = tl.arange(0, KEYS), tl.arange(0, VALUES)
            mask_k, mask_v = offs_k < KEY_DIM, offs_v < VALUE_DIM
            places = matrices + line + head * (KEY_DIM * VALUE_DIM) + offs_k[:, None] * VALUE_DIM + offs_v[None, :]
            mask = mask_k[:, None] & mask_v[None, :]
            keys = head // (VALUE_HEADS // HEADS.num_key_heads) * KEY_DIM + offs_k
            rate, bias = tl.exp(tl.load(log_decay + head)), tl.load(decay_bias + head)
            state = _applied(
                tl.load(places, mask=mask, other=0.0), kept + line, kept_gates + line, head, keys,
                ALL_KEYS + head * VALUE_DIM + offs_v, mask_k, mask_v, base, start, bias, rate, length_eps,
                PLACES, ALL_KEYS + VALUE_HEADS * VALUE_DIM, VALUE_HEADS,
            )  # fmt: skip
            tl.store(places, state, mask=mask)
        # All tokens of the entry are sure to stay, and are computed behind this.
        tl.store(bases + line + head, end)


def _tile(heads: Any) -> tuple[int, int]:
    """Elements of a head's keys and values, rounded up."""
    return triton.next_power_of_2(heads.key_dim), triton.next_power_of_2(heads.value_dim)


def launch_drafted(
    mixed, tokens, weights, states, entries, heads, out, length_eps, most, num_warps: int | None = None
) -> None:
    """Computes rule, norm and gate of `delta_net.delta_net` of entries of up to `most` tokens.

    Args:
        mixed: [num_tokens, heads.num_channels] contiguous, as the convolution left them.
        tokens: What the projections give.
        weights: The layer's other weights.
        states: States of all rows, with pending tokens, changed in place.
        entries: Entries of the step; longer ones are left out.
        heads: Numbers and sizes of heads, such that `takes_decodes(heads)`.
        out: [num_tokens, all heads' outputs] to be written, of entries that are computed.
        length_eps: Added to the square of a query's or key's length.
        most: Tokens of the longest entry that is computed.
        num_warps: Warps of a program; None: those of the launch rule.
    """
    strides = (line.stride(0) for line in (tokens.gate, tokens.correction, tokens.decay, states.matrices))
    _drafted_kernel[(heads.num_value_heads, entries.rows.shape[0])](
        mixed, tokens.gate, tokens.correction, tokens.decay, weights.log_decay, weights.decay_bias, weights.norm,
        states.matrices, *states.pending, out, *entries.columns, entries.num_drafts, *strides,
        length_eps, weights.norm_eps, heads, states.pending.mixed.shape[1], most, *_tile(heads),
        num_warps=num_warps or _NUM_WARPS,
    )  # fmt: skip


def launch_pending(weights, states, entries, heads, length_eps, most) -> None:
    """Applies what entries of more than `most` tokens have pending; arguments as `launch_drafted`.

    Their bases say afterwards that matrices hold all of their tokens.
    """
    _pending_kernel[(heads.num_value_heads, entries.rows.shape[0])](
        weights.log_decay, weights.decay_bias, states.matrices, *states.pending, *entries.columns,
        states.matrices.stride(0), length_eps, heads, states.pending.mixed.shape[1], most, *_tile(heads),
        num_warps=_NUM_WARPS,
    )  # fmt: skip
