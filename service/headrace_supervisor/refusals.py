"""The one exception with which an operator's request is refused: a gRPC code and one line.

Owns nothing else; `control_server` turns it into a status, `supervisor` into a refused start.
"""

from __future__ import annotations

import grpc


class Refused(Exception):  # an outcome
    """A model can't be loaded or unloaded as asked. The message names model, rule and limit."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


def invalid(message: str) -> Refused:
    """INVALID_ARGUMENT: the request itself is malformed."""
    return Refused(grpc.StatusCode.INVALID_ARGUMENT, message)


def not_found(message: str) -> Refused:
    """Returns NOT_FOUND: there is no such model."""
    return Refused(grpc.StatusCode.NOT_FOUND, message)


def failed_precondition(message: str) -> Refused:
    """FAILED_PRECONDITION: the model, or how the server was started, must change first."""
    return Refused(grpc.StatusCode.FAILED_PRECONDITION, message)


def exhausted(message: str) -> Refused:
    """RESOURCE_EXHAUSTED: the memory does not suffice."""
    return Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, message)


def unavailable(message: str) -> Refused:
    """UNAVAILABLE: the same request may be granted later."""
    return Refused(grpc.StatusCode.UNAVAILABLE, message)
