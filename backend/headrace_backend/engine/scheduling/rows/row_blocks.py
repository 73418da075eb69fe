"""Blocks for what rows compute next, and whose blocks and row go back for them.

When blocks are short for all, the least urgent sequence that the step does not compute is
preempted: its blocks go back and it waits, to be computed again. A sequence never preempts a more
urgent one: it stalls for the step instead and keeps what it has. So the most urgent sequence always
advances, and as admission refuses what could not fit even alone, every sequence ends.

A tenant's sequences hold at most its share of the blocks: one that needs more preempts the least
urgent of its own tenant, never another's.

Owns the choice of whom to preempt, and all that happens when a sequence loses its row. Does not own
rows (`batch`) nor blocks (`kv_cache_manager`).
"""

from __future__ import annotations

from headrace_backend.engine.limits.tenant_account import TenantAccount
from headrace_backend.engine.requests.sequence import Sequence
from headrace_backend.engine.scheduling import beams
from headrace_backend.engine.scheduling.plan_builder import PlanBuilder
from headrace_backend.engine.scheduling.prefix_followers import PrefixFollowers
from headrace_backend.engine.scheduling.rows.batch import Batch
from headrace_backend.engine.scheduling.rows.worker_memory import WorkerMemory
from headrace_backend.engine.scheduling.scheduler_stats import SchedulerStats
from headrace_backend.engine.scheduling.waiting_queue import WaitingQueue


class RowBlocks:
    """Makes room for rows, and takes rows away."""

    __slots__ = ("_batch", "_followers", "_kv", "_places", "_stats", "_tables", "_waiting", "are_short")

    def __init__(
        self,
        memory: WorkerMemory,
        batch: Batch,
        waiting: WaitingQueue,
        followers: PrefixFollowers,
        stats: SchedulerStats,
    ) -> None:
        """Starts with a worker's empty memory; what loses its row goes to `waiting`."""
        self._kv, self._places, self._tables = memory.kv, memory.places, memory.tables
        self._batch, self._waiting, self._followers, self._stats = batch, waiting, followers, stats
        # In the step in the making somebody was preempted or stalled for want of blocks, other than
        # those of a share.
        self.are_short = False

    def begin_step(self) -> None:
        """Begins the planning of a step, for which blocks are not short yet."""
        self.are_short = False

    def make_room(self, sequence: Sequence, num_tokens: int, builder: PlanBuilder, now_ns: int) -> bool:
        """Sees to it that the tokens before `num_tokens` can be written, preempting if need be.

        False: not in this step.
        """
        kv, account = self._kv, sequence.request.account
        missing = kv.num_missing(sequence, num_tokens)
        # A preempted sequence may have been the other holder of a block: what is missing is asked
        # again each time.
        while missing and account.num_blocks + missing > account.max_blocks:
            victim = self._find_victim(sequence, builder.step_id, account)
            if victim is None:
                return False
            self._preempt(victim, now_ns)
            missing = kv.num_missing(sequence, num_tokens)
        while missing > kv.pool.num_available:
            self.are_short = True
            victim = self._find_victim(sequence, builder.step_id)
            if victim is None:
                return False
            self._preempt(victim, now_ns)
            missing = kv.num_missing(sequence, num_tokens)
        if sequence.table_from is not None:
            return self._tables.rewrite(sequence, num_tokens, kv, builder)
        if sequence.tail_shared:
            self._tables.copy_on_write(sequence, kv, builder)
        self._tables.grow(sequence, num_tokens, kv, builder)
        return True

    def grow_freely(self, sequence: Sequence, num_tokens: int, builder: PlanBuilder) -> int:
        """How many of a sequence's first `num_tokens` find room without taking anybody's blocks."""
        kv = self._kv
        missing = kv.num_missing(sequence, num_tokens)
        if missing > min(kv.pool.num_available, sequence.request.account.num_blocks_left):
            return min(num_tokens, sequence.capacity)
        self._tables.grow(sequence, num_tokens, kv, builder)
        return num_tokens

    def return_to_queue(self, sequence: Sequence, now_ns: int) -> None:
        """Has a sequence with a row, or its whole search, wait for one again."""
        if sequence.search is None:
            self.vacate(sequence, now_ns)
            self._waiting.push(sequence)
            return
        for beam in sequence.request.sequences:
            self.vacate(beam, now_ns)
        self._waiting.push(beams.restart(sequence.request, self._kv.block_size))

    def vacate(self, sequence: Sequence, now_ns: int) -> None:
        """Gives back a sequence's row, its blocks, and all that others wait for it to compute."""
        self._kv.release(sequence)
        if self._places is not None:
            self._places.leave(sequence)
        self._followers.retire(sequence)
        self._batch.leave_row(sequence, now_ns)
        self._waiting.unpark(sequence.request.account)

    def _find_victim(self, sequence: Sequence, step_id: int, account: TenantAccount | None = None) -> Sequence | None:
        """Finds the least urgent sequence that may be preempted for `sequence`.

        The victim is less urgent than `sequence`, is not computed by the step, and has more to
        compute. It is of one tenant, or of any if `account` is None.
        """
        for candidate in reversed(self._batch.running):
            if candidate is sequence:
                return None
            if account is not None and candidate.request.account is not account:
                continue
            if candidate.search is None:
                may_leave = candidate.planned_in != step_id and not candidate.completing
            else:
                # A search leaves as a whole.
                request = candidate.request
                may_leave = request is not sequence.request and step_id not in map(_planned_in, request.sequences)
            if may_leave:
                return candidate
        return None

    def _preempt(self, victim: Sequence, now_ns: int) -> None:
        """Takes the victim's row and blocks, and those of its whole search.

        Its tokens stay, and a token that is on its way is kept when it arrives; what a search is
        to choose from is computed again.
        """
        self.return_to_queue(victim, now_ns)
        self._stats.note_preemption(victim.request)


def _planned_in(sequence: Sequence) -> int:
    return sequence.planned_in
