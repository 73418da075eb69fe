"""Between grpc and the handlers: every call ends with one status that names no internals.

Owns parsing before a handler runs, the turning of exceptions into statuses, and the catch-all that
answers INTERNAL with an error id and logs where it happened. Handlers take a parsed request and a
`Call`, and raise `ServiceError`. Cancellation passes through untouched.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import grpc
import structlog
from google.protobuf import message

from headrace_service import errors, logs
from headrace_service.auth import caller
from headrace_service.auth.caller import Caller
from headrace_service.messages import parsing
from headrace_service.tracing import call_trace
from headrace_service.tracing import context as trace_context
from headrace_service.tracing.call_trace import CallTrace
from headrace_service.tracing.context import CallerContext

Request = TypeVar("Request", bound=message.Message)
Response = TypeVar("Response", bound=message.Message)
Context = grpc.aio.ServicerContext[Any, Any]

_log = structlog.get_logger("headrace.service")
_NO_DEADLINE_S = 10 * 365 * 86_400.0


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """What a handler may know of its call.

    Attributes:
        context: grpc's own.
        arrival_ns: CLOCK_MONOTONIC when the call reached this process.
        deadline_ns: CLOCK_MONOTONIC of the caller's deadline; None if it set none.
        caller: who calls, and what it may do.
        trace: where it stands in its caller's trace; None where there is no telemetry.
        own_context: the trace context that one request of it brought; None: that of the call holds.
    """

    context: Context
    arrival_ns: int
    deadline_ns: int | None
    caller: Caller
    trace: CallTrace | None
    own_context: CallerContext | None = None

    @property
    def tenant(self) -> str:
        """On whose behalf; requests are visible to their tenant only."""
        return self.caller.tenant

    @staticmethod
    def of(context: Context) -> Call:
        """Returns the call behind a grpc context."""
        now_ns = time.monotonic_ns()
        remaining_s = context.time_remaining()
        bounded = remaining_s is not None and remaining_s < _NO_DEADLINE_S
        deadline_ns = now_ns + int(remaining_s * 1e9) if bounded else None
        return Call(context, now_ns, deadline_ns, caller.current(), call_trace.current())

    def of_request(self, arrival_ns: int, traceparent: str, tracestate: str) -> Call:
        """Returns one request of a call that carries many; a malformed context is as none."""
        own_context = trace_context.parse(traceparent, tracestate) if traceparent and self.trace is not None else None
        return dataclasses.replace(self, arrival_ns=arrival_ns, own_context=own_context)

    def check_deadline(self) -> None:
        """Raises DEADLINE_EXCEEDED if the caller waits no more."""
        if self.deadline_ns is not None and time.monotonic_ns() >= self.deadline_ns:
            raise errors.deadline_exceeded("the call's deadline had passed on arrival")


def unary(
    request_type: type[Request], response_type: type[Response], handler: Callable[[Request, Call], Awaitable[Response]]
) -> grpc.RpcMethodHandler[Any, Any]:
    """Returns the method handler of an RPC with one answer."""
    return _unary(request_type, handler, response_type.SerializeToString)


def unary_encoded(
    request_type: type[Request], handler: Callable[[Request, Call], Awaitable[bytes]]
) -> grpc.RpcMethodHandler[Any, Any]:
    """Returns the method handler of an RPC with one answer, which its handler gives serialized."""
    return _unary(request_type, handler, None)


def _unary(
    request_type: type[Request], handler: Callable[[Request, Call], Awaitable[Any]], serializer: Any
) -> grpc.RpcMethodHandler[Any, Any]:
    async def answer(request: parsing.Unparsed[Request], context: Context) -> Any:
        try:
            call = Call.of(context)
            with call.caller.open_call():
                return await handler(request.parse(), call)
        except Exception as error:
            await _abort(context, error)
            raise AssertionError("abort always raises") from error

    return grpc.unary_unary_rpc_method_handler(
        answer, request_deserializer=parsing.deserializer(request_type), response_serializer=serializer
    )


def streaming(
    request_type: type[Request], handler: Callable[[Request, Call], Awaitable[None]]
) -> grpc.RpcMethodHandler[Any, Any]:
    """Returns the method handler of an RPC that streams; its handler writes serialized messages to
    `call.context`.
    """

    async def stream(request: parsing.Unparsed[Request], context: Context) -> None:
        try:
            call = Call.of(context)
            with call.caller.open_call():
                await handler(request.parse(), call)
        except Exception as error:
            await _abort(context, error)

    return grpc.unary_stream_rpc_method_handler(
        stream, request_deserializer=parsing.deserializer(request_type), response_serializer=None
    )


def bidirectional(
    request_type: type[Request],
    handler: Callable[[AsyncIterator[parsing.Unparsed[Request]], Call], Awaitable[None]],
) -> grpc.RpcMethodHandler[Any, Any]:
    """Returns the method handler of an RPC that streams both ways; its handler parses each request
    and writes serialized messages.
    """

    async def stream(requests: AsyncIterator[parsing.Unparsed[Request]], context: Context) -> None:
        try:
            call = Call.of(context)
            with call.caller.open_call():
                await handler(requests, call)
        except Exception as error:
            await _abort(context, error)

    return grpc.stream_stream_rpc_method_handler(
        stream, request_deserializer=parsing.deserializer(request_type), response_serializer=None
    )


async def _abort(context: Context, error: Exception) -> None:
    """Ends the call with the status that the error stands for."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    failure = failure_of(context, error)
    await context.abort(failure.code, failure.message, trailing_metadata=errors.trailing_metadata(failure))


def failure_of(context: Context, error: Exception) -> errors.ServiceError:
    """Returns what a call ends with for its caller; a mistake of ours is logged here."""
    return error if isinstance(error, errors.ServiceError) else _unexpected(context, error)


def _unexpected(context: Context, error: Exception) -> errors.ServiceError:
    """Returns the error for a caller who can do nothing about it; writing to a call that is gone is
    nobody's mistake.
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
