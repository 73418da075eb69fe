"""Checkpoints: states of recurrent layers that are kept for prefixes, in slots by number.

A prompt that begins with a known prefix needs, of recurrent layers, the state at the prefix's end.
A checkpoint is a copy of a row's state where a block ends, and is found by that block's prefix key.

Owns the slots: which are free, which are being written and for whom, which hold the state of which
key. Does not know where checkpoints are taken (`scheduling.checkpoint_places`), nor the copies
between rows and slots (`scheduling.state_copies`), nor memory (the worker).

A slot is in exactly one of three states:

    free      content meaningless
    written   taken for a sequence that runs; found by nobody until the step that computed the state
    known     has settled. It is found by its key, and given up, the one that was unused for longest
              first, where another one is wanted and no slot is free; or with the block of its key

A checkpoint *moves* with its sequence or is *kept*. Of a sequence that runs there is one moving
checkpoint at most that is known: the next one takes its place. At most half of the slots are for
moving ones, so that long answers do not displace what prompts share: where these are taken, a
sequence writes over its own. When it leaves its row, what it moved stays and is as any other.

Nothing holds a slot: a row is given a checkpoint's state by a copy of the very plan that admits it,
and a slot that is taken anew is written by a later plan.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple

from headrace_backend.engine.cache.block_pool import BlockPool, PrefixKey
from headrace_backend.engine.requests.sequence import Sequence


class _Written(NamedTuple):
    """A slot that is being written."""

    # The state is that behind so many tokens of its sequence.
    num_tokens: int
    slot: int
    is_kept: bool
    # Whether it depends on what its step settles if it is.
    is_unsure: bool


class StateCheckpoints:
    """The slots of one worker's checkpoints, numbered from 0."""

    __slots__ = ("_free", "_key_moved", "_mover", "_num_moving_written", "_slot_of_key", "_written", "num_slots")

    def __init__(self, num_slots: int) -> None:
        """All slots are free."""
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        # Least recently used first.
        self._slot_of_key: OrderedDict[PrefixKey, int] = OrderedDict()
        # Of each sequence in the order of its steps.
        self._written: dict[Sequence, deque[_Written]] = {}
        self._num_moving_written = 0
        # Known checkpoints that move, by their sequence; and the other way round.
        self._key_moved: dict[Sequence, PrefixKey] = {}
        self._mover: dict[PrefixKey, Sequence] = {}

    @property
    def free_slots(self) -> list[int]:
        """Slots whose content is meaningless."""
        return list(self._free)

    def has(self, key: PrefixKey) -> bool:
        """Whether the state at the end of a prefix is known."""
        return key in self._slot_of_key

    def use(self, key: PrefixKey) -> int:
        """Returns the slot with the state at the end of a known prefix, which was used just now."""
        self._slot_of_key.move_to_end(key)
        return self._slot_of_key[key]

    def take(self, sequence: Sequence, num_tokens: int, is_kept: bool, is_unsure: bool = False) -> int | None:
        """Takes a slot for the state that the step in the making leaves of a sequence.

        Args:
            sequence: A sequence that the step computes.
            num_tokens: Tokens that it has computed after the step, whole blocks.
            is_kept: Whether the checkpoint stays where it is, or moves with the sequence.
            is_unsure: Whether the state is that behind so many tokens only if drafts are right, as
                `settle` says.

        Returns:
            The slot; None: there is none for it.
        """
        slot = self._slot(sequence, is_kept)
        if slot is not None:
            self._num_moving_written += not is_kept
            self._written.setdefault(sequence, deque()).append(_Written(num_tokens, slot, is_kept, is_unsure))
        return slot

    def is_unsure(self, sequence: Sequence) -> bool:
        """Whether a state of a sequence is being written of which its step decides what it is."""
        return any(one.is_unsure for one in self._written.get(sequence, ()))

    def settle(self, sequence: Sequence, num_tokens: int, key: PrefixKey | None) -> None:
        """Says what the unsure state is that is being written of a sequence, if it is there still.

        Args:
            sequence: A sequence that the step computed which has settled.
            num_tokens: Tokens for which the state was kept.
            key: Their key; None: it is another state.
        """
        written = self._written.get(sequence, deque())
        found = [one for one in written if one.is_unsure and one.num_tokens == num_tokens]
        for one in found[:1]:
            written.remove(one)
            self._num_moving_written -= not one.is_kept
            if key is None:
                self._free.append(one.slot)
            else:
                self._make_known(sequence, key, one)

    def last_written(self, sequence: Sequence, num_tokens: int) -> int:
        """Tokens at the last checkpoint that is being written of the first tokens of a sequence."""
        written = [one.num_tokens for one in self._written.get(sequence, ()) if not one.is_unsure]
        return max([count for count in written if count <= num_tokens], default=0)

    def publish(self, sequence: Sequence, key_at: Callable[[int], PrefixKey]) -> None:
        """Makes those of a sequence known whose tokens have settled.

        Args:
            sequence: A sequence with a row.
            key_at: Gives the key of the sequence's first so many tokens.
        """
        written = self._written.get(sequence)
        while written and not written[0].is_unsure and written[0].num_tokens <= sequence.num_settled:
            one = written.popleft()
            self._num_moving_written -= not one.is_kept
            self._make_known(sequence, key_at(one.num_tokens), one)

    def drop(self, key: PrefixKey) -> None:
        """Gives up the checkpoint of a prefix, if there is one, as its last block goes."""
        if key in self._slot_of_key:
            self._free.append(self._forget(key))

    def leave(self, sequence: Sequence) -> None:
        """A sequence leaves its row: what was not written goes, what is known stays."""
        for one in self._written.pop(sequence, ()):
            self._num_moving_written -= not one.is_kept
            self._free.append(one.slot)
        key = self._key_moved.pop(sequence, None)
        if key is not None:
            del self._mover[key]

    def check_integrity(self, pool: BlockPool) -> None:
        """Asserts that each slot is in one state, and that what is known has its block."""
        written = [one.slot for ones in self._written.values() for one in ones]
        slots = [*self._free, *written, *self._slot_of_key.values()]
        assert sorted(slots) == list(range(self.num_slots)), "a slot is lost, or in two states"
        assert all(pool.find(key) is not None for key in self._slot_of_key), "a state outlived its prefix's last block"
        moving = sum(not one.is_kept for ones in self._written.values() for one in ones)
        assert moving == self._num_moving_written, "what moves is counted"
        assert moving + len(self._mover) <= self.num_slots // 2, "half of the slots are for what is kept"
        assert {key: sequence for sequence, key in self._key_moved.items()} == self._mover, "two maps are one"
        assert set(self._mover) <= set(self._slot_of_key), "what moves is known"

    def _slot(self, sequence: Sequence, is_kept: bool) -> int | None:
        """A slot to be written, given up by whoever had it."""
        if not is_kept and self._num_moving_written + len(self._mover) >= self.num_slots // 2:
            return self._forget(self._key_moved[sequence]) if sequence in self._key_moved else None
        if self._free:
            return self._free.pop()
        return self._forget(next(iter(self._slot_of_key))) if self._slot_of_key else None

    def _make_known(self, sequence: Sequence, key: PrefixKey, written: _Written) -> None:
        if key in self._slot_of_key:
            # Another sequence computed the same: the earlier one stays the one to find.
            self._slot_of_key.move_to_end(key)
            self._free.append(written.slot)
            return
        if sequence in self._key_moved:
            self.drop(self._key_moved[sequence])
        self._slot_of_key[key] = written.slot
        if not written.is_kept:
            self._key_moved[sequence], self._mover[key] = key, sequence

    def _forget(self, key: PrefixKey) -> int:
        """Makes a known checkpoint unknown; returns its slot."""
        sequence = self._mover.pop(key, None)
        if sequence is not None:
            del self._key_moved[sequence]
        return self._slot_of_key.pop(key)
