"""From protobuf to the engine's plain data: what a service sends.

Owns the rules of the wire: types, sizes and names of what a service says of a request, no unknown
fields. What the caller asked for is one struct, `headrace_request.Request`: it is decoded here, by
its types, and its rules stand in the engine, which checks every request again. Every broken rule of
a message is named, not only the first.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterator

import grpc
import numpy as np
from google.protobuf import message, unknown_fields
from google.rpc import error_details_pb2, status_pb2

from headrace_backend.engine.errors import RequestRefused, Violation
from headrace_backend.engine.events import EndReason, LogprobColumns, OutputEnd, PromptLogprobs, RequestDone
from headrace_backend.engine.request import (
    AbortCause,
    Earlier,
    EngineRequest,
    Recording,
    RequestState,
    TenantLimits,
    TokenIds,
)
from headrace_facts import facts
from headrace_protos.engine.v1 import engine_pb2
from headrace_request import limits
from headrace_request.request import Request

_REQUEST_ID = re.compile(limits.REQUEST_ID_PATTERN)
_RESOURCE_EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
# Services make it themselves, so there is only one version.
_TRACEPARENT = re.compile(r"00-(?P<trace_id>[0-9a-f]{32})-(?P<span_id>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})")
_SPAN_ID = re.compile(r"[0-9a-f]{16}")
_SAMPLED = 1
_MAX_TRACESTATE_BYTES = 512
_MAX_WORD_BYTES = 64
_MAX_TRACEPARENT_BYTES = 256
_MAX_STATE_BYTES = 1 << 20
_DIGEST_BYTES = 32
_MAX_SERVICE_NS = 24 * 3600 * 10**9
_MAX_INT32 = 2**31 - 1
# Most engines of a model that one message names.
MAX_ENGINES = 4096


class _Checks:
    """Collects broken rules."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []

    def require(self, holds: bool, field: str, rule: str) -> bool:
        """Notes the rule as broken unless it holds; says whether it does."""
        if not holds:
            self.violations.append(Violation(field, rule))
        return holds

    def at_most(self, value: str | bytes, limit: int, field: str) -> None:
        """A text or byte field of at most `limit` bytes."""
        size = len(value.encode()) if isinstance(value, str) else len(value)
        self.require(size <= limit, field, f"has {size} bytes; at most {limit} are allowed")

    def finish(self) -> None:
        """Raises RequestRefused if any rule is broken."""
        if self.violations:
            raise RequestRefused.invalid(self.violations)


def unknown_field(parent: message.Message, path: str = "") -> str | None:
    """Path and number of a field, anywhere in the message, that this version does not know.

    It is None if there is none.
    """
    return next(_unknown_fields(parent, path), None)


def has_unknown_fields_beside(envelope: engine_pb2.ToEngine) -> bool:
    """Whether the envelope itself has fields that this version does not know.

    Unknown fields inside its question are refused by that question's handler.
    """
    return len(unknown_fields.UnknownFieldSet(envelope)) > 0


def _unknown_fields(parent: message.Message, path: str) -> Iterator[str]:
    unknown = unknown_fields.UnknownFieldSet(parent)
    for i in range(len(unknown)):
        yield f"{path}{unknown[i].field_number}"
    for descriptor, value in parent.ListFields():
        if descriptor.message_type is None:
            continue
        for child in value if descriptor.is_repeated else (value,):
            yield from _unknown_fields(child, f"{path}{descriptor.name}.")


def _refuse_unknown(received: message.Message) -> None:
    found = unknown_field(received)
    if found is not None:
        raise RequestRefused.invalid([Violation(found, "this field is not known to protocol version 4")])


def _token_ids(data: bytes, field: str, checks: _Checks) -> TokenIds:
    """A column of uint32 as int32 (a view); empty if a rule is broken."""
    if not checks.require(len(data) % 4 == 0, field, f"has {len(data)} bytes; token ids take 4 bytes each"):
        return np.empty(0, np.int32)
    column = np.frombuffer(data, "<u4")
    if column.size and not checks.require(int(column.max()) <= _MAX_INT32, field, f"a token id is above {_MAX_INT32}"):
        return np.empty(0, np.int32)
    return column.view(np.int32)


def _identity(request_id: str, tenant: str, checks: _Checks) -> None:
    checks.require(
        _REQUEST_ID.fullmatch(request_id) is not None, "request_id", "must be 1 to 64 characters of [A-Za-z0-9_-]"
    )
    checks.at_most(tenant, limits.MAX_TENANT_BYTES, "tenant")


def _asked(add: engine_pb2.AddRequest) -> Request:
    """What the caller asked for, as far as its types go; the engine checks the rest."""
    try:
        return Request.decode(add.request)
    except ValueError as error:
        raise RequestRefused.invalid([Violation("request", f"is no request of this version: {error}")]) from None


def read_add(add: engine_pb2.AddRequest, now_ns: int) -> EngineRequest:
    """Reads the engine's request from a message.

    Args:
        add: The message as it was received.
        now_ns: The engine's clock, to which `remaining_ns` is added.

    Raises:
        RequestRefused: INVALID_ARGUMENT, with every broken rule of the wire.
    """
    _refuse_unknown(add)
    checks = _Checks()
    _identity(add.request_id, add.tenant, checks)
    checks.at_most(add.idempotency_key, limits.MAX_IDEMPOTENCY_KEY_BYTES, "idempotency_key")
    checks.at_most(add.service_state, _MAX_STATE_BYTES, "service_state")
    checks.at_most(add.traceparent, _MAX_TRACEPARENT_BYTES, "traceparent")
    checks.require(
        len(add.spec_digest) in (0, _DIGEST_BYTES), "spec_digest", f"must have {_DIGEST_BYTES} bytes or none"
    )
    checks.require(
        not add.idempotency_key or len(add.spec_digest) == _DIGEST_BYTES,
        "spec_digest",
        "is required beside idempotency_key",
    )
    checks.require(
        not add.unasked_engines or bool(add.idempotency_key), "unasked_engines", "must be empty without idempotency_key"
    )
    checks.require(
        not add.stands_in or bool(add.unasked_engines), "stands_in", "must not be set without unasked_engines"
    )
    checks.require(len(add.unasked_engines) <= MAX_ENGINES, "unasked_engines", f"has more than {MAX_ENGINES} entries")
    checks.require(add.service_ns <= _MAX_SERVICE_NS, "service_ns", "must be at most a day")
    checks.require(add.handle != 0 or add.detached, "handle", "must not be 0 unless the request is detached")
    request = EngineRequest(
        request_id=add.request_id,
        tenant=add.tenant,
        asked=_asked(add),
        deadline_ns=now_ns + add.remaining_ns if add.remaining_ns else None,
        service_ns=add.service_ns,
        detached=add.detached,
        idempotency_key=add.idempotency_key,
        spec_digest=add.spec_digest,
        service_state=add.service_state,
        span=_span(add, checks),
        recording=_recording(add.recording, checks) if add.HasField("recording") else None,
        emitted=tuple(_token_ids(part.token_ids, f"emitted[{i}]", checks) for i, part in enumerate(add.emitted)),
        emitted_logprobs=tuple(
            _columns(part.logprobs, f"emitted[{i}].logprobs", checks) if part.HasField("logprobs") else None
            for i, part in enumerate(add.emitted)
        ),
        prompt_logprobs=tuple(
            PromptLogprobs(part.first_token_index, _columns(part.columns, "prompt_logprobs", checks))
            for part in add.prompt_logprobs
        ),
        ends=tuple(_end(part.end, i, checks) for i, part in enumerate(add.emitted) if part.HasField("end")),
        earlier=_earlier(add.earlier) if add.HasField("earlier") else None,
        admitted=add.admitted,
        limits=_tenant_limits(add.limits, checks),
    )
    checks.finish()
    return request


def _earlier(sent: engine_pb2.RequestDone) -> Earlier:
    """The account of an earlier attempt; the engine checks its sums."""
    names = (field for field in RequestDone.__struct_fields__ if field not in ("ended_at_ns", "engine_trace"))
    done = RequestDone(ended_at_ns=0, **{name: getattr(sent, name) for name in names})
    return Earlier(done, sent.ended_ago_ns)


def _columns(sent: engine_pb2.LogprobColumns, field: str, checks: _Checks) -> LogprobColumns:
    """Columns of log probabilities; empty if they do not fit together."""
    count, num_tops = len(sent.top_counts) // 2, len(sent.top_token_ids) // 4
    sizes = [len(column) for column in (sent.sampled, sent.ranks, sent.top_counts)]
    fits = sizes == [4 * count, 4 * count, 2 * count]
    fits = fits and len(sent.top_token_ids) == len(sent.top_logprobs) == 4 * num_tops
    fits = fits and int(np.frombuffer(sent.top_counts, "<u2").sum(dtype=np.int64)) == num_tops
    if not checks.require(fits, field, "has columns whose lengths do not fit together"):
        return LogprobColumns()
    return LogprobColumns(
        array("f", sent.sampled),
        array("I", sent.ranks),
        array("H", sent.top_counts),
        array("I", sent.top_token_ids),
        array("f", sent.top_logprobs),
    )


def _end(end: engine_pb2.OutputEnd, index: int, checks: _Checks) -> OutputEnd:
    """How an output ended in an earlier attempt."""
    field = f"emitted[{index}].end"
    checks.require(end.output_index == index, field, f"output_index is {end.output_index}; it must be {index}")
    if not checks.require(
        int(end.reason) in list(map(int, EndReason)), field, f"reason must be {min(EndReason)} to {max(EndReason)}"
    ):
        return OutputEnd(index, EndReason.ERROR)
    broken = _broken(end.error)
    is_unfit = end.error.code == _RESOURCE_EXHAUSTED
    return OutputEnd(
        index,
        EndReason(end.reason),
        stop_token_id=end.stop_token_id if end.HasField("stop_token_id") else None,
        stop_string_index=end.stop_string_index if end.HasField("stop_string_index") else None,
        trim_bytes=end.trim_bytes,
        error=end.error.message if broken is None and not is_unfit else "",
        broken=broken,
        unfit=end.error.message if is_unfit else "",
        score=end.score if end.HasField("score") else None,
    )


def _broken(error: status_pb2.Status) -> Violation | None:
    """The rule that a request turned out to break; None: its error is the server's."""
    for detail in error.details:
        broken = error_details_pb2.BadRequest()
        if detail.Unpack(broken) and broken.field_violations:
            return Violation(broken.field_violations[0].field, broken.field_violations[0].description)
    return None


def _span(add: engine_pb2.AddRequest, checks: _Checks) -> facts.SpanContext | None:
    """The inference span that the service made.

    A context that is none (by W3C) is a request that nobody traces, never an error.
    """
    found = _TRACEPARENT.fullmatch(add.traceparent)
    parent, tracestate = add.recording.parent_span_id, add.recording.tracestate
    checks.require(
        not parent or _SPAN_ID.fullmatch(parent) is not None, "recording.parent_span_id", "must be 16 hex digits"
    )
    checks.at_most(tracestate, _MAX_TRACESTATE_BYTES, "recording.tracestate")
    if found is None or not int(found["trace_id"], 16) or not int(found["span_id"], 16):
        return None
    return facts.SpanContext(
        found["trace_id"], found["span_id"], parent, tracestate, sampled=bool(int(found["flags"], 16) & _SAMPLED)
    )


def _recording(recording: engine_pb2.Recording, checks: _Checks) -> Recording:
    for field in ("operation", "wire"):
        checks.at_most(getattr(recording, field), _MAX_WORD_BYTES, f"recording.{field}")
    last = max(facts.Detail)
    if not checks.require(recording.detail <= last, "recording.detail", f"must be 0 to {last}"):
        return Recording()
    default = Recording()
    return Recording(
        recording.operation or default.operation, recording.wire or default.wire, facts.Detail(recording.detail)
    )


def _tenant_limits(sent: engine_pb2.TenantLimits, checks: _Checks) -> TenantLimits:
    """The tenant's limits, if its share is a number."""
    checks.require(math.isfinite(sent.kv_cache_share), "limits.kv_cache_share", "must be a finite number")
    return read_limits(sent)


def read_limits(sent: engine_pb2.TenantLimits) -> TenantLimits:
    """The tenant's limits.

    A share comes as the decimal number that was meant: 0.7, not the float32 below it.
    """
    return TenantLimits(
        requests_per_minute=sent.requests_per_minute,
        concurrent_streams=sent.concurrent_streams,
        tokens_per_minute=sent.tokens_per_minute,
        kv_cache_share=float(str(np.float32(sent.kv_cache_share))),
    )


def read_abort_cause(abort: engine_pb2.AbortRequest) -> AbortCause:
    """Why the request is to end.

    Raises:
        RequestRefused: The message breaks a rule of the wire.
    """
    _refuse_unknown(abort)
    checks = _Checks()
    _identity(abort.request_id, abort.tenant, checks)
    checks.require(abort.cause in (1, 2), "cause", "must be ABORT_CAUSE_CANCELLED or ABORT_CAUSE_DEADLINE")
    checks.finish()
    return AbortCause(abort.cause)


def read_attach_limits(attach: engine_pb2.AttachRequest) -> TenantLimits:
    """The tenant's limits; the other fields are as they are.

    Raises:
        RequestRefused: The message breaks a rule of the wire.
    """
    _refuse_unknown(attach)
    checks = _Checks()
    _identity(attach.request_id, attach.tenant, checks)
    checks.require(attach.handle != 0, "handle", "must not be 0")
    tenant_limits = _tenant_limits(attach.limits, checks)
    checks.finish()
    return tenant_limits


def check_key(query: engine_pb2.KeyQuery) -> None:
    """Refuses a question for an idempotency key that breaks a rule of the wire.

    Raises:
        RequestRefused: INVALID_ARGUMENT, with every broken rule.
    """
    _refuse_unknown(query)
    checks = _Checks()
    checks.at_most(query.tenant, limits.MAX_TENANT_BYTES, "tenant")
    checks.at_most(query.idempotency_key, limits.MAX_IDEMPOTENCY_KEY_BYTES, "idempotency_key")
    checks.require(bool(query.idempotency_key), "idempotency_key", "must not be empty")
    checks.require(len(query.spec_digest) == _DIGEST_BYTES, "spec_digest", f"must have {_DIGEST_BYTES} bytes")
    checks.finish()


def read_list_state(query: engine_pb2.ListQuery) -> RequestState:
    """Which requests to list.

    Raises:
        RequestRefused: The message breaks a rule of the wire.
    """
    _refuse_unknown(query)
    checks = _Checks()
    checks.at_most(query.tenant, limits.MAX_TENANT_BYTES, "tenant")
    checks.require(query.state <= RequestState.FINISHED, "state", f"is {query.state}; it must be 0 to 3")
    checks.require(
        1 <= query.page_size <= limits.MAX_PAGE_SIZE,
        "page_size",
        f"is {query.page_size}; it must be 1 to {limits.MAX_PAGE_SIZE}",
    )
    checks.finish()
    return RequestState(query.state)
