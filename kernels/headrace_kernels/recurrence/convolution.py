"""A causal convolution of each channel over the last few tokens of its row, then silu.

The inputs of a row's last tokens are kept between steps, at least as many as the convolution sees:
that of position p in place p modulo their number. So a token's input never takes the place of one
that the token sees, and a step of one token each reads and writes in one launch (`decode_kernels`).
Where tokens are drafted more are kept (`pending`).

    x [num_tokens, channels] -> silu(sum over k of weight[c, k] * x[t - K + 1 + k, c])

Sums are in fp32 and rounded once. Two kernels here, because of longer entries kept inputs may
change only when all tokens have read them; of short ones they change at once where there are places
enough.
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
# Halvings of a search among entries: more than the logarithm of any number of rows.
_HALVINGS = tl.constexpr(13)


def causal_convolution_reference(x: Tensor, weight: Tensor, tails: Tensor, entries: RecurrentEntries) -> Tensor:
    """Entry by entry: a row's kept inputs, then the entry's own. See `causal_convolution`."""
    host, (kernel, places) = HostEntries.of(entries), (weight.shape[1], tails.shape[1])
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for (first, end), row, start, _ in zip(*host, strict=True):
        inputs = torch.cat((_kept_inputs(tails[row], start - kernel + 1, start), x[first:end].float()))
        out[first:end] = _convolved(inputs.unfold(0, kernel, 1), weight).to(x.dtype)
        kept = min(end - first, places)
        last = start + end - first
        tails[row, [position % places for position in range(last - kept, last)]] = x[end - kept : end].float()
    return out


def _kept_inputs(tails: Tensor, first: int, end: int) -> Tensor:
    """Inputs of positions `first` up to `end` of a row, fp32; zeros before the sequence.

    Takes the row's kept inputs [num_places, channels].
    """
    places = [position % len(tails) for position in range(max(first, 0), end)]
    return torch.cat((tails.new_zeros(end - first - len(places), tails.shape[1]), tails[places]))


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


@triton.jit(do_not_specialize=["num_tokens", "num_entries"], do_not_specialize_on_alignment=_COLUMNS)
def _convolution_kernel(
    x, weight, tails, out, query_start_loc, seq_lens, rows, num_tokens, num_entries, x_stride, tail_stride,
    KERNEL: tl.constexpr, PLACES: tl.constexpr, SHORT: tl.constexpr, CHANNELS: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    entries = _entry_of(tokens, query_start_loc, num_entries)
    is_real = (tokens < num_tokens) & (entries < num_entries)
    first = tl.load(query_start_loc + entries, mask=is_real, other=0)
    end = tl.load(query_start_loc + entries + 1, mask=is_real, other=0)
    # Position of the entry's first token in its sequence.
    start = tl.load(seq_lens + entries, mask=is_real, other=0) - (end - first)
    row_tails = tails + tl.load(rows + entries, mask=is_real, other=0).to(tl.int64) * tail_stride
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = is_real & (offs < CHANNELS)
    total = tl.zeros([TOKENS, BLOCK], tl.float32)
    for k in tl.static_range(KERNEL):
        # The entry's own input, a kept one before it, or none before the sequence.
        seen = tokens - (KERNEL - 1 - k)
        position = start + seen - first
        own = tl.load(x + seen.to(tl.int64) * x_stride + offs, mask=mask & (seen >= first), other=0.0)
        is_kept = mask & (seen < first) & (position >= 0)
        kept = tl.load(row_tails + (position + PLACES) % PLACES * CHANNELS + offs, mask=is_kept, other=0.0)
        factors = tl.load(weight + offs * KERNEL + k, mask=offs < CHANNELS, other=0.0)
        total += (own.to(tl.float32) + kept) * factors.to(tl.float32)
        if k == KERNEL - 1 and SHORT > 0:
            # The token's own. Nobody reads its place in this step.
            is_short = mask & (end - first <= SHORT)
            tl.store(row_tails + (position + PLACES) % PLACES * CHANNELS + offs, own.to(tl.float32), mask=is_short)
    total = total / (1.0 + tl.exp(-total))
    tl.store(out + tokens.to(tl.int64) * CHANNELS + offs, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=_COLUMNS)
def _tails_kernel(
    x, tails, query_start_loc, seq_lens, rows, x_stride, tail_stride,
    PLACES: tl.constexpr, LINES: tl.constexpr, SHORT: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0)
    first = tl.load(query_start_loc + entry)
    end = tl.load(query_start_loc + entry + 1)
    if end - first > SHORT:
        row_tails = tails + tl.load(rows + entry).to(tl.int64) * tail_stride
        offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
        back = tl.arange(0, LINES)[:, None]
        token = end - 1 - back
        mask = (back < PLACES) & (token >= first) & (offs < CHANNELS)
        place = (tl.load(seq_lens + entry) - 1 - back + LINES * PLACES) % PLACES
        inputs = tl.load(x + token.to(tl.int64) * x_stride + offs, mask=mask, other=0.0)
        tl.store(row_tails + place * CHANNELS + offs, inputs.to(tl.float32), mask=mask)


def _launch(x: Tensor, weight: Tensor, tails: Tensor, entries: RecurrentEntries, short: int) -> Tensor:
    (num_tokens, channels), kernel, places = x.shape, weight.shape[1], tails.shape[1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_entries, blocks = entries.rows.shape[0], triton.cdiv(channels, _CHANNELS)
    strides = (x.stride(0), tails.stride(0))
    _convolution_kernel[(triton.cdiv(num_tokens, _TOKENS), blocks)](
        x, weight, tails, out, *entries.columns, num_tokens, num_entries, *strides,
        kernel, places, short, channels, _TOKENS, _CHANNELS,
    )  # fmt: skip
    if not (short and entries.only_decodes):
        _tails_kernel[(num_entries, blocks)](
            x, tails, *entries.columns, *strides, places, triton.next_power_of_2(places), short, channels, _CHANNELS
        )  # fmt: skip
    return out


def causal_convolution(x: Tensor, weight: Tensor, tails: Tensor, entries: RecurrentEntries, short: int = 0) -> Tensor:
    """Convolves each channel over the last tokens of its row, and applies silu.

    Args:
        x: [num_tokens, channels], whose lines may have a stride.
        weight: [channels, kernel] contiguous; the last column is the token's own.
        tails: fp32 [num_rows, num_places, channels] inputs of each row's last tokens, that of
            position p in place p modulo their number, which is `kernel` at least; changed in place.
            The dimensions behind the first are contiguous.
        entries: Entries of the step.
        short: Entries of up to so many tokens have places of their own beside all that a token of
            them sees (`kernel` - 1 + `short` at most), so that a launch less will do; 0: none.

    Returns:
        [num_tokens, channels] in the type of x, contiguous. Tokens of no entry are not written.
    """
    if uses_triton(x):
        return _launch(x, weight, tails, entries, short)
    return causal_convolution_reference(x, weight, tails, entries)
