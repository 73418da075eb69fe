"""What the backend reports to the telemetry process.

It reports its engine, its steps, its load, and the generations that no service can report.

Owns when each is reported and how it is put together. Does not own the way there
(`headrace_facts.feed`) nor what is noted (`engine.step_log`). A backend without a telemetry socket
has no `Teller`.
"""

from __future__ import annotations

import asyncio
import collections
import os
import secrets
from collections.abc import Callable

from headrace_backend.engine.engine import Engine
from headrace_backend.engine.errors import RefusalReason
from headrace_backend.engine.events import EndReason, OutputEnd
from headrace_backend.engine.request import Recording
from headrace_backend.engine.requests.sequence import LiveRequest
from headrace_backend.engine.step_log import EndedRequest, StepLog
from headrace_backend.server.logs import get_logger
from headrace_backend.server.model_facts import ModelFacts
from headrace_backend.step.messages import WorkerReady
from headrace_facts import facts, log_output
from headrace_facts.clocks import unix_offset_ns
from headrace_facts.feed import Feed
from headrace_facts.version import server_version

_STEPS_S = 0.05
_LOAD_S = 1.0
_END_REASONS = {
    EndReason.STOP: "stop",
    EndReason.LENGTH: "length",
    EndReason.CANCELLED: "cancelled",
    EndReason.DEADLINE: "deadline",
    EndReason.ERROR: "error",
}
# Of an output that ended with an error which is the request's.
_INVALID = "invalid"


def new_step_log(clock: Callable[[], int]) -> StepLog:
    """The log of this life of the backend. `clock` is the engine's."""
    return StepLog(secrets.token_hex(8), unix_offset_ns(clock))


def open_feed(address: str, model_name: str, replica: int, steps: StepLog) -> Feed:
    """The way to the telemetry process; not started.

    Each of a model's backends has a name of its own, so that one which is gone is missed; no
    model's name has a slash.
    """
    hello = facts.Hello(
        kind="backend",
        name=f"backend-{model_name}/{replica}" if replica else f"backend-{model_name}",
        instance=steps.engine,
        version=server_version(),
        pid=os.getpid(),
        unix_offset_ns=steps.unix_offset_ns,
    )
    return Feed(address, hello)


class Teller:
    """Reports to a feed what happens; everything runs in the event loop's thread."""

    def __init__(self, feed: Feed, engine: Engine, model: ModelFacts) -> None:
        """Starts with nothing reported.

        Args:
            feed: The connection that facts are sent over; it is started and stopped here.
            engine: The engine whose steps, requests and load are reported.
            model: What is known of the model.
        """
        self._feed = feed
        self._engine = engine
        self._model = model
        described = model.describe()
        self._name, self._revision = described.name, described.revision
        self._num_ready = 0
        self._refusals: collections.Counter[str] = collections.Counter()
        self._tasks: list[asyncio.Task[None]] = []
        self._log = get_logger()
        engine.steps.tells = True
        feed.on_connect = self._tell_active

    def start(self) -> None:
        """Connects, and reports from now on."""
        self._feed.start()
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._repeat(_STEPS_S, self.flush)),
            loop.create_task(self._repeat(_LOAD_S, self._tell_load)),
            loop.create_task(self._repeat(_LOAD_S, self._tell_lost_lines)),
        ]

    async def stop(self) -> None:
        """Reports what is left, within a second."""
        for task in self._tasks:
            task.cancel()
        self.flush()
        self._tell_load()
        await self._feed.stop()

    def ready(self, ready: WorkerReady) -> None:
        """Reports the engine when workers take steps, the first ones or others in their place."""
        self._num_ready += 1
        cost = self._model.cost(ready)
        self._feed.greet(
            facts.EngineFacts(
                engine=self._engine.steps.engine,
                model=self._name,
                device=ready.device,
                weight_bytes=cost.weight_bytes,
                flops_per_token=cost.flops_per_token,
                flops_per_pair=cost.flops_per_pair,
                flops_per_sample=cost.flops_per_sample,
                kv_bytes_per_token=cost.kv_bytes_per_token,
                copy_bytes_per_s=ready.copy_bytes_per_s,
                matmul_flops_per_s=ready.matmul_flops_per_s,
                drafter=self._model.drafter,
                expert_bytes=cost.expert_bytes,
                expert_share=cost.expert_share,
                row_state_bytes=cost.row_state_bytes,
            )
        )

    def began(self, number: int, request_id: str, span: facts.SpanContext | None) -> None:
        """Reports that the engine took a request."""
        self._feed.tell(facts.RequestBegan(self._engine.steps.engine, number, request_id, span))

    def refused(self, reason: RefusalReason) -> None:
        """Counts a request that was refused."""
        self._refusals[reason.value] += 1

    def flush(self) -> None:
        """Reports the steps settled and the generations ended since the last call."""
        steps = self._engine.steps.take_steps()
        if steps is not None:
            self._feed.tell(steps)
        for ended in self._engine.steps.take_ended():
            self._feed.tell(self._generation(ended))

    async def _repeat(self, period_s: float, tell: Callable[[], None]) -> None:
        """Calls `tell` again and again.

        A mistake of ours costs what was to be reported then, and is logged once until reporting
        works again.
        """
        failing = False
        while True:
            await asyncio.sleep(period_s)
            try:
                tell()
                failing = False
            except Exception:
                if not failing:
                    self._log.exception("telemetry not reported", what=tell.__name__)
                failing = True

    def _tell_active(self) -> None:
        """Reports active requests to a telemetry process that is new and knows none."""
        for request in self._engine.active_requests():
            self.began(request.sequence_number, request.spec.request_id, request.spec.span)

    def _tell_load(self) -> None:
        load = self._engine.load()
        self._feed.tell(
            facts.EngineLoad(
                engine=self._engine.steps.engine,
                model=self._name,
                running_sequences=load.running_sequences,
                max_running_sequences=load.max_running_sequences,
                waiting_requests=load.waiting_requests,
                waiting_tokens=load.waiting_tokens,
                num_blocks=load.kv_blocks,
                free_blocks=load.free_blocks,
                cached_blocks=load.cached_blocks,
                used_blocks=load.used_blocks,
                step_count=load.step_count,
                preemptions=load.preemptions,
                prefix_query_tokens=load.prefix_query_tokens,
                prefix_hit_tokens=load.prefix_hit_tokens,
                late_work=load.late_work,
                restarts=max(self._num_ready - 1, 0),
                refusals=dict(self._refusals),
            )
        )

    def _tell_lost_lines(self) -> None:
        lost_lines = log_output.take_lost_lines()
        if lost_lines:
            self._feed.tell(facts.LinesLost(lost_lines))

    def _generation(self, ended: EndedRequest) -> facts.Generation:
        request = ended.request
        spec, ledger, done = request.spec, request.ledger, request.done
        assert done is not None, "it has ended"
        recording = spec.recording or Recording()
        ends = [log.end for log in request.logs if log.end is not None]
        return facts.Generation(
            request_id=spec.request_id,
            model=self._name,
            model_revision=self._revision,
            operation=recording.operation,
            wire=recording.wire,
            unix_offset_ns=self._engine.steps.unix_offset_ns,
            arrival_ns=ledger.asked_at_ns,
            end_ns=ledger.ended_at_ns,
            ttft_ns=done.ttft_ns,
            prompt_tokens=done.prompt_tokens,
            output_tokens=done.output_tokens,
            cached_tokens=done.cached_tokens,
            finish_reasons=list(map(_reason, ends)),
            error_type=_error_type(ends),
            ledger={
                "queued": done.queued_ns,
                "prefill": done.prefill_ns,
                "decode": done.decode_ns,
                "preempted": done.preempted_ns,
                "engine_restart": done.engine_restart_ns,
                "detokenize_and_send": 0,
                "blocked_on_reader": 0,
                "end_to_end": ledger.ended_at_ns - ledger.asked_at_ns,
            },
            step_count=done.step_count,
            preemptions=done.preemptions,
            draft_tokens=done.draft_tokens,
            accepted_tokens=done.accepted_tokens,
            parameters=_parameters(request),
            streamed=not spec.detached,
            span=spec.span,
            detail=recording.detail,
            trace=ended.trace,
        )


def _reason(end: OutputEnd) -> str:
    return _INVALID if end.broken is not None else _END_REASONS[end.reason]


def _error_type(ends: list[OutputEnd]) -> str:
    """Whose error ended some output; the server's is the graver one."""
    if any(end.reason is EndReason.ERROR and end.broken is None and not end.unfit for end in ends):
        return "engine_error"
    if any(end.unfit for end in ends):
        return "RESOURCE_EXHAUSTED"
    return "INVALID_ARGUMENT" if any(end.broken is not None for end in ends) else ""


def _parameters(request: LiveRequest) -> dict[str, int | float]:
    """The request's parameters with the values that are in force in the engine.

    Defaults stand where the caller left something out; parameters that change nothing are left out.
    """
    spec, sampling = request.spec, request.spec.asked.sampling
    parameters: dict[str, int | float] = {
        "max_tokens": spec.asked.stop.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
    }
    optional = {
        "top_k": sampling.top_k,
        "choice.count": spec.asked.n if spec.asked.n > 1 else 0,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "stop_sequences": len(spec.asked.stop.strings),
    }
    return parameters | {name: value for name, value in optional.items() if value}
