"""What an exception means for the caller of the call in which it was raised.

Owns the catch-all: a mistake of ours is logged where it happened, and its caller gets INTERNAL with
an error id that the log names. What ends the call is `rpc_boundary`, or the writer of a call that
many generations share.
"""

from __future__ import annotations

import asyncio
import secrets

import grpc
import structlog

from headrace_service import errors, logs
from headrace_service.calls.call import Connection

_log = structlog.get_logger("headrace.service")


def failure_of(context: Connection, error: Exception) -> errors.ServiceError:
    """Returns what a call ends with for its caller; a mistake of ours is logged here."""
    return error if isinstance(error, errors.ServiceError) else _unexpected(context, error)


def _unexpected(context: Connection, error: Exception) -> errors.ServiceError:
    """Returns the error for a caller who can do nothing about it.

    Writing to a call that is gone is nobody's mistake.
    """
    if (
        isinstance(error, (grpc.aio.BaseError, asyncio.InvalidStateError))
        or type(error).__name__ == "ExecuteBatchError"
        or context.done()
    ):
        return errors.cancelled()
    return unexpected(error)


def unexpected(error: Exception) -> errors.ServiceError:
    """Logs a mistake of ours where it happened, and returns the INTERNAL that callers see of it."""
    error_id = secrets.token_hex(8)
    _log.error("rpc.internal_error", error_id=error_id, exception_type=type(error).__name__, places=logs.places(error))
    return errors.internal(error_id)
