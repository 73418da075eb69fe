"""The exceptions a caller can meet, and how a gRPC status becomes one of them.

Owns the exception tree and the reading of google.rpc details (`grpc-status-details-bin`:
BadRequest, RetryInfo, RequestInfo). What gRPC's core says itself is worded in grpc_words.py, and
any decision to try again is made in channel.py and stream_state.py. Statuses come in from
client.py, aio.py and events.py, exceptions go out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from headrace import grpc_words
from headrace.grpc_words import ConnectionProblem

DETAILS_KEY = "grpc-status-details-bin"


@dataclass(frozen=True, slots=True)
class Violation:
    """One rule that a request broke.

    Attributes:
        field: Path of the field, for example "spec.sampling.top_p".
        description: The rule, its limit and the value that broke it.
    """

    field: str
    description: str


class HeadraceError(Exception):
    """A call failed.

    Subclasses name the usual reasons; other statuses are raised as this class itself.

    Attributes:
        code: The gRPC status.
        message: What the server (or this client, for requests that cannot be sent) says about it.
        request_id: Names the request in the server's logs, where it got as far as having an id.
        violations: Rules the request broke; empty unless it was refused.
        retry_after: Seconds after which the server asks to be tried again, where it said so.
        problem: Why the server was not reached, or was lost; None where it answered.
    """

    default_code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode | None = None,
        request_id: str | None = None,
        violations: tuple[Violation, ...] = (),
        retry_after: float | None = None,
        problem: ConnectionProblem | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code or self.default_code
        self.message = message
        self.request_id = request_id
        self.violations = violations
        self.retry_after = retry_after
        self.problem = problem

    def __str__(self) -> str:
        fields = "; ".join(f"{v.field}: {v.description}" for v in self.violations if v.description not in self.message)
        return f"{self.message} ({fields})" if fields else self.message


class InvalidRequest(HeadraceError):
    """The request breaks a rule (INVALID_ARGUMENT, OUT_OF_RANGE).

    `violations` names field, rule and limit.
    """

    default_code = grpc.StatusCode.INVALID_ARGUMENT


class NotFound(HeadraceError):
    """No such model or request, or not one of the caller's (NOT_FOUND)."""

    default_code = grpc.StatusCode.NOT_FOUND


class AlreadyExists(HeadraceError):
    """The idempotency key belongs to a request with another spec (ALREADY_EXISTS)."""

    default_code = grpc.StatusCode.ALREADY_EXISTS


class Overloaded(HeadraceError):
    """The queue, a quota or a buffer is full (RESOURCE_EXHAUSTED).

    `retry_after` says when to come back.
    """

    default_code = grpc.StatusCode.RESOURCE_EXHAUSTED


class Unavailable(HeadraceError):
    """The server cannot be reached, stops, or lost its engine (UNAVAILABLE)."""

    default_code = grpc.StatusCode.UNAVAILABLE


class DeadlineExceeded(HeadraceError):
    """The call's timeout passed (DEADLINE_EXCEEDED)."""

    default_code = grpc.StatusCode.DEADLINE_EXCEEDED


class Cancelled(HeadraceError):
    """Somebody else ended the call (CANCELLED).

    A stream that this program closes ends without an error.
    """

    default_code = grpc.StatusCode.CANCELLED


class Unauthenticated(HeadraceError):
    """The server knows no such API key or client certificate, and wants one (UNAUTHENTICATED)."""

    default_code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDenied(HeadraceError):
    """The key is known, but this call or this model is not allowed to it (PERMISSION_DENIED)."""

    default_code = grpc.StatusCode.PERMISSION_DENIED


class Unimplemented(HeadraceError):
    """The server does not know the call, or the model cannot do it (UNIMPLEMENTED)."""

    default_code = grpc.StatusCode.UNIMPLEMENTED


class Internal(HeadraceError):
    """The server failed, or answered against its own contract (INTERNAL, UNKNOWN, DATA_LOSS)."""

    default_code = grpc.StatusCode.INTERNAL


# What grpc.aio reports instead of the server's status where a call ends while a message is being
# written (grpc/grpc#36066). Trying again either works or meets the status itself.
_LOST_STATUS = (grpc.StatusCode.INTERNAL, "Internal error from Core")

_CLASSES: dict[grpc.StatusCode, type[HeadraceError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.UNIMPLEMENTED: Unimplemented,
    grpc.StatusCode.INTERNAL: Internal,
    grpc.StatusCode.UNKNOWN: Internal,
    grpc.StatusCode.DATA_LOSS: Internal,
}
_CODES_BY_NUMBER: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


def invalid(field: str, description: str) -> InvalidRequest:
    """An InvalidRequest of this client's own, for a value that the wire format cannot carry."""
    return InvalidRequest(f"{field}: {description}", violations=(Violation(field, description),))


def from_rpc_error(error: grpc.RpcError, request_id: str | None = None) -> HeadraceError:
    """The exception for a failed call.

    Args:
        error: From a sync or asyncio call; both carry code, details and trailing metadata.
        request_id: What the stream has learned, used where the status does not name the request
            itself.
    """
    code, text = error.code(), error.details() or ""
    if (code, text) == _LOST_STATUS:
        code, text = grpc.StatusCode.UNAVAILABLE, "the call ended while a message was being sent; its status is lost"
    said = grpc_words.read(code, text)
    failure = _build(code, said.message, _details(error.trailing_metadata() or ()), request_id)
    failure.problem = said.problem
    return failure


def from_status(status: status_pb2.Status, request_id: str | None = None) -> HeadraceError:
    """The exception for a google.rpc.Status inside a message, such as OutputFinished.error."""
    return _build(_CODES_BY_NUMBER.get(status.code, grpc.StatusCode.UNKNOWN), status.message, status, request_id)


def _build(
    code: grpc.StatusCode, message: str, details: status_pb2.Status | None, request_id: str | None
) -> HeadraceError:
    violations: tuple[Violation, ...] = ()
    retry_after: float | None = None
    for detail in details.details if details is not None else ():
        bad, retry, info = (
            error_details_pb2.BadRequest(),
            error_details_pb2.RetryInfo(),
            error_details_pb2.RequestInfo(),
        )
        if detail.Unpack(bad):
            violations += tuple(Violation(v.field, v.description) for v in bad.field_violations)
        elif detail.Unpack(retry):
            retry_after = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
        elif detail.Unpack(info):
            request_id = info.request_id
    return _CLASSES.get(code, HeadraceError)(
        message or code.name, code=code, request_id=request_id, violations=violations, retry_after=retry_after
    )


def _details(metadata: Iterable[Any]) -> status_pb2.Status | None:
    """Returns the google.rpc.Status of a call's trailing metadata.

    It is None where there is none or it is damaged.
    """
    for key, value in metadata:
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                return None
    return None
