"""Launch rules of mixtures of experts: which tile a kernel takes.

Owns the tiles and the sizes between them; which kernels run at all is `mixture`'s, and tiles of
weights in a file's blocks are `block_kernels`'. Tiles have about twice the pairs that an expert has
on average, from 8 or 16 to 128, so that most experts are one tile while a step is bound by memory.
Those of Hopper were chosen on an H200 (docs/experiments.md, "experts of few tokens in tiles"), of
other cards without one.
"""

from __future__ import annotations

import torch
import triton

from headrace_kernels import card
from headrace_kernels.experts.expert_weights import ExpertWeights
from headrace_kernels.experts.grouped_gemm_sm90 import GroupedTile, takes_grouped_gemm
from headrace_kernels.experts.mixture_kernels import PairTile
from headrace_kernels.experts.mxfp4_gemm_sm90 import Mxfp4Tile, takes_mxfp4_gemm
from headrace_kernels.experts.mxfp4_gemv import BLOCK_INNER, FewTile
from headrace_kernels.experts.mxfp4_kernels import ManyTile
from headrace_kernels.experts.routing import Choice
from headrace_kernels.experts.stream_gemv import StreamTile
from headrace_kernels.experts.vector_kernels import VectorTile
from headrace_kernels.input_rounding import InputRounding
from headrace_kernels.rounded_tokens import MOST_FAST_INPUTS
from headrace_kernels.weight_formats.kernel_layout import WeightLayout

# Pairs of a tile. Those of eight, where there are any, are half of the least.
_LEAST_TILE, _LARGEST_TILE = 16, 128
# How inner elements are rounded that a grouped GEMM can round by itself.
_IN_GROUPS = InputRounding(torch.float8_e4m3fn, 128)
# Inputs of FP8 up to which a grouped GEMM's results take as long to store as to compute.
_FEW_INPUTS = 1024
# Largest tiles without products from shared memory, where larger ones spill registers: of INT4, and
# of 8 bits in groups or blocks, which are summed up group by group.
_LARGEST_OLD_INT4_TILE, _LARGEST_OLD_GROUPED_TILE = 16, 32
# Programs of a multiprocessor that stream rows of one token's experts with plain weights; the
# longest token that they take, and the longest rows of a token's inner elements, which lie in
# registers; elements of a block of those.
_STREAMS = 4
_LONGEST_INPUT, _LONGEST_ROW = 8192, 24_576
_SHORTEST_BLOCK, _LONGEST_BLOCK = 512, 8192
# MXFP4's products of few tokens: gate and up by four warps, of which each asks for all that it
# multiplies of gpt-oss' 2,880 inputs at once, and down by one for each expert. A layer of
# gpt-oss-20b without attention takes 46.2 us for one token on an H200, with four warps for each
# expert 48.0 (docs/experiments.md, "kernels that begin before the one ahead has ended"). With its
# loads in order a program of one block of gates and ups takes 27.2 us of a layer's mixture, and
# 30.1 otherwise ("experts in MXFP4 as streams"). Down asks for half of an expert's steps before it
# computes; with loads in order three of its programs have registers on a multiprocessor, otherwise
# two. By programs of 8 outputs, whose steps are an output's two tiles, it takes one token 7.5 us in
# place of 9.3 by those of 16 (one H200, 2026-11-29, "steps of a mixture were padded").
FEW_GATE_UP, FEW_DOWN = FewTile(parts=4, ahead=3, in_order=True), FewTile(parts=1, ahead=6, in_order=True)
# Programs of a multiprocessor that stream gates and ups of one token in MXFP4: as many as registers
# allow.
_MXFP4_STREAMS = 3


def stream_rule(choice: Choice, gate_up: ExpertWeights, down: ExpertWeights) -> StreamTile | None:
    """The tile of products of one token, from sm_90 on; None: others multiply.

    Weights are plain, of 8 bits with a scale for each output, or of FP8 in blocks. INT8 in groups
    takes programs of few rows 22.7 us a layer of Qwen3-30B-A3B on an H200, and 24.9 so.

    Four programs to a multiprocessor hold the rows that are multiplied and the next ones. A step of
    Qwen3-30B-A3B takes an H200 2,422 us so, 2,667 with programs of two rows each; with three
    quarters of the programs 2,441, with half of them 2,629 (docs/experiments.md, "rows of one
    token's experts as streams").
    """
    (num_tokens, per_token), device = choice.experts.shape, gate_up.storage.device
    are_taken = all(_streams(weights) for weights in (gate_up, down))
    inner, long_row = down.num_inputs, per_token * down.num_inputs
    fits = inner * down.storage.element_size() % 16 == 0 and long_row <= _LONGEST_ROW
    fits = fits and gate_up.num_inputs <= _LONGEST_INPUT
    if num_tokens != 1 or not are_taken or not fits or not card.launches_early(device):
        return None
    programs, block_n = _STREAMS * card.multiprocessors(device), 2
    return StreamTile(
        block_n=block_n,
        gate_up_loops=triton.cdiv(inner, block_n * max(1, programs // per_token)),
        block_k=min(_LONGEST_BLOCK, max(_SHORTEST_BLOCK, triton.next_power_of_2(triton.cdiv(long_row, 3)))),
        down_loops=triton.cdiv(down.num_outputs, programs),
    )


def _streams(weights: ExpertWeights) -> bool:
    """Whether programs that stay can stream such weights."""
    layout = weights.layout()
    if layout.is_grouped:
        # A block of a short expert's inputs has no whole group.
        return layout.kind == "fp8" and layout.num_inputs >= layout.group
    return layout.kind != "int4"


def few_rule(choice: Choice, gate_up: ExpertWeights, down: ExpertWeights) -> tuple[FewTile, FewTile]:
    """The tiles of few tokens' products in MXFP4: of gate and up, and of down.

    From sm_90 on gates and ups stream, by programs that are all there at once if there is one
    token. A layer's mixture of gpt-oss-20b takes an H200 26.7 us so for one token, 27.7 by programs
    of a block each, and 81.0 and 84.7 for four; with 3 or 5 blocks a program instead of 4, of which
    the last multiprocessors have less to do, 29.2 (docs/experiments.md, "experts in MXFP4 as
    streams").
    """
    per_token, device = choice.experts.shape[1], gate_up.storage.device
    if not card.launches_early(device):
        return FEW_GATE_UP, FEW_DOWN
    programs = _MXFP4_STREAMS * card.multiprocessors(device)
    loops = triton.cdiv(per_token * triton.cdiv(down.num_inputs, BLOCK_INNER), programs)
    return FEW_GATE_UP._replace(loops=loops), FEW_DOWN


def vector_rule(weights: ExpertWeights) -> VectorTile:
    """The tile of a product of few tokens: some KB of weights are under way in a program.

    Two tokens of Qwen3-30B-A3B in FP8 take an H100 39.2 us in tiles of 8 outputs, and 49.5 in tiles
    of 4 whose rows are loaded whole (docs/experiments.md, "experts that multiply FP8 by FP8").
    """
    if weights.layout().kind == "plain":
        return VectorTile(block_n=2, block_words=2048, num_warps=4)
    return VectorTile(block_n=8, block_words=128, num_warps=8)


def pair_rule(
    num_pairs: int, weights: ExpertWeights, gated: bool, is_rounded: bool, of_results: InputRounding | None = None
) -> PairTile | GroupedTile:
    """The tile of a product of many pairs, of the kernel that takes it.

    Args:
        num_pairs: Pairs of all tokens.
        weights: The weights of the product.
        gated: Whether outputs are gates and as many ups.
        is_rounded: Whether FP8 multiplies FP8.
        of_results: How results are rounded behind the product, which then may round them itself;
            None: they are not.
    """
    tiles: tuple[GroupedTile | None, ...] = ()
    # A grouped GEMM's places in x are 32 bits.
    if num_pairs * weights.num_inputs < 1 << 31:
        rounding = _rounding_rule(num_pairs, weights) if gated and is_rounded and of_results == _IN_GROUPS else None
        tiles = (rounding, _grouped_rule(num_pairs, weights, gated, is_rounded))
    for tile in tiles:
        if tile is not None and takes_grouped_gemm(weights, is_rounded, tile, gated):
            return tile
    return (rounded_tile_rule if is_rounded else tile_rule)(num_pairs, weights, gated)


def _rounding_rule(num_pairs: int, weights: ExpertWeights) -> GroupedTile | None:
    """The tile of gates and ups in blocks that rounds inner elements; None: others take less.

    Those that took an H200 least for 256 to 2,048 and 8,192 tokens of Qwen3-30B-A3B, of four
    (docs/experiments.md, "gates and ups in blocks round by themselves").
    """
    average = triton.cdiv(num_pairs, weights.total_experts)
    if not weights.layout().is_grouped or average <= _LEAST_TILE:
        return None
    if average < _LARGEST_TILE:
        return GroupedTile(64, 128, num_warps=8, slots=4, rounds=True)
    return GroupedTile(128, 128, num_warps=8, slots=4, rounds=True)


def _grouped_rule(num_pairs: int, weights: ExpertWeights, gated: bool, is_rounded: bool) -> GroupedTile | None:
    """The tile of a grouped GEMM of sm_90; None: for fewer pairs others take less.

    Those that took an H200 least for 256 to 8,192 tokens of Qwen3-30B-A3B, of 3 to 7
    (docs/experiments.md, "grouped GEMMs by the copy engine"). Of few inputs what is stored takes as
    long as the products, and two programs of a multiprocessor do both at a time. With 64 pairs on
    average half of the experts would need two tiles of 64 ("what bounds grouped GEMMs").
    """
    average = triton.cdiv(num_pairs, weights.total_experts)
    if average <= (_LARGEST_TILE // 4 if gated else _LEAST_TILE // 2):
        return None
    if average <= _LEAST_TILE:
        return GroupedTile(2 * _LEAST_TILE, 128, num_warps=4, slots=5, is_swapped=True)
    if average < _LARGEST_TILE // 2 or is_rounded and weights.layout().is_grouped:
        return GroupedTile(64, 64 if gated else 128, num_warps=4, slots=4)
    if gated:
        return GroupedTile(128, 128, num_warps=8, slots=4)
    if is_rounded and weights.num_inputs <= _FEW_INPUTS and average < 4 * _LARGEST_TILE:
        return GroupedTile(128, 128, num_warps=4, slots=3)
    return GroupedTile(128, 256, num_warps=8, slots=4)


def tile_rule(num_pairs: int, weights: ExpertWeights, gated: bool) -> PairTile:
    """The tile of a product of many pairs.

    From sm_90 on those that took an H200 least for 2 to 8,192 tokens of Qwen3-30B-A3B, of 8 to 10
    of each size (docs/experiments.md, "experts of few tokens in tiles" and "tiles of many tokens of
    a mixture"); tiles of 64 and 128 pairs of 8 bits, and all of other cards, were guessed.
    """
    layout, average = weights.layout(), triton.cdiv(num_pairs, weights.total_experts)
    if not card.has_warpgroup_products(weights.storage.device):
        return _old_tile(layout, average, gated)
    if layout.kind == "int4":
        return _int4_tile(average, gated)
    return _plain_tile(average, gated) if layout.kind == "plain" else _8_bit_tile(average, gated)


def _tile_pairs(average: int, largest: int = _LARGEST_TILE) -> int:
    """Pairs of a tile: about twice those that an expert has on average, a power of two."""
    return min(max(int(triton.next_power_of_2(2 * average)), _LEAST_TILE), largest)


def _guessed_tile(block_m: int, block_words: int, gated: bool) -> PairTile:
    num_warps, num_stages = (8, 3) if block_m == _LARGEST_TILE else (4, 4)
    return PairTile(64 if gated else 128, block_m, block_words, num_warps, num_stages)


def _old_tile(layout: WeightLayout, average: int, gated: bool) -> PairTile:
    """The tile of cards before sm_90, where larger ones of weights in groups spill registers."""
    if layout.kind == "int4":
        return _guessed_tile(_tile_pairs(average, _LARGEST_OLD_INT4_TILE), 64, gated)
    largest = _LARGEST_OLD_GROUPED_TILE if layout.is_grouped else _LARGEST_TILE
    return _guessed_tile(_tile_pairs(average, largest), 64 if layout.kind == "plain" else 128, gated)


def _plain_tile(average: int, gated: bool) -> PairTile:
    block_m = _tile_pairs(average)
    if block_m == _LEAST_TILE:
        return PairTile(64, block_m, 128, 4, 4) if gated else PairTile(128, block_m, 64, num_warps=4, num_stages=6)
    if block_m == _LARGEST_TILE:
        return PairTile(128 if gated else 256, block_m, 64, num_warps=8, num_stages=4, outputs_first=True)
    return _guessed_tile(block_m, 64, gated)


def _8_bit_tile(average: int, gated: bool) -> PairTile:
    """The tile of 8 bits that multiply rows in 16."""
    if average <= _LEAST_TILE // 4:
        return PairTile(64, _LEAST_TILE // 2, 128, num_warps=4, num_stages=3)
    block_m = _tile_pairs(average)
    if block_m <= 2 * _LEAST_TILE:
        return PairTile(32, block_m, 128, num_warps=2, num_stages=4 if block_m == _LEAST_TILE else 3)
    return _guessed_tile(block_m, 128, gated)


def _int4_tile(average: int, gated: bool) -> PairTile:
    if average <= _LEAST_TILE // 2:
        block_m = _LEAST_TILE if average > _LEAST_TILE // 4 else _LEAST_TILE // 2
        return PairTile(64, block_m, 64, num_warps=4, num_stages=3)
    if average >= _LARGEST_TILE:
        return PairTile(128, _LARGEST_TILE, 64, num_warps=8, num_stages=3)
    is_small = average <= _LEAST_TILE
    if gated is is_small:
        return PairTile(64, 32 if is_small else 64, 64, num_warps=4, num_stages=3)
    return PairTile(128, 32 if is_small else 64, 64, num_warps=8, num_stages=3)


def rounded_tile_rule(num_pairs: int, weights: ExpertWeights, gated: bool) -> PairTile:
    """The tile of a product of many pairs in which FP8 multiplies FP8.

    Those that took an H100 least for 64, 256, 1,024 and 8,192 tokens of Qwen3-30B-A3B, of 163
    (docs/experiments.md, "experts that multiply FP8 by FP8"). Sums in two halves, of tensor cores
    and of fp32, leave registers for no larger ones. Sums of tensor cores alone do: theirs of 128
    pairs took an H200 least, or 1% more, for 2,048 and 8,192 tokens, of 14 to 28 ("sums of FP8 by
    the tensor cores alone").
    """
    average = triton.cdiv(num_pairs, weights.total_experts)
    if weights.layout().is_grouped:
        return _rounded_block_tile(average, gated)
    if average >= _LARGEST_TILE and weights.num_inputs <= MOST_FAST_INPUTS:
        if gated:
            return PairTile(64, _LARGEST_TILE, 128, num_warps=4, num_stages=3)
        if average < 2 * _LARGEST_TILE:
            return PairTile(128, _LARGEST_TILE, 128, num_warps=4, num_stages=4)
        return PairTile(256, _LARGEST_TILE, 128, num_warps=8, num_stages=3, outputs_first=True)
    block_m = _rounded_tile_pairs(average)
    if block_m == _LEAST_TILE and gated:
        return PairTile(64, block_m, 256, num_warps=4, num_stages=3)
    if block_m <= _LEAST_TILE * 2:
        return PairTile(64, block_m, 128, num_warps=4, num_stages=5)
    if block_m < _LARGEST_TILE:
        return PairTile(64 if gated else 128, block_m, 128, num_warps=4, num_stages=3)
    if gated:
        return PairTile(64, block_m, 128, num_warps=8, num_stages=4)
    return PairTile(64, block_m, 128, num_warps=4, num_stages=3, outputs_first=True)


def _rounded_tile_pairs(average: int) -> int:
    """Pairs of a tile in which fp32 adds up the tensor cores' sums."""
    return _tile_pairs(average, _LARGEST_TILE if average >= 2 * _LARGEST_TILE else _LARGEST_TILE // 2)


def _rounded_block_tile(average: int, gated: bool) -> PairTile:
    """The tile of weights in blocks, whose scales fp32 multiplies the sums of 128 inputs by.

    Within 3% of those that took an H200 least for 8, 64, 256, 1,024 and 8,192 tokens of
    Qwen3-30B-A3B, of 5 to 10 (docs/experiments.md, "FP8 in blocks as people publish it").
    """
    block_m = _rounded_tile_pairs(average)
    if gated:
        return PairTile(64, block_m, 128, num_warps=4, num_stages=5 if block_m == _LEAST_TILE else 3)
    if block_m == _LEAST_TILE:
        return PairTile(128, block_m, 128, num_warps=4, num_stages=4)
    return PairTile(128, min(block_m, _LARGEST_TILE // 2), 128, num_warps=4, num_stages=3)


def many_rule(num_pairs: int, weights: ExpertWeights, gated: bool) -> ManyTile | Mxfp4Tile:
    """The tile of a product of many pairs in MXFP4, of the kernel that takes it."""
    average = triton.cdiv(num_pairs, weights.total_experts)
    tile = _mxfp4_gemm_rule(average, gated)
    # A grouped GEMM's places in x are 32 bits.
    are_near = num_pairs * weights.num_inputs < 1 << 31
    if tile is not None and are_near and takes_mxfp4_gemm(weights, tile, gated):
        return tile
    return _many_tile_rule(average, weights, gated)


def _mxfp4_gemm_rule(average: int, gated: bool) -> Mxfp4Tile | None:
    """The tile of a grouped GEMM of sm_90 in MXFP4; None: for fewer pairs the other kernel's.

    Those that took an H200 least, or at most 2% more, for 256 to 2,048 and 8,192 tokens of
    gpt-oss-20b: gates and ups of 512 tokens 248 us a layer, by the other kernel 257, of 8,192
    tokens 1,840 and 1,956; down of 256 tokens 80 and 92, of 8,192 tokens 940 and 1,208
    (docs/experiments.md, "MXFP4 of many tokens by the copy engine").
    """
    if gated:
        is_large = average > 4 * _LARGEST_TILE
        return Mxfp4Tile(128, 128, num_warps=8, slots=3 if is_large else 4) if 2 * average >= _LARGEST_TILE else None
    if average > _LARGEST_TILE:
        return Mxfp4Tile(128, 128, num_warps=8, slots=4)
    return Mxfp4Tile(64, 128, num_warps=4, slots=4) if average > _LEAST_TILE else None


def _many_tile_rule(average: int, weights: ExpertWeights, gated: bool) -> ManyTile:
    """The other kernel's tile in MXFP4; its size follows the pairs as others' do.

    Those of 128 pairs were the fastest of gpt-oss-20b on an H200 from 512 tokens on, where an
    expert has 64 (docs/experiments.md, "experts of few tokens in tiles"). Before sm_90 those, and
    128 outputs, spill registers.
    """
    is_new = card.has_warpgroup_products(weights.storage.device)
    block_n = 128 if is_new and not gated else 64
    if 2 * average >= _LARGEST_TILE and is_new:
        return ManyTile(block_n, _LARGEST_TILE, num_warps=4, num_stages=3)
    return ManyTile(block_n, _tile_pairs(average, _LARGEST_TILE // 2), num_warps=4, num_stages=4)
