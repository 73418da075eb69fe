"""The blocks of the KV cache, by number: holders, free blocks, and known prefixes.

Owns reference counts, the two free lists and the map from a prefix key to the block that holds it.
Does not know sequences or tokens (`kv_cache_manager`, `prefix_keys`) nor memory (the worker). Every
block is in exactly one of three states:

    used    held by at least one sequence (it may have a key besides)
    cached  held by nobody, but its key is known: a later prompt may take it up again; evicted least
    recently used first
    free    held by nobody, content meaningless

so that free + cached + used = total, always.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

PrefixKey = bytes


class BlockPool:
    """Reference counts and free lists of `num_blocks` blocks, numbered from 0."""

    __slots__ = ("_block_of_key", "_cached", "_free", "_key_of_block", "_on_forget", "num_blocks", "ref_counts")

    def __init__(self, num_blocks: int, on_forget: Callable[[PrefixKey], None] | None = None) -> None:
        """All blocks are free. `on_forget` hears the key of each block that is given up."""
        self.num_blocks = num_blocks
        self._on_forget = on_forget
        self.ref_counts = [0] * num_blocks
        # A stack: the block released last is taken first, while its memory may still be in a near
        # cache.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._key_of_block: list[PrefixKey | None] = [None] * num_blocks
        self._block_of_key: dict[PrefixKey, int] = {}

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could give: free and cached."""
        return len(self._free) + len(self._cached)

    @property
    def num_free(self) -> int:
        """Blocks held by nobody and without a key."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks held by nobody whose prefix is known."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks held by at least one sequence."""
        return self.num_blocks - self.num_available

    def allocate(self) -> int | None:
        """Takes a block for one holder; returns None if no block is available.

        A free block comes first, then the cached block that was unused for longest.
        """
        if self._free:
            block = self._free.pop()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            self._forget_key(block)
        else:
            return None
        self.ref_counts[block] = 1
        return block

    def hold(self, block: int) -> bool:
        """Adds a holder to a block that is used or cached; returns whether it is the first."""
        self.ref_counts[block] += 1
        if self.ref_counts[block] > 1:
            return False
        del self._cached[block]
        return True

    def release(self, blocks: Iterable[int]) -> int:
        """One holder fewer of each; the earlier in the iteration, the sooner evicted.

        Returns how many are held by nobody now.
        """
        ref_counts = self.ref_counts
        num_unheld = 0
        for block in blocks:
            count = ref_counts[block] - 1
            assert count >= 0, "a block was released more often than held"
            ref_counts[block] = count
            if count == 0:
                num_unheld += 1
                if self._key_of_block[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None
        return num_unheld

    def publish(self, block: int, key: PrefixKey) -> None:
        """Makes a block findable that is held, full and finite.

        Where the key is known already, the earlier block stays the one to find.
        """
        assert self.ref_counts[block] > 0, "only a held block is published"
        if key not in self._block_of_key and self._key_of_block[block] is None:
            self._block_of_key[key] = block
            self._key_of_block[block] = key

    def find(self, key: PrefixKey) -> int | None:
        """The block that holds the prefix, used or cached; it is not held by asking."""
        return self._block_of_key.get(key)

    def check_integrity(self, holders: dict[int, int]) -> None:
        """Asserts the pool's invariants against the number of holders of each held block."""
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        assert not set(self._free) & set(self._cached), "a block is both free and cached"
        used = [block for block, count in enumerate(self.ref_counts) if count]
        assert self.num_free + self.num_cached + len(used) == self.num_blocks, "free + cached + used != total"
        assert {block: self.ref_counts[block] for block in used} == holders, "reference counts differ from the tables"
        assert all(self._key_of_block[block] is None for block in self._free), "a free block has a key"
        assert all(self._key_of_block[block] is not None for block in self._cached), "a cached block has no key"
        keys = {key: block for block, key in enumerate(self._key_of_block) if key is not None}
        assert keys == self._block_of_key, "keys and blocks disagree"

    def _forget_key(self, block: int) -> None:
        key = self._key_of_block[block]
        assert key is not None, "a cached block has a key"
        del self._block_of_key[key]
        self._key_of_block[block] = None
        if self._on_forget is not None:
            self._on_forget(key)
