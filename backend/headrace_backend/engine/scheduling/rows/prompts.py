"""Sequences that have more than one token to compute: how much of each goes into a step.

They catch up with a prompt, or with tokens computed before a preemption, in chunks of what the
budget leaves behind the decodes (`token_budget`): first those that run, most urgent first, then
those that wait (`queue_admission`), unless blocks were short in this step, and last the long ones
among those that run, for which a share of the budget was kept unless another one is about to
compute the same. Whoever is overtaken in computing a
prefix gives way (`prefix_followers`).

Owns this order. Does not own the length of a chunk (`token_budget`) nor whose blocks go back
(`row_blocks`).
"""

from __future__ import annotations

from headrace_backend.engine.requests.sequence import NO_ROW, Sequence
from headrace_backend.engine.scheduling.plan_builder import PlanBuilder
from headrace_backend.engine.scheduling.prefix_followers import PrefixFollowers
from headrace_backend.engine.scheduling.rows.batch import Batch
from headrace_backend.engine.scheduling.rows.known_tokens import KnownTokens
from headrace_backend.engine.scheduling.rows.queue_admission import QueueAdmission
from headrace_backend.engine.scheduling.rows.row_blocks import RowBlocks
from headrace_backend.engine.scheduling.rows.worker_memory import WorkerMemory
from headrace_backend.engine.scheduling.token_budget import TokenBudget
from headrace_backend.engine.scheduling.waiting_queue import MAX_COUNTED_TOKENS, WaitingQueue


class Prompts:
    """Fills what decodes leave of a step."""

    __slots__ = (
        "_admission",
        "_batch",
        "_blocks",
        "_budget",
        "_followers",
        "_known_tokens",
        "_kv",
        "_places",
        "_waiting",
    )

    def __init__(
        self,
        memory: WorkerMemory,
        batch: Batch,
        blocks: RowBlocks,
        waiting: WaitingQueue,
        followers: PrefixFollowers,
        budget: TokenBudget,
        known_tokens: KnownTokens,
        admission: QueueAdmission,
    ) -> None:
        """Computes known tokens of `batch`, and has `admission` add to it from `waiting`."""
        self._kv, self._places = memory.kv, memory.places
        self._batch, self._blocks, self._waiting, self._followers = batch, blocks, waiting, followers
        self._budget, self._known_tokens, self._admission = budget, known_tokens, admission

    def schedule(self, catching_up: list[Sequence], builder: PlanBuilder, now_ns: int) -> None:
        """Schedules chunks of sequences that catch up, and of those that take a row for it.

        Args:
            catching_up: Running sequences with more than one token to compute, most urgent first.
            builder: Builds the step's plan, which has its decodes.
            now_ns: The time.
        """
        if catching_up:
            catching_up = [sequence for sequence in catching_up if not self._gives_way(sequence, now_ns)]
        if not (catching_up or self._waiting):
            return
        self._budget.begin(builder.load, self._num_backlog_tokens(catching_up))
        long = self._take_long(catching_up)
        self._schedule_chunks(catching_up, builder, now_ns)
        if not self._blocks.are_short:
            self._admission.admit(catching_up + long, builder, now_ns)
        self._budget.unreserve()
        self._schedule_chunks(long, builder, now_ns)

    def _gives_way(self, sequence: Sequence, now_ns: int) -> bool:
        """Whether a sequence computes nothing in this step, since others have computed it already.

        It gives its row back when nothing of it is in flight any more, and finds theirs.
        """
        if not self._followers.is_overtaken(sequence, self._kv):
            return False
        if sequence.num_settled == sequence.num_computed:
            self._blocks.return_to_queue(sequence, now_ns)
        return True

    def _num_backlog_tokens(self, catching_up: list[Sequence]) -> int:
        """Tokens that wait to be computed, each sequence counted up to a limit."""
        counts = [min(sequence.num_tokens - sequence.num_computed, MAX_COUNTED_TOKENS) for sequence in catching_up]
        return self._waiting.num_counted_tokens + self._followers.num_counted_tokens + sum(counts)

    def _take_long(self, catching_up: list[Sequence]) -> list[Sequence]:
        """Removes the long prompts and reserves a share of the step for them.

        Nothing happens if nothing else could be computed before them.
        """
        long, share = self._budget.find_long(catching_up)
        # Of two that are about to compute the same tokens none would get ahead of the other, if one
        # had its share and the other the rest: both would compute them all, side by side.
        long = [sequence for sequence in long if not self._followers.is_contested(sequence, catching_up)]
        if not long or (len(long) == len(catching_up) and not (self._waiting and self._batch.num_free_rows)):
            return []
        catching_up[:] = [sequence for sequence in catching_up if sequence not in long]
        self._budget.reserve(share)
        return long

    def _schedule_chunks(self, sequences: list[Sequence], builder: PlanBuilder, now_ns: int) -> None:
        """Schedules chunks for sequences that have more than one token to compute."""
        for sequence in sequences:
            # It may have been preempted for one before it.
            if sequence.row == NO_ROW:
                continue
            num_wanted = builder.most_computed(sequence, sequence.num_computed)
            if num_wanted == 0:
                continue
            count = self._budget.chunk(sequence.num_computed, num_wanted)
            if count == 0:
                return
            if self._places is not None:
                count = self._places.chunk(sequence, count)
            if self._blocks.make_room(sequence, sequence.num_computed + count, builder, now_ns):
                self._known_tokens.add(sequence, count, builder, now_ns)
            elif self._blocks.are_short:
                return
