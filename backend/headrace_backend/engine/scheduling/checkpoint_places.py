"""Places on a sequence's way at which its state is kept, so that later prompts can begin there.

A state can be kept only where a step ends, and is found only where a block ends. So chunks of
prompts are cut to whole blocks, and a chunk ends at each *stop* of its sequence:

    at the last block that ends before the prompt's last token, for who sends the prompt again, or
    goes on with its conversation
    where others part from it: where known blocks go on beyond the known state (somebody computed
    them and did not stop there), and where a sequence that waits for the prefix parts (a follower)

A stop costs its sequence a step, which reads all weights again. So there is one only where it saves
some hundred tokens to who begins there. What is kept at stops stays where it is. Where a step ends
with a block anyway, one checkpoint moves with the sequence: a preempted one goes on from there, and
a conversation from the end of the answer.

Where tokens are drafted, nobody knows which token a step ends with. What a step leaves of a row can
be continued behind each token that it settles (`headrace_kernels.recurrence.pending`). So a state
is kept where a block may end among them, for that block, and is found only if it did.

Owns stops, and what a step in the making keeps. Does not own slots (`state_checkpoints`) nor copies
(`state_copies`).
"""

from __future__ import annotations

import bisect
import dataclasses

from headrace_backend.engine.cache.kv_cache_manager import KVCacheManager
from headrace_backend.engine.cache.state_checkpoints import StateCheckpoints
from headrace_backend.engine.requests.sequence import Sequence
from headrace_backend.engine.scheduling.plan_builder import PlanBuilder
from headrace_backend.engine.scheduling.state_copies import StateCopies

# Tokens that a stop saves at least, to who begins there. Reckoned, not measured: a short step of a
# 9B model reads its weights in 5.5 ms of an H100, in which a long one computes 450 tokens.
LEAST_STOP_TOKENS = 256
# Tokens between two places of a moving checkpoint. Reckoned, not measured: to copy a state of 50
# MiB takes 35 us of an H100; of 256 rows that decode, one in 64 steps each, 0.14 ms a step.
LEAST_MOVE_TOKENS = 64
# Moving checkpoints of one step, and stops for followers of one prompt.
MOST_MOVES = 8
MOST_FOLLOWED_STOPS = 8


@dataclasses.dataclass(slots=True)
class _Way:
    """What is planned of one sequence with a row."""

    # Tokens at which a chunk ends, ascending.
    stops: list[int]
    # Tokens at the last place where its state is, or will be, kept; or from which it began.
    last: int
    num_followed: int = 0


class CheckpointPlaces:
    """Stops and moving checkpoints of the sequences with rows."""

    __slots__ = ("_block_size", "_checkpoints", "_copies", "_kv", "_ways")

    def __init__(self, kv: KVCacheManager, checkpoints: StateCheckpoints, copies: StateCopies) -> None:
        """Nobody has a row.

        Args:
            kv: The cache in which prefixes are found.
            checkpoints: Slots of kept states.
            copies: Takes the copies between rows and slots.
        """
        self._kv, self._checkpoints, self._copies = kv, checkpoints, copies
        self._block_size = kv.block_size
        self._ways: dict[Sequence, _Way] = {}

    def begin(self, sequence: Sequence, num_known: int, num_found: int) -> None:
        """A sequence takes a row, with the state at the end of a known prefix if it has one.

        Args:
            sequence: It has a row, and has computed nothing in it.
            num_known: Tokens of the prefix that it begins with.
            num_found: Tokens from its start on whose blocks are known.
        """
        self._ways[sequence] = _Way(self._stops(sequence, num_known, num_found), num_known)
        if num_known:
            key = self._kv.key(sequence, num_known // self._block_size - 1)
            self._copies.restore(self._checkpoints.use(key), sequence)

    def first_chunk(self, sequence: Sequence, num_known: int, num_found: int, count: int) -> int:
        """Cuts the first chunk of a sequence that is about to begin; arguments as `begin`."""
        return self._cut(self._stops(sequence, num_known, num_found), sequence, num_known, count)

    def chunk(self, sequence: Sequence, count: int) -> int:
        """Returns how many of the `count` next tokens of a sequence the step computes."""
        return self._cut(self._way(sequence).stops, sequence, sequence.num_computed, count)

    def stop_for_follower(self, leader: Sequence, num_tokens: int) -> int:
        """Has a prompt's state kept for another sequence that shares its first tokens.

        Returns:
            At how many tokens, at most so many; 0: its state will be kept nowhere before.
        """
        way, computed = self._ways[leader], leader.num_computed
        num_tokens -= num_tokens % self._block_size
        ahead = [stop for stop in way.stops if computed < stop <= num_tokens]
        nearest = ahead[-1] if ahead else self._checkpoints.last_written(leader, num_tokens)
        if (
            num_tokens <= computed
            or num_tokens - nearest < LEAST_STOP_TOKENS
            or way.num_followed >= MOST_FOLLOWED_STOPS
        ):
            return nearest
        way.num_followed += 1
        bisect.insort(way.stops, num_tokens)
        return num_tokens

    def end_step(self, builder: PlanBuilder) -> None:
        """Decides whose states behind the step in the making are kept, which is complete."""
        num_moves = 0
        for sequence in builder.computed:
            behind_block = sequence.num_computed % self._block_size
            if behind_block > sequence.num_unread_drafts:
                continue
            num_tokens, is_unsure = sequence.num_computed - behind_block, sequence.num_unread_drafts > 0
            way = self._way(sequence)
            is_stop = not is_unsure and num_tokens in way.stops
            if not is_stop and (num_moves == MOST_MOVES or not self._may_move(sequence, num_tokens, way)):
                continue
            slot = self._checkpoints.take(sequence, num_tokens, is_stop, is_unsure)
            if slot is not None:
                num_moves += not is_stop
                self._copies.save(sequence, slot)
                if is_unsure:
                    builder.note_unsure_state(sequence, num_tokens)
                else:
                    way.last = num_tokens

    def settle(self, sequence: Sequence, num_tokens: int, start: int) -> None:
        """A step has settled behind which a state was kept for `num_tokens`, as drafts might be.

        Args:
            sequence: Whose state.
            num_tokens: Tokens at the end of a block.
            start: Tokens that were settled before the step, which therefore began there.
        """
        is_right = start < num_tokens <= sequence.num_settled
        key = self._kv.key(sequence, num_tokens // self._block_size - 1) if is_right else None
        self._checkpoints.settle(sequence, num_tokens, key)
        if is_right and sequence in self._ways:
            self._ways[sequence].last = num_tokens

    def leave(self, sequence: Sequence) -> None:
        """A sequence leaves its row."""
        self._ways.pop(sequence, None)
        self._checkpoints.leave(sequence)

    def _way(self, sequence: Sequence) -> _Way:
        """What is planned of a sequence: nothing yet of one that took over another one's state."""
        return self._ways.setdefault(sequence, _Way([], 0))

    def _stops(self, sequence: Sequence, num_known: int, num_found: int) -> list[int]:
        last = (sequence.num_prompt_tokens - 1) // self._block_size * self._block_size
        stops = [num_found] if num_found < last else []
        return [stop for stop in (*stops, last) if stop - num_known >= LEAST_STOP_TOKENS]

    def _cut(self, stops: list[int], sequence: Sequence, start: int, count: int) -> int:
        end = start + count
        index = bisect.bisect_right(stops, start)
        if index < len(stops) and stops[index] < end:
            return stops[index] - start
        # Where a step has room for less than some blocks, to cut would leave too little of it.
        whole = end - end % self._block_size - start
        return whole if end < sequence.num_tokens and 2 * whole >= count else count

    def _may_move(self, sequence: Sequence, num_tokens: int, way: _Way) -> bool:
        """Whether a sequence that is at the end of a block may have its checkpoint moved there."""
        if num_tokens - way.last < LEAST_MOVE_TOKENS or self._checkpoints.is_unsure(sequence):
            return False
        # What a search has chosen last may be another hypothesis' when its step has settled.
        return sequence.search is None or sequence.num_computed <= sequence.num_prompt_tokens
