"""The gated delta rule in Triton, token by token: a program has some columns of one head's matrix.

Columns of S do not depend on each other, so a program takes an entry's tokens one after the other
and never waits for another. That is for entries of a few tokens, whose matrices take as long to
read and write; longer ones are `chunk_kernels`'.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

# Columns of a matrix that a program has: 16 of 128 rows are 64 numbers for each thread of its only
# warp, within which all sums stay. Not measured yet.
_COLUMNS = 16
# Least logarithm of a decay: what has decayed by more is 0 in fp32 anyhow.
_LEAST_LOG = tl.constexpr(-104.0)


@triton.jit
def inverse_length(x, eps, axis: tl.constexpr):
    """One over the length of x [..., n] along an axis."""
    return tl.rsqrt(tl.sum(x * x, axis=axis) + eps)


@triton.jit
def log_of_decay(raw, rate):
    """The logarithm of a decay, at most 0: -rate * softplus(raw) in fp32, without overflow."""
    softplus = tl.maximum(raw, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(raw)))
    return tl.maximum(-rate * softplus, _LEAST_LOG)


@triton.jit(do_not_specialize=["least", "most"], do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "rows"])
def _gated_delta_kernel(
    mixed, correction, decay, log_decay, decay_bias, matrices, out, query_start_loc, seq_lens, rows,
    least, most, correction_stride, decay_stride, row_stride, eps,
    HEADS: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    KEY_HEADS: tl.constexpr = HEADS.num_key_heads
    VALUE_HEADS: tl.constexpr = HEADS.num_value_heads
    KEY_DIM: tl.constexpr = HEADS.key_dim
    VALUE_DIM: tl.constexpr = HEADS.value_dim
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    entry, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(query_start_loc + entry).to(tl.int64)
    end = tl.load(query_start_loc + entry + 1).to(tl.int64)
    if (end - first >= least) & (end - first <= most):
        offs_k = tl.arange(0, KEYS)
        offs_v = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        mask_k, mask_v = offs_k < KEY_DIM, offs_v < VALUE_DIM
        mask = mask_k[:, None] & mask_v[None, :]
        places = head * (KEY_DIM * VALUE_DIM) + offs_k[:, None] * VALUE_DIM + offs_v[None, :]
        # S, empty where the entry begins its sequence: what lies there may be anything.
        state_places = matrices + tl.load(rows + entry).to(tl.int64) * row_stride + places
        before = tl.load(seq_lens + entry) > end - first
        state = tl.load(state_places, mask=mask & before, other=0.0)
        rate, bias = tl.exp(tl.load(log_decay + head)), tl.load(decay_bias + head)
        key_head = head // (VALUE_HEADS // KEY_HEADS)
        for token in range(first, end):
            here = mixed + token * CHANNELS
            query = tl.load(here + key_head * KEY_DIM + offs_k, mask=mask_k, other=0.0).to(tl.float32)
            key = tl.load(here + (KEY_HEADS + key_head) * KEY_DIM + offs_k, mask=mask_k, other=0.0).to(tl.float32)
            values = here + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
            value = tl.load(values + offs_v, mask=mask_v, other=0.0).to(tl.float32)
            query = query * inverse_length(query, eps, 0) * (KEY_DIM**-0.5)
            key = key * inverse_length(key, eps, 0)
            beta = tl.sigmoid(tl.load(correction + token * correction_stride + head).to(tl.float32))
            raw = tl.load(decay + token * decay_stride + head).to(tl.float32) + bias
            # S <- exp(g) S;  u = beta (v - S' k);  S <- S + k u';  out = S' q
            state *= tl.exp(log_of_decay(raw, rate))
            update = beta * (value - tl.sum(state * key[:, None], axis=0))
            state += key[:, None] * update[None, :]
            result = tl.sum(state * query[:, None], axis=0)
            there = out + (token * VALUE_HEADS + head) * VALUE_DIM
            tl.store(there + offs_v, result.to(out.dtype.element_ty), mask=mask_v)
        tl.store(state_places, state, mask=mask)


def launch_gated_delta(mixed, gates, matrices, entries, heads, out, eps, least, most) -> None:
    """Computes `gated_delta.gated_delta`, whose arguments these are, of some lengths.

    Args:
        mixed: Queries, keys and values.
        gates: What decides how matrices change.
        matrices: States of all rows, changed in place.
        entries: Entries of the step.
        heads: Numbers and sizes of heads.
        out: [num_tokens, num_value_heads, value_dim] to be written.
        eps: Added to the square of a query's or key's length.
        least: Tokens of the shortest entries that are computed, 1 or more.
        most: Tokens of the longest.
    """
    keys, columns = triton.next_power_of_2(heads.key_dim), min(_COLUMNS, triton.next_power_of_2(heads.value_dim))
    grid = (entries.rows.shape[0], heads.num_value_heads, triton.cdiv(heads.value_dim, columns))
    strides = (gates.correction.stride(0), gates.decay.stride(0), matrices.stride(0))
    _gated_delta_kernel[grid](
        mixed, *gates, matrices, out, *entries.columns, least, most, *strides, eps, heads, keys, columns, num_warps=1
    )  # fmt: skip
