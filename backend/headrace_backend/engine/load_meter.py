"""The engine's load and rates, measured from settled steps, and the snapshot of them.

Owns the counts of settled steps and of late work, and the moment at which the device was free.
Durations go on to `step_time`, `draft_lengths` and `rates`, which plan and admit by them, and
moments to `plan_timing`. Decides nothing.
"""

from __future__ import annotations

from headrace_backend.engine.answers import LoadReport, LoadSnapshot
from headrace_backend.engine.limits.admission import Admission
from headrace_backend.engine.rates import Rates
from headrace_backend.engine.scheduling.draft_lengths import DraftLengths
from headrace_backend.engine.scheduling.in_flight_step import InFlightStep
from headrace_backend.engine.scheduling.plan_timing import PlanTiming
from headrace_backend.engine.scheduling.scheduler import Scheduler
from headrace_backend.engine.scheduling.step_time import StepTimeModel
from headrace_backend.step.plan import StepResult


class LoadMeter:
    """Measures the engine's load by settled steps."""

    __slots__ = (
        "_device_free_ns",
        "_draft_lengths",
        "_hit_tokens",
        "_late_work",
        "_max_waiting_requests",
        "_missed_share",
        "_query_tokens",
        "_rates",
        "_step_times",
        "_timing",
        "num_settled_steps",
    )

    def __init__(
        self,
        step_times: StepTimeModel,
        draft_lengths: DraftLengths,
        rates: Rates,
        timing: PlanTiming,
        max_waiting_requests: int,
    ) -> None:
        """No step was settled."""
        self._step_times = step_times
        self._draft_lengths = draft_lengths
        self._rates = rates
        self._timing = timing
        self._max_waiting_requests = max_waiting_requests
        # Over all lives of workers.
        self.num_settled_steps = 0
        # What the workers compiled and captured since they were ready.
        self._late_work = 0
        # When the device was done with the step before, on the worker's clock.
        self._device_free_ns = 0
        # The prefix cache's counters at the last report, and the share of prompts that it did not
        # hold before.
        self._query_tokens = 0
        self._hit_tokens = 0
        self._missed_share = 1.0

    def worker_ready(self) -> None:
        """A worker with a clock of its own takes over."""
        self._device_free_ns = 0

    def note_step(self, step: InFlightStep, result: StepResult, now_ns: int) -> float:
        """A step was settled.

        Returns how long it took, in microseconds: one that was launched while the one before ran
        began when that one was done.
        """
        self.num_settled_steps += 1
        self._late_work = result.late_work
        self._timing.settled(result.launched_at_ns, result.finished_at_ns)
        duration_ns = result.finished_at_ns - max(result.started_at_ns, self._device_free_ns)
        self._device_free_ns = result.finished_at_ns
        # The load does not tell what a step's output layer had to compute for prompts.
        if not step.prompt_runs:
            self._draft_lengths.took(step.load, duration_ns / 1e3)
            self._step_times.observe(step.load, duration_ns / 1e3)
        num_prompt_tokens = step.load.num_prefill_tokens - step.load.num_forced_tokens
        self._rates.note_step(now_ns, duration_ns, num_prompt_tokens, result.tokens.size + step.num_forced)
        return duration_ns / 1e3

    def snapshot(self, scheduler: Scheduler, admission: Admission, num_active: int, now_ns: int) -> LoadSnapshot:
        """Returns the engine's load; without a worker there are no blocks."""
        kv, batch, stats = scheduler.kv, scheduler.batch, scheduler.stats
        pool = kv.pool if kv is not None else None
        num_blocks, num_used = (pool.num_blocks, pool.num_used) if pool is not None else (0, 0)
        return LoadSnapshot(
            running_sequences=len(batch.running),
            waiting_requests=admission.num_waiting,
            waiting_tokens=admission.num_waiting_tokens,
            kv_cache_usage=num_used / num_blocks if num_blocks else 0.0,
            kv_blocks=num_blocks,
            max_waiting_requests=self._max_waiting_requests,
            output_tokens_per_second=self._rates.output_tokens_per_s(now_ns),
            expected_wait_ns=admission.expected_wait_ns(
                len(batch.running), passed=scheduler.waiting.passed_by(None, None)
            ),
            free_blocks=pool.num_free if pool is not None else 0,
            cached_blocks=pool.num_cached if pool is not None else 0,
            used_blocks=num_used,
            step_count=self.num_settled_steps,
            preemptions=stats.num_preemptions,
            prefix_query_tokens=stats.num_prefix_query_tokens,
            prefix_hit_tokens=stats.num_prefix_hit_tokens,
            late_work=self._late_work,
            held_plans=self._timing.num_held,
            late_plans=self._timing.num_late,
            max_running_sequences=batch.num_rows,
            active_requests=num_active,
            taken_requests=admission.num_taken,
            refused_requests=admission.num_refused,
        )

    def report(self, scheduler: Scheduler, admission: Admission, num_active: int) -> LoadReport:
        """Returns what services send requests by.

        Of the prompts that wait so much is taken to be cached as was of those since the last
        report.
        """
        batch, stats = scheduler.batch, scheduler.stats
        queried = stats.num_prefix_query_tokens - self._query_tokens
        if queried:
            self._missed_share = 1 - (stats.num_prefix_hit_tokens - self._hit_tokens) / queried
        self._query_tokens, self._hit_tokens = stats.num_prefix_query_tokens, stats.num_prefix_hit_tokens
        # A sequence that is written has one token to compute.
        running = sum([max(0, sequence.num_tokens - sequence.num_computed - 1) for sequence in batch.running])
        return LoadReport(
            prefill_tokens=running + int(admission.num_waiting_tokens * self._missed_share),
            prefill_tokens_per_s=self._rates.prefill_tokens_per_s,
            open_requests=num_active,
            rows=batch.num_rows,
            row_time_ns=int(self._rates.row_time_ns),
        )
