"""Which blocks a sequence holds: growing, taking up a known prefix, sharing between outputs,
copying before a write, giving back.

Owns every change to a sequence's `blocks`, and through it the block pool and what the tenants'
accounts count as held. Does not decide who may have blocks (`scheduler`). A block is published to
the prefix cache when the step that filled it has settled, if the hidden states that attended to all
of it came out finite (a sample's, or those that the plan has checked, see `plan_builder`): a NaN
anywhere in it would have shown there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from headrace_backend.engine.cache.block_pool import BlockPool
from headrace_backend.engine.cache.prefix_keys import PrefixKeys
from headrace_backend.engine.limits.tenant_account import TenantAccount
from headrace_backend.engine.requests.sequence import Sequence


class BlockCopy(NamedTuple):
    """A whole block to be copied before the step's pass."""

    source: int
    target: int


class KVCacheManager:
    """Blocks of `block_size` tokens for sequences."""

    __slots__ = ("_enable_prefix_cache", "_held_sources", "_keys", "_source_accounts", "block_size", "pool")

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_cache: bool, keys: PrefixKeys) -> None:
        """All blocks free, no prefix known.

        `keys` outlive the cache, as sequences remember theirs.
        """
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self._keys = keys
        self._enable_prefix_cache = enable_prefix_cache
        # Sources of the copies of the step in the making: not to be given away before its plan is
        # complete.
        self._held_sources: Counter[int] = Counter()
        self._source_accounts: dict[int, TenantAccount] = {}

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """Known blocks from the sequence's start on; never all of its tokens, so that the last one
        is computed and can be sampled from.

        Nor any whose hidden states have to tell of the prompt.
        """
        blocks = []
        for index in range(self.num_reusable(sequence) // self.block_size):
            block = self.pool.find(self.key(sequence, index))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_reusable(self, sequence: Sequence) -> int:
        """Tokens from the sequence's start on that may come from the prefix cache."""
        if not self._enable_prefix_cache:
            return 0
        if sequence.prompt_log is not None and sequence.prompt_log.num_planned < sequence.num_prompt_tokens:
            return sequence.prompt_log.num_reusable
        return sequence.num_tokens - 1

    def num_published(self, sequence: Sequence) -> int:
        """Tokens of a running sequence, from its start on, whose blocks were published or found."""
        return sequence.publish_at - self.block_size

    def next_key(self, sequence: Sequence) -> bytes | None:
        """Key of the first full block of the prompt that is not published yet; None: all are."""
        index = self.num_published(sequence) // self.block_size
        if not self._enable_prefix_cache or index >= sequence.num_prompt_tokens // self.block_size:
            return None
        return self.key(sequence, index)

    def num_needed(self, sequence: Sequence, prefix: list[int]) -> int:
        """Available blocks that the sequence would use up to compute all its tokens, given a prefix
        just found.
        """
        ref_counts = self.pool.ref_counts
        return self.num_blocks_for(sequence.num_tokens) - sum(1 for block in prefix if ref_counts[block])

    def take_prefix(self, sequence: Sequence, prefix: list[int]) -> None:
        """Gives a sequence without blocks the prefix just found."""
        assert not sequence.blocks, "only a sequence that begins takes up a prefix"
        sequence.request.account.num_blocks += sum([self.pool.hold(block) for block in prefix])
        sequence.blocks = prefix
        num_tokens = len(prefix) * self.block_size
        sequence.publish_at = num_tokens + self.block_size
        sequence.num_computed = sequence.num_settled = sequence.capacity = num_tokens

    def num_missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that must be allocated before the tokens in [num_computed, num_tokens) can be
        written.
        """
        missing = max(0, self.num_blocks_for(num_tokens) - len(sequence.blocks))
        return missing + 1 if self._must_copy(sequence) else missing

    def grow(self, sequence: Sequence, num_tokens: int) -> int:
        """Appends blocks until the tokens fit.

        The caller has seen to it that they are available. Returns how many were appended.
        """
        missing = max(0, self.num_blocks_for(num_tokens) - len(sequence.blocks))
        for _ in range(missing):
            sequence.blocks.append(self._allocate())
        sequence.request.account.num_blocks += missing
        sequence.capacity = len(sequence.blocks) * self.block_size
        return missing

    def copy_on_write(self, sequence: Sequence) -> BlockCopy | None:
        """Makes the block that the sequence writes to next its own; None if it is.

        The last holder needs no copy.
        """
        must_copy = self._must_copy(sequence)
        sequence.tail_shared = False
        if not must_copy:
            return None
        index = sequence.num_computed // self.block_size
        source, target = sequence.blocks[index], self._allocate()
        sequence.blocks[index] = target
        sequence.request.account.num_blocks += 1
        # The sequence's own hold passes to the copy.
        self._held_sources[source] += 1
        self._source_accounts[source] = sequence.request.account
        return BlockCopy(source, target)

    def end_step(self) -> None:
        """The step's plan is complete: sources of its copies may be given away by later ones."""
        if self._held_sources:
            for source in self._held_sources.elements():
                self._source_accounts[source].num_blocks -= self.pool.release((source,))
            self._held_sources.clear()
            self._source_accounts.clear()

    def fork(self, leader: Sequence, sibling: Sequence) -> None:
        """Gives an output that has computed nothing the prompt's blocks of the output that computed
        it.
        """
        for block in leader.blocks:
            self.pool.hold(block)
        sibling.blocks = list(leader.blocks)
        sibling.capacity = leader.capacity
        sibling.block_keys = leader.block_keys[: leader.num_prompt_tokens // self.block_size]
        # The leader publishes the prompt.
        sibling.publish_at = (leader.num_prompt_tokens // self.block_size + 1) * self.block_size
        sibling.num_computed = leader.num_computed
        leader.tail_shared = sibling.tail_shared = leader.num_computed % self.block_size != 0

    def publish(self, sequence: Sequence) -> None:
        """Offers the full blocks of settled tokens to later prompts."""
        first, num_full = sequence.publish_at // self.block_size - 1, sequence.num_settled // self.block_size
        if self._enable_prefix_cache:
            for index in range(first, num_full):
                self.pool.publish(sequence.blocks[index], self.key(sequence, index))
        sequence.publish_at = (num_full + 1) * self.block_size

    def key(self, sequence: Sequence, index: int) -> bytes:
        """Key of the sequence's block `index`, whose tokens must have been read; the chain is kept
        with the sequence.
        """
        keys = sequence.block_keys
        while len(keys) <= index:
            spec = sequence.request.spec
            start = len(keys) * self.block_size
            parent = keys[-1] if keys else self._keys.salt(spec.tenant, spec.asked.cache_salt)
            keys.append(self._keys.extend(parent, sequence.token_bytes(start, start + self.block_size)))
        return keys[index]

    def release(self, sequence: Sequence) -> None:
        """Gives all blocks back; the end of a prefix is forgotten before its beginning."""
        sequence.request.account.num_blocks -= self.pool.release(reversed(sequence.blocks))
        sequence.blocks = []

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Asserts that reference counts and accounts are what the sequences' tables say, between
        steps.
        """
        assert not self._held_sources, "copies are held for a step that is not being planned"
        sequences = list(sequences)
        self.pool.check_integrity(dict(Counter(block for sequence in sequences for block in sequence.blocks)))
        held: dict[TenantAccount, set[int]] = {}
        for sequence in sequences:
            held.setdefault(sequence.request.account, set()).update(sequence.blocks)
        for account, blocks in held.items():
            assert account.num_blocks == len(blocks), "an account counts each block of its sequences once"

    def _allocate(self) -> int:
        block = self.pool.allocate()
        assert block is not None, "the scheduler looked before it took"
        return block

    def _must_copy(self, sequence: Sequence) -> bool:
        """Whether others hold the block that is written next.

        Holds for copies of this very step don't read it any more.
        """
        if not sequence.tail_shared:
            return False
        block = sequence.blocks[sequence.num_computed // self.block_size]
        return self.pool.ref_counts[block] - self._held_sources[block] > 1
