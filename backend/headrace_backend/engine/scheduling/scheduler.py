"""Who computes how much in the next step.

Owns the running and waiting sequences, the rows, and the decisions: which sequences a step
advances, by how many tokens, who is admitted, who is preempted. Does not own blocks
(`kv_cache_manager`) nor the plan's encoding (`plan_builder`), and reads no results (`settlement`).

There are no phases: each step lets sequences catch up with their tokens, within the token budget,
the rows and the available blocks.

1. Sequences whose row holds the token to compute (one token each; people call it decoding), most
   urgent first. Of several pipeline stages each step has a part of them (`micro_batches`).
   Where the worker drafts tokens, each of them may settle several, as far as that pays
   (`draft_lengths`) and free blocks go; nobody is preempted for drafts. Where a grammar leaves one
   text, its tokens are computed side by side, and none of them is drawn.
2. Sequences that catch up with a prompt, or with tokens computed before a preemption, most urgent
   first, in chunks of what the budget leaves (`token_budget`, which may also set the long ones back
   behind 3, with a share kept for them).
3. Waiting sequences, most urgent first, unless blocks were short in this step, until the plan has
   no room for the next one's admission (`plan_bytes`). Those whose prompt goes on as one that is
   being computed wait for that, and whoever is overtaken in computing it gives way
   (`prefix_followers`). Where blocks are short, one whose prefix is cached goes before one that
   came little earlier (`cached_first`). All sequences of a search take their rows at once, and lose
   them at once (`beams`).

A tenant's sequences hold at most its share of the blocks. One that waits for more is passed over
with its whole tenant, and those of others go on; one that runs and needs more preempts the least
urgent of its own tenant, never another's.

When blocks are short for all, the least urgent sequence that the step does not compute is
preempted: its blocks go back and it waits, to be computed again. A sequence never preempts a more
urgent one: it stalls for the step instead and keeps what it has. So the most urgent sequence always
advances, and as admission refuses what could not fit even alone, every sequence ends. Costs grow
with the rows scheduled; a waiting sequence costs nothing until it is at the front.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as AbstractSequence
from collections.abc import Set as AbstractSet

from headrace_backend.cache_groups import ONE_GROUP, CacheGroup
from headrace_backend.config import EngineConfig
from headrace_backend.engine.cache.kv_cache_manager import KVCacheManager
from headrace_backend.engine.cache.prefix_keys import PrefixKeys
from headrace_backend.engine.cache.state_checkpoints import StateCheckpoints
from headrace_backend.engine.limits.tenant_account import TenantAccount
from headrace_backend.engine.requests.beam_search import Fork
from headrace_backend.engine.requests.sequence import NO_ROW, LiveRequest, Sequence
from headrace_backend.engine.scheduling import beams, cached_first
from headrace_backend.engine.scheduling.checkpoint_places import CheckpointPlaces
from headrace_backend.engine.scheduling.draft_lengths import DraftLengths
from headrace_backend.engine.scheduling.micro_batches import MicroBatches
from headrace_backend.engine.scheduling.plan_builder import InFlightStep, PlanBuilder
from headrace_backend.engine.scheduling.prefix_followers import PrefixFollowers
from headrace_backend.engine.scheduling.row_tables import RowTables
from headrace_backend.engine.scheduling.state_copies import StateCopies
from headrace_backend.engine.scheduling.token_budget import TokenBudget
from headrace_backend.engine.scheduling.waiting_queue import MAX_COUNTED_TOKENS, WaitingQueue

# One block of each cache group is left available for so many running sequences when another is
# admitted: each of them asks for one within `block_size` steps, and what is admitted only to be
# preempted at once was computed for nothing.
_RUNNING_PER_SPARE_BLOCK = 4


class Scheduler:
    """Decides steps over the sequences that it is given."""

    def __init__(
        self,
        config: EngineConfig,
        budget: TokenBudget,
        draft_lengths: DraftLengths,
        groups: tuple[CacheGroup, ...] = ONE_GROUP,
        keeps_states: bool = False,
    ) -> None:
        """Nothing runs, nothing waits, and there is no cache yet.

        Args:
            config: The engine's configuration.
            budget: Tokens that a step may compute.
            draft_lengths: Drafts that each row may have.
            groups: Cache groups of the model.
            keeps_states: Whether rows have states beside their blocks (`state_copies`).
        """
        self._groups = groups
        self._states = StateCopies(keeps_states, config.max_num_seqs)
        # Where states are kept for prefixes; None: nowhere.
        self._places: CheckpointPlaces | None = None
        self._budget = budget
        self._draft_lengths = draft_lengths
        self._micro_batches = MicroBatches(config.pp)
        self.waiting = WaitingQueue()
        # Those that are not to be computed while a few are on trial (`isolation`); None: nobody is
        # on trial.
        self.held: WaitingQueue | None = None
        # Those that wait for the prefix that another one computes.
        self._followers = PrefixFollowers(self.waiting)
        # Sequences with a row, most urgent first.
        self.running: list[Sequence] = []
        self.kv: KVCacheManager | None = None
        self._prefix_keys = PrefixKeys()
        # Since the engine began.
        self.num_preemptions = 0
        self.num_prefix_query_tokens = 0
        self.num_prefix_hit_tokens = 0
        # Rows whose draws a grammar restricts.
        self.num_masked_rows = 0
        self._config = config
        # Every row can decode in every step, so that no row starves behind the budget.
        self.num_rows = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._tables = RowTables(config.max_num_seqs)
        self._free_rows: list[int] = []
        # Given back, but the worker does not know it yet.
        self._leaving_rows: list[int] = []
        # In the step in the making somebody was preempted or stalled for want of blocks, other than
        # those of a share.
        self._blocks_short = False
        # Numbers of the requests of sequences preempted, and sequences that did not decode though
        # they had a token to, since these were last taken.
        self._preempted: list[int] = []
        self._stalled: list[Sequence] = []
        # Requests that took a row in the step planned last, while they had none.
        self.entered: list[LiveRequest] = []

    def create_cache(self, num_blocks: int, tokens_per_row: int = 1, num_checkpoints: int = 0) -> None:
        """Starts scheduling for a worker with empty rows and an empty cache.

        Args:
            num_blocks: Blocks of the cache.
            tokens_per_row: Most tokens that a step settles for a row that decodes.
            num_checkpoints: States that can be kept for prefixes, where rows have states.
        """
        assert not self.running, "sequences of the worker before were evicted"
        config = self._config
        reuses_prefixes = config.enable_prefix_cache is not False and (num_checkpoints > 0 or not self._states.are_kept)
        checkpoints = StateCheckpoints(num_checkpoints) if reuses_prefixes and self._states.are_kept else None
        pool = (num_blocks, config.block_size, reuses_prefixes)
        about_model = (self._prefix_keys, self._groups, config.max_num_batched_tokens)
        self.kv = KVCacheManager(*pool, *about_model, checkpoints)
        self._places = None if checkpoints is None else CheckpointPlaces(self.kv, checkpoints, self._states)
        self._draft_lengths.worker_ready(tokens_per_row - 1)
        self._free_rows = list(range(self.num_rows - 1, -1, -1))
        self._leaving_rows = []

    def drop_cache(self, now_ns: int) -> None:
        """Returns everything that ran to the waiting queue, as the worker is lost.

        Sequences start again as if they had computed nothing; samples that were not read are
        forgotten.
        """
        evicted, self.running = self.running, []
        self.num_masked_rows = 0
        for sequence in evicted:
            sequence.leave_row()
            account = sequence.request.account
            account.num_running = account.num_blocks = 0
            if sequence.search is None:
                self.waiting.push(sequence)
            elif sequence is sequence.request.sequences[0]:
                self.waiting.push(beams.restart(sequence.request, self._config.block_size))
            self.waiting.unpark(account)
            sequence.request.lost_row(now_ns)
            self._followers.retire(sequence)
        for sequence in self.queued():
            sequence.forget_unread()
        self._states.forget()
        self._places = self.kv = None

    def add(self, sequence: Sequence) -> None:
        """Enters a sequence that has computed nothing."""
        if self.held is not None:
            self._hold([sequence])
        else:
            self.waiting.push(sequence)

    def remove(self, sequence: Sequence, now_ns: int) -> None:
        """Removes an ended sequence.

        A step in flight may still compute it, which does no harm, as later steps run later.
        """
        assert sequence.ended, "only what ended leaves"
        if sequence.row != NO_ROW:
            self._vacate(sequence, now_ns)
        elif sequence.leader is not None:
            self._followers.note_left(sequence)
        elif sequence not in sequence.request.unforked:
            queue = self.held if sequence.held else self.waiting
            assert queue is not None, "what is held is in a queue"
            queue.note_ended(sequence)

    def try_alone(self, requests: AbstractSet[LiveRequest], now_ns: int) -> None:
        """Only these requests are computed from now on.

        No step is in flight. Whoever runs gives its row back, and computes again later.
        """
        for sequence in list(self.running):
            if sequence.row != NO_ROW:
                self._return_to_queue(sequence, now_ns)
        if self.held is None:
            self.held = WaitingQueue()
        self._hold(self.waiting.take())
        for sequence in self.held.take(requests):
            sequence.held = False
            self.waiting.push(sequence)

    def try_nobody(self) -> None:
        """Ends trials: every sequence may be computed again."""
        if self.held is not None:
            for sequence in self.held.take():
                sequence.held = False
                self.waiting.push(sequence)
            self.held = None

    def publish(self, sequence: Sequence) -> None:
        """Offers the full blocks of a running sequence's settled tokens to later prompts."""
        assert self.kv is not None, "a step was computed"
        self.kv.publish(sequence)
        self._followers.advance(sequence, self.kv)

    def go_on(self, request: LiveRequest, forks: Iterable[Fork]) -> None:
        """Has the beams of a search compute the hypotheses that it has chosen."""
        assert self.kv is not None, "a step was computed"
        forks = list(forks)
        for parent, child in forks:
            self._states.note(request.sequences[parent], request.sequences[child])
        beams.go_on(request, forks, self.kv)

    def _hold(self, sequences: Iterable[Sequence]) -> None:
        assert self.held is not None, "somebody is on trial"
        for sequence in sequences:
            sequence.held = True
            self.held.push(sequence)

    def queued(self) -> list[Sequence]:
        """Returns the sequences that wait or are held."""
        return [*self.waiting, *self._followers, *(self.held or ())]

    @property
    def takes_newcomers(self) -> bool:
        """Whether a sequence that arrives now could be computed in the next step.

        It could if there is a row for it and no crowd before it.
        """
        return bool(self._free_rows) and not (self._budget.throughput and self.waiting)

    def schedule(self, builder: PlanBuilder, now_ns: int, in_flight: AbstractSequence[InFlightStep] = ()) -> bool:
        """Fills a step, while the steps in flight are being computed.

        Returns whether there is anything to compute; if not, nothing of the builder is to be used.
        """
        assert self.kv is not None, "there is a worker"
        self.entered.clear()
        self._states.begin_step()
        self._blocks_short = False
        num_proposed = self._draft_lengths.num_proposed
        passed_over = self._micro_batches.passed_over(self.running, in_flight)
        catching_up, forced = self._schedule_decodes(builder, passed_over, now_ns)
        if passed_over and not (builder.num_tokens or forced or in_flight):
            # The micro-batch lacks blocks that more urgent rows of another one hold, and no result
            # is to come that gives any back.
            self._stalled.clear()
            catching_up, forced = self._schedule_decodes(builder, frozenset(), now_ns)
        builder.close_decodes()
        if forced:
            forced = self._choose_forced(forced, builder, len(catching_up) + len(self.waiting) > 0)
        if self.num_masked_rows:
            builder.load.num_masked_draws = sum([sequence.grammar is not None for sequence in builder.decodes])
        if self._draft_lengths.drafts:
            num_forced = sum([count + 1 for _, count in forced])
            self._schedule_drafts(builder, num_forced, len(catching_up) + len(self.waiting) > 0)
        for sequence, count in forced:
            builder.add_forced(sequence, count)
        self._budget.note_decodes(builder.load.num_decodes)
        catching_up = [sequence for sequence in catching_up if not self._gives_way(sequence, now_ns)]
        if catching_up or self.waiting:
            self._budget.begin(builder.load, self._num_backlog_tokens(catching_up))
            long = self._take_long(catching_up)
            self._schedule_catching_up(catching_up, builder, now_ns)
            if not self._blocks_short:
                self._admit_waiting(catching_up + long, builder, now_ns)
            self._budget.unreserve()
            self._schedule_catching_up(long, builder, now_ns)
        self.kv.end_step()
        if not builder.num_tokens:
            # No worker hears of what it would have proposed.
            self._draft_lengths.num_proposed = num_proposed
            return False
        builder.add_state_copies(self._states.take())
        if self._places is not None:
            self._places.end_step(builder)
        return True

    def take_leaving_rows(self) -> list[int]:
        """Rows to be announced as released with the plan being sent."""
        leaving, self._leaving_rows = self._leaving_rows, []
        return leaving

    def take_stalled(self) -> list[Sequence]:
        """Sequences with a token to decode that no step computed, since the last call.

        They found no room for it, or were left to a later step.
        """
        stalled, self._stalled = self._stalled, []
        return stalled

    def take_preempted(self) -> list[int]:
        """Takes the numbers of the requests that were preempted since the last call.

        Each request is named once, however many of its sequences lost their row.
        """
        preempted, self._preempted = self._preempted, []
        return preempted

    def check_integrity(self) -> None:
        """Asserts that rows and blocks are where the sequences say."""
        if self.kv is None:
            assert not self.running, "nothing runs without a worker"
            return
        self.kv.check_integrity(self.running)
        rows = [sequence.row for sequence in self.running]
        assert sorted(rows + self._free_rows) == list(range(self.num_rows)), "a row is lost or held twice"
        assert all(not sequence.ended for sequence in self.running), "an ended sequence holds a row"
        assert all(s.num_settled <= s.num_computed <= s.capacity for s in self.running), "settled <= scheduled <= room"
        assert all(not s.tables and s.row == NO_ROW for s in self.queued()), "a waiting sequence holds something"
        assert all(not s.held for s in self.waiting), "what is held may not be admitted"
        self._followers.check_integrity()
        keys = [sequence.urgency for sequence in self.running]
        num_masked = sum(sequence.grammar is not None for sequence in self.running)
        assert num_masked == self.num_masked_rows, "rows with a grammar are counted"
        assert keys == sorted(keys), "running sequences are ordered by urgency"

    def _schedule_decodes(
        self, builder: PlanBuilder, passed_over: AbstractSet[Sequence], now_ns: int
    ) -> tuple[list[Sequence], list[tuple[Sequence, int]]]:
        """Schedules one token for each decode but those, and those behind which tokens must come.

        Returns the sequences that catch up, and those others with how many tokens must come.
        """
        catching_up: list[Sequence] = []
        forced: list[tuple[Sequence, int]] = []
        # Preemption removes only less urgent sequences, which come later in the list.
        for sequence in self.running:
            if not sequence.decodes:
                if not sequence.paused:
                    catching_up.append(sequence)
            elif sequence in passed_over:
                self._stalled.append(sequence)
            elif sequence.num_tokens < sequence.max_tokens_total:
                if sequence.num_tokens > sequence.capacity or sequence.tail_shared:
                    if not self._make_room(sequence, sequence.num_tokens, builder, now_ns):
                        self._stalled.append(sequence)
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
        num_free = self._config.max_num_batched_tokens - len(self.running)
        num_left = num_free // 2 if others_wait else num_free
        chosen: list[tuple[Sequence, int]] = []
        for sequence, most in forced:
            wanted = min(most, num_left)
            count = self._grow_freely(sequence, sequence.num_tokens + wanted, builder) - sequence.num_tokens
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
        num_free = self._config.max_num_batched_tokens - len(rows) - num_forced
        wanted = lengths.choose(
            [sequence.acceptance for sequence in rows],
            [sequence.draft_limit for sequence in rows],
            builder.load,
            num_free // 2 if others_wait else num_free,
            [sequence.grammar is not None for sequence in rows] if builder.load.num_masked_draws else (),
        )
        builder.num_proposed = builder.load.num_draft_passes = lengths.num_proposed
        builder.add_drafts([self._make_room_for_drafts(*chosen, builder) for chosen in zip(rows, wanted, strict=True)])

    def _make_room_for_drafts(self, sequence: Sequence, count: int, builder: PlanBuilder) -> int:
        """How many of `count` drafted tokens find room without taking anybody's blocks."""
        if not count:
            return 0
        return self._grow_freely(sequence, sequence.num_computed + count, builder) - sequence.num_computed

    def _grow_freely(self, sequence: Sequence, num_tokens: int, builder: PlanBuilder) -> int:
        """How many of a sequence's first `num_tokens` find room without taking anybody's blocks."""
        kv, account = self.kv, sequence.request.account
        assert kv is not None, "there is a worker"
        missing = kv.num_missing(sequence, num_tokens)
        if missing > min(kv.pool.num_available, account.num_blocks_left):
            return min(num_tokens, sequence.capacity)
        self._tables.grow(sequence, num_tokens, kv, builder)
        return num_tokens

    def _num_backlog_tokens(self, catching_up: list[Sequence]) -> int:
        """Tokens that wait to be computed, each sequence counted up to a limit."""
        counts = [min(sequence.num_tokens - sequence.num_computed, MAX_COUNTED_TOKENS) for sequence in catching_up]
        return self.waiting.num_counted_tokens + self._followers.num_counted_tokens + sum(counts)

    def _take_long(self, catching_up: list[Sequence]) -> list[Sequence]:
        """Removes the long prompts and reserves a share of the step for them.

        Nothing happens if nothing else could be computed before them.
        """
        long, share = self._budget.find_long(catching_up)
        if not long or (len(long) == len(catching_up) and not (self.waiting and self._free_rows)):
            return []
        catching_up[:] = [sequence for sequence in catching_up if sequence not in long]
        self._budget.reserve(share)
        return long

    def _schedule_catching_up(self, sequences: list[Sequence], builder: PlanBuilder, now_ns: int) -> None:
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
            if self._make_room(sequence, sequence.num_computed + count, builder, now_ns):
                self._add_known(sequence, count, builder, now_ns)
            elif self._blocks_short:
                return

    def _gives_way(self, sequence: Sequence, now_ns: int) -> bool:
        """Whether a sequence computes nothing in this step, since others have computed it already.

        It gives its row back when nothing of it is in flight any more, and finds theirs.
        """
        assert self.kv is not None, "there is a worker"
        if not self._followers.is_overtaken(sequence, self.kv):
            return False
        if sequence.num_settled == sequence.num_computed:
            self._return_to_queue(sequence, now_ns)
        return True

    def _admit_waiting(self, catching_up: list[Sequence], builder: PlanBuilder, now_ns: int) -> None:
        """Admits waiting sequences that fit with all their tokens.

        The blocks that running prompts will need stay free. Where blocks are short, a sequence
        whose prefix is cached may go first (`cached_first`); if it does not fit, the order stays.
        """
        assert self.kv is not None, "there is a worker"
        promised: Counter[TenantAccount] = Counter()
        for computing in catching_up:
            promised[computing.request.account] += self.kv.num_promised(computing)
        looks_behind = True
        while self._free_rows and self._budget.num_tokens_left > 0:
            if looks_behind:
                cached_first.bring_forward(self.waiting, self.kv)
            sequence = self.waiting.peek()
            if sequence is None:
                return
            if not self._admit_first(sequence, promised, builder, now_ns):
                if not self.waiting.put_back():
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
        kv, budget = self.kv, self._budget
        assert kv is not None, "there is a worker"
        num_rows = 1 if sequence.search is None else len(sequence.request.sequences)
        if num_rows > len(self._free_rows):
            return False
        account = sequence.request.account
        prefix = kv.no_prefix() if sequence.num_unread else kv.find_prefix(sequence)
        num_known = len(prefix[0]) * kv.block_size
        num_found = num_known if sequence.num_unread else kv.num_found(sequence, prefix)
        if not sequence.num_unread and self._followers.take_first(sequence, num_known, num_found, kv, self._places):
            return True
        num_needed = kv.num_needed(sequence, prefix)
        if sequence.search is not None:
            num_needed += len(self._groups) * beams.num_further_blocks(sequence, kv.block_size)
        if num_needed + self._num_spare_blocks(account.num_running) + promised[account] > account.num_blocks_left:
            return self.waiting.park()
        # A token sampled before a preemption may still be on its way; it has to be read before it
        # can be computed again.
        if sequence.num_unread:
            return False
        if num_needed + self._num_spare_blocks(len(self.running)) + promised.total() > kv.pool.num_available:
            return False
        count = budget.chunk(num_known, builder.most_computed(sequence, num_known))
        if self._places is not None:
            count = self._places.first_chunk(sequence, num_known, num_found, count)
        if count == 0 or not self._admit(sequence, kv.num_blocks_for(num_known + count), builder):
            return False
        self.waiting.pop()
        self._occupy(sequence, now_ns)
        kv.take_prefix(sequence, prefix)
        if self._places is not None:
            self._places.begin(sequence, num_known, num_found)
        self._followers.lead(sequence, kv)
        self._note_prefix(sequence)
        if sequence.search is not None:
            self._occupy_beams(sequence.request, now_ns)
        kv.grow(sequence, sequence.num_computed + count)
        self._tables.write(sequence, builder)
        self._add_known(sequence, count, builder, now_ns)
        promised[account] += kv.num_promised(sequence)
        return True

    def _num_spare_blocks(self, num_running: int) -> int:
        return len(self._groups) * -(-num_running // _RUNNING_PER_SPARE_BLOCK)

    def _admit(self, sequence: Sequence, num_blocks: int, builder: PlanBuilder) -> bool:
        """Whether the plan has room for the sequence that takes a row, or for all of its search."""
        if sequence.search is None:
            return builder.admit(sequence, self._free_rows[-1], num_blocks)
        search = sequence.request.sequences
        return builder.admit_beams(search, self._free_rows[: -len(search) - 1 : -1], num_blocks)

    def _occupy_beams(self, request: LiveRequest, now_ns: int) -> None:
        """The other sequences of a search take their rows with the first."""
        assert self.kv is not None, "there is a worker"
        others, request.unforked = request.unforked, []
        for beam in others:
            self._occupy(beam, now_ns)
        beams.take_rows(others, self.kv)

    def _note_prefix(self, sequence: Sequence) -> None:
        """Notes that the prefix cache was asked for a prompt.

        A recompute after a preemption does not count.
        """
        if sequence.epoch == 0:
            num_hits = min(sequence.num_computed, sequence.num_prompt_tokens)
            self.num_prefix_query_tokens += sequence.num_prompt_tokens
            self.num_prefix_hit_tokens += num_hits
            sequence.request.note_prefix(num_hits)

    def _add_known(self, sequence: Sequence, count: int, builder: PlanBuilder, now_ns: int) -> None:
        if builder.add_known(sequence, count) and sequence.request.unforked:
            self._fork(sequence, builder, now_ns)

    def _fork(self, leader: Sequence, builder: PlanBuilder, now_ns: int) -> None:
        """The prompt's last token is in the step: the other outputs begin from it.

        Those for which there is no row, or no room in the plan, wait like any sequence.
        """
        kv, request = self.kv, leader.request
        assert kv is not None, "there is a worker"
        siblings, request.unforked = request.unforked, []
        for sibling in siblings:
            if not self._free_rows or not builder.admit(sibling, self._free_rows[-1], len(leader.tables[0])):
                self.waiting.push(sibling)
                continue
            self._occupy(sibling, now_ns)
            kv.fork(leader, sibling)
            self._states.note(leader, sibling)
            self._tables.write(sibling, builder)
            builder.add_fork(sibling)

    def _make_room(self, sequence: Sequence, num_tokens: int, builder: PlanBuilder, now_ns: int) -> bool:
        """Sees to it that the tokens before `num_tokens` can be written, preempting if need be.

        False: not in this step.
        """
        kv = self.kv
        assert kv is not None, "there is a worker"
        account, missing = sequence.request.account, kv.num_missing(sequence, num_tokens)
        # A preempted sequence may have been the other holder of a block: what is missing is asked
        # again each time.
        while missing and account.num_blocks + missing > account.max_blocks:
            victim = self._find_victim(sequence, builder.step_id, account)
            if victim is None:
                return False
            self._preempt(victim, now_ns)
            missing = kv.num_missing(sequence, num_tokens)
        while missing > kv.pool.num_available:
            self._blocks_short = True
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

    def _find_victim(self, sequence: Sequence, step_id: int, account: TenantAccount | None = None) -> Sequence | None:
        """Finds the least urgent sequence that may be preempted for `sequence`.

        The victim is less urgent than `sequence`, is not computed by the step, and has more to
        compute. It is of one tenant, or of any if `account` is None.
        """
        for candidate in reversed(self.running):
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
        self._return_to_queue(victim, now_ns)
        victim.request.ledger.preemptions += 1
        self._preempted.append(victim.request.sequence_number)
        self.num_preemptions += 1

    def _return_to_queue(self, sequence: Sequence, now_ns: int) -> None:
        """Has a sequence with a row, or its whole search, wait for one again."""
        if sequence.search is None:
            self._vacate(sequence, now_ns)
            self.waiting.push(sequence)
            return
        for beam in sequence.request.sequences:
            self._vacate(beam, now_ns)
        self.waiting.push(beams.restart(sequence.request, self._config.block_size))

    def _occupy(self, sequence: Sequence, now_ns: int) -> None:
        sequence.row = self._free_rows.pop()
        self.num_masked_rows += sequence.grammar is not None
        bisect.insort(self.running, sequence, key=_urgency)
        sequence.request.account.num_running += 1
        if sequence.request.num_rows == 0:
            self.entered.append(sequence.request)
        sequence.request.took_row(now_ns)

    def _vacate(self, sequence: Sequence, now_ns: int) -> None:
        assert self.kv is not None, "there is a worker"
        del self.running[bisect.bisect_left(self.running, sequence.urgency, key=_urgency)]
        self._free_rows.append(sequence.row)
        self.num_masked_rows -= sequence.grammar is not None
        self._leaving_rows.append(sequence.row)
        self.kv.release(sequence)
        if self._places is not None:
            self._places.leave(sequence)
        self._followers.retire(sequence)
        sequence.leave_row()
        sequence.request.account.num_running -= 1
        self.waiting.unpark(sequence.request.account)
        sequence.request.lost_row(now_ns)


def _planned_in(sequence: Sequence) -> int:
    return sequence.planned_in


def _urgency(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.urgency
