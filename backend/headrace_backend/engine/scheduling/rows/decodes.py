"""Rows that hold the token to compute: which of them decode in a step, and with what beside it.

Each computes one token, most urgent first. With several pipeline stages each step has a part of
them (`micro_batches`). Where the worker drafts tokens, each row may settle several, as far as that
pays (`draft_lengths`) and free blocks go; nobody is preempted for drafts. Where a grammar leaves
one text, its tokens are computed side by side, and none of them is drawn.

Owns this choice. Does not own how many drafts pay (`draft_lengths`), nor whose blocks go back
(`row_blocks`).
"""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from collections.abc import Set as AbstractSet

from headrace_backend.engine.requests.sequence import Sequence
from headrace_backend.engine.scheduling.draft_lengths import DraftLengths
from headrace_backend.engine.scheduling.in_flight_step import InFlightStep
from headrace_backend.engine.scheduling.plan_builder import PlanBuilder
from headrace_backend.engine.scheduling.rows.batch import Batch
from headrace_backend.engine.scheduling.rows.micro_batches import MicroBatches
from headrace_backend.engine.scheduling.rows.row_blocks import RowBlocks
from headrace_backend.engine.scheduling.scheduler_stats import SchedulerStats
from headrace_backend.engine.scheduling.waiting_queue import WaitingQueue


class Decodes:
    """Chooses what rows that decode compute."""

    __slots__ = ("_batch", "_blocks", "_draft_lengths", "_max_tokens", "_micro_batches", "_stats", "_waiting")

    def __init__(
        self,
        batch: Batch,
        blocks: RowBlocks,
        waiting: WaitingQueue,
        draft_lengths: DraftLengths,
        stats: SchedulerStats,
        max_tokens: int,
        num_stages: int,
    ) -> None:
        """Has the rows of `batch` decode.

        Args:
            batch: Who has a row.
            blocks: Makes room for what rows compute.
            waiting: Who waits for a row, and is left a part of the step.
            draft_lengths: Drafts that each row may have.
            stats: Takes the sequences that find no room.
            max_tokens: Most tokens of a step.
            num_stages: Pipeline stages.
        """
        self._batch, self._blocks, self._waiting = batch, blocks, waiting
        self._draft_lengths, self._stats, self._max_tokens = draft_lengths, stats, max_tokens
        self._micro_batches = MicroBatches(num_stages)

    def schedule(self, builder: PlanBuilder, in_flight: AbstractSequence[InFlightStep], now_ns: int) -> list[Sequence]:
        """Schedules rows that decode; returns the other sequences with a row, which catch up.

        Args:
            builder: Builds the step's plan, which is empty.
            in_flight: Steps that were planned and not settled, in order.
            now_ns: The time.
        """
        passed_over = self._micro_batches.passed_over(self._batch.running, in_flight)
        catching_up, forced = self._schedule_rows(builder, passed_over, now_ns)
        if passed_over and not (builder.num_tokens or forced or in_flight):
            # The micro-batch lacks blocks that more urgent rows of another one hold, and no result
            # is to come that gives any back.
            self._stats.stalled.clear()
            catching_up, forced = self._schedule_rows(builder, frozenset(), now_ns)
        builder.close_decodes()
        if forced:
            forced = self._choose_forced(forced, builder, bool(catching_up or self._waiting))
        if self._batch.num_masked_rows:
            builder.load.num_masked_draws = sum([sequence.grammar is not None for sequence in builder.decodes])
        if self._draft_lengths.drafts:
            num_forced = sum([count + 1 for _, count in forced])
            self._schedule_drafts(builder, num_forced, bool(catching_up or self._waiting))
        for sequence, count in forced:
            builder.add_forced(sequence, count)
        return catching_up

    def _schedule_rows(
        self, builder: PlanBuilder, passed_over: AbstractSet[Sequence], now_ns: int
    ) -> tuple[list[Sequence], list[tuple[Sequence, int]]]:
        """Schedules one token for each decode but those, and those behind which tokens must come.

        Returns the sequences that catch up, and those others with how many tokens must come.
        """
        catching_up: list[Sequence] = []
        forced: list[tuple[Sequence, int]] = []
        stalled = self._stats.stalled
        # Preemption removes only less urgent sequences, which come later in the list.
        for sequence in self._batch.running:
            if not sequence.decodes:
                if not sequence.paused:
                    catching_up.append(sequence)
            elif sequence in passed_over:
                stalled.append(sequence)
            elif sequence.num_tokens < sequence.max_tokens_total:
                if sequence.num_tokens > sequence.capacity or sequence.tail_shared:
                    if not self._blocks.make_room(sequence, sequence.num_tokens, builder, now_ns):
                        stalled.append(sequence)
                        continue
                if sequence.grammar is not None and sequence.num_forced > 0:
                    # Nobody takes its blocks: the step computes it, one way or the other.
                    sequence.planned_in = builder.step_id
                    forced.append((sequence, sequence.num_forced))
                else:
                    builder.add_decode(sequence)
        return catching_up, forced

    def _choose_forced(
        self, forced: list[tuple[Sequence, int]], builder: PlanBuilder, others_wait: bool
    ) -> list[tuple[Sequence, int]]:
        """Chooses the sequences that compute what must come; the others decode.

        None of them does where the step would settle fewer tokens per second. They take free blocks
        and a share of the budget, as drafts do.
        """
        num_free = self._max_tokens - len(self._batch.running)
        num_left = num_free // 2 if others_wait else num_free
        chosen: list[tuple[Sequence, int]] = []
        for sequence, most in forced:
            wanted = min(most, num_left)
            num_room = self._blocks.grow_freely(sequence, sequence.num_tokens + wanted, builder)
            count = num_room - sequence.num_tokens
            if count > 0:
                chosen.append((sequence, count))
                num_left -= count
        if not others_wait and not self._draft_lengths.forced_pay(builder.load, [s for s, _ in forced], chosen):
            chosen = []
        computed = {sequence for sequence, _ in chosen}
        for sequence, _ in forced:
            if sequence not in computed:
                builder.add_decode(sequence)
        builder.close_decodes()
        return chosen

    def _schedule_drafts(self, builder: PlanBuilder, num_forced: int, others_wait: bool) -> None:
        """Gives drafts to the step's decodes: half of the budget if somebody waits for a prompt.

        Of the budget `num_forced` tokens are taken.
        """
        rows, lengths = builder.decodes, self._draft_lengths
        num_free = self._max_tokens - len(rows) - num_forced
        wanted = lengths.choose(
            [sequence.acceptance for sequence in rows],
            [sequence.take_draft_limit() for sequence in rows],
            builder.load,
            num_free // 2 if others_wait else num_free,
            [sequence.grammar is not None for sequence in rows] if builder.load.num_masked_draws else (),
        )
        builder.num_proposed = builder.load.num_draft_passes = lengths.num_proposed
        builder.load.num_probes = lengths.num_probes
        builder.add_drafts([self._make_room_for_drafts(*chosen, builder) for chosen in zip(rows, wanted, strict=True)])

    def _make_room_for_drafts(self, sequence: Sequence, count: int, builder: PlanBuilder) -> int:
        """How many of `count` drafted tokens find room without taking anybody's blocks."""
        if not count:
            return 0
        return self._blocks.grow_freely(sequence, sequence.num_computed + count, builder) - sequence.num_computed
