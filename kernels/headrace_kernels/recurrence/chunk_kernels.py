"""The gated delta rule in Triton, by chunks of tokens: products on tensor cores, in two launches.

With the letters of `gated_delta`, of which what depends on a chunk's tokens alone comes first:

    within   a program for each chunk and head: T = (I + A)^-1 diag(beta), M, and the tokens' scales
    across   a program for some columns of a head's S, through all chunks of an entry in order:
             U = T (V - exp(G) K S);  out = exp(G) Q S + M U;  S <- exp(G_C) S + (exp(G_C - G) K)' U

The first has as many programs as chunks times heads. The second is a chain as long as an entry has
chunks, so each link is short: four products, whose operands (queries and keys as the convolution
left them, values, T and M) are on their way while the link before computes. Lengths of queries and
keys scale rows of fp32 results instead. S stays in registers, in fp32, so none is written between
chunks.

The inverse of the unit triangular I + A is that of its diagonal blocks of 1, 2, 4, ... tokens, put
together two by two: [[D, 0], [-E L D, E]] of [[D', 0], [L, E']], with E and D the inverses of E'
and D'. That is forward substitution by blocks, which stays accurate where keys repeat. (A product
of (I - A)(I + A^2)(I + A^4)... would not: of 64 equal keys A^32 has binomials of 10^17.) It is
computed by masked products of fp32 numbers, two for all blocks of a size at once, on tensor cores
in tf32, whose products have as many bits as fp16 and three more than bf16: to these T is rounded.

T, M and operands are rounded to the model's type, sums and S are fp32. Entries of models in fp32 go
token by token: operands of twice the size do not fit into registers.

flash-linear-attention (fla/ops) takes six launches for the same: sums of gates, A, its inverse in
16 x 16 blocks, W = T exp(G) K and T V in memory, the chain, which writes S before each chunk, and
outputs from these. Here the chain computes outputs itself and has T in place of W and T V: half of
the memory traffic, for one more small product in each link.

Who computes which entry is decided here, by its length, from the device's numbers alone: grids
depend on the numbers of tokens and entries, which a captured graph fixes.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from headrace_kernels import card
from headrace_kernels.recurrence.gated_delta_kernels import inverse_length, log_of_decay
from headrace_kernels.triton_runtime import INTERPRETED

# Tokens of the shortest entries that are computed by chunks; shorter ones go token by token, a
# microsecond each. Derived, not measured.
LEAST_TOKENS = 16
# Elements of the longest keys, rounded up, whose tile of 64 tokens fits beside the others.
_MOST_KEYS = 128


class ChunkTile(NamedTuple):
    """How the kernels are launched. The defaults are the fastest of those measured on an H200."""

    # Tokens of a chunk.
    chunk: int = 64
    # Columns of S that a program of the chain has.
    columns: int = 32
    within_warps: int = 4
    across_warps: int = 4
    # Links of the chain whose operands are under way at once: 2 or more. With one the kernel read
    # outside of its memory on an H200 (16 and 32 columns; Triton 3.6), for a reason not found.
    stages: int = 2


def takes_chunks(heads, dtype: torch.dtype) -> bool:
    """Whether entries of heads of this size and type are computed by chunks.

    In the interpreter, where products are of fp32 (`triton_runtime`), they are in any type.
    """
    return bool(triton.next_power_of_2(heads.key_dim) <= _MOST_KEYS) and (dtype.itemsize == 2 or INTERPRETED)


@triton.jit
def _last_at_most(slot, query_start_loc, num_entries, CHUNK: tl.constexpr):
    """The last entry whose first slot is at most `slot`, by bisection, and that first slot.

    An entry's first slot is its first token's number in chunks, plus its own number: so that each
    entry has a slot for each of its chunks, whatever the lengths.
    """
    low = slot * 0
    high = low + num_entries
    while high - low > 1:
        middle = (low + high) // 2
        is_before = tl.load(query_start_loc + middle) // CHUNK + middle <= slot
        low, high = tl.where(is_before, middle, low), tl.where(is_before, high, middle)
    return low, tl.load(query_start_loc + low) // CHUNK + low


@triton.jit
def _unit_inverse(system, offs, CHUNK: tl.constexpr):
    """(I + A)^-1 of a strictly lower triangular A [CHUNK, CHUNK] in fp32, by blocks of 2, 4, ..."""
    row, column = offs[:, None], offs[None, :]
    inverse = tl.where(row == column, 1.0, tl.where(row // 2 == column // 2, -system, 0.0))
    for level in tl.static_range(1, 6):
        if CHUNK >> level > 1:
            is_beside = (row >> level + 1 == column >> level + 1) & (row >> level != column >> level)
            across = tl.dot(inverse, tl.where(is_beside, system, 0.0), input_precision="tf32")
            inverse -= tl.dot(across, inverse, input_precision="tf32")
    return inverse


@triton.jit(do_not_specialize=["num_entries", "num_tokens"], do_not_specialize_on_alignment=["query_start_loc"])
def _within_chunks_kernel(
    mixed, correction, decay, log_decay, decay_bias, solved, weights, scales, query_start_loc,
    num_entries, num_tokens, correction_stride, decay_stride, eps,
    HEADS: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr, LEAST: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    KEY_HEADS: tl.constexpr = HEADS.num_key_heads
    VALUE_HEADS: tl.constexpr = HEADS.num_value_heads
    KEY_DIM: tl.constexpr = HEADS.key_dim
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * HEADS.value_dim
    slot, head = tl.program_id(0), tl.program_id(1)
    entry, first_slot = _last_at_most(slot, query_start_loc, num_entries, CHUNK)
    first = tl.load(query_start_loc + entry)
    count = tl.load(query_start_loc + entry + 1) - first
    begin = (slot - first_slot) * CHUNK
    if (count >= LEAST) & (begin < count):
        offs, offs_k = tl.arange(0, CHUNK), tl.arange(0, KEYS)
        mask = begin + offs < count
        tokens = (first + begin + offs).to(tl.int64)
        key_head = head // (VALUE_HEADS // KEY_HEADS)
        queries = mixed + tokens[:, None] * CHANNELS + key_head * KEY_DIM + offs_k[None, :]
        mask_qk = mask[:, None] & (offs_k < KEY_DIM)[None, :]
        query = tl.load(queries, mask=mask_qk, other=0.0).to(OPERAND)
        key = tl.load(queries + KEY_HEADS * KEY_DIM, mask=mask_qk, other=0.0).to(OPERAND)
        of_query = inverse_length(query.to(tl.float32), eps, 1) * (KEY_DIM**-0.5)
        of_key = inverse_length(key.to(tl.float32), eps, 1)
        beta = tl.sigmoid(tl.load(correction + tokens * correction_stride + head, mask=mask, other=0.0).to(tl.float32))
        raw = tl.load(decay + tokens * decay_stride + head, mask=mask, other=0.0).to(tl.float32)
        logs = log_of_decay(raw + tl.load(decay_bias + head), tl.exp(tl.load(log_decay + head)))
        # G; tokens behind the last have no part in it, so the least is G_C.
        total = tl.cumsum(tl.where(mask, logs, 0.0), 0)
        last = tl.min(total, 0)
        row, column = offs[:, None], offs[None, :]
        ages = tl.where(row >= column, total[:, None] - total[None, :], 0.0)
        decays = tl.where(row >= column, tl.exp(ages) * of_key[None, :], 0.0)
        # M, and what multiplies rows of K S, of Q S and of U before K' U, and S itself. They are
        # stored first, so that registers are free for the inverse.
        seen = tl.dot(query, tl.trans(key)) * decays * of_query[:, None]
        places = (tokens[:, None] * VALUE_HEADS + head) * CHUNK + offs[None, :]
        tl.store(weights + places, seen.to(OPERAND), mask=mask[:, None])
        line = scales + head.to(tl.int64) * num_tokens + tokens
        step = num_tokens.to(tl.int64) * VALUE_HEADS
        tl.store(line, of_key * tl.exp(total), mask=mask)
        tl.store(line + step, of_query * tl.exp(total), mask=mask)
        tl.store(line + 2 * step, of_key * tl.exp(last - total), mask=mask)
        tl.store(line + 3 * step, tl.exp(last) + 0.0 * total, mask=mask)
        # T
        system = tl.dot(key, tl.trans(key)) * decays * (beta * of_key)[:, None]
        inverse = _unit_inverse(tl.where(row > column, system, 0.0), offs, CHUNK)
        tl.store(solved + places, (inverse * beta[None, :]).to(OPERAND), mask=mask[:, None])


@triton.jit
def _long_entry(place, is_by_window, query_start_loc, num_entries, LEAST: tl.constexpr):
    """The entry that a program computes, its first token, and its tokens; 0 where it computes none.

    It is that of the program's number, or the long one that begins in a window of LEAST tokens. No
    two entries of as many begin in one, and one that does has the window's last token.
    """
    entry = place
    if is_by_window:
        token = place * LEAST + LEAST - 1
        low = place * 0
        high = low + num_entries
        while high - low > 1:
            middle = (low + high) // 2
            is_before = tl.load(query_start_loc + middle) <= token
            low, high = tl.where(is_before, middle, low), tl.where(is_before, high, middle)
        entry = low
    first = tl.load(query_start_loc + entry)
    count = tl.load(query_start_loc + entry + 1) - first
    is_long = (count >= LEAST) & ((is_by_window == 0) | (first >= place * LEAST))
    return entry, first, tl.where(is_long, count, 0)


@triton.jit(
    do_not_specialize=["num_entries", "num_tokens", "is_by_window"],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "rows"],
)
def _across_chunks_kernel(
    mixed, solved, weights, scales, matrices, out, query_start_loc, seq_lens, rows,
    num_entries, num_tokens, is_by_window, row_stride,
    HEADS: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, LEAST: tl.constexpr,
    STAGES: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    KEY_HEADS: tl.constexpr = HEADS.num_key_heads
    VALUE_HEADS: tl.constexpr = HEADS.num_value_heads
    KEY_DIM: tl.constexpr = HEADS.key_dim
    VALUE_DIM: tl.constexpr = HEADS.value_dim
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    head = tl.program_id(1)
    entry, first, count = _long_entry(tl.program_id(2), is_by_window, query_start_loc, num_entries, LEAST)
    if count > 0:
        offs, offs_k = tl.arange(0, CHUNK), tl.arange(0, KEYS)
        offs_v = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        mask_k, mask_v = offs_k < KEY_DIM, offs_v < VALUE_DIM
        mask_state = mask_k[:, None] & mask_v[None, :]
        places = head * (KEY_DIM * VALUE_DIM) + offs_k[:, None] * VALUE_DIM + offs_v[None, :]
        # S, empty where the entry begins its sequence: what lies there may be anything.
        state_places = matrices + tl.load(rows + entry).to(tl.int64) * row_stride + places
        before = tl.load(seq_lens + entry) > count
        state = tl.load(state_places, mask=mask_state & before, other=0.0)
        key_head = head // (VALUE_HEADS // KEY_HEADS)
        line, step = scales + head.to(tl.int64) * num_tokens, num_tokens.to(tl.int64) * VALUE_HEADS
        for begin in tl.range(0, count, CHUNK, num_stages=STAGES):
            mask = begin + offs < count
            tokens = (first + begin + offs).to(tl.int64)
            of_token = mixed + tokens[:, None] * CHANNELS
            mask_qk = mask[:, None] & mask_k[None, :]
            key = tl.load(of_token + (KEY_HEADS + key_head) * KEY_DIM + offs_k[None, :], mask=mask_qk, other=0.0)
            query = tl.load(of_token + key_head * KEY_DIM + offs_k[None, :], mask=mask_qk, other=0.0)
            values = of_token + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + offs_v[None, :]
            value = tl.load(values, mask=mask[:, None] & mask_v[None, :], other=0.0)
            squares = (tokens[:, None] * VALUE_HEADS + head) * CHUNK + offs[None, :]
            inverse = tl.load(solved + squares, mask=mask[:, None], other=0.0)
            seen = tl.load(weights + squares, mask=mask[:, None], other=0.0)
            of_found = tl.load(line + tokens, mask=mask, other=0.0)
            of_result = tl.load(line + step + tokens, mask=mask, other=0.0)
            of_update = tl.load(line + 2 * step + tokens, mask=mask, other=0.0)
            shrink = tl.load(line + 3 * step + first + begin)
            key, query, narrow = key.to(OPERAND), query.to(OPERAND), state.to(OPERAND)
            # U = T (V - exp(G) K S)
            found = tl.dot(key, narrow) * of_found[:, None]
            wanted = (value.to(tl.float32) - found).to(OPERAND)
            update = tl.dot(inverse.to(OPERAND), wanted)
            # out = exp(G) Q S + M U
            result = tl.dot(query, narrow) * of_result[:, None]
            result = tl.dot(seen.to(OPERAND), update.to(OPERAND), result)
            there = out + (tokens[:, None] * VALUE_HEADS + head) * VALUE_DIM + offs_v[None, :]
            tl.store(there, result.to(out.dtype.element_ty), mask=mask[:, None] & mask_v[None, :])
            # S <- exp(G_C) S + (exp(G_C - G) K)' U
            update = update * of_update[:, None]
            if OPERAND == tl.float16:
                # One over the length of a key of zeros may be too much; its product is 0.
                update = tl.clamp(update, -65504.0, 65504.0)
            state = tl.dot(tl.trans(key), update.to(OPERAND), state * shrink)
        tl.store(state_places, state, mask=mask_state)


def launch_rule(device: torch.device) -> ChunkTile:
    """The tile for a card. Before sm_90 it is not measured."""
    if card.has_warpgroup_products(device):
        return ChunkTile()
    # Operands lie in registers there, which hold those of shorter chunks.
    return ChunkTile(chunk=32, within_warps=8)


def launch_chunks(
    mixed, gates, matrices, entries, heads, out, eps, tile: ChunkTile | None = None, least: int = LEAST_TOKENS
) -> None:
    """Computes `gated_delta.gated_delta`, whose arguments these are, of `least` tokens and more.

    Args:
        mixed: Queries, keys and values.
        gates: What decides how matrices change.
        matrices: States of all rows, changed in place.
        entries: Entries of the step.
        heads: Numbers and sizes of heads, such that `takes_chunks` says so.
        out: [num_tokens, num_value_heads, value_dim] to be written.
        eps: Added to the square of a query's or key's length.
        tile: How to launch; None: as `launch_rule` says.
        least: Tokens of the shortest entries that are computed.
    """
    tile = tile or launch_rule(mixed.device)
    num_tokens, num_entries = mixed.shape[0], entries.rows.shape[0]
    if num_tokens < least:
        return
    keys = max(16, triton.next_power_of_2(heads.key_dim))
    columns = min(tile.columns, max(16, triton.next_power_of_2(heads.value_dim)))
    # In the interpreter products are of fp32 (`triton_runtime`).
    operand = torch.float32 if INTERPRETED else mixed.dtype
    of_products = getattr(tl, str(operand).removeprefix("torch."))
    squares = (num_tokens, heads.num_value_heads, tile.chunk)
    solved, weights = (torch.empty(squares, dtype=operand, device=mixed.device) for _ in range(2))
    scales = torch.empty(4, heads.num_value_heads, num_tokens, dtype=torch.float32, device=mixed.device)
    _within_chunks_kernel[(num_tokens // tile.chunk + num_entries, heads.num_value_heads)](
        mixed, *gates, solved, weights, scales, entries.query_start_loc,
        num_entries, num_tokens, gates.correction.stride(0), gates.decay.stride(0), eps,
        heads, keys, tile.chunk, least, of_products, num_warps=tile.within_warps,
    )  # fmt: skip
    windows = num_tokens // least
    grid = (triton.cdiv(heads.value_dim, columns), heads.num_value_heads, min(num_entries, windows))
    _across_chunks_kernel[grid](
        mixed, solved, weights, scales, matrices, out, *entries.columns,
        num_entries, num_tokens, int(windows < num_entries), matrices.stride(0),
        heads, keys, columns, tile.chunk, least, tile.stages, of_products, num_warps=tile.across_warps,
    )  # fmt: skip
