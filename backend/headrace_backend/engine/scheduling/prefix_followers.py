"""Sequences that wait for another one to compute the prefix that they share with it.

Owns who waits for whom, and until how many tokens are published: it takes sequences out of the
waiting queue and gives them back. Does not own rows or blocks (`scheduler`), nor what is known of a
prefix (`kv_cache_manager`).

A *leader* has a row and a prompt of which full blocks are not published yet; it is known by the key
of the first of these. A sequence whose prompt goes on with that very block can become its
*follower*: it leaves the waiting queue and comes back when what it waits for is published, or when
the leader loses its row, whatever the reason. It waits

    for all that both share    behind a more urgent leader: where a step has no room for that one,
                               it has none for the follower either
    for what is in flight      otherwise, and behind a leader that reports prompt log probabilities,
                               of which a step has only so many: what is passed over holds up nobody

A more urgent sequence does not wait where the prompt of a third one, whose turn is between both,
would be computed before the leader's.

Followers have neither row nor blocks, so nobody waits in a circle. A follower would have to compute
the same tokens within the same budget: what it loses is the wait for the step in flight. A few
shared tokens, which cost less than that, are computed again.

Where layers keep states, a follower can begin only where a state is kept: so it has its leader keep
its state where both part (`checkpoint_places`), and waits for the last place before.

Two leaders are *contested* that go on alike from where both stand. They must not share a step's
budget (`rows.prompts`), or they compute all of it twice, side by side.

A leader is *overtaken* when another sequence has published what it would compute next. It gives its
row back as soon as nothing of it is in flight, and takes up what the other has computed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np

from headrace_backend.engine.cache.kv_cache_manager import KVCacheManager
from headrace_backend.engine.requests.sequence import LiveRequest, Sequence
from headrace_backend.engine.scheduling.checkpoint_places import CheckpointPlaces
from headrace_backend.engine.scheduling.waiting_queue import MAX_COUNTED_TOKENS, WaitingQueue

# Fewer shared tokens are computed anew. Reckoned, not measured: an 8B model computes 128 tokens in
# about 1.5 ms of an H200 beside other work, and the step that would be waited for takes 5 to 15 ms;
# but of a wave of requests every one would compute them. No block may have more: within so many
# tokens one has to end (`is_overtaken`).
LEAST_SHARED_TOKENS = 128


class PrefixFollowers:
    """Leaders by the block that they compute next, and the followers of each."""

    __slots__ = ("_following", "_keys", "_leaders", "_waiting", "num_counted_tokens")

    def __init__(self, waiting: WaitingQueue) -> None:
        """Nobody leads, nobody follows. Followers come from `waiting`, and go back there."""
        self._waiting = waiting
        self._leaders: dict[bytes, list[Sequence]] = {}
        self._keys: dict[Sequence, bytes] = {}
        # Heaps by the number of shared tokens, of leaders that have followers, ended ones included.
        self._following: dict[Sequence, list[tuple[int, tuple[int, int, int], Sequence]]] = {}
        # Tokens that followers will compute themselves, each follower's counted up to a limit.
        self.num_counted_tokens = 0

    def __iter__(self) -> Iterator[Sequence]:
        """Followers that have not ended, in no particular order."""
        return (entry[2] for heap in self._following.values() for entry in heap if not entry[2].ended)

    def lead(self, sequence: Sequence, kv: KVCacheManager) -> None:
        """Makes a sequence with a row and an unpublished prompt a leader."""
        key = kv.next_key(sequence)
        if key is not None:
            self._keys[sequence] = key
            self._leaders.setdefault(key, []).append(sequence)

    def advance(self, sequence: Sequence, kv: KVCacheManager) -> None:
        """Gives followers back that have all they waited for, as a leader has published blocks."""
        if sequence not in self._keys:
            return
        self._forget_key(sequence)
        self.lead(sequence, kv)
        if sequence not in self._keys:
            self.retire(sequence)
        heap = self._following.get(sequence)
        while heap and heap[0][0] <= kv.num_published(sequence):
            self._give_back(heapq.heappop(heap)[2])

    def retire(self, sequence: Sequence) -> None:
        """Ends a sequence's leading: its followers go back to the queue."""
        self._forget_key(sequence)
        for entry in self._following.pop(sequence, ()):
            self._give_back(entry[2])

    def take_first(
        self,
        sequence: Sequence,
        num_known: int,
        num_found: int,
        kv: KVCacheManager,
        places: CheckpointPlaces | None = None,
    ) -> bool:
        """Takes the first sequence out of the queue, if another one computes its next tokens.

        Args:
            sequence: What the queue shows.
            num_known: Tokens of it that the prefix cache has.
            num_found: Tokens from its start on whose blocks are known: more only where states are
                kept.
            kv: The cache.
            places: Chooses where states are kept; None: nowhere.

        Returns:
            Whether it did: the sequence waits here from now on.
        """
        num_reusable = kv.num_reusable(sequence)
        least = num_known + LEAST_SHARED_TOKENS
        if not self._leaders or num_reusable < max(least, num_found + kv.block_size):
            return False
        for leader in self._computing(sequence, num_known, num_found, kv):
            is_urgent = sequence.urgency < leader.urgency
            if is_urgent and self._is_cut_off(leader, sequence):
                continue
            num_shared = min(_num_shared(leader.request, sequence.request), num_reusable)
            if is_urgent or leader.prompt_log is not None:
                num_shared = min(num_shared, leader.num_computed)
            num_shared -= num_shared % kv.block_size
            if places is not None and num_shared >= least:
                num_shared = places.stop_for_follower(leader, num_shared)
            if num_shared >= least:
                self._follow(self._waiting.pop(), leader, num_shared)
                return True
        return False

    def is_overtaken(self, sequence: Sequence, kv: KVCacheManager) -> bool:
        """Whether a prompt that is being computed would have more if it began again.

        Others have published its blocks up to `LEAST_SHARED_TOKENS` behind the last token that a
        step computes for it.
        """
        num_blocks = (sequence.num_computed + LEAST_SHARED_TOKENS) // kv.block_size
        if sequence not in self._keys or sequence.search is not None:
            return False
        if num_blocks * kv.block_size > kv.num_reusable(sequence):
            return False
        # One key says that there is nothing to find, as it nearly always is.
        if kv.pool.find(kv.key(sequence, num_blocks - 1)) is None:
            return False
        return len(kv.find_prefix(sequence)[0]) >= num_blocks

    def is_contested(self, sequence: Sequence, catching_up: list[Sequence]) -> bool:
        """Whether another one of those that catch up is about to compute the same tokens.

        Where the more urgent of both goes first it is ahead by `LEAST_SHARED_TOKENS` soon, and the
        other one is overtaken.
        """
        if sequence not in self._keys:
            return False
        return any(
            other is not sequence and other in self._keys and _go_on_alike(sequence, other) for other in catching_up
        )

    def note_left(self, sequence: Sequence) -> None:
        """A follower follows nobody any more; its entry stays until its leader gets to it."""
        sequence.leader = None
        self.num_counted_tokens -= sequence.num_counted_tokens

    def check_integrity(self) -> None:
        """Asserts that leaders are known by their keys, and that followers wait for leaders."""
        assert {leader for leaders in self._leaders.values() for leader in leaders} == set(self._keys)
        assert all(leader in self._leaders[key] for leader, key in self._keys.items())
        assert set(self._following) <= set(self._keys), "somebody follows nobody"
        followers = list(self)
        assert all(follower.leader in self._keys for follower in followers), "a follower's leader leads no longer"
        for leader, heap in self._following.items():
            for num_shared, urgency, follower in heap:
                comes = num_shared <= leader.num_computed or (leader.urgency < urgency and leader.prompt_log is None)
                assert follower.ended or comes, "a follower waits for what nobody may be about to compute"
        assert self.num_counted_tokens == sum(follower.num_counted_tokens for follower in followers)

    def _computing(self, sequence: Sequence, num_known: int, num_found: int, kv: KVCacheManager) -> list[Sequence]:
        """Leaders whose next block is one of the sequence's: its first unknown one, or before it.

        A leader computes known blocks again where no state was kept at their end.
        """
        places = range(num_known // kv.block_size, num_found // kv.block_size + 1)
        return [leader for place in places for leader in self._leaders.get(kv.key(sequence, place), ())]

    def _is_cut_off(self, leader: Sequence, sequence: Sequence) -> bool:
        """Whether others come between a leader and a more urgent sequence."""
        return any(sequence.urgency < other.urgency < leader.urgency for other in self._keys)

    def _follow(self, sequence: Sequence, leader: Sequence, num_shared: int) -> None:
        heapq.heappush(self._following.setdefault(leader, []), (num_shared, sequence.urgency, sequence))
        sequence.leader = leader
        sequence.num_counted_tokens = min(sequence.num_tokens - num_shared, MAX_COUNTED_TOKENS)
        self.num_counted_tokens += sequence.num_counted_tokens

    def _give_back(self, sequence: Sequence) -> None:
        if not sequence.ended:
            self.note_left(sequence)
            self._waiting.push(sequence)

    def _forget_key(self, sequence: Sequence) -> None:
        key = self._keys.pop(sequence, None)
        if key is not None:
            leaders = self._leaders[key]
            leaders.remove(sequence)
            if not leaders:
                del self._leaders[key]


def _go_on_alike(one: Sequence, other: Sequence) -> bool:
    """Whether both prompts share `LEAST_SHARED_TOKENS` behind what is computed of each."""
    first, second = one.request.spec.prompt_ids, other.request.spec.prompt_ids
    least = max(one.num_computed, other.num_computed) + LEAST_SHARED_TOKENS
    # One token says that they do not, as it nearly always is.
    if min(first.size, second.size) < least or first[least - 1] != second[least - 1]:
        return False
    return _num_shared(one.request, other.request) >= least


def _num_shared(one: LiveRequest, other: LiveRequest) -> int:
    """Tokens with which both prompts begin."""
    first, second = one.spec.prompt_ids, other.spec.prompt_ids
    length = min(first.size, second.size)
    differs = first[:length] != second[:length]
    return int(np.argmax(differs)) if differs.any() else length
