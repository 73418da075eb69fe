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
# Programs of a persistent kernel, one to a multiprocessor, which take tiles and shares in turn.
_PERSISTENT_PROGRAMS = 132
# What a tile or share takes such a program beside its keys, in keys that it attends to meanwhile:
# an H200 takes 54 us in place of 40 if 128 tiles of 2,000 keys are halved (docs/experiments.md,
# "shares for programs that stay").
_ITEM_KEYS = 1024
# Keys of a share, at least: merging a result takes about as long as attending to 64.
_LEAST_KEYS = 512

_Int64Array = npt.NDArray[np.int64]


def most_places(num_kv_heads: int) -> int:
    """Results of shares that a step has at most, each of a tile and all key/value heads."""
    return -(-SHARED_PROGRAMS // num_kv_heads)


def share_out(keys: _Int64Array, num_kv_heads: int, num_items: int, persistent: bool = False) -> _Int64Array:
    """How many programs each tile has for every key/value head, [num_tiles].

    Args:
        keys: [num_tiles] keys that each tile sees, at most.
        num_kv_heads: Key/value heads of one card's cache.
        num_items: Programs for a key/value head that there is room for; no tile is left out if
            that is not less than the number of tiles.
        persistent: Whether the kernel's programs stay and take one tile or share after the other.
    """
    if not persistent:
        return _counts(keys, num_kv_heads, num_items, SHARED_PROGRAMS)
    counts = _counts(keys, num_kv_heads, num_items, _PERSISTENT_PROGRAMS)
    if 4 * counts.sum() * num_kv_heads >= 3 * _PERSISTENT_PROGRAMS:
        return counts
    # One turn would leave many programs without work: two shorter ones may take less.
    more = _counts(keys, num_kv_heads, num_items, SHARED_PROGRAMS)
    if (more == counts).all():
        return counts
    return min(counts, more, key=lambda each: _longest_turns(keys, num_kv_heads, each))


def _counts(keys: _Int64Array, num_kv_heads: int, num_items: int, programs: int) -> _Int64Array:
    """`share_out` for so many programs of similar length."""
    share = max(int(keys.sum()) * num_kv_heads / programs, _LEAST_KEYS)
    while True:
        # Rounded down: a program more than the card takes at a time would run alone at the end.
        counts: _Int64Array = np.maximum(keys // share, 1).astype(np.int64)
        if counts.sum() <= max(num_items, keys.size):
            return counts
        share *= 1.05


def _longest_turns(keys: _Int64Array, num_kv_heads: int, counts: _Int64Array) -> int:
    """Keys of the persistent program that has the most, dealt out in turn, back and forth."""
    lengths = np.sort(np.repeat(keys // counts + _ITEM_KEYS, counts * num_kv_heads))[::-1]
    turns = np.zeros((-(-lengths.size // _PERSISTENT_PROGRAMS), _PERSISTENT_PROGRAMS), np.int64)
    turns.reshape(-1)[: lengths.size] = lengths
    turns[1::2] = turns[1::2, ::-1].copy()
    return int(turns.sum(axis=0).max())
