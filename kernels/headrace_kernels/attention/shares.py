"""Shares of a long context: how many programs attend for the same tile of a prompt's tokens.

A short chunk deep in a context is a handful of tiles, which would leave most multiprocessors
without work. So `share_out` gives a tile as many programs as make all of similar length. Each sees
a share of the tile's keys, and the last one to finish merges the results (`attention.merge`).
Needs nothing but numpy.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

# Programs of tiles and shares that fill a card: two to a multiprocessor of 132, as many as have
# room there with heads of 128.
SHARED_PROGRAMS = 264
# Keys of a share, at least: merging a result takes about as long as attending to 64.
_LEAST_KEYS = 512

_Int64Array = npt.NDArray[np.int64]


def most_places(num_kv_heads: int) -> int:
    """Results of shares that a step has at most, each of a tile and all key/value heads."""
    return -(-SHARED_PROGRAMS // num_kv_heads)


def share_out(keys: _Int64Array, num_kv_heads: int, num_items: int) -> _Int64Array:
    """How many programs each tile has for every key/value head, [num_tiles].

    Args:
        keys: [num_tiles] keys that each tile sees, at most.
        num_kv_heads: Key/value heads of one card's cache.
        num_items: Programs for a key/value head that there is room for; no tile is left out if
            that is not less than the number of tiles.
    """
    share = max(int(keys.sum()) * num_kv_heads / SHARED_PROGRAMS, _LEAST_KEYS)
    while True:
        # Rounded down: a program more than the card takes at a time would run alone at the end.
        counts: _Int64Array = np.maximum(keys // share, 1).astype(np.int64)
        if counts.sum() <= max(num_items, keys.size):
            return counts
        share *= 1.05
