"""A causal convolution of each channel over the last few tokens of its row, then silu.

The inputs of a row's last tokens are kept between steps, as many as the next token sees beside its
own.

    x [num_tokens, channels] -> silu(sum over k of weight[c, k] * x[t - K + 1 + k, c])

Sums are in fp32 and rounded once. Two kernels, because a row's kept inputs may change only when all
of its tokens have read them.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_kernels.recurrence.entries import HostEntries, RecurrentEntries
from headrace_kernels.triton_runtime import uses_triton

# Channels and tokens of a program. Not measured yet.
_CHANNELS = 128
_TOKENS = 16
# Views into one piece of memory.
_COLUMNS = ["query_start_loc", "seq_lens", "rows"]
# Of a search among entries: more than the logarithm of any number of rows.
_HALVINGS = tl.constexpr(13)


def causal_convolution_reference(x: Tensor, weight: Tensor, tails: Tensor, entries: RecurrentEntries) -> Tensor:
    """Entry by entry: a row's kept inputs, then the entry's own. See `causal_convolution`."""
    host, out, kernel = HostEntries.of(entries), torch.empty_like(x), weight.shape[1]
    for (first, end), row, begins in zip(*host, strict=True):
        before = torch.zeros_like(tails[row]) if begins else tails[row]
        inputs = torch.cat((before, x[first:end].float()))
        out[first:end] = _convolved(inputs.unfold(0, kernel, 1), weight).to(x.dtype)
        tails[row] = inputs[end - first :]
    return out


def _convolved(windows: Tensor, weight: Tensor) -> Tensor:
    """[n, channels, kernel] fp32 inputs of n tokens -> [n, channels] fp32."""
    return torch.nn.functional.silu((windows * weight.float()).sum(-1))


@triton.jit
def _entry_of(tokens, query_start_loc, num_entries):
    """The entry of each token, by bisection; `num_entries` for tokens behind the last."""
    low = tokens * 0
    high = low + num_entries
    for _ in tl.static_range(_HALVINGS):
        middle = (low + high) // 2
        is_open = low < high
        ends = tl.load(query_start_loc + middle + 1, mask=is_open, other=0)
        is_behind = is_open & (ends <= tokens)
        low, high = tl.where(is_behind, middle + 1, low), tl.where(is_open & (ends > tokens), middle, high)
    return low


@triton.jit
def _input(x, row_tails, start, place, before, offs, mask, KEPT: tl.constexpr, CHANNELS: tl.constexpr):
    """Inputs at `place` behind the token `start` that begins an entry, fp32.

    Those of places below 0 are the row's kept ones, or 0 without `before`.
    """
    own = tl.load(x + (start + place) * CHANNELS + offs, mask=mask & (place >= 0), other=0.0)
    kept = tl.load(row_tails + (place + KEPT) * CHANNELS + offs, mask=mask & (place < 0) & before, other=0.0)
    return own.to(tl.float32) + kept


@triton.jit(do_not_specialize=["num_tokens", "num_entries"], do_not_specialize_on_alignment=_COLUMNS)
def _convolution_kernel(
    x, weight, tails, out, query_start_loc, seq_lens, rows, num_tokens, num_entries, tail_stride,
    KERNEL: tl.constexpr, CHANNELS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    entries = _entry_of(tokens, query_start_loc, num_entries)
    is_real = (tokens < num_tokens) & (entries < num_entries)
    start = tl.load(query_start_loc + entries, mask=is_real, other=0)
    count = tl.load(query_start_loc + entries + 1, mask=is_real, other=0) - start
    before = tl.load(seq_lens + entries, mask=is_real, other=0) > count
    row_tails = tails + tl.load(rows + entries, mask=is_real, other=0).to(tl.int64) * tail_stride
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = is_real & (offs < CHANNELS)
    total = tl.zeros([TOKENS, BLOCK], tl.float32)
    place, start = tokens - start, start.to(tl.int64)
    for k in tl.static_range(KERNEL):
        inputs = _input(x, row_tails, start, place - (KERNEL - 1 - k), before, offs, mask, KERNEL - 1, CHANNELS)
        factors = tl.load(weight + offs * KERNEL + k, mask=offs < CHANNELS, other=0.0)
        total += inputs * factors.to(tl.float32)
    total = total / (1.0 + tl.exp(-total))
    tl.store(out + tokens.to(tl.int64) * CHANNELS + offs, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=_COLUMNS)
def _tails_kernel(
    x, tails, query_start_loc, seq_lens, rows, tail_stride,
    KEPT: tl.constexpr, PLACES: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0)
    start = tl.load(query_start_loc + entry)
    count = tl.load(query_start_loc + entry + 1) - start
    if count > 0:
        before = tl.load(seq_lens + entry) > count
        row_tails = tails + tl.load(rows + entry).to(tl.int64) * tail_stride
        offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
        places = tl.arange(0, PLACES)[:, None]
        mask = (places < KEPT) & (offs < CHANNELS)
        taken = count - KEPT + places
        inputs = _input(x, row_tails, start.to(tl.int64), taken, before, offs, mask, KEPT, CHANNELS)
        # Kept inputs move: all are read before any is written.
        tl.debug_barrier()
        tl.store(row_tails + places * CHANNELS + offs, inputs, mask=mask)


def _launch(x: Tensor, weight: Tensor, tails: Tensor, entries: RecurrentEntries) -> Tensor:
    (num_tokens, channels), kernel = x.shape, weight.shape[1]
    out, num_entries = torch.empty_like(x), entries.rows.shape[0]
    blocks = triton.cdiv(channels, _CHANNELS)
    _convolution_kernel[(triton.cdiv(num_tokens, _TOKENS), blocks)](
        x, weight, tails, out, *entries, num_tokens, num_entries, tails.stride(0),
        kernel, channels, _TOKENS, _CHANNELS,
    )  # fmt: skip
    places = triton.next_power_of_2(kernel - 1)
    _tails_kernel[(num_entries, blocks)](
        x, tails, *entries, tails.stride(0), kernel - 1, places, channels, _CHANNELS
    )  # fmt: skip
    return out


def causal_convolution(x: Tensor, weight: Tensor, tails: Tensor, entries: RecurrentEntries) -> Tensor:
    """Convolves each channel over the last tokens of its row, and applies silu.

    Args:
        x: [num_tokens, channels] contiguous.
        weight: [channels, kernel] contiguous; the last column is the token's own.
        tails: fp32 [num_rows, kernel - 1, channels] inputs of each row's last tokens, the oldest
            first; changed in place. The dimensions behind the first are contiguous.
        entries: Entries of the step.

    Returns:
        [num_tokens, channels] in the type of x. Tokens of no entry are not written.
    """
    if uses_triton(x):
        return _launch(x, weight, tails, entries)
    return causal_convolution_reference(x, weight, tails, entries)
