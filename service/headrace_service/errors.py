"""Errors that callers see: one exception, its constructors by meaning, and its form on the wire.

Owns the mapping from meanings to gRPC codes and google.rpc details. Every refusal in this room
raises a `ServiceError`; `rpc_boundary` is the only place that turns one into a status. Messages
name field, rule and limit, and never echo a caller's value whole: gRPC turns statuses above some
KiB into RESOURCE_EXHAUSTED, so that message and details are capped at 1 KiB together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import grpc
from google.protobuf import any_pb2, duration_pb2, message
from google.rpc import error_details_pb2, status_pb2

from headrace_request.rule_kinds import Violation as Violation

STATUS_DETAILS_KEY = "grpc-status-details-bin"
_MAX_STATUS_BYTES = 1024
_MAX_MESSAGE_CHARS = 300
_MAX_FIELD_CHARS = 120
# More of them never fit the status; a request of some KiB can break rules by the thousand.
MAX_VIOLATIONS = 32
_MAX_ECHO_CHARS = 64
_ERROR_DOMAIN = "headrace"
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class CannotStart(Exception):
    """The process can never run as it is configured; the text is one line for people."""


class ServiceError(Exception):
    """An answer other than OK, raised by handlers and turned into a gRPC status.

    Attributes:
        code: the gRPC status code.
        message: one line for people, of printable characters: a name that a caller chose may stand
            in it, on its way to a terminal or a log.
        details: google.rpc messages for programs.
    """

    def __init__(self, code: grpc.StatusCode, text: str, details: Sequence[message.Message] = ()) -> None:
        super().__init__(text)
        self.code = code
        self.message = _printable(text[:_MAX_MESSAGE_CHARS])[:_MAX_MESSAGE_CHARS]
        self.details = tuple(details)


def echo(value: str) -> str:
    """Returns a caller's value quoted for an error message, shortened."""
    return repr(value if len(value) <= _MAX_ECHO_CHARS else value[:_MAX_ECHO_CHARS] + "...")


def invalid(violations: Sequence[Violation]) -> ServiceError:
    """Returns INVALID_ARGUMENT for a request that breaks rules."""
    capped = [
        error_details_pb2.BadRequest.FieldViolation(
            field=_printable(violation.field[:_MAX_FIELD_CHARS]),
            description=_printable(violation.description[:_MAX_MESSAGE_CHARS]),
        )
        for violation in violations[:MAX_VIOLATIONS]
    ]
    first = violations[0]
    more = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
    text = f"{first.field[:_MAX_FIELD_CHARS]}: {first.description}{more}"
    return ServiceError(grpc.StatusCode.INVALID_ARGUMENT, text, [error_details_pb2.BadRequest(field_violations=capped)])


def invalid_field(field: str, description: str) -> ServiceError:
    """Returns INVALID_ARGUMENT for one broken rule."""
    return invalid([Violation(field, description)])


def malformed() -> ServiceError:
    """Returns INVALID_ARGUMENT for bytes that are no message of the RPC's type."""
    return ServiceError(
        grpc.StatusCode.INVALID_ARGUMENT,
        "request: not a valid protobuf message of this RPC (truncated, or a string is not UTF-8)",
    )


def no_request() -> ServiceError:
    """Returns INVALID_ARGUMENT for a call that ended its sending before any message."""
    return ServiceError(
        grpc.StatusCode.INVALID_ARGUMENT,
        "request: is missing; the call must send one message before it ends its sending",
    )


def not_found(text: str) -> ServiceError:
    """Returns NOT_FOUND."""
    return ServiceError(grpc.StatusCode.NOT_FOUND, text)


def failed_precondition(text: str) -> ServiceError:
    """Returns FAILED_PRECONDITION, for what this server's model can never do."""
    return ServiceError(grpc.StatusCode.FAILED_PRECONDITION, text)


def unimplemented(text: str) -> ServiceError:
    """Returns UNIMPLEMENTED, for what this version of the server cannot do.

    The text names the field.
    """
    return ServiceError(grpc.StatusCode.UNIMPLEMENTED, text)


def unavailable(text: str, retry_after_s: float = 1.0) -> ServiceError:
    """Returns UNAVAILABLE with the time after which trying again makes sense."""
    return ServiceError(grpc.StatusCode.UNAVAILABLE, text, [_retry_info(retry_after_s)])


def exhausted(text: str, retry_after_s: float | None = None) -> ServiceError:
    """Returns RESOURCE_EXHAUSTED; with RetryInfo where waiting helps."""
    return ServiceError(
        grpc.StatusCode.RESOURCE_EXHAUSTED, text, [] if retry_after_s is None else [_retry_info(retry_after_s)]
    )


def too_large(what: str, num_bytes: int, max_bytes: int, instead: str = "") -> ServiceError:
    """Returns RESOURCE_EXHAUSTED for an answer, or a part of one, that no message can hold.

    `instead` says what to use.
    """
    return exhausted(f"{what} has {num_bytes} bytes, a message at most {max_bytes}" + (instead and f"; {instead}"))


def deadline_exceeded(text: str = "the call's deadline passed before the generation ended") -> ServiceError:
    """Returns DEADLINE_EXCEEDED."""
    return ServiceError(grpc.StatusCode.DEADLINE_EXCEEDED, text)


def cancelled() -> ServiceError:
    """Returns CANCELLED, for calls whose answer is only useful whole."""
    return ServiceError(grpc.StatusCode.CANCELLED, "the generation was cancelled")


def internal(error_id: str) -> ServiceError:
    """Returns INTERNAL with an id that the server's log carries too.

    The exception's own text stays out of it.
    """
    info = error_details_pb2.ErrorInfo(reason="INTERNAL", domain=_ERROR_DOMAIN, metadata={"error_id": error_id})
    return ServiceError(
        grpc.StatusCode.INTERNAL, f"internal error {error_id}; the server's log says more under this id", [info]
    )


def from_status(status: status_pb2.Status) -> ServiceError:
    """Returns the engine's refusal as it is meant for the caller."""
    code = _CODES.get(status.code, grpc.StatusCode.INTERNAL)
    error = ServiceError(code, status.message)
    error.details = tuple(map(_unpacked, status.details))
    return error


def _unpacked(detail: any_pb2.Any) -> message.Message:
    """Returns the broken rules of a refusal as such, for who names them in the caller's words."""
    bad_request = error_details_pb2.BadRequest()
    return bad_request if detail.Unpack(bad_request) else detail


def renamed(error: ServiceError, names: Mapping[str, str]) -> ServiceError:
    """Returns an error of the public API's validation in the caller's own words.

    Args:
        error: as raised for a GenerationSpec.
        names: what the caller calls a field, by its path's beginning; the longest that fits counts.
    """
    for detail in error.details:
        if isinstance(detail, error_details_pb2.BadRequest):
            violations = [Violation(_rename(v.field, names), v.description) for v in detail.field_violations]
            return invalid(violations)
    return error


def to_status(error: ServiceError) -> status_pb2.Status:
    """Returns the error as google.rpc.Status of at most 1 KiB.

    Violations and details that do not fit are left out, last first.
    """
    status = status_pb2.Status(code=error.code.value[0], message=error.message)
    for detail in error.details:
        packed = any_pb2.Any()
        if isinstance(detail, any_pb2.Any):
            packed.CopyFrom(detail)
        else:
            packed.Pack(_fitting(detail, _MAX_STATUS_BYTES - status.ByteSize()))
        if status.ByteSize() + packed.ByteSize() < _MAX_STATUS_BYTES:
            status.details.append(packed)
    return status


def trailing_metadata(error: ServiceError) -> tuple[tuple[str, bytes], ...]:
    """Returns the metadata that carries the error's details, by the convention of grpc-status."""
    return ((STATUS_DETAILS_KEY, to_status(error).SerializeToString()),)


def _fitting(detail: message.Message, room_bytes: int) -> message.Message:
    """Returns the detail, a BadRequest with as many violations as fit."""
    envelope_bytes = 80
    if isinstance(detail, error_details_pb2.BadRequest):
        while len(detail.field_violations) > 1 and detail.ByteSize() > room_bytes - envelope_bytes:
            del detail.field_violations[-1]
    return detail


def _printable(text: str) -> str:
    """Returns the text with line ends, controls and invisible characters escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _retry_info(retry_after_s: float) -> error_details_pb2.RetryInfo:
    delay = duration_pb2.Duration()
    delay.FromNanoseconds(int(retry_after_s * 1e9))
    return error_details_pb2.RetryInfo(retry_delay=delay)


def _rename(field: str, names: Mapping[str, str]) -> str:
    fitting = [path for path in names if field == path or field.startswith((path + ".", path + "["))]
    if not fitting:
        return field
    longest = max(fitting, key=len)
    return names[longest] + field[len(longest) :]
