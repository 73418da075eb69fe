"""All requests that the engine knows: active ones, and ended ones until their logs expire.

Owns look-up by id (a tenant sees its own only), idempotency keys, listings, and how long ended
requests are kept: until `log_ttl_s` after their end, at most `max_logs` of them and `max_log_bytes`
in all, least recently used out first. Does not change a request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from headrace_backend.config import EngineConfig
from headrace_backend.engine.answers import RequestPage, RequestRow
from headrace_backend.engine.errors import RefusalCode, RequestRefused
from headrace_backend.engine.request import RequestState
from headrace_backend.engine.requests.sequence import LiveRequest

# What an ended request weighs beside its columns.
_FIXED_BYTES = 2048


class RequestTable:
    """Requests by id, by idempotency key and by tenant."""

    def __init__(self, config: EngineConfig) -> None:
        """Empty."""
        self._ttl_ns = int(config.log_ttl_s * 1e9)
        self._max_logs = config.max_logs
        self._max_bytes = config.max_log_bytes
        self._by_id: dict[str, LiveRequest] = {}
        self._by_key: dict[tuple[str, str], LiveRequest] = {}
        # Per tenant by sequence number, so oldest first.
        self._by_tenant: dict[str, dict[int, LiveRequest]] = {}
        self._active: dict[int, LiveRequest] = {}
        # Active requests that are recorded.
        self.num_recorded = 0
        # Ended requests, in order of their end and in order of use.
        self._by_end: OrderedDict[str, LiveRequest] = OrderedDict()
        self._by_use: OrderedDict[str, int] = OrderedDict()
        self._log_bytes = 0

    def __len__(self) -> int:
        """Requests, active and ended."""
        return len(self._by_id)

    @property
    def num_active(self) -> int:
        """Requests that have not ended."""
        return len(self._active)

    @property
    def log_bytes(self) -> int:
        """Bytes of ended requests' logs."""
        return self._log_bytes

    def active(self) -> Iterator[LiveRequest]:
        """Requests that have not ended, as of now: the caller may end them while iterating."""
        return iter(list(self._active.values()))

    def add(self, request: LiveRequest) -> None:
        """Enters an active request."""
        spec = request.spec
        self.num_recorded += spec.recorded
        self._by_id[spec.request_id] = request
        self._active[request.sequence_number] = request
        self._by_tenant.setdefault(spec.tenant, {})[request.sequence_number] = request
        if spec.idempotency_key:
            self._by_key[spec.tenant, spec.idempotency_key] = request

    def check_new(self, request_id: str, continues: bool = False) -> None:
        """Raises RequestRefused ALREADY_EXISTS if the id is in use, whoever uses it.

        A continuation may come back to where an attempt at it ended, whose log is then forgotten.
        """
        if continues and request_id in self._by_end:
            self._forget(request_id)
        if request_id in self._by_id:
            raise RequestRefused(RefusalCode.ALREADY_EXISTS, "request_id: in use")

    def find_by_key(self, tenant: str, idempotency_key: str, spec_digest: bytes) -> LiveRequest | None:
        """The earlier request of the same key and spec; None if the key is new or empty.

        Raises:
            RequestRefused: ALREADY_EXISTS, the key was used with another spec.
        """
        request = self._by_key.get((tenant, idempotency_key)) if idempotency_key else None
        if request is None:
            return None
        if request.spec.spec_digest != spec_digest:
            raise RequestRefused(RefusalCode.ALREADY_EXISTS, "idempotency_key: in use for a request with another spec")
        self._touch(request)
        return request

    def find(self, request_id: str, tenant: str) -> LiveRequest | None:
        """The tenant's request of that id. Counts as use of its log."""
        request = self._by_id.get(request_id)
        if request is None or request.spec.tenant != tenant:
            return None
        self._touch(request)
        return request

    def note_ended(self, request: LiveRequest) -> None:
        """A request ended: its log is kept as long as the bounds allow, so it may go at once."""
        request_id = request.spec.request_id
        num_bytes = _FIXED_BYTES + len(request.spec.service_state) + request.log_bytes
        del self._active[request.sequence_number]
        self.num_recorded -= request.spec.recorded
        self._by_end[request_id] = request
        self._by_use[request_id] = num_bytes
        self._log_bytes += num_bytes
        while len(self._by_use) > self._max_logs or self._log_bytes > self._max_bytes:
            self._forget(next(iter(self._by_use)))

    def next_expiry_ns(self) -> int | None:
        """When the next log's time is up."""
        if not self._by_end:
            return None
        return next(iter(self._by_end.values())).ledger.ended_at_ns + self._ttl_ns

    def expire(self, now_ns: int) -> None:
        """Forgets ended requests whose time is up."""
        expiry = self.next_expiry_ns()
        while expiry is not None and expiry <= now_ns:
            self._forget(next(iter(self._by_end)))
            expiry = self.next_expiry_ns()

    def page(self, tenant: str, state: RequestState, page_size: int, before: int) -> RequestPage:
        """The tenant's requests older than `before` (0: all), newest first."""
        rows: list[RequestRow] = []
        requests = self._by_tenant.get(tenant, {})
        for number, request in reversed(requests.items()):
            if (before and number >= before) or state not in (RequestState.ALL, request.state):
                continue
            if len(rows) == page_size:
                return RequestPage(rows, rows[-1].sequence_number)
            rows.append(_row(request))
        return RequestPage(rows, 0)

    def _touch(self, request: LiveRequest) -> None:
        if not request.active:
            self._by_use.move_to_end(request.spec.request_id)

    def _forget(self, request_id: str) -> None:
        request = self._by_end.pop(request_id)
        self._log_bytes -= self._by_use.pop(request_id)
        spec = request.spec
        del self._by_id[request_id]
        if spec.idempotency_key:
            del self._by_key[spec.tenant, spec.idempotency_key]
        of_tenant = self._by_tenant[spec.tenant]
        del of_tenant[request.sequence_number]
        if not of_tenant:
            del self._by_tenant[spec.tenant]


def _row(request: LiveRequest) -> RequestRow:
    ends = [log.end.reason for log in request.logs if log.end is not None]
    return RequestRow(
        request.sequence_number,
        request.spec.request_id,
        request.state,
        request.created_at_unix_ns,
        request.num_prompt_tokens,
        request.num_output_tokens,
        ends,
        request.spec.detached,
    )
