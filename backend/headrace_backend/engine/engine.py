"""The engine: every request from its admission to the end of its log.

A pure object: no threads, no sockets, and the clock is given.

Owns the order in which its parts are asked, and nothing else: each method is a page of what
happens. One thread drives it:

    add, abort, attach ...  requests and readers come and go
                            (validation, admission, request_table, readers)
    plan() -> StepPlan      what the workers compute next
                            (scheduler, kv_cache_manager, plan_builder)
    take_drafts(StepDrafts) what rows with grammars have drafted (masks)
    take_mask_calls()       which tokens rows with grammars may draw: what to compute (masks)
    settle(StepResult)      tokens -> stops -> token log -> outboxes (settlement, endings)
    take_outboxes()         what the services are sent (outbox)

Up to two steps are in flight: step N+1 is planned before the result of step N was read, but on a
GPU not long before (plan_timing). A third is where steps are so short that launching them binds.
Each further pipeline stage has one more, so that stages compute at the same time (micro_batches).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as AbstractSequence
from collections.abc import Set as AbstractSet

from headrace_backend.cache_groups import SequenceBlocks
from headrace_backend.config import EngineConfig
from headrace_backend.engine.answers import (
    AbortOutcome,
    AddOutcome,
    AttachSnapshot,
    LoadReport,
    LoadSnapshot,
    LossOutcome,
    RequestPage,
    Unguarded,
)
from headrace_backend.engine.errors import RequestRefused, Violation
from headrace_backend.engine.events import EndReason, Resumed, Started
from headrace_backend.engine.limits.admission import Admission
from headrace_backend.engine.limits.deadlines import Deadlines
from headrace_backend.engine.limits.quotas import Quotas
from headrace_backend.engine.limits.sharing.reports import QuotaReport
from headrace_backend.engine.limits.sharing.shared_quotas import Dispute
from headrace_backend.engine.limits.tenant_account import TenantAccount
from headrace_backend.engine.limits.validation import RequestValidator
from headrace_backend.engine.load_meter import LoadMeter
from headrace_backend.engine.output_grammar import MaskOutcome
from headrace_backend.engine.rates import Rates
from headrace_backend.engine.readers import Readers
from headrace_backend.engine.request import (
    NO_LIMITS,
    AbortCause,
    EngineRequest,
    ModelLimits,
    RequestState,
    Subscriber,
    TenantLimits,
)
from headrace_backend.engine.requests.endings import Endings
from headrace_backend.engine.requests.intake import Intake
from headrace_backend.engine.requests.outbox import Outbox, Outboxes
from headrace_backend.engine.requests.request_table import RequestTable
from headrace_backend.engine.requests.sequence import LiveRequest
from headrace_backend.engine.requests.subscriptions import Subscriptions
from headrace_backend.engine.scheduling.draft_costs import DraftedGraphs
from headrace_backend.engine.scheduling.draft_lengths import DraftLengths
from headrace_backend.engine.scheduling.in_flight_step import InFlightStep
from headrace_backend.engine.scheduling.isolation import GUILTY, Isolation
from headrace_backend.engine.scheduling.masks import MaskCall, Masks
from headrace_backend.engine.scheduling.plan_builder import PlanBuilder
from headrace_backend.engine.scheduling.plan_timing import PlanTiming
from headrace_backend.engine.scheduling.scheduler import Scheduler
from headrace_backend.engine.scheduling.step_time import StepTimeModel
from headrace_backend.engine.scheduling.token_budget import StepLimits, TokenBudget
from headrace_backend.engine.settlement import Settlement
from headrace_backend.engine.step_log import StepLog
from headrace_backend.step.drafts import StepDrafts
from headrace_backend.step.plan import StepPlan, StepResult

# With one pipeline stage; each further one has one more, and so have short steps
# (`_runs_further_ahead`).
USUAL_STEPS_IN_FLIGHT = 2


class Engine:
    """Requests, queue, batch, cache and token logs of one model."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelLimits,
        token_bytes: AbstractSequence[bytes] | None,
        clock: Callable[[], int],
        wall_clock: Callable[[], int] = time.time_ns,
        steps: StepLog | None = None,
    ) -> None:
        """An engine without a worker: it takes requests, and plans nothing before `worker_ready`.

        Args:
            config: The engine's configuration.
            model: What is to be known of the model.
            token_bytes: [vocab_size] the bytes of each token, none for special tokens; None refuses
                stop strings.
            clock: CLOCK_MONOTONIC in nanoseconds; deadlines are on it.
            wall_clock: UNIX time in nanoseconds, for listings.
            steps: Keeps what steps leave for telemetry; None: one that nobody asks.
        """
        self._clock = clock
        self._model = model
        self._blocks = SequenceBlocks(config.block_size, model.cache_groups, config.max_num_batched_tokens)
        self._with_history = config.drafts_from_history
        self._num_stages = config.pp
        self._speculates = config.speculate != "off"
        self.steps = steps or StepLog()
        rates = Rates(clock())
        self._outboxes = Outboxes()
        self._subscriptions = Subscriptions(self._outboxes)
        self._step_times = StepTimeModel()
        self._timing = PlanTiming()
        self._draft_lengths = lengths = DraftLengths(self._step_times, config.fixed_drafts())
        self._meter = LoadMeter(self._step_times, lengths, rates, self._timing, config.max_waiting_requests)
        self._budget = TokenBudget(config.max_num_batched_tokens, self._step_times)
        self._step_limits = StepLimits(config.step_time_target_ms, config.watchdog_s)
        self._scheduler = Scheduler(config, self._budget, self._draft_lengths, model.cache_groups, model.keeps_states)
        self._table = RequestTable(config)
        self._admission = Admission(config, rates, model.max_model_len, self._blocks)
        self._quotas = Quotas(self._blocks, self.steps.engine)
        self._deadlines = Deadlines[LiveRequest]()
        self._endings = Endings(
            self._scheduler,
            self._table,
            self._subscriptions,
            self._admission,
            self._deadlines,
            rates,
            self._quotas,
            self.steps,
        )
        self._readers = Readers(self._table, self._subscriptions, self._quotas, self._endings)
        self._settlement = Settlement(
            self._scheduler,
            self._endings,
            self._table,
            self._draft_lengths,
            config.block_size,
            model.vocab_size,
            token_bytes,
        )
        validator = RequestValidator(
            model, min(config.max_outputs, config.max_num_seqs, config.max_num_batched_tokens), token_bytes is not None
        )
        self._intake = Intake(config, validator, model.vocab_size, token_bytes, wall_clock)
        self._isolation = Isolation(self._scheduler)
        self._masks = Masks(self._endings)
        self._in_flight: deque[InFlightStep] = deque()
        self._next_step_id = 1

    # Workers.

    def worker_ready(
        self,
        num_blocks: int,
        on_gpu: bool = False,
        captured_mixed_sizes: tuple[int, ...] = (),
        plan_bytes: int | None = None,
        tokens_per_row: int = 1,
        drafted_graphs: tuple[tuple[int, float], ...] = (),
        num_checkpoints: int = 0,
    ) -> None:
        """Starts planning for a worker with an empty cache; what was running is recomputed.

        Requests that can't fit such a cache, or such a plan, end with an error.

        Args:
            num_blocks: Number of blocks of the worker's KV cache.
            on_gpu: Decides how long steps should take where the configuration leaves it open.
            captured_mixed_sizes: Tokens that the worker pads steps with prompts to, ascending; none
                if it has no graphs.
            plan_bytes: Most bytes of a step plan that it takes; None: as many as before,
                `plan_bytes.max_plan_bytes` at first.
            tokens_per_row: Most tokens that a step settles for a row that decodes; 1: the worker
                drafts none.
            drafted_graphs: Tokens that the worker pads decodes with drafts to, ascending, and the
                microseconds that each takes; none if it has no such graphs.
            num_checkpoints: States of recurrent layers that it can keep for prefixes.

        Raises:
            ValueError: There is no block, or a step settles nothing.
        """
        if num_blocks < 1:
            raise ValueError(f"num_blocks: must be at least 1, is {num_blocks}")
        if tokens_per_row < 1:
            raise ValueError(f"tokens_per_row: must be at least 1, is {tokens_per_row}")
        self.worker_lost()
        self._meter.worker_ready()
        self.steps.worker_ready()
        self._step_times.captured = captured_mixed_sizes
        self._step_times.drafted_graphs = DraftedGraphs(drafted_graphs)
        # Stages are busy at the same time only if plans come early.
        self._timing.worker_ready(holds=bool(captured_mixed_sizes) and self._num_stages == 1)
        self._budget.set_limits(self._step_limits, on_gpu)
        self._admission.worker_ready(num_blocks, plan_bytes)
        self._quotas.set_num_blocks(num_blocks)
        self._endings.end_unfit(self._clock())
        self._scheduler.create_cache(num_blocks, tokens_per_row, num_checkpoints)

    def worker_lost(self, failed_step_id: int | None = None) -> LossOutcome:
        """Steps in flight will never be read; everything that was computed is gone.

        Requests wait for `worker_ready`.

        Args:
            failed_step_id: The step that failed, or that was begun last when the worker hung or
                died: whoever is in it, or in one before it, is suspected. At least the oldest step
                in flight is held to be at fault, as a worker may end before it can say what it
                begins. None: the cause lies elsewhere.
        """
        if self._scheduler.kv is None:
            return LossOutcome()
        now_ns = self._clock()
        guilty, failed = None, False
        if failed_step_id is not None and self._in_flight:
            failed = True
            guilty = self._isolation.step_failed(self._in_flight, failed_step_id, self._meter.num_settled_steps)
        self._in_flight.clear()
        self._masks.worker_lost()
        self._next_step_id = 1
        self._scheduler.drop_cache(now_ns)
        for request in self._table.active():
            request.last_step_id = 0
            if request.prompt_log is not None:
                request.prompt_log.forget_unread()
            if request.announced:
                request.ledger.restarting(now_ns)
                request.lost_at_ns = request.lost_at_ns or now_ns
        if guilty is None:
            return LossOutcome(failed and self._isolation.closer)
        self._endings.end_all(guilty, EndReason.ERROR, now_ns, error=GUILTY)
        return LossOutcome(self._isolation.closer, guilty.spec.request_id)

    # Requests.

    def add(self, request: EngineRequest, subscriber: Subscriber | None) -> AddOutcome:
        """Takes a request, with a subscription from its first token on.

        Raises:
            RequestRefused: By a rule of the request (INVALID_ARGUMENT), by its id or key
                (ALREADY_EXISTS), or by the engine's state (RESOURCE_EXHAUSTED, UNAVAILABLE).
        """
        now_ns = self._clock()
        self._intake.validate(request)
        source = subscriber.stream_id if subscriber is not None else request.source
        account = self._account(request.tenant, request.limits, source, now_ns)
        if subscriber is None and not request.detached:
            raise RequestRefused.invalid([Violation("detached", "must be set for a request without a subscription")])
        earlier = self._table.find_by_key(request.tenant, request.idempotency_key, request.spec_digest)
        if earlier is not None:
            return AddOutcome(earlier.spec.request_id, True, earlier.num_prompt_tokens, earlier.sequence_number)
        self._table.check_new(request.request_id, continues=bool(request.emitted))
        if subscriber is not None:
            self._subscriptions.check_free(subscriber)
        if request.has_ended:
            live = self._intake.accept(request, None, account, now_ns)
            self._endings.enter_ended(live, now_ns)
            return AddOutcome(request.request_id, False, len(request.prompt_ids), live.sequence_number)
        # Nobody asks how long a request without a deadline will wait.
        urgency_ns = None if request.deadline_ns is None else self._intake.urgency_ns(request, now_ns)
        passed = self._scheduler.waiting.passed_by(account, urgency_ns)
        self._admission.check(request, now_ns, len(self._scheduler.batch.running), passed)
        token_charge = self._quotas.admit(account, request, now_ns)
        live = self._intake.accept(request, subscriber, account, now_ns)
        live.token_charge = token_charge
        self._enter(live, subscriber)
        return AddOutcome(request.request_id, False, len(request.prompt_ids), live.sequence_number)

    def check(self, request: EngineRequest) -> None:
        """Refuses what `add` would refuse whatever the engine's state is.

        Raises:
            RequestRefused: INVALID_ARGUMENT, by a rule of the request.
        """
        self._intake.validate(request)

    def find_key(self, tenant: str, idempotency_key: str, spec_digest: bytes) -> AddOutcome | None:
        """The request that `add` would find by an idempotency key; None: the key is new.

        Raises:
            RequestRefused: ALREADY_EXISTS, the key was used with another spec.
        """
        found = self._table.find_by_key(tenant, idempotency_key, spec_digest)
        if found is None:
            return None
        return AddOutcome(found.spec.request_id, True, found.num_prompt_tokens, found.sequence_number)

    def abort(self, request_id: str, tenant: str, cause: AbortCause) -> AbortOutcome:
        """Ends a request at once; what steps in flight still compute of it is dropped."""
        request = self._table.find(request_id, tenant)
        if request is None:
            return AbortOutcome(False, False)
        if not request.active:
            return AbortOutcome(True, False)
        reason = EndReason.DEADLINE if cause is AbortCause.DEADLINE else EndReason.CANCELLED
        self._endings.end_all(request, reason, self._clock())
        return AbortOutcome(True, True)

    # Readers.

    def attach(
        self,
        subscriber: Subscriber,
        request_id: str,
        tenant: str,
        output_index: int | None,
        from_token: int,
        limits: TenantLimits = NO_LIMITS,
    ) -> AttachSnapshot:
        """Adds a reader to a request, for one output or for all of them.

        What the reader missed is in the snapshot.

        Raises:
            RequestRefused: INVALID_ARGUMENT, by a rule of limits; NOT_FOUND; OUT_OF_RANGE, the
                output or the token does not exist; RESOURCE_EXHAUSTED, the tenant's streams are in
                use.
        """
        self._intake.validate_limits(limits)
        now_ns = self._clock()
        account = self._account(tenant, limits, subscriber.stream_id, now_ns)
        return self._readers.attach(subscriber, request_id, account, output_index, from_token, now_ns)

    def guard(self, subscriber: Subscriber, request_id: str, tenant: str) -> AttachSnapshot:
        """Adds a guardian of a detached request: a reader of everything that counts as none.

        Raises:
            RequestRefused: INVALID_ARGUMENT; NOT_FOUND; ALREADY_EXISTS, it has its guardians.
        """
        return self._readers.guard(subscriber, request_id, tenant)

    def unguarded(self) -> list[Unguarded]:
        """Detached requests that run and lack a guardian."""
        return self._readers.unguarded()

    def detach(self, subscriber: Subscriber) -> None:
        """Ends a subscription, and its request if it came with one that is not detached."""
        self._readers.leave(subscriber, self._clock())

    def stream_lost(self, stream_id: int) -> None:
        """Ends the subscriptions of a service that is gone, and its undetached requests."""
        now_ns = self._clock()
        self._readers.stream_lost(stream_id, now_ns)
        self._quotas.shared.stream_lost(stream_id, now_ns)

    def take_outboxes(self, leave: AbstractSet[int] = frozenset()) -> dict[int, Outbox]:
        """What to send, by stream, since it was last taken.

        Streams in `leave` (lagging services) go on merging theirs.
        """
        return self._outboxes.take(leave)

    # Quotas that engines hold together.

    def name_quota_peers(self, stream_id: int, engines: Collection[str]) -> None:
        """A service names the engines between which it carries reports, this one among them."""
        self._quotas.shared.name_peers(stream_id, engines, self._clock())

    def read_quota_report(self, report: QuotaReport) -> None:
        """Takes in what another engine has of tenants' quotas."""
        self._quotas.read_report(report, self._clock())

    @property
    def has_quota_news(self) -> bool:
        """Whether the other engines are to hear something of tenants' quotas."""
        return self._quotas.shared.has_news

    def take_quota_report(self) -> QuotaReport | None:
        """What the other engines are to hear of tenants' quotas; None: nothing."""
        return self._quotas.shared.take_report(self._clock())

    def take_quota_disputes(self) -> list[Dispute]:
        """Tenants of which services say different limits for a while, once each."""
        return self._quotas.shared.take_disputes(self._clock())

    # Steps.

    @property
    def num_in_flight(self) -> int:
        """Steps that were planned and not settled."""
        return len(self._in_flight)

    @property
    def num_settled_steps(self) -> int:
        """Steps settled so far, over all lives of workers."""
        return self._meter.num_settled_steps

    @property
    def expected_step_s(self) -> float:
        """How long the oldest step in flight is expected to take, in seconds; 0 without one."""
        return 1e-6 * self._step_times.predict_us(self._in_flight[0].load) if self._in_flight else 0.0

    @property
    def has_work(self) -> bool:
        """Whether some request has not ended."""
        return self._table.num_active > 0

    @property
    def max_context_tokens(self) -> int:
        """Most tokens of prompt and output that a request may have.

        The limit is the model's context, or what the whole cache holds if that is less.
        """
        num_blocks = self._admission.num_blocks
        if num_blocks is None:
            return self._model.max_model_len
        # The last token's KV is never needed.
        return 1 + self._blocks.most_tokens(num_blocks, self._model.max_model_len - 1)

    def plan(self) -> StepPlan | None:
        """Plans the next step; returns None if no step is to be planned now.

        There is none if there is nothing to compute, it is too early (`plan_due_ns`), as many steps
        are in flight as there may be, or there is no worker.

        Expired requests end before they cost a step.
        """
        if self._scheduler.kv is None or self._has_all_in_flight:
            return None
        now_ns = self._clock()
        awaits_masks = self._awaits_masks
        if awaits_masks and not self._timing.knows_due:
            return None
        worthwhile = awaits_masks or self._gains_by_waiting()
        if not self._timing.may_plan(now_ns, worthwhile, self._timing.holds and self._scheduler.has_prompts):
            return None
        self._endings.end_expired(now_ns)
        num_settled, isolation = self._meter.num_settled_steps, self._isolation
        if isolation.active and not isolation.advance(self.num_in_flight, num_settled, now_ns):
            return None
        builder = PlanBuilder(
            self._next_step_id,
            self._admission.max_admission_bytes,
            self._model.attention_window,
            self._with_history,
            len(self._model.cache_groups),
        )
        if not self._scheduler.schedule(builder, now_ns, self._in_flight):
            return None
        for request in self._scheduler.batch.entered:
            self._announce(request, now_ns)
        leaving, has_grammars = self._scheduler.batch.take_leaving_rows(), self._scheduler.batch.num_masked_rows > 0
        plan, step = builder.build(leaving, now_ns, has_grammars)
        self._masks.planned(step)
        self.steps.note_plan(step, self._scheduler, self._admission.num_waiting, self._isolation.active)
        self._in_flight.append(step)
        load, times = step.load, self._step_times
        at_once = times.replays(load) and not self._masks.num_computing
        self._timing.planned(times.predict_us(load), load.num_prefill_tokens > 0, at_once)
        self._next_step_id += 1
        return plan

    @property
    def plan_due_ns(self) -> int | None:
        """The time at which `plan` is to be called again because the next plan is held back.

        It is None if no plan is held back.
        """
        return self._timing.due_ns

    def settle(self, result: StepResult) -> None:
        """Reads the result of the oldest step in flight.

        Raises:
            ValueError: It is not that step's result. The worker is not to be trusted any more.
        """
        if not self._in_flight or self._in_flight[0].step_id != result.step_id:
            raise ValueError(f"step {result.step_id} is not the oldest step in flight")
        step = self._in_flight[0]
        now_ns = self._clock()
        self._settlement.settle(step, result, now_ns, self._meter.num_settled_steps + 1)
        self._in_flight.popleft()
        duration_us = self._meter.note_step(step, result, now_ns)
        self._budget.note_step(step.load, duration_us)
        self.steps.note_step(self._meter.num_settled_steps, step, result, now_ns)
        self._outboxes.stamp(
            self._meter.num_settled_steps, step.planned_at_ns, now_ns, step.num_sequences, step.num_tokens
        )

    # Masks of rows with grammars.

    def take_drafts(self, drafts: StepDrafts) -> None:
        """Takes what rows with grammars have drafted for a step that was planned.

        Raises:
            ValueError: It is not what the step was planned with. The worker is not to be trusted
                any more.
        """
        self._masks.take_drafts(drafts, self._model.vocab_size)

    def take_mask_calls(self) -> list[MaskCall]:
        """Masks that planned steps wait for and that can be computed now, each once.

        The workers must get the masks of a call while it `is_current`. In any case what came of it
        goes to `masks_filled`, before a result of these workers is read, and to `masks_done`.
        """
        return self._masks.take_ready()

    def is_current(self, call: MaskCall) -> bool:
        """Whether the workers that a call was made for still wait for it."""
        return self._masks.is_current(call)

    def masks_filled(self, call: MaskCall, outcomes: list[MaskOutcome]) -> None:
        """Takes what came of a call: outputs end that are whole, or whose grammar failed."""
        self._masks.filled(call, outcomes, self._clock())

    def masks_done(self, call: MaskCall, outcomes: list[MaskOutcome]) -> None:
        """Takes the same outcomes with the tokens that must follow, once these were looked for."""
        self._masks.done(call, outcomes, self._clock())

    # Time.

    def expire(self) -> None:
        """Ends requests whose deadline has passed, and forgets logs and accounts that expired."""
        now_ns = self._clock()
        self._endings.end_expired(now_ns)
        self._table.expire(now_ns)
        self._quotas.expire(now_ns)

    def next_deadline_ns(self) -> int | None:
        """The time at which `expire` has something to do next; None if there is none."""
        times_ns = (self._deadlines.next_ns(), self._table.next_expiry_ns(), self._quotas.next_expiry_ns())
        return min((time_ns for time_ns in times_ns if time_ns is not None), default=None)

    def drain(self) -> None:
        """Takes no new requests from now on; requests that exist go on."""
        self._admission.draining = True

    # What can be seen.

    def list_requests(self, tenant: str, state: RequestState, page_size: int, before: int) -> RequestPage:
        """The tenant's requests, newest first, older than `before` (0: from the newest)."""
        return self._table.page(tenant, state, page_size, before)

    def active_requests(self) -> Iterator[LiveRequest]:
        """Requests that have not ended, as of now."""
        return self._table.active()

    def load(self) -> LoadSnapshot:
        """Returns the engine's load; without a worker there are no blocks."""
        return self._meter.snapshot(self._scheduler, self._admission, self._table.num_active, self._clock())

    def report_load(self) -> LoadReport:
        """Returns what services send requests by; about what came since it was last asked for."""
        return self._meter.report(self._scheduler, self._admission, self._table.num_active)

    def check_integrity(self) -> None:
        """Asserts the invariants that hold between calls.

        It looks at every block, so it is for tests and idle moments.
        """
        self._scheduler.check_integrity()
        active = list(self._table.active())
        num_rows = sum(request.num_rows for request in active)
        assert num_rows == len(self._scheduler.batch.running), "rows belong to active requests"
        waiting = [request for request in active if not request.announced]
        assert len(waiting) == self._admission.num_waiting, "requests that have not started are counted"
        num_tokens = sum(account.num_waiting_tokens for account in self._quotas)
        assert num_tokens == self._admission.num_waiting_tokens, "what waits is in its tenant's account"
        pool = self._scheduler.kv.pool if self._scheduler.kv is not None else None
        claims = [request.claim for request in active]
        self._quotas.check_integrity(claims, pool.num_used if pool is not None else 0)

    def _enter(self, request: LiveRequest, subscriber: Subscriber | None) -> None:
        self._table.add(request)
        self._deadlines.push(request)
        self._admission.entered(request.spec, request.account)
        if subscriber is not None:
            self._subscriptions.add(subscriber, request, None)
        for sequence in request.sequences:
            if not sequence.ended and sequence not in request.unforked:
                self._scheduler.add(sequence)

    def _account(self, tenant: str, limits: TenantLimits, source: int, now_ns: int) -> TenantAccount:
        """The tenant's account, and what follows at once if its limits are new."""
        before = self._quotas.find(tenant)
        max_blocks = before.max_blocks if before is not None else None
        account = self._quotas.account(tenant, limits, now_ns, source)
        if account is before and account.max_blocks != max_blocks:
            self._endings.end_unfit(now_ns)
            self._scheduler.waiting.unpark(account)
        return account

    def _announce(self, request: LiveRequest, now_ns: int) -> None:
        """Tells readers of a request that just took a row while it had none."""
        if not request.announced:
            request.announced = True
            self._admission.left(request.spec, request.account)
            request.publish(Started(request.ledger.cached_tokens))
        if request.lost_at_ns:
            request.publish(Resumed(now_ns - request.lost_at_ns))
            request.lost_at_ns = 0

    @property
    def _has_all_in_flight(self) -> bool:
        """Whether as many steps are in flight as there may be."""
        usual, num_in_flight = self._num_stages - 1 + USUAL_STEPS_IN_FLIGHT, len(self._in_flight)
        return num_in_flight > usual or (num_in_flight == usual and not self._runs_further_ahead)

    @property
    def _runs_further_ahead(self) -> bool:
        """Whether one step more than usual is planned.

        It is not where results say what is to be computed: drafts, and rows with grammars. Of
        pipeline stages, whose plans are never held back, launching is not known to bind either.
        """
        depends_on_results = self._speculates or self._scheduler.batch.num_masked_rows > 0
        return self._timing.launching_binds and not depends_on_results

    @property
    def _awaits_masks(self) -> bool:
        """Whether masks of the step in flight are likely to say what the next one is to compute.

        Its own draw waits for them too, so that little is lost by waiting, but what follows must
        not be planned so late that the device waits for it. With pipeline stages other rows' steps
        go on meanwhile.
        """
        return self._masks.are_awaited and bool(self._in_flight) and self._num_stages == 1

    def _gains_by_waiting(self) -> bool:
        """Whether a request that arrives while a step is in flight could join the next step.

        Steps that report prompt logprobs are launched kernel by kernel and must begin early.
        """
        return not (self._in_flight and self._in_flight[-1].prompt_runs) and self._scheduler.takes_newcomers
