"""The blocks that a sequence holds, in one table for each cache group.

The manager grows tables, reuses known prefixes, shares blocks between outputs, copies blocks before
a write, and gives them back.

Owns every change to a sequence's `tables`, of which each cache group has one, and through it the
block pool and what the tenants' accounts count as held. Does not decide who may have blocks
(`scheduler`). All tables of a sequence are equally long: the block at index i holds the same tokens
in each group. In a group with a window the blocks that no later token reads go back to the pool as
soon as the steps that might read them have settled, and a prefix is known as far as each group has
the blocks that the next token reads. A block is published to the prefix cache when the step that
filled it has settled, if the hidden states that attended to all of it came out finite (a sample's,
or those that the plan has checked, see `plan_builder`): a NaN anywhere in it would have shown
there. Where layers keep states, a prefix is known as far as there is a checkpoint of them
(`state_checkpoints`), which is published with the block at whose end it stands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from headrace_backend.cache_groups import NO_BLOCK, ONE_GROUP, CacheGroup
from headrace_backend.engine.cache.block_pool import BlockPool
from headrace_backend.engine.cache.prefix_keys import PrefixKeys
from headrace_backend.engine.cache.state_checkpoints import StateCheckpoints
from headrace_backend.engine.limits.tenant_account import TenantAccount
from headrace_backend.engine.requests.sequence import Sequence


class BlockCopy(NamedTuple):
    """A whole block to be copied before the step's pass."""

    source: int
    target: int
    # Index of the cache group in whose table the copy takes the source's place.
    group: int = 0


# Of each group the blocks of a known prefix: a sequence's tables when it begins.
Prefix = list[list[int]]


class KVCacheManager:
    """Manages blocks of `block_size` tokens for sequences."""

    __slots__ = (
        "_enable_prefix_cache",
        "_groups",
        "_has_windows",
        "_held_sources",
        "_keys",
        "_step_tokens",
        "_checkpoints",
        "_source_accounts",
        "block_size",
        "pool",
    )

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_cache: bool,
        keys: PrefixKeys,
        groups: tuple[CacheGroup, ...] = ONE_GROUP,
        step_tokens: int = 1 << 30,
        checkpoints: StateCheckpoints | None = None,
    ) -> None:
        """All blocks free, no prefix known.

        Args:
            num_blocks: Blocks of the pool.
            block_size: Tokens of a block.
            enable_prefix_cache: Whether blocks of one sequence are found by others.
            keys: Makes keys of prefixes. It outlives the cache, as sequences remember theirs.
            groups: Cache groups of the model.
            step_tokens: Most tokens of one step.
            checkpoints: Kept states of recurrent layers; None: the model has no such layers, or
                prefixes are not reused.
        """
        self.pool = BlockPool(num_blocks, None if checkpoints is None else checkpoints.drop)
        self._checkpoints = checkpoints
        self.block_size = block_size
        self._groups = groups
        self._step_tokens = step_tokens
        self._has_windows = any(group.window is not None for group in groups)
        self._keys = keys
        self._enable_prefix_cache = enable_prefix_cache
        # Sources of the copies of the step in the making: not to be given away before its plan is
        # complete.
        self._held_sources: Counter[int] = Counter()
        self._source_accounts: dict[int, TenantAccount] = {}

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks of each group that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def no_prefix(self) -> Prefix:
        """Returns the prefix of a sequence that reuses no blocks: an empty table for each group."""
        return [[] for _ in self._groups]

    def find_prefix(self, sequence: Sequence) -> Prefix:
        """Finds the known blocks from the sequence's start on, for reuse.

        The prefix never holds all tokens, so that the last one is computed and can be sampled from.
        Neither does it hold tokens whose hidden states have to report prompt logprobs. It ends
        where every group has the blocks that the token behind it reads, and where layers keep
        states, at a checkpoint.
        """
        prefix, most = self.no_prefix(), self.num_reusable(sequence) // self.block_size
        for index, group in enumerate(self._groups):
            if group.window is None:
                prefix[index] = self._find(sequence, index, 0, most)
                most = len(prefix[index])
        most = self._with_state(sequence, most)
        while self._has_windows and most and (gap := self._gap(sequence, prefix, most)) is not None:
            most = self._with_state(sequence, gap)
        return [table[:most] for table in prefix]

    def num_found(self, sequence: Sequence, prefix: Prefix) -> int:
        """Tokens from a sequence's start on whose blocks are known.

        They are those of the prefix that `find_prefix` has just returned for it, and where layers
        keep states perhaps some behind it.
        """
        num_blocks = len(prefix[0])
        if self._checkpoints is not None:
            num_blocks += len(self._find(sequence, 0, num_blocks, self.num_reusable(sequence) // self.block_size))
        return num_blocks * self.block_size

    def knows_block(self, sequence: Sequence, index: int) -> bool:
        """Whether the first group's block of these tokens is known, as a first look."""
        if (index + 1) * self.block_size > self.num_reusable(sequence):
            return False
        return self.pool.find(_group_key(self.key(sequence, index), 0)) is not None

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

    def num_needed(self, sequence: Sequence, prefix: Prefix) -> int:
        """Most available blocks that the sequence would use up to compute all its tokens.

        In groups with windows it may have to wait for a step in flight before it goes on.

        `prefix` is what `find_prefix` has just returned for it.
        """
        ref_counts, num_blocks, needed = self.pool.ref_counts, self.num_blocks_for(sequence.num_tokens), 0
        for group, table in zip(self._groups, prefix, strict=True):
            missing = num_blocks - sum([1 for block in table if block == NO_BLOCK or ref_counts[block]])
            needed += missing if group.window is None else min(missing, self._most_blocks(group, sequence.num_tokens))
        return needed

    def fits_free_blocks(self, sequence: Sequence) -> bool:
        """Whether a sequence without blocks can compute all its tokens and no prefix is evicted."""
        return self.num_blocks_for(sequence.num_tokens) * len(self._groups) <= self.pool.num_free

    def num_promised(self, sequence: Sequence) -> int:
        """Most blocks that a running sequence takes beyond its own until it has caught up.

        In groups with windows it gives some back on its way.
        """
        num_tokens = sequence.num_tokens
        if not self._has_windows:
            return self.num_missing(sequence, num_tokens)
        missing = max(0, self.num_blocks_for(num_tokens) - len(sequence.tables[0]))
        promised = sum([min(missing, self._most_blocks(group, num_tokens)) for group in self._groups])
        return promised + len(self._shared_tails(sequence)) if sequence.tail_shared else promised

    def take_prefix(self, sequence: Sequence, prefix: Prefix) -> None:
        """Gives a sequence without blocks the prefix just found."""
        assert not sequence.tables, "only a sequence that begins takes up a prefix"
        for table in prefix:
            sequence.request.account.num_blocks += sum([self.pool.hold(block) for block in table if block != NO_BLOCK])
        sequence.tables = prefix
        num_tokens = len(prefix[0]) * self.block_size
        sequence.publish_at = num_tokens + self.block_size
        sequence.num_computed = sequence.num_settled = sequence.capacity = num_tokens

    def num_missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that must be allocated before tokens [num_computed, num_tokens) are written."""
        missing = max(0, self.num_blocks_for(num_tokens) - len(sequence.tables[0])) * len(self._groups)
        return missing + len(self._shared_tails(sequence)) if sequence.tail_shared else missing

    def grow(self, sequence: Sequence, num_tokens: int) -> int:
        """Appends blocks to each table until the tokens fit.

        The caller has seen to it that they are available. Returns how many were appended to each.
        """
        tables = sequence.tables
        missing = max(0, self.num_blocks_for(num_tokens) - len(tables[0]))
        for table in tables:
            for _ in range(missing):
                table.append(self._allocate())
        sequence.request.account.num_blocks += missing * len(tables)
        sequence.capacity = len(tables[0]) * self.block_size
        return missing

    def copy_on_write(self, sequence: Sequence) -> list[BlockCopy]:
        """Makes the blocks that the sequence writes to next its own.

        Returns the copies that this takes: at most one in each group.

        The last holder needs no copy.
        """
        if not sequence.tail_shared:
            return []
        shared, index = self._shared_tails(sequence), sequence.num_computed // self.block_size
        sequence.tail_shared = False
        return [self._copy(sequence, group, index) for group in shared]

    def end_step(self) -> None:
        """Ends the planning of a step: later steps may give away the sources of its copies."""
        if self._held_sources:
            for source in self._held_sources.elements():
                self._source_accounts[source].num_blocks -= self.pool.release((source,))
            self._held_sources.clear()
            self._source_accounts.clear()

    def fork(self, leader: Sequence, sibling: Sequence) -> None:
        """Gives `sibling`, which has computed nothing, the blocks of the prompt from `leader`."""
        for table in leader.tables:
            for block in table:
                if block != NO_BLOCK:
                    self.pool.hold(block)
        sibling.tables = [list(table) for table in leader.tables]
        sibling.capacity = leader.capacity
        sibling.block_keys = leader.block_keys[: leader.num_prompt_tokens // self.block_size]
        # The leader publishes the prompt.
        sibling.publish_at = (leader.num_prompt_tokens // self.block_size + 1) * self.block_size
        sibling.num_computed = leader.num_computed
        leader.tail_shared = sibling.tail_shared = leader.num_computed % self.block_size != 0

    def branch(self, parent: Sequence, child: Sequence) -> None:
        """Gives `child` all blocks of `parent`, in place of those that it has."""
        for table in parent.tables:
            for block in table:
                if block != NO_BLOCK:
                    self.pool.hold(block)
        child.table_from = min(map(_num_equal, child.tables, parent.tables))
        self.release(child)
        child.tables = [list(table) for table in parent.tables]
        child.capacity = parent.capacity
        child.block_keys = list(parent.block_keys)
        child.publish_at = parent.publish_at
        child.num_computed, child.num_settled = parent.num_computed, parent.num_settled
        parent.tail_shared = child.tail_shared = parent.num_computed % self.block_size != 0

    def hold_nothing(self, sequence: Sequence) -> None:
        """Has a sequence that keeps its row without blocks be as one that computed nothing."""
        sequence.tables = self.no_prefix()
        sequence.table_from = sequence.capacity = sequence.num_computed = sequence.num_settled = 0
        sequence.tail_shared = False

    def publish(self, sequence: Sequence) -> None:
        """Offers the full blocks of settled tokens to later prompts.

        Then it releases the blocks that no later token of the sequence reads.
        """
        first, num_full = sequence.publish_at // self.block_size - 1, sequence.num_settled // self.block_size
        if self._enable_prefix_cache:
            for index in range(first, num_full):
                key = self.key(sequence, index)
                for group, table in enumerate(sequence.tables):
                    self.pool.publish(table[index], _group_key(key, group))
            if self._checkpoints is not None:
                self._checkpoints.publish(sequence, lambda count: self.key(sequence, count // self.block_size - 1))
        sequence.publish_at = (num_full + 1) * self.block_size
        if self._has_windows:
            self._release_behind_windows(sequence)

    def key(self, sequence: Sequence, index: int) -> bytes:
        """Returns the key of the sequence's block `index`, whose tokens must have been read.

        The chain of keys is kept with the sequence.
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
        for table in sequence.tables:
            held = [block for block in reversed(table) if block != NO_BLOCK] if self._has_windows else reversed(table)
            sequence.request.account.num_blocks -= self.pool.release(held)
        sequence.tables = []

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Asserts between steps that reference counts and accounts match the sequences' tables."""
        assert not self._held_sources, "copies are held for a step that is not being planned"
        holders: Counter[int] = Counter()
        held: dict[TenantAccount, set[int]] = {}
        for sequence in sequences:
            assert len(sequence.tables) == len(self._groups), "a sequence that runs has a table in each group"
            for group, table in zip(self._groups, sequence.tables, strict=True):
                assert len(table) * self.block_size == sequence.capacity, "a table is as long as the capacity says"
                needed = table[group.first_needed(sequence.num_computed, self.block_size) :]
                assert NO_BLOCK not in needed, "a block went back that a later token reads"
                blocks = [block for block in table if block != NO_BLOCK]
                holders.update(blocks)
                held.setdefault(sequence.request.account, set()).update(blocks)
        self.pool.check_integrity(dict(holders))
        if self._checkpoints is not None:
            self._checkpoints.check_integrity(self.pool)
        for account, counted in held.items():
            assert account.num_blocks == len(counted), "an account counts each block of its sequences once"

    def _most_blocks(self, group: CacheGroup, num_tokens: int) -> int:
        return group.most_blocks(num_tokens, self.block_size, self._step_tokens)

    def _allocate(self) -> int:
        block = self.pool.allocate()
        assert block is not None, "the scheduler looked before it took"
        return block

    def _find(self, sequence: Sequence, group: int, first: int, end: int) -> list[int]:
        """Known blocks of a group from index `first` on, up to the first that is not known."""
        blocks = []
        for index in range(first, end):
            block = self.pool.find(_group_key(self.key(sequence, index), group))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _with_state(self, sequence: Sequence, num_blocks: int) -> int:
        """How many of a sequence's first blocks end where a state is known, if layers have any."""
        if self._checkpoints is not None:
            while num_blocks and not self._checkpoints.has(self.key(sequence, num_blocks - 1)):
                num_blocks -= 1
        return num_blocks

    def _gap(self, sequence: Sequence, prefix: Prefix, num_blocks: int) -> int | None:
        """Finds a block that a group with a window lacks of those that a token reads.

        The token follows `num_blocks` blocks. Tokens between the lacking block and this one read it
        too, so that no prefix ends there. None: all are known, and `prefix` has got the tables of
        these groups.
        """
        for index, group in enumerate(self._groups):
            if group.window is not None:
                first = group.first_needed(num_blocks * self.block_size, self.block_size)
                known = self._find(sequence, index, first, num_blocks)
                if first + len(known) < num_blocks:
                    return first + len(known)
                prefix[index] = [NO_BLOCK] * first + known
        return None

    def _release_behind_windows(self, sequence: Sequence) -> None:
        """Releases the blocks that only settled tokens read.

        A step in flight computes no token before `num_settled`, and a window reaches back from
        there.
        """
        for group, table in zip(self._groups, sequence.tables, strict=True):
            end = min(group.first_needed(sequence.num_settled, self.block_size), len(table))
            first = end
            while first and table[first - 1] != NO_BLOCK:
                first -= 1
            behind, table[first:end] = table[first:end], [NO_BLOCK] * (end - first)
            sequence.request.account.num_blocks -= self.pool.release(reversed(behind))

    def _copy(self, sequence: Sequence, group: int, index: int) -> BlockCopy:
        table = sequence.tables[group]
        source, target = table[index], self._allocate()
        table[index] = target
        sequence.request.account.num_blocks += 1
        # The sequence's own hold passes to the copy.
        self._held_sources[source] += 1
        self._source_accounts[source] = sequence.request.account
        return BlockCopy(source, target, group)

    def _shared_tails(self, sequence: Sequence) -> list[int]:
        """The groups in which others hold the block that is written next.

        Holds for copies of this very step don't read it any more.
        """
        index, ref_counts = sequence.num_computed // self.block_size, self.pool.ref_counts
        blocks = [table[index] for table in sequence.tables]
        return [group for group, block in enumerate(blocks) if ref_counts[block] - self._held_sources[block] > 1]


def _num_equal(one: list[int], other: list[int]) -> int:
    """Blocks with which both tables begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (first, second) in pairs if first != second), min(len(one), len(other)))


def _group_key(key: bytes, group: int) -> bytes:
    """Returns the key of a group's block of a prefix; the first group uses the prefix's key."""
    return key + bytes((group,)) if group else key
