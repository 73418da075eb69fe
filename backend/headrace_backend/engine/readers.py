"""Readers of requests: what a further one gets, and what it means that one leaves.

Owns that rule: a reader counts in its tenant's account for as long as it reads, and a request that
came with a reader and is not detached ends with it. A detached request may have two guardians in
services of their own, which read it to keep copies and count nowhere: the second one becomes the
first when that is gone. Who reads what is `subscriptions`' business, what may be seen
`token_log`'s, and what an end does `endings`'.
"""

from __future__ import annotations

import dataclasses

from headrace_backend.engine.answers import AttachSnapshot, Handover, Unguarded
from headrace_backend.engine.errors import RefusalCode, RequestRefused, Violation
from headrace_backend.engine.events import EndReason, OutputSnapshot
from headrace_backend.engine.limits.quotas import Quotas
from headrace_backend.engine.limits.tenant_account import TenantAccount
from headrace_backend.engine.request import Subscriber
from headrace_backend.engine.requests.endings import Endings
from headrace_backend.engine.requests.request_table import RequestTable
from headrace_backend.engine.requests.sequence import LiveRequest
from headrace_backend.engine.requests.subscriptions import Subscriptions, read_outputs


@dataclasses.dataclass(slots=True)
class Readers:
    """Attaches and detaches readers, and informs everything that must hear of them."""

    table: RequestTable
    subscriptions: Subscriptions
    quotas: Quotas
    endings: Endings

    def attach(
        self,
        subscriber: Subscriber,
        request_id: str,
        account: TenantAccount,
        output_index: int | None,
        from_token: int,
        now_ns: int,
    ) -> AttachSnapshot:
        """Adds a reader to a request of its tenant, for one output or for all of them.

        What the reader missed is in the snapshot.

        Raises:
            RequestRefused: INVALID_ARGUMENT, the handle is in use; NOT_FOUND; OUT_OF_RANGE;
                RESOURCE_EXHAUSTED.
        """
        request = self.table.find(request_id, account.tenant)
        if request is None:
            raise RequestRefused(RefusalCode.NOT_FOUND, "request_id: unknown or expired")
        self.subscriptions.check_free(subscriber)
        outputs = read_outputs(request, output_index, from_token)
        if not request.active or request.num_readers:
            self.quotas.check_stream(account, now_ns)
        if request.active:
            self.subscriptions.add(subscriber, request, output_index)
            self.quotas.reader_came(request.account, request.num_readers, now_ns)
        return _snapshot(request, outputs)

    def guard(self, subscriber: Subscriber, request_id: str, tenant: str) -> AttachSnapshot:
        """Adds a guardian of a detached request; it reads everything and counts as no reader.

        It is the first one if there is none, and otherwise the second.

        Raises:
            RequestRefused: INVALID_ARGUMENT, the handle is in use, or the request is not detached;
                NOT_FOUND; ALREADY_EXISTS, it has two, or its only one is on the same stream.
        """
        request = self.table.find(request_id, tenant)
        if request is None:
            raise RequestRefused(RefusalCode.NOT_FOUND, "request_id: unknown or expired")
        self.subscriptions.check_free(subscriber)
        if not request.spec.detached:
            raise RequestRefused.invalid([Violation("guards", "must not be set: the request is not detached")])
        snapshot = _snapshot(request, read_outputs(request, None, 0))
        if not request.active:
            return snapshot
        is_second = request.owner is not None
        if request.owner is None:
            request.owner = subscriber
        elif request.second_guardian is None and request.owner.stream_id != subscriber.stream_id:
            request.second_guardian = subscriber
        else:
            raise RequestRefused(RefusalCode.ALREADY_EXISTS, "guards: the request has its guardians")
        self.subscriptions.add(subscriber, request, None)
        handover = Handover(request.spec, request.ledger.asked_at_ns, request.deadline_ns, is_second)
        return dataclasses.replace(snapshot, handover=handover)

    def unguarded(self) -> list[Unguarded]:
        """Detached requests that run and lack a guardian."""
        return [
            Unguarded(request.spec, request.owner.stream_id if request.owner is not None else None)
            for request in self.table.active()
            if request.spec.detached and request.second_guardian is None
        ]

    def leave(self, subscriber: Subscriber, now_ns: int, given_up: bool = True) -> None:
        """Ends a subscription, and its request if it came with one that is not detached.

        Args:
            subscriber: Who leaves; nothing happens if it does not read.
            now_ns: The engine's monotonic time, in nanoseconds.
            given_up: Its service said so, and is not itself gone.
        """
        request = self.subscriptions.remove(subscriber)
        if request is None:
            return
        if request.spec.detached and subscriber in (request.owner, request.second_guardian):
            # Who is left is the first.
            left = request.second_guardian if request.owner == subscriber else request.owner
            request.owner, request.second_guardian = left, None
            return
        self.quotas.reader_left(request.account, request.num_readers, now_ns)
        if request.owner == subscriber:
            request.given_up = given_up
            self.endings.end_all(request, EndReason.CANCELLED, now_ns)

    def stream_lost(self, stream_id: int, now_ns: int) -> None:
        """Ends all subscriptions of a service that is gone."""
        for subscriber in self.subscriptions.handles(stream_id):
            self.leave(subscriber, now_ns, given_up=False)
        self.subscriptions.forget_stream(stream_id)


def _snapshot(request: LiveRequest, outputs: list[OutputSnapshot]) -> AttachSnapshot:
    return AttachSnapshot(
        request.spec.service_state,
        request.num_prompt_tokens,
        request.announced,
        request.ledger.cached_tokens,
        outputs,
        request.done,
        list(request.prompt_log.parts) if request.prompt_log is not None else [],
    )
