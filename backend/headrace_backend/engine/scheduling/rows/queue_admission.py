"""Waiting sequences that take a row in a step, most urgent first.

A sequence is admitted if all its tokens fit, and the blocks that running prompts will need stay
free. A sequence whose prompt goes on as one that is being computed waits for that
(`prefix_followers`). Where blocks are short, one whose prefix is cached goes before one that came
little earlier (`cached_first`). All sequences of a search take their rows at once (`beams`).

A tenant's sequences hold at most its share of the blocks. One that waits for more is passed over
with its whole tenant, and those of others go on.

Owns this choice. Does not own the order of those who wait (`waiting_queue`). A waiting sequence
costs nothing until it is at the front.
"""

from __future__ import annotations

from collections import Counter

from headrace_backend.engine.limits.tenant_account import TenantAccount
from headrace_backend.engine.requests.sequence import LiveRequest, Sequence
from headrace_backend.engine.scheduling import beams, cached_first
from headrace_backend.engine.scheduling.plan_builder import PlanBuilder
from headrace_backend.engine.scheduling.prefix_followers import PrefixFollowers
from headrace_backend.engine.scheduling.rows.batch import Batch
from headrace_backend.engine.scheduling.rows.known_tokens import KnownTokens
from headrace_backend.engine.scheduling.rows.worker_memory import WorkerMemory
from headrace_backend.engine.scheduling.scheduler_stats import SchedulerStats
from headrace_backend.engine.scheduling.token_budget import TokenBudget
from headrace_backend.engine.scheduling.waiting_queue import WaitingQueue

# One block of each cache group is left available for so many running sequences when another is
# admitted: each of them asks for one within `block_size` steps, and what is admitted only to be
# preempted at once was computed for nothing.
_RUNNING_PER_SPARE_BLOCK = 4


class QueueAdmission:
    """Admits from the front of the waiting queue."""

    __slots__ = (
        "_batch",
        "_budget",
        "_followers",
        "_known_tokens",
        "_kv",
        "_num_groups",
        "_places",
        "_stats",
        "_tables",
        "_waiting",
    )

    def __init__(
        self,
        memory: WorkerMemory,
        batch: Batch,
        waiting: WaitingQueue,
        followers: PrefixFollowers,
        budget: TokenBudget,
        known_tokens: KnownTokens,
        stats: SchedulerStats,
    ) -> None:
        """Admits to `batch` what fits into a worker's memory and into the budget of a step."""
        self._kv, self._num_groups = memory.kv, memory.num_groups
        self._places, self._tables = memory.places, memory.tables
        self._batch, self._waiting, self._followers = batch, waiting, followers
        self._budget, self._known_tokens, self._stats = budget, known_tokens, stats

    def admit(self, catching_up: list[Sequence], builder: PlanBuilder, now_ns: int) -> None:
        """Admits waiting sequences that fit with all their tokens.

        The blocks that running prompts will need stay free. Where blocks are short, a sequence
        whose prefix is cached may go first (`cached_first`); if it does not fit, the order stays.

        Args:
            catching_up: Running sequences that have prompt left.
            builder: Builds the step's plan.
            now_ns: The time.
        """
        promised: Counter[TenantAccount] = Counter()
        for computing in catching_up:
            promised[computing.request.account] += self._kv.num_promised(computing)
        looks_behind = True
        while self._batch.num_free_rows and self._budget.num_tokens_left > 0:
            if looks_behind:
                cached_first.bring_forward(self._waiting, self._kv)
            sequence = self._waiting.peek()
            if sequence is None:
                return
            if not self._admit_first(sequence, promised, builder, now_ns):
                if not self._waiting.put_back():
                    return
                looks_behind = False

    def _admit_first(
        self, sequence: Sequence, promised: Counter[TenantAccount], builder: PlanBuilder, now_ns: int
    ) -> bool:
        """Admits what the queue shows, or has it wait elsewhere; false if it stays where it is.

        Args:
            sequence: What the queue shows.
            promised: Blocks that each tenant's running prompts will need, kept up to date.
            builder: Builds the step's plan.
            now_ns: The time.
        """
        kv = self._kv
        num_rows = 1 if sequence.search is None else len(sequence.request.sequences)
        if num_rows > self._batch.num_free_rows:
            return False
        account = sequence.request.account
        prefix = kv.no_prefix() if sequence.num_unread else kv.find_prefix(sequence)
        num_known = len(prefix[0]) * kv.block_size
        num_found = num_known if sequence.num_unread else kv.num_found(sequence, prefix)
        if not sequence.num_unread and self._followers.take_first(sequence, num_known, num_found, kv, self._places):
            return True
        num_needed = kv.num_needed(sequence, prefix)
        if sequence.search is not None:
            num_needed += self._num_groups * beams.num_further_blocks(sequence, kv.block_size)
        if num_needed + self._num_spare_blocks(account.num_running) + promised[account] > account.num_blocks_left:
            return self._waiting.park()
        # A token sampled before a preemption may still be on its way; it has to be read before it
        # can be computed again.
        if sequence.num_unread:
            return False
        if num_needed + self._num_spare_blocks(len(self._batch.running)) + promised.total() > kv.pool.num_available:
            return False
        count = self._budget.chunk(num_known, builder.most_computed(sequence, num_known))
        if self._places is not None:
            count = self._places.first_chunk(sequence, num_known, num_found, count)
        if count == 0 or not self._fits_plan(sequence, kv.num_blocks_for(num_known + count), builder):
            return False
        self._waiting.pop()
        self._batch.take_row(sequence, now_ns)
        kv.take_prefix(sequence, prefix)
        if self._places is not None:
            self._places.begin(sequence, num_known, num_found)
        self._followers.lead(sequence, kv)
        self._stats.note_prefix(sequence)
        if sequence.search is not None:
            self._take_rows_of_beams(sequence.request, now_ns)
        kv.grow(sequence, sequence.num_computed + count)
        self._tables.write(sequence, builder)
        self._known_tokens.add(sequence, count, builder, now_ns)
        promised[account] += kv.num_promised(sequence)
        return True

    def _num_spare_blocks(self, num_running: int) -> int:
        return self._num_groups * -(-num_running // _RUNNING_PER_SPARE_BLOCK)

    def _fits_plan(self, sequence: Sequence, num_blocks: int, builder: PlanBuilder) -> bool:
        """Whether the plan has taken the sequence that takes a row, or all of its search."""
        if sequence.search is None:
            return builder.admit(sequence, self._batch.next_rows(1)[0], num_blocks)
        search = sequence.request.sequences
        return builder.admit_beams(search, self._batch.next_rows(len(search)), num_blocks)

    def _take_rows_of_beams(self, request: LiveRequest, now_ns: int) -> None:
        """The other sequences of a search take their rows with the first."""
        others, request.unforked = request.unforked, []
        for beam in others:
            self._batch.take_row(beam, now_ns)
        beams.take_rows(others, self._kv)
