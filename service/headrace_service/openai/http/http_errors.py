"""Errors of the service in OpenAI's form: status, headers, JSON.

Owns the one table from gRPC's codes to HTTP's, which is google.rpc.Code's own but for two rows: a
field that is not supported is the request's mistake (400), not the server's (501, which clients
send again), and what no waiting helps is too large (413) rather than too much (429). A compressed
body (415) has no code of gRPC's.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeVar

import grpc
import msgspec
from google.protobuf import any_pb2, message
from google.rpc import error_details_pb2

from headrace_service.errors import ServiceError, echo

Code = grpc.StatusCode
Detail = TypeVar("Detail", bound=message.Message)
_MIN_RETRY_S = 1


class Meaning(NamedTuple):
    """What a code is for a caller of HTTP: the status, and the error's type and code."""

    status: int
    type: str
    code: str | None


_INVALID = "invalid_request_error"
_SERVER = "server_error"
_MEANINGS = {
    Code.CANCELLED: Meaning(499, _INVALID, "cancelled"),
    Code.INVALID_ARGUMENT: Meaning(400, _INVALID, None),
    Code.FAILED_PRECONDITION: Meaning(400, _INVALID, None),
    Code.OUT_OF_RANGE: Meaning(400, _INVALID, None),
    Code.UNIMPLEMENTED: Meaning(400, _INVALID, "unsupported_parameter"),
    Code.UNAUTHENTICATED: Meaning(401, _INVALID, "invalid_api_key"),
    Code.PERMISSION_DENIED: Meaning(403, "permission_error", "permission_denied"),
    Code.NOT_FOUND: Meaning(404, _INVALID, "not_found"),
    Code.ALREADY_EXISTS: Meaning(409, _INVALID, None),
    Code.RESOURCE_EXHAUSTED: Meaning(429, "rate_limit_error", "rate_limit_exceeded"),
    Code.DEADLINE_EXCEEDED: Meaning(504, _SERVER, "deadline_exceeded"),
    Code.UNAVAILABLE: Meaning(503, _SERVER, "unavailable"),
}
# The same for every cause, in the words of this wire.
_KEY_NEEDED = "a valid API key is needed, as the header authorization: Bearer KEY"
_TOO_LARGE = Meaning(413, _INVALID, "too_large")
_COMPRESSED = Meaning(415, _INVALID, "unsupported_media_type")
_INTERNAL = Meaning(500, _SERVER, "internal_error")
_JSON = msgspec.json.Encoder()


class CompressedBody(ServiceError):
    """A request whose body has a content coding, such as gzip, which this server does not undo."""

    def __init__(self, coding: str) -> None:
        super().__init__(
            Code.UNIMPLEMENTED, f"content-encoding: {echo(coding)} is not supported; send the body as it is"
        )


def meaning_of(error: ServiceError) -> Meaning:
    """Returns what an error is for a caller of HTTP."""
    if isinstance(error, CompressedBody):
        return _COMPRESSED
    if error.code is Code.RESOURCE_EXHAUSTED and _detail(error, error_details_pb2.RetryInfo) is None:
        return _TOO_LARGE
    return _MEANINGS.get(error.code, _INTERNAL)


def body_of(error: ServiceError, code: str | None = None) -> bytes:
    """Returns an error as OpenAI's JSON; several broken rules are one message.

    Args:
        error: what went wrong.
        code: what programs read; None: as the error's own code has it.
    """
    meaning = meaning_of(error)
    broken = _detail(error, error_details_pb2.BadRequest)
    violations = broken.field_violations if broken is not None else ()
    text = (
        _KEY_NEEDED
        if error.code is Code.UNAUTHENTICATED
        else "; ".join(f"{violation.field}: {violation.description}" for violation in violations) or error.message
    )
    param = violations[0].field if violations else _field_of(error)
    if code is None:
        code = "model_not_found" if error.code is Code.NOT_FOUND and param == "model" else meaning.code
    return _JSON.encode({"error": {"message": text, "type": meaning.type, "param": param, "code": code}})


def headers_of(error: ServiceError) -> list[tuple[bytes, bytes]]:
    """Returns the headers that say when to try again, or what is needed to."""
    if error.code is Code.UNAUTHENTICATED:
        return [(b"www-authenticate", b"Bearer")]
    retry = _detail(error, error_details_pb2.RetryInfo)
    if retry is None:
        return []
    delay_s = retry.retry_delay.ToNanoseconds() / 1e9
    return [
        (b"retry-after", str(max(math.ceil(delay_s), _MIN_RETRY_S)).encode()),
        (b"retry-after-ms", str(math.ceil(delay_s * 1e3)).encode()),
    ]


def _field_of(error: ServiceError) -> str | None:
    """Returns the field that the message of a refusal without details begins with."""
    field, colon, _ = error.message.partition(": ")
    is_field = colon and " " not in field
    return field if is_field and error.code in (Code.UNIMPLEMENTED, Code.NOT_FOUND) else None


def _detail(error: ServiceError, kind: type[Detail]) -> Detail | None:
    for detail in error.details:
        if isinstance(detail, kind):
            return detail
        if isinstance(detail, any_pb2.Any):
            unpacked = kind()
            if detail.Unpack(unpacked):
                return unpacked
    return None
