"""Makes a live request out of an accepted one.

A live request has sequences, logs, a deadline, an urgency and a stop automaton.

Owns sequence numbers of requests. Does not decide whether there is room (`admission`) and enters
nothing anywhere (the engine).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as AbstractSequence

from headrace_backend.config import EngineConfig
from headrace_backend.engine.limits.tenant_account import TenantAccount
from headrace_backend.engine.limits.validation import RequestValidator
from headrace_backend.engine.request import EngineRequest, Subscriber, TenantLimits
from headrace_backend.engine.requests.beam_search import BeamSearch, Finish
from headrace_backend.engine.requests.ledger import Ledger
from headrace_backend.engine.requests.prompt_log import PromptLog
from headrace_backend.engine.requests.request_trace import RequestTrace
from headrace_backend.engine.requests.selection import BestOf
from headrace_backend.engine.requests.sequence import LiveRequest, Sequence
from headrace_backend.engine.requests.stops import StopAutomaton, StopWatch
from headrace_backend.engine.requests.token_log import OutputLog
from headrace_request.beam_search import BeamSearch as BeamOptions


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
            num_active=_num_active(request),
            prompt_log=self._prompt_log(request),
        )
        if request.earlier is not None and not request.has_ended:
            done = request.earlier.done
            parts_ns = (0, done.prefill_ns, done.decode_ns, done.preempted_ns, done.engine_restart_ns)
            live.ledger.resume(parts_ns, done.ttft_ns)
        if request.recorded:
            live.trace = RequestTrace(live.ledger, request.asked.n)
        automaton = StopAutomaton(request.asked.stop.strings) if request.asked.stop.strings else None
        if request.asked.selects and not request.has_ended:
            self._add_candidates(live, automaton, now_ns)
            return live
        for output_index in range(request.asked.n):
            live.sequences.append(self._output(live, output_index, automaton, now_ns))
        for end in request.ends:
            ended = live.sequences[end.output_index]
            ended.ended, ended.log.end = True, end
        live.logs = [sequence.log for sequence in live.sequences]
        live.unforked = [] if request.emitted else live.sequences[1:]
        return live

    def _add_candidates(self, live: LiveRequest, automaton: StopAutomaton | None, now_ns: int) -> None:
        """Gives a request sequences among which its outputs are chosen, and logs for the outputs.

        The sequences begin anew even where an earlier attempt emitted some of what was chosen.
        """
        spec, asked = live.spec, live.spec.asked
        live.logs = [self._log(spec, output_index) for output_index in range(asked.n)]
        for end in spec.ends:
            live.logs[end.output_index].end = end
        logs = [OutputLog(index, asked.beam_search is None) for index in range(asked.num_sequences)]
        if asked.beam_search is None:
            live.selection = BestOf(asked.n, logs)
        else:
            live.selection = live.search = self._search(spec, asked.beam_search, automaton)
        for log in logs:
            watch = self._watch(spec, automaton) if asked.beam_search is None else None
            live.sequences.append(self._sequence(live, log, watch, now_ns))
        live.unforked = live.sequences[1:]

    def _search(self, spec: EngineRequest, options: BeamOptions, automaton: StopAutomaton | None) -> BeamSearch:
        stop = spec.asked.stop
        finish = Finish(spec.stop_token_ids, stop.min_tokens, stop.max_tokens, self._token_bytes)
        return BeamSearch(options, spec.asked.n, finish, self._watch(spec, automaton), spec.asked.num_logprobs)

    def urgency_ns(self, request: EngineRequest, now_ns: int) -> int:
        """The key that sequences of a request have which arrives now; smaller is more urgent."""
        return now_ns - request.asked.priority * self._ageing_ns

    def _prompt_log(self, request: EngineRequest) -> PromptLog | None:
        if request.asked.num_prompt_logprobs < 0:
            return None
        log = PromptLog(len(request.prompt_ids), min(request.asked.num_prompt_logprobs, self._vocab_size))
        log.resume(request.prompt_logprobs)
        return log

    def _output(self, live: LiveRequest, output_index: int, automaton: StopAutomaton | None, now_ns: int) -> Sequence:
        """A sequence that is an output."""
        log, watch = self._log(live.spec, output_index), self._watch(live.spec, automaton)
        if watch is not None:
            for token in log.tokens:
                watch.feed(self._token_bytes[token], may_stop=False)
        return self._sequence(live, log, watch, now_ns)

    def _sequence(self, live: LiveRequest, log: OutputLog, watch: StopWatch | None, now_ns: int) -> Sequence:
        return Sequence(live, log, self.urgency_ns(live.spec, now_ns), watch)

    def _watch(self, spec: EngineRequest, automaton: StopAutomaton | None) -> StopWatch | None:
        return StopWatch(automaton, spec.asked.stop.include_stop_string) if automaton is not None else None

    def _log(self, spec: EngineRequest, output_index: int) -> OutputLog:
        """An output's log.

        Tokens that an earlier attempt emitted count, and nobody is sent them again.
        """
        log = OutputLog(output_index, spec.asked.num_logprobs >= 0)
        if spec.emitted:
            logprobs = spec.emitted_logprobs[output_index] if spec.emitted_logprobs else None
            log.resume(spec.emitted[output_index].tobytes(), logprobs)
        return log


def _num_active(request: EngineRequest) -> int:
    """Sequences of a new request that have not ended.

    Those among which outputs are chosen begin anew.
    """
    if request.asked.selects and not request.has_ended:
        return request.asked.num_sequences
    return request.asked.n - len(request.ends)
