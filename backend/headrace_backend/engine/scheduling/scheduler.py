"""Who computes how much in the next step.

Owns the order in which the parts of a step are asked, and who waits for a row, over all lives of
workers: sequences enter here and leave here. Does not own rows and what each of them computes
(`rows`), blocks (`kv_cache_manager`) nor the plan's encoding (`plan_builder`), and reads no results
(`settlement`).

There are no phases: each step lets sequences catch up with their tokens, within the token budget,
the rows and the available blocks.

1. Sequences whose row holds the token to compute (one token each; people call it decoding), with
   drafts and with what must follow (`rows.decodes`).
2. Sequences that catch up with a prompt, or with tokens computed before a preemption, in chunks of
   what the budget leaves (`rows.prompts`, which may also set the long ones back behind 3, with a
   share kept for them).
3. Waiting sequences, unless blocks were short in this step, until the plan has no room for the next
   one's admission (`plan_bytes`): `rows.queue_admission`.

In each of the three the most urgent come first, and where blocks are short, the least urgent lose
theirs (`rows.row_blocks`). Costs grow with the rows scheduled.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as AbstractSequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from headrace_backend.cache_groups import ONE_GROUP, CacheGroup
from headrace_backend.config import EngineConfig
from headrace_backend.engine.cache.kv_cache_manager import KVCacheManager
from headrace_backend.engine.cache.prefix_keys import PrefixKeys
from headrace_backend.engine.cache.state_checkpoints import StateCheckpoints
from headrace_backend.engine.requests.beam_search import Fork
from headrace_backend.engine.requests.sequence import NO_ROW, LiveRequest, Sequence
from headrace_backend.engine.scheduling import beams
from headrace_backend.engine.scheduling.checkpoint_places import CheckpointPlaces
from headrace_backend.engine.scheduling.draft_lengths import DraftLengths
from headrace_backend.engine.scheduling.in_flight_step import InFlightStep
from headrace_backend.engine.scheduling.plan_builder import PlanBuilder
from headrace_backend.engine.scheduling.prefix_followers import PrefixFollowers
from headrace_backend.engine.scheduling.rows.batch import Batch
from headrace_backend.engine.scheduling.rows.decodes import Decodes
from headrace_backend.engine.scheduling.rows.known_tokens import KnownTokens
from headrace_backend.engine.scheduling.rows.prompts import Prompts
from headrace_backend.engine.scheduling.rows.queue_admission import QueueAdmission
from headrace_backend.engine.scheduling.rows.row_blocks import RowBlocks
from headrace_backend.engine.scheduling.rows.row_tables import RowTables
from headrace_backend.engine.scheduling.rows.worker_memory import WorkerMemory
from headrace_backend.engine.scheduling.scheduler_stats import SchedulerStats
from headrace_backend.engine.scheduling.state_copies import StateCopies
from headrace_backend.engine.scheduling.token_budget import TokenBudget
from headrace_backend.engine.scheduling.trial_queue import TrialQueue
from headrace_backend.engine.scheduling.waiting_queue import WaitingQueue


class _Parts(NamedTuple):
    """What schedules for one worker, until it is lost."""

    memory: WorkerMemory
    blocks: RowBlocks
    decodes: Decodes
    prompts: Prompts


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
        self._config = config
        self._groups = groups
        self._states = StateCopies(keeps_states, config.max_num_seqs)
        self._prefix_keys = PrefixKeys()
        self._budget = budget
        self._draft_lengths = draft_lengths
        self.waiting = WaitingQueue()
        self._trials = TrialQueue(self.waiting)
        # Those that wait for the prefix that another one computes.
        self._followers = PrefixFollowers(self.waiting)
        # Every row can decode in every step, so that no row starves behind the budget.
        self.batch = Batch(min(config.max_num_seqs, config.max_num_batched_tokens))
        self.stats = SchedulerStats()
        # The worker's cache, and what schedules for it; None: there is no worker.
        self.kv: KVCacheManager | None = None
        self._parts: _Parts | None = None

    # Workers.

    def create_cache(self, num_blocks: int, tokens_per_row: int = 1, num_checkpoints: int = 0) -> None:
        """Starts scheduling for a worker with empty rows and an empty cache.

        Args:
            num_blocks: Blocks of the cache.
            tokens_per_row: Most tokens that a step settles for a row that decodes.
            num_checkpoints: States that can be kept for prefixes, where rows have states.
        """
        self._draft_lengths.worker_ready(tokens_per_row - 1)
        self.batch.worker_ready()
        memory = self._new_memory(num_blocks, num_checkpoints)
        self.kv, self._parts = memory.kv, self._new_parts(memory)

    def drop_cache(self, now_ns: int) -> None:
        """Returns everything that ran to the waiting queue, as the worker is lost.

        Sequences start again as if they had computed nothing; samples that were not read are
        forgotten.
        """
        for sequence in self.batch.evict(now_ns):
            account = sequence.request.account
            account.num_blocks = 0
            if sequence.search is None:
                self.waiting.push(sequence)
            elif sequence is sequence.request.sequences[0]:
                self.waiting.push(beams.restart(sequence.request, self._config.block_size))
            self.waiting.unpark(account)
            self._followers.retire(sequence)
        for sequence in self.queued():
            sequence.forget_unread()
        self._states.forget()
        self.kv = self._parts = None

    def _new_memory(self, num_blocks: int, num_checkpoints: int) -> WorkerMemory:
        config, states = self._config, self._states
        reuses_prefixes = config.enable_prefix_cache is not False and (num_checkpoints > 0 or not states.are_kept)
        checkpoints = StateCheckpoints(num_checkpoints) if reuses_prefixes and states.are_kept else None
        pool = (num_blocks, config.block_size, reuses_prefixes)
        about_model = (self._prefix_keys, self._groups, config.max_num_batched_tokens)
        kv = KVCacheManager(*pool, *about_model, checkpoints)
        places = None if checkpoints is None else CheckpointPlaces(kv, checkpoints, states)
        return WorkerMemory(kv, len(self._groups), RowTables(config.max_num_seqs), states, places)

    def _new_parts(self, memory: WorkerMemory) -> _Parts:
        config, batch, waiting, followers, stats = self._config, self.batch, self.waiting, self._followers, self.stats
        blocks = RowBlocks(memory, batch, waiting, followers, stats)
        known_tokens = KnownTokens(memory, batch, waiting)
        admission = QueueAdmission(memory, batch, waiting, followers, self._budget, known_tokens, stats)
        decodes = Decodes(batch, blocks, waiting, self._draft_lengths, stats, config.max_num_batched_tokens, config.pp)
        prompts = Prompts(memory, batch, blocks, waiting, followers, self._budget, known_tokens, admission)
        return _Parts(memory, blocks, decodes, prompts)

    # Sequences.

    def add(self, sequence: Sequence) -> None:
        """Enters a sequence that has computed nothing."""
        self._trials.enter(sequence)

    def remove(self, sequence: Sequence, now_ns: int) -> None:
        """Removes an ended sequence.

        A step in flight may still compute it, which does no harm, as later steps run later.
        """
        assert sequence.ended, "only what ended leaves"
        if sequence.row != NO_ROW:
            assert self._parts is not None, "there is a worker"
            self._parts.blocks.vacate(sequence, now_ns)
        elif sequence.leader is not None:
            self._followers.note_left(sequence)
        elif sequence not in sequence.request.unforked:
            self._trials.note_ended(sequence)

    def queued(self) -> list[Sequence]:
        """Returns the sequences that wait or are held."""
        return [*self.waiting, *self._followers, *self._trials]

    # Trials (`isolation`).

    def try_alone(self, requests: AbstractSet[LiveRequest], now_ns: int) -> None:
        """Only these requests are computed from now on.

        No step is in flight. Whoever runs gives its row back, and computes again later.
        """
        for sequence in list(self.batch.running):
            if sequence.row != NO_ROW:
                assert self._parts is not None, "there is a worker"
                self._parts.blocks.return_to_queue(sequence, now_ns)
        self._trials.try_alone(requests)

    def try_nobody(self) -> None:
        """Ends trials: every sequence may be computed again."""
        self._trials.try_nobody()

    # Steps.

    @property
    def takes_newcomers(self) -> bool:
        """Whether a sequence that arrives now could be computed in the next step.

        It could if there is a row for it and no crowd before it.
        """
        return self.batch.num_free_rows > 0 and not (self._budget.throughput and self.waiting)

    @property
    def has_prompts(self) -> bool:
        """Whether sequences have prompts left to compute, or wait for a row."""
        return bool(self.waiting) or not all(sequence.decodes for sequence in self.batch.running)

    def schedule(self, builder: PlanBuilder, now_ns: int, in_flight: AbstractSequence[InFlightStep] = ()) -> bool:
        """Fills a step, while the steps in flight are being computed.

        Returns whether there is anything to compute; if not, nothing of the builder is to be used.
        """
        assert self._parts is not None, "there is a worker"
        memory, blocks, decodes, prompts = self._parts
        self.batch.begin_step()
        self._states.begin_step()
        blocks.begin_step()
        num_proposed = self._draft_lengths.num_proposed
        catching_up = decodes.schedule(builder, in_flight, now_ns)
        self._budget.note_decodes(builder.load.num_decodes)
        prompts.schedule(catching_up, builder, now_ns)
        memory.kv.end_step()
        if not builder.num_tokens:
            # No worker hears of what it would have proposed.
            self._draft_lengths.num_proposed = num_proposed
            return False
        builder.add_state_copies(self._states.take())
        if memory.places is not None:
            memory.places.end_step(builder)
        return True

    def publish(self, sequence: Sequence) -> None:
        """Offers the full blocks of a running sequence's settled tokens to later prompts."""
        assert self.kv is not None, "a step was computed"
        self.kv.publish(sequence)
        self._followers.advance(sequence, self.kv)

    def settle_state(self, sequence: Sequence, num_tokens: int, start: int) -> None:
        """The step that began at `start` has settled, whose state was kept for `num_tokens`."""
        assert self._parts is not None, "a step was computed"
        if self._parts.memory.places is not None:
            self._parts.memory.places.settle(sequence, num_tokens, start)

    def go_on(self, request: LiveRequest, forks: Iterable[Fork]) -> None:
        """Has the beams of a search compute the hypotheses that it has chosen."""
        assert self.kv is not None, "a step was computed"
        forks = list(forks)
        for parent, child in forks:
            self._states.note(request.sequences[parent], request.sequences[child])
        beams.go_on(request, forks, self.kv)

    def check_integrity(self) -> None:
        """Asserts that rows and blocks are where the sequences say."""
        if self.kv is None:
            assert not self.batch.running, "nothing runs without a worker"
            return
        self.kv.check_integrity(self.batch.running)
        self.batch.check_integrity()
        assert all(not s.tables and s.row == NO_ROW for s in self.queued()), "a waiting sequence holds something"
        self._trials.check_integrity()
        self._followers.check_integrity()
