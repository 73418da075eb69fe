"""Ends outputs and requests, whatever the reason, in one place.

Owns the order of what an end does: log and readers, row and blocks, account, table; and the search
for those whose deadline has passed or that fit no more. Does not decide that anything else ends:
`settlement` (stops, errors) and the engine (aborts) do.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import msgspec

from headrace_backend.engine.events import EndReason, OutputEnd, RequestDone
from headrace_backend.engine.limits.admission import Admission
from headrace_backend.engine.limits.deadlines import Deadlines
from headrace_backend.engine.limits.quotas import Quotas
from headrace_backend.engine.rates import Rates
from headrace_backend.engine.requests.ledger import Phase
from headrace_backend.engine.requests.request_table import RequestTable
from headrace_backend.engine.requests.selection import publish
from headrace_backend.engine.requests.sequence import LiveRequest, Sequence
from headrace_backend.engine.requests.subscriptions import Subscriptions
from headrace_facts import facts


class Rows(Protocol):
    """The scheduler, as far as an end needs it."""

    def remove(self, sequence: Sequence, now_ns: int) -> None:
        """Takes an ended sequence's row and blocks back, or its place in the queue."""


class EndLog(Protocol):
    """The step log, as far as an end needs it."""

    # Name of the engine, and UNIX time less the engine's clock, in nanoseconds.
    engine: str
    unix_offset_ns: int

    def note_ended(self, request: LiveRequest, trace: facts.EngineTrace | None) -> None:
        """Notes an end that no service can report."""


@dataclasses.dataclass(slots=True)
class Endings:
    """Ends outputs and requests, and informs everything that must hear of it."""

    rows: Rows
    table: RequestTable
    subscriptions: Subscriptions
    admission: Admission
    deadlines: Deadlines[LiveRequest]
    rates: Rates
    quotas: Quotas
    steps: EndLog

    def end_output(self, sequence: Sequence, end: OutputEnd, now_ns: int) -> None:
        """Ends one output; the request ends with its last output.

        Tokens that were held back are released, and the row and the blocks are given back. Where a
        request's outputs are chosen from its sequences, the last of these to end has it done.
        """
        assert not sequence.ended, "an output ends once"
        request = sequence.request
        sequence.ended = True
        request.num_active -= 1
        sequence.log.finish(end)
        self.rows.remove(sequence, now_ns)
        if not request.active:
            if request.selection is not None:
                publish(request.logs, request.selection.choose(end))
            self._end_request(request, now_ns)

    def end_all(self, request: LiveRequest, reason: EndReason, now_ns: int, error: str = "", unfit: str = "") -> None:
        """Ends all outputs that have not ended."""
        for sequence in list(request.sequences):
            if not sequence.ended:
                end = OutputEnd(sequence.log.output_index, reason, error=error, unfit=unfit)
                self.end_output(sequence, end, now_ns)

    def enter_ended(self, request: LiveRequest, now_ns: int) -> None:
        """Enters a request that ended at an engine which was lost: its log, for who reads it.

        It was never admitted here, so that it has nothing to give back.
        """
        earlier = request.spec.earlier
        ago_ns = earlier.ended_ago_ns if earlier is not None else 0
        self.table.add(request)
        request.announced = True
        request.trace = None
        request.ledger.end(now_ns)
        done = earlier.done if earlier is not None else _done(request)
        request.done = msgspec.structs.replace(done, ended_at_ns=now_ns - ago_ns)
        self._keep_log(request)

    def end_expired(self, now_ns: int) -> None:
        """Ends requests whose deadline has passed."""
        request = self.deadlines.first_expired(now_ns)
        while request is not None:
            self.end_all(request, EndReason.DEADLINE, now_ns)
            request = self.deadlines.first_expired(now_ns)

    def end_unfit(self, now_ns: int) -> None:
        """Ends requests that no longer fit alone.

        The cache or a tenant's share can have become smaller since they were accepted.
        """
        for request in self.table.active():
            reason = self.admission.check_fits(request.spec) or self.quotas.check_fits(request.account, request.spec)
            if reason is not None:
                self.end_all(request, EndReason.ERROR, now_ns, unfit=reason)

    def _end_request(self, request: LiveRequest, now_ns: int) -> None:
        ledger = request.ledger
        num_used = request.num_prompt_tokens + request.num_output_tokens if ledger.started else 0
        self.quotas.ended(request.claim, num_used, now_ns)
        if ledger.started:
            self.rates.note_request(now_ns - ledger.started_at_ns)
        else:
            self.admission.left(request.spec, request.account)
        self.admission.ended(request.spec)
        ledger.end(now_ns)
        request.done = _done(request)
        self._tell_end(request, request.done)
        self.subscriptions.end_request(request)
        self.deadlines.note_ended()
        self._keep_log(request)

    def _keep_log(self, request: LiveRequest) -> None:
        """Keeps what readers may still ask for; prompt and sequences would weigh more than it."""
        request.spec = request.spec.without_tokens()
        request.sequences, request.unforked = [], []
        if request.selection is not None:
            request.selection.forget()
        self.table.note_ended(request)

    def _tell_end(self, request: LiveRequest, done: RequestDone) -> None:
        """Tells the readers, and the one of them who came with the request what was recorded.

        Of a detached request and one that was given up the engine tells itself.
        """
        trace, steps = None, self.steps
        if request.trace is not None:
            num_tokens = [len(log.tokens) for log in request.logs]
            trace = request.trace.finish(steps.engine, request.sequence_number, steps.unix_offset_ns, num_tokens)
            request.trace = None
        if request.spec.detached or request.given_up:
            steps.note_ended(request, trace)
        elif trace is not None and request.readers:
            traced = msgspec.structs.replace(done, engine_trace=facts.encode_trace(trace))
            for stream, handle in request.readers:
                is_owner = (stream.stream_id, handle) == request.owner
                stream.outbox.events.append((handle, traced if is_owner else done))
            return
        request.publish(done)


def _done(request: LiveRequest) -> RequestDone:
    ledger = request.ledger
    parts = ledger.parts_ns
    return RequestDone(
        prompt_tokens=request.num_prompt_tokens,
        output_tokens=request.num_output_tokens,
        cached_tokens=ledger.cached_tokens,
        queued_ns=parts[Phase.QUEUED],
        prefill_ns=parts[Phase.PREFILL],
        decode_ns=parts[Phase.DECODE],
        preempted_ns=parts[Phase.PREEMPTED],
        engine_restart_ns=parts[Phase.RESTARTING],
        ttft_ns=ledger.ttft_ns,
        step_count=ledger.step_count,
        preemptions=ledger.preemptions,
        draft_tokens=ledger.draft_tokens,
        accepted_tokens=ledger.accepted_tokens,
        ended_at_ns=ledger.ended_at_ns,
    )
