"""Which tile cuBLAS is given, by a product's sizes and the card's multiprocessors.

Measured on an H200 (docs/experiments.md, "tiles that the library does not name"). Of FP8 the
library names one tile whatever the sizes, and another is named here where it should take a tenth
less; in blocks it has few others. Of bf16 the library's own choice is the better one but where it
splits inputs, or its tiles don't fill their waves.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from headrace_kernels.linear.cublas.bindings import ProductShape, TileName

# cublasLtClusterShape_t: programs alone, and two whose tokens differ, which share the weight. The
# latter is slow where tiles of tokens are odd in number (QKV of 384 rows in FP8 37 us for 21).
_ALONE, _PAIRS_OF_TOKENS = 2, 5
# Inputs of a step.
_STEP_INPUTS = 128
# What a wave takes an H200 besides its steps, and a step besides and by its products, in
# microseconds. Products in bf16 take twice as long.
_WAVE_US, _STEP_US, _FP8_PRODUCT_US = 2.5, 0.05, 0.32 / (128 * 128)
# Of what the library's own tile of FP8 takes; with less to gain it was the faster one in waves.
_WORTHWHILE = 0.9
# Rows that the library's own tile of FP8 has.
OWN_FP8_ROWS = 128
# A wave of bf16 that leaves more than half of the card idle is slower than split inputs.
_LEAST_OF_A_WAVE = 0.45
# Waves are whole where so much of the card is busy on average.
_WHOLE_WAVES = 0.93
# Outputs of bf16 that are few, for each multiprocessor: 128 rows are one wave of the smallest tile.
_FEW_OUTPUTS = 32
# Rows of bf16 beyond which the library's own were as fast or faster: of few outputs, which are the
# most rows of all, and of many.
MOST_BF16_ROWS, _MOST_ROWS_OF_MANY_OUTPUTS = 384, 256


class _Tile(NamedTuple):
    """Outputs and tokens of a program, and which of the tile's kernels is fast."""

    outputs: int
    tokens: int
    # See `TileName`.
    tile: int
    option: int


# That of the library, which is not named.
_OWN_FP8_TILE = _Tile(128, OWN_FP8_ROWS, 20, 7)
_FP8_TILES = (
    _Tile(64, 64, 15, 1),
    # Slow unless it is whole.
    _Tile(64, 96, 26, 5),
    _Tile(128, 64, 18, 4),
    _Tile(128, 88, 401, 5),
    _Tile(128, 96, 33, 5),
    _Tile(128, 104, 402, 5),
    # Slow in more than one wave.
    _Tile(192, 64, 208, 4),
)
# In blocks the library's check takes these for any sizes, and in more than one wave results are
# wrong: tiles are left out. Rows up to which start-up compares each product.
_BLOCK_TILES = (_Tile(64, 64, 15, 0), _Tile(128, 64, 18, 0))
_MOST_BLOCK_ROWS = 256
_WHOLE_FP8_TILE, _ONE_WAVE_FP8_TILE = _FP8_TILES[1], _FP8_TILES[-1]
_BF16_TILES_OF_FEW_OUTPUTS = (_Tile(64, 64, 15, 1), _Tile(64, 96, 26, 1), _Tile(128, 64, 18, 0), _Tile(96, 128, 28, 4))
_BF16_TILE_OF_MANY_OUTPUTS = _Tile(112, 128, 165, 4)


def tile_rule(shape: ProductShape, multiprocessors: int) -> TileName | None:
    """The tile of a product; None: the library's own choice."""
    if shape.number.itemsize == 1:
        tile = _fp8_tile(shape, multiprocessors)
        return None if tile is None else TileName(tile.tile, tile.option, _ALONE)
    tile = _bf16_tile(shape, multiprocessors)
    if tile is None:
        return None
    has_pairs = shape.num_tokens // tile.tokens % 2 == 0 and _waves(tile, shape, multiprocessors) > 1
    return TileName(tile.tile, tile.option, _PAIRS_OF_TOKENS if has_pairs else _ALONE)


def _fp8_tile(shape: ProductShape, multiprocessors: int) -> _Tile | None:
    known = _BLOCK_TILES if shape.in_blocks else _FP8_TILES
    tiles = [tile for tile in known if _suits(tile, shape, multiprocessors)]
    if not tiles:
        return None
    best = min(tiles, key=lambda tile: _microseconds(tile, shape, multiprocessors))
    own = shape._replace(num_tokens=math.ceil(shape.num_tokens / OWN_FP8_ROWS) * OWN_FP8_ROWS)
    most = _WORTHWHILE * _microseconds(_OWN_FP8_TILE, own, multiprocessors)
    return best if _microseconds(best, shape, multiprocessors) <= most else None


def _suits(tile: _Tile, shape: ProductShape, multiprocessors: int) -> bool:
    """Whether a tile of FP8 is as fast as it is reckoned to be."""
    if shape.in_blocks:
        return shape.num_tokens <= _MOST_BLOCK_ROWS and _waves(tile, shape, multiprocessors) <= 1
    if tile is _WHOLE_FP8_TILE:
        return shape.num_tokens % tile.tokens == 0
    return tile is not _ONE_WAVE_FP8_TILE or _waves(tile, shape, multiprocessors) <= 1


def _bf16_tile(shape: ProductShape, multiprocessors: int) -> _Tile | None:
    """Tiles are whole: rows of x, behind which no memory lies, fill no more than there are."""
    if shape.num_outputs <= _FEW_OUTPUTS * multiprocessors:
        if shape.num_tokens > MOST_BF16_ROWS:
            return None
        whole = [tile for tile in _BF16_TILES_OF_FEW_OUTPUTS if shape.num_tokens % tile.tokens == 0]
        best = min(whole, key=lambda tile: _microseconds(tile, shape, multiprocessors), default=None)
        fits = best is not None and _LEAST_OF_A_WAVE <= _waves(best, shape, multiprocessors) <= 1
        return best if fits else None
    tile = _BF16_TILE_OF_MANY_OUTPUTS
    waves = _waves(tile, shape, multiprocessors)
    is_whole = shape.num_tokens % tile.tokens == 0 and waves / math.ceil(waves) >= _WHOLE_WAVES
    return tile if is_whole and shape.num_tokens <= _MOST_ROWS_OF_MANY_OUTPUTS else None


def _microseconds(tile: _Tile, shape: ProductShape, multiprocessors: int) -> float:
    """How long a product takes: a multiprocessor works on one tile at a time."""
    product = _FP8_PRODUCT_US * shape.number.itemsize * tile.outputs * tile.tokens
    steps = math.ceil(shape.num_inputs / _STEP_INPUTS)
    return math.ceil(_waves(tile, shape, multiprocessors)) * (_WAVE_US + steps * (_STEP_US + product))


def _waves(tile: _Tile, shape: ProductShape, multiprocessors: int) -> float:
    """Tiles of the product, by those that the card works on at a time."""
    tiles = math.ceil(shape.num_tokens / tile.tokens) * math.ceil(shape.num_outputs / tile.outputs)
    return tiles / multiprocessors
