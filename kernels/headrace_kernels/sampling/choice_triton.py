"""`choice.sample_rows` as two Triton kernels, for batches of any mixture.

They need neither a sort nor a look from the host.

Owns the first kernel and the launches; `truncation_triton` owns what the second does for rows that
truncate.

    logits --(sample, block)--> per block: its highest logit, its mass, its winner --(sample)-->
    token, finiteness

A block's *winner* is its most likely token in a greedy row, and its token with the highest logit /
temperature + noise in a random one; then the winner of the winners is the row's token, unless
truncation forbids it. Grids depend on the number of samples only and nothing is specialized on it,
so the launches can be captured and never compile anew. A row's result depends on nothing but the
row: sums are made in one order whatever the batch.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace_kernels.sampling import parameters as columns
from headrace_kernels.sampling.ordering_triton import KEY_SHIFTS, NO_ID, best_of
from headrace_kernels.sampling.philox_triton import gumbel_noise
from headrace_kernels.sampling.truncation_triton import LOG2_E, draw_truncated, lowest_kept

_TEMPERATURE = tl.constexpr(columns.TEMPERATURE)
_TOP_P = tl.constexpr(columns.TOP_P)
_MIN_P = tl.constexpr(columns.MIN_P)
_TOP_K = tl.constexpr(columns.TOP_K)
_TOP_N_SIGMA = tl.constexpr(columns.TOP_N_SIGMA)
_SEED_LOW = tl.constexpr(columns.SEED_LOW)
_SEED_HIGH = tl.constexpr(columns.SEED_HIGH)
_OUTPUT_INDEX = tl.constexpr(columns.OUTPUT_INDEX)
_NUM_COLUMNS = tl.constexpr(columns.NUM_COLUMNS)

# Tokens of a program of the first kernel, 16 per thread; not measured yet. Twice as many in the
# passes of the second, with registers for two rows on a multiprocessor.
_BLOCK = 2048
_TILE_BLOCKS = 2
_BLOCK_WARPS = 4
_ROW_WARPS = 8
_ROW_REGISTERS = 128
# Columns of several steps lie in one buffer, so their addresses have any alignment: nothing may be
# compiled for it.
_INDEX_POINTERS = ["rows", "output_positions"]


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _truncates(parameters, VOCAB: tl.constexpr):
    """The row's top_k (0: all), min_p, top_p, top_n_sigma, and whether they leave something out."""
    top_k = tl.load(parameters + _TOP_K)
    top_k = tl.where(top_k >= VOCAB, 0, top_k)
    min_p, top_p = _float(tl.load(parameters + _MIN_P)), _float(tl.load(parameters + _TOP_P))
    top_n_sigma = _float(tl.load(parameters + _TOP_N_SIGMA))
    return top_k, min_p, top_p, top_n_sigma, (top_k > 0) | (min_p > 0) | (top_p < 1) | (top_n_sigma > 0)


@triton.jit(do_not_specialize=_INDEX_POINTERS, do_not_specialize_on_alignment=_INDEX_POINTERS)
def summarize_blocks_kernel(
    logits,
    rows,
    output_positions,
    parameters,
    peaks,
    masses,
    scores,
    winners,
    STRIDE: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
):
    """Program (block, sample): highest logit, mass and winner of the block.

    The mass is the sum of exp((logit - highest) / temperature), if top-p needs it.

    Args:
        logits: [num_samples, VOCAB], rows STRIDE apart.
        rows: int32 or int64 [num_samples].
        output_positions: int32 or int64 [num_samples].
        parameters: int32 [num_rows + 1, 16].
        peaks: float32 [num_samples, NUM_SLOTS], out: +inf where the block holds a NaN.
        masses: float32, out, likewise.
        scores: float32, out: what the winner won with.
        winners: int32, out.
        STRIDE: Elements.
        VOCAB: Tokens.
        BLOCK: Tokens of a block.
        NUM_SLOTS: Blocks of a row, rounded up.
    """
    block, sample = tl.program_id(0), tl.program_id(1).to(tl.int64)
    parameters += tl.load(rows + sample).to(tl.int64) * _NUM_COLUMNS
    temperature = _float(tl.load(parameters + _TEMPERATURE))
    offs_token = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + sample * STRIDE + offs_token, mask=offs_token < VOCAB, other=-float("inf")).to(tl.float32)
    values = tl.where(values == values, values, float("inf"))
    slot = sample * NUM_SLOTS + block
    peak = tl.max(values, axis=0)
    tl.store(peaks + slot, peak)
    if temperature > 0:
        score = values * (1.0 / temperature) + gumbel_noise(
            block * BLOCK,
            tl.load(parameters + _SEED_LOW),
            tl.load(parameters + _SEED_HIGH),
            tl.load(parameters + _OUTPUT_INDEX),
            tl.load(output_positions + sample).to(tl.int32),
            BLOCK,
        )
        _, _, top_p, _, _ = _truncates(parameters, VOCAB)
        if top_p < 1:
            # A block in which all is banned has no mass.
            origin = tl.where(peak == -float("inf"), 0.0, peak)
            tl.store(masses + slot, tl.sum(tl.exp2((values - origin) * (LOG2_E / temperature)), axis=0))
        best, winner = best_of(score, offs_token)
    else:
        best, winner = peak, tl.min(tl.where(values == peak, offs_token, NO_ID), axis=0)
    tl.store(scores + slot, best)
    tl.store(winners + slot, winner)


@triton.jit(do_not_specialize=_INDEX_POINTERS, do_not_specialize_on_alignment=_INDEX_POINTERS)
def choose_tokens_kernel(
    logits,
    rows,
    output_positions,
    parameters,
    peaks,
    masses,
    scores,
    winners,
    tokens,
    finite,
    STRIDE: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
):
    """Program (sample): the row's token and finiteness from its blocks.

    Args:
        logits: [num_samples, VOCAB], rows STRIDE apart: read only where a row truncates.
        rows: int32 or int64 [num_samples].
        output_positions: int32 or int64 [num_samples].
        parameters: int32 [num_rows + 1, 16].
        peaks: float32 [num_samples, NUM_SLOTS], the first kernel's.
        masses: float32, likewise.
        scores: float32, likewise.
        winners: int32, likewise.
        tokens: int64 [num_samples], out.
        finite: bool [num_samples], out.
        STRIDE: Elements.
        VOCAB: Tokens.
        BLOCK: Tokens of a block.
        TILE: Tokens of a step of a pass over the row, a multiple of BLOCK.
        NUM_BLOCKS: Blocks of a row, whole tiles.
        NUM_SLOTS: Number of entries, rounded up to a power of two.
        KEY_SHIFT: Low bits that are equal in all keys (`ordering_triton`).
    """
    sample = tl.program_id(0).to(tl.int64)
    parameters += tl.load(rows + sample).to(tl.int64) * _NUM_COLUMNS
    temperature = _float(tl.load(parameters + _TEMPERATURE))
    offs_slot = tl.arange(0, NUM_SLOTS)
    mask_slot = offs_slot < NUM_BLOCKS
    peak = tl.load(peaks + sample * NUM_SLOTS + offs_slot, mask=mask_slot, other=-float("inf"))
    score = tl.load(scores + sample * NUM_SLOTS + offs_slot, mask=mask_slot, other=-float("inf"))
    # A block behind the vocabulary names a token there, with a score of -inf.
    winner = tl.minimum(tl.load(winners + sample * NUM_SLOTS + offs_slot, mask=mask_slot, other=0), VOCAB - 1)
    row_peak = tl.max(peak, axis=0)
    is_finite = (row_peak > -float("inf")) & (row_peak < float("inf"))
    _, token = best_of(score, winner)
    top_k, min_p, top_p, top_n_sigma, truncates = _truncates(parameters, VOCAB)
    if is_finite & truncates & (temperature > 0):
        threshold = lowest_kept(
            logits + sample * STRIDE, row_peak, temperature, min_p, top_n_sigma, VOCAB, TILE, NUM_BLOCKS * BLOCK // TILE
        )
        token = draw_truncated(
            logits + sample * STRIDE,
            peaks + sample * NUM_SLOTS,
            masses + sample * NUM_SLOTS,
            peak,
            score,
            winner,
            temperature,
            top_k,
            threshold,
            top_p,
            tl.load(parameters + _SEED_LOW),
            tl.load(parameters + _SEED_HIGH),
            tl.load(parameters + _OUTPUT_INDEX),
            tl.load(output_positions + sample).to(tl.int32),
            VOCAB,
            BLOCK,
            TILE,
            NUM_BLOCKS,
            NUM_SLOTS,
            KEY_SHIFT,
        )
    tl.store(tokens + sample, tl.where(is_finite, token, 0).to(tl.int64))
    tl.store(finite + sample, is_finite)


def sample_rows_triton(
    logits: torch.Tensor,
    rows: torch.Tensor,
    output_positions: torch.Tensor,
    parameters: torch.Tensor,
    block: int = _BLOCK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sample_rows_reference` as kernels.

    Equal scores go to the lower id, and sums and noise may differ in their last places.

    Tests give smaller blocks.
    """
    num_samples, vocab_size = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    num_tiles = triton.cdiv(vocab_size, block * _TILE_BLOCKS)
    num_blocks = num_tiles * _TILE_BLOCKS
    num_slots = triton.next_power_of_2(num_blocks)
    # A single row's stride says nothing.
    stride = logits.stride(0) if num_samples > 1 else vocab_size
    peaks, masses, scores = torch.empty(3, num_samples, num_slots, dtype=torch.float32, device=logits.device)
    winners = torch.empty(num_samples, num_slots, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(num_samples, dtype=torch.int64, device=logits.device)
    finite = torch.empty(num_samples, dtype=torch.bool, device=logits.device)
    inputs = (logits, rows, output_positions, parameters, peaks, masses, scores, winners)
    summarize_blocks_kernel[num_blocks, num_samples](
        *inputs, STRIDE=stride, VOCAB=vocab_size, BLOCK=block, NUM_SLOTS=num_slots, num_warps=_BLOCK_WARPS
    )
    choose_tokens_kernel[(num_samples,)](
        *inputs,
        tokens,
        finite,
        STRIDE=stride,
        VOCAB=vocab_size,
        BLOCK=block,
        TILE=block * _TILE_BLOCKS,
        NUM_BLOCKS=num_blocks,
        NUM_SLOTS=num_slots,
        KEY_SHIFT=KEY_SHIFTS[logits.dtype],
        num_warps=_ROW_WARPS,
        maxnreg=_ROW_REGISTERS,
    )
    return tokens, finite
