"""Makes a live request out of an accepted one.

A live request has sequences, logs, a deadline, an urgency and a stop automaton.

Owns sequence numbers of requests. Does not decide whether there is room (`admission`) and enters
nothing anywhere (the engine).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as AbstractSequence

import numpy as np

from headrace_backend.config import EngineConfig
from headrace_backend.engine.events import LogprobColumns
from headrace_backend.engine.limits.tenant_account import TenantAccount
from headrace_backend.engine.limits.validation import RequestValidator
from headrace_backend.engine.request import EngineRequest, Subscriber, TenantLimits
from headrace_backend.engine.requests.ledger import Ledger
from headrace_backend.engine.requests.prompt_log import PromptLog
from headrace_backend.engine.requests.request_trace import RequestTrace
from headrace_backend.engine.requests.sequence import LiveRequest, Sequence
from headrace_backend.engine.requests.stops import StopAutomaton, StopWatch
from headrace_backend.engine.requests.token_log import OutputLog

# Of a token that an earlier attempt emitted.


class Intake:
    """Makes live requests of accepted ones."""

    def __init__(
        self,
        config: EngineConfig,
        validator: RequestValidator,
        vocab_size: int,
        token_bytes: AbstractSequence[bytes] | None,
        wall_clock: Callable[[], int],
    ) -> None:
        """No request yet."""
        self._validator = validator
        self._vocab_size = vocab_size
        self._token_bytes = token_bytes if token_bytes is not None else ()
        self._wall_clock = wall_clock
        self._ageing_ns = int(config.ageing_s * 1e9)
        self._time_limit_ns = int(config.max_time_limit_s * 1e9)
        self._num_requests = 0

    def validate(self, request: EngineRequest) -> None:
        """Raises RequestRefused INVALID_ARGUMENT, naming every rule broken."""
        self._validator.check(request)

    def validate_limits(self, limits: TenantLimits) -> None:
        """Raises RequestRefused INVALID_ARGUMENT, naming every rule broken."""
        self._validator.check_limits(limits)

    def accept(
        self, request: EngineRequest, owner: Subscriber | None, account: TenantAccount, now_ns: int
    ) -> LiveRequest:
        """A live request with nothing computed.

        Its outputs but the first wait to fork from it, unless each continues tokens of its own.
        """
        self._num_requests += 1
        live = LiveRequest(
            spec=request,
            sequence_number=self._num_requests,
            created_at_unix_ns=self._wall_clock(),
            deadline_ns=now_ns + self._time_limit_ns if request.deadline_ns is None else request.deadline_ns,
            ledger=Ledger(now_ns, request.service_ns),
            num_prompt_tokens=len(request.prompt_ids),
            owner=owner,
            account=account,
            num_active=request.asked.n - len(request.ends),
            prompt_log=self._prompt_log(request),
        )
        if request.earlier is not None and not request.has_ended:
            done = request.earlier.done
            parts_ns = (0, done.prefill_ns, done.decode_ns, done.preempted_ns, done.engine_restart_ns)
            live.ledger.resume(parts_ns, done.ttft_ns)
        if request.recorded:
            live.trace = RequestTrace(live.ledger, request.asked.n)
        automaton = StopAutomaton(request.asked.stop.strings) if request.asked.stop.strings else None
        for output_index in range(request.asked.n):
            live.sequences.append(self._sequence(live, output_index, automaton, now_ns))
        for end in request.ends:
            ended = live.sequences[end.output_index]
            ended.ended, ended.log.end = True, end
        live.logs = [sequence.log for sequence in live.sequences]
        live.unforked = [] if request.emitted else live.sequences[1:]
        return live

    def _prompt_log(self, request: EngineRequest) -> PromptLog | None:
        if request.asked.num_prompt_logprobs < 0:
            return None
        log = PromptLog(len(request.prompt_ids), min(request.asked.num_prompt_logprobs, self._vocab_size))
        log.resume(request.prompt_logprobs)
        return log

    def _sequence(self, live: LiveRequest, output_index: int, automaton: StopAutomaton | None, now_ns: int) -> Sequence:
        spec = live.spec
        log = OutputLog(output_index, spec.asked.num_logprobs >= 0)
        watch = StopWatch(automaton, spec.asked.stop.include_stop_string) if automaton is not None else None
        if spec.emitted:
            logprobs = spec.emitted_logprobs[output_index] if spec.emitted_logprobs else None
            self._resume(log, watch, spec.emitted[output_index], logprobs)
        return Sequence(live, log, now_ns - spec.asked.priority * self._ageing_ns, watch)

    def _resume(
        self,
        log: OutputLog,
        watch: StopWatch | None,
        emitted: np.typing.NDArray[np.int32],
        logprobs: LogprobColumns | None,
    ) -> None:
        """An earlier attempt emitted these tokens: they count, and nobody is sent them again."""
        log.resume(emitted.tobytes(), logprobs)
        if watch is not None:
            for token in log.tokens:
                watch.feed(self._token_bytes[token], may_stop=False)
