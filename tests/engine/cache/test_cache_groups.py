"""Several cache groups over one pool, whatever begins, grows, forks, settles and ends.

No block is lost, held twice or read after it went back, and a prefix is known only where every
group has it.
"""

from __future__ import annotations

import dataclasses

import hypothesis
import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.engine.harness import request
from tests.support.examples import examples

from headrace_backend.cache_groups import NO_BLOCK, ONE_GROUP, CacheGroup
from headrace_backend.engine.cache.kv_cache_manager import KVCacheManager, Prefix
from headrace_backend.engine.cache.prefix_keys import PrefixKeys
from headrace_backend.engine.limits.tenant_account import TenantAccount
from headrace_backend.engine.requests.ledger import Ledger
from headrace_backend.engine.requests.sequence import LiveRequest, Sequence
from headrace_backend.engine.requests.token_log import OutputLog

BLOCK_SIZE = 4
FULL = CacheGroup()
GROUPS = [
    ONE_GROUP,
    (FULL, FULL),
    *((FULL, CacheGroup(window)) for window in (1, 2, 4, 5, 8, 11)),
    (CacheGroup(6), FULL),
    (CacheGroup(3), CacheGroup(9)),
]

# What a block holds: its group, and all tokens up to the last that was written to it.
Content = tuple[int, tuple[int, ...]]


@dataclasses.dataclass(eq=False)
class Running:
    """A sequence, and the steps in flight that compute it."""

    sequence: Sequence
    # Tokens computed after each.
    in_flight: list[int] = dataclasses.field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.sequence.request.spec.prompt_ids.tolist() + list(self.sequence.tokens)


class CacheGroupsMachine(RuleBasedStateMachine):
    """Rules play the scheduler's part, and a model follows what workers have in the blocks."""

    @initialize(groups=st.sampled_from(GROUPS), num_blocks=st.integers(6, 40))
    def start(self, groups: tuple[CacheGroup, ...], num_blocks: int) -> None:
        self.groups = groups
        self.kv = KVCacheManager(num_blocks, BLOCK_SIZE, True, PrefixKeys(), groups)
        self.account = TenantAccount("")
        self.running: list[Running] = []
        self.content: dict[int, Content] = {}
        self.num_requests = 0

    @rule(
        shared=st.integers(0, 20),
        own=st.lists(st.integers(1, 2), min_size=1, max_size=8),
        n=st.integers(1, 3),
        count=st.integers(1, 30),
    )
    def begin(self, shared: int, own: list[int], n: int, count: int) -> None:
        self.num_requests += 1
        spec = request([5] * shared + own, 100, n=n)
        live = LiveRequest(spec, self.num_requests, 0, 0, Ledger(0, 0), len(spec.prompt_ids), None, self.account)
        leader, *siblings = [Sequence(live, OutputLog(index, False), 0, None) for index in range(n)]
        prefix = self.kv.find_prefix(leader)
        self._check_prefix(spec.prompt_ids.tolist(), prefix, leader)
        if self.kv.num_needed(leader, prefix) > self.kv.pool.num_available:
            return
        available = self.kv.pool.num_available
        needed = self.kv.num_needed(leader, prefix)
        self.kv.take_prefix(leader, prefix)
        live.unforked = siblings
        self.running.append(Running(leader))
        self._compute(self.running[-1], count)
        assert available - self.kv.pool.num_available <= needed, "more is used up than was said"

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 9))
    def compute(self, data: st.DataObject, count: int) -> None:
        self._compute(data.draw(st.sampled_from(self.running)), count)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        running = data.draw(st.sampled_from(self.running))
        if running.in_flight:
            sequence = running.sequence
            sequence.num_settled = running.in_flight.pop(0)
            if sequence.num_settled >= sequence.publish_at:
                self.kv.publish(sequence)
                for group, table in zip(self.groups, sequence.tables, strict=True):
                    behind = table[: group.first_needed(sequence.num_settled, BLOCK_SIZE)]
                    assert set(behind) <= {NO_BLOCK}, "a block is kept that no later token reads"

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """Preempted or ended: for blocks it is the same."""
        running = data.draw(st.sampled_from(self.running))
        self.running.remove(running)
        self.kv.release(running.sequence)
        running.sequence.leave_row()

    @invariant()
    def blocks_are_where_the_tables_say(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check_integrity([running.sequence for running in self.running])
        pool = self.kv.pool
        assert pool.num_free + pool.num_cached + pool.num_used == pool.num_blocks
        assert self.account.num_blocks == pool.num_used

    def teardown(self) -> None:
        if not hasattr(self, "kv"):
            return
        for running in self.running:
            self.kv.release(running.sequence)
        assert self.kv.pool.num_used == self.account.num_blocks == 0, "something leaks"
        self.kv.pool.check_integrity({})

    def _compute(self, running: Running, count: int) -> None:
        """A step of one row: as many tokens as there are, and are room for."""
        sequence = running.sequence
        end = min(sequence.num_tokens, sequence.num_computed + count)
        if self.kv.num_missing(sequence, end) > self.kv.pool.num_available:
            return
        available, missing = self.kv.pool.num_available, self.kv.num_missing(sequence, end)
        for copy in self.kv.copy_on_write(sequence):
            assert self.content[copy.source][0] == copy.group
            self.content[copy.target] = self.content[copy.source]
        self.kv.grow(sequence, end)
        assert available - self.kv.pool.num_available == missing
        for position in range(sequence.num_computed, end):
            self._compute_token(running, position)
        self.kv.end_step()
        sequence.num_computed = end
        running.in_flight.append(end)
        if end == sequence.num_tokens:
            self._sample(sequence)
            if sequence.request.unforked:
                self._fork(sequence)

    def _compute_token(self, running: Running, position: int) -> None:
        tokens = running.tokens
        for index, (group, table) in enumerate(zip(self.groups, running.sequence.tables, strict=True)):
            first = 0 if group.window is None else max(0, position - group.window + 1)
            for read in range(first // BLOCK_SIZE, -(-position // BLOCK_SIZE)):
                of_group, held = self.content[table[read]]
                up_to = min((read + 1) * BLOCK_SIZE, position)
                assert of_group == index, "a block is read that another group wrote"
                assert held[:up_to] == tuple(tokens[:up_to]), "a block is read that holds other tokens"
            block = table[position // BLOCK_SIZE]
            holders = [r for r in self.running if block in r.sequence.tables[index]]
            assert holders == [running], "a shared block is written"
            self.content[block] = (index, tuple(tokens[: position + 1]))

    def _sample(self, sequence: Sequence) -> None:
        # Another token for each output, as if it had been read already.
        sequence.tokens.append(1 + (sequence.log.output_index + len(sequence.tokens)) % 3)
        sequence.num_tokens += 1

    def _fork(self, leader: Sequence) -> None:
        siblings, leader.request.unforked = leader.request.unforked, []
        for sibling in siblings:
            self.kv.fork(leader, sibling)
            self._sample(sibling)
            self.running.append(Running(sibling))

    def _check_prefix(self, tokens: list[int], prefix: Prefix, sequence: Sequence) -> None:
        """Every group has what the token behind the prefix reads, and no longer prefix is one."""
        num_blocks = len(prefix[0])
        assert num_blocks <= (len(tokens) - 1) // BLOCK_SIZE
        for index, (group, table) in enumerate(zip(self.groups, prefix, strict=True)):
            assert len(table) == num_blocks
            first = group.first_needed(num_blocks * BLOCK_SIZE, BLOCK_SIZE)
            for place in range(first, num_blocks):
                of_group, held = self.content[table[place]]
                end = (place + 1) * BLOCK_SIZE
                assert (of_group, held[:end]) == (index, tuple(tokens[:end])), "a hit claims what a group lacks"
        for longer in range(num_blocks + 1, (len(tokens) - 1) // BLOCK_SIZE + 1):
            assert not all(self._has(tokens, index, longer) for index in range(len(self.groups)))

    def _has(self, tokens: list[int], index: int, num_blocks: int) -> bool:
        """Whether blocks that are published hold what a group reads behind so many blocks."""
        probe = request(tokens, 100)
        live = LiveRequest(probe, 0, 0, 0, Ledger(0, 0), len(tokens), None, self.account)
        sequence = Sequence(live, OutputLog(0, False), 0, None)
        first = self.groups[index].first_needed(num_blocks * BLOCK_SIZE, BLOCK_SIZE)
        keys = [self.kv.key(sequence, place) for place in range(num_blocks)]
        suffix = bytes((index,)) if index else b""
        return all(self.kv.pool.find(keys[place] + suffix) is not None for place in range(first, num_blocks))


TestCacheGroups = CacheGroupsMachine.TestCase
TestCacheGroups.settings = hypothesis.settings(
    max_examples=examples(200),
    stateful_step_count=40,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=list(hypothesis.HealthCheck),
)


def test_a_long_output_keeps_what_its_window_reaches_and_a_prefix_that_lost_its_head_is_known() -> None:
    kv = KVCacheManager(64, BLOCK_SIZE, True, PrefixKeys(), (FULL, CacheGroup(8)))
    account = TenantAccount("")

    def sequence_of(prompt: np.ndarray) -> Sequence:
        live = LiveRequest(request(prompt.tolist()), 1, 0, 0, Ledger(0, 0), prompt.size, None, account)
        return Sequence(live, OutputLog(0, False), 0, None)

    prompt = np.arange(1, 42, dtype=np.int32) % 23
    first = sequence_of(prompt)
    kv.take_prefix(first, kv.find_prefix(first))
    for end in (16, 32, 41):
        kv.grow(first, end)
        first.num_computed = first.num_settled = end
        kv.publish(first)
    # All eleven blocks of the full layers; of the others those of tokens 34 to 41.
    assert kv.pool.num_used == 11 + 3
    assert first.tables[1][:8] == [NO_BLOCK] * 8 and NO_BLOCK not in first.tables[1][8:]
    kv.release(first)
    assert account.num_blocks == 0
    [full, window] = kv.find_prefix(sequence_of(prompt))
    assert len(full) == len(window) == 10
    assert window[:8] == [NO_BLOCK] * 8
    # Where the window's last blocks are gone, the full layers' alone are no prefix.
    for _ in range(64 - kv.pool.num_cached):
        kv.pool.allocate()
    while kv.pool.find(kv.key(sequence_of(prompt), 9) + b"\x01") is not None:
        kv.pool.allocate()
    shorter = kv.find_prefix(sequence_of(prompt))
    assert len(shorter[0]) == len(shorter[1]) < 10
