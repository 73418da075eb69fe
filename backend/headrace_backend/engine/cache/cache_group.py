"""Layers whose keys and values lie alike in the cache: a group has one block table per sequence.

Owns what the engine must know of a group: how far back its layers look. All groups take their
blocks from one pool, so a block has the same bytes in every group. Which layers form which group is
the model's affair, where the blocks' memory lies the worker's.
"""

from __future__ import annotations

from typing import NamedTuple

# Stands in a table for a block that went back to the pool, as no layer of the group looks so far
# back any more.
NO_BLOCK = -1


class CacheGroup(NamedTuple):
    """Layers that share a block table."""

    # Tokens that a token sees in these layers, itself included; None: all before it.
    window: int | None = None

    def first_needed(self, position: int, block_size: int) -> int:
        """Index of the first block that a token at `position`, or any later one, reads."""
        return 0 if self.window is None else max(0, position - self.window + 1) // block_size


# What a model has whose layers all keep their whole context, whether or not they look at all of it.
ONE_GROUP = (CacheGroup(),)
