"""google.rpc statuses: what the backend says when it says no.

Owns the mapping from refusals to statuses with details (`BadRequest`, `RetryInfo`) and the size of
their text: gRPC carries a status in headers, and too long ones arrive as something else.
"""

from __future__ import annotations

import secrets

import grpc
from google.protobuf import any_pb2, duration_pb2, message
from google.rpc import error_details_pb2, status_pb2

from headrace_backend.engine.errors import RequestRefused, Violation

_MAX_MESSAGE_CHARACTERS = 1024
_MAX_VIOLATIONS = 16
_MAX_DESCRIPTION_CHARACTERS = 256
_NS_PER_S = 1_000_000_000

# When a caller may come back after a restart of something.
RESTART_RETRY_NS = 1 * _NS_PER_S


def _packed(detail: message.Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed


def _bad_request(violations: tuple[Violation, ...]) -> any_pb2.Any:
    detail = error_details_pb2.BadRequest()
    for field, description in violations[:_MAX_VIOLATIONS]:
        detail.field_violations.add(
            field=field[:_MAX_DESCRIPTION_CHARACTERS], description=description[:_MAX_DESCRIPTION_CHARACTERS]
        )
    return _packed(detail)


def _retry_info(delay_ns: int) -> any_pb2.Any:
    delay = duration_pb2.Duration(seconds=delay_ns // _NS_PER_S, nanos=delay_ns % _NS_PER_S)
    return _packed(error_details_pb2.RetryInfo(retry_delay=delay))


def make_status(
    code: grpc.StatusCode, text: str, violations: tuple[Violation, ...] = (), retry_after_ns: int | None = None
) -> status_pb2.Status:
    """A status with its details, cut to what gRPC carries safely."""
    status = status_pb2.Status(code=code.value[0], message=text[:_MAX_MESSAGE_CHARACTERS])
    if violations:
        status.details.append(_bad_request(violations))
    if retry_after_ns is not None:
        status.details.append(_retry_info(max(retry_after_ns, 0)))
    return status


def refusal_status(refused: RequestRefused) -> status_pb2.Status:
    """The status of a refusal by the engine or by the checks at the socket."""
    code = grpc.StatusCode[refused.code.value]
    return make_status(code, refused.message, refused.violations, refused.retry_after_ns)


def new_error_id() -> str:
    """Makes an id that joins an INTERNAL status with the log line that says more."""
    return secrets.token_hex(6)


def internal_status(error_id: str) -> status_pb2.Status:
    """INTERNAL without anything of the cause; the log has it under the id."""
    return make_status(grpc.StatusCode.INTERNAL, f"internal error {error_id}")


class StreamEnded(Exception):  # how a stream ends, not always an error
    """Ends a stream with a status."""

    def __init__(self, status: status_pb2.Status) -> None:
        """Keeps the status."""
        super().__init__(status.message)
        self.status = status


def ended(code: grpc.StatusCode, text: str, retry_after_ns: int | None = None) -> StreamEnded:
    """A StreamEnded from its parts."""
    return StreamEnded(make_status(code, text, retry_after_ns=retry_after_ns))


def status_code(status: status_pb2.Status) -> grpc.StatusCode:
    """The gRPC code of a status."""
    return next(code for code in grpc.StatusCode if code.value[0] == status.code)
