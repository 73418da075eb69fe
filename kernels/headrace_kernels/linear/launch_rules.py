"""Launch rules of products with a `QuantizedWeight`: which tile a kernel takes.

Owns the tables of tiles and the sizes between them; which kernel takes a product at all is
`linear.quantized`'s. What was measured stands in docs/experiments.md, "Launch rules of products".
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from headrace_kernels import card
from headrace_kernels.hopper.row_streams import rows_class
from headrace_kernels.linear.few_bits.stream_sm90 import (
    MAX_BIT_STREAM_ROWS,
    BitStreamTile,
    takes_bit_streams,
    takes_tile,
)
from headrace_kernels.linear.gemm_weight_only import GemmTile
from headrace_kernels.linear.gemm_weight_only_sm90 import WarpgroupTile, splittings, takes_warpgroups
from headrace_kernels.linear.gemv_8bit import GemvTile
from headrace_kernels.linear.gemv_int4 import Int4GemvTile
from headrace_kernels.linear.small_batch import SmallBatchTile
from headrace_kernels.linear.small_batch_8bit_sm90 import (
    MAX_SMALL_BATCH_8BIT_ROWS,
    SmallBatch8BitTile,
    rows_of,
    takes_small_batch_8bit,
)
from headrace_kernels.weight_formats.quantized_weight import QuantizedWeight, QuantKind

# Tiles of one row for a gate and up projection, for products whose outputs are few (they are added
# to the residual stream), and for others. 32 layers of an 8B Llama take 1.30 ms in INT4 on an H200
# (docs/experiments.md, "Launch rules of products").
_ROW_TILES: dict[QuantKind, tuple[GemvTile | Int4GemvTile, ...]] = {
    QuantKind.INT4: (Int4GemvTile(16, 2, 1), Int4GemvTile(16, 8, 2), Int4GemvTile(16, 8, 2)),
    QuantKind.FP8: (GemvTile(2, 4, True), GemvTile(8, 4, False), GemvTile(8, 2, False)),
    QuantKind.INT8: (GemvTile(4, 4, True), GemvTile(8, 4, True), GemvTile(4, 2, True)),
}


def gemv_rule(weight: QuantizedWeight, gated: bool = False) -> GemvTile | Int4GemvTile:
    """The tile of the GEMV, which multiplies one row."""
    gate_up, few_outputs, others = _ROW_TILES[weight.kind]
    if gated:
        if isinstance(gate_up, Int4GemvTile) and weight.num_inputs > 4096:
            # A warp has inputs of its own: with twice as many, twice the warps (70B's 8,192: 20.6
            # us).
            return Int4GemvTile(gate_up.block_n, 2 * gate_up.num_warps, gate_up.run, gate_up.max_registers)
        return gate_up
    return few_outputs if weight.num_outputs <= weight.num_inputs else others


# Tiles of 2 to 64 rows of 8 bits where `linear.small_batch_8bit_sm90` is faster than the other
# kernels, by kind and class of rows, in the order of `_ROW_TILES` (FP8, 32 rows: 2.66 ms, by the
# others 3.62; docs/experiments.md).
_SMALL_BATCH_8BIT_TILES: dict[tuple[QuantKind, int], tuple[SmallBatch8BitTile, ...]] = {
    (QuantKind.FP8, 8): (
        SmallBatch8BitTile(64, 2, 4, 3, 1),
        SmallBatch8BitTile(64, 1, 4, 5, 4),
        SmallBatch8BitTile(64, 1, 4, 5, 3),
    ),
    (QuantKind.FP8, 16): (
        SmallBatch8BitTile(64, 2, 4, 3, 1),
        SmallBatch8BitTile(64, 1, 4, 5, 4),
        SmallBatch8BitTile(64, 2, 4, 4, 4),
    ),
    (QuantKind.FP8, 32): (
        SmallBatch8BitTile(64, 2, 4, 4, 1),
        SmallBatch8BitTile(64, 2, 4, 4, 8),
        SmallBatch8BitTile(64, 2, 4, 4, 5),
    ),
    (QuantKind.FP8, 64): (
        SmallBatch8BitTile(64, 2, 4, 3, 1),
        SmallBatch8BitTile(64, 2, 4, 3, 8),
        SmallBatch8BitTile(64, 2, 4, 3, 5),
    ),
    (QuantKind.INT8, 16): (
        SmallBatch8BitTile(64, 2, 4, 3, 1),
        SmallBatch8BitTile(64, 1, 4, 5, 4),
        SmallBatch8BitTile(64, 1, 4, 5, 3),
    ),
    (QuantKind.INT8, 32): (
        SmallBatch8BitTile(64, 2, 4, 4, 1),
        SmallBatch8BitTile(64, 2, 4, 4, 8),
        SmallBatch8BitTile(64, 2, 4, 4, 5),
    ),
    (QuantKind.INT8, 64): (
        SmallBatch8BitTile(64, 2, 4, 3, 1),
        SmallBatch8BitTile(64, 2, 4, 3, 8),
        SmallBatch8BitTile(64, 2, 4, 3, 5),
    ),
}


class _Fit(NamedTuple):
    """A tile, and how many of its programs have room on a multiprocessor together.

    Without a tile: other kernels are faster, where outputs would be so many programs of 32.
    """

    tile: BitStreamTile | None
    programs: int

    @property
    def outputs(self) -> int:
        """Outputs of a multiprocessor's programs."""
        return self.programs * (32 if self.tile is None else self.tile.block_n)


class _BitStreamTiles(NamedTuple):
    """Tiles of the kernel for sm_90 that streams weights of few bits, by the form of a product.

    The first is taken whose programs are all there at once; without one other kernels are faster.
    """

    gate_up: tuple[_Fit, ...]
    # Of no more than twice as many inputs as outputs, and of more.
    others: tuple[_Fit, ...]
    long_inputs: tuple[_Fit, ...]


# Of a tile that is taken however many programs it has.
_ANY = 1 << 30
_GATES_OF_8_ROWS = (
    _Fit(BitStreamTile(2, 1, 3), 3),
    _Fit(BitStreamTile(1, 2, 3), 2),
    _Fit(BitStreamTile(1, 1, 3), 3),
    _Fit(BitStreamTile(1, 2, 3), _ANY),
)
_GATES_OF_16_ROWS = (
    _Fit(BitStreamTile(2, 1, 3), 3),
    _Fit(BitStreamTile(1, 1, 5), 2),
    _Fit(BitStreamTile(1, 1, 3), 3),
    _Fit(BitStreamTile(1, 1, 5), _ANY),
)
# By bits and class of rows; what is missing, other kernels multiply. 32 layers of an 8B Llama take
# an H200 2.17 ms in FP8 with 8 rows (2.33 without), 1.84 in INT4 (2.31) and with 16 rows 2.31
# (3.11; docs/experiments.md, "few rows of few bits"). Gates and ups of 8 bits were timed for Qwen3
# of 4B to 32B and an 8B Llama (the same, "blocks, the rest of the way").
_BIT_STREAM_TILES: dict[tuple[int, int], _BitStreamTiles] = {
    (8, 8): _BitStreamTiles(
        _GATES_OF_8_ROWS,
        # A second wave of a few programs takes as long as a whole one; a head has many.
        (
            _Fit(BitStreamTile(2, 2, 6), 1),
            _Fit(BitStreamTile(2, 2, 4), 2),
            _Fit(None, 4),
            _Fit(BitStreamTile(2, 2, 4), _ANY),
        ),
        (_Fit(BitStreamTile(2, 2, 6), 1),),
    ),
    (8, 16): _BitStreamTiles(_GATES_OF_16_ROWS, (), ()),
    (4, 8): _BitStreamTiles(
        (_Fit(BitStreamTile(1, 1, 2), _ANY),),
        (_Fit(BitStreamTile(4, 1, 2, 8), 1), _Fit(BitStreamTile(2, 1, 3), _ANY)),
        (),
    ),
    (4, 16): _BitStreamTiles(
        (_Fit(BitStreamTile(1, 1, 2), _ANY),),
        (_Fit(BitStreamTile(2, 1, 3), 1), _Fit(BitStreamTile(2, 1, 2, 8), _ANY)),
        (_Fit(BitStreamTile(2, 1, 3), _ANY),),
    ),
}
# The same of FP8 in blocks of 128 by 128, by class of rows: all of those models.
_BLOCK_STREAM_TILES: dict[int, _BitStreamTiles] = {
    8: _BitStreamTiles(
        _GATES_OF_8_ROWS,
        (_Fit(BitStreamTile(2, 2, 6), 1), _Fit(BitStreamTile(2, 2, 4), 2)),
        (_Fit(BitStreamTile(2, 2, 6), 1),),
    ),
    16: _BitStreamTiles(
        _GATES_OF_16_ROWS,
        (_Fit(BitStreamTile(2, 2, 4), 1), _Fit(BitStreamTile(2, 2, 4, 8), 1)),
        (_Fit(BitStreamTile(2, 2, 4), 1),),
    ),
}
_FEWEST_BIT_STREAM_ROWS = 2
_MOST_ROWS_NORMED_INSIDE = 8


def bit_stream_rule(num_rows: int, weight: QuantizedWeight, gated: bool = False) -> BitStreamTile | None:
    """The tile of a product by `linear.few_bits.stream_sm90`; None: other kernels multiply."""
    if not _FEWEST_BIT_STREAM_ROWS <= num_rows <= MAX_BIT_STREAM_ROWS or not takes_bit_streams(weight):
        return None
    rows = rows_class(num_rows)
    if weight.scale_outputs > 1:
        tiles = _BLOCK_STREAM_TILES.get(rows)
    else:
        tiles = _BIT_STREAM_TILES.get((4 if weight.kind is QuantKind.INT4 else 8, rows))
    if tiles is None:
        return None
    if gated:
        fits = tiles.gate_up
    else:
        fits = tiles.long_inputs if weight.num_inputs > 2 * weight.num_outputs else tiles.others
    outputs, multiprocessors = weight.num_outputs // (1 + gated), card.multiprocessors(weight.device)
    tile = next((fit.tile for fit in fits if outputs <= fit.outputs * multiprocessors), None)
    return tile if tile is not None and takes_tile(weight, tile, gated) else None


def norms_inside(num_rows: int, dtype: torch.dtype) -> bool:
    """Whether `linear.few_bits.stream_sm90` norms x itself, which it does in bf16 alone.

    With 9 rows and more a launch before it is faster (INT4, 16 rows, QKV: 11.4 us, 11.6 inside).
    """
    return dtype == torch.bfloat16 and num_rows <= _MOST_ROWS_NORMED_INSIDE


def small_batch_8bit_rule(num_rows: int, weight: QuantizedWeight, gated: bool = False) -> SmallBatch8BitTile | None:
    """The tile of some rows of 8 bits; None: other kernels multiply."""
    if not 2 <= num_rows <= MAX_SMALL_BATCH_8BIT_ROWS or not takes_small_batch_8bit(weight):
        return None
    tiles = _SMALL_BATCH_8BIT_TILES.get((weight.kind, rows_of(num_rows)))
    if tiles is None:
        return None
    gate_up, few_outputs, others = tiles
    tile = gate_up if gated else few_outputs if weight.num_outputs <= weight.num_inputs else others
    # Inputs are split where outputs alone would leave multiprocessors idle; a head's sums would be
    # more bytes than its words.
    programs = math.ceil(weight.num_outputs / (tile.side_n * tile.sides))
    return tile if programs < 2 * card.multiprocessors(weight.device) else tile._replace(splits=1)


def small_batch_rule(num_rows: int, weight: QuantizedWeight, gated: bool = False) -> SmallBatchTile:
    """The tile of 1 to 16 rows, on any GPU.

    Each is within 2% of its product's best on an H200 (INT4, 1 to 8 rows: 2.28 to 2.39 ms for 32
    layers of an 8B Llama; docs/experiments.md), with norms by a kernel of their own.
    """
    # Products that are added to the residual stream: their outputs are few, so that a program has
    # more under way.
    has_few_outputs = not gated and weight.num_outputs <= weight.num_inputs
    if weight.kind is not QuantKind.INT4:
        return SmallBatchTile(16, 128, 4, 4, 5 if has_few_outputs and num_rows <= 8 else 3, norm_inside=False)
    if has_few_outputs or num_rows > 8:
        return SmallBatchTile(16, 128, 4, 4, 3, norm_inside=False)
    return SmallBatchTile(16, 64, 4, 4, 4, norm_inside=False)


def gemm_rule(num_rows: int, weight: QuantizedWeight) -> GemmTile | WarpgroupTile:
    """The tile of 17 rows and more, some percent off the best on an H200 at the most."""
    if takes_warpgroups(weight):
        return _gemm_sm90_rule(num_rows, weight)
    is_int4 = weight.kind is QuantKind.INT4
    if num_rows > 64:
        # A word is four inputs of INT4 and one of the others. Older cards keep operands in
        # registers, and would have to spill some.
        rows = 128 if card.has_warpgroup_products(weight.device) else 64
        tile, programs = GemmTile(128, rows, 64 if is_int4 else 128, 8, 3), 96
    elif is_int4:
        tile, programs = GemmTile(128, 64, 32, 4, 4) if num_rows > 32 else GemmTile(128, 32, 64, 8, 4), 192
    else:
        tile, programs = GemmTile(64, 64 if num_rows > 32 else 32, 128, 4, 3), 256
    # Inputs are split where outputs alone would leave multiprocessors idle.
    alone = math.ceil(weight.num_outputs / tile.block_n) * math.ceil(num_rows / tile.block_m)
    return tile._replace(splits=next((splits for splits in (1, 2, 4) if splits * alone >= programs), 8))


def _gemm_sm90_rule(num_rows: int, weight: QuantizedWeight) -> WarpgroupTile:
    """The tile where warp groups multiply.

    32 layers of an 8B Llama take 11.7 ms in INT4 at 512 rows on an H200 (docs/experiments.md).
    """
    is_int4 = weight.kind is QuantKind.INT4
    if num_rows <= 32:
        tile, rows = WarpgroupTile(64, 32, 4, 4, 4 if is_int4 else 2), 32
    elif num_rows <= 64:
        # Two programs of 128 outputs for every multiprocessor dequantize and copy less than four of
        # 64.
        many = weight.num_outputs >= 128 * card.multiprocessors(weight.device)
        few = WarpgroupTile(64, 64, 4, 4, 3 if is_int4 else 2)
        tile, rows = WarpgroupTile(128, 64, 8, 8 if is_int4 else 4, 2) if many else few, 64
    elif num_rows <= 128 or 256 < num_rows <= 384:
        # A third tile of 128 rows is less than a second one of 256.
        tile, rows = WarpgroupTile(64, 128, 4, 4, 2), 128 if num_rows <= 128 else 384
    else:
        tile, rows = WarpgroupTile(128, 256, 8, 4, 2), 256 if num_rows <= 256 else 512
    # Splits suit the most rows of a class, so that a class has one tile.
    return splittings(tile, rows, weight)[0]
